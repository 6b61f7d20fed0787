"""Differential privacy: settings, what the accountant says, and the account of what was spent.

A release is one application of the Gaussian mechanism to a sum of vectors of length at most C, of
which each is there with probability q (Poisson), with noise N(0, (σC)²) per coordinate. ε(δ) of
several is what dp-accounting gives for their privacy loss distributions: an upper bound.

Neighbours are data sets of which one has nothing in the place of one unit (a record, or a client):
its vector is zero, everything else stays, and how many places there are is known to everybody
(dp-accounting's REPLACE_SPECIAL; for these releases the numbers are those of adding or removing).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from furlong.errors import FurlongError
from furlong.files import write_atomically
from furlong.settings import check, setting
from furlong.words import plural

Level = Literal["none", "client", "record"]
LEAST_NOISE = 0.3  # of σ: with less, ε is in the hundreds, and no guarantee
LEDGER = "spent.json"


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy; see docs/privacy.md for what is guaranteed and what is not."""

    level: Level = setting(
        "none",
        "What a budget protects: a client with all its images, or a record, which is one image; "
        "none: no differential privacy.",
    )
    epsilon: float | None = setting(
        None, "The budget ε of the whole run; the noise follows from it.", above=0
    )
    noise: float | None = setting(
        None,
        "The noise σ in units of the clip, instead of a budget; ε follows from it.",
        at_least=LEAST_NOISE,
    )
    delta: float | None = setting(
        None,
        "The δ of (ε, δ), below 1/units; none: a tenth of that and at most 0.00001, where units "
        "are all clients or all images.",
        above=0,
        below=1,
    )
    clip: float = setting(
        1.0,
        "The length C to which a client's update, or the gradient of a record, is cut.",
        above=0,
    )
    group: int = setting(
        1,
        "Level record: images per group whose gradient is cut as one, for methods that contrast "
        "images with each other.",
        at_least=1,
    )
    noise_at: Literal["server", "clients"] = setting(
        "server",
        "Level client: who adds the noise; clients: each a share, so that the sum has enough of it "
        "if train.min_clients answer, for each of them too. Protects from the server only with "
        "secure aggregation.",
    )
    noise_from: Literal["secret", "seed"] = setting(
        "secret",
        "What the noise is made from: a secret that is thrown away when the run ends, or run.seed, "
        "for experiments that can be repeated (whoever knows the seed can take the noise away).",
    )
    max_ratio: float = setting(
        10.0,
        "A run whose noise is more than this many times as long as the longest possible mean "
        "update is refused; inf: none is.",
        above=0,
        infinite=True,
    )

    def __post_init__(self) -> None:
        check(self, "privacy")
        if self.level == "none":
            if self.epsilon is not None or self.noise is not None:
                raise FurlongError(
                    "privacy.epsilon or privacy.noise is given and privacy.level is none: nobody "
                    "would be protected. Say whom: --privacy.level record or --privacy.level "
                    "client; or leave budget and noise out."
                )
            return
        if (self.epsilon is None) == (self.noise is None):
            raise FurlongError(
                f"privacy.level = {self.level} needs either a budget (--privacy.epsilon 8) or a "
                "noise (--privacy.noise 1.0), and not both."
            )
        if self.level == "record" and self.noise_at == "clients":
            raise FurlongError(
                "privacy.noise_at = clients is for level client: at level record every client "
                "adds all the noise itself. Leave it out."
            )
        if self.level == "client" and self.group != 1:
            raise FurlongError(
                f"privacy.group = {self.group} is for level record: at level client the unit is "
                "the client. Leave it out."
            )

    def delta_of(self, units: int) -> float:
        """δ where ``units`` are protected; one that would allow to publish a unit is refused."""
        if self.delta is None:
            return min(1e-5, 0.1 / units)
        if self.delta * units >= 1:
            raise FurlongError(
                f"privacy.delta = {self.delta:g} protects nobody: who publishes one of the "
                f"{plural(units, 'unit')} (images or clients), drawn at random, keeps within it at "
                f"ε = 0. It must be below 1/{units}, and should be far below: give "
                f"--privacy.delta {min(1e-5, 0.1 / units):.2g}, or leave it out."
            )
        return self.delta


