"""FedSimCLR: SimCLR on every client, FedAvg of encoder and projector.

Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020;
the federated baseline of FedCA, FedU, FCL and MFCL.

    ℓ_i = -log( exp(z̃_i·z̃_j/τ) / Σ_{k≠i} exp(z̃_i·z̃_k/τ) ), mean over all 2B views; j = partner of i
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from furlong.core.context import Batch, Context
from furlong.core.payload import Weights
from furlong.core.weights import prefixed
from furlong.errors import require
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork, projecting, proximal
from furlong.nn.losses import nt_xent
from furlong.nn.peernorm import peers


@dataclass(frozen=True)
class FedSimCLR(OneNetwork):
    """Contrast two views of each image with all other views of the batch."""

    paper: ClassVar[str] = "Chen et al. 2020 (SimCLR), averaged as in McMahan et al. 2017"
    pairs_views: ClassVar[bool] = True
    leaves: ClassVar[str] = f"Encoder and projector weights. {WEIGHTS_REVEAL}"

    temperature: float = 0.5
    projection_head: str = "proj_128"
    head_prox_mu: float = 0.0  # proximal term on the projector only, μ/2·‖w - w_global‖²

    def __post_init__(self) -> None:
        require(0 < self.temperature < inf, "temperature", self.temperature, "above 0")
        require(0 <= self.head_prox_mu < inf, "head_prox_mu", self.head_prox_mu, "at least 0")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d_z."""
        return projecting(self.projection_head, ctx)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Both views in one pass, each against all others."""
        with peers(net):
            z1, z2 = net(torch.cat(batch.views())).chunk(2)
        return nt_xent(z1, z2, self.temperature)

    def penalty(self, net: nn.Module, start: Weights) -> Tensor | None:
        """On the projector only."""
        if not self.head_prox_mu:
            return None
        projector = net.get_submodule("projector")
        return self.head_prox_mu * proximal(projector, prefixed(start, "projector"))
