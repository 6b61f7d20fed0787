"""Central semi-supervised fine-tuning: few labels, all in one place (FCL, FedU).

With labels that stay on the clients it is another protocol, ``furlong.runs.finetune``: FedCA's
numbers with few labels come from there and must not be put beside these.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from furlong.data.images import ImageSet
from furlong.evaluation.protocol import Images, few
from furlong.evaluation.tuning import TUNINGS, FineTuned, Tuning
from furlong.settings import setting


@dataclass(frozen=True)
class Semi(FineTuned):
    """Fine-tuning with ⌈labels·N_c⌉ images of every class c; the seed decides which."""

    kind: ClassVar[str] = "semi"
    needs_share: ClassVar[bool] = True
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
        train = images.labelled()[0]
        return train.subset(few(train, self.labels, images.seed))
