"""FedCA: contrastive averaging with a dictionary and alignment (Zhang et al.).

arXiv:2010.08982, 2020; FITEE 2023, doi:10.1631/FITEE.2200268.

    L   = CE([z̃_i z̃_jᵀ, z̃_i dictᵀ]/τ, 0…N-1) + β·(‖h_align - h‖² + ‖z_align - z‖²)
    Z_t ← α·Z_{t-1} + (1 - α)·z_t for every local image, Z_0 = 0;   dictionary row = Z_t/‖Z_t‖

Papers are silent or at odds here: a client uploads its share ⌈K·n_k/Σn⌉ of the dictionary's K rows,
made by the model it has just trained (or by the one it received: dict_model). Where not everybody
takes part (they always do in the papers), the server keeps the newest rows of each client, and t
counts a client's participations.
The alignment model is SimCLR on the public images. Each step draws a mini-batch of these and runs
it without augmentation and on BatchNorm's running statistics: so equal models have distance zero,
and public images leave no trace in a client's statistics.

Figure 5: (i) dictionary = 0 and alignment = 0, (ii) dictionary = 0, (iii) ensembling = 0 and
alignment = 0, (iv) alignment = 0, (v) the defaults. (i) is not quite fedsimclr, whose loss has both
directions and 2N - 2 negatives: here there are N - 1, all from the other view.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import ClientContext, Context, ServerContext, Setup, Shard
from furlong.core.method import Local, Method, Report
from furlong.core.payload import Weights, payload
from furlong.core.weights import BatchNormPolicy, snapshot
from furlong.errors import FurlongError, require
from furlong.methods.base import (
    WEIGHTS_REVEAL,
    Model,
    backbone,
    projected_width,
    projecting,
)
from furlong.nn.encoders import evaluating
from furlong.nn.losses import alignment_loss, dictionary_nce, nt_xent
from furlong.nn.peernorm import peers


@payload("furlong.methods.fedca.Alignment")
class Alignment:
    """The alignment model and its images, uint8 n×C×S×S; constant, sent once to each client."""

    weights: Weights
    pixels: Tensor


@payload("furlong.methods.fedca.Server")
class Server:
    """The global network, each client's newest dictionary rows, who has the alignment model."""

    weights: Weights
    rows: dict[int, Tensor]  # client -> unit rows r_k×d_z, ascending
    alignment: Alignment | None
    told: tuple[int, ...]


@payload("furlong.methods.fedca.Down")
class Down:
    """The network, the dictionary (rows×d_z), and at first the alignment model."""

    weights: Weights
    dictionary: Tensor
    alignment: Alignment | None


@payload("furlong.methods.fedca.Up")
class Up:
    """The trained network and rows for the dictionary."""

    weights: Weights
    rows: Tensor


@payload("furlong.methods.fedca.State")
class State:
    """What a client keeps: Z (n_k×d_z), and the alignment images with what they are to become."""

    ensemble: Tensor | None
    pixels: Tensor | None
    h: Tensor | None
    z: Tensor | None


