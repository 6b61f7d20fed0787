"""Which runs a site takes part in: what a server says is checked before anything is done."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import furlong
from furlong.engines.remote import PROTOCOL
from furlong.errors import FurlongError
from furlong.runs.config import Config, all_facts, from_tree, without_none
from furlong.runs.datasets import SITES
from furlong.runs.nodes import told

_RUN = re.compile(r"[0-9a-f]{16,64}")
MOST = {  # by setting: what a node does for a server that its operator did not agree to
    "train.epochs": 1_000,
    "train.batch_size": 16_384,
    "train.rounds": 1_000_000,
    "data.image_size": 1_024,
    "data.images": 10_000_000,
    "data.clients": 100_000,
}
LARGEST = 10_000_000  # any other number
WIDEST = 16_384  # a number in the name of an encoder or a head: mlp:256:128
MOST_IMAGES = 10_000_000  # of one site, which counts for as many in the mean
MOST_SITES = 10_000


class Refusal(FurlongError):
    """A question that this site does not answer, and why."""


def require_same_program(header: Mapping[str, Any]) -> None:
    """Refuse a server that speaks otherwise, and what is not the name of a run."""
    theirs, mine = header.get("furlong"), furlong.__version__
    if header.get("protocol") != PROTOCOL or theirs != mine:
        raise Refusal(
            f"the server runs furlong {str(theirs)[:20]} (protocol "
            f"{str(header.get('protocol'))[:20]}), this node {mine} (protocol {PROTOCOL}). "
            "Install the same version on both."
        )
    if not _RUN.fullmatch(str(header.get("run"))):
        raise Refusal(f"{str(header.get('run'))[:80]!r} is not the name of a run")


def settings_of(
    header: Mapping[str, Any], *, agree: Config | None, code: bool, own: bool, device: str
) -> Config:
    """The run's configuration, if the site takes part in such a run.

    ``agree``: the only configuration that it takes part in; ``code``: whether the run may name
    modules and files of this machine; ``own``: whether the site brings its own images.
    """
    tree = header.get("config")
    if not isinstance(tree, dict):
        raise Refusal("no configuration")
    tree = without_none(tree)
    if not code:
        _require_harmless(tree)
    try:
        settings = from_tree(tree, {"run.device": device}, "the run's configuration")
    except FurlongError as error:
        raise Refusal(str(error)) from None
    if agree is not None:
        _require_agreed(settings, agree)
    else:
        _require_bounded(settings)
    _require_sizes(header.get("sizes"))
    sites = settings.data.name == SITES
    if sites != own:
        raise Refusal(
            f"this node holds {'its own images' if own else 'no images of its own'}, but "
            f"the run's data is {settings.data.name!r}"
            + ("" if sites else ": it must be 'sites' for nodes started with --data")
        )
    return settings


def _require_harmless(tree: Mapping[str, Any]) -> None:
    """Refuse settings that a server has no business with, and names of code and files."""
    for setting, fact in all_facts().items():
        section, _, key = setting.partition(".")
        if not fact.told and key in (tree.get(section) or {}):
            raise Refusal(f"a server may not say {setting}")
    for section, key in (("method", "name"), ("model", "encoder"), ("data", "name")):
        name = str(tree.get(section, {}).get(key))
        if ":" in name:
            raise Refusal(
                f"the run names {name[:80]!r}: a file, a folder or code of this machine. A node "
                "takes none of that from a server unless it is started with --trust-server."
            )


def _require_bounded(settings: Config) -> None:
    """Refuse what would keep this machine busy for ever, or fill its memory."""
    for section, table in told(settings).items():
        for key, value in table.items():
            name = f"{section}.{key}"
            most: float = MOST.get(name, LARGEST)
            if name == "model.encoder" or key.endswith("head"):
                numbers, most = [float(n) for n in re.findall(r"\d+", str(value))], WIDEST
            elif type(value) in (int, float) and name != "run.seed":  # which only begins a stream
                numbers = [value]
            else:
                continue
            if any(most < n < math.inf for n in numbers):  # some settings may be infinite
                raise Refusal(
                    f"{name} is {str(value)[:80]}, and a node without --agree goes up to {most:,}"
                )


def _require_sizes(sizes: Any) -> None:
    """Refuse numbers of images that no site can have: rows are counted in memory."""
    if sizes is None:
        return
    counts = list(sizes.values()) if isinstance(sizes, dict) else None
    if counts is None or len(counts) > MOST_SITES:
        raise Refusal(f"the sizes of at most {MOST_SITES:,} sites are taken")
    if not all(type(n) is int and 0 <= n <= MOST_IMAGES for n in counts):
        raise Refusal(f"a site has at most {MOST_IMAGES:,} images")


def _require_agreed(settings: Config, agree: Config) -> None:
    theirs, mine = (
        {f"{section}.{key}": value for section in tree for key, value in tree[section].items()}
        for tree in (told(settings), told(agree))
    )
    free = {name for name, fact in all_facts().items() if not fact.agree}
    if agree.privacy.noise_at == "clients":  # the more must answer, the less noise each one adds
        free -= {"train.min_clients"}
    other = [key for key in mine if mine[key] != theirs.get(key) and key not in free]
    if other:
        lines = (f"{key} is {theirs.get(key)!r}, not {mine[key]!r}" for key in other[:5])
        raise Refusal(f"not the configuration that this node agrees to: {'; '.join(lines)}")
