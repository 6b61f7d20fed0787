"""A method with every idea that was tried for Furlong's own recipe, as options (recipe.py).

With nothing switched on it is FedSimCLR. What paid is in ``src/furlong/methods/furlong.py``;
docs/recipe.md has the log. Only weights and statistics over all of a client's images leave it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import Batch, ClientContext, Context, Exchange, ServerContext, Setup
from furlong.core.method import USUAL, Local, Method, Reports
from furlong.core.payload import Weights, payload
from furlong.core.weights import lerp, snapshot
from furlong.data.augment import rotated
from furlong.methods.base import Model
from furlong.methods.networks import Projecting, backbone, extended, named_head
from furlong.nn.encoders import untracked
from furlong.nn.losses import barlow_twins
from furlong.settings import setting


@payload("furlong.benchmarks.ideas.Server")
class Server:
    """The network, its running average over the rounds, and the clients' statistics."""

    weights: Weights
    average: Weights
    statistics: dict[int, Tensor]
    chains: dict[int, Weights]
    moments: dict[int, Weights]  # the optimiser's, by chain
    norms: Weights  # sums of BatchNorm statistics over the hops of a round, and their weight


@payload("furlong.benchmarks.ideas.Down")
class Down:
    """The network, and the statistics of all other clients (each (1+d)×d: mean and factor)."""

    weights: Weights
    moments: Weights
    others: Tensor | None


@payload("furlong.benchmarks.ideas.Up")
class Up:
    """The trained network; the statistics of the projections by the received one."""

    weights: Weights
    moments: Weights
    statistics: Tensor | None


