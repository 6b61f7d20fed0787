"""FedMoCo: MoCo on every client, FedAvg of the query network, and of the key network too.

He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020. With
``key_update = "aggregate"`` it is the row CL of FCL's ablation but for the first rows of the queue,
which are random as in MoCo's own code; with ``"reset"`` it is EasyFL's FedMoCo.

    q = g(f(v)), k = sg[g_k(f_k(v'))], Q = the client's last K keys
    ℓ = -log( e^{q·k/τ} / (e^{q·k/τ} + Σ_{n ∈ Q} e^{q·n/τ}) );  θ_k ← m·θ_k + (1 - m)·θ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import ClientContext, ServerContext
from furlong.core.method import USUAL, Local
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.methods.bank import enqueue, new_bank
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL, Averaging
from furlong.methods.networks import Projecting, backbone, named_head
from furlong.nn.losses import info_nce
from furlong.settings import setting


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
class FedMoCo(Projecting, Averaging[Nets, Queue]):
    """Tell an image's key from the keys of the client's last images."""

    paper = "He et al. 2020 (MoCo), averaged as in McMahan et al. 2017"
    keeps = "the feature vectors of its last images (method.bank of them)"
    remedy = CONTRASTIVE_REMEDY
    leaves = (
        'Weights of the query network, and with key_update = "aggregate" of the key network. '
        f"{WEIGHTS_REVEAL}"
    )
    usual = {**USUAL, "train.batch_size": 64, "method.bank": 512}  # keys of eight steps
    usual_small = {"projection_head": "mlp:256:128"}

    bank: int = setting(4096, "The number K of keys that a client keeps.", at_least=1)
    decay: float = setting(0.99, "The decay m of the key network.", at_least=0, at_most=1)
    temperature: float = setting(0.1, "The temperature τ of the loss.", above=0)
    key_update: Literal["aggregate", "reset"] = setting(
        "aggregate", "Average the key networks, or start each round from a copy of the query's."
    )
    symmetric: bool = setting(False, "Take both views as queries and keys, and add the losses.")
    bn_groups: int = setting(1, "In how many parts BatchNorm sees a batch (MoCo: 8).", at_least=1)
    projection_head: str = named_head("proj_128")

    def init_server(self, ctx: ServerContext) -> Nets:
        """The key network starts as the query network."""
        start = snapshot(self.network(ctx))
        return Nets(start, start if self.key_update == "aggregate" else None)

    def init_client(self, ctx: ClientContext) -> Queue:
        """Random unit rows."""
        return Queue(new_bank(self.bank, self.width(ctx)), 0)

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
