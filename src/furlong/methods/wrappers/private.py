"""Any method that allows it under a privacy budget (``[privacy]``): of clients, or of records.

Clients (McMahan et al., ICLR 2018): with Δ_k = what client k would send - what it got,

    x ← x + ( Σ_k Δ_k·min(1, C/‖Δ_k‖) + N(0, (σC)²) ) / m,    m = clients that are asked

Every client counts the same and says neither how many images it has nor how it fared. Which clients
are asked in a round follows from the run's seed, which all know: there is no amplification by
sampling, and a client is charged for every round in which it was asked.

Records (Abadi et al., CCS 2016): a client's step is, with U a Poisson sample of its units,

    g = ( Σ_{u ∈ U} g_u·min(1, C/‖g_u‖) + N(0, (σC)²) ) / E|U|,    P(u ∈ U) = q = B/n

A unit is a record, or a group of records that the method contrasts with each other; groups are
drawn anew for every step. g_u is the gradient of the loss of this unit alone, computed alone: no
other unit can have a part in it. If one record is taken away its group is not whole and gives
nothing, so the sum moves by at most C; if the record is replaced, by at most 2C. Sample, groups and
noise come from a secret of the client. All that it sends is made of weights after such steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from secrets import token_hex
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from furlong.core.context import (
    Batch,
    ClientContext,
    Exchange,
    Optimiser,
    ServerContext,
    Setup,
    Shard,
)
from furlong.core.exchange import Server, draw_cohort, expected_upload
from furlong.core.method import AnyMethod, Local, Report
from furlong.core.noise import Noise, digest
from furlong.core.payload import Weights, flatten, is_buffer, parts, replace_tensors
from furlong.core.privacy import Ledger, PrivacySettings, Release, epsilon_of, noise_for
from furlong.errors import FurlongError
from furlong.methods.wrappers import Wrapping
from furlong.words import plural

FEW = 100  # clients; with fewer, hiding one of them hides a large share of what there is to learn


@dataclass(frozen=True)
class Forecast:
    """What a run under a budget is going to spend, and what is left of the signal."""

    epsilon: float
    delta: float
    parameters: int  # that travel and get noise
    cohort: int  # clients in the first round
    ratio: float  # length of the noise on the first mean update, over the longest possible update
    releases: dict[int, tuple[Release, int]]  # client -> one round's, and in how many rounds

    @property
    def noise(self) -> tuple[float, float]:
        """The smallest and the largest σ of a client."""
        every = [release.noise for release, _ in self.releases.values()]
        return min(every), max(every)


@dataclass(frozen=True)
class Private(Wrapping[Any]):
    """``inner`` under a budget; the server's state is the inner method's.

    ``secret``: what noise is made from, absent where nothing is trained.
    """

    privacy: PrivacySettings
    fraction: float = 1.0
    min_clients: int = 0
    secret: bytes | None = field(default=None, repr=False)

    unit: ClassVar[str] = ""  # what is protected, in words

    @abstractmethod
    def release(self, setup: Setup, client: int) -> Release:
        """What one round releases of ``client``, or of a record of it."""

    @abstractmethod
    def units(self, setup: Setup) -> int:
        """How many there are to protect."""

    @abstractmethod
    def ratio(self, setup: Setup, cohort: list[int], parameters: int) -> float:
        """The noise on a mean update (in a round, or a step) over its longest possible length."""

    @abstractmethod
    def warning(self, setup: Setup, forecast: Forecast) -> str:
        """What the numbers mean, in a sentence or two."""

    def state_of(self, server: Any, client: int) -> Any:  # noqa: ARG002
        """The inner method's, for everybody."""
        return server

    @property
    def repeats(self) -> bool:
        """Whether an exchange that is done again from the same values has the same result."""
        return True

    def asked(self, server: Any, cohort: list[int], ctx: ServerContext) -> list[int]:
        """As the method says; stops before anybody is asked for what would exceed the budget."""
        clients = self.cohort_of(ctx.setup, ctx.exchange)
        mark = None if self.repeats else token_hex()  # like that of no result there was
        self.require_budget(Ledger(ctx.workspace()), ctx.setup, ctx.exchange, clients, mark)
        return super().asked(server, cohort, ctx)

    def init_server(self, ctx: ServerContext) -> Any:
        """As the method does."""
        return self.inner.init_server(ctx)

    def outline(self, server: Any, cohort: list[int], ctx: ServerContext) -> Any:
        """As the method does."""
        return self.inner.outline(server, cohort, ctx)

    def delta(self, setup: Setup) -> float:
        """The δ of the run."""
        return self.privacy.delta_of(self.units(setup))

    def cohort_of(self, setup: Setup, exchange: Exchange) -> list[int]:
        """The clients of an exchange."""
        return draw_cohort(setup.seed, exchange, sorted(setup.sizes), self.fraction)

    def visits(self, setup: Setup) -> dict[int, int]:
        """In how many exchanges of the run every client is asked: all know it from the seed."""
        plan, clients = tuple(self.inner.plan(setup)), tuple(sorted(setup.sizes))
        return _visits(plan, setup.seed, clients, self.fraction)

    def forecast(self, setup: Setup) -> Forecast:
        """What the whole run will spend; refuses what would leave without being covered."""
        server = Server(self.inner, setup, fraction=self.fraction)
        first = next(iter(server.exchanges()))
        with server.computing("init"):
            ctx = server.context(first)
            state = self.inner.outline(None, [], ctx)
            upload = expected_upload(self.inner, state, min(setup.sizes), ctx)
        uncovered = sorted({kind for _, kind, _, _ in parts(upload)} - {"params"})
        if uncovered:
            raise FurlongError(
                f"privacy.level = {self.privacy.level}: an upload would also hold "
                f"{' and '.join(uncovered)}, which the budget does not cover. BatchNorm statistics "
                "(buffers) are gone with --model.early-norm all_gn or a vision transformer; for "
                "the rest choose another method."
            )
        parameters = sum(count for _, _, count, _ in parts(upload))
        visits, cohort = self.visits(setup), self.cohort_of(setup, first)
        releases = {k: (self.release(setup, k), n) for k, n in visits.items() if n}
        delta = self.delta(setup)
        whole = {Release(r.sampling, r.noise, n * r.count) for r, n in releases.values()}
        epsilon = max(epsilon_of((release,), delta) for release in whole)
        ratio = self.ratio(setup, cohort, parameters)
        return Forecast(epsilon, delta, parameters, len(cohort), ratio, releases)

    def advice(self, setup: Setup) -> list[str]:
        """The method's, and what the budget means; refuses a run that its noise would drown."""
        forecast = self.forecast(setup)
        low, high = (f"{noise:.3g}" for noise in forecast.noise)
        spread = low if low == high else f"{low} to {high}"
        sentence = (
            f"differential privacy: the run will spend ε = {forecast.epsilon:.3g} at δ = "
            f"{forecast.delta:.2g} to protect {self.unit}, with noise σ = {spread} and clip "
            f"{self.privacy.clip:g} on {forecast.parameters:,} parameters. "
            + self.warning(setup, forecast)
        )
        if forecast.ratio > self.privacy.max_ratio:
            raise FurlongError(
                f"the noise would drown the signal, {forecast.ratio:,.3g} to 1; privacy.max_ratio "
                f"is {self.privacy.max_ratio:g}. In full: {sentence} Use more clients or larger "
                "batches, fewer rounds, a smaller encoder, a larger ε, or --privacy.max-ratio inf "
                "to train all the same."
            )
        told = [*self.inner.advice(setup), sentence]
        if self.privacy.noise_from == "seed":
            told.append(
                "privacy.noise_from = seed: whoever knows run.seed can take the noise away. ε is "
                "what the run would spend with a secret; nobody is protected by this run"
            )
        return told

    def statement(self, setup: Setup, ctx: ServerContext) -> dict[str, Any]:
        """What a run has spent, for its summary."""
        forecast, ledger = self.forecast(setup), Ledger(ctx.workspace())
        settings = self.privacy
        return {
            "level": settings.level,
            "unit": self.unit,
            "epsilon": ledger.epsilon(forecast.delta),
            "delta": forecast.delta,
            "noise": list(forecast.noise),
            "clip": settings.clip,
            "group": settings.group,
            "ratio": forecast.ratio,
            "releases": max(map(ledger.rounds, setup.sizes)),
            "noise_at": "clients" if settings.level == "record" else settings.noise_at,
            "noise_from": settings.noise_from,
        }

    def _stream(self, *where: object) -> Noise:
        if self.secret is None:
            raise FurlongError("there is no secret to make noise from: nothing can be trained.")
        return Noise(self.secret, self.privacy.level, *where)

    def require_budget(
        self,
        ledger: Ledger,
        setup: Setup,
        exchange: Exchange,
        clients: list[int],
        mark: str | None = None,
    ) -> None:
        """Stop before an exchange with ``clients`` that would spend more than there is.

        ``mark``: of the result, where it is known; then only the same result is free.
        """
        limit = self.privacy.epsilon
        if limit is None:
            return
        pending = {client: self.release(setup, client) for client in clients}
        after = ledger.epsilon(self.delta(setup), pending, exchange.index, mark)
        if after > limit * (1 + 1e-9):
            raise FurlongError(
                f"the privacy budget is used up: ε would be {after:.4g} after round "
                f"{exchange.round + 1}, privacy.epsilon is {limit:g}. Rounds that were computed "
                "again with other results were spent twice. What was saved stays."
            )