@dataclass(frozen=True)
class FedCA(Method[Server, State, Down, Up]):
    """SimCLR with negatives from all clients, and a public model as a common system of axes."""

    paper: ClassVar[str] = (
        "Zhang et al., Federated Unsupervised Representation Learning, arXiv:2010.08982; "
        "FITEE 2023, doi:10.1631/FITEE.2200268"
    )
    pairs_views: ClassVar[bool] = True
    keeps: ClassVar[str] = (
        "a running mean of the projections of its images; the public alignment images with the "
        "alignment model's representations of them"
    )
    leaves: ClassVar[str] = (
        "Encoder and projector weights, and projections of single images, which the server "
        "forwards to all other clients. Everybody holds the encoder, so nearest-neighbour, "
        "membership and inversion attacks on them are white-box; secure aggregation cannot "
        f"protect what must be forwarded one by one. {WEIGHTS_REVEAL}"
    )
    caution: ClassVar[str] = (
        "FedU's authors criticise FedCA for sharing features of single images; repeated over "
        "rounds they are a time series per image. The paper's results are single runs, and its "
        "semi-supervised protocol is not that of the other papers. It gives neither τ nor how "
        "the alignment model was trained: 0.5 and SimCLR are choices made here."
    )

    temperature: float = 0.5  # τ; not given in the papers
    dictionary: int = 1024  # K; 0: no dictionary
    ensembling: float = 0.5  # α; 0: rows of the last trained model alone
    alignment: float = 0.01  # β; 0: no alignment, and no public images needed
    align_images: int = 3200  # public images that every client gets once
    align_epochs: int = 100  # of the alignment model's training at the server
    # over the images of a mini-batch; dimensions are summed. "sum" is as printed: B times stronger
    align_reduction: Literal["mean", "sum"] = "mean"
    dict_model: Literal["local", "global"] = "local"  # trained (Algorithm 1) or received (text)
    dict_upload: Literal["sample", "full"] = "sample"  # full: all rows go up, the server samples
    exclude_own: bool = False  # send a client only the rows of others: no image is its own negative
    symmetric: bool = False  # also contrast view j with view i, as the papers do not
    projection_head: str = "proj_128"
    bn_stats: BatchNormPolicy = field(default="average", kw_only=True)

    def __post_init__(self) -> None:
        require(0 < self.temperature < inf, "temperature", self.temperature, "above 0")
        require(self.dictionary >= 0, "dictionary", self.dictionary, "at least 0")
        require(0 <= self.ensembling < 1, "ensembling", self.ensembling, "at least 0 and below 1")
        require(0 <= self.alignment < inf, "alignment", self.alignment, "at least 0")
        require(self.align_images >= 1, "align_images", self.align_images, "at least 1")
        require(self.align_epochs >= 1, "align_epochs", self.align_epochs, "at least 1")

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        """Only for the alignment model."""
        return self.alignment > 0

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d_z."""
        return projecting(self.projection_head, ctx)

    def blank(self, count: int, ctx: Context) -> Tensor:
        """``count`` dictionary rows of zeros, count×d_z."""
        return torch.zeros(count, projected_width(self.projection_head, ctx))

    def share(self, client: int, setup: Setup) -> int:
        """How many rows of the dictionary are ``client``'s."""
        own, everybody = setup.sizes[client], sum(setup.sizes.values())
        return min(own, -(-self.dictionary * own // everybody))

    def sample(self, rows: Tensor, client: int, setup: Setup) -> Tensor:
        """The client's share of ``rows``, drawn without replacement."""
        return rows[torch.randperm(len(rows))[: self.share(client, setup)]]

    # ------------------------------------------------------------ before the first round

    def init_server(self, ctx: ServerContext) -> Server:
        """A freshly initialised network, and the alignment model trained on public images."""
        # first, so that all settings and FedSimCLR start from the same weights
        weights = snapshot(self.network(ctx))
        return Server(weights, {}, self.train_alignment(ctx) if self.alignment else None, ())

    def train_alignment(self, ctx: ServerContext) -> Alignment:
        """SimCLR on images drawn from the public ones."""
        if ctx.public is None:
            raise FurlongError(
                "fedca needs public images for its alignment model: give --public NAME, e.g. stl10 "
                "or folder:PATH, or set method.alignment = 0."
            )
        chosen = torch.randperm(len(ctx.public))[: self.align_images]
        data = Shard(ctx.public.images, ctx.public.rows[chosen])
        net = ctx.network("net", lambda: self.network(ctx), snapshot(self.network(ctx)))
        optimiser = ctx.optimiser(net)
        for epoch in range(1, self.align_epochs + 1):
            losses = []
            for batch in ctx.batches_of(data, epochs=1):
                with peers(net):
                    z1, z2 = net(torch.cat(batch.views())).chunk(2)
                loss = nt_xent(z1, z2, self.temperature)
                optimiser.step(loss)
                losses.append(loss.detach())
            if 10 * epoch // self.align_epochs > 10 * (epoch - 1) // self.align_epochs:
                loss = torch.stack(losses).mean()
                ctx.tell(f"alignment model: epoch {epoch}/{self.align_epochs}, loss {loss:.3f}")
        return Alignment(snapshot(net), data.pixels(torch.arange(len(data))))

    # ------------------------------------------------------------ a round

    def download(self, server: Server, client: int, ctx: ServerContext) -> Down:
        """The dictionary is everybody's newest rows, in the order of clients."""
        rows = [r for k, r in server.rows.items() if not (self.exclude_own and k == client)]
        # every share was rounded up, so there may be a row too many for each of some clients
        spare = max(0, sum(map(len, rows)) - self.dictionary)
        keep = len(rows) - spare
        rows = [*rows[:keep], *(r[:-1] for r in rows[keep:])]
        dictionary = torch.cat([self.blank(0, ctx), *rows])[: self.dictionary]
        alignment = None if client in server.told else server.alignment
        return Down(server.weights, dictionary, alignment)

    def init_client(self, ctx: ClientContext) -> State:  # noqa: ARG002
        """Nothing yet."""
        return State(None, None, None, None)

    def local_update(self, state: State, down: Down, ctx: ClientContext) -> Local[State, Up]:
        """Train on the contrastive and the alignment loss, then make rows for the dictionary."""
        if down.alignment is not None:
            state = self.aim(state, down.alignment, ctx)
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        dictionary = down.dictionary.to(ctx.setup.device)
        optimiser = ctx.optimiser(net)
        ensemble = None
        if self.dictionary and self.dict_model == "global":
            ensemble = self.ensemble(net, state.ensemble, ctx)
        parts = []
        for batch in ctx.batches():
            with peers(net):
                z1, z2 = net(torch.cat(batch.views())).chunk(2)
            loss = dictionary_nce(z1, z2, dictionary, self.temperature, self.symmetric)
            if self.alignment:
                distance = self.distance(net, state, ctx)
                parts.append(torch.stack([loss.detach(), distance.detach()]))
                loss = loss + self.alignment * distance
            optimiser.step(loss)
        metrics = optimiser.metrics()
        if parts:
            means = torch.stack(parts).mean(dim=0).tolist()
            metrics |= dict(zip(("contrastive", "alignment"), means, strict=True))
        if len(dictionary):  # 1: all rows are one, and there is nothing to tell images apart by
            metrics["dictionary_cosine"] = float(dictionary.mean(dim=0).square().sum())
        weights, rows = snapshot(net), self.blank(0, ctx)
        if self.dictionary:
            if ensemble is None:
                ensemble = self.ensemble(net, state.ensemble, ctx)
            state = replace(state, ensemble=ensemble)
            rows = F.normalize(ensemble, dim=1)  # the bias correction 1/(1 - αᵗ) would cancel
            if self.dict_upload == "sample":
                rows = self.sample(rows, ctx.client, ctx.setup)
        return Local(state, Up(weights, rows), metrics)

    def aim(self, state: State, alignment: Alignment, ctx: ClientContext) -> State:
        """The state with the alignment model's h and z, after which the model may be forgotten."""
        net = ctx.network("net", lambda: self.network(ctx), alignment.weights)
        pieces = torch.split(alignment.pixels, ctx.setup.batch_size)
        h = outputs(net.get_submodule("backbone"), map(ctx.setup.augment.plain, pieces), ctx)
        z = outputs(net.get_submodule("projector"), torch.split(h, ctx.setup.batch_size), ctx)
        return replace(state, pixels=alignment.pixels.clone(), h=h, z=z)

    def distance(self, net: nn.Module, state: State, ctx: ClientContext) -> Tensor:
        """The alignment loss on a random mini-batch of the alignment images."""
        if state.pixels is None or state.h is None or state.z is None:
            raise ValueError("this client was sent the alignment model before, and has lost it")
        chosen = torch.randperm(len(state.pixels))[: ctx.setup.batch_size]
        device = ctx.setup.device
        net.eval()  # gradients flow all the same
        h = net.get_submodule("backbone")(ctx.setup.augment.plain(state.pixels[chosen].to(device)))
        z = net.get_submodule("projector")(h)
        net.train()
        goal = state.h[chosen].to(device), state.z[chosen].to(device)
        return alignment_loss(h, z, *goal, self.align_reduction)

    def ensemble(self, net: nn.Module, before: Tensor | None, ctx: ClientContext) -> Tensor:
        """Z after this round, not normalised."""
        # not ctx.batches, which counts images trained on
        pieces = torch.split(torch.arange(len(ctx.data)), ctx.setup.batch_size)
        z = outputs(net, (ctx.setup.augment.plain(ctx.data.pixels(rows)) for rows in pieces), ctx)
        return torch.lerp(z, torch.zeros_like(z) if before is None else before, self.ensembling)

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Up:
        """A network, and the client's share of rows or all of them."""
        full = self.dictionary and self.dict_upload == "full"
        count = ctx.setup.sizes[client] if full else self.share(client, ctx.setup)
        return Up(server.weights, self.blank(count, ctx))

    def aggregate(
        self, server: Server, reports: Iterable[Report[Up]], ctx: ServerContext
    ) -> Server:
        """The networks by the run's rule; the rows of those who took part replace their old."""
        combined: Combiner[Model] = ctx.combining(self.bn_stats)
        rows: dict[int, Tensor] = {}
        for report in reports:
            combined.add(Model(report.upload.weights), report.examples)
            sent = report.upload.rows.clone()  # not a piece of the message's memory
            if self.dict_upload == "full":
                sent = self.sample(sent, report.client, ctx.setup)
            rows[report.client] = sent
        weights = combined.onto(Model(server.weights)).weights
        return self.heard(replace(server, weights=weights), rows)

    def heard(self, server: Server, rows: dict[int, Tensor]) -> Server:
        """The state after clients have answered with ``rows``."""
        newest = dict(sorted((server.rows | rows).items())) if self.dictionary else {}
        return replace(server, rows=newest, told=tuple(sorted({*server.told, *rows})))

    # ------------------------------------------------------------ results

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        """The backbone."""
        return backbone(server.weights, ctx)

    def local_encoder(self, upload: Up, ctx: ServerContext) -> nn.Module | None:
        """The client's backbone."""
        return None if self.bn_stats == "local" else backbone(upload.weights, ctx)

    def outline(self, server: Server | None, cohort: list[int], ctx: ServerContext) -> Server:
        """As :meth:`init_server` and :meth:`aggregate` without training; needs no public images."""
        if server is not None:
            rows = {client: self.blank(self.share(client, ctx.setup), ctx) for client in cohort}
            return self.heard(server, rows)
        weights, alignment = snapshot(self.network(ctx)), None
        if self.alignment:
            most = self.align_images if ctx.public is None else len(ctx.public)
            count, side = min(self.align_images, most), ctx.setup.image_size
            pixels = torch.zeros(count, ctx.setup.channels, side, side, dtype=torch.uint8)
            alignment = Alignment(weights, pixels)
        return Server(weights, {}, alignment, ())


def outputs(net: nn.Module, inputs: Iterable[Tensor], ctx: ClientContext) -> Tensor:
    """What ``net`` makes of ``inputs`` in eval mode, one below the other on the CPU."""
    with evaluating(net):
        return torch.cat([net(x.to(ctx.setup.device)).cpu() for x in inputs])
