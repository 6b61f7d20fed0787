"""What is known of a setting is written at its field, and read from there by everybody.

A settings class is a frozen dataclass whose fields are made by :func:`setting`. Options of the
command and their help, TOML files, tables of runs, ``furlong resume``, what a site agrees to and
the documentation's table of options are all derived from these facts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from furlong.errors import FurlongError

Role = Literal["result", "place", "watch"]
"""``result``: changes bits of the weights or of what is measured; ``place``: where and by which
machinery it is computed; ``watch``: how often and how closely one looks."""


@dataclass(frozen=True)
class Fact:
    """All that is known of one setting."""

    name: str  # of the field
    kind: Any  # its annotation, resolved
    default: Any
    help: str  # one sentence
    role: Role
    resume: bool  # may be given anew when a run goes on
    agree: bool  # a site that gave --agree must have the same value
    table: bool  # runs that share a table have it in common
    at_least: float | None
    above: float | None
    at_most: float | None
    below: float | None

    def check(self, value: Any, section: str) -> None:
        """Refuse a number outside of the bounds, and NaN; ``None`` and words pass."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        bounds = {
            "at least": (self.at_least, operator.ge),
            "above": (self.above, operator.gt),
            "at most": (self.at_most, operator.le),
            "below": (self.below, operator.lt),
        }
        given = {w: (bound, holds) for w, (bound, holds) in bounds.items() if bound is not None}
        if math.isfinite(value) and all(holds(value, bound) for bound, holds in given.values()):
            return
        rule = " and ".join(f"{words} {bound:g}" for words, (bound, _) in given.items())
        if not math.isfinite(value):
            rule = f"{rule} and finite" if rule else "finite"
        raise FurlongError(f"{section}.{self.name} is {value}; it must be {rule}")


def setting(
    default: Any,
    help: str,
    *,
    role: Role = "result",
    resume: bool = False,
    agree: bool | None = None,
    table: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a settings class; a callable ``default`` makes the value.

    ``agree`` is by default whether the setting changes results.
    """
    known = {
        "help": help,
        "role": role,
        "resume": resume,
        "agree": role == "result" if agree is None else agree,
        "table": table,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
    }
    if callable(default):
        return field(default_factory=default, metadata=known)
    return field(default=default, metadata=known)


def facts(cls: type) -> Iterator[Fact]:
    """The facts of every field of a settings class, in their order."""
    hints = get_type_hints(cls)
    usual = setting(None, "").metadata
    for f in fields(cls):
        default = f.default
        if default is MISSING and f.default_factory is not MISSING:
            default = f.default_factory()
        yield Fact(f.name, hints[f.name], default, **{**usual, **f.metadata})
