"""FedMoCo: MoCo on every client, FedAvg of the query network, and of the key network too.

He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020. With
``key_update = "aggregate"`` it is the row CL of FCL's ablation, with ``"reset"`` EasyFL's FedMoCo.

    q = g(f(v)), k = sg[g_k(f_k(v'))], Q = the client's last K keys
    ℓ = -log( e^{q·k/τ} / (e^{q·k/τ} + Σ_{n ∈ Q} e^{q·n/τ}) );  θ_k ← m·θ_k + (1 - m)·θ
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import ClientContext, Context, ServerContext
from furlong.core.method import Local
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.errors import require
from furlong.methods.bank import enqueue, new_bank
from furlong.methods.base import (
    WEIGHTS_REVEAL,
    Averaging,
    backbone,
    projected_width,
    projecting,
)
from furlong.nn.losses import info_nce


@payload("furlong.methods.fedmoco.Nets")
class Nets:
    """The query network, and the key network where that travels."""

    query: Weights
    key: Weights | None


@payload("furlong.methods.fedmoco.Queue")
class Queue:
    """The client's last keys, K×d, and which of them is the oldest."""

    rows: Tensor
    position: int


@dataclass(frozen=True)
class FedMoCo(Averaging[Nets, Queue]):
    """Tell an image's key from the keys of the client's last images."""

    paper: ClassVar[str] = "He et al. 2020 (MoCo), averaged as in McMahan et al. 2017"
    keeps: ClassVar[str] = "the feature vectors of its last images (method.bank of them)"
    leaves: ClassVar[str] = (
        'Weights of the query network, and with key_update = "aggregate" of the key network. '
        f"{WEIGHTS_REVEAL}"
    )

    bank: int = 4096  # K
    decay: float = 0.99  # m
    temperature: float = 0.1
    key_update: Literal["aggregate", "reset"] = "aggregate"  # reset: a copy of the query network
    symmetric: bool = False  # both views are queries and keys; the losses are added
    bn_groups: int = 1  # BatchNorm by parts of the batch, for keys in another order (MoCo: 8)
    projection_head: str = "proj_128"

    def __post_init__(self) -> None:
        require(self.bank >= 1, "bank", self.bank, "at least 1")
        require(0 <= self.decay <= 1, "decay", self.decay, "between 0 and 1")
        require(0 < self.temperature < inf, "temperature", self.temperature, "above 0")
        require(self.bn_groups >= 1, "bn_groups", self.bn_groups, "at least 1")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d."""
        return projecting(self.projection_head, ctx)

    def init_server(self, ctx: ServerContext) -> Nets:
        """The key network starts as the query network."""
        start = snapshot(self.network(ctx))
        return Nets(start, start if self.key_update == "aggregate" else None)

    def init_client(self, ctx: ClientContext) -> Queue:
        """Random unit rows."""
        return Queue(new_bank(self.bank, projected_width(self.projection_head, ctx)), 0)

    def local_update(self, state: Queue, down: Nets, ctx: ClientContext) -> Local[Queue, Nets]:
        """MoCo; the queue goes on from the last round."""
        query = ctx.network("query", lambda: self.network(ctx), down.query)
        start = down.query if down.key is None else down.key
        key = ctx.network("key", lambda: self.network(ctx), start).requires_grad_(False)
        optimiser, position = ctx.optimiser(query), state.position
        bank = state.rows.to(ctx.setup.device, copy=True)
        for batch in ctx.batches():
            views = batch.views()
            with torch.no_grad():
                keys = [self.keys(key, view) for view in (views if self.symmetric else views[1:])]
            # the other view's key: of the second view for the first query, and the reverse
            pairs = zip(views, reversed(keys), strict=False)
            losses = [info_nce(self.queries(query, v), k, bank, self.temperature) for v, k in pairs]
            optimiser.step(torch.stack(losses).sum())
            ema_(key, query, self.decay)
            position = enqueue(bank, position, torch.cat(keys))
        kept = None if down.key is None else snapshot(key)
        return Local(Queue(bank.cpu(), position), Nets(snapshot(query), kept), optimiser.metrics())

    def queries(self, net: nn.Module, view: Tensor) -> Tensor:
        """Projections B×d; BatchNorm sees the parts of the batch one by one."""
        if self.bn_groups == 1:
            return net(view)  # type: ignore[no-any-return]
        parts = view.tensor_split(min(self.bn_groups, len(view) // 2))  # of two images at least
        return torch.cat([net(part) for part in parts])

    def keys(self, net: nn.Module, view: Tensor) -> Tensor:
        """Unit rows B×d; the parts are others than the queries' (MoCo's shuffling)."""
        if self.bn_groups == 1:  # the order makes no difference to BatchNorm
            return F.normalize(net(view), dim=1)
        order = torch.randperm(len(view), device=view.device)
        return F.normalize(self.queries(net, view[order])[order.argsort()], dim=1)

    def encoder(self, server: Nets, ctx: ServerContext) -> nn.Module:
        """The backbone of the query network."""
        return backbone(server.query, ctx)
