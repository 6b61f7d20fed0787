"""The command ``furlong``: thin, everything it does is in the package.

A command's module is imported when the command is called, so that ``furlong --help`` is quick.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from cyclopts import App

import furlong
from furlong.cli.common import err
from furlong.errors import FurlongError, nearest

COMMANDS = (
    *("run", "resume", "demo", "evaluate", "partition", "methods", "papers", "cost", "compare"),
    *("table", "report", "check", "export", "embed", "neighbours", "audit"),
    *("certs", "superlink", "node", "flower-app"),
)
"""Each is a function in the module of its name."""


def application(chosen: str | None = None) -> App:
    """All commands; ``chosen`` explains itself, of the others only the first line is known."""
    app = App(
        name="furlong",
        version=_version,
        version_format="plaintext",  # two lines
        suppress_keyboard_interrupt=False,  # main says how to go on
        help="Learn one image encoder from many parties that cannot share their images.",
    )
    for name in COMMANDS:
        word = name.replace("-", "_")
        about = None if name == chosen else _first_line(word)
        app.command(f"furlong.cli.{word}:{word}", name=name, help=about)
    return app


def _version() -> str:
    """The version, and the digest that 'furlong node --expect-package' takes."""
    from furlong.deploy.package import package_digest

    return f"{furlong.__version__}\npackage {package_digest()}"


def _first_line(word: str) -> str:
    """The first line of a command's documentation, which is read without importing the command."""
    tree = ast.parse(Path(__file__).with_name(f"{word}.py").read_text(encoding="utf-8"))
    (command,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == word)
    return (ast.get_docstring(command) or "").partition("\n")[0]


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors that a person can act on, no traceback, exit codes."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = given[0] if given else "--help"
    try:
        if not chosen.startswith("-") and chosen not in COMMANDS:
            raise FurlongError(f"unknown command {chosen!r}. {nearest(chosen, COMMANDS)}")
        application(chosen)(given)
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
