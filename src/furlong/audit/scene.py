"""The images of an audit: members, others, and what the attacker has of his own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.audit.measures import FEWEST, matched, psnr
from furlong.data.augment import Augmentation, unit
from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.seeding import shuffled

DECOYS = 63  # images that a recovered one is told from
SHOWN = 8  # pictures of each kind

Tell = Callable[[str, int, int], None]
"""Called with what is being done, what is done of it and how much there is."""


@dataclass(frozen=True)
class Scene:
    """Who is compared with whom, and how an encoder sees images."""

    train: ImageSet
    test: ImageSet
    recipe: Augmentation
    own: Tensor  # the attacker's images, uint8 M×C×H×W
    free: Tensor  # rows of test that are others
    most: int  # members, and as many others
    seed: int

    def chosen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Members among the training images ``rows``, and others: uint8 n×C×H×W each."""
        unique = torch.tensor(sorted({*rows.tolist()}))  # a weight repeats a row
        sides = matched(self.train, unique, self.test, self.free, self.most, self.seed)
        if len(sides[0]) < FEWEST:
            raise FurlongError(
                f"only {len(sides[0])} members have counterparts among the test images (of the "
                f"same class and site, where these are known); an audit needs {FEWEST}."
            )
        return self.train.pixels[sides[0]], self.test.pixels[sides[1]]

    def shown(self, truth: Tensor, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The first few of images in [0, 1] before and after, as bytes."""
        before, after = ((x[:SHOWN] * 255).round().to(torch.uint8) for x in (truth, images))
        return list(zip(before, after, strict=True))

    def blank(self, truth: Tensor) -> float:
        """Decibels of the guess of somebody who knows nothing: the mean of his own images."""
        guess = unit(self.recipe.plain(self.own), self.recipe).mean(dim=0, keepdim=True)
        return float(psnr(guess.expand_as(truth), truth).mean())


def scene(
    train: ImageSet, test: ImageSet | None, recipe: Augmentation, most: int, seed: int
) -> Scene:
    """With a third of the test images for the attacker."""
    if test is None or len(test) < 3 * FEWEST:
        raise FurlongError(
            f"{train.name} has {0 if test is None else len(test)} images that the run has not "
            f"seen; an audit needs {3 * FEWEST}: members are compared with them. Train with "
            "labelled test images, or hold some out (--data.holdout-by image)."
        )
    order = shuffled(len(test), seed, "audit")
    cut = min(2000, len(test) // 3)
    own, free = test.pixels[order[:cut]], order[cut:].sort()[0]
    return Scene(train, test, recipe, own, free, most, seed)
