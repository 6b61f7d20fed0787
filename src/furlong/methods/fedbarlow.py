"""FedBarlow: Barlow Twins on every client, FedAvg of encoder and projector.

Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021.

    C = Z₁ᵀZ₂/B with the columns of Z standardised,   L = Σ_i (1 - C_ii)² + λ Σ_{i≠j} C_ij²
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.method import USUAL
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork
from furlong.methods.networks import Projecting, named_head
from furlong.nn.losses import barlow_twins
from furlong.settings import setting


@dataclass(frozen=True)
class FedBarlow(Projecting, OneNetwork):
    """Make the two views' features agree one by one and be uncorrelated otherwise."""

    paper = "Zbontar et al. 2021 (Barlow Twins), averaged as in McMahan et al. 2017"
    leaves = f"Encoder and projector weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "train.batch_size": 64}  # its loss is of a whole batch's statistics
    # the paper's λ is for 8192 dimensions; where there are few, each pair has to count for more
    usual_small = {"projection_head": "mlp:256:128", "off_diagonal": 0.02}

    off_diagonal: float = setting(0.0051, "The weight λ of the redundancy term.", at_least=0)
    projection_head: str = named_head("expander")  # 2048 wide; the paper's is 8192, for ImageNet

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One pass per view, as in the authors' code."""
        v1, v2 = batch.views()
        return barlow_twins(net(v1), net(v2), self.off_diagonal)
