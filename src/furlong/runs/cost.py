"""What a run will send, exchange by exchange, without training: ``furlong cost``.

Downloads and uploads are asked of the method itself, so a prediction cannot drift from the run.
What a report adds in a run beside the upload (who, which exchange, how many examples, metrics) is
a few numbers per client and is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from furlong.core.context import Exchange
from furlong.core.exchange import AnyServer, Server, expected_upload
from furlong.core.federation import Federation
from furlong.core.payload import Traffic, traffic
from furlong.runs.config import Config, from_tree
from furlong.runs.nodes import Members
from furlong.runs.parties import ruled, setup_of


@dataclass(frozen=True)
class Cost:
    """What one exchange sends, all counted clients together."""

    exchange: Exchange
    cohort: list[int]
    down: Traffic
    up: Traffic


def without_data(
    settings: Config, sizes: dict[int, int], channels: int = 3, image_size: int = 32
) -> AnyServer:
    """The server of a run whose clients hold ``sizes`` images, for predicting what is sent."""
    members = Members(sizes, channels)
    federation = Federation.of(members.images(image_size, classes=10), members.split())
    method = ruled(settings.make_method(), settings, len(sizes))
    setup = setup_of(settings, method, federation)
    return Server(method, setup, fraction=settings.train.fraction)


def predict(server: AnyServer, only: int | None = None) -> Iterator[Cost]:
    """The cost of every exchange of a run, for all clients or ``only`` one."""
    method = server.method
    with server.computing("init"):
        state = method.outline(None, [], server.context(Exchange(round=0)))
    for exchange in server.exchanges():
        ctx = server.context(exchange)
        cohort = server.cohort(exchange)
        counted = [client for client in cohort if only in (None, client)]
        down, up = Traffic(), Traffic()
        for client in counted:
            down += traffic(method.download(state, client, ctx))
            up += traffic(expected_upload(method, state, client, ctx))
        yield Cost(exchange, counted, down, up)
        state = method.outline(state, cohort, ctx)


def flows(
    method: str, encoder: str, channels: int = 3, image_size: int = 32
) -> dict[str, dict[str, Any]]:
    """What goes down to and up from one of five clients with 1,000 images each.

    By kind of exchange; where later exchanges of a kind send something else, they follow apart.
    """
    settings = from_tree({}, {"method": method, "encoder": encoder, "rounds": 2}, "options")
    return sent_by(without_data(settings, dict.fromkeys(range(5), 1000), channels, image_size))


def sent_by(server: AnyServer) -> dict[str, dict[str, Any]]:
    """What goes down to and up from the first client of a run, as :func:`flows` gives it."""
    made, first = server.method, server.clients[0]
    found: dict[str, dict[str, Any]] = {}
    with server.computing("init"):
        state = made.outline(None, [], server.context(Exchange(round=0)))
    for exchange in server.exchanges():
        ctx = server.context(exchange)
        if exchange.clients != ():
            up = expected_upload(made, state, first, ctx)
            flow = {"down": made.download(state, first, ctx), "up": up}
            before = found.setdefault(exchange.kind, flow)
            if [traffic(v) for v in flow.values()] != [traffic(v) for v in before.values()]:
                found.setdefault(f"{exchange.kind}, later", flow)
        state = made.outline(state, server.clients, ctx)
    return found
