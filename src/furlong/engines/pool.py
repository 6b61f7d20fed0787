"""Worker processes that run clients, forked from the process that holds the images.

A fork shares the images, the method and all settings with the worker, so that nothing is copied
and nothing is pickled. Messages are JSON on a socket; payloads travel beside them as descriptors of
anonymous memory. Nothing outlives the processes, however they end.

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
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from furlong.core.context import Exchange
from furlong.core.exchange import Failure
from furlong.core.payload import unpack
from furlong.engines.blobs import Blob, close_inherited

Answer = tuple[Blob, Blob | None] | Failure
"""What came of a client: its packed report and its new state, if it keeps one."""
Run = Callable[[Callable[[], Any], Exchange, int, Blob | None], Answer]
"""Run a client: what gives its download, the exchange, its number, its state. Never raises."""

_FORK = sys.platform == "linux" and hasattr(socket, "send_fds") and hasattr(os, "memfd_create")
_MESSAGE = 60_000  # bytes; the longest are errors
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
    """``count`` workers that run clients by ``run``; one that dies is replaced."""

    def __init__(self, count: int, run: Run) -> None:
        self._run = run
        self._workers: list[_Worker] = []
        for _ in range(count):
            self._hire()

    @property
    def processes(self) -> list[ForkProcess]:
        """The processes that live at present."""
        return [worker.process for worker in self._workers]

    def close(self) -> None:
        """End the workers."""
        while self._workers:
            self._workers.pop().end()

    def exchange(
        self,
        exchange: Exchange,
        downloads: Mapping[int, Any],
        state: Callable[[int], Blob | None],
        deadline: float,
    ) -> Generator[tuple[int, Answer], None, None]:
        """Each client and its answer, in the order of ``downloads``; 0 s are no deadline."""
        for worker in [w for w in self._workers if not w.process.is_alive()]:
            self._replace(worker)
        waiting = deque(downloads)
        busy: dict[_Worker, int] = {}
        done: dict[int, Answer] = {}
        packed = _LastPacked()
        until = time.monotonic() + (deadline or math.inf)
        try:
            for client in downloads:
                while client not in done:
                    idle = [w for w in self._workers if w not in busy]
                    # only a few clients ahead of the aggregation: memory stays bounded
                    ahead = 3 * len(self._workers) - len(done) - len(busy)
                    for worker in idle[: max(0, ahead)] if time.monotonic() < until else ():
                        if waiting:
                            busy[worker] = asked = waiting.popleft()
                            worker.send(exchange, asked, packed(downloads[asked]), state(asked))
                    heard = self._heard(until)
                    # what was said in time has been heard, however late that was
                    if not heard and time.monotonic() >= until:
                        reason = f"no answer within {deadline:g} s"
                        late = (*busy.values(), *waiting)
                        done |= {client: Failure(client, "lost", reason) for client in late}
                        waiting.clear()
                        self._abandon(busy)
                    for worker in heard:
                        self._receive(worker, busy, done)
                yield client, done.pop(client)
        finally:
            packed.close()
            self._abandon(busy)  # the exchange was given up: their answers belong to nobody
            for left in done.values():
                for blob in left if isinstance(left, tuple) else ():
                    if blob is not None:
                        blob.close()

    def _heard(self, until: float) -> list[_Worker]:
        """Who has said something, or has died; waits for it, but not beyond ``until``."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            seconds = min(max(0.0, until - time.monotonic()), 3600.0)  # weeks would overflow
            return [key.data for key, _ in selector.select(seconds)]

    def _receive(self, worker: _Worker, busy: dict[_Worker, int], done: dict[int, Answer]) -> None:
        """Take an answer; a worker that is heard without having a client has died."""
        client = busy.pop(worker, None)
        answer = worker.receive(-1 if client is None else client)
        if client is not None:
            done[client] = answer
        if isinstance(answer, Failure) and answer.kind == "lost":
            self._replace(worker)

    def _abandon(self, busy: dict[_Worker, int]) -> None:
        """Replace the workers of clients that nobody waits for any more."""
        while busy:
            self._replace(busy.popitem()[0])

    def _replace(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.end()
        self._workers.remove(worker)
        self._hire()

    def _hire(self) -> None:
        self._workers.append(_Worker(self._run, [worker.socket for worker in self._workers]))


class _LastPacked:
    """The blob of the download packed last: most methods send the same object to everybody."""

    def __init__(self) -> None:
        self._value: Any = None
        self._blob: Blob | None = None

    def __call__(self, value: Any) -> Blob:
        if self._blob is None or value is not self._value:
            self.close()
            self._value, self._blob = value, Blob.of(value)
        return self._blob

    def close(self) -> None:
        if self._blob is not None:
            self._blob.close()
            self._blob = None


class _Worker:
    """A forked process, as its parent sees it."""

    def __init__(self, run: Run, others: list[socket.socket]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = get_context("fork").Process(
            target=_work, args=(run, theirs, [self.socket, *others], os.getpid()), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any fork beside threads; the module says why this one
            # is safe.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def send(self, exchange: Exchange, client: int, down: Blob, state: Blob | None) -> None:
        """Give the worker a client to run."""
        blobs = [down] if state is None else [down, state]
        message = {"exchange": asdict(exchange), "client": client}
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: ``receive`` tells
            _send(self.socket, message, blobs)

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
        return blobs[0], blobs[1] if len(blobs) > 1 else None

    def end(self) -> None:
        """Close the connection, upon which the process ends; kill it if it is busy."""
        self.socket.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _work(run: Run, server: socket.socket, inherited: list[socket.socket], parent: int) -> None:
    """A worker's life: until the connection closes or the parent dies."""
    torch.set_num_threads(1)  # before anything else: the module says why
    for other in inherited:
        other.close()  # or the others would not notice when the parent closes theirs
    close_inherited()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the parent
    if os.getppid() != parent:
        return
    keep_freed_memory()
    while True:
        try:
            task, blobs = _receive(server)
        except OSError:
            return
        state = blobs[1] if len(blobs) > 1 else None
        down, exchange = partial(_unpacked, blobs[0]), Exchange(**task["exchange"])
        answer = run(down, exchange, task["client"], state)
        if isinstance(answer, Failure):
            _send(server, {"failure": asdict(answer)}, [])
        else:
            kept = [blob for blob in answer if blob is not None]
            _send(server, {}, kept)
            blobs += kept
        for blob in blobs:
            blob.close()


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
    data, fds, _, _ = socket.recv_fds(source, _MESSAGE, 2)
    if not data:
        raise ConnectionResetError
    message = json.loads(data)
    return message, [Blob(size, fd) for size, fd in zip(message["sizes"], fds, strict=True)]
