"""FedVICReg: VICReg on every client, FedAvg of encoder and expander.

Bardes, Ponce, LeCun, "VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised
Learning", ICLR 2022.

    L = λ·s(Z, Z') + μ·[v(Z) + v(Z')]/2 + ν·[c(Z) + c(Z')]

s: mean squared difference of the views; v: hinge that keeps each feature's deviation above 1;
c: squared covariances of different features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.method import USUAL
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork
from furlong.methods.networks import Projecting, named_head
from furlong.nn.losses import vicreg
from furlong.settings import setting


@dataclass(frozen=True)
class FedVICReg(Projecting, OneNetwork):
    """Bring views together while every feature keeps its spread and tells something of its own."""

    paper = "Bardes et al. 2022 (VICReg), averaged as in McMahan et al. 2017"
    leaves = f"Encoder and expander weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "train.batch_size": 64}  # its loss is of a whole batch's statistics
    usual_small = {"projection_head": "mlp:256:128"}

    invariance: float = setting(25.0, "The weight λ of the invariance term.", at_least=0)
    variance: float = setting(25.0, "The weight μ of the variance term.", at_least=0)
    covariance: float = setting(1.0, "The weight ν of the covariance term.", at_least=0)
    projection_head: str = named_head("expander")  # 2048 wide; the paper's is 8192, for ImageNet

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One pass per view, as in the authors' code."""
        v1, v2 = batch.views()
        return vicreg(net(v1), net(v2), self.invariance, self.variance, self.covariance)
