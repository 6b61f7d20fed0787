"""The lower bound: every client trains alone, as if the others did not exist.

Each client has a server of its own, which hears from nobody else; all of them go through the same
exchanges side by side. Client k gets, bit for bit, what a run on ``federation.only(k)`` gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from furlong.context import ClientContext, Exchange, ServerContext, Setup
from furlong.method import Local, Method, Report
from furlong.payload import payload
from furlong.weights import BatchNormPolicy


@payload
class Each:
    """The server state of every client's own run."""

    states: dict[int, Any]


@dataclass(frozen=True)
class Alone(Method[Each, Any, Any, Any]):
    """``inner`` on every client by itself."""

    inner: Method[Any, Any, Any, Any]

    @property
    def bn_stats(self) -> BatchNormPolicy:  # type: ignore[override]
        """As the method has it."""
        return self.inner.bn_stats

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        """As the method has it."""
        return self.inner.needs_labels

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        """As the method has it."""
        return self.inner.needs_public

    @property
    def pairs_views(self) -> bool:  # type: ignore[override]
        """As the method has it."""
        return self.inner.pairs_views

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """As the method plans."""
        return self.inner.plan(setup)

    def architecture(self, encoder: str) -> str:
        """As the method has it."""
        return self.inner.architecture(encoder)

    def init_server(self, ctx: ServerContext) -> Each:
        """The same start for everybody."""
        start = self.inner.init_server(ctx)
        return Each(dict.fromkeys(sorted(ctx.setup.sizes), start))

    def init_client(self, ctx: ClientContext) -> Any:
        """As the method does."""
        return self.inner.init_client(ctx)

    def download(self, server: Each, client: int, ctx: ServerContext) -> Any:
        """From the client's own server."""
        return self.inner.download(server.states[client], client, ctx)

    def expected(self, server: Each, client: int, ctx: ServerContext) -> Any:
        """By the client's own server."""
        return self.inner.expected(server.states[client], client, ctx)

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        """As the method does."""
        return self.inner.local_update(state, down, ctx)

    def aggregate(self, server: Each, reports: Iterable[Report[Any]], ctx: ServerContext) -> Each:
        """Every server aggregates its one report."""
        states = dict(server.states)
        if ctx.exchange.clients == ():  # the server's own work: here every client's own server's
            for client, state in states.items():
                states[client] = self._aggregate(state, [], ctx)
        for report in reports:
            states[report.client] = self._aggregate(states[report.client], [report], ctx)
        return Each(states)

    def _aggregate(self, state: Any, reports: list[Report[Any]], ctx: ServerContext) -> Any:
        # every server has the random numbers that it would have alone
        with torch.random.fork_rng(devices=[]):
            return self.inner.aggregate(state, reports, ctx)

    def encoder(self, server: Each, ctx: ServerContext) -> nn.Module:
        """The first client's; :meth:`encoders` has all."""
        return next(iter(self.encoders(server, ctx).values()))

    def encoders(self, server: Each, ctx: ServerContext) -> dict[int, nn.Module]:
        """Client -> its own encoder."""
        return {k: self.inner.encoder(state, ctx) for k, state in server.states.items()}