def budgeted(method: AnyMethod) -> Private | None:
    """The wrapper that keeps the account of ``method``, if it has one."""
    while isinstance(method, Wrapping):
        if isinstance(method, Private):
            return method
        method = method.inner
    return None


@lru_cache(maxsize=8)
def _visits(
    plan: tuple[Exchange, ...], seed: int, clients: tuple[int, ...], fraction: float
) -> dict[int, int]:
    found = dict.fromkeys(clients, 0)
    for exchange in plan:
        for client in draw_cohort(seed, exchange, list(clients), fraction):
            found[client] += 1
    return found


# ---------------------------------------------------------------- clients


@dataclass(frozen=True)
class PrivateClients(Private):
    """Nobody can tell from the model whether a client took part."""

    unit = "each client with all its images"
    equal_weights = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.singles:
            raise FurlongError(
                "privacy.level = client needs a method of which only the mean of the clients' "
                f"weights is used; of this one, {self.inner.singles}. Choose another method."
            )
        if self.privacy.noise_at == "clients" and self.min_clients < 2:
            raise FurlongError(
                "privacy.noise_at = clients needs --train.min-clients 2 or more: the shares of so "
                "many clients but one, which knows its own, must be noise enough, and with fewer "
                "answers the run stops."
            )

    def units(self, setup: Setup) -> int:
        """The clients."""
        return len(setup.sizes)

    def release(self, setup: Setup, client: int) -> Release:  # noqa: ARG002
        """One Gaussian mechanism, without sampling; all clients have the same noise."""
        if self.privacy.noise is not None:
            return Release(1.0, self.privacy.noise, 1)
        assert self.privacy.epsilon is not None
        most = max(self.visits(setup).values())
        return Release(1.0, noise_for(self.privacy.epsilon, 1.0, most, self.delta(setup)), 1)

    @property
    def repeats(self) -> bool:
        """Not where clients draw new shares of the noise."""
        return self.privacy.noise_at == "server" or self.privacy.noise_from == "seed"

    def enough(self, asked: int) -> int:
        """Of how many of ``asked`` clients the shares are all the noise that is accounted for.

        One fewer than must answer: each knows its own share. A small cohort must be complete.
        """
        return max(1, min(self.min_clients, asked) - 1)

    def ratio(self, setup: Setup, cohort: list[int], parameters: int) -> float:
        """σ·√d/m: the mean of m updates is no longer than C; of shares, if all m are there."""
        m = len(cohort)
        noise = self.release(setup, cohort[0]).noise * math.sqrt(parameters)
        if self.privacy.noise_at == "clients":
            noise *= math.sqrt(m / self.enough(m))
        return noise / m

    def warning(self, setup: Setup, forecast: Forecast) -> str:
        """How long the noise is, and how many clients it would take."""
        clients, m, ratio = len(setup.sizes), forecast.cohort, forecast.ratio
        needed = plural(max(m, math.ceil(ratio * m)), "client")
        if self.privacy.noise_at == "clients":
            needed += ", and train.min_clients in proportion,"
        text = (
            f"The mean update of {plural(m, 'client')} in a round is at most 1 clip long, the "
            f"noise on it about {ratio:,.3g} clips; as long as the signal it would be with about "
            f"{needed} in a round."
        )
        if clients < FEW:
            text += (
                f" With {plural(clients, 'client')} ε says little: to hide one of {clients} is to "
                f"hide {100 / clients:.2g} % of all there is to learn from. "
                "Level record fits few and large clients."
            )
        return text

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        """As the method does; the update is cut, and nothing else is told."""
        local = self.inner.local_update(state, down, ctx)
        ctx.images_seen = 0  # a sum over the images too
        base, upload = flatten(down)[0], flatten(local.upload)[0]
        move = clipped(_moves(upload, base), self.privacy.clip)
        if self.privacy.noise_at == "clients":
            # a client does not know whose updates its own is added to: if the round is done again
            # with others, the same share would fall out of the difference of the two sums
            once = digest(move) if self.privacy.noise_from == "seed" else token_hex()
            stream = self._stream("share", ctx.client, ctx.exchange.index, once)
            share = self.release(ctx.setup, ctx.client).noise * self.privacy.clip
            share /= math.sqrt(self.enough(len(self.cohort_of(ctx.setup, ctx.exchange))))
            move = {name: m + share * stream.normal(m.shape) for name, m in move.items()}
        sent = {name: (base[name].double() + m).to(base[name].dtype) for name, m in move.items()}
        return Local(local.state, replace_tensors(local.upload, sent), {})

    def aggregate(self, server: Any, reports: Iterable[Report[Any]], ctx: ServerContext) -> Any:
        """The inner method gets one answer: the noisy mean, as if one client had sent it."""
        asked = self.cohort_of(ctx.setup, ctx.exchange)
        if not asked:
            return self.inner.aggregate(server, reports, ctx)
        ledger, release = Ledger(ctx.workspace()), self.release(ctx.setup, asked[0])
        total, base, last = Weights(), Weights(), None
        for report in reports:
            base = base or flatten(self.inner.download(server, asked[0], ctx))[0]
            move = _moves(flatten(report.upload)[0], base)
            if report.examples != 1:  # the mean of so many, opened under masks
                move = {name: m * report.examples for name, m in move.items()}
            if self.privacy.noise_at == "server":  # a client may have cut less than it should
                move = clipped(move, self.privacy.clip)
            total = {name: total[name] + m for name, m in move.items()} if total else move
            last = report
        mark = "" if self.repeats else token_hex()
        if last is not None:
            if self.privacy.noise_at == "server":
                stream = self._stream("sum", ctx.exchange.index, digest(total), release)
                size = release.noise * self.privacy.clip
                total = {name: m + size * stream.normal(m.shape) for name, m in total.items()}
            mean = {
                name: (base[name].double() + m / len(asked)).to(base[name].dtype)
                for name, m in total.items()
            }
            mark = digest(mean)
            if self.privacy.noise_at == "server":  # nobody has seen it yet
                self.require_budget(ledger, ctx.setup, ctx.exchange, asked, mark)
            last = Report(
                asked[0], last.exchange, 1, replace_tensors(last.upload, mean), dict[str, float]()
            )
        ledger.add(ctx.exchange.index, ((client, mark, release) for client in asked))
        ctx.metrics["epsilon"] = ledger.epsilon(self.delta(ctx.setup))
        return self.inner.aggregate(server, [] if last is None else [last], ctx)


