"""What is known of a setting is written at its field, and read from there by everybody.

A settings class is a frozen dataclass whose fields are made by :func:`setting`. Options of the
command and their help, TOML files, tables of runs, ``furlong resume``, what a site agrees to and
the documentation's table of options are all derived from these facts.
"""

from __future__ import annotations

import math
import operator
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    short: str  # the option's short name: "rounds" of train.rounds
    resume: bool  # may be given anew when a run goes on
    told: bool  # a run tells it to its nodes
    agree: bool  # a site that gave --agree must have the same value
    table: bool  # runs that share a table have it in common
    at_least: float | None
    above: float | None
    at_most: float | None
    below: float | None
    infinite: bool  # infinity means something

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values, if there are few."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def values(self) -> str:
        """What it may be, in words: ``a | b``, ``int``, ``int | none``."""
        kinds = self.choices or get_args(self.kind) or (self.kind,)
        names = [str(getattr(kind, "__name__", kind)) for kind in kinds]
        return " | ".join(names).replace("NoneType", "none")

    @property
    def usual(self) -> str:
        """The default, as one would type it."""
        word = str(self.default)
        return word.lower() if self.default is None or isinstance(self.default, bool) else word

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
        finite = isinstance(value, int) or math.isfinite(value) or self.infinite
        if finite and all(holds(value, bound) for bound, holds in given.values()):
            return
        rules = [f"{words} {bound:,}" for words, (bound, _) in given.items()]
        rule = " and ".join(rules if finite else [*rules, "finite"])
        raise FurlongError(f"{section}.{self.name} is {value}; it must be {rule}")


def setting(
    default: Any,
    help: str,
    *,
    role: Role = "result",
    short: str = "",
    resume: bool = False,
    told: bool | None = None,
    agree: bool | None = None,
    table: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
) -> Any:
    """A field of a settings class; a callable ``default`` makes the value.

    ``agree`` is by default whether the setting changes results, and nodes are told what sites
    agree to.
    """
    agree = role == "result" if agree is None else agree
    known = {
        "help": help,
        "role": role,
        "short": short,
        "resume": resume,
        "told": agree if told is None else told,
        "agree": agree,
        "table": table,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "infinite": infinite,
    }
    if callable(default):
        return field(default_factory=default, metadata=known)
    return field(default=default, metadata=known)


def facts(cls: Any) -> tuple[Fact, ...]:
    """The facts of every field of a settings class, in their order."""
    return _facts(cls)


@cache  # reading annotations is slow, and every configuration asks for all classes
def _facts(cls: Any) -> tuple[Fact, ...]:
    hints = get_type_hints(cls)
    plain = setting(
        None, "", infinite=True
    ).metadata  # of a field that a user's method has without facts
    found = []
    for f in fields(cls):
        default = f.default
        if default is MISSING and f.default_factory is not MISSING:
            default = f.default_factory()
        found.append(Fact(f.name, hints[f.name], default, **(f.metadata or plain)))
    return tuple(found)


def check(settings: Any, section: str) -> None:
    """Refuse an instance of a settings class that has a number outside of its bounds."""
    for fact in facts(type(settings)):
        fact.check(getattr(settings, fact.name), section)
