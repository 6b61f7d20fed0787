"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from furlong.words import duration, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (44.7e6, "44.7 MB"),
     (2e18, "2,000 PB")],
)  # fmt: skip
def test_size(count: float, text: str) -> None:
    assert size(count).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (2.34, "2.3 s"),
        (59.4, "59.4 s"),
        (60, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3660, "1 h 01 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
