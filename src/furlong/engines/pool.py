"""Worker processes that run clients, forked from the process that holds the images.

A fork shares the images, the method and all settings with the worker, so that nothing is copied
and nothing is pickled. Messages are JSON on a socket; payloads travel beside them as descriptors of
anonymous memory, which does not outlive the processes, however they end.

Why forking is safe here, although the program may have computed with several threads before:

* Only the thread that forks exists in the child. The threads of OpenMP are gone, yet its library
  still counts on them, so a parallel region with more than one thread waits for ever. A region with
  one thread uses no other. The worker therefore chooses one thread before it computes anything, and
  ``run_client`` keeps to that: results must not depend on the number of cores anyway.
* On a CPU, autograd runs a backward pass in the thread that asks for it.
* The locks of the C library's allocator, of Python and of NumPy's OpenBLAS are made new by their
  own handlers of ``fork``. The parent computes in the thread that forks, so none of torch's locks
  is held at that moment, neither at the start nor where a worker is replaced in mid-run. (A program
  in which another thread computes at the very moment of the fork has no such promise.)

An accelerator does not survive a fork at all: there, clients run one after another.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from furlong.core.context import Exchange
from furlong.core.exchange import Failure
from furlong.core.payload import unpack
from furlong.engines.blobs import Blob, Sheets, close_inherited

Answer = tuple[Blob, Blob | None] | Failure
"""What came of a client: its packed report and its new state, if it keeps one."""
Run = Callable[[Callable[[], Any], Exchange, int, Blob | None], Answer]
"""Run a client: what gives its download, the exchange, its number, its state. Never raises."""

_FORK = sys.platform == "linux" and hasattr(socket, "send_fds") and hasattr(os, "memfd_create")
_MESSAGE = 60_000  # bytes; the longest are errors
_TOGETHER = 8  # clients in a message
_AHEAD = 64  # clients that may be ahead of the aggregation, if their answers are small …
_HELD = 64 << 20  # … that is, together no more than these bytes
_PR_SET_PDEATHSIG = 1


def can_fork(device: torch.device) -> bool:
    """Whether clients can run in processes of their own: an accelerator does not survive a fork."""
    return _FORK and device.type == "cpu"


def default_workers(device: torch.device) -> int:
    """The number of usable cores on CPU, 1 (sequential) on an accelerator."""
    return len(os.sched_getaffinity(0)) if can_fork(device) else 1


def keep_freed_memory() -> None:
    """Ask glibc to reuse freed memory: returning it to the kernel after every step is slow."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library: nothing to set
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 << 20)


class Pool:
    """``count`` workers that run clients by ``run``; one that dies is replaced.

    ``sheets``: what ``run`` writes reports on, in the process in which it is called.
    """

    def __init__(self, count: int, run: Run, sheets: Sheets) -> None:
        self._run, self._sheets = run, sheets
        self.workers: list[_Worker] = []
        self.largest = 0  # bytes of an answer, as far as is known
        for _ in range(count):
            self._hire()

    @property
    def processes(self) -> list[ForkProcess]:
        """The processes that live at present."""
        return [worker.process for worker in self.workers]

    def close(self) -> None:
        """End the workers."""
        while self.workers:
            self.workers.pop().end()

    def exchange(
        self,
        exchange: Exchange,
        downloads: Mapping[int, Any],
        state: Callable[[int], Blob | None],
        length: Callable[[int], float],
        deadline: float,
    ) -> Generator[tuple[int, Answer], None, None]:
        """Each client and its answer, in the order of ``downloads``; 0 s are no deadline.

        ``length``: of a client's work, in any unit.
        """
        for worker in [w for w in self.workers if not w.process.is_alive()]:
            self.replace(worker)
        yield from _Carrying(self, exchange, downloads, state, length, deadline).answers()

    def heard(self, until: float) -> list[_Worker]:
        """Who has said something, or has died; waits for it, but not beyond ``until``."""
        with selectors.PollSelector() as selector:
            for worker in self.workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            seconds = min(max(0.0, until - time.monotonic()), 3600.0)  # weeks would overflow
            return [key.data for key, _ in selector.select(seconds)]

    def replace(self, worker: _Worker) -> None:
        """End a worker and fork another."""
        worker.process.kill()
        worker.end()
        self.workers.remove(worker)
        self._hire()

    def _hire(self) -> None:
        others = [worker.socket for worker in self.workers]
        self.workers.append(_Worker(self._run, self._sheets, others))