@dataclass(frozen=True)
class Ideas(Projecting, Method[Server, None, Down, Up]):
    """SimCLR, and what may be added to it."""

    usual = {**USUAL, "method.temperature": 0.2}
    usual_small = {"projection_head": "mlp:256:128:bn"}

    temperature: float = setting(0.5, "τ", above=0)
    projection_head: str = named_head("proj_128")
    rotation: float = setting(0.0, "weight of telling quarter turns", at_least=0)
    turned: float = setting(1.0, "share of a batch that is turned", above=0, at_most=1)
    turn_view: str = setting("plain", "which view is turned: plain, view or both")
    small_views: int = setting(0, "further views at half the size", at_least=0)
    small_size: int = setting(16, "their side in pixels", at_least=4)
    barlow: float = setting(0.0, "weight of Barlow Twins' loss over d", at_least=0)
    moments: float = setting(0.0, "weight of tr(R·R of the others)", at_least=0)
    synthetic: int = setting(0, "negatives drawn from the others' normal distributions", at_least=0)
    average: float = setting(0.0, "decay of the running average of global models", at_least=0)
    distil: float = setting(0.0, "weight of staying near the received network's h", at_least=0)
    fix_norm_from: float = setting(1.0, "share of rounds after which BatchNorm is fixed")
    uniform_h: float = setting(0.0, "weight of uniformity of h", at_least=0)
    chains: int = setting(0, "how many networks pass from client to client", at_least=0)
    mean_norms: bool = setting(True, "BatchNorm statistics are means over a round's hops")
    averagings: int = setting(1, "how often networks are averaged in an epoch", at_least=1)
    crop_from: float = setting(
        0.0, "least share of the image in a crop; 0: as the views", at_least=0
    )
    jitter: float = setting(0.0, "strength of colours; 0: as the views", at_least=0)
    prior: float = setting(0.0, "share of negatives taken to be of the same kind (debiased loss)")
    own: float = setting(
        1.0, "share of a client's own negatives; the rest is what the others' moments let expect"
    )
    carry: bool = setting(False, "the optimiser's moments go along with a chain")
    margin: float = setting(0.0, "share of the nearest negatives that is left out", at_least=0)

    def network(self, ctx: Context) -> nn.Module:
        """Backbone, projector, and the head for turns."""
        net = super().network(ctx)
        return extended(net, turns=nn.Linear(ctx.width, 4)) if self.rotation else net

    def order(self, setup: Setup, index: int) -> list[list[int]]:
        """Who trains after whom in round ``index``: one list for each chain."""
        draw = torch.Generator().manual_seed(1000 * setup.seed + index)
        clients = sorted(setup.sizes)
        shuffled = [clients[i] for i in torch.randperm(len(clients), generator=draw).tolist()]
        count = min(self.chains, len(clients))
        return [shuffled[i::count] for i in range(count)]

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        if not self.chains:  # all clients side by side
            for index in range(setup.rounds):
                yield from (Exchange(index, part=part) for part in range(self.averagings))
            return
        for index in range(setup.rounds):
            chains = self.order(setup, index)
            hops = len(chains[0])
            # several times around, with a part of an epoch each time
            for part in range(hops * self.averagings):
                who = sorted(chain[part % hops] for chain in chains if part % hops < len(chain))
                yield Exchange(index, clients=tuple(who), part=part)

    def place(self, client: int, ctx: ServerContext) -> tuple[int, int]:
        for i, chain in enumerate(self.order(ctx.setup, ctx.exchange.round)):
            if client in chain:
                return i, len(chain)
        raise ValueError(client)

    @property
    def asks(self) -> bool:
        return bool(self.moments or self.synthetic or self.own < 1)

    def init_server(self, ctx: ServerContext) -> Server:
        weights = snapshot(self.network(ctx))
        return Server(weights, weights if self.average else {}, {}, {}, {}, {})

    def download(self, server: Server, client: int, ctx: ServerContext) -> Down:
        known = [s for k, s in server.statistics.items() if k != client]
        weights, moments = server.weights, {}
        if self.chains:
            mine, _ = self.place(client, ctx)
            moments = server.moments.get(mine, {}) if self.carry else {}
            if ctx.exchange.part:
                weights = server.chains[mine]
        return Down(weights, moments, torch.stack(known) if known else None)

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Up:  # noqa: ARG002
        d = self.width(ctx)
        moments: Weights = {}
        if self.carry:
            for i, p in enumerate(self.network(ctx).parameters()):
                moments |= {f"{i}/step": torch.zeros(()), f"{i}/exp_avg": p.detach()}
                moments[f"{i}/exp_avg_sq"] = p.detach()
        return Up(server.weights, moments, torch.zeros(1 + d, d) if self.asks else None)

    def local_update(self, state: None, down: Down, ctx: ClientContext) -> Local[None, Up]:
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        statistics = self.statistics(net, ctx) if self.asks else None
        teacher = None
        if self.distil:
            teacher = ctx.network("teacher", lambda: self.network(ctx), down.weights)
            teacher.requires_grad_(False)
        if ctx.exchange.round >= self.fix_norm_from * ctx.setup.rounds:
            for part in net.get_submodule("backbone").modules():
                if isinstance(part, nn.modules.batchnorm._BatchNorm):
                    part.eval()
        optimiser = ctx.optimiser(net)
        if down.moments:
            optimiser.set_moments(down.moments)
        steps = ctx.setup.steps(ctx.client) // self.averagings
        for batch in islice(ctx.batches(), steps):
            optimiser.step(self.loss(net, teacher, batch, down.others))
        moments = optimiser.moments() if self.carry else {}
        moments = {k: t.clone(memory_format=torch.contiguous_format) for k, t in moments.items()}
        return Local(state, Up(snapshot(net), moments, statistics), optimiser.metrics())

    def loss(
        self, net: nn.Module, teacher: nn.Module | None, batch: Batch, others: Tensor | None
    ) -> Tensor:
        encode, project = net.get_submodule("backbone"), net.get_submodule("projector")
        recipe = batch.augment
        if self.crop_from:
            recipe = replace(recipe, scale=(self.crop_from, 1.0))
        if self.jitter:
            j = self.jitter
            recipe = replace(recipe, jitter=(j, j, j, j / 4))
        views = torch.cat(recipe.views(batch.pixels))
        h = encode(views)
        z = F.normalize(project(h), dim=1)
        b = len(batch.pixels)
        partner = torch.arange(2 * b, device=z.device).roll(b)
        logits = z @ z.T / self.temperature
        if self.margin:
            count = max(1, round(self.margin * 2 * b))
            own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, partner[:, None], True)
            shown = logits.masked_fill(own | torch.eye(2 * b, dtype=torch.bool), -torch.inf)
            logits = logits.scatter(1, shown.topk(count)[1], -torch.inf)
        logits = logits.fill_diagonal_(-torch.inf)
        if self.synthetic and others is not None:
            drawn = self.drawn(others, self.synthetic)
            logits = torch.cat([logits, z @ drawn.T / self.temperature], 1)
        if self.own < 1 and others is not None:
            loss = self.with_expected(logits, partner, z, others)
        elif self.prior:
            loss = self.debiased(logits, partner)
        else:
            loss = F.cross_entropy(logits, partner)
        if self.moments and others is not None:
            loss = loss + self.moments * self.overlap(z, others)
        if self.barlow:
            loss = loss + self.barlow * barlow_twins(z[:b], z[b:], 0.005) / z.shape[1]
        if self.uniform_h:
            u = F.normalize(h, dim=1)
            loss = loss + self.uniform_h * torch.pdist(u).square().mul(-2).exp().mean().log()
        if self.small_views:
            loss = loss + self.small(encode, project, batch, z)
        if self.rotation:
            loss = loss + self.rotation * self.turn_loss(net, encode, batch, views)
        if teacher is not None:
            with torch.no_grad():
                goal = teacher.get_submodule("backbone")(views)
            loss = loss + self.distil * (1 - F.cosine_similarity(h, goal, dim=1).mean())
        return loss

    def with_expected(self, logits: Tensor, partner: Tensor, z: Tensor, others: Tensor) -> Tensor:
        """Negatives of all clients: own ones, and E exp(z·x/τ) over the others' N(μ, Σ).

        For a normal distribution that is exp(z·μ/τ + zᵀΣz/2τ²).
        """
        n, count = logits.shape[1] - 2, len(others)
        positive = logits.gather(1, partner[:, None])[:, 0]
        own = logits.scatter(1, partner[:, None], -torch.inf).logsumexp(1) - math.log(n)
        means, factors = others[:, 0], others[:, 1:]
        along = torch.einsum("bd,cde->bce", z, factors).square().sum(2)
        expected = z @ means.T / self.temperature + along / (2 * self.temperature**2)
        away = expected.logsumexp(1) - math.log(count)
        shares = torch.tensor([self.own, 1 - self.own]).log()
        negative = torch.logaddexp(own + shares[0], away + shares[1]) + math.log(n)
        return (torch.logaddexp(positive, negative) - positive).mean()

    def debiased(self, logits: Tensor, partner: Tensor) -> Tensor:
        """Chuang et al., NeurIPS 2020: negatives less the share ``prior`` of positives."""
        n = logits.shape[1] - 2
        positive = logits.gather(1, partner[:, None]).exp()[:, 0]
        negative = logits.exp().sum(1) - positive
        other = (negative - n * self.prior * positive) / (1 - self.prior)
        other = other.clamp(min=n * math.exp(-1 / self.temperature))
        return -(positive / (positive + other)).log().mean()

    def turn_loss(self, net: nn.Module, encode: nn.Module, batch: Batch, views: Tensor) -> Tensor:
        count = max(2, round(self.turned * len(batch.pixels)))
        if self.turn_view == "plain":
            mild = replace(batch.augment, scale=(0.4, 1.0), jitter_p=0.0, gray=0.0, solarise=0.0)
            (images,) = mild.views(batch.pixels[:count], 1)
        else:
            images = views[:count]
        turns = torch.randint(4, (count,)).to(images.device)
        return F.cross_entropy(net.get_submodule("turns")(encode(rotated(images, turns))), turns)

    def small(self, encode: nn.Module, project: nn.Module, batch: Batch, z: Tensor) -> Tensor:
        recipe = batch.augment
        least = recipe.scale[0] if recipe.scale else 0.08
        recipe = replace(recipe, size=self.small_size, scale=(min(0.05, least), 0.4))
        drawn = torch.cat(recipe.views(batch.pixels, self.small_views))
        s = F.normalize(project(encode(drawn)), dim=1)
        b = len(batch.pixels)
        first, second = z[:b].detach(), z[b:].detach()
        goal = torch.arange(b, device=z.device).repeat(self.small_views)
        both = [F.cross_entropy(s @ t.T / self.temperature, goal) for t in (first, second)]
        return (both[0] + both[1]) / 2

    def drawn(self, others: Tensor, count: int) -> Tensor:
        """Unit vectors, as many of each of the others: mean + factor·noise. C×(1+d)×d."""
        clients, _, d = others.shape
        who = torch.randint(clients, (count,))
        noise = torch.randn(count, d)
        points = others[who, 0] + torch.einsum("nij,nj->ni", others[who, 1:], noise)
        return F.normalize(points, dim=1)

    @staticmethod
    def overlap(z: Tensor, others: Tensor) -> Tensor:
        """tr(R·R₋)·d, which is 1 if both are spread evenly."""
        d = z.shape[1]
        moments = others[:, 1:] @ others[:, 1:].mT + others[:, :1].mT @ others[:, :1]
        return (z.T @ z / len(z) * moments.mean(0)).sum() * d

    @torch.no_grad()
    def statistics(self, net: nn.Module, ctx: ClientContext) -> Tensor:
        """(1+d)×d: the mean of z, and L with LLᵀ their covariance."""
        rows = []
        with untracked(net):
            for step, batch in enumerate(ctx.batches(1, counted=False)):
                if step == 12:
                    break
                h = net.get_submodule("backbone")(batch.views(1)[0])
                rows.append(F.normalize(net.get_submodule("projector")(h), dim=1))
        z = torch.cat(rows)
        values, vectors = torch.linalg.eigh(torch.cov(z.T))
        return torch.cat([z.mean(0, keepdim=True), vectors * values.clamp(min=0).sqrt()])

    def aggregate(self, server: Server, reports: Reports[Up], ctx: ServerContext) -> Server:
        combined: Combiner[Model] = ctx.combining(self.bn_stats)
        statistics = dict(server.statistics)
        chains, carried = dict(server.chains), dict(server.moments)
        norms = {} if ctx.exchange.part == 0 else dict(server.norms)
        for report in reports:
            if self.chains:
                mine, _ = self.place(report.client, ctx)
                carried[mine] = {k: t.clone() for k, t in report.upload.moments.items()}
                chains[mine] = {k: t.clone() for k, t in report.upload.weights.items()}
                sums = {k: t.double() for k, t in chains[mine].items() if "running_" in k}
                sums["count"] = torch.ones((), dtype=torch.float64)
                for k, t in sums.items():
                    norms[k] = norms.get(k, torch.zeros_like(t)) + report.examples * t
            else:
                combined.add(Model(report.upload.weights), report.examples)
            if report.upload.statistics is not None:
                statistics[report.client] = report.upload.statistics.clone()
        if self.chains:
            order = self.order(ctx.setup, ctx.exchange.round)
            if ctx.exchange.part < len(order[0]) * self.averagings - 1:
                return Server(server.weights, server.average, statistics, chains, carried, norms)
            for i, chain in enumerate(order):
                combined.add(Model(chains[i]), sum(ctx.setup.sizes[k] for k in chain))
        weights = combined.onto(Model(server.weights)).weights
        if self.chains and self.mean_norms:
            count = norms["count"]
            weights = {
                k: (norms[k] / count).to(t.dtype) if k in norms else t for k, t in weights.items()
            }
        average = {}
        if self.average:
            # a young average follows closely: no start is remembered for long
            decay = min(self.average, (1 + ctx.exchange.round) / (4 + ctx.exchange.round))
            average = lerp(server.average, weights, 1 - decay)
        return Server(weights, average, statistics, chains, carried, norms)

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        return backbone(server.average or server.weights, ctx)
