"""The command ``furlong``: thin, everything it does is in the package.

A command's module is imported when the command is called, so that ``furlong --help`` is quick.
"""

from __future__ import annotations

import sys

from cyclopts import App

import furlong
from furlong.cli.common import err
from furlong.errors import FurlongError, nearest

COMMANDS = {  # name -> module:function, and the first line of its documentation
    "run": ("run:run", "Learn an encoder across clients."),
    "resume": (
        "resume:resume",
        "Go on with an interrupted run; the final weights have the same bits as without "
        "interruption.",
    ),
    "demo": (
        "demo:demo",
        "What does federation buy? One client alone, federated and pooled, at equal training.",
    ),
    "evaluate": (
        "evaluate:evaluate",
        "Measure an encoder: of a finished run, of a run's last checkpoint, or of an exported "
        "file.",
    ),
    "partition": (
        "partition:partition",
        "Show who would get which images: class counts, β-CIB, β-hetero, heat map.",
    ),
    "methods": (
        "methods:methods",
        "List the methods, or one method's fields, state, and what leaves a client.",
    ),
    "cost": (
        "cost:cost",
        "Predict what a run sends, per round and in total, without training.",
    ),
    "compare": (
        "compare:compare",
        "Run configurations × methods × seeds, then print the table and build the report.",
    ),
    "table": (
        "table:table",
        "Mean ± standard deviation over seeds, a table per setting, the papers' numbers beside "
        "ours.",
    ),
    "report": ("report:report", "Make the page of a run again, or one page that compares several."),
    "check": (
        "check:check",
        "Look at images before training: what would be read, what not, doubles, what to set.",
    ),
    "export": (
        "export:export",
        "Write a run's encoder to one file for other programs, check it, and write its model card.",
    ),
    "embed": ("embed:embed", "Write the features of all images in a folder to a parquet file."),
    "neighbours": (
        "neighbours:neighbours",
        "Find the images most like one image; list them and, with --out, show them in a page.",
    ),
    "papers": (
        "papers:papers",
        "List the papers' tables, the addresses of a table's rows, or the settings of one row.",
    ),
    "certs": (
        "certs:certs",
        "Make certificates and keys for a federation, and the configuration of nginx.",
    ),
    "superlink": (
        "superlink:superlink",
        "Run the server side of a federation (Flower's SuperLink) until Ctrl-C.",
    ),
    "node": (
        "node:node",
        "Take part in a federation with the images of this machine, until Ctrl-C.",
    ),
    "flower-app": (
        "flower_app:flower_app",
        "Write a Flower app for ``flwr run``, for people who operate a federation already.",
    ),
}


def application(chosen: str | None = None) -> App:
    """All commands; ``chosen`` explains itself, of the others only the first line is known."""
    app = App(
        name="furlong",
        version=furlong.__version__,
        suppress_keyboard_interrupt=False,  # main says how to go on
        help="Learn one image encoder from many parties that cannot share their images.",
    )
    for name, (place, about) in COMMANDS.items():
        app.command(f"furlong.cli.{place}", name=name, help=None if name == chosen else about)
    return app


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
