"""All that furlong uses of Flower beyond its documented API; written for flwr 1.41.

Another version may have moved any of this: ``tests/deploy/test_flower_contract.py`` says what.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid, http_grid

from furlong.errors import FurlongError

HEARTBEAT = 10.0  # seconds between two signs of life of a task
HEARTBEAT_AGAIN = 3.0  # seconds until the next try after one that did not arrive
# a message is announced before its parts are sent; Flower by itself looks again after 1, 2, 4 … s
AGAIN: dict[str, Any] = {"initial_backoff": 0.1, "backoff_cap": 1.0}
PATIENCE = 20.0  # seconds without a SuperLink until that is an error
_RESUME = "A run that has begun goes on with 'furlong resume'."
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


def explain(error: Error) -> str:
    """Why there is no answer to a message."""
    text = _ERRORS.get(error.code, f"error {error.code}")
    own = error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return f"{text}: {str(error.reason)[:500]}" if own else text


def has_disconnected(error: Error) -> bool:
    """Whether a SuperLink has not heard of a node for a minute; it may have been away itself."""
    return bool(error.code == ErrorCode.NODE_UNAVAILABLE)


# ---------------------------------------------------------------- reaching Flower's programs


@dataclass(frozen=True)
class Connection:
    """Where a SuperLink or SuperNode is, and how to be let in."""

    address: str  # HOST:PORT
    authority: Path | None = None  # ca.crt; none: without TLS
    secret: Path | None = None  # of executors

    def _secured(self) -> dict[str, Any]:
        authority = None if self.authority is None else self.authority.read_bytes()
        return {"insecure": authority is None, "root_certificates": authority}

    def client(self, *interceptors: Any) -> RuntimeHttpClient:
        """A client of its Runtime API.

        Without Flower's way of trying again: on a 401 that interrupts the whole process.
        """
        return RuntimeHttpClient.from_server_address(
            server_address=self.address, interceptors=list(interceptors), **self._secured()
        )

    def executor(self) -> RuntimeHttpClient:
        """A client that may ask for tasks."""
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if self.secret is not None:
            secret = self.secret.read_bytes()
            interceptors.append(
                SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
            )
        return self.client(*interceptors)

    def control(self) -> ControlHttpClient:
        """A client that may submit runs."""
        version = RuntimeVersionHttpInterceptor(component_name="flwr-cli")
        return ControlHttpClient.from_server_address(
            server_address=self.address, interceptors=[version], **self._secured()
        )

    def grid(self, token: str) -> HttpGrid:
        """A Grid for the run that ``token`` belongs to; it gives up after a while."""
        http_grid.pull_objects = partial(pull_objects, **AGAIN)  # type: ignore[attr-defined]
        grid = HttpGrid(runtime_api_address=self.address, token=token, **self._secured())
        grid._retry_invoker.max_time = PATIENCE
        grid._retry_invoker.should_giveup = _hopeless
        return grid


def _hopeless(error: Exception) -> bool:
    """Whether trying again cannot help."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    return error.response.status_code not in (502, 503, 504)


@contextmanager
def _in_words(connection: Connection) -> Iterator[None]:
    """Network errors as errors that a person can act on."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise FurlongError(
            f"the SuperLink at {connection.address} refused a request "
            f"({error.response.status_code}): {error.response.text[:300]}. {_RESUME}"
        ) from None
    except httpx.HTTPError as error:
        raise FurlongError(
            f"no SuperLink can be reached at {connection.address} ({error}). Is it running, and is "
            f"the certificate for this address? {_RESUME}"
        ) from None


@contextmanager
def heartbeats(
    beat: Callable[[], bool], seconds: float, stopped: threading.Event
) -> Iterator[None]:
    """Signs of life, ``seconds`` apart; ``stopped`` is set if ``beat()`` says that it is over."""
    over = threading.Event()

    def live() -> None:
        pause = seconds
        while not over.wait(pause):
            pause = HEARTBEAT_AGAIN
            with suppress(httpx.HTTPError, ValueError):  # no answer, or a proxy's page
                if not beat():
                    stopped.set()
                pause = seconds

    thread = threading.Thread(target=live, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(seconds)


# ---------------------------------------------------------------- the server of a run


@contextmanager
def server_of_new_run(connection: Connection, app: str, stopped: threading.Event) -> Iterator[Grid]:
    """The Grid of a new run of ``app`` (its pyproject.toml), with this process as its ServerApp."""
    with _in_words(connection):
        grid = connection.grid(_server_task(connection, app))
        client = grid._runtime_client
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = context_from_proto(task.context).node_id
        grid.set_run(run_from_proto(task.run))
        status, details = SubStatus.FAILED, "interrupted"
        try:
            beat = lambda: bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)  # noqa: E731
            with heartbeats(beat, HEARTBEAT, stopped):
                yield grid
            status, details = SubStatus.COMPLETED, ""
        except FurlongError as error:
            details = str(error)
            raise
        finally:
            grid._retry_invoker.max_tries = 1
            with suppress(httpx.HTTPError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
            grid.close()


def _server_task(connection: Connection, app: str) -> str:
    """Submit a run, and take its server's part: the task's token."""
    content = build_fab_from_files({"pyproject.toml": app.encode()})[0]
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with closing(connection.control()) as control:
        started = control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    end = time.monotonic() + 15.0
    with closing(connection.executor()) as executor:
        while time.monotonic() < end:
            got = executor.AcquireTask(wanted)
            if not got.HasField("task") or not got.token:
                time.sleep(0.2)
            elif got.task.run_id == started.run_id:
                return str(got.token)
            else:  # of a process that died between the two steps
                old = connection.client(RuntimeTokenHttpInterceptor(got.token))
                old.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED))
    raise FurlongError(
        f"the SuperLink at {connection.address} runs ServerApps itself. Start it with 'furlong "
        "superlink' (isolation 'process'), or use 'flwr run' with what 'furlong flower-app' writes."
    )


# ---------------------------------------------------------------- the SuperLink's list of nodes


@dataclass(frozen=True)
class SuperLinkNodes:
    """The list of nodes of a SuperLink; each call may raise a FurlongError."""

    connection: Connection

    def nodes(self) -> dict[bytes, tuple[int, str]]:
        """Numbers and states of all nodes that it knows, by key.

        A state is registered, online, offline or, of a key that is lost for ever, unregistered.
        """
        with self._control() as control:
            found = control.ListNodes(ListNodesRequest()).nodes_info
        return {bytes(n.public_key): (n.node_id, n.status) for n in found}

    def register(self, key: bytes, name: str) -> None:
        """Let the node with this key connect."""
        with self._control() as control:
            control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def unregister(self, number: int) -> None:
        """Refuse a node and its key for ever."""
        with self._control() as control:
            control.UnregisterNode(UnregisterNodeRequest(node_id=number))

    @contextmanager
    def _control(self) -> Iterator[ControlHttpClient]:
        with _in_words(self.connection), closing(self.connection.control()) as control:
            yield control
