"""What all protocols have in common: a word that asks for one, its settings, and its numbers.

A protocol is asked for by a word, with options behind colons: ``knn``, ``semi-10:epochs=5``,
``transfer:fashion_mnist:recipe=fedca``.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from furlong.data.augment import Recipe
from furlong.data.images import ImageSet
from furlong.errors import FurlongError, nearest
from furlong.evaluation.features import features
from furlong.seeding import shuffled

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""
Build = Callable[[type[Any], Mapping[str, Any], str], Any]
"""Makes an instance of a settings class from words; the last argument names it in errors."""


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


def stratified(labels: Tensor, share: float, seed: int) -> Tensor:
    """Ascending rows (int64) of ⌈share·N_c⌉ images of every class c that ``labels`` (N) holds.

    They depend on the labels, the share and the seed only, so every encoder gets the same.
    """
    if not 0 < share <= 1:
        raise FurlongError(f"a share of {share} of the labels: it must be above 0 and at most 1.")
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for each in labels.bincount().nonzero()[:, 0].tolist():
        rows = (labels == each).nonzero()[:, 0]
        # 0.07·100 is a little more than 7 in floating point
        count = math.ceil(share * len(rows) - 1e-9)
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    return torch.cat(chosen).sort()[0]


def few(train: ImageSet, share: float, seed: int) -> Tensor:
    """The :func:`stratified` rows of ``train``; an error if these are far more than ``share``."""
    assert train.labels is not None
    rows = stratified(train.labels, share, seed)
    if len(rows) > 2 * share * len(train):  # then it is no longer what it is called
        classes = len(train.labels.bincount().nonzero())
        raise FurlongError(
            f"{share:.1%} of the {len(train)} labels of {train.name} is less than one for each "
            f"of its {classes} classes. Take at least {len(rows) / len(train):.1%}, or more "
            "images."
        )
    return rows


@dataclass
class Encoded:
    """An encoder with images; their features are computed once, when they are asked for."""

    encoder: nn.Module
    images: Images
    limit: int | None = None  # features of at most so many images of either split

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Which training and which test images are measured, in the order of their features."""
        train, test = (
            shuffled(len(images), self.images.seed, "monitor")[: self.limit]
            for images in self.images.labelled()
        )
        return train, test

    @cached_property
    def features(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features N×d and labels N of training images, then of test images."""
        found = []
        for images, rows in zip(self.images.labelled(), self.rows, strict=True):
            assert images.labels is not None
            batches = (images.pixels[part] for part in torch.split(rows, 512))
            found += [features(self.encoder, batches, self.images.augment.plain)]
            found += [images.labels[rows]]
        return found[0], found[1], found[2], found[3]


@dataclass(frozen=True)
class Protocol(ABC):
    """One way to measure an encoder; its fields are its options, which follow behind colons.

    A field ``labels`` is the share of the labels, which stands in the word (``semi-10``; a word
    without a number means all, unless ``needs_share``); a field ``data`` is another set of images,
    which is named without a key (``transfer:mnist``).
    """

    kind: ClassVar[str]  # the word that asks for it
    recipes: ClassVar[Collection[str]] = ()  # what the option ``recipe`` may be
    with_random: ClassVar[bool] = False  # whether a random start is always measured, too
    needs_share: ClassVar[bool] = False  # whether the word must say how many of the labels

    labels = 1.0
    data = ""

    def check(self, images: Images) -> None:
        """Refuse images that cannot be measured on, before anything is trained."""
        images.labelled()

    def settings(self, _: Images, /) -> dict[str, Any]:
        """All that its numbers depend on, written out."""
        return {name: value for name, value in asdict(self).items() if name not in IN_WORD}

    @abstractmethod
    def measure(self, encoded: Encoded, progress: Progress = silent, /) -> dict[str, Any]:
        """Numbers of an encoder by name, ``accuracy`` in [0, 1] among them if there are labels.

        A protocol that has class scores of test images adds what :func:`metrics.grade` finds.
        """


IN_WORD = ("labels", "data")  # fields that are given without a key


def parse(
    words: str,
    kinds: Iterable[type[Protocol]],
    build: Build,
    usual: Mapping[str, Mapping[str, Any]],
) -> dict[str, Protocol]:
    """Protocols separated by commas, by what their rows are called.

    ``usual`` has options by kind for where a word gives none.
    """
    known = {cls.kind: cls for cls in kinds}
    asked = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
    if not asked:
        raise FurlongError(f"--protocols names none. {nearest('', _examples(known))}")
    try:
        return {
            # without places on this machine
            ":".join(part for part in word.split(":") if not part.startswith("root=")): _parse(
                word, known, build, usual
            )
            for word in asked
        }
    except FurlongError as error:
        cut = re.search("transfer:(folder|parquet|manifest):", words) and "unknown" in str(error)
        hint = (
            " A path in --protocols cannot hold ',' or '=': make a link to it without these "
            "(ln -s) and name the link."
        )
        raise FurlongError(f"{error}{hint if cut else ''}") from None


def _parse(
    text: str,
    kinds: Mapping[str, type[Protocol]],
    build: Build,
    usual: Mapping[str, Mapping[str, Any]],
) -> Protocol:
    word, *parts = text.split(":")
    cls, in_word = _asked(word, text, kinds)
    given = dict(part.split("=", 1) for part in parts if "=" in part)
    for name in {*IN_WORD} & {*given}:
        raise FurlongError(f"protocol {text!r}: unknown key {word}.{name}.")
    other = ":".join(part for part in parts if "=" not in part)
    if _has(cls, "data") != bool(other):
        what = "takes no data set" if other else "needs a data set: transfer:NAME"
        raise FurlongError(f"protocol {text!r} {what}.")
    in_word |= {"data": other} if other else {}
    try:
        made: Protocol = build(cls, {**usual.get(cls.kind, {}), **given, **in_word}, word)
    except FurlongError as error:
        raise FurlongError(f"protocol {text!r}: {str(error).removeprefix('options: ')}") from None
    recipe = getattr(made, "recipe", None)
    if recipe is not None and recipe not in cls.recipes:
        raise FurlongError(f"protocol {text!r}: recipe {recipe!r}. {nearest(recipe, cls.recipes)}")
    return made


def _asked(
    word: str, text: str, kinds: Mapping[str, type[Protocol]]
) -> tuple[type[Protocol], dict[str, Any]]:
    """The kind of protocol, and the share of the labels, which may stand behind a dash."""
    if word in kinds and not kinds[word].needs_share:
        return kinds[word], {}
    kind, _, percent = (word, "", "") if word in kinds else word.rpartition("-")
    if kind not in kinds or not _has(kinds[kind], "labels"):
        raise FurlongError(f"unknown protocol {text!r}. {nearest(word, _examples(kinds))}")
    if not re.fullmatch(r"[\d.]+", percent) or not 0 < float(percent) <= 100:
        raise FurlongError(
            f"protocol {text!r}: say how many percent of the labels, e.g. {kind}-10."
        )
    return kinds[kind], {"labels": float(percent) / 100}


def _has(cls: type[Protocol], name: str) -> bool:
    return name in (field.name for field in fields(cls))


def _examples(kinds: Mapping[str, type[Protocol]]) -> list[str]:
    """A word of every kind."""
    return [
        f"{kind}-10" if cls.needs_share else f"{kind}:NAME" if _has(cls, "data") else kind
        for kind, cls in kinds.items()
    ]
