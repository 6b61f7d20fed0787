"""A budget of clients: nobody can tell from the model whether a client took part.

McMahan et al., ICLR 2018: with Δ_k = what client k would send - what it got,

    x ← x + ( Σ_k Δ_k·min(1, C/‖Δ_k‖) + N(0, (σC)²) ) / m,    m = clients that are asked

Every client counts the same and says neither how many images it has nor how it fared. Which clients
are asked in a round follows from the run's seed, which all know: there is no amplification by
sampling, and a client is charged for every round in which it was asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import torch

from furlong.core.context import ClientContext, ServerContext, Setup
from furlong.core.exchange import expected_upload
from furlong.core.method import Local, Report
from furlong.core.noise import digest
from furlong.core.payload import Weights, flatten, is_buffer, replace_tensors
from furlong.core.privacy import Ledger, Release, noise_for
from furlong.errors import FurlongError
from furlong.methods.wrappers.private import Forecast, Private, cut
from furlong.words import plural

FEW = 100  # clients; with fewer, hiding one of them hides a large share of what there is to learn


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

    def repeats(self, setup: Setup) -> bool:  # noqa: ARG002
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
            # with others, the same share would fall out of the difference of the two sums; and if
            # it is asked again under the same masks, the mean of several shares would be less noise
            once = "" if self.privacy.noise_from == "seed" else ctx.masks or token_hex()
            stream = self._stream("share", ctx.client, ctx.exchange.index, once, digest(move))
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
        base = flatten(self.inner.download(server, asked[0], ctx))[0]
        sent = expected_upload(self.inner, server, asked[0], ctx)  # what the mean looks like
        total, heard, by_server = Weights(), False, self.privacy.noise_at == "server"
        for report in reports:
            move = _moves(flatten(report.upload)[0], base)
            if report.examples != 1:  # the mean of so many, opened under masks
                move = {name: m * report.examples for name, m in move.items()}
            if by_server:  # a client may have cut less than it should
                move = clipped(move, self.privacy.clip)
            total = {name: total[name] + m for name, m in move.items()} if heard else move
            heard = True
        mark, answers = "" if self.repeats(ctx.setup) else token_hex(), list[Report[Any]]()
        if by_server and not heard:  # a model that stays as it is would tell that nobody answered
            total = {n: torch.zeros_like(m) for n, m in _moves(flatten(sent)[0], base).items()}
        if total:
            if by_server:
                stream = self._stream("sum", ctx.exchange.index, digest(total), release)
                size = release.noise * self.privacy.clip
                total = {name: m + size * stream.normal(m.shape) for name, m in total.items()}
            mean = {
                name: (base[name].double() + m / len(asked)).to(base[name].dtype)
                for name, m in total.items()
            }
            mark = digest(mean)
            if by_server:  # nobody has seen it yet
                self.require_budget(ledger, ctx.setup, ctx.exchange, asked, mark)
            answer, index = replace_tensors(sent, mean), ctx.exchange.index
            answers = [Report(asked[0], index, 1, answer, dict[str, float]())]
        ledger.add(ctx.exchange.index, ((client, mark, release) for client in asked))
        ctx.metrics["epsilon"] = ledger.epsilon(self.delta(ctx.setup))
        return self.inner.aggregate(server, answers, ctx)


def _moves(upload: Weights, base: Weights) -> Weights:
    """How far every parameter moved, in float64; BatchNorm statistics stay on the client."""
    return {n: t.double() - base[n].double() for n, t in upload.items() if not is_buffer(n)}


def clipped(move: Weights, clip: float) -> Weights:
    """``move`` cut to the length ``clip``; zero if it holds NaN or infinity."""
    length = math.sqrt(sum(float(m.square().sum()) for m in move.values()))
    scale = cut(length, clip)
    if scale == 0:
        return {name: torch.zeros_like(m) for name, m in move.items()}
    return {name: m * scale for name, m in move.items()}
