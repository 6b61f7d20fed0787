"""The lower bound: every client trains alone, as if the others did not exist.

Each client has a server of its own, which knows and hears nobody else; all of them go through the
same exchanges side by side. Client k gets, bit for bit, what a run on ``federation.only(k)`` gives
it (with MFCL if its representations take as many exchanges there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from furlong.context import ClientContext, Context, Exchange, ServerContext, Setup
from furlong.method import Local, Method, Report
from furlong.payload import payload
from furlong.weights import BatchNormPolicy

X = TypeVar("X", bound=Context)
Y = TypeVar("Y")


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
        """As the method plans; where it would choose clients, all of them."""
        everyone = tuple(sorted(setup.sizes))
        for exchange in self.inner.plan(setup):
            yield replace(exchange, clients=everyone) if exchange.clients else exchange

    def architecture(self, encoder: str) -> str:
        """As the method has it."""
        return self.inner.architecture(encoder)

    def init_server(self, ctx: ServerContext) -> Each:
        """The same start for everybody."""
        start = self.inner.init_server(ctx)
        return Each(dict.fromkeys(sorted(ctx.setup.sizes), start))

    def init_client(self, ctx: ClientContext) -> Any:
        """As the method does."""
        return self.inner.init_client(alone(ctx, ctx.client))

    def download(self, server: Each, client: int, ctx: ServerContext) -> Any:
        """From the client's own server."""
        return self.inner.download(server.states[client], client, alone(replace(ctx), client))

    def expected(self, server: Each, client: int, ctx: ServerContext) -> Any:
        """By the client's own server."""
        return self.inner.expected(server.states[client], client, alone(replace(ctx), client))

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        """As the method does."""
        return self.inner.local_update(state, down, alone(ctx, ctx.client))

    def aggregate(self, server: Each, reports: Iterable[Report[Any]], ctx: ServerContext) -> Each:
        """Every server aggregates its one report."""
        states, measured = dict(server.states), []
        own_work = ctx.exchange.clients == ()  # here every client's own server's
        visits = [(k, []) for k in states] if own_work else ((r.client, [r]) for r in reports)
        for client, answers in visits:
            own = alone(replace(ctx, metrics={}), client)
            with torch.random.fork_rng(devices=[]):  # the random numbers that it would have alone
                states[client] = self.inner.aggregate(states[client], answers, own)
            measured.append(own.metrics)
        for name in measured[0] if measured else ():
            ctx.metrics[name] = sum(m[name] for m in measured) / len(measured)
        return Each(states)

    def encoder(self, server: Each, ctx: ServerContext) -> nn.Module:
        """The first client's; :meth:`each` gives all."""
        first, state = next(iter(server.states.items()))
        return self.inner.encoder(state, alone(replace(ctx), first))

    def each(self, make: Callable[..., Y], server: Each, ctx: ServerContext) -> dict[int, Y]:
        """Client -> ``make(method, state, ctx)`` of its own run."""
        return {
            k: make(self.inner, state, alone(replace(ctx), k)) for k, state in server.states.items()
        }


def alone(ctx: X, client: int) -> X:
    """``ctx`` itself, now of a run in which there is only ``client``."""
    ctx.setup = replace(ctx.setup, sizes={client: ctx.setup.sizes[client]})
    return ctx
