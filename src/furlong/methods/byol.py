"""BYOL's local training (Grill et al., NeurIPS 2020), shared by FedU and FedEMA.

    L = (2 - 2cos(p(g(f(v))), sg[g_ξ(f_ξ(v'))])) + the same with the views swapped
    ξ ← m·ξ + (1 - m)·θ  after every step, over parameters

"Encoder" is backbone and projector together, as in FedU's text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from furlong.core.context import ClientContext, Context, ServerContext
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.errors import require
from furlong.methods.base import predicting, projecting
from furlong.nn.losses import byol


@payload("furlong.methods.byol.Shared")
class Shared:
    """What travels: an encoder (backbone and projector) and a predictor."""

    encoder: Weights
    predictor: Weights


@payload("furlong.methods.byol.Triple")
class Triple:
    """BYOL's three networks, as values: online and target never share storage."""

    online: Weights
    target: Weights
    predictor: Weights


@dataclass(frozen=True)
class Byol:
    """The networks and the loss; a part of a method's hyper-parameters."""

    projection_head: str
    prediction_head: str
    decay: float
    symmetric: bool

    def __post_init__(self) -> None:
        require(0 <= self.decay <= 1, "decay", self.decay, "between 0 and 1")

    def encoder(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d_z."""
        return projecting(self.projection_head, ctx)

    def predictor(self, ctx: Context) -> nn.Module:
        """Projections to predictions, both B×d_z."""
        return predicting(self.projection_head, self.prediction_head, ctx)

    def init(self, ctx: ServerContext) -> Shared:
        """Freshly initialised networks."""
        return Shared(snapshot(self.encoder(ctx)), snapshot(self.predictor(ctx)))

    def train(self, start: Triple, ctx: ClientContext) -> tuple[Triple, dict[str, float]]:
        """The client's local epochs from ``start``."""
        online = ctx.network("online", lambda: self.encoder(ctx), start.online)
        target = ctx.network("target", lambda: self.encoder(ctx), start.target)
        predictor = ctx.network("predictor", lambda: self.predictor(ctx), start.predictor)
        target.requires_grad_(False)
        optimiser = ctx.optimiser(online, predictor)
        for batch in ctx.batches():
            # one pass per view, so that BatchNorm sees one view at a time, as in BYOL and EasyFL
            v1, v2 = batch.views()
            with torch.no_grad():
                t1, t2 = target(v1), target(v2)
            loss = byol(predictor(online(v1)), t2)
            if self.symmetric:
                loss = loss + byol(predictor(online(v2)), t1)
            optimiser.step(loss)
            ema_(target, online, self.decay)
        nets = Triple(snapshot(online), snapshot(target), snapshot(predictor))
        return nets, optimiser.metrics()
