"""The section [secure]: whether the server may see a single client's upload."""

from __future__ import annotations

import math
from dataclasses import dataclass

from furlong.errors import FurlongError
from furlong.settings import check, setting

LARGEST = 1_000_000.0
"""The default of ``secure.bound``: far beyond weights and BatchNorm statistics in use."""


@dataclass(frozen=True)
class SecureSettings:
    """Secure aggregation: clients send masked numbers, of which the server learns only the sum."""

    sums: bool = setting(
        False,
        "Mask what clients send, so that the server learns the sum of a round and no client's own "
        "(for methods that only average).",
        short="secure",
    )
    threshold: float | None = setting(
        None,
        "A sum is opened with the help of more than this share of the round's clients, and fewer "
        "who collude with the server learn nothing (none: two thirds).",
        at_least=0.5,
        below=1,
    )
    fewest: int = setting(3, "Clients help to open no sum of fewer clients than this.", at_least=2)
    bound: float = setting(
        LARGEST,
        "The largest absolute value that a client may send; the smaller, the finer the steps of "
        "what is sent.",
        above=0,
    )
    colluding: float = setting(
        0.2,
        "With more than 50 clients in a round, where each masks with some others only: the share "
        "that may collude with the server.",
        at_least=0,
        below=1,
    )
    dropouts: float = setting(
        0.2,
        "With more than 50 clients in a round: the share that may drop out without the loss of "
        "the round.",
        at_least=0,
        below=1,
    )

    def __post_init__(self) -> None:
        check(self, "secure")

    def needed(self, clients: int) -> int:
        """How many of ``clients`` must help to open a sum, where all mask with all."""
        share = self.threshold
        most = 2 * clients // 3 if share is None else math.floor(share * clients + 1e-9)
        return max(self.fewest, most + 1)

    def check_cohort(self, size: int) -> None:
        """Refuse a run whose rounds have ``size`` clients, if these are too few."""
        if size >= self.needed(size):
            return
        raise FurlongError(
            f"secure.sums = true needs at least {self.fewest} clients in a round "
            f"(secure.fewest); a round has {size}. Use more clients or a larger --fraction. In a "
            "sum of two, each knows what the other sent; --secure.fewest 2 accepts that."
        )
