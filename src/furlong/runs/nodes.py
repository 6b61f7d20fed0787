"""A run whose clients are on other machines: what nodes are told, and what they make of it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from furlong.core.context import Setup
from furlong.core.federation import Federation
from furlong.core.method import AnyMethod
from furlong.core.payload import Weights
from furlong.data.images import ImageSet
from furlong.data.partition import Partition
from furlong.errors import FurlongError
from furlong.runs.config import Config, all_facts
from furlong.runs.datasets import SITES, load_data
from furlong.runs.parties import augmentation, parties, setup_of
from furlong.runs.split import fingerprint, split_data

# of data = sites: what all sites have in common; which images they are is their own affair
SHARED = ("name", "image_size", "augment", "window", "channels", "slices")


@dataclass(frozen=True)
class Members:
    """Who takes part in a run whose nodes bring their own images."""

    sizes: dict[int, int]  # images per client
    channels: int

    def images(self, size: int, classes: int = 0) -> ImageSet:
        """What the server holds of them: nothing, in the shape of squares of ``size``."""
        none = torch.empty(0, self.channels, size, size, dtype=torch.uint8)
        return ImageSet(none, classes=tuple(map(str, range(classes))), name=SITES)

    def split(self, me: int = -1) -> Partition:
        """Rows for everybody, by number only but for client ``me``, whose images are here."""
        parts = {k: torch.zeros(1, dtype=torch.int64).expand(n) for k, n in self.sizes.items()}
        if me in parts:
            parts[me] = torch.arange(self.sizes[me])
        return Partition(tuple(parts[k] for k in sorted(parts)), SITES, sum(self.sizes.values()))


def own_size(settings: Config) -> int:
    """The side of the square that all nodes bring their images to."""
    if settings.data.image_size is None:
        raise FurlongError(
            "data.image_size must be given with data = sites: all nodes bring their images to it."
        )
    return settings.data.image_size


def told(settings: Config, *, paths: bool = False) -> dict[str, Any]:
    """What nodes are told of a configuration: no path, no address, nothing of evaluation.

    ``paths``: where a named set lies too, for a simulation, whose nodes are this program.
    """
    tree = asdict(settings)
    tree["data"]["augment"] = augmentation(settings, settings.make_method())
    names = [name for name, fact in all_facts().items() if fact.told]
    if settings.data.name == SITES:  # nobody else has a say in which images a site has
        own = tuple(f"data.{key}" for key in SHARED)
        names = [name for name in names if not name.startswith("data.") or name in own]
    names += ["data.root", "data.cache"] if paths else []
    chosen: dict[str, Any] = {}
    for section, key in (name.split(".") for name in names):
        chosen.setdefault(section, {})[key] = tree[section][key]
    return {**chosen, "method": tree["method"]}


@dataclass(frozen=True)
class Participant:
    """A run as one of its clients knows it."""

    method: AnyMethod
    federation: Federation
    setup: Setup
    mark: str  # a digest of images and split, to be compared with the server's

    @cached_property
    def pixels(self) -> str:
        """A digest of all images that are here; it never leaves."""
        return hashlib.sha256(self.federation.images.pixels.contiguous().numpy().data).hexdigest()


def participate(
    settings: Config,
    own: ImageSet | None,
    sizes: dict[int, int],
    me: int = -1,
    fixed: Weights | None = None,
    secret: bytes | None = None,
) -> Participant:
    """A client's view: of ``own`` images, or of the part that the run's partition gives it.

    ``sizes``: of all clients, if they bring their own images; ``me`` is this one's number.
    ``fixed``: the encoder's tensors that no exchange carries; without them only sizes are right.
    ``secret``: what this client makes the noise of a privacy budget from.
    """
    if own is None:
        train = load_data(settings)[0]
        split = split_data(settings, train)
    else:
        train, split = own, Members(sizes, own.channels).split(me)
    method, federation = parties(settings, train, split, secret)
    setup = setup_of(settings, method, federation, fixed)
    return Participant(method, federation, setup, fingerprint(train, split))
