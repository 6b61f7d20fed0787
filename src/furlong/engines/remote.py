"""The server's half of an engine whose clients are elsewhere, over anything that carries messages.

The server asks and a node answers, each with a header (JSON) and a body (bytes, one slice at most):

``hello``   who are you, what do you hold, will you take part? The answer may be a refusal.
``work``    one exchange of one client; a large download comes in several slices.
``given``   a slice of the encoder's tensors that stay fixed during the run and are in no download:
            a node that lacks them says so when it is asked to work, and gets them once.
``fetch``   the next slice of a large answer.
``end``     the run is over: forget its state. The encoder comes along.

Every question says which run, which version and which configuration it belongs to, so a node that
was restarted needs no memory of earlier ones but the client's state on its disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import furlong
from furlong.core.context import Exchange
from furlong.core.exchange import Downloads, Engine, Failure
from furlong.core.layout import PayloadError
from furlong.core.method import Report
from furlong.core.payload import pack, payload, unpack
from furlong.engines.codec import How, decode, encode
from furlong.errors import FurlongError

GREETING = 120.0  # seconds for answering a greeting; a node that is stuck misses it
RETRY = 10.0  # seconds until a node that failed to answer a greeting is greeted again
RETURN = 30.0  # seconds for a node that has disconnected to be back: it tries every few seconds
LOOK = 1.0  # seconds between two looks whether it is
PROTOCOL = 4  # of the messages; raised when they change
DAY = 86_400.0
HELD = 1 << 30  # bytes of answers that wait for those of clients before them
_PAUSES = (0.02, 0.5)  # seconds between two looks for answers, at first and at last


@dataclass(frozen=True)
class Reply:
    """An answer: to which question, what it says, or what went wrong on the way.

    ``gone``: what went wrong is that the node has disconnected.
    """

    ticket: str
    header: dict[str, Any]
    body: bytes = b""
    error: str = ""
    gone: bool = False


class Wire(Protocol):
    """What carries messages to nodes and brings their answers."""

    def nodes(self) -> Mapping[int, str | None]:
        """Nodes that are connected now, with the name that their key is registered under."""

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:
        """Ask a node; it has ``seconds``. The ticket is for :meth:`receive`."""

    def receive(self, tickets: Iterable[str]) -> list[Reply]:
        """Answers that have come, each once."""


def question(run: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """What every question to a node says: which run, which version, which configuration."""
    return {"run": run, "protocol": PROTOCOL, "furlong": furlong.__version__, "config": dict(told)}


def plain(text: Any) -> str:
    """What a node says, fit for a terminal and a log."""
    return "".join(letter for letter in str(text)[:500] if letter.isprintable())


class Directory:
    """Which node is which client. Nodes are greeted when they appear, and again when they return.

    ``admit(node, answer, name)`` gives a node's client number, or why it cannot take part.
    """

    def __init__(
        self,
        wire: Wire,
        hello: Mapping[str, Any],
        admit: Callable[[int, dict[str, Any], str | None], int | str],
        say: Callable[[str], None],
    ) -> None:
        self.wire, self.hello, self.admit, self.say = wire, hello, admit, say
        self.nodes: dict[int, int] = {}  # client -> node, of those that are connected
        self.names: dict[int, str] = {}  # client -> name, of those that have one
        self._asked: dict[str, int] = {}  # ticket of a hello -> node
        self._known: dict[int, int | None] = {}  # node -> client, or None if it was refused
        self._later: dict[int, float] = {}  # node -> when to greet it again
        self._connected: Mapping[int, str | None] = {}

    def look(self) -> None:
        """Greet nodes that are new, hear what they say, forget those that are gone."""
        self._connected = self.wire.nodes()
        for node in [n for n in self._known if n not in self._connected]:
            client = self._known.pop(node)
            if client is not None and self.nodes.get(client) == node:
                del self.nodes[client]
        greeted, now = {*self._known, *self._asked.values()}, time.monotonic()
        for node in self._connected:
            if node not in greeted and now >= self._later.get(node, now):
                greeting = {**self.hello, "kind": "hello"}
                self._asked[self.wire.send(node, greeting, b"", GREETING)] = node
        for reply in self.wire.receive(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.ticket)
            if reply.error:
                who = self._connected.get(node) or f"node {node}"
                self.say(f"{who} is connected and does not answer: {reply.error}. Its log says why")
                self._later[node] = now + RETRY
            elif node in self._connected:
                self._introduce(node, reply.header)

    def _introduce(self, node: int, answer: dict[str, Any]) -> None:
        """Enter a node that has answered, or say why not."""
        name, reason = self._connected[node], answer.get("refused", answer.get("reason"))
        client: int | str = plain(reason)
        if reason is None:
            try:
                client = self.admit(node, answer, name)
            except Exception as error:  # whatever a node says must not end the run
                client = f"its answer makes no sense ({type(error).__name__})"
        who = name or plain(answer.get("name") or f"node {node}")
        if "failed" in answer or client in self.nodes:
            # it may have been repaired, or the other may be about to be noticed as dead
            self._later[node] = time.monotonic() + RETRY
            if isinstance(client, int):
                client = f"client {client} is connected already, as another node"
        else:
            self._known[node] = client if isinstance(client, int) else None
        if isinstance(client, str):
            self.say(f"{who} does not take part: {client}")
            return
        self.nodes[client] = node
        if name or answer.get("name"):
            self.names[client] = who
            self.say(f"{who} has come ({answer.get('images')} images)")

    def renumber(self, new: Mapping[int, int]) -> None:
        """Give clients other numbers, before any is asked to work."""
        self.nodes = {new[client]: node for client, node in self.nodes.items()}
        self.names = {new[client]: name for client, name in self.names.items()}
        known = self._known.items()
        self._known = {node: None if k is None else new[k] for node, k in known}

    def wait(self, enough: Callable[[], bool], seconds: float, what: str) -> None:
        """Look until ``enough()``, or for ``seconds``."""
        end, told = time.monotonic() + seconds, False
        while True:
            self.look()
            if enough() or time.monotonic() > end:
                return
            if not told:
                self.say(f"waiting for {what} (at most {seconds:.0f} s)")
                told = True
            time.sleep(0.25)


@payload("furlong.engines.remote.Since")
class LastAnswer:
    """The exchange of a client's last answer that arrived, and whether a state belongs to it."""

    exchange: int
    kept: bool