@dataclass(frozen=True)
class Release:
    """``count`` applications of the mechanism to one unit's data."""

    sampling: float  # q
    noise: float  # σ
    count: int


def _accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise FurlongError(
            "differential privacy needs the package dp-accounting: pip install "
            "'furlong-fl[privacy]'"
        ) from None
    return dp_accounting


@cache
def epsilon_of(releases: tuple[Release, ...], delta: float) -> float:
    """ε(δ) of all ``releases`` together."""
    accounting = _accounting()
    spent = [r for r in releases if r.count and r.sampling]
    if not spent:
        return 0.0
    if all(r.sampling >= 1 for r in spent):  # Gaussian mechanisms compose to one, exactly
        noise = sum(r.count / r.noise**2 for r in spent) ** -0.5
        return float(accounting.get_epsilon_gaussian(noise, delta))
    accountant = accounting.pld.PLDAccountant(
        accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3
    )
    for release in spent:
        event = accounting.GaussianDpEvent(release.noise)
        if release.sampling < 1:
            event = accounting.PoissonSampledDpEvent(release.sampling, event)
        accountant.compose(event, release.count)
    return float(accountant.get_epsilon(delta))


@cache
def noise_for(epsilon: float, sampling: float, count: int, delta: float) -> float:
    """The least σ, to a thousandth of itself, with which ``count`` releases spend ``epsilon``."""

    def within(noise: float) -> bool:
        return epsilon_of((Release(sampling, noise, count),), delta) <= epsilon

    low = high = LEAST_NOISE
    while not within(high):
        low, high = high, 2 * high
        if high > 1e9:
            raise FurlongError(f"no noise keeps {plural(count, 'release')} within ε = {epsilon:g}.")
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


class Ledger:
    """What was released of whom, in a file that is written before a release is made use of.

    A release is known by its exchange, its client and a mark of its contents: one that is computed
    again with the same result counts once, another result counts again. Nothing is ever taken off.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        try:
            found = json.loads(self._path.read_text()) if self._path.exists() else []
            self._entries = {
                (int(e), int(k), str(mark)): Release(float(q), float(noise), int(count))
                for e, k, mark, q, noise, count in found
            }
        except (ValueError, TypeError):
            raise FurlongError(
                f"{self._path}, the account of the privacy budget, is damaged: put it back from a "
                "copy, or start a new run."
            ) from None

    def add(self, exchange: int, releases: Iterable[tuple[int, str, Release]]) -> None:
        """Write down (client, mark, release) of ``exchange``."""
        self._entries |= {(exchange, client, mark): r for client, mark, r in releases}
        lines = [[*key, r.sampling, r.noise, r.count] for key, r in self._entries.items()]
        text = "[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, text.encode())

    def marks(self, exchange: int, client: int) -> set[str]:
        """Of what was released of ``client`` in ``exchange``."""
        return {mark for e, k, mark in self._entries if (e, k) == (exchange, client)}

    def clients(self) -> set[int]:
        """Of whom something was released."""
        return {client for _, client, _ in self._entries}

    def rounds(self, client: int) -> int:
        """How many releases there were of ``client``."""
        return sum(k == client for _, k, _ in self._entries)

    def epsilon(
        self,
        delta: float,
        pending: dict[int, Release] | None = None,
        now: int = -1,
        mark: str | None = None,
    ) -> float:
        """The ε of the client, or of a record of the client, of whom most was released.

        ``pending``: what exchange ``now`` is going to release of clients; who has an entry there
        already is expected to get the same result again, unless ``mark`` says which it is.
        """
        each: dict[int, Counter[tuple[float, float]]] = {}
        for (_, client, _), r in self._entries.items():
            each.setdefault(client, Counter())[r.sampling, r.noise] += r.count
        known = {k for e, k, m in self._entries if e == now and mark in (None, m)}
        for client, r in (pending or {}).items():
            if client not in known:
                each.setdefault(client, Counter())[r.sampling, r.noise] += r.count
        accounts = {
            tuple(Release(q, noise, count) for (q, noise), count in sorted(counts.items()))
            for counts in each.values()
        }
        return max((epsilon_of(account, delta) for account in accounts), default=0.0)
