"""What all protocols have in common: a word that asks for one, its settings, and its numbers.

A protocol is asked for by a word, with options behind colons: ``knn``, ``semi-10:epochs=5``,
``transfer:fashion_mnist:recipe=fedca``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from furlong.data.augment import Recipe
from furlong.data.images import ImageSet
from furlong.errors import FurlongError, nearest
from furlong.evaluation.features import features
from furlong.seeding import shuffled

O = TypeVar("O")  # noqa: E741 - a protocol's options
Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""
Build = Callable[[type[Any], Mapping[str, Any], str], Any]
"""Makes options of a class from words; the last argument says whose options they are."""


def silent(done: int, total: int, /) -> None:
    """A :data:`Progress` that nobody watches."""


@dataclass(frozen=True)
class Images:
    """What encoders are measured on. ``augment`` is what they were trained with."""

    train: ImageSet
    test: ImageSet | None
    augment: Recipe
    seed: int

    @property
    def has_labels(self) -> bool:
        """Whether accuracy can be measured."""
        return self.test is not None and self.test.labels is not None

    def labelled(self) -> tuple[ImageSet, ImageSet]:
        """Training and test images, which must have labels."""
        if self.test is None or self.test.labels is None or self.train.labels is None:
            raise FurlongError(
                f"{self.train.name} has no labels: accuracy cannot be measured. The protocol "
                "'quality' needs none."
            )
        return self.train, self.test

    @property
    def classes(self) -> int:
        """The number of classes of both splits."""
        return max(images.n_classes for images in self.labelled())


class Encoded:
    """An encoder with images; their features are computed once, when they are asked for.

    ``limit``: features of at most so many images of either split.
    """

    def __init__(self, encoder: nn.Module, images: Images, limit: int | None = None) -> None:
        self.encoder, self.images, self._limit = encoder, images, limit

    @property
    def device(self) -> torch.device:
        """Where the encoder computes."""
        return next((p.device for p in self.encoder.parameters()), torch.device("cpu"))

    @cached_property
    def features(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features N×d and labels N of training images, then of test images."""
        found = []
        for images in self.images.labelled():
            assert images.labels is not None
            rows = shuffled(len(images), self.images.seed, "monitor")[: self._limit]
            batches = (images.pixels[part] for part in torch.split(rows, 512))
            found += [features(self.encoder, batches, self.images.augment.plain)]
            found += [images.labels[rows]]
        return found[0], found[1], found[2], found[3]


@dataclass(frozen=True)
class Protocol(ABC, Generic[O]):
    """One way to measure an encoder, as it was asked for."""

    Options: ClassVar[type]
    labels: ClassVar[float | None] = 1.0  # the share that is used; None: the word says it
    recipes: ClassVar[Collection[str]] = ()  # what the option ``recipe`` may be
    other_set: ClassVar[bool] = False  # whether the word names another data set
    with_random: ClassVar[bool] = False  # whether a random start is always measured, too

    text: str  # what its rows are called: as given, without places on this machine
    kind: str
    options: O
    share: float = 1.0  # of the labels
    target: str = ""  # the other data set

    def check(self, images: Images) -> None:
        """Refuse images that cannot be measured on, before anything is trained."""
        images.labelled()

    @abstractmethod
    def settings(self, images: Images, /) -> dict[str, Any]:
        """All that its numbers depend on, written out."""

    @abstractmethod
    def measure(self, encoded: Encoded, progress: Progress = silent, /) -> dict[str, Any]:
        """Numbers of an encoder by name, ``accuracy`` in [0, 1] among them if there are labels."""


Kinds = Mapping[str, type[Protocol[Any]]]


def parse(
    words: str, kinds: Kinds, build: Build, usual: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Protocol[Any]]:
    """Protocols separated by commas; ``usual`` has options by kind for where a word gives none."""
    asked = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
    if not asked:
        raise FurlongError(f"--protocols names none. {nearest('', _examples(kinds))}")
    try:
        return [_parse(word, kinds, build, usual or {}) for word in asked]
    except FurlongError as error:
        cut = re.search("transfer:(folder|parquet):", words) and "unknown" in str(error)
        hint = (
            " A path in --protocols cannot hold ',' or '=': make a link to it without these "
            "(ln -s) and name the link."
        )
        raise FurlongError(f"{error}{hint if cut else ''}") from None


def _parse(
    text: str, kinds: Kinds, build: Build, usual: Mapping[str, Mapping[str, Any]]
) -> Protocol[Any]:
    word, *parts = text.split(":")
    kind, share = _kind(word, text, kinds)
    cls = kinds[kind]
    given = dict(part.split("=", 1) for part in parts if "=" in part)
    target = ":".join(part for part in parts if "=" not in part)
    if cls.other_set != bool(target):
        what = "needs a data set: transfer:NAME" if cls.other_set else "takes no data set"
        raise FurlongError(f"protocol {text!r} {what}.")
    try:
        options = build(cls.Options, {**usual.get(kind, {}), **given}, word)
    except FurlongError as error:
        raise FurlongError(f"protocol {text!r}: {str(error).removeprefix('options: ')}") from None
    recipe = getattr(options, "recipe", None)
    if recipe is not None and recipe not in cls.recipes:
        raise FurlongError(f"protocol {text!r}: recipe {recipe!r}. {nearest(recipe, cls.recipes)}")
    named = ":".join(part for part in (word, *parts) if not part.startswith("root="))
    return cls(named, kind, options, share, target)


def _kind(word: str, text: str, kinds: Kinds) -> tuple[str, float]:
    """The kind of protocol, and the share of the labels, which may stand behind a dash."""
    known = kinds.get(word)
    if known is not None and known.labels is not None:
        return word, known.labels
    kind, _, percent = word.partition("-")
    if kind not in kinds or kinds[kind].labels is not None:
        raise FurlongError(f"unknown protocol {text!r}. {nearest(word, _examples(kinds))}")
    try:
        share = float(percent) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise FurlongError(
            f"protocol {text!r}: say how many percent of the labels, e.g. {kind}-10."
        )
    return kind, share


def _examples(kinds: Kinds) -> list[str]:
    """A word of every kind."""
    return [
        f"{kind}-10" if cls.labels is None else f"{kind}:NAME" if cls.other_set else kind
        for kind, cls in kinds.items()
    ]
