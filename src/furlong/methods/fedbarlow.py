"""FedBarlow: Barlow Twins on every client, FedAvg of encoder and projector.

Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021.

    C = Z₁ᵀZ₂/B with the columns of Z standardised,   L = Σ_i (1 - C_ii)² + λ Σ_{i≠j} C_ij²
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor, nn

from furlong.core.context import Batch, Context
from furlong.errors import require
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork, projecting
from furlong.nn.losses import barlow_twins


@dataclass(frozen=True)
class FedBarlow(OneNetwork):
    """Make the two views' features agree one by one and be uncorrelated otherwise."""

    paper: ClassVar[str] = "Zbontar et al. 2021 (Barlow Twins), averaged as in McMahan et al. 2017"
    leaves: ClassVar[str] = f"Encoder and projector weights. {WEIGHTS_REVEAL}"

    off_diagonal: float = 0.0051  # λ
    projection_head: str = "expander"  # 2048 wide; the paper's is 8192, for ImageNet

    def __post_init__(self) -> None:
        require(0 <= self.off_diagonal < inf, "off_diagonal", self.off_diagonal, "at least 0")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d_z."""
        return projecting(self.projection_head, ctx)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One pass per view, as in the authors' code."""
        v1, v2 = batch.views()
        return barlow_twins(net(v1), net(v2), self.off_diagonal)
