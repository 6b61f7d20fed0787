"""Central semi-supervised fine-tuning: few labels, all in one place (FCL, FedU).

With labels that stay on the clients it is another protocol, ``furlong.runs.finetune``: FedCA's
numbers with few labels come from there and must not be put beside these.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation.protocol import Images
from furlong.evaluation.tuning import TUNINGS, FineTuned, Tuning
from furlong.settings import setting


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


@dataclass(frozen=True)
class Semi(FineTuned):
    """Fine-tuning with ⌈labels·N_c⌉ images of every class c; the seed decides which."""

    kind: ClassVar[str] = "semi"
    recipes: ClassVar[Collection[str]] = ("fcl", *TUNINGS)

    labels: float = setting(1.0, "The share of the labels that is used.", above=0, at_most=1)

    def plan(self) -> tuple[str, Tuning]:
        """``fcl`` stands for SwAV's rates for 1 % or for 10 %."""
        if self.recipe != "fcl":
            return super().plan()
        return replace(self, recipe="fcl-1" if self.labels < 0.05 else "fcl-10").plan()

    def check(self, images: Images) -> None:
        """There must be labels enough."""
        super().check(images)
        self.labelled(images)

    def labelled(self, images: Images) -> ImageSet:
        """The images that are used with their labels."""
        train, share = images.labelled()[0], self.labels
        assert train.labels is not None
        rows = stratified(train.labels, share, images.seed)
        if len(rows) > 2 * share * len(train):  # then it is no longer what it is called
            classes = len(train.labels.bincount().nonzero())
            raise FurlongError(
                f"{share:.1%} of the {len(train)} labels of {train.name} is less than one for each "
                f"of its {classes} classes. Take at least {len(rows) / len(train):.1%}, or more "
                "images."
            )
        return train.subset(rows)