@dataclass
class Remote(Engine):
    """The engine of clients behind a :class:`Wire`."""

    wire: Wire
    directory: Directory
    question: dict[str, Any]  # what every question says of the run, see :func:`question`
    sizes: Callable[[], dict[int, int] | None]  # of all clients, if nodes do not know them
    oldest: Callable[[], int]  # the first exchange that the server may have to go back to
    deadline: float = DAY  # seconds for an exchange
    wait: float = 600.0  # seconds for enough nodes to connect
    need: int = 1  # nodes to wait for
    whole: bool = False  # go on after an interruption only with all who answered before it
    slice_bytes: int = 64 << 20
    encoding: How = "exact"
    given: bytes = b""  # packed tensors that every node needs once; the question has their digest
    last: dict[int, LastAnswer] = field(default_factory=dict)  # by client
    left: set[int] = field(default_factory=set)  # clients that answered once and stayed away then

    def states(self) -> Iterator[tuple[int, Any]]:
        """Which of the states that nodes keep is each client's; the states stay there."""
        return ((client, pack(last)) for client, last in sorted(self.last.items()))

    def restore(self, states: Mapping[int, Path]) -> None:
        """Go back to a checkpoint: nodes have the states of that time too."""
        found = {client: unpack(bytearray(path.read_bytes())) for client, path in states.items()}
        if not all(isinstance(last, LastAnswer) for last in found.values()):
            raise FurlongError("this run began in process: it cannot go on with --engine flower.")
        newest = max((last.exchange for last in found.values()), default=-1)
        before = [client for client, last in found.items() if last.exchange == newest]
        missing = [client for client in before if client not in self.directory.nodes]
        if missing:
            who = ", ".join(self.directory.names.get(k, f"client {k}") for k in missing)
            said = f"{who} answered before the interruption and cannot be reached now"
            if self.whole:
                raise FurlongError(
                    f"{said}: without it the result would be another one. See to that node, then "
                    "'furlong resume RUN'; or go on without it: --train.min-clients 1 (or more)."
                )
            self.directory.say(f"warning: {said}; the result will be another one without it")
        self.last = found

    def exchange(
        self, exchange: Exchange, downloads: Downloads[Any, Any]
    ) -> Iterator[tuple[int, Report[Any] | Failure]]:
        """Who was asked and what came back, in client order."""
        if not len(downloads):
            return
        need = min(self.need, len(downloads))
        self.directory.wait(
            lambda: sum(client in self.directory.nodes for client in downloads) >= need,
            self.wait,
            f"{need} node(s)",
        )
        for client, found in _Conversations(self, exchange, downloads).all():
            name = self.directory.names.get(client)
            if name is not None and isinstance(found, Failure):
                found = replace(found, reason=f"{name}: {found.reason}")
            yield client, found

    def finish(self, encoder: Any) -> None:
        """The run is over: give every node the encoder, and leave to forget its state."""
        header = {**self.question, "kind": "end"}
        tickets = {
            self.wire.send(node, {**header, "client": client}, bytes(encoder), 60.0)
            for client, node in self.directory.nodes.items()
        }
        end = time.monotonic() + 30.0
        while tickets and time.monotonic() < end:
            tickets -= {reply.ticket for reply in self.wire.receive(list(tickets))}
            time.sleep(0.1)

    def close(self) -> None:
        """Nothing to do: whoever made the wire closes it."""
        return


