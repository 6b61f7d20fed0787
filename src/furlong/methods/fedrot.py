"""FedRot: predicting rotations on every client, FedAvg of encoder and head.

Gidaris, Singh, Komodakis, "Unsupervised Representation Learning by Predicting Image Rotations",
ICLR 2018; "FedPR" in FedCA's tables.

    L = CE( c(f(x turned by r·90°)), r ),   r ∈ {0, 1, 2, 3}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, Context
from furlong.core.method import USUAL
from furlong.data.augment import rotated
from furlong.devices import moved
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork
from furlong.methods.networks import chained
from furlong.settings import setting


@dataclass(frozen=True)
class FedRot(OneNetwork):
    """Tell by how many quarter turns an image was rotated."""

    paper = "Gidaris et al. 2018 (RotNet), averaged as in McMahan et al. 2017"
    leaves = f"Encoder and rotation head weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "method.mode": "all4"}
    decomposes = "records"
    usual_augment = "flip_crop"  # colours would only make the task harder

    mode: Literal["random", "all4"] = setting(
        "random", "Turn each image once at random (FedCA), or in all four ways (Gidaris)."
    )
    rotation_head: Literal["linear", "mlp"] = setting(
        "linear", "The head that predicts the turn; mlp is Orchestra's."
    )

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and head: images B×C×S×S to scores B×4."""
        width = ctx.width
        head: nn.Module = nn.Linear(width, 4)
        if self.rotation_head == "mlp":
            hidden = [nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
            head = nn.Sequential(*hidden, nn.Linear(512, 4))
        return chained(backbone=ctx.encoder(), head=head)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One view of each image, turned once or in all four ways."""
        (view,) = batch.views(1)
        if self.mode == "random":
            turns = torch.randint(4, (len(view),))
        else:
            turns = torch.arange(4).repeat_interleave(len(view))
            view = view.repeat(4, 1, 1, 1)
        return F.cross_entropy(net(rotated(view, turns)), moved(turns, view.device))
