"""Flower as the carrier of messages: the only file that imports it (1.41; its API moves).

Four ways in, one engine behind them (``engines.remote`` at the server, ``site`` at a node):

``simulated``   clients in Ray actors of this machine, or of a Ray cluster.
``connected``   this process is the server of a run at a SuperLink (``furlong run --superlink``).
``serve``       this process does the work of a SuperNode (``furlong node``). It asks the SuperNode
                for tasks and answers them with the furlong that is installed here: what a server
                sends along as app code is never unpacked, and torch and images are loaded once.
``server_app``, ``client_app``  for plain Flower: ``flwr run`` with what ``furlong flower-app``
                writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

import furlong
from furlong.deploy import processes
from furlong.deploy.keys import node_keys
from furlong.engines.remote import Letter
from furlong.errors import FurlongError, describe

if TYPE_CHECKING:
    from furlong.deploy.node import Site

BEAT = 10.0  # seconds between two signs of life of a task
PATIENCE = 20.0  # seconds without a SuperLink until that is an error
_HEADER, _BODY = "furlong", "body"
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its node cannot load furlong",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its node failed",
    ErrorCode.MESSAGE_UNAVAILABLE: "the question expired before its node took it",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "the answer expired",
    ErrorCode.NODE_UNAVAILABLE: "its node has disconnected",
    ErrorCode.INVALID_FAB: "its node does not trust the app",
    ErrorCode.CLIENT_APP_CRASHED: "the program on its node has died",
}
logging.getLogger("flwr").setLevel(logging.WARNING)  # what matters, furlong says itself


# ---------------------------------------------------------------- messages


def _content(header: Mapping[str, Any], body: bytes) -> RecordDict:
    """A header and a body as Flower carries them: bytes as they are, no second format."""
    content = RecordDict({_HEADER: ConfigRecord({"header": json.dumps(header)})})
    if body:
        array = Array(dtype="uint8", shape=(len(body),), stype="furlong", data=body)
        content[_BODY] = ArrayRecord({_BODY: array})
    return content


def _read(content: RecordDict) -> tuple[dict[str, Any], bytes]:
    """The inverse of :func:`_content`; whatever it is not given, it treats as empty."""
    try:
        header = json.loads(str(content.config_records[_HEADER]["header"]))
    except (KeyError, ValueError, RecursionError):
        header = {}
    arrays = content.array_records.get(_BODY)
    body = arrays[_BODY].data if arrays and _BODY in arrays else b""
    return header if isinstance(header, dict) else {}, body


class GridWire:
    """A :class:`furlong.engines.remote.Wire` over Flower's Grid."""

    def __init__(self, grid: Grid, names: Callable[[], Mapping[bytes, str]] = dict) -> None:
        self._grid, self._names = grid, names
        self.stopped = False

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

    def receive(self, tickets: Iterable[str]) -> list[Letter]:
        """Replies that have come."""
        self._check()
        asked = [ticket for ticket in tickets if not ticket.startswith("unsent-")]
        lost = [t for t in tickets if t.startswith("unsent-")]
        letters = [Letter(ticket, {}, error="its node cannot be reached") for ticket in lost]
        for reply in self._grid.pull_messages(asked) if asked else ():
            ticket = reply.metadata.reply_to_message_id
            if reply.has_error():
                letters.append(Letter(ticket, {}, error=_explain(reply.error)))
            else:
                letters.append(Letter(ticket, *_read(reply.content)))
        return letters

    def _check(self) -> None:
        if self.stopped:
            raise FurlongError("the run was stopped at the SuperLink. 'furlong resume' goes on.")


