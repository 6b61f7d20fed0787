"""FedSimCLR: SimCLR on every client, FedAvg of encoder and projector.

Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020;
the federated baseline of FedCA, FedU, FCL and MFCL.

    ℓ_i = -log( exp(z̃_i·z̃_j/τ) / Σ_{k≠i} exp(z̃_i·z̃_k/τ) ), mean over all 2B views; j = partner of i
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.method import USUAL
from furlong.core.payload import Weights
from furlong.core.weights import prefixed
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL, OneNetwork
from furlong.methods.networks import Projecting, named_head, proximal
from furlong.nn.losses import nt_xent
from furlong.nn.peernorm import peers
from furlong.settings import setting


@dataclass(frozen=True)
class FedSimCLR(Projecting, OneNetwork):
    """Contrast two views of each image with all other views of the batch."""

    paper = "Chen et al. 2020 (SimCLR), averaged as in McMahan et al. 2017"
    pairs_views = True
    decomposes = "groups"
    leaves = f"Encoder and projector weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "method.temperature": 0.2}
    # SimCLR's own code has a BatchNorm at the end of the projector
    usual_small = {"projection_head": "mlp:256:128:bn"}
    remedy = CONTRASTIVE_REMEDY

    temperature: float = setting(0.5, "The temperature τ of the loss.", above=0)
    projection_head: str = named_head("proj_128")
    head_prox_mu: float = setting(
        0.0, "The weight μ of a proximal term on the projector.", at_least=0
    )

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Both views in one pass, each against all others."""
        with peers(net):
            z1, z2 = net(torch.cat(batch.views())).chunk(2)
        return nt_xent(z1, z2, self.temperature)

    def penalty(self, net: nn.Module, start: Weights) -> Tensor | None:
        """On the projector only."""
        if not self.head_prox_mu:
            return None
        part = net.get_submodule("projector")
        return self.head_prox_mu * proximal(part, prefixed(start, "projector"))
