"""Orchestra: clients predict clusters that the server finds among their clusters.

Lubana et al., "Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering",
ICML 2022 (github.com/akhilmathurs/orchestra).

    x₁, x₂ two views, x₃ a third one turned by r·90°; ξ a slowly following copy of the network θ
    t = softmax(z̃_ξ(x₁)·Cᵀ/T),  s = softmax(z̃(x₂)·Cᵀ/T),  L = -mean Σ t·log s + CE(rot(z(x₃)), r)
    ξ ← m·ξ + (1 - m)·θ in every step, between the passes of θ and of ξ
    at the end: M newest z̃_ξ(x₁) → L local centroids, by k-means with clusters of equal size
    server: average of θ, ξ, rot; G centroids C fitted to the local centroids of all clients

Before the first round clients only fill their memory and cluster it, so that C exists; no network
changes in that exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import ClientContext, Exchange, ServerContext, Setup
from furlong.core.method import USUAL, Local, Method, Reports
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.data.augment import rotated
from furlong.devices import moved
from furlong.errors import require
from furlong.methods.bank import enqueue, new_bank
from furlong.methods.base import NO_NEGATIVES_REMEDY, WEIGHTS_REVEAL
from furlong.methods.networks import Projecting, backbone, named_head
from furlong.nn.clustering import equalised_kmeans, fit_prototypes
from furlong.nn.encoders import untracked
from furlong.nn.losses import cluster_agreement
from furlong.seeding import threads
from furlong.settings import setting


@payload("furlong.methods.orchestra.Nets")
class Nets:
    """θ (backbone and projector), ξ unless clients keep it, and the rotation layer."""

    online: Weights
    target: Weights | None
    rotation: Weights


@payload("furlong.methods.orchestra.Shared")
class Shared:
    """What the server has and sends: the networks and C, G×d; C only when there is one."""

    nets: Nets
    centroids: Tensor | None


@payload("furlong.methods.orchestra.Up")
class Up:
    """The networks, if they were trained, and the local centroids, L×d."""

    nets: Nets | None
    centroids: Tensor


@payload("furlong.methods.orchestra.State")
class State:
    """What a stateful client keeps: ξ, and its memory M×d, the oldest row first."""

    target: Weights
    memory: Tensor


@dataclass(frozen=True)
class Orchestra(Projecting, Method[Shared, State | None, Shared, Up]):
    """Global clusters of local clusters are the targets, turned images keep from collapsing."""

    singles = "its server clusters the centroids of all clients"
    paper = (
        "Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent "
        "Clustering, ICML 2022"
    )
    unit_rows = ("centroids",)
    remedy = f"{NO_NEGATIVES_REMEDY} A lower --method.decay lets the target follow sooner."
    keeps = "nothing; with stateful = true its target network and method.memory projections"
    leaves = (
        "Weights of the network, its target copy and the rotation layer, and "
        "method.local_clusters centroids, each the mean direction of projections of the client's "
        "images. A centroid is of method.memory / method.local_clusters images on average; the "
        "official code also sends their projections one by one, which is left out here. "
        f"{WEIGHTS_REVEAL}"
    )
    caution = (
        "Clusters are only about equal in size: a centroid can stand for one image, and does when "
        "a client has hardly more images than local clusters."
    )
    usual = {
        **USUAL,
        "data.augment": "orchestra",  # on figures too: clusters are lost under stronger views
        "optimiser.lr": 0.0005,
        "optimiser.schedule": "constant",  # clusters go on changing to the end
        "train.rounds": 60,
        "method.decay": 0.99,
        "method.global_clusters": 32,  # five clients send 80 local ones
    }

    temperature: float = setting(0.1, "The temperature T of the assignments.", above=0)
    decay: float = setting(0.996, "The decay m of the target network.", at_least=0, at_most=1)
    global_clusters: int = setting(128, "The number G of global clusters.", at_least=1)
    local_clusters: int = setting(16, "The number L of clusters of a client.", at_least=1)
    memory: int = setting(128, "The number M of projections that a client clusters, at least L.")
    server_steps: int = setting(500, "The steps of the server's clustering.", at_least=1)
    stateful: bool = setting(
        False, "Clients keep target network and memory; otherwise they are sent and filled anew."
    )
    projection_head: str = named_head("orchestra_proj")

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"at least method.local_clusters, {self.local_clusters}"
        require(self.memory >= self.local_clusters, "memory", self.memory, rule)

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """Clusters of the untrained network, then the rounds."""
        yield Exchange(0, "cluster")
        for index in range(setup.rounds):
            yield Exchange(index)

    def init_server(self, ctx: ServerContext) -> Shared:
        """Freshly initialised networks, ξ = θ; random C to start from."""
        online = snapshot(self.network(ctx))
        rotation = snapshot(nn.Linear(self.width(ctx), 4))
        nets = Nets(online, None if self.stateful else online, rotation)
        return Shared(nets, new_bank(self.global_clusters, self.width(ctx)))

    def download(self, server: Shared, client: int, ctx: ServerContext) -> Shared:  # noqa: ARG002
        """The networks and C. The official code adds the mean of the local centroids, unused."""
        if ctx.exchange.kind == "cluster":  # no C yet, and ξ = θ
            return Shared(replace(server.nets, target=None), None)
        return server

    def local_update(
        self, state: State | None, down: Shared, ctx: ClientContext
    ) -> Local[State | None, Up]:
        """Fill the memory, train unless this is the first exchange, cluster."""
        start = state.target if state else down.nets.target or down.nets.online
        target = ctx.network("target", lambda: self.network(ctx), start).requires_grad_(False)
        # the official code fills it once only; its stateless clients then begin with random rows
        memory = state.memory.to(ctx.setup.device, copy=True) if state else self.fill(target, ctx)
        nets: Nets | None = None
        metrics: dict[str, float] = {}
        if down.centroids is not None:
            nets, memory, metrics = self.train(target, memory, down, ctx)
        centroids = equalised_kmeans(memory, self.local_clusters).cpu()
        state = State(snapshot(target), memory.cpu()) if self.stateful else None
        return Local(state, Up(nets, centroids), metrics)

    @torch.no_grad()
    def fill(self, target: nn.Module, ctx: ClientContext) -> Tensor:
        """M projections by ξ of first views; with fewer images than that, of several views."""
        rows: list[Tensor] = []
        with untracked(target):
            while sum(map(len, rows)) < self.memory:
                for batch in ctx.batches(1, counted=False):
                    rows.append(F.normalize(target(batch.views(1)[0]), dim=1))
                    if sum(map(len, rows)) >= self.memory:
                        break
        return torch.cat(rows)[: self.memory]

    def train(
        self, target: nn.Module, memory: Tensor, down: Shared, ctx: ClientContext
    ) -> tuple[Nets, Tensor, dict[str, float]]:
        """The local epochs; the networks and the memory after them, the oldest row first."""
        assert down.centroids is not None
        online = ctx.network("online", lambda: self.network(ctx), down.nets.online)
        layer = ctx.network("rotation", lambda: nn.Linear(self.width(ctx), 4), down.nets.rotation)
        optimiser, position = ctx.optimiser(online, layer), 0
        centroids = down.centroids.to(ctx.setup.device)
        for batch in ctx.batches():
            first, second = batch.views()
            turns = torch.randint(4, (len(batch.index),))
            turned = rotated(batch.views(1)[0], turns)
            # The official code also passes the first view through θ, for its BatchNorm alone.
            found = online(second)
            loss = F.cross_entropy(layer(online(turned)), moved(turns, ctx.setup.device))
            ema_(target, online, self.decay)
            with torch.no_grad():
                wanted = F.normalize(target(first), dim=1)
            loss = loss + cluster_agreement(found, wanted, centroids, self.temperature)
            optimiser.step(loss)
            position = enqueue(memory, position, wanted)
        kept = None if self.stateful else snapshot(target)
        nets = Nets(snapshot(online), kept, snapshot(layer))
        return nets, memory.roll(-position, 0), optimiser.metrics()

    def expected(self, server: Shared, client: int, ctx: ServerContext) -> Up:  # noqa: ARG002
        """Local centroids, and after training the networks."""
        rows = torch.zeros(()).expand(self.local_clusters, self.width(ctx))
        return Up(None if ctx.exchange.kind == "cluster" else server.nets, rows)

    def aggregate(self, server: Shared, reports: Reports[Up], ctx: ServerContext) -> Shared:
        """Mean of the networks; C goes on from where it is to the new local centroids."""
        combined: Combiner[Nets] = ctx.combining(self.bn_stats)
        local: list[Tensor] = []
        for report in reports:
            if report.upload.nets is not None:
                combined.add(report.upload.nets, report.examples)
            # a copy: the upload's tensors are views that keep its whole buffer alive
            local.append(report.upload.centroids.clone())
        nets = combined.onto(server.nets)
        if not local:
            return Shared(nets, server.centroids)
        assert server.centroids is not None
        start, device = server.centroids, ctx.setup.device
        with threads(1):  # two would only wait for each other: these are many small steps
            fitted = fit_prototypes(
                start.to(device), torch.cat(local).to(device), self.temperature, self.server_steps
            )
        return Shared(nets, fitted.cpu())

    def encoder(self, server: Shared, ctx: ServerContext) -> nn.Module:
        """The backbone of θ."""
        return backbone(server.nets.online, ctx)

    def local_encoder(self, upload: Up, ctx: ServerContext) -> nn.Module | None:
        """What would be the global encoder if this client were the only one."""
        if upload.nets is None or self.bn_stats == "local":
            return None
        return backbone(upload.nets.online, ctx)