def _moves(upload: Weights, base: Weights) -> Weights:
    """How far every parameter moved, in float64; BatchNorm statistics stay on the client."""
    return {n: t.double() - base[n].double() for n, t in upload.items() if not is_buffer(n)}


def clipped(move: Weights, clip: float) -> Weights:
    """``move`` cut to the length ``clip``; zero if it holds NaN or infinity."""
    length = math.sqrt(sum(float(m.square().sum()) for m in move.values()))
    scale = _scale(length, clip)
    if scale == 0:
        return {name: torch.zeros_like(m) for name, m in move.items()}
    return {name: m * scale for name, m in move.items()}


def _scale(length: float, clip: float) -> float:
    """What brings ``length`` to at most ``clip``, rounding included; 0 for NaN and infinity."""
    if not math.isfinite(length):
        return 0.0
    return 1.0 if length <= clip else clip / length * (1 - 1e-6)


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class PrivateRecords(Private):
    """Nobody, the server included, can tell from what a client sends whether it had an image."""

    unit = "each single image of each client, from the server too"

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, group = self.inner.decomposes, self.privacy.group
        if kind == "no":
            raise FurlongError(
                "privacy.level = record needs a loss that is a sum over images, or over small "
                "groups of them, and nothing else that leaves; the loss of this method, or what it "
                "sends, mixes all images of a batch or of the client, so one image can change it "
                "without bound. Use fedae, fedmae, fedrot, fedsimsiam, fedbyol, fedu, fedema, "
                "fedsimclr with --privacy.group, or level client."
            )
        if kind == "groups" and group < 2:
            raise FurlongError(
                f"privacy.group = {group}: this method contrasts images with each other. Over a "
                "whole batch one image changes the gradient of every other, which no clip of "
                "single gradients bounds. Give the size of groups that are contrasted by "
                "themselves: --privacy.group 8."
            )
        if kind == "records" and group > 1:
            raise FurlongError(
                f"privacy.group = {group} is for methods that contrast images with each other; "
                "the loss of this one is a sum over single images. Leave it out."
            )

    def units(self, setup: Setup) -> int:
        """The images."""
        return sum(setup.sizes.values())

    def places(self, setup: Setup, client: int) -> int:
        """The units of a client; images that make no whole group sit out a step."""
        groups = setup.sizes[client] // self.privacy.group
        if not groups:
            raise FurlongError(
                f"client {client} has {plural(setup.sizes[client], 'image')}: not one group of "
                f"privacy.group = {self.privacy.group}. Give a smaller group."
            )
        return groups

    def sampling(self, setup: Setup, client: int) -> float:
        """The q at which the expected number of images in a step is the batch size."""
        return min(1.0, setup.batch_size / (self.places(setup, client) * self.privacy.group))

    def release(self, setup: Setup, client: int) -> Release:
        """The steps of a round, each on a Poisson sample; every client has the noise it needs."""
        q, steps = self.sampling(setup, client), setup.steps(client)
        if self.privacy.noise is not None:
            return Release(q, self.privacy.noise, steps)
        assert self.privacy.epsilon is not None
        count = steps * max(1, self.visits(setup)[client])
        return Release(q, noise_for(self.privacy.epsilon, q, count, self.delta(setup)), steps)

    def ratio(self, setup: Setup, cohort: list[int], parameters: int) -> float:
        """Of the mean of the clients' steps by images: √(Σ (w_k σ_k √d / E|U_k|)²)."""
        images = sum(setup.sizes[client] for client in cohort)
        squares = 0.0
        for client in cohort:
            release = self.release(setup, client)
            expected = release.sampling * self.places(setup, client)
            weight = setup.sizes[client] / images
            squares += parameters * (weight * release.noise / expected) ** 2
        return math.sqrt(squares)

    def warning(self, setup: Setup, forecast: Forecast) -> str:  # noqa: ARG002
        """How long the noise is, and what it is not for."""
        return (
            "A step's mean gradient is at most 1 clip long, the noise on the mean of the clients' "
            f"steps about {forecast.ratio:,.3g} clips. Several images of one person are several "
            "records: their ε adds up."
        )

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        """As the method does, with noisy steps; no metrics, for they are not covered."""
        release = self.release(ctx.setup, ctx.client)
        started = digest((down, state, tuple(ctx.moments)))
        # the same noise with another σ, clip or rate would fall out of the two results
        how = (release, self.privacy, ctx.setup.optimiser, ctx.learning_rate)
        stream = self._stream("steps", ctx.client, ctx.exchange.index, started, how)
        places = self.places(ctx.setup, ctx.client)
        known = {f.name: getattr(ctx, f.name) for f in fields(ctx)}
        noisy = _NoisyContext(
            **known, release=release, privacy=self.privacy, places=places, stream=stream
        )
        local = self.inner.local_update(state, down, noisy)
        # what is expected, and not how many were drawn
        ctx.images_seen = round(release.count * release.sampling * places * self.privacy.group)
        return Local(local.state, local.upload, {})

    def aggregate(self, server: Any, reports: Iterable[Report[Any]], ctx: ServerContext) -> Any:
        """As the method does, by any rule: what clients sent needs no more protection."""
        asked = self.cohort_of(ctx.setup, ctx.exchange)
        ledger = Ledger(ctx.workspace())
        # an answer that was lost on its way, or refused, may have been seen by somebody
        marks = dict.fromkeys(asked, "")

        def marked() -> Iterator[Report[Any]]:
            for report in reports:
                if report.client in marks:
                    marks[report.client] = digest(report.upload)
                else:  # the mean of all, opened under masks
                    marks.update(dict.fromkeys(marks, digest(report.upload)))
                yield report

        state = self.inner.aggregate(server, marked(), ctx)
        ledger.add(
            ctx.exchange.index,
            ((client, mark, self.release(ctx.setup, client)) for client, mark in marks.items()),
        )
        ctx.metrics["epsilon"] = ledger.epsilon(self.delta(ctx.setup))
        return state


