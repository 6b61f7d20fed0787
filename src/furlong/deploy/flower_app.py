"""Furlong as an app of plain Flower: ``flwr run`` with what ``furlong flower-app`` writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import furlong
from furlong.deploy.flower import GridWire, answered
from furlong.deploy.node import OwnImages, Site
from furlong.deploy.session import Session
from furlong.engines.inprocess import keep_freed_memory
from furlong.runs import config
from furlong.runs.observers import Status

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """A node of plain Flower: everything is loaded in this process, which may serve several."""
    given: Mapping[str, Any] = context.node_config
    site = _site(given.get("name"), given.get("data"), given.get("state"))
    part = given.get("partition-id")
    site.part = None if part is None or site.own is not None else int(part)
    return answered(message, site.answer)


@cache
def _site(name: Any, data: Any, folder: Any) -> Site:
    """The site of this process: the clients of a simulation share what it has loaded."""
    keep_freed_memory()
    state = os.environ.get("FURLONG_STATE")
    usual = Path.home() / ".furlong" / str(name or "node")
    own = None if data is None else OwnImages(str(data))
    # a simulation's clients are this very program: it may name its own files and folders
    return Site(
        Path(str(folder or state or usual)),
        own,
        name=None if name is None else str(name),
        code=state is not None,
    )


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The server of ``flwr run``: the run folder is on the SuperLink's machine."""
    given = dict(context.run_config)
    resume = str(given.pop("resume", "") or "")
    engine = partial(Session, wire=GridWire(grid))
    if resume:
        furlong.resume(resume, {}, _show, _say, engine)
        return
    values = {key: value for key, value in given.items() if value != ""}
    settings = config.from_tree({}, {**values, "run.engine": "flower"}, "the app's configuration")
    furlong.run_config(settings, _show, _say, engine)


def _say(text: str) -> None:
    print(text, flush=True)


def _show(status: Status) -> None:
    _say("\n".join([f"exchange {status.done} of {status.total}", *status.failures]))
