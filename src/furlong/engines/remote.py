"""The server's half of an engine whose clients are elsewhere, over anything that carries messages.

The server asks and a node answers, each with a header (JSON) and a body (bytes, one slice at most):

``hello``   who are you, what do you hold, will you take part? The answer may be a refusal.
``work``    one exchange of one client; a large download comes in several slices.
``fetch``   the next slice of a large answer.
``end``     the run is over: forget its state. The encoder comes along.

Every question says which run, which version and which configuration it belongs to, so a node that
was restarted needs no memory of earlier ones but the client's state on its disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import furlong
from furlong.core.context import Exchange
from furlong.core.exchange import Downloads, Engine, Failure
from furlong.core.method import Report
from furlong.core.payload import PayloadError, pack, payload, unpack
from furlong.engines.codec import How, decode, encode
from furlong.errors import FurlongError

RETRY = 10.0  # seconds until a node that failed to answer a greeting is greeted again
PROTOCOL = 1  # of the messages; raised when they change
DAY = 86_400.0
_HELD = 1 << 30  # bytes of answers that wait for those of clients before them
_PAUSES = (0.02, 0.5)  # seconds between two looks for answers, at first and at last


@dataclass(frozen=True)
class Letter:
    """An answer: to which question, what it says, or what went wrong on the way."""

    ticket: str
    header: dict[str, Any]
    body: bytes = b""
    error: str = ""


class Wire(Protocol):
    """What carries messages to nodes and brings their answers."""

    def nodes(self) -> Mapping[int, str | None]:
        """Nodes that are connected now, with the name that their key is registered under."""

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:
        """Ask a node; it has ``seconds``. The ticket is for :meth:`receive`."""

    def receive(self, tickets: Iterable[str]) -> list[Letter]:
        """Answers that have come, each once."""


class Roster:
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
        self._names: Mapping[int, str | None] = {}

    def look(self) -> None:
        """Greet nodes that are new, hear what they say, forget those that are gone."""
        self._names = self.wire.nodes()
        for node in [n for n in self._known if n not in self._names]:
            client = self._known.pop(node)
            if client is not None and self.nodes.get(client) == node:
                del self.nodes[client]
        greeted, now = {*self._known, *self._asked.values()}, time.monotonic()
        for node in self._names:
            if node not in greeted and now >= self._later.get(node, now):
                self._asked[self.wire.send(node, {**self.hello, "kind": "hello"}, b"", DAY)] = node
        for letter in self.wire.receive(list(self._asked)) if self._asked else ():
            node = self._asked.pop(letter.ticket)
            if letter.error:
                who = self._names.get(node) or f"node {node}"
                self.say(f"{who} does not answer: {letter.error}")
                self._later[node] = now + RETRY
            elif node in self._names:
                self._meet(node, letter.header)

    def _meet(self, node: int, answer: dict[str, Any]) -> None:
        reason = answer.get("refused", answer.get("reason"))
        name = self._names[node]
        client: int | str = plain(reason)
        if reason is None:
            try:
                client = self.admit(node, answer, name)
            except Exception as error:  # whatever a node says must not end the run
                client = f"its answer makes no sense ({type(error).__name__})"
        who = name or plain(answer.get("name") or f"node {node}")
        if "failed" in answer or (isinstance(client, int) and client in self.nodes):
            # it may have been repaired, or the other may be about to be noticed as dead
            self._later[node] = time.monotonic() + RETRY
            if isinstance(client, int):
                client = f"client {client} is connected already, as another node"
        else:
            self._known[node] = client if isinstance(client, int) else None
        if isinstance(client, int):
            self.nodes[client] = node
            if name or answer.get("name"):
                self.names[client] = str(who)
                self.say(f"{who} has come ({answer.get('images')} images)")
        else:
            self.say(f"{who} does not take part: {client}")

    def renumber(self, new: Mapping[int, int]) -> None:
        """Give clients other numbers, before any is asked to work."""
        self.nodes = {new[client]: node for client, node in self.nodes.items()}
        self.names = {new[client]: name for client, name in self.names.items()}
        known = self._known.items()
        self._known = {node: None if k is None else new[k] for node, k in known}

    def wait(self, enough: Callable[[], bool], seconds: float, what: str) -> bool:
        """Look until ``enough()``; whether it came true in time."""
        end, told = time.monotonic() + seconds, False
        while True:
            self.look()
            if enough():
                return True
            if time.monotonic() > end:
                return False
            if not told:
                self.say(f"waiting for {what} (at most {seconds:.0f} s)")
                told = True
            time.sleep(0.25)


@payload("furlong.engines.remote.Since")
class Since:
    """The exchange of a client's last answer that arrived, and whether a state belongs to it."""

    exchange: int
    kept: bool