@dataclass(frozen=True)
class _Sample(Batch):
    """A step's sample: its views are drawn once for all, and given out by unit."""

    size: int  # images per unit
    drawn: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    taken: list[bool] = field(default_factory=list)  # whether a step was made on it

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        """The same ``n`` views, each b×C×S×S, whenever they are asked for."""
        if n not in self.drawn:
            self.drawn[n] = self.augment.views(self.pixels, n)
        return self.drawn[n]

    def units(self) -> Iterator[Batch]:
        """The units one by one."""
        for start in range(0, len(self.pixels), self.size):
            rows = slice(start, start + self.size)
            labels = None if self.labels is None else self.labels[rows]
            yield _Unit(self.pixels[rows], self.index[rows], labels, self.augment, self, rows)


@dataclass(frozen=True)
class _Unit(Batch):
    """One record, or one group, of a sample."""

    sample: _Sample
    rows: slice

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        """Its rows of the sample's views."""
        return tuple(view[self.rows] for view in self.sample.views(n))


@dataclass(kw_only=True)
class _NoisyContext(ClientContext):
    """A client's side whose batches are Poisson samples and whose optimiser adds noise."""

    release: Release
    privacy: PrivacySettings
    places: int
    stream: Noise

    def batches(
        self, epochs: int | None = None, *, shuffle: bool = True, counted: bool = True
    ) -> Iterator[Batch]:
        """The samples of a round's steps; some may be empty."""
        if epochs is not None or not shuffle or not counted:
            raise FurlongError("privacy.level = record: the method looks at its images elsewhere.")
        size, device = self.privacy.group, self.setup.device
        for _ in range(self.release.count):
            count = len(self.data)
            order = torch.arange(count) if size == 1 else self.stream.order(count)
            chosen = self.stream.uniform(self.places) < self.release.sampling
            index = order[: self.places * size].view(-1, size)[chosen].flatten()
            labels = self.data.labels(index)
            yield _Sample(
                self.data.pixels(index).to(device),
                index,
                None if labels is None else labels.to(device),
                self.setup.augment,
                size,
            )

    def batches_of(self, data: Shard, *arguments: Any, **options: Any) -> Iterator[Batch]:
        """Not of the client's own images."""
        if data is self.data:
            raise FurlongError("privacy.level = record: the method looks at its images elsewhere.")
        return super().batches_of(data, *arguments, **options)

    def optimiser(self, *modules: nn.Module) -> Optimiser:
        """Refuses modules that keep anything of the images beside their parameters."""
        for module in modules:
            kept = module.state_dict().keys() - dict(module.named_parameters()).keys()
            if kept:
                raise FurlongError(
                    f"privacy.level = record: {sorted(kept)[0]} of the network is no parameter, so "
                    "no noise covers what it keeps of the images (BatchNorm does that). Use "
                    "--model.early-norm all_gn, or another encoder."
                )
        return super().optimiser(*modules)

    def new_optimiser(
        self, parameters: list[nn.Parameter], features: list[Tensor] | None
    ) -> Optimiser:
        """One that adds noise."""
        if features is not None:
            raise FurlongError(
                "privacy.level = record: optimiser.decorrelation is a number of the whole batch, "
                "which one image can change without bound. Set it to 0."
            )
        return NoisyOptimiser(self, parameters)


