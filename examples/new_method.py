"""FedBarlow: Barlow Twins on every client, FedAvg of encoder and projector.
Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021.

    C = Z₁ᵀZ₂/B with the columns of Z standardised,   L = Σ_i (1 - C_ii)² + λ Σ_{i≠j} C_ij²

    furlong run --method examples/new_method.py:FedBarlow --data shapes --rounds 5
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from furlong import Averaging, Local, Model
from furlong.context import ClientContext, Context, ServerContext
from furlong.methods.averaging import WEIGHTS_REVEAL, backbone
from furlong.nets import head
from furlong.weights import snapshot


def barlow(z1: Tensor, z2: Tensor, off_diagonal: float) -> Tensor:
    """The loss of two views' projections, B×d each."""
    z1, z2 = ((z - z.mean(0)) / (z.std(0, correction=0) + 1e-5) for z in (z1, z2))
    squares = (z1.T @ z2 / len(z1) - torch.eye(z1.shape[1], device=z1.device)).square()
    return off_diagonal * squares.sum() + (1 - off_diagonal) * squares.trace()


@dataclass(frozen=True)
class FedBarlow(Averaging[Model, None]):
    """Make the two views' features agree one by one and be uncorrelated otherwise."""

    paper: ClassVar[str] = "Zbontar et al. 2021 (Barlow Twins), averaged as in McMahan et al. 2017"
    leaves: ClassVar[str] = f"Encoder and projector weights. {WEIGHTS_REVEAL}"

    off_diagonal: float = 0.005  # λ; every field is an option: --method.off-diagonal 0.01
    projection_head: str = "proj_128"  # ours; the paper's has three layers of 8192

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d."""
        projector = head(self.projection_head, ctx.width)
        return nn.Sequential(OrderedDict(backbone=ctx.encoder(), projector=projector))

    def init_server(self, ctx: ServerContext) -> Model:
        """A freshly initialised network."""
        return Model(snapshot(self.network(ctx)))

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """Train the global network on the client's images."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        optimiser = ctx.optimiser(net)
        for batch in ctx.batches():
            z1, z2 = net(torch.cat(batch.views())).chunk(2)
            optimiser.step(barlow(z1, z2, self.off_diagonal))
        return Local(state, Model(snapshot(net)), optimiser.metrics())

    def encoder(self, server: Model, ctx: ServerContext) -> nn.Module:
        """What downstream users get: the backbone."""
        return backbone(server.weights, ctx)
