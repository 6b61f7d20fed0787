"""FedSC: the others' second moments as negatives (Jing, Yu, Zhang, Zhang, ICML 2024).

Each round has two exchanges. The server sends the network θ; client k answers with

    R_k = E[zzᵀ]  (d×d, over views of all of its images; ‖z‖ ≤ √μ)  + noise

and then trains with the mean R₋ₖ of the others' moments, so that its images also keep away from
those that it cannot see:

    L = -2·E[z₁·z₂] + α·‖R‖² + 2(1 - α)·tr(R·R₋ₖ),   α from 1 to its least over the rounds
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import ClientContext, Exchange, ServerContext, Setup
from furlong.core.method import USUAL, Local, Method, Reports
from furlong.core.payload import Weights, payload
from furlong.core.weights import snapshot
from furlong.methods.base import WEIGHTS_REVEAL, Model
from furlong.methods.networks import Projecting, backbone, named_head
from furlong.nn.encoders import untracked
from furlong.nn.losses import spectral_contrast
from furlong.settings import setting


@payload("furlong.methods.fedsc.Server")
class Server:
    """The network, and every client's newest moment (d×d) by its number."""

    weights: Weights
    moments: dict[int, Tensor]


@payload("furlong.methods.fedsc.Down")
class Down:
    """The network; when training, the mean of the others' moments, if there are any."""

    weights: Weights
    others: Tensor | None


@payload("furlong.methods.fedsc.Up")
class Up:
    """The moment of the client's projections, or its trained network."""

    weights: Weights | None
    moment: Tensor | None


