"""What a run will send, exchange by exchange, without training: ``furlong cost``.

Downloads and uploads are asked of the method itself, so a prediction cannot drift from the run.
What a report adds in a run beside the upload (who, which exchange, how many examples, metrics) is
a few numbers per client and is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from furlong.core.context import Exchange, Setup
from furlong.core.exchange import AnyServer, Server, expected_upload
from furlong.core.federation import Federation
from furlong.core.payload import Traffic, traffic
from furlong.nn.encoders import build_encoder
from furlong.runs.config import Config, from_tree
from furlong.runs.nodes import Members
from furlong.runs.parties import check_privacy, setup_of, wrapped


@dataclass(frozen=True)
class Cost:
    """What one exchange sends, all counted clients together."""

    exchange: Exchange
    cohort: list[int]
    down: Traffic
    up: Traffic


@dataclass(frozen=True)
class Channel:
    """The rows of MFCL's Table 8: bits on a channel, for single precision and a code of rate 1/3.

    As in the table, a model counts both ways, without BatchNorm's statistics, and representations
    count one way. A client is the mean of all.
    """

    rounds: float  # in which a client sends a model
    parameters: float  # of that model
    values: float  # of the representations that a client sends in all
    clients: int

    BITS: ClassVar[int] = 32 * 3

    @classmethod
    def of(cls, costs: Iterable[Cost], clients: int) -> Channel:
        """What ``clients`` clients send in the exchanges of ``costs``."""
        sent, visits = Traffic(), 0
        for cost in costs:
            sent += cost.up
            visits += len(cost.cohort) if cost.up.params else 0
        parameters = sent.params / 4 / max(1, visits)
        return cls(visits / clients, parameters, sent.features / 4 / clients, clients)

    @property
    def bits_of_a_round(self) -> float:
        """A client's model, down and up."""
        return 2 * self.parameters * self.BITS

    @property
    def bits_of_models(self) -> float:
        """A client's in all rounds: MFCL's phase 1."""
        return self.rounds * self.bits_of_a_round

    @property
    def bits_of_representations(self) -> float:
        """A client's: MFCL's phase 2."""
        return self.values * self.BITS

    @property
    def bits(self) -> float:
        """Of all clients."""
        return self.clients * (self.bits_of_models + self.bits_of_representations)


def without_data(
    settings: Config, sizes: dict[int, int], channels: int = 3, image_size: int = 32
) -> AnyServer:
    """The server of a run whose clients hold ``sizes`` images, for predicting what is sent."""
    check_privacy(settings)
    members = Members(sizes, channels)
    federation = Federation.of(members.images(image_size, classes=10), members.split())
    method = wrapped(settings.make_method(), settings, len(sizes))
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
    method: str, encoder: str, channels: int = 3, image_size: int = 32, **options: Any
) -> dict[str, dict[str, Any]]:
    """What goes down to and up from one of five clients with 1,000 images each.

    By kind of exchange; where later exchanges of a kind send something else, they follow apart.
    """
    given = {"method": method, "encoder": encoder, "rounds": 2, **options}
    settings = from_tree({}, given, "options")
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


def sent_once(setup: Setup) -> int:
    """Bytes of the encoder's fixed tensors, which no exchange carries and every node needs."""
    if setup.given is None:
        return 0
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(setup.encoder, setup.channels, setup.image_size)
    every = encoder.state_dict()
    return sum(every[name].nbytes for name in setup.given.fixed(encoder))