@dataclass
class Remote(Engine):
    """An engine to clients behind a :class:`Wire`."""

    wire: Wire
    roster: Roster
    question: dict[str, Any]  # what every question says of the run, see :func:`question`
    sizes: Callable[[], dict[int, int] | None]  # of all clients, if nodes do not know them
    oldest: Callable[[], int]  # the first exchange that the server may have to go back to
    deadline: float = DAY  # seconds for an exchange
    wait: float = 600.0  # seconds for enough nodes to connect
    need: int = 1  # nodes to wait for
    slice_bytes: int = 64 << 20
    encoding: How = "exact"
    since: dict[int, Since] = field(default_factory=dict)  # client -> its last answer
    kept: dict[int, bool] = field(default_factory=dict)  # client -> whether it keeps a state

    def states(self) -> Iterator[tuple[int, Any]]:
        """Which of the states that nodes keep is each client's; the states stay there."""
        return ((client, pack(since)) for client, since in sorted(self.since.items()))

    def restore(self, states: Mapping[int, Any]) -> None:
        """Go back to a checkpoint: nodes have the states of that time too."""
        found = {client: unpack(bytearray(packed)) for client, packed in states.items()}
        if not all(isinstance(since, Since) for since in found.values()):
            raise FurlongError("this run began in process: it cannot go on with --engine flower.")
        self.since = found

    def exchange(
        self, exchange: Exchange, downloads: Downloads[Any, Any]
    ) -> Iterator[tuple[int, Report[Any] | Failure]]:
        """Who was asked and what came back, in client order."""
        if not len(downloads):
            return
        need = min(self.need, len(downloads))
        self.roster.wait(
            lambda: sum(client in self.roster.nodes for client in downloads) >= need,
            self.wait,
            f"{need} node(s)",
        )
        for client, found in _Talks(self, exchange, downloads).all():
            if not isinstance(found, Failure):  # what was lost on the way counts for nobody
                kept = self.kept.pop(client, False)
                self.since[client] = Since(exchange.index, kept)
            name = self.roster.names.get(client)
            if name is not None and isinstance(found, Failure):
                found = replace(found, reason=f"{name}: {found.reason}")
            yield client, found

    def finish(self, encoder: Any) -> None:
        """The run is over: give every node the encoder, and leave to forget its state."""
        header = {**self.question, "kind": "end"}
        tickets = {
            self.wire.send(node, {**header, "client": client}, bytes(encoder), 60.0)
            for client, node in self.roster.nodes.items()
        }
        end = time.monotonic() + 30.0
        while tickets and time.monotonic() < end:
            tickets -= {letter.ticket for letter in self.wire.receive(list(tickets))}
            time.sleep(0.1)

    def close(self) -> None:
        """Nothing: whoever made the wire closes it."""


@dataclass
class _Talk:
    """What passes between the server and one client in one exchange."""

    node: int
    down: bytes
    base: Any  # what the client makes of the download, if it is not exact
    most: int  # bytes that the answer may have
    ticket: str = ""
    sent: int = 0  # slices
    slices: int = 1  # of the download
    got: int = 0  # slices
    answer: bytearray = field(default_factory=bytearray)