class NoisyOptimiser(Optimiser):
    """Steps on clipped gradients of single units, with noise on their sum."""

    def __init__(self, ctx: _NoisyContext, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, ctx.setup.optimiser, ctx.learning_rate)
        self._trained = [p for p in parameters if p.requires_grad]
        self._clip, self._stream = ctx.privacy.clip, ctx.stream
        self._noise = ctx.release.noise * self._clip
        self._expected = ctx.release.sampling * ctx.places

    def step(self, loss: Tensor) -> None:  # noqa: ARG002
        """Refused: a loss of the whole batch has no gradients of single images."""
        raise FurlongError(
            "privacy.level = record: the method steps on the loss of a whole batch. It must call "
            "optimiser.descend(loss_of, batch)."
        )

    def descend(self, loss_of: Callable[[Batch], Tensor], batch: Batch) -> None:
        """A step on the noisy mean of the units' clipped gradients."""
        if not isinstance(batch, _Sample) or batch.taken:
            raise FurlongError("privacy.level = record: a step needs a sample of its own.")
        batch.taken.append(True)
        sums = clipped_sum(loss_of, batch.units(), self._trained, self._clip)
        for parameter, total in zip(self._trained, sums, strict=True):
            noise = self._noise * self._stream.normal(total.shape).to(total.device)
            # fused kernels pair elements by memory offset: a gradient needs its weight's layout
            parameter.grad = torch.empty_like(parameter).copy_((total + noise) / self._expected)
        self.torch.step()

    def metrics(self) -> dict[str, float]:
        """None: a mean loss is not covered."""
        return {}


def clipped_sum(
    loss_of: Callable[[Batch], Tensor],
    units: Iterable[Batch],
    parameters: list[nn.Parameter],
    clip: float,
) -> list[Tensor]:
    """Σ over units of their gradient, each cut to the length ``clip``; float64, by parameter.

    One unit after the other: on a CPU that is as fast as torch.func.vmap, and no operation of a
    method, nor a norm of its network, can mix two units. A gradient with NaN or infinity counts as
    zero.
    """
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for unit in units:
        found = torch.autograd.grad(loss_of(unit), parameters, allow_unused=True)
        gradients = [(s, g) for s, g in zip(sums, found, strict=True) if g is not None]
        lengths = [torch.linalg.vector_norm(g, dtype=torch.float64) for _, g in gradients]
        scale = _scale(float(torch.stack(lengths).norm()), clip) if lengths else 0.0
        if scale:
            for total, gradient in gradients:
                total.add_(gradient, alpha=scale)
    return sums