Conversation = Generator[tuple[dict[str, Any], bytes], Reply, Report[Any] | Failure]
"""Yields questions to one client, is sent the replies, and ends with what they amount to."""


def _conversation(
    remote: Remote, client: int, exchange: int, pieces: list[bytes], base: Any, most: int
) -> Conversation:
    """One exchange with one client.

    ``pieces``: of the download, each of a slice; ``base``: what the client makes of it, if it is
    not exact; ``most``: bytes that the answer may have.
    """
    last, slices = remote.last.get(client), len(pieces)
    about = {
        "kind": "work",
        "sizes": remote.sizes(),
        "since": None if last is None else asdict(last),
        "slices": slices,
        "oldest": remote.oldest(),
        "encoding": remote.encoding,
    }
    refused = partial(Failure, client, "refused")
    for at in range(slices):
        reply = yield {**about, "slice": at}, pieces[0]
        if at == 0 and reply.header.get("lacks") is True:
            if not (yield from _give(remote)):
                return refused("an answer that makes no sense")
            reply = yield {**about, "slice": at}, pieces[0]
        pieces.pop(0)
        if at + 1 < slices and reply.header.get("kept") != at:
            return refused("an answer that makes no sense")
    answer = bytearray()
    for got in count():
        said, parts = reply.header, reply.header.get("slices")
        if type(parts) is not int or said.get("slice") != got or not reply.body:
            return refused("an answer that makes no sense")
        answer += reply.body
        if len(answer) > most or (parts - 1) * remote.slice_bytes > most:
            return refused(f"more than the {most} bytes that were asked for")
        if got + 1 >= parts:
            break
        if len(reply.body) != remote.slice_bytes:
            return refused("an answer in slices of another size")
        reply = yield {"kind": "fetch", "slice": got + 1}, b""
    try:
        report: Report[Any] = decode(answer, base)
    except PayloadError as error:
        return refused(str(error))
    except Exception as error:  # hostile bytes must not end the run
        return refused(f"cannot be read ({type(error).__name__})")
    # only now: what was lost on the way counts for nobody
    remote.last[client] = LastAnswer(exchange, said.get("state") is True)
    remote.left.discard(client)
    return report


def _give(remote: Remote) -> Generator[tuple[dict[str, Any], bytes], Reply, bool]:
    """Send a node what stays fixed; whether it took all of it."""
    size = remote.slice_bytes
    starts = range(0, len(remote.given), size)
    for at, start in enumerate(starts):
        about = {"kind": "given", "slice": at, "slices": len(starts)}
        reply = yield about, remote.given[start : start + size]
        if reply.header.get("kept") != at:
            return False
    return bool(starts)


def _failure(client: int, reply: Reply) -> Failure | None:
    """What a reply says has gone wrong."""
    said = reply.header
    if reply.error:
        return Failure(client, "lost", reply.error)
    if "refused" in said:
        return Failure(client, "refused", f"its node refuses: {plain(said['refused'])}")
    if "failed" in said:
        lost, reason = said["failed"] == "lost", plain(said.get("reason"))
        return Failure(client, "lost" if lost else "raised", reason)
    return None


