"""What budgets of clients and of records have in common: forecast, account, and what is told.

``private_clients.py`` and ``private_records.py`` have the two mechanisms.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from secrets import token_hex
from typing import Any, ClassVar

from furlong.core.context import Exchange, ServerContext, Setup
from furlong.core.exchange import Server, draw_cohort, expected_upload
from furlong.core.method import AnyMethod
from furlong.core.noise import Noise
from furlong.core.payload import parts
from furlong.core.privacy import Ledger, PrivacySettings, Release, epsilon_of
from furlong.errors import FurlongError
from furlong.methods.wrappers import Wrapping


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

    @abstractmethod
    def repeats(self, setup: Setup) -> bool:
        """Whether an exchange that is done again from the same values has the same result."""

    def asked(self, server: Any, cohort: list[int], ctx: ServerContext) -> list[int]:
        """As the method says; stops before anybody is asked for what would exceed the budget."""
        clients = self.cohort_of(ctx.setup, ctx.exchange)
        mark = None if self.repeats(ctx.setup) else token_hex()  # like that of no result there was
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


def charged(
    method: AnyMethod, exchange: Exchange, state: Any, down: Any
) -> tuple[Exchange, Any, Any] | None:
    """A client's question to ``method``, as the wrapper that keeps the account inside has it.

    ``None`` if its answer is not made of images, such as one to a question for keys.
    """
    asks: tuple[Exchange, Any, Any] | None = exchange, state, down
    while asks is not None and isinstance(method, Wrapping) and not isinstance(method, Private):
        asks, method = method.asks(*asks), method.inner
    return asks


@lru_cache(maxsize=8)
def _visits(
    plan: tuple[Exchange, ...], seed: int, clients: tuple[int, ...], fraction: float
) -> dict[int, int]:
    found = dict.fromkeys(clients, 0)
    for exchange in plan:
        for client in draw_cohort(seed, exchange, list(clients), fraction):
            found[client] += 1
    return found


def cut(length: float, clip: float) -> float:
    """What brings ``length`` to at most ``clip``, rounding included; 0 for NaN and infinity."""
    if not math.isfinite(length):
        return 0.0
    return 1.0 if length <= clip else clip / length * (1 - 1e-6)
