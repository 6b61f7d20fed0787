"""BYOL's local training (Grill et al., NeurIPS 2020), shared by FedU, FedEMA and FedU².

    L = (2 - 2cos(p(g(f(v))), sg[g_ξ(f_ξ(v'))])) + the same with the views swapped
    ξ ← m·ξ + (1 - m)·θ  after every step, over parameters

"Encoder" is backbone and projector together, as in FedU's text.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, ServerContext
from furlong.core.method import USUAL
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.methods.base import NO_NEGATIVES_REMEDY, Averaging
from furlong.methods.networks import Predicting, backbone
from furlong.nn.losses import byol

C = TypeVar("C")


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


class Byol(Predicting, Averaging[Shared, C]):
    """A method that trains BYOL; clients differ in what they start from."""

    remedy = f"{NO_NEGATIVES_REMEDY} A lower --method.decay lets the target follow sooner."
    usual: ClassVar = {**USUAL, "optimiser.lr": 0.001, "train.rounds": 60}  # it learns slowly
    explains: ClassVar = {
        "divergence": "How far local training moved a client's encoder away from where it began.",
    }

    decay: float  # these two are fields of the methods
    symmetric: bool

    def init_server(self, ctx: ServerContext) -> Shared:
        """Φ and Ψ, freshly initialised."""
        return Shared(snapshot(self.network(ctx)), snapshot(self.new_predictor(ctx)))

    def train(self, start: Triple, ctx: ClientContext) -> tuple[Triple, dict[str, float]]:
        """The client's local epochs from ``start``."""
        online = ctx.network("online", lambda: self.network(ctx), start.online)
        target = ctx.network("target", lambda: self.network(ctx), start.target)
        predictor = ctx.network("predictor", lambda: self.new_predictor(ctx), start.predictor)
        target.requires_grad_(False)
        optimiser = ctx.optimiser(online, predictor)

        def loss_of(batch: Batch) -> Tensor:
            # one pass per view, so that BatchNorm sees one view at a time, as in BYOL and EasyFL
            v1, v2 = batch.views()
            with torch.no_grad():
                t1, t2 = target(v1), target(v2)
            losses = []
            for view, goal in ((v1, t2), (v2, t1))[: 2 if self.symmetric else 1]:
                z = online(view)
                losses.append(byol(predictor(z), goal) + self.regulariser(z))
            return torch.stack(losses).sum()

        for batch in ctx.batches():
            optimiser.descend(loss_of, batch)
            ema_(target, online, self.decay)
        nets = Triple(snapshot(online), snapshot(target), snapshot(predictor))
        return nets, optimiser.metrics()

    def regulariser(self, z: Tensor) -> Tensor | float:  # noqa: ARG002
        """What comes on top for the online projections z (B×d_z) of one view."""
        return 0.0

    def encoder(self, server: Shared, ctx: ServerContext) -> nn.Module:
        """The backbone of Φ."""
        return backbone(server.encoder, ctx)