class _Carrying:
    """One exchange: who waits, who has which clients, who has answered.

    The clients with the longest work go first, as far as memory allows: answers wait for their turn
    in the order of the clients. Clients with small answers go several in a message, so that a
    worker need not wait for the parent after each.
    """

    def __init__(
        self,
        pool: Pool,
        exchange: Exchange,
        downloads: Mapping[int, Any],
        state: Callable[[int], Blob | None],
        length: Callable[[int], float],
        deadline: float,
    ) -> None:
        self._pool, self._downloads = pool, downloads
        self._exchange = asdict(replace(exchange, clients=None))  # the server's; it may be long
        self._state, self._length, self._deadline = state, length, deadline
        self._until = time.monotonic() + (deadline or math.inf)
        self._order = list(downloads)
        self._waiting = set(self._order)
        self._busy: dict[_Worker, deque[int]] = {}  # the clients whose answers it owes, in order
        self._done: dict[int, Answer] = {}
        self._packed = _LastPacked()

    def answers(self) -> Generator[tuple[int, Answer], None, None]:
        """Each client and its answer, in order."""
        try:
            for turn, client in enumerate(self._order):
                while client not in self._done:
                    if time.monotonic() < self._until:
                        self._hand_out(turn)
                    heard = self._pool.heard(self._until)
                    # what was said in time has been heard, however late that was
                    if not heard and time.monotonic() >= self._until:
                        self._give_up()
                    for worker in heard:
                        self._receive(worker)
                yield client, self._done.pop(client)
        finally:
            self._packed.close()
            self._abandon()  # the exchange was given up: their answers belong to nobody
            for left in self._done.values():
                for blob in left if isinstance(left, tuple) else ():
                    if blob is not None:
                        blob.close()

    def _hand_out(self, turn: int) -> None:
        """Give clients to the workers that have none, or few; it is the turn of client ``turn``."""
        workers = self._pool.workers
        largest = self._pool.largest
        fit = min(_HELD // largest, _AHEAD) if largest else 0
        least = 2 if largest > _HELD else 3  # of the largest not even that many for each worker
        soon = self._order[turn : turn + max(least * len(workers), fit)]
        ahead = sorted((c for c in soon if c in self._waiting), key=self._length, reverse=True)
        for worker in workers:
            # the fewer are left, the fewer at once: all workers are to end at the same time
            count = min(1 + len(ahead) // (4 * len(workers)), _TOGETHER)
            if ahead and len(self._busy.get(worker, ())) <= count // 4:
                self._ask(worker, ahead[:count])
                del ahead[:count]

    def _ask(self, worker: _Worker, clients: list[int]) -> None:
        """Give a worker clients, in one message if all get the same download."""
        together: list[int] = []
        for client in clients:
            down = self._downloads[client]
            if together and not self._packed.holds(down):
                self._send(worker, together)
                together = []
            self._packed.hold(down)
            together.append(client)
        self._send(worker, together)

    def _send(self, worker: _Worker, clients: list[int]) -> None:
        self._waiting.difference_update(clients)
        self._busy.setdefault(worker, deque()).extend(clients)
        states = [self._state(client) for client in clients]
        worker.send(self._exchange, clients, self._packed.blob, states)

    def _receive(self, worker: _Worker) -> None:
        """Take an answer; a worker that is heard without having a client has died."""
        owed = self._busy.get(worker, deque())
        client = owed.popleft() if owed else None
        answer = worker.receive(-1 if client is None else client)
        if client is not None:
            self._done[client] = answer
        if isinstance(answer, tuple):
            size = sum(blob.size for blob in answer if blob is not None)
            self._pool.largest = max(self._pool.largest, size)
        if isinstance(answer, Failure) and answer.kind == "lost":
            self._waiting.update(owed)  # it had not come to them
            owed.clear()
            self._pool.replace(worker)
        if not owed:
            self._busy.pop(worker, None)

    def _give_up(self) -> None:
        """It is too late for everybody who has not answered."""
        reason = f"no answer within {self._deadline:g} s"
        late = [*self._waiting, *(client for owed in self._busy.values() for client in owed)]
        self._done |= {client: Failure(client, "lost", reason) for client in late}
        self._waiting.clear()
        self._abandon()

    def _abandon(self) -> None:
        """Replace the workers of clients that nobody waits for any more."""
        while self._busy:
            self._pool.replace(self._busy.popitem()[0])


class _LastPacked:
    """The download packed last: most methods send the same object to everybody."""

    def __init__(self) -> None:
        self._value: Any = None
        self._blob: Blob | None = None

    @property
    def blob(self) -> Blob:
        """What :meth:`hold` has packed."""
        assert self._blob is not None
        return self._blob

    def holds(self, value: Any) -> bool:
        """Whether this very object is packed already."""
        return self._blob is not None and value is self._value

    def hold(self, value: Any) -> None:
        """Pack ``value`` in place of the one before."""
        if not self.holds(value):
            self.close()
            self._value, self._blob = value, Blob.of(value)

    def close(self) -> None:
        if self._blob is not None:
            self._blob.close()
            self._blob = None


class _Worker:
    """A forked process, as its parent sees it."""

    def __init__(self, run: Run, sheets: Sheets, others: list[socket.socket]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = get_context("fork").Process(
            target=_work,
            args=(run, sheets, theirs, [self.socket, *others], os.getpid()),
            daemon=True,
        )
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any fork beside threads; the module says why this one
            # is safe.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self._download: Blob | None = None  # what it was sent last
        self._sheets: dict[int, mmap.mmap] = {}  # what it writes its reports on
        self._unread: list[int] = []  # those of them that nobody can read any more

    def send(
        self,
        exchange: dict[str, Any],
        clients: list[int],
        down: Blob,
        states: list[Blob | None],
    ) -> None:
        """Give the worker clients to run, one after another."""
        blobs = [blob for blob in states if blob is not None]
        unread, self._unread = self._unread, []  # the list may grow at any time
        message = {
            "exchange": exchange,
            "clients": clients,
            "stateful": [state is not None for state in states],
            "new_download": down is not self._download,
            "unread": unread,
        }
        if down is not self._download:
            blobs.insert(0, down)
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: ``receive`` tells
            _send(self.socket, message, blobs)
            self._download = down

    def receive(self, client: int) -> Answer:
        """What came of ``client``."""
        try:
            message, blobs = _receive(self.socket)
        except OSError:
            self.process.join(5)
            code = self.process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
            return Failure(client, "lost", f"its worker process ended ({how})")
        if "failure" in message:
            return Failure(**message["failure"])
        for number in message["new_sheets"]:
            with closing(blobs.pop(0)) as blob:
                self._sheets[number] = blob.shared()
        for number in message["dropped_sheets"]:
            self._sheets.pop(number, None)
        sheet = message["sheet"]
        unread = partial(self._give_back, sheet)
        report = Blob(message["size"], memory=self._sheets[sheet], sheet=sheet, unread=unread)
        return report, blobs[0] if blobs else None

    def _give_back(self, sheet: int) -> None:
        """Let the worker know, with its next clients."""
        self._unread.append(sheet)

    def end(self) -> None:
        """Close the connection, upon which the process ends; kill it if it is busy."""
        self.socket.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _work(
    run: Run, sheets: Sheets, server: socket.socket, inherited: list[socket.socket], parent: int
) -> None:
    """A worker's life: until the connection closes or the parent dies."""
    torch.set_num_threads(1)  # before anything else: the module says why
    for other in inherited:
        other.close()  # or the others would not notice when the parent closes theirs
    close_inherited()
    sheets.forget()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the parent
    if os.getppid() != parent:
        return
    keep_freed_memory()
    packed = Blob(0)
    download: Callable[[], Any] = partial(_unpacked, packed)  # comes with the first message
    while True:
        try:
            task, blobs = _receive(server)
        except OSError:
            return
        sheets.back(task["unread"])
        if task["new_download"]:
            packed.close()
            packed = blobs.pop(0)
            download = cache(partial(_unpacked, packed))  # once for all clients that get it
        exchange = Exchange(**task["exchange"])
        for client, stateful in zip(task["clients"], task["stateful"], strict=True):
            state = blobs.pop(0) if stateful else None
            _answer(server, run(download, exchange, client, state), sheets)
            if state is not None:
                state.close()


def _answer(server: socket.socket, answer: Answer, sheets: Sheets) -> None:
    """Send what came of a client."""
    if isinstance(answer, Failure):
        _send(server, {"failure": asdict(answer)}, [])
        return
    report, state = answer
    new, dropped = sheets.news()
    message = {
        "sheet": report.sheet,
        "size": report.size,
        "new_sheets": list(new),
        "dropped_sheets": dropped,
    }
    _send(server, message, [*new.values(), *([] if state is None else [state])])
    report.unread = None  # the parent says when
    if state is not None:
        state.close()


def _unpacked(blob: Blob) -> Any:
    return unpack(blob.map())


def _send(to: socket.socket, message: dict[str, Any], blobs: list[Blob]) -> None:
    """A message, and descriptors of the blobs beside it."""
    data = json.dumps({**message, "sizes": [blob.size for blob in blobs]}).encode()
    fds = [blob.open() for blob in blobs]
    try:
        socket.send_fds(to, [data], fds)
    finally:
        for fd in fds:
            os.close(fd)


def _receive(source: socket.socket) -> tuple[dict[str, Any], list[Blob]]:
    """What :func:`_send` sent; an ``OSError`` if the other side is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(source, _MESSAGE, 1 + _TOGETHER)
    except ConnectionResetError:  # told first, although there may be messages from before
        data, fds, _, _ = socket.recv_fds(source, _MESSAGE, 1 + _TOGETHER)
    if not data:
        raise ConnectionResetError
    message = json.loads(data)
    return message, [Blob(size, fd) for size, fd in zip(message["sizes"], fds, strict=True)]
