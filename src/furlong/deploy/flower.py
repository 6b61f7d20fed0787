"""Messages between furlong's server and nodes, carried by Flower.

Four ways in, one engine behind them (``engines.remote`` at the server, ``node`` at a node):

``simulated``   clients in Ray actors of this machine, or of a Ray cluster.
``connected``   this process is the server of a run at a SuperLink (``furlong run --superlink``).
``serve``       this process is a node of a SuperLink (``furlong node``). It answers with the
                furlong that is installed here: what a server sends along as app code is never
                fetched, and torch and images are loaded once.
``server_app``, ``client_app``  for plain Flower: ``flwr run`` with what ``furlong flower-app``
                writes.

Only this module, ``flower_private`` and ``flower_fleet`` import Flower, whose API moves.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import furlong
from furlong.deploy.addresses import require_loopback, split_address
from furlong.deploy.bundle import bundle
from furlong.deploy.certs import node_keys
from furlong.deploy.flower_fleet import Place
from furlong.deploy.flower_private import (
    Connection,
    explain,
    has_disconnected,
    server_of_new_run,
)
from furlong.deploy.node import OwnImages, Site
from furlong.deploy.processes import QUIET
from furlong.deploy.session import Session
from furlong.engines.pool import keep_freed_memory
from furlong.engines.remote import Reply
from furlong.errors import FurlongError
from furlong.runs import config
from furlong.runs.observers import Status

PIECE = 12 << 20  # bytes of a body in one request; nginx takes 16 MB
_HEADER, _BODY = "furlong", "body"
_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
logging.getLogger("flwr").setLevel(logging.WARNING)  # what matters, furlong says itself


# ---------------------------------------------------------------- messages


def _content(header: Mapping[str, Any], body: bytes) -> RecordDict:
    """A header and a body as Flower carries them: pieces of bytes as they are, no second format.

    Each is an object by itself for Flower, with requests of its own, so there are few. Not in
    arrays, which Flower cuts into smaller ones.
    """
    content = RecordDict({_HEADER: ConfigRecord({"header": json.dumps(header)})})
    for at in range(0, len(body), PIECE):
        content[f"{_BODY}{at // PIECE}"] = ConfigRecord({_BODY: body[at : at + PIECE]})
    return content


def _read(content: RecordDict) -> tuple[dict[str, Any], bytes]:
    """The inverse of :func:`_content`; whatever it is not given, it treats as empty."""
    try:
        header = json.loads(str(content.config_records[_HEADER]["header"]))
    except (KeyError, ValueError, RecursionError):
        header = {}
    pieces: list[bytes] = []
    while (record := content.config_records.get(f"{_BODY}{len(pieces)}")) is not None:
        piece = record.get(_BODY)
        pieces.append(piece if isinstance(piece, bytes) else b"")
    return header if isinstance(header, dict) else {}, b"".join(pieces)


def _answered(site: Site, message: Message) -> Message:
    """A site's reply to a message."""
    return Message(_content(*site.answer(*_read(message.content))), reply_to=message)


class GridWire:
    """A :class:`furlong.engines.remote.Wire` over Flower's Grid.

    ``names``: the names of the nodes' keys, if they are known; ``stopped``: set when Flower has
    stopped the run.
    """

    def __init__(
        self,
        grid: Grid,
        names: Callable[[], Mapping[bytes, str]] = dict,
        stopped: threading.Event | None = None,
    ) -> None:
        self._grid, self._names, self._stopped = grid, names, stopped or threading.Event()

    def nodes(self) -> dict[int, str | None]:
        """Connected nodes by the names of their keys; if keys are known, no others."""
        self._check()
        names = self._names()  # sites may be added and revoked at any time
        found = {n.node_id: names.get(bytes(n.public_key)) for n in self._grid.get_nodes()}
        return {node: name for node, name in found.items() if name is not None or not names}

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:
        """A message; identical bodies are stored once by Flower, as chunks named by their hash."""
        self._check()
        message = Message(_content(header, body), node, "train", ttl=seconds)
        (ticket,) = self._grid.push_messages([message])
        return ticket or f"unsent-{node}-{time.monotonic_ns()}"

    def receive(self, tickets: Iterable[str]) -> list[Reply]:
        """Replies that have come."""
        self._check()
        lost = [ticket for ticket in tickets if ticket.startswith("unsent-")]
        asked = [ticket for ticket in tickets if ticket not in lost]
        unsent = "its node cannot be reached"
        replies = [Reply(ticket, {}, error=unsent, gone=True) for ticket in lost]
        for found in self._grid.pull_messages(asked) if asked else ():
            ticket = found.metadata.reply_to_message_id
            if found.has_error():
                gone = has_disconnected(found.error)
                replies.append(Reply(ticket, {}, error=explain(found.error), gone=gone))
            else:
                replies.append(Reply(ticket, *_read(found.content)))
        return replies

    def _check(self) -> None:
        if self._stopped.is_set():
            raise FurlongError("the run was stopped at the SuperLink. 'furlong resume' goes on.")


# ---------------------------------------------------------------- a deployment


