"""Numbers as a person reads them."""

from __future__ import annotations


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
