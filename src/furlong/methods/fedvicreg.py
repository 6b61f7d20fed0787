"""FedVICReg: VICReg on every client, FedAvg of encoder and expander.

Bardes, Ponce, LeCun, "VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised
Learning", ICLR 2022.

    L = λ·s(Z, Z') + μ·[v(Z) + v(Z')]/2 + ν·[c(Z) + c(Z')]

s: mean squared difference of the views; v: hinge that keeps each feature's deviation above 1;
c: squared covariances of different features.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor, nn

from furlong.core.context import Batch, Context
from furlong.errors import require
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork, projecting
from furlong.nn.losses import vicreg


@dataclass(frozen=True)
class FedVICReg(OneNetwork):
    """Bring views together while every feature keeps its spread and tells something of its own."""

    paper: ClassVar[str] = "Bardes et al. 2022 (VICReg), averaged as in McMahan et al. 2017"
    leaves: ClassVar[str] = f"Encoder and expander weights. {WEIGHTS_REVEAL}"

    invariance: float = 25.0  # λ
    variance: float = 25.0  # μ
    covariance: float = 1.0  # ν
    projection_head: str = "expander"  # 2048 wide; the paper's is 8192, for ImageNet

    def __post_init__(self) -> None:
        for name in ("invariance", "variance", "covariance"):
            require(0 <= getattr(self, name) < inf, name, getattr(self, name), "at least 0")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and expander: images B×C×H×W to projections B×d_z."""
        return projecting(self.projection_head, ctx)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One pass per view, as in the authors' code."""
        v1, v2 = batch.views()
        return vicreg(net(v1), net(v2), self.invariance, self.variance, self.covariance)