def _explain(error: Error) -> str:
    text = _ERRORS.get(error.code, f"error {error.code}")
    own = error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return f"{text}: {str(error.reason)[:500]}" if own else text


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

    settings: Any = {
        "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
        "init_args": {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "error",
        },
    }

    def simulate() -> None:
        try:
            run_simulation(
                app,
                client_app,
                clients,
                backend_config=settings,
            )
        except BaseException as error:
            grids.put(error)

    own = "FURLONG_STATE" not in os.environ  # on a Ray cluster it must be set everywhere
    os.environ.update({"FURLONG_STATE": str(state), **os.environ, **_quiet()})
    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    with _logged(log):
        thread.start()
        try:
            while True:
                with suppress(Empty):
                    grid = grids.get(timeout=0.5)
                    break
                if not thread.is_alive():
                    raise FurlongError(f"Flower's simulation did not start; see {log}.")
            if isinstance(grid, BaseException):
                raise FurlongError(f"Flower's simulation did not start: {grid}; see {log}.")
            yield GridWire(grid)
        finally:
            over.set()
            thread.join(60)
            ray.shutdown()
            if own:
                os.environ.pop("FURLONG_STATE", None)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What Flower and Ray have to say goes to a file, not between lines of progress."""
    logger = logging.getLogger("flwr")
    handler, before = logging.FileHandler(path), list(logger.handlers)
    logger.handlers, level = [handler], logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = before
        logger.setLevel(level)
        handler.close()


def _quiet() -> dict[str, str]:
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


# ---------------------------------------------------------------- the server of a deployment


@dataclass(frozen=True)
class Door:
    """Where a SuperLink or SuperNode is, and how to be let in."""

    address: str  # HOST:PORT
    ca: Path | None = None  # none: without TLS
    secret: Path | None = None  # of executors

    def client(self, *interceptors: Any) -> RuntimeHttpClient:
        """A client of its Runtime API.

        Without Flower's way of trying again: on a 401 that interrupts the whole process.
        """
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.ca is None,
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
            interceptors=list(interceptors),
        )

    def executor(self) -> RuntimeHttpClient:
        """One that may ask for tasks."""
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if self.secret is not None:
            secret = self.secret.read_bytes()
            interceptors.append(
                SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
            )
        return self.client(*interceptors)


def door(
    superlink: str, certs: Path | None, insecure: bool
) -> tuple[Door, Callable[[], Mapping[bytes, str]]]:
    """The door of a SuperLink, and the names of the nodes' keys, by a folder of certificates."""
    if insecure:
        processes.require_loopback(processes.split_address(superlink)[0])
        return Door(superlink), dict
    if certs is None:
        raise FurlongError(
            f"--superlink {superlink} needs --certs DIR/server, the folder that 'furlong certs' "
            "made (or --flower.insecure on this machine only)."
        )
    if not (certs / "ca.crt").is_file():
        raise FurlongError(f"--certs {certs}: there is no ca.crt in it. 'furlong certs' makes one.")
    secret = certs / "superexec.secret"
    found = Door(superlink, certs / "ca.crt", secret if secret.is_file() else None)
    return found, lambda: node_keys(certs)


@contextmanager
def connected(door: Door, names: Callable[[], Mapping[bytes, str]]) -> Iterator[GridWire]:
    """A wire to the nodes of a SuperLink, for a new run of which this process is the ServerApp."""
    with _explained(door):
        token = _own_task(door)
        grid = HttpGrid(
            runtime_api_address=door.address,
            insecure=door.ca is None,
            root_certificates=None if door.ca is None else door.ca.read_bytes(),
            token=token,
        )
        grid._retry_invoker.max_time = PATIENCE
        grid._retry_invoker.should_giveup = _hopeless
        client = grid._runtime_client
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = context_from_proto(task.context).node_id
        grid.set_run(run_from_proto(task.run))
        wire = GridWire(grid, names)

        def stop() -> None:
            wire.stopped = True

        status, details = SubStatus.FAILED, "interrupted"
        try:
            with _beating(client, stop):
                yield wire
            status, details = SubStatus.COMPLETED, ""
        except FurlongError as error:
            details = str(error)
            raise
        finally:
            grid._retry_invoker.max_tries = 1
            with suppress(httpx.HTTPError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
            grid.close()


def _hopeless(error: Exception) -> bool:
    """Whether trying again cannot help."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    return error.response.status_code not in (502, 503, 504)


def _own_task(door: Door) -> str:
    """Submit a run, and take its server's part: the task's token."""
    control = ControlHttpClient.from_server_address(
        server_address=door.address,
        insecure=door.ca is None,
        root_certificates=None if door.ca is None else door.ca.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-cli")],
    )
    content = build_fab_from_files({"pyproject.toml": bundle({}).encode()})[0]
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    started = control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    control.close()
    executor = door.executor()
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    end = time.monotonic() + 15.0
    try:
        while time.monotonic() < end:
            got = executor.AcquireTask(wanted)
            if not got.HasField("task") or not got.token:
                time.sleep(0.2)
            elif got.task.run_id == started.run_id:
                return str(got.token)
            else:  # of a process that died between the two steps
                old = door.client(RuntimeTokenHttpInterceptor(got.token))
                old.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED))
    finally:
        executor.close()
    raise FurlongError(
        f"the SuperLink at {door.address} runs ServerApps itself. Start it with 'furlong "
        "superlink' (isolation 'process'), or use 'flwr run' with what 'furlong flower-app' writes."
    )


@contextmanager
def _beating(client: RuntimeHttpClient, stop: Callable[[], None]) -> Iterator[None]:
    """Signs of life of a task; ``stop()`` if Flower says that it has been stopped."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with suppress(httpx.HTTPError):
                if not client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                    stop()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT)


