"""Numbers as a person reads them."""

from __future__ import annotations

import math


def size(count: float) -> str:
    """Bytes in a unit that a person reads."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g}\N{NO-BREAK SPACE}{unit}"
        count /= 1000
    return f"{count:,.0f}\N{NO-BREAK SPACE}PB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def points(fraction: float, std: float | None = None, unit: str = "") -> str:
    """A fraction as percentage points, with its standard deviation."""
    deviation = "" if std is None else f" ± {100 * std:.1f}"
    return f"{100 * fraction:.1f}{unit}{deviation}"


def percent(fraction: float | None, std: float | None = None) -> str:
    """A fraction as a percentage, with its standard deviation."""
    if fraction is None or math.isnan(fraction):
        return "–"
    return points(fraction, std, "\N{NO-BREAK SPACE}%")


def plural(count: int, word: str) -> str:
    """``1 seed``, ``2 seeds``, ``1,000 seeds``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
