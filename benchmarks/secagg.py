"""What secure aggregation costs: milliseconds of one core and bytes, by clients and numbers.

python benchmarks/secagg.py [--smoke] [--clients 5 20 50 100] [--values 100000 11000000]

One client's and the server's part of a round, without training and without a network. All clients
make keys and shares; the vectors of all but one are left out, since the server's work does not
depend on what is in them. ``up`` and ``down`` are a client's bytes in all five phases, without the
method's own download; ``plain`` is what it would send without masks, 4 bytes for a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import parse, parser

from furlong.core.payload import traffic
from furlong.core.secure import protocol
from furlong.core.secure.graph import drawn
from furlong.core.secure.protocol import Alive, Inbox, Invitation, Offer, Secrets, Signed, Up
from furlong.core.secure.settings import SecureSettings

SETTINGS = SecureSettings(sums=True)
DROPPED = 0.1  # the share of clients that send shares and then no vector


def main() -> None:
    """Print a table."""
    words = parser(__doc__)
    words.add_argument("--clients", type=int, nargs="+", default=[5, 20, 50, 100])
    words.add_argument("--values", type=int, nargs="+", default=[100_000, 11_000_000])
    options = parse(words, clients=[4, 52], values=[1000])
    torch.set_num_threads(1)
    print(
        "clients      values  masks with | client ms: keys, shares     masks   list, unmask | "
        "server ms: all stay  10 % drop out | kB      up     down      plain"
    )
    for values in options.values:
        for clients in options.clients:
            done = Round(clients, values)
            stay, drop = done.opened(0), done.opened(int(DROPPED * clients))
            spent = done.spent
            print(
                f"{clients:7} {values:11,} {done.graph.degree or clients - 1:11} |            "
                f"{spent['keys'] + spent['shares']:12.1f} {spent['masked']:9.0f} "
                f"{spent['list'] + spent['unmask']:14.1f} | {stay:19.0f} {drop:14.0f} | "
                f"{done.up / 1e3:10,.1f} {done.down / 1e3:8,.1f} {4 * values / 1e3:10,.1f}",
                flush=True,
            )


class Round:
    """A round in which nobody drops out; client 0's time and bytes are counted."""

    def __init__(self, clients: int, values: int) -> None:
        self.clients, self.values = range(clients), values
        self.spent: dict[str, float] = {}  # phase -> milliseconds
        self.up = self.down = 0
        self.secrets: dict[int, Secrets] = {}
        sent = {k: self.ask("keys", k, Invitation(0), protocol.advertise, 0) for k in self.clients}
        self.adverts = {k: protocol.raw(advert) for k, advert in sent.items()}
        self.graph = drawn(sent, clients, SETTINGS)
        others = {k: self.graph.others(k) for k in self.clients}
        session = protocol.row(protocol.session(self.adverts))
        sealed: dict[int, torch.Tensor] = {}
        for k in self.clients:
            keys = {"adverts": torch.stack([sent[o] for o in others[k]]), "session": session}
            offer = Offer(clients, clients, self.graph.threshold, tuple(others[k]), keys)
            sealed[k] = self.ask("shares", k, offer, protocol.share, offer, SETTINGS)
        for k in self.clients:
            mine = torch.stack([sealed[o][others[o].index(k)] for o in others[k]])
            inbox = Inbox(tuple(others[k]), {"sealed": mine})
            vector = np.zeros(0 if k else values, dtype=np.uint64)
            self.ask("masked", k, inbox, protocol.mask, inbox, vector)
        self.masked = dict(self.secrets)
        self.shares(list(self.clients))

    def ask(
        self, phase: str, k: int, message: object, part: Callable[..., Any], *given: Any
    ) -> Any:
        """Client k's part of a phase: what it sends."""
        own = (self.secrets[k],) if k in self.secrets else ()
        began = time.process_time()
        answer = part(*own, k, *given)
        spent = 1e3 * (time.process_time() - began)
        if not isinstance(answer, Up):
            self.secrets[k], answer = answer
        if k == 0 and phase not in self.spent:
            self.spent[phase] = spent
            self.up += traffic(answer).total
            self.down += traffic(message).total
        return next(iter(answer.sent.values()))

    def shares(self, alive: list[int]) -> dict[int, dict[int, bytes]]:
        """The last two phases: of whom -> holder -> share."""
        self.secrets = dict(self.masked)
        there = Alive(tuple(alive))
        signed = {
            k: self.ask("list", k, there, protocol.acknowledge, there, SETTINGS) for k in alive
        }
        found: dict[int, dict[int, bytes]] = {k: {} for k in self.clients}
        for k in alive:
            others = self.graph.others(k)
            signers = tuple(o for o in others if o in signed)
            rows = {"signatures": torch.stack([signed[o] for o in signers])}
            given = self.ask("unmask", k, m := Signed(signers, rows), protocol.reveal, m)
            for of, share in zip(
                protocol.held(not self.graph.degree, k, others), given, strict=True
            ):
                found[of][k] = protocol.raw(share)
        return found

    def opened(self, gone: int) -> float:
        """The server's milliseconds for the sum of all but ``gone``."""
        alive = list(self.clients)[gone:]
        shares = self.shares(alive)
        total = np.zeros(self.values, dtype=np.uint64)
        one = torch.zeros(8 * self.values, dtype=torch.uint8)
        began = time.process_time()
        for _ in alive:
            protocol.add_masked(total, one)
        protocol.unmask(total, self.graph, 0, self.adverts, alive, shares)
        return 1e3 * (time.process_time() - began)


if __name__ == "__main__":
    main()
