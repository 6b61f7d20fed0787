"""What a client sent, once more: the end of a run is done again from its checkpoint.

A run has the same bits whenever it is done, so nothing that clients send has to be kept for this.
Where the run ends with what is replayed, the digest of the server's state proves it; otherwise the
numbers that the client logged do, as far as they go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.core.context import Exchange
from furlong.core.method import Report
from furlong.core.payload import pack, unpack
from furlong.errors import FurlongError
from furlong.runs import checkpoint
from furlong.runs.prepare import Prepared
from furlong.runs.record import RunRecord


@dataclass(frozen=True)
class Sent:
    """One client's upload, and the server's state that it answered."""

    client: int
    exchange: Exchange
    server: Any
    upload: Any
    proof: str  # in words


def last_sent(prepared: Prepared, client: int | None) -> tuple[Exchange, int] | None:
    """The last exchange in which clients answered, and who is attacked in it."""
    server = prepared.server
    for exchange in reversed(server.exchanges()):
        cohort = server.cohort(exchange)
        if client is None and cohort:
            return exchange, cohort[0]
        if client in cohort:
            return exchange, int(client or 0)
    return None


def replay(
    prepared: Prepared,
    record: RunRecord,
    client: int | None,
    tell: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Sent:
    """What ``client`` (by default the first that was asked) sent last."""
    server, found = prepared.server, last_sent(prepared, client)
    if found is None:
        raise FurlongError(
            f"client {client} is not one of the run's: it has clients {server.clients}."
        )
    target, client = found
    exchanges = server.exchanges()
    first = next(e.index for e in exchanges if e.round == target.round)
    saved = checkpoint.load(record.path, first, say)
    state, done = (server.init(), 0) if saved is None else (saved.server, saved.done)
    if target.index - done > 1:
        say(f"replaying exchanges {done + 1} to {target.index + 1}: no later checkpoint is kept")
    kept: list[tuple[Any, Report[Any]]] = []

    def watch(exchange: Exchange, report: Report[Any]) -> None:
        if exchange == target and report.client == client:
            kept.append((state, unpack(bytearray(pack(report)))))  # not a piece of a message

    server.watch = watch
    end = [e.index for e in exchanges if e.round == target.round][-1] + 1
    last = end if end == len(exchanges) else target.index + 1
    with prepared.engine() as engine:
        engine.restore({} if saved is None else saved.clients)
        for number, exchange in enumerate(exchanges[done:last]):
            state = server.step(engine, state, exchange).server
            tell(number + 1, last - done)
    server.watch = None
    if not kept:
        raise FurlongError(f"client {client} did not answer in exchange {target.index + 1}.")
    before, report = kept[0]
    proof = _proof(record, report, state if last == len(exchanges) else None, target)
    return Sent(client, target, before, report.upload, proof)


def _proof(record: RunRecord, report: Report[Any], state: Any, target: Exchange) -> str:
    """Why this is what was sent; an error if it is not."""
    if state is not None and record.summary is not None:
        if hashlib.sha256(pack(state)).hexdigest() != record.summary.weights_sha256:
            raise _other(record.path)
        return "the replay ended with the server's state that the run ended with, to the last bit"
    logged = next((line for line in record.lines() if line.exchange == target.index), None)
    if logged is None or logged.clients.get(str(report.client)) != report.metrics:
        raise _other(record.path)
    return "the client's numbers in the replay are those that the run logged"


def _other(path: Path) -> FurlongError:
    return FurlongError(
        f"a replay of the end of {path} gives something else than the run: other images, another "
        "version of torch or another machine? Train it here again, or audit its encoder alone "
        "(furlong audit RUN --only published)."
    )