@contextmanager
def _explained(door: Door) -> Iterator[None]:
    """Network errors in words."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise FurlongError(
            f"the SuperLink at {door.address} refused a request ({error.response.status_code}): "
            f"{error.response.text[:300]}. A run that has begun goes on with 'furlong resume'."
        ) from None
    except httpx.HTTPError as error:
        raise FurlongError(
            f"no SuperLink can be reached at {door.address} ({error}). Is it running, and is the "
            "certificate for this address? A run that has begun goes on with 'furlong resume'."
        ) from None


# ---------------------------------------------------------------- a node of a deployment

Answering = Callable[[Mapping[str, Any], bytes], tuple[dict[str, Any], bytes]]


def serve(
    door: Door, answer: Answering, alive: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Do the tasks of the SuperNode behind ``door``, one at a time, while ``alive()``."""
    executor = door.executor()
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    try:
        while alive():
            try:
                got = executor.AcquireTask(wanted)
                if got.HasField("task") and got.token:
                    _do(door, str(got.token), answer)
                    continue
            except httpx.HTTPError:  # the SuperNode is ending, or the run has ended
                time.sleep(0.5)
            except Exception as error:  # a task that cannot be done must not end the node
                say(f"a task failed: {describe(error)}")
                time.sleep(0.5)
            time.sleep(0.1)
    finally:
        executor.close()


def _do(door: Door, token: str, answer: Answering) -> None:
    """One task: pull the question, answer it, push the answer."""
    client = door.client(
        RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
        RuntimeTokenHttpInterceptor(token),
    )
    status, details = SubStatus.FAILED, "the question could not be taken"
    context = None
    try:
        with _beating(client, lambda: None):
            message, context, _, _ = pull_task_input(client)
            reply = _content(*answer(*_read(message.content)))
            push_message(client, Message(reply, reply_to=message), context)
        status, details = SubStatus.COMPLETED, ""
    finally:
        push_task_output(client, context, status, details)
        client.close()


# ---------------------------------------------------------------- plain Flower


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def _answer(message: Message, context: Context) -> Message:
    """A node of plain Flower: everything is loaded in this process, which may serve several."""
    site, part = _site(context.node_config), context.node_config.get("partition-id")
    site.part = None if part is None or site.own is not None else int(part)
    return Message(_content(*site.answer(*_read(message.content))), reply_to=message)


def _site(given: Mapping[str, Any]) -> Site:
    """The site of this process: the clients of a simulation share what it has loaded."""
    from furlong.deploy.node import Own, Site
    from furlong.engines.pool import keep_freed_memory

    state, data = os.environ.get("FURLONG_STATE"), given.get("data")
    name = None if given.get("name") is None else str(given["name"])
    key = (name, data)
    if key not in _SITES:
        keep_freed_memory()
        folder = Path(str(given.get("state", state or Path.home() / ".furlong" / (name or "node"))))
        own = None if data is None else Own(str(data))
        # a simulation's clients are this very program: it may name its own files and folders
        _SITES[key] = Site(folder, own, name=name, code=state is not None)
    return _SITES[key]


_SITES: dict[tuple[str | None, Any], Site] = {}


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    """The server of ``flwr run``: the run folder is on the SuperLink's machine."""
    from furlong.runs import config, loop

    given = dict(context.run_config)
    resume = str(given.pop("resume", "") or "")
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731

    def show(status: loop.Status) -> None:
        say(
            f"exchange {status.done} of {status.total}" + "".join(f"\n{f}" for f in status.failures)
        )

    wire = GridWire(grid)
    if resume:
        loop.resume(resume, {}, show, say, wire)
        return
    values = {key: value for key, value in given.items() if value != ""}
    settings = config.from_tree({}, {**values, "run.engine": "flower"}, "the app's configuration")
    loop.run(settings, show, say, wire)


def bundle(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """pyproject.toml of a Flower app; every key of the configuration can be overridden."""
    import tomli_w

    flat = {
        section: {key: _plain(value) for key, value in values.items()}
        for section, values in settings.items()
    }
    return tomli_w.dumps(
        {
            "project": {
                "name": "furlong",
                "version": furlong.__version__,
                "description": "Furlong on Flower",
                "license": "Apache-2.0",
                "dependencies": [],
            },
            "tool": {
                "flwr": {
                    "app": {
                        "publisher": "furlong",
                        "components": {
                            "serverapp": "furlong.deploy.flower:server_app",
                            "clientapp": "furlong.deploy.flower:client_app",
                        },
                        "config": {**flat, "resume": ""},
                    }
                }
            },
        }
    )


def _plain(value: Any) -> Any:
    """Flower's settings are words and numbers: nothing is "", several are joined by commas."""
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else value
