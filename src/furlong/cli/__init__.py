"""The command ``furlong``: thin, everything it does is in the package."""

from __future__ import annotations

import sys
from typing import Any

from furlong.cli import (
    asking,
    certs,
    comparing,
    flower_app,
    measuring,
    node,
    superlink,
    training,
    using,
)
from furlong.cli.common import app, dotted, err
from furlong.errors import FurlongError

__all__ = [
    "app",
    "asking",
    "certs",
    "comparing",
    "flower_app",
    "main",
    "measuring",
    "node",
    "superlink",
    "take_dotted",
    "training",
    "using",
]

TAKE_SETTINGS = ("run", "resume", "evaluate", "partition", "cost", "compare", "flower-app")


def take_dotted(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate ``--section.key value`` (or ``=value``, or a bare flag) from the other arguments."""
    rest: list[str] = []
    taken: dict[str, Any] = {}
    waiting = iter(range(len(arguments)))
    for i in waiting:
        word = arguments[i]
        if not word.startswith("--") or "." not in word.split("=", 1)[0]:
            rest.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        following = arguments[i + 1] if i + 1 < len(arguments) else "--"
        if not equals and not following.startswith("--"):
            value = following
            next(waiting)
        elif not equals:
            value = "true"
        taken[name] = value
    return rest, taken


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors that a person can act on, no traceback, exit codes."""
    given, taken = take_dotted(list(sys.argv[1:] if arguments is None else arguments))
    dotted.clear()
    dotted.update(taken)
    if dotted and given[:1] and given[0] not in TAKE_SETTINGS:
        err.print(f"error: 'furlong {given[0]}' takes no --{next(iter(dotted))}", markup=False)
        sys.exit(2)
    try:
        app(given)
    except FurlongError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        err.print(f"error: {error}. What was saved stays; 'furlong resume RUN' goes on.")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted. 'furlong resume RUN' goes on after the last checkpoint.")
        sys.exit(130)