class _Conversations:
    """All conversations of one exchange.

    A client whose node has disconnected is asked again, from the beginning, if the node is back
    soon: a SuperLink that was away for a while takes nodes for disconnected until they notice that
    it is back, and a round without them would have another result.
    """

    def __init__(self, remote: Remote, exchange: Exchange, downloads: Downloads[Any, Any]) -> None:
        self._remote, self._exchange, self._downloads = remote, exchange, downloads
        self._until = time.monotonic() + remote.deadline
        self._waiting = list(downloads)
        self._open: dict[int, Conversation] = {}  # by client
        self._tickets: dict[str, int] = {}  # of questions -> client
        self._away: dict[int, tuple[float, str]] = {}  # client -> how long to wait, and why
        self._looked = time.monotonic()
        self._held: dict[int, int] = {}  # client -> bytes that its answer may have
        self._done: dict[int, Report[Any] | Failure] = {}
        self._packed: tuple[Any, bytes, Any] | None = None  # the download that was sent last

    def all(self) -> Iterator[tuple[int, Report[Any] | Failure]]:
        """Every client's answer, in the order of the downloads."""
        pause = _PAUSES[0]
        for client in self._downloads:
            while client not in self._done:
                # what is asked for may all come before it is this client's turn
                while self._waiting and (not self._open or sum(self._held.values()) < HELD):
                    self._begin(self._waiting.pop(0))
                if self._hear():
                    pause = _PAUSES[0]
                elif client not in self._done:
                    time.sleep(pause)
                    pause = min(1.2 * pause, _PAUSES[1])
                self._ask_again()
                if time.monotonic() > self._until:
                    self._give_up()
            self._held.pop(client, None)
            yield client, self._done.pop(client)

    def _begin(self, client: int) -> None:
        remote = self._remote
        if client not in remote.directory.nodes:
            expected = client in remote.last and client not in remote.left
            self._miss(client, "no node is here that takes part as it", RETURN if expected else 0.0)
            return
        down, base = self._pack(self._downloads[client])
        size, most = remote.slice_bytes, self._downloads.limit(client)
        pieces = [down[at : at + size] for at in range(0, len(down), size)]
        self._held[client] = most
        begun = _conversation(remote, client, self._exchange.index, pieces, base, most)
        self._open[client] = begun
        self._ask(client, *next(begun))

    def _pack(self, value: Any) -> tuple[bytes, Any]:
        """A packed download; most methods send the same object to everybody."""
        if self._packed is None or value is not self._packed[0]:
            exact = self._remote.encoding == "exact"
            packed = bytes(encode(value, "exact" if exact else "float16")[0])
            self._packed = value, packed, None if exact else {"upload": decode(packed)}
        return self._packed[1:]

    def _ask(self, client: int, header: dict[str, Any], body: bytes) -> None:
        remote, left = self._remote, max(1.0, self._until - time.monotonic())
        node = remote.directory.nodes.get(client)
        if node is None:  # it has gone since the last question
            del self._open[client]
            self._miss(client, "its node has disconnected", RETURN)
            return
        about = {"client": client, "exchange": asdict(self._exchange), "seconds": left}
        whole = {**remote.question, **about, "slice_bytes": remote.slice_bytes, **header}
        self._tickets[remote.wire.send(node, whole, body, left)] = client

    def _hear(self) -> bool:
        """Deal with the answers that have come; whether there were any."""
        replies = self._remote.wire.receive(list(self._tickets)) if self._tickets else []
        for reply in replies:
            client = self._tickets.pop(reply.ticket)
            if reply.gone:
                del self._open[client]
                self._miss(client, reply.error, RETURN)
                continue
            result = _failure(client, reply)
            try:
                if result is None:
                    self._ask(client, *self._open[client].send(reply))
                    continue
            except StopIteration as end:
                result = end.value
            del self._open[client]
            self._done[client] = result
        return bool(replies)

    def _miss(self, client: int, reason: str, seconds: float) -> None:
        """A client's node is away: it has ``seconds`` to come back."""
        if seconds:
            self._away[client] = time.monotonic() + seconds, reason
        else:
            self._done[client] = Failure(client, "lost", reason)

    def _ask_again(self) -> None:
        """Begin anew with clients whose nodes are back; those that stay away are lost."""
        now, remote = time.monotonic(), self._remote
        if not self._away or now < self._looked + LOOK:
            return
        self._looked = now
        remote.directory.look()
        for client, (until, reason) in list(self._away.items()):
            if client in remote.directory.nodes:
                del self._away[client]
                self._begin(client)
            elif now > until:
                del self._away[client]
                remote.left.add(client)
                self._miss(client, reason, 0.0)

    def _give_up(self) -> None:
        reason = f"no answer within {self._remote.deadline:g} s"
        for client in (*self._open, *self._away, *self._waiting):
            self._done[client] = Failure(client, "lost", reason)
        self._open.clear()
        self._away.clear()
        self._tickets.clear()
        self._waiting.clear()
