"""Messages between furlong's server and nodes, carried by Flower.

``connected``   this process is the server of a run at a SuperLink (``furlong run --superlink``).
``serve``       this process does the work of a SuperNode (``furlong node``). It asks the SuperNode
                for tasks and answers them with the furlong that is installed here: what a server
                sends along as app code is never unpacked, and torch and images are loaded once.

``simulation`` and ``flower_app`` use the same messages. Only these modules and ``flower_private``
import Flower, whose API moves.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from furlong.deploy.addresses import require_loopback, split_address
from furlong.deploy.bundle import bundle
from furlong.deploy.certs import node_keys
from furlong.deploy.flower_private import Connection, do_tasks, explain, server_of_new_run
from furlong.engines.remote import Reply
from furlong.errors import FurlongError

_HEADER, _BODY = "furlong", "body"
logging.getLogger("flwr").setLevel(logging.WARNING)  # what matters, furlong says itself

Answering = Callable[[Mapping[str, Any], bytes], tuple[dict[str, Any], bytes]]


def content_of(header: Mapping[str, Any], body: bytes) -> RecordDict:
    """A header and a body as Flower carries them: bytes as they are, no second format."""
    content = RecordDict({_HEADER: ConfigRecord({"header": json.dumps(header)})})
    if body:
        array = Array(dtype="uint8", shape=(len(body),), stype="furlong", data=body)
        content[_BODY] = ArrayRecord({_BODY: array})
    return content


def read_content(content: RecordDict) -> tuple[dict[str, Any], bytes]:
    """The inverse of :func:`content_of`; whatever it is not given, it treats as empty."""
    try:
        header = json.loads(str(content.config_records[_HEADER]["header"]))
    except (KeyError, ValueError, RecursionError):
        header = {}
    arrays = content.array_records.get(_BODY)
    body = arrays[_BODY].data if arrays and _BODY in arrays else b""
    return header if isinstance(header, dict) else {}, body


def answered(message: Message, answer: Answering) -> Message:
    """A node's reply to a message."""
    return Message(content_of(*answer(*read_content(message.content))), reply_to=message)


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
        message = Message(content_of(header, body), node, "train", ttl=seconds)
        (ticket,) = self._grid.push_messages([message])
        return ticket or f"unsent-{node}-{time.monotonic_ns()}"

    def receive(self, tickets: Iterable[str]) -> list[Reply]:
        """Replies that have come."""
        self._check()
        lost = [ticket for ticket in tickets if ticket.startswith("unsent-")]
        asked = [ticket for ticket in tickets if ticket not in lost]
        replies = [Reply(ticket, {}, error="its node cannot be reached") for ticket in lost]
        for found in self._grid.pull_messages(asked) if asked else ():
            ticket = found.metadata.reply_to_message_id
            if found.has_error():
                replies.append(Reply(ticket, {}, error=explain(found.error)))
            else:
                replies.append(Reply(ticket, *read_content(found.content)))
        return replies

    def _check(self) -> None:
        if self._stopped.is_set():
            raise FurlongError("the run was stopped at the SuperLink. 'furlong resume' goes on.")


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
        folder, secret = certs, certs / "superexec.secret"
        known = secret if secret.is_file() else None
        connection = Connection(superlink, certs / "ca.crt", known)
        names = lambda: node_keys(folder)  # noqa: E731
    stopped = threading.Event()
    with server_of_new_run(connection, bundle({}), stopped) as grid:
        yield GridWire(grid, names, stopped)


def serve(
    supernode: Connection,
    answer: Answering,
    alive: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Do the tasks of a SuperNode with ``answer``, while ``alive()``."""
    do_tasks(supernode, lambda message: answered(message, answer), alive, say)
