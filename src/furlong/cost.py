"""What a run will send, exchange by exchange, without training: ``furlong cost``.

Downloads and uploads are asked of the method itself, so a prediction cannot drift from the run.
What a report adds in a run beside the upload (who, which exchange, how many examples, metrics) is
a few numbers per client and is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from furlong.context import Exchange
from furlong.payload import Traffic, is_buffer, split_weights, traffic
from furlong.rounds import Server, draw_cohort


@dataclass(frozen=True)
class Cost:
    """What one exchange sends, all clients together."""

    exchange: Exchange
    cohort: list[int]
    down: Traffic
    up: Traffic


def predict(server: Server[Any, Any, Any]) -> Iterator[Cost]:
    """The cost of every exchange of a run."""
    method, setup = server.method, server.setup
    with server.computing("init"):
        state = method.outline(None, [], server.context(Exchange(round=0)))
    for exchange in server.exchanges():
        ctx = server.context(exchange)
        cohort = draw_cohort(setup.seed, exchange, sorted(setup.sizes), server.fraction)
        down, up = Traffic(), Traffic()
        for client in cohort:
            expected = method.expected(state, client, ctx)
            if method.bn_stats == "local":
                expected = split_weights(expected, is_buffer)[0]
            down += traffic(method.download(state, client, ctx))
            up += traffic(expected)
        yield Cost(exchange, cohort, down, up)
        state = method.outline(state, cohort, ctx)


def coded_bits(
    values: int, *, ways: int = 1, bits: int = 32, code_rate: tuple[int, int] = (1, 3)
) -> int:
    """Bits on the channel as in MFCL's Table 8: ``values`` of 32 bits, a code of rate 1/3.

    ``ways``: 2 for a model, which goes down and up; 1 for representations.
    """
    carried, sent = code_rate
    return values * bits * ways * sent // carried
