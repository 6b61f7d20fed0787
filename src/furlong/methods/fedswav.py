"""FedSwAV: SwAV on every client, FedAvg of encoder, projector and prototypes.

Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments",
NeurIPS 2020 (github.com/facebookresearch/swav); a baseline of FCL and MFCL.

    s_v = z̃_v·Cᵀ with unit prototypes C (P×d);  q_v = Sinkhorn(s_v/ε), a constant
    L = -½·mean( Σ q₁·log softmax(s₂/τ) + Σ q₂·log softmax(s₁/τ) )
    C ← C with unit rows after every step, and after averaging: a mean of unit rows is shorter

A queue of the client's last projections enlarges Sinkhorn's batch. It begins to fill at the epoch
``queue_from`` and counts only when it is full, as in the official code; the client keeps it from
round to round.

Two views of the whole image; the paper's further small crops (multi-crop) are left out.

If ε is too large for the spread of the similarities, all codes become 1/P and teach nothing: the
loss stays at ln P and ``code_entropy`` in the log at 1. The remedy is a smaller ε.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, Context, ServerContext
from furlong.core.method import USUAL, Local, Reports
from furlong.core.payload import Weights, payload
from furlong.core.weights import snapshot
from furlong.methods.base import WEIGHTS_REVEAL, Averaging
from furlong.methods.networks import Projecting, backbone, named_head
from furlong.nn.clustering import sinkhorn, unit_rows
from furlong.nn.losses import swapped_prediction
from furlong.nn.peernorm import peers
from furlong.settings import setting


@payload("furlong.methods.fedswav.Prototyped")
class Prototyped:
    """An encoder (backbone and projector) and the prototypes, ``weight`` P×d."""

    encoder: Weights
    prototypes: Weights


@payload("furlong.methods.fedswav.Queue")
class Queue:
    """The projections 2×K×d of both views of a client's last images, the oldest first."""

    rows: Tensor


@dataclass(frozen=True)
class FedSwAV(Projecting, Averaging[Prototyped, Queue | None]):
    """Each view predicts to which prototypes the other was assigned, all used equally."""

    paper = "Caron et al. 2020 (SwAV), averaged as in McMahan et al. 2017"
    pairs_views = True
    keeps = "nothing; with queue > 0 the projections of its last images (at most method.queue)"
    leaves = f"Encoder, projector and prototype weights. {WEIGHTS_REVEAL}"
    explains = {
        "code_entropy": "Entropy of the assignments to prototypes over ln P; at 1 they are uniform "
        "and nothing is learnt: lower --method.epsilon.",
    }
    usual = {**USUAL, "train.batch_size": 64}  # its loss is of a whole batch's statistics
    usual_small = {"projection_head": "mlp:256:128"}
    remedy = (
        "Try a lower --method.epsilon: if it exceeds the spread of the scores, every image is "
        "assigned to all prototypes alike, and nothing is learnt. Else a lower --optimiser.lr."
    )

    prototypes: int = setting(300, "The prototypes P (the paper: 3,000).", at_least=2)
    epsilon: float = setting(
        0.01,
        "The temperature ε of Sinkhorn's assignments (the paper: 0.05). Lower it if the loss stays "
        "at ln P and code_entropy in metrics.jsonl at 1.",
        above=0,
    )
    sinkhorn_iterations: int = setting(3, "The iterations of Sinkhorn.", at_least=1)
    temperature: float = setting(0.1, "The temperature τ of the predictions.", above=0)
    queue: int = setting(
        0,
        "How many of its last projections a client keeps to enlarge Sinkhorn's batch, at most as "
        "many as it has images (the paper: 3,840).",
        at_least=0,
    )
    queue_from: int = setting(
        15,
        "The epochs of the run before the queue begins to fill (the paper: 15); it counts when it "
        "is full.",
        at_least=0,
    )
    freeze_epochs: int = setting(1, "The first epochs, in which prototypes stay.", at_least=0)
    projection_head: str = named_head("mlp:2048:128")

    def layer(self, ctx: Context) -> nn.Linear:
        """The prototypes: projections B×d to similarities B×P."""
        return nn.Linear(self.width(ctx), self.prototypes, bias=False)

    def init_server(self, ctx: ServerContext) -> Prototyped:
        """Freshly initialised, the prototypes as random unit rows."""
        return unit(Prototyped(snapshot(self.network(ctx)), snapshot(self.layer(ctx))))

    def local_update(
        self, state: Queue | None, down: Prototyped, ctx: ClientContext
    ) -> Local[Queue | None, Prototyped]:
        """Train encoder and prototypes; the queue goes on from the last round."""
        net = ctx.network("net", lambda: self.network(ctx), down.encoder)
        layer = ctx.network("prototypes", lambda: self.layer(ctx), down.prototypes)
        assert isinstance(layer, nn.Linear)
        optimiser, entropies = ctx.optimiser(net, layer), []
        # no longer than an epoch: a longer one would hold older projections of the same images
        full = min(self.queue, len(ctx.data))
        queue = torch.empty(2, 0, layer.in_features) if state is None else state.rows
        queue = queue.to(ctx.setup.device)
        for epoch in range(ctx.setup.epochs):
            before = ctx.exchange.round * ctx.setup.epochs + epoch
            layer.requires_grad_(before >= self.freeze_epochs)
            for batch in ctx.batches(1):
                z = project(net, batch)
                scores = layer(z)
                held = queue if queue.shape[1] == full else queue[:, :0]
                codes = self.codes(scores.detach(), held @ layer.weight.detach().T)
                entropies.append(torch.special.entr(codes).sum(2).mean())
                optimiser.step(swapped_prediction(scores, codes, self.temperature))
                with torch.no_grad():
                    layer.weight.copy_(unit_rows(layer.weight))
                if full and before >= self.queue_from:
                    queue = torch.cat([queue, z.detach()], dim=1)[:, -full:]
        kept = Queue(queue.cpu()) if full else None
        metrics = optimiser.metrics()
        if entropies:  # 1: all codes are uniform, and nothing can be learnt from them
            metrics["code_entropy"] = float(torch.stack(entropies).mean()) / log(self.prototypes)
        return Local(kept, Prototyped(snapshot(net), snapshot(layer)), metrics)

    def codes(self, scores: Tensor, held: Tensor) -> Tensor:
        """Q of both views, 2×B×P, from similarities 2×B×P; ``held`` 2×K×P are the queue's."""
        both = torch.cat([held.detach(), scores], dim=1) / self.epsilon
        return sinkhorn(both, self.sinkhorn_iterations)[:, held.shape[1] :]

    def aggregate(
        self, server: Prototyped, reports: Reports[Prototyped], ctx: ServerContext
    ) -> Prototyped:
        """The mean, its prototypes with unit rows."""
        return unit(super().aggregate(server, reports, ctx))

    def encoder(self, server: Prototyped, ctx: ServerContext) -> nn.Module:
        """The backbone."""
        return backbone(server.encoder, ctx)


def project(net: nn.Module, batch: Batch) -> Tensor:
    """Unit projections 2×B×d of two views in one pass, as in the official code."""
    with peers(net):
        return torch.stack(F.normalize(net(torch.cat(batch.views())), dim=1).chunk(2))


def unit(value: Prototyped) -> Prototyped:
    """The same with prototypes of length 1."""
    return replace(value, prototypes={n: unit_rows(w) for n, w in value.prototypes.items()})
