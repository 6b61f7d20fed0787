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
from torch import nn

from furlong.context import ClientContext, Context, ServerContext
from furlong.errors import require
from furlong.losses import nt_xent
from furlong.method import Local
from furlong.methods.averaging import WEIGHTS_REVEAL, Averaging, Model, backbone, projecting
from furlong.peernorm import peers
from furlong.weights import snapshot


@dataclass(frozen=True)
class FedSimCLR(Averaging[Model, None]):
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

    def init_server(self, ctx: ServerContext) -> Model:
        """A freshly initialised network."""
        return Model(snapshot(self.network(ctx)))

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """Replace the network by the global one and train it."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        optimiser = ctx.optimiser(net)
        anchor = [p.detach().clone() for p in net.get_submodule("projector").parameters()]
        for batch in ctx.batches():
            with peers(net):
                z1, z2 = net(torch.cat(batch.views())).chunk(2)
            loss = nt_xent(z1, z2, self.temperature)
            if self.head_prox_mu:
                moved = zip(net.get_submodule("projector").parameters(), anchor, strict=True)
                distance = torch.stack([(p - a).square().sum() for p, a in moved]).sum()
                loss = loss + self.head_prox_mu / 2 * distance
            optimiser.step(loss)
        return Local(state, Model(snapshot(net)), optimiser.metrics())

    def encoder(self, server: Model, ctx: ServerContext) -> nn.Module:
        """The backbone."""
        return backbone(server.weights, ctx)