@dataclass(frozen=True)
class FedSC(Projecting, Method[Server, None, Down, Up]):
    """Spectral contrast; what clients know of each other are second moments of projections."""

    singles = "it gives every client the moments of all others"
    paper = (
        "Jing, Yu, Zhang, Zhang, FedSC: Provable Federated Self-supervised Learning with Spectral "
        "Contrastive Objective over Non-i.i.d. Data, ICML 2024"
    )
    leaves = (
        "Encoder and projector weights, and the d×d second moment of the projections of all of a "
        "client's images: a mean over images and not a row per image. The server forwards it only "
        "in the mean of the others; with two clients that is the other one's. method.noise blurs "
        f"it, without a privacy guarantee by itself. {WEIGHTS_REVEAL}"
    )
    usual = {**USUAL, "train.batch_size": 64}  # its loss is of a whole batch's statistics
    usual_small = {"projection_head": "mlp:256:128"}
    remedy = (
        "Try a larger --batch-size, which makes the moments of a batch less noisy, a smaller "
        "--method.length or a lower --optimiser.lr."
    )
    explains: ClassVar = {
        "own_moment": "‖R‖² of a client's own images: small when its projections are spread out.",
        "overlap": "tr(R·R₋): how far a client's projections lie where the others' are.",
    }

    length: float = setting(2.0, "μ: projections are no longer than √μ.", above=0)
    own_least: float = setting(
        0.2, "The α of the last round; it falls from 1 in equal steps.", at_least=0, at_most=1
    )
    moment_epochs: int = setting(1, "Over how many views of each image R is taken.", at_least=1)
    noise: float = setting(
        0.0, "The standard deviation of noise on every entry of R before it leaves.", at_least=0
    )
    projection_head: str = named_head("proj_128")

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """First moments, then training, in each round."""
        for index in range(setup.rounds):
            yield Exchange(index, "moments")
            yield Exchange(index)

    def own_share(self, ctx: ClientContext) -> float:
        """α of this round."""
        return 1 - (1 - self.own_least) * ctx.exchange.round / ctx.setup.rounds

    def init_server(self, ctx: ServerContext) -> Server:
        """A freshly initialised network."""
        return Server(snapshot(self.network(ctx)), {})

    def download(self, server: Server, client: int, ctx: ServerContext) -> Down:
        """θ, and for training the mean over the moments of all other clients that sent one."""
        known = [moment for k, moment in server.moments.items() if k != client]
        training = ctx.exchange.kind == "train"
        return Down(server.weights, torch.stack(known).mean(0) if training and known else None)

    def local_update(self, state: None, down: Down, ctx: ClientContext) -> Local[None, Up]:
        """R_k by the received network, or the local epochs."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        if ctx.exchange.kind == "moments":
            return Local(state, Up(None, self.moment(net, ctx)))
        others = None if down.others is None else down.others.to(ctx.setup.device)
        optimiser, share = ctx.optimiser(net), self.own_share(ctx)
        for batch in ctx.batches():
            z1, z2 = self.projected(net, torch.cat(batch.views())).chunk(2)
            optimiser.step(spectral_contrast(z1, z2, others, share))
        return Local(state, Up(snapshot(net), None), optimiser.metrics())

    def projected(self, net: nn.Module, images: Tensor) -> Tensor:
        """Z (B×d), shortened to √μ where it is longer."""
        z: Tensor = net(images)
        excess = torch.linalg.vector_norm(z, dim=1, keepdim=True) / math.sqrt(self.length)
        shortened: Tensor = z / excess.clamp(min=1)
        return shortened

    @torch.no_grad()
    def moment(self, net: nn.Module, ctx: ClientContext) -> Tensor:
        """R_k, with BatchNorm by the batch as in training."""
        total, count = torch.zeros(self.width(ctx), self.width(ctx), device=ctx.setup.device), 0
        with untracked(net):
            for batch in ctx.batches(self.moment_epochs, counted=False):
                z = self.projected(net, batch.views(1)[0])
                total, count = total + z.T @ z, count + len(z)
        noise = torch.randn(total.shape).to(total)
        return (total / count + self.noise * noise).cpu()

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Up:  # noqa: ARG002
        """A moment, or a network."""
        if ctx.exchange.kind == "moments":
            return Up(None, torch.zeros(()).expand(self.width(ctx), self.width(ctx)))
        return Up(server.weights, None)

    def aggregate(self, server: Server, reports: Reports[Up], ctx: ServerContext) -> Server:
        """Remember the moments; merge the networks by the run's rule."""
        combined: Combiner[Model] = ctx.combining(self.bn_stats)
        moments = dict(server.moments)
        for report in reports:
            if report.upload.moment is not None:
                moments[report.client] = report.upload.moment.clone()
            elif report.upload.weights is not None:
                combined.add(Model(report.upload.weights), report.examples)
        if ctx.exchange.kind == "train":
            return Server(combined.onto(Model(server.weights)).weights, moments)
        self.describe(moments, ctx)
        return Server(server.weights, moments)

    def describe(self, moments: dict[int, Tensor], ctx: ServerContext) -> None:
        """The log's numbers: how spread out clients are, and how much they overlap."""
        if len(moments) < 2:
            return
        rows = torch.stack([m.flatten() for m in moments.values()]).double()
        products = rows @ rows.T
        count, own = len(rows), products.diagonal().sum()
        ctx.metrics["own_moment"] = float(own / count)
        ctx.metrics["overlap"] = float((products.sum() - own) / (count * (count - 1)))

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        """The backbone."""
        return backbone(server.weights, ctx)

    def local_encoder(self, upload: Up, ctx: ServerContext) -> nn.Module | None:
        """That of a client's network."""
        if upload.weights is None or self.bn_stats == "local":
            return None
        return backbone(upload.weights, ctx)

    def outline(self, server: Server | None, cohort: list[int], ctx: ServerContext) -> Server:
        """After moments were sent the server has them."""
        if server is None:
            return self.init_server(ctx)
        if ctx.exchange.kind != "moments":
            return server
        blank = torch.zeros(()).expand(self.width(ctx), self.width(ctx))
        return Server(server.weights, server.moments | dict.fromkeys(cohort, blank))
