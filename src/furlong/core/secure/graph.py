"""Who masks with whom, and how many must help to open a sum.

Up to 50 clients all mask with all (Bonawitz et al. 2017). Above, each masks with k others and gives
its shares to them (Bell et al. 2020, the protocol against a server that is honest but curious): the
clients stand in a ring in random order, and each is a neighbour of the k/2 before and behind it (a
Harary graph). k and the threshold t are the smallest for which, with a share γ of clients that
collude with the server and a share δ that drops out,

- the others stay connected: Pr[not] < 2^-41. To cut the ring in two, k/2 neighbours must be gone in
  two places; there are n(n - k - 1)/2 pairs of places;
- nobody has t or more colluding neighbours: n·Pr[that] < 2^-41;
- everybody has t neighbours who stay: n·Pr[not] < 2^-20.

The numbers of colluding and of staying neighbours are hypergeometric. Where no k below n - 1 does,
all mask with all.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from furlong.core.secure.settings import SecureSettings

COMPLETE = 50  # clients up to which all mask with all
SECURITY, CORRECTNESS = 41, 20  # bits


@dataclass(frozen=True)
class Graph:
    """The clients in the order of their ring; ``degree`` 0: all mask with all."""

    ring: tuple[int, ...]
    degree: int
    threshold: int

    def others(self, client: int) -> list[int]:
        """With whom ``client`` masks, ascending."""
        if not self.degree:
            return sorted(other for other in self.ring if other != client)
        at, n = self.ring.index(client), len(self.ring)
        steps = range(1, self.degree // 2 + 1)
        return sorted({self.ring[(at + sign * step) % n] for step in steps for sign in (1, -1)})


def least(members: int, threshold: int, degree: int, settings: SecureSettings) -> int:
    """How many of those who sent keys must stay, or the round is given up."""
    if not degree:
        return max(threshold, settings.fewest)
    return max(settings.fewest, members - math.floor(settings.dropouts * members + 1e-9))


def drawn(clients: Iterable[int], asked: int, settings: SecureSettings) -> Graph:
    """The graph of ``clients``, who answered of those ``asked``; drawn at random if sparse."""
    ring = sorted(clients)
    found = sparse(len(ring), settings.colluding, settings.dropouts)
    if found is None:
        return Graph(tuple(ring), 0, settings.needed(asked))
    secrets.SystemRandom().shuffle(ring)
    return Graph(tuple(ring), *found)


@cache
def sparse(clients: int, colluding: float, dropouts: float) -> tuple[int, int] | None:
    """(k, t) for so many clients, or ``None`` where all mask with all."""
    if clients <= COMPLETE:
        return None
    for degree in range(2, clients - 1, 2):
        threshold = _threshold(clients, degree, colluding, dropouts)
        if threshold is not None:
            return degree, threshold
    return None


def _threshold(n: int, degree: int, colluding: float, dropouts: float) -> int | None:
    """The smallest t that is safe with neighbours of this number, if it is also enough."""
    bad, away = math.floor(colluding * n + 1e-9), math.floor(dropouts * n + 1e-9)
    if _log2_cut(n, degree, bad + away) >= -SECURITY:
        return None
    threshold, risk = degree + 1, 0.0
    while threshold > 2:
        risk += n * _chance(n - 1, min(bad, n - 1), degree, threshold - 1)
        if risk >= 2.0**-SECURITY:
            break
        threshold -= 1
    stay = max(0, n - 1 - away)
    loss = n * sum(_chance(n - 1, stay, degree, k) for k in range(threshold))
    return threshold if threshold <= degree and loss < 2.0**-CORRECTNESS else None


def _chance(n: int, marked: int, chosen: int, found: int) -> float:
    """That of ``chosen`` among n, of whom some are ``marked``, ``found`` are (hypergeometric)."""
    if not max(0, chosen - (n - marked)) <= found <= min(chosen, marked):
        return 0.0
    pairs = ((marked, found), (n - marked, chosen - found))
    return math.exp(sum(_log_choose(a, b) for a, b in pairs) - _log_choose(n, chosen))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log2_cut(n: int, degree: int, gone: int) -> float:
    """log2 of a bound of the probability that ``gone`` random clients cut the ring in two."""
    if degree > gone:
        return -math.inf
    places = math.log(n) + math.log(max(1, n - degree - 1)) - math.log(2)
    # the probability that these ``degree`` clients are all among those who are gone
    chosen = _log_choose(gone, degree) - _log_choose(n, degree)
    return (places + chosen) / math.log(2)