class _Talks:
    """All talks of one exchange."""

    def __init__(self, remote: Remote, exchange: Exchange, downloads: Downloads[Any, Any]) -> None:
        self._remote, self._exchange, self._downloads = remote, exchange, downloads
        self._end = time.monotonic() + remote.deadline
        self._waiting = list(downloads)
        self._talks: dict[int, _Talk] = {}
        self._done: dict[int, tuple[bytearray, Any] | Failure] = {}
        self._packed = _Packed(remote.encoding)

    def all(self) -> Iterator[tuple[int, Report[Any] | Failure]]:
        """Every client's answer, in the order of the downloads."""
        pause = _PAUSES[0]
        for client in self._downloads:
            while client not in self._done:
                # what is asked for may all come before it is this client's turn
                while self._waiting and (not self._talks or self._held() < _HELD):
                    self._begin(self._waiting.pop(0))
                if self._hear():
                    pause = _PAUSES[0]
                elif client not in self._done:
                    time.sleep(pause)
                    pause = min(1.2 * pause, _PAUSES[1])
                if self._left() < 0:
                    self._give_up()
            yield client, _report(client, self._done.pop(client))

    def _held(self) -> int:
        """Bytes that are in memory, or may be soon."""
        done = sum(len(found[0]) for found in self._done.values() if isinstance(found, tuple))
        return done + sum(len(talk.down) + talk.most for talk in self._talks.values())

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _give_up(self) -> None:
        reason = f"no answer within {self._remote.deadline:g} s"
        for client in (*self._talks, *self._waiting):
            self._done[client] = Failure(client, "lost", reason)
        self._talks.clear()
        self._waiting.clear()

    def _begin(self, client: int) -> None:
        node = self._remote.roster.nodes.get(client)
        if node is None:
            self._done[client] = Failure(client, "lost", "its node is not connected")
            return
        down, base = self._packed.of(self._downloads[client])
        self._talks[client] = _Talk(node, down, base, self._downloads.limit(client))
        self._tell(client)

    def _tell(self, client: int) -> None:
        """Send the next slice of the download."""
        remote, talk = self._remote, self._talks[client]
        size, since = remote.slice_bytes, remote.since.get(client)
        if not talk.sent:
            talk.slices = max(1, -(-len(talk.down) // size))
        header = {
            "kind": "work",
            "sizes": remote.sizes(),
            "since": None if since is None else asdict(since),
            "slice": talk.sent,
            "slices": talk.slices,
            "seconds": max(1.0, self._left()),
            "oldest": remote.oldest(),
            "encoding": remote.encoding,
            "slice_bytes": size,
        }
        body = talk.down if talk.slices == 1 else talk.down[talk.sent * size :][:size]
        talk.sent += 1
        if talk.sent == talk.slices:
            talk.down = b""  # its last slice is on the way
        self._ask(client, header, body)

    def _ask(self, client: int, header: dict[str, Any], body: bytes = b"") -> None:
        remote, talk = self._remote, self._talks[client]
        about = {"client": client, "exchange": asdict(self._exchange)}
        whole = {**remote.question, **header, **about}
        talk.ticket = remote.wire.send(talk.node, whole, body, max(1.0, self._left()))

    def _hear(self) -> bool:
        """Deal with the answers that have come; whether there were any."""
        whose = {talk.ticket: client for client, talk in self._talks.items()}
        letters = self._remote.wire.receive(list(whose)) if whose else []
        for letter in letters:
            client = whose[letter.ticket]
            result = self._next(client, letter)
            if result is not None:
                del self._talks[client]
                self._done[client] = result
        return bool(letters)

    def _next(self, client: int, letter: Letter) -> tuple[bytearray, Any] | Failure | None:
        """What an answer ends with, or ``None`` after asking for more."""
        said, talk = letter.header, self._talks[client]
        if letter.error:
            return Failure(client, "lost", letter.error)
        if "refused" in said:
            return Failure(client, "refused", f"its node refuses: {plain(said['refused'])}")
        if "failed" in said:
            kind: Literal["raised", "lost"] = "lost" if said["failed"] == "lost" else "raised"
            return Failure(client, kind, plain(said.get("reason")))
        if talk.sent < talk.slices:
            if type(said.get("kept")) is int and said["kept"] == talk.sent - 1:
                self._tell(client)
                return None
            return Failure(client, "refused", "an answer that makes no sense")
        slices, piece = said.get("slices"), self._remote.slice_bytes
        if type(slices) is not int or said.get("slice") != talk.got or not letter.body:
            return Failure(client, "refused", "an answer that makes no sense")
        talk.answer += letter.body
        talk.got += 1
        if len(talk.answer) > talk.most or (slices - 1) * piece > talk.most:
            return Failure(
                client, "refused", f"more than the {talk.most} bytes that were asked for"
            )
        if talk.got >= slices:
            self._remote.kept[client] = said.get("state") is True
            return talk.answer, talk.base
        if len(letter.body) != piece:
            return Failure(client, "refused", "an answer in slices of another size")
        self._ask(client, {"kind": "fetch", "slice": talk.got, "slice_bytes": piece})
        return None


class _Packed:
    """The packed form of the download sent last: most methods send the same object to everybody."""

    def __init__(self, encoding: How) -> None:
        self._encoding: How = "exact" if encoding == "exact" else "float16"
        self._value: Any = None
        self._packed: tuple[bytes, Any] | None = None

    def of(self, value: Any) -> tuple[bytes, Any]:
        if self._packed is None or value is not self._value:
            packed = bytes(encode(value, self._encoding)[0])
            base = None if self._encoding == "exact" else {"upload": decode(packed)}
            self._value, self._packed = value, (packed, base)
        return self._packed


def _report(client: int, found: tuple[bytearray, Any] | Failure) -> Report[Any] | Failure:
    if isinstance(found, Failure):
        return found
    try:
        report: Report[Any] = decode(*found)
        return report
    except PayloadError as error:
        return Failure(client, "refused", str(error))
    except Exception as error:  # hostile bytes must not end the run
        return Failure(client, "refused", f"cannot be read ({type(error).__name__})")


def plain(text: Any) -> str:
    """What a node says, fit for a terminal and a log."""
    return "".join(letter for letter in str(text)[:500] if letter.isprintable())


def question(run: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """What every question to a node says: which run, which version, which configuration."""
    return {"run": run, "protocol": PROTOCOL, "furlong": furlong.__version__, "config": dict(told)}