@contextmanager
def connected(superlink: str, certs: Path | None, insecure: bool) -> Iterator[GridWire]:
    """A wire to the nodes of a SuperLink, for a new run; ``certs``: the server's folder."""
    names: Callable[[], Mapping[bytes, str]] = dict
    connection = Connection(superlink)
    if insecure:
        require_loopback(split_address(superlink)[0])
    elif certs is None:
        raise FurlongError(
            f"--superlink {superlink} needs --certs DIR/server, the folder that 'furlong certs' "
            "made (or --flower.insecure on this machine only)."
        )
    elif not (certs / "ca.crt").is_file():
        raise FurlongError(f"--certs {certs}: there is no ca.crt in it. 'furlong certs' makes one.")
    else:
        secret = certs / "superexec.secret"
        known = secret if secret.is_file() else None
        connection, names = (
            Connection(superlink, certs / "ca.crt", known),
            partial(node_keys, certs),
        )
    stopped = threading.Event()
    with server_of_new_run(connection, bundle({}), stopped) as grid:
        yield GridWire(grid, names, stopped)


def serve(site: Site, place: Place, stall: float) -> None:
    """Answer the questions to a site; see :meth:`Place.answer_questions`."""
    place.answer_questions(partial(_answered, site), site.say, stall)


# ---------------------------------------------------------------- plain Flower


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def _answer(message: Message, context: Context) -> Message:
    """A node of plain Flower: everything is loaded in this process, which may serve several."""
    given: Mapping[str, Any] = context.node_config
    site = _site(given.get("name"), given.get("data"), given.get("state"))
    part = given.get("partition-id")
    site.part = None if part is None or site.own is not None else int(part)
    return _answered(site, message)


@cache
def _site(name: Any, data: Any, folder: Any) -> Site:
    """The site of this process: the clients of a simulation share what it has loaded."""
    keep_freed_memory()
    state = os.environ.get("FURLONG_STATE")
    place = folder or state or Path.home() / ".furlong" / str(name or "node")
    own = None if data is None else OwnImages(str(data))
    known = None if name is None else str(name)
    # a simulation's clients are this very program: it may name its own files and folders
    here = state is not None
    return Site(Path(str(place)), own, name=known, code=here, shared=here)


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    """The server of ``flwr run``: the run folder is on the SuperLink's machine."""
    given, engine = dict(context.run_config), partial(Session, wire=GridWire(grid))
    say = partial(print, flush=True)

    def show(status: Status) -> None:
        say("\n".join([f"exchange {status.done} of {status.total}", *status.failures]))

    resume = str(given.pop("resume", "") or "")
    if resume:
        furlong.resume(resume, {}, show, say, engine)
        return
    values = {key: value for key, value in given.items() if value != ""}
    settings = config.from_tree({}, {**values, "run.engine": "flower"}, "the app's configuration")
    furlong.run_config(settings, show, say, engine)


# ---------------------------------------------------------------- simulation


@contextmanager
def simulated(clients: int, state: Path, cpus: float, log: Path) -> Iterator[GridWire]:
    """A wire to ``clients`` nodes in Ray actors with ``cpus`` cores each.

    Flower runs its simulation around a ServerApp; this one hands its Grid over and waits.
    """
    try:
        import ray
        from flwr.simulation import run_simulation
    except ImportError:
        raise FurlongError("the simulation needs Ray: pip install 'furlong-fl[flower]'.") from None
    grids: Queue[Grid | BaseException] = Queue()
    over = threading.Event()
    app = ServerApp()

    @app.main()
    def hand_over(grid: Grid, context: Context) -> None:  # noqa: ARG001
        grids.put(grid)
        over.wait()

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    resources = {"num_cpus": cpus, "num_gpus": 0.0}
    settings: Any = {"client_resources": resources, "init_args": quiet}

    def simulate() -> None:
        try:
            run_simulation(app, client_app, clients, backend_config=settings)
        except BaseException as error:
            grids.put(error)

    own = "FURLONG_STATE" not in os.environ  # on a Ray cluster it must be set everywhere
    os.environ.update({"FURLONG_STATE": str(state), **os.environ, **QUIET, **_RAY})
    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    with _logged(log):
        thread.start()
        try:
            yield GridWire(_started(grids, thread, log))
        finally:
            over.set()
            thread.join(60)
            ray.shutdown()
            if own:
                os.environ.pop("FURLONG_STATE", None)


def _started(grids: Queue[Grid | BaseException], thread: threading.Thread, log: Path) -> Grid:
    """The Grid of the simulation, once it has started."""
    grid: Grid | BaseException | str = "its thread has ended"
    while thread.is_alive():
        try:
            grid = grids.get(timeout=0.5)
            break
        except Empty:
            continue
    if isinstance(grid, Grid):
        return grid
    raise FurlongError(f"Flower's simulation did not start: {grid}; see {log}.")


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What Flower and Ray have to say goes to a file, not between lines of progress."""
    logger = logging.getLogger("flwr")
    handler, before, level = logging.FileHandler(path), logger.handlers, logger.level
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = before
        logger.setLevel(level)
        handler.close()
