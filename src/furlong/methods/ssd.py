"""SSD: clients spread in directions of their own (Fang, Lin, King, Zhang, ICCV 2025).

    L = E‖z₁ - z₂‖² + β·log E exp(-2‖z - z'‖²)                alignment and uniformity
      + γ·E‖z - sg[z ⊙ d_k]‖²                                 soft separation
      + δ·KL(σ(h) ‖ σ(g(h)))                                  projector distillation

z is the projection g(h) at unit length. d_k is 1, and the scale α on the ⌊d/K⌋ dimensions that are
client k's alone. h and g(h) have the same width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import ClientContext, Context
from furlong.core.method import USUAL, Local
from furlong.core.weights import snapshot
from furlong.errors import FurlongError
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL, Model, OneModel
from furlong.methods.networks import Projecting, named_head
from furlong.nn.losses import align_and_spread
from furlong.settings import setting


@dataclass(frozen=True)
class SSD(Projecting, OneModel[None]):
    """Alignment and uniformity; each client leans towards dimensions that are its own."""

    paper = (
        "Fang, Lin, King, Zhang, Soft Separation and Distillation: Toward Global Uniformity in "
        "Federated Unsupervised Learning, ICCV 2025"
    )
    leaves = f"Encoder and projector weights. {WEIGHTS_REVEAL}"
    caution = (
        "The paper does not say whether the distilled projections are of unit length; here they "
        "are not, since a softmax over so many small numbers would be flat. With more clients than "
        "dimensions some clients share one."
    )
    # at γ = 1 a client's own dimensions take over; a mean over dimensions would be about this
    usual = {**USUAL, "method.separation": 0.01}
    usual_small = {"projection_head": "mlp:256:192"}
    remedy = CONTRASTIVE_REMEDY

    spread: float = setting(1.0, "The weight β of uniformity.", at_least=0)
    separation: float = setting(1.0, "The weight γ of soft separation.", at_least=0)
    distillation: float = setting(0.1, "The weight δ of projector distillation.", at_least=0)
    scale: float = setting(10.0, "The factor α on a client's own dimensions.", at_least=1)
    projection_head: str = named_head("mlp:512:512")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector of the same width."""
        if self.width(ctx) != ctx.width:
            raise FurlongError(
                f"method.projection_head = {self.projection_head} gives {self.width(ctx)} numbers "
                f"and the encoder {ctx.setup.encoder} {ctx.width}: SSD compares them, so they must "
                f"be as many. Use --method.projection-head mlp:{ctx.width}:{ctx.width}."
            )
        return super().network(ctx)

    def scaling(self, ctx: ClientContext) -> Tensor:
        """d_k, of length d: α on the client's own dimensions, 1 elsewhere."""
        clients = sorted(ctx.setup.sizes)
        place, width = clients.index(ctx.client), self.width(ctx)
        share = max(1, width // len(clients))
        own = torch.arange(place * share, (place + 1) * share) % width
        return torch.ones(width).index_fill(0, own, self.scale).to(ctx.setup.device)

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """The local epochs from the global network."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        encode, project = net.children()
        optimiser, scaling = ctx.optimiser(net), self.scaling(ctx)
        for batch in ctx.batches():
            h = encode(torch.cat(batch.views()))
            optimiser.step(self.loss(h, project(h), scaling))
        return Local(state, Model(snapshot(net)), optimiser.metrics())

    def loss(self, h: Tensor, projected: Tensor, scaling: Tensor) -> Tensor:
        """Of representations and projections, 2B×d each: first views, then second views."""
        z = F.normalize(projected, dim=1)
        z1, z2 = z.chunk(2)
        loss = align_and_spread(z1, z2, self.spread)
        apart = (z - (z * scaling).detach()).square().sum(dim=1).mean()
        wanted, found = h.log_softmax(dim=1), projected.log_softmax(dim=1)
        taught = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        return loss + self.separation * apart + self.distillation * taught
