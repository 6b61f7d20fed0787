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

from furlong.core.context import ClientContext, Exchange, ServerContext, Setup
from furlong.core.method import Report
from furlong.core.payload import payload
from furlong.methods.wrappers import Wrapping, X

Y = TypeVar("Y")


@payload("furlong.methods.alone.Each")
class Each:
    """The server state of every client's own run."""

    states: dict[int, Any]


@dataclass(frozen=True)
class Alone(Wrapping[Each]):
    """``inner`` on every client by itself."""

    caution = ""  # criticism is of what is sent and merged

    def state_of(self, server: Each, client: int) -> Any:
        """Its own server's."""
        return server.states[client]

    def seen_by(self, ctx: X, client: int) -> X:
        """A run in which there is only ``client``; its own context stays the same object."""
        return alone(ctx if isinstance(ctx, ClientContext) else replace(ctx), client)

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """As the method plans; where it would choose or sample clients, all of them."""
        everyone = tuple(sorted(setup.sizes))
        for exchange in self.inner.plan(setup):
            yield exchange if exchange.clients == () else replace(exchange, clients=everyone)

    def init_server(self, ctx: ServerContext) -> Each:
        """The same start for everybody."""
        start = self.inner.init_server(ctx)
        return Each(dict.fromkeys(sorted(ctx.setup.sizes), start))

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
        for name in {name: None for metrics in measured for name in metrics}:
            values = [metrics[name] for metrics in measured if name in metrics]
            ctx.metrics[name] = sum(values) / len(values)
        return Each(states)

    def each(self, make: Callable[..., Y], server: Each, ctx: ServerContext) -> dict[int, Y]:
        """Client -> ``make(method, state, ctx)`` of its own run."""
        return {
            k: make(self.inner, state, self.seen_by(ctx, k)) for k, state in server.states.items()
        }


def alone(ctx: X, client: int) -> X:
    """``ctx`` itself, now of a run in which there is only ``client``."""
    ctx.setup = replace(ctx.setup, sizes={client: ctx.setup.sizes[client]})
    return ctx
