"""The command ``furlong``: thin, everything it does is in the package.

A command's module is imported when the command is called, so that ``furlong --help`` is quick.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from cyclopts import App

import furlong
from furlong.cli.common import err
from furlong.errors import FurlongError, describe, exhausted, nearest

COMMANDS = (
    *("run", "resume", "demo", "evaluate", "partition", "methods", "papers", "cost", "privacy"),
    *("compare", "table", "report", "check", "export", "embed", "neighbours", "audit"),
    *("certs", "superlink", "node", "flower-app"),
)
"""Each is a function in the module of its name."""
TRACE = "FURLONG_TRACE"  # set: an error that nobody foresaw is shown with its traceback


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
        with _sigterm():
            application(chosen)(given)
    except FurlongError as error:
        err.print(f"error: {error}", soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        err.print(f"error: {error}.{_go_on(chosen)}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print(f"interrupted.{_go_on(chosen)}")
        sys.exit(130)
    except _Terminated:
        err.print(f"ended by SIGTERM.{_go_on(chosen)}")
        sys.exit(143)
    except Exception as error:
        if os.environ.get(TRACE):
            raise
        unforeseen = f"{describe(error)}. {TRACE}=1 shows where; please report it"
        err.print(f"error: {exhausted(error) or unforeseen}.{_go_on(chosen)}", soft_wrap=True)
        sys.exit(1)


class _Terminated(BaseException):
    """SIGTERM came, from a batch system or a service manager."""


@contextmanager
def _sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does; a worker, which is forked, just ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def leave(_: int, __: FrameType | None) -> None:
        if os.getpid() != own:
            os._exit(143)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _go_on(command: str) -> str:
    """How to go on with what was saved, by a command that saves."""
    resume = "'furlong resume RUN'"
    again = {"run": resume, "resume": resume, "compare": "The same command"}.get(command)
    return f" {again} goes on after the last checkpoint, if there is one." if again else ""
