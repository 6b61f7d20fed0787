"""The in-process engine: clients in worker processes with one thread each, or one after another.

Workers are forked, so the images are shared with them and never copied. Payloads travel as pieces
of anonymous memory: the parent packs a download once, hands its file descriptor to every
worker, and gets descriptors of reports and client states back. Nothing is pickled and nothing
outlives the processes, however they end.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch

from furlong.core.context import ClientContext, Exchange, Networks, Setup
from furlong.core.exchange import ClientStore, Engine, Failure, run_client
from furlong.core.federation import Federation
from furlong.core.method import AnyMethod, Report
from furlong.core.payload import PayloadError, pack, unpack
from furlong.errors import FurlongError

_FORK = sys.platform == "linux" and hasattr(socket, "send_fds") and hasattr(os, "memfd_create")
_MESSAGE = 60_000
SPILL = ".clients-"  # folders of client states that exceed the memory budget


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


# ---------------------------------------------------------------- memory that can be handed over


@dataclass(eq=False)
class Blob:
    """Packed bytes behind a file descriptor (in memory), or in a file."""

    size: int
    fd: int | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        _BLOBS.add(self)

    @classmethod
    def of(cls, value: Any) -> Blob:
        """Pack ``value`` into anonymous memory."""
        blob = cls(0)

        def allocate(size: int) -> mmap.mmap:
            blob.size, blob.fd = size, _anonymous(size)
            return mmap.mmap(blob.fd, size)

        pack(value, allocate)
        return blob

    @classmethod
    def of_bytes(cls, packed: Any) -> Blob:
        """Copy packed bytes into anonymous memory."""
        view = memoryview(packed)
        blob = cls(len(view), _anonymous(len(view)))
        assert blob.fd is not None
        with mmap.mmap(blob.fd, blob.size) as memory:
            memory[:] = view
        return blob

    def map(self) -> mmap.mmap:
        """The bytes, as private memory: writing to it changes nothing here."""
        if self.fd is not None:
            return mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY)
        assert self.path is not None
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)

    def open(self) -> int:
        """A descriptor that the caller closes."""
        return os.dup(self.fd) if self.fd is not None else os.open(self.path or "", os.O_RDONLY)

    def spill(self, path: Path) -> None:
        """Move the bytes from memory to a file."""
        path.write_bytes(self.map())
        self.close()
        self.path = path

    def close(self) -> None:
        """Give the bytes back."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


_BLOBS: WeakSet[Blob] = WeakSet()


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("furlong", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class States(ClientStore, Protocol):
    """All that the engine asks of what holds the client states."""

    def blob(self, client: int) -> Blob | None:
        """The client's state, if it has one; it stays the store's."""

    def keep(self, client: int, blob: Blob) -> None:
        """Take a blob over as the client's new state."""

    def items(self) -> Iterator[tuple[int, Any]]:
        """(client, packed state) of every client that has one."""

    def close(self) -> None:
        """The engine has ended."""


class BlobStore:
    """Client states in memory up to a budget, the least recently used ones on disk beyond it.

    A state in memory needs a file descriptor, so their number is limited too.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self.budget = budget
        self.most = max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._spilled = 0
        self._blobs: OrderedDict[int, Blob] = OrderedDict()
        self._folder = folder
        self._own: tempfile.TemporaryDirectory[str] | None = None

    def blob(self, client: int) -> Blob | None:
        """The client's state, if it has one."""
        return self._blobs.get(client)

    def get(self, client: int) -> Any | None:
        """The packed state (private memory), or ``None``."""
        blob = self._blobs.get(client)
        return None if blob is None else blob.map()

    def put(self, client: int, packed: Any) -> None:
        """Keep packed bytes."""
        self.keep(client, Blob.of_bytes(packed))

    def keep(self, client: int, blob: Blob) -> None:
        """Keep a blob, and spill others if the budget is exceeded."""
        if old := self._blobs.pop(client, None):
            old.close()
        self._blobs[client] = blob
        held = [b for b in self._blobs.values() if b.fd is not None]
        in_memory = sum(b.size for b in held)
        for count, other in enumerate(held):
            if in_memory <= self.budget and len(held) - count <= self.most:
                break
            self._spilled += 1
            other.spill(self._spill_folder() / f"{self._spilled}.safetensors")
            in_memory -= other.size

    def items(self) -> Iterator[tuple[int, Any]]:
        """(client, packed state) of every client that has one."""
        for client in sorted(self._blobs):
            yield client, self._blobs[client].map()

    def close(self) -> None:
        """Drop everything."""
        for blob in self._blobs.values():
            blob.close()
        self._blobs.clear()
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def _spill_folder(self) -> Path:
        if self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix=SPILL, dir=self._folder)
        return Path(self._own.name)


# ---------------------------------------------------------------- the transport


@dataclass
class InProcess(Engine):
    """The engine of this machine; use it as a context manager.

    ``isolate``: even a single client runs in a process of its own, which may die without this one.
    ``deadline``: seconds for an exchange, 0 for none; it may be changed between exchanges.
    """

    method: AnyMethod
    federation: Federation
    setup: Setup
    workers: int = 1
    store: States = field(default_factory=lambda: BlobStore(4 << 30))
    isolate: bool = False
    deadline: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise FurlongError(f"--workers is {self.workers}; it must be at least 1.")
        if self.workers > 1 and self.setup.device.type != "cpu":
            raise FurlongError(
                f"--workers {self.workers} with --device {self.setup.device}: clients run one "
                "after another on an accelerator. Use --workers 1, or --device cpu."
            )
        self._networks = Networks()
        self._pool: list[_Worker] = []
        self._staff()

    def _staff(self) -> None:
        """Living workers, if clients run in other processes."""
        device, useful = self.setup.device, min(self.workers, len(self.federation.clients))
        if (self.deadline or self.isolate) and not can_fork(device):
            name, value = ("isolate", True) if self.isolate else ("run.deadline", self.deadline)
            raise FurlongError(
                f"{name} is {value}, which cannot be kept with --device {device} on "
                f"{sys.platform}: clients run in this process there, and nothing can stop one. Use "
                f"--device cpu on Linux, or leave {name} out."
            )
        if not self._pool and (useful > 1 or self.deadline or self.isolate) and can_fork(device):
            for _ in range(max(1, useful)):
                self._pool.append(_Worker(self))
        for worker in [w for w in self._pool if not w.process.is_alive()]:
            self._replace(worker)

    def close(self) -> None:
        """End the workers and drop the client states."""
        for worker in self._pool:
            worker.end()
        self._pool = []
        self.store.close()

    def states(self) -> Iterator[tuple[int, Any]]:
        """(client, packed state) of every client that has one, for a checkpoint."""
        return self.store.items()

    def restore(self, states: Mapping[int, Any]) -> None:
        """Take the clients' states from a checkpoint."""
        for client, packed in states.items():
            self.store.put(client, packed)

    def finish(self, encoder: Any) -> None:
        """The run is over; there is nobody to tell."""

    def client(self, down: Any, exchange: Exchange, client: int, store: Any) -> Report[Any]:
        """``run_client`` with this run's data."""
        shard = self.federation.shard(client, labels=self.method.needs_labels)
        ctx = ClientContext(self.setup, exchange, self._networks, client=client, data=shard)
        return run_client(self.method, down, ctx, store)

    def exchange(
        self, exchange: Exchange, downloads: Mapping[int, Any]
    ) -> Iterator[tuple[int, Report[Any] | Failure]]:
        """Who was asked and what came back, in client order."""
        self._staff()
        if self._pool:
            yield from self._in_workers(exchange, downloads)
            return
        for client in downloads:
            try:
                slot = _OneState(self.store.get(client))
                report = self.client(downloads[client], exchange, client, slot)
                packed = pack(report)  # as it would travel: what cannot be sent is not accepted
            except Exception as error:
                yield client, Failure(client, "raised", describe(error))
                continue
            if slot.put_bytes is not None:
                self.store.put(client, slot.put_bytes)
            yield client, unpack(packed)

    def _in_workers(
        self, exchange: Exchange, downloads: Mapping[int, Any]
    ) -> Iterator[tuple[int, Report[Any] | Failure]]:
        waiting = list(downloads)
        done: dict[int, tuple[Blob, Blob | None] | Failure] = {}
        sent, idle = _Sent(), list(self._pool)
        busy: dict[_Worker, int] = {}
        until = time.monotonic() + (self.deadline or math.inf)
        try:
            for client in downloads:
                while client not in done:
                    # only a few clients ahead of the aggregation: memory stays bounded
                    ahead = 3 * len(self._pool) if time.monotonic() < until else 0
                    while idle and waiting and len(done) + len(busy) < ahead:
                        asked, worker = waiting.pop(0), idle.pop(0)
                        blob = sent.blob(downloads[asked])
                        worker.send(exchange, asked, blob, self.store.blob(asked))
                        busy[worker] = asked
                    heard = _readable(self._pool, until)
                    # what was said in time has been heard, however late that was
                    if not heard and time.monotonic() >= until:
                        reason = f"no answer within {self.deadline:g} s"
                        for late in (*busy.values(), *waiting):
                            done[late] = Failure(late, "lost", reason)
                        for worker in busy:
                            self._replace(worker)
                        busy, waiting = {}, []
                    for worker in heard:
                        # an idle worker has nothing to say: if it is heard, it has died
                        answered = busy.pop(worker, None)
                        reply = worker.receive(-1 if answered is None else answered)
                        if answered is not None:
                            done[answered] = reply
                        if worker in idle:
                            idle.remove(worker)
                        if isinstance(reply, Failure) and reply.kind == "lost":
                            worker = self._replace(worker)
                        idle.append(worker)
                yield client, self._unpacked(client, done.pop(client))
        finally:
            sent.close()
            for worker in busy:  # the exchange was abandoned: their answers belong to nobody
                self._replace(worker)
            for left in done.values():
                for piece in left if isinstance(left, tuple) else ():
                    if piece is not None:
                        piece.close()

    def _unpacked(
        self, client: int, reply: tuple[Blob, Blob | None] | Failure
    ) -> Report[Any] | Failure:
        """The report, after the client's new state has been kept."""
        if isinstance(reply, Failure):
            return reply
        packed, state = reply
        if state is not None:
            self.store.keep(client, state)
        try:
            report: Report[Any] = unpack(packed.map())
            return report
        except PayloadError as error:
            return Failure(client, "refused", str(error))
        finally:
            packed.close()

    def _replace(self, worker: _Worker) -> _Worker:
        """A new worker in the place of a dead or abandoned one."""
        worker.process.kill()
        worker.end()
        self._pool.remove(worker)
        self._pool.append(_Worker(self))
        return self._pool[-1]


def _readable(pool: list[_Worker], until: float) -> list[_Worker]:
    """Who has said something, or has died; waits for it, but not beyond ``until``."""
    with selectors.DefaultSelector() as selector:
        for worker in pool:
            selector.register(worker.socket, selectors.EVENT_READ, worker)
        seconds = min(max(0.0, until - time.monotonic()), 3600.0)  # weeks would overflow
        return [key.data for key, _ in selector.select(seconds)]


class _Sent:
    """The blob of the download sent last: most methods send the same object to everybody."""

    def __init__(self) -> None:
        self._value: Any = None
        self._blob: Blob | None = None

    def blob(self, value: Any) -> Blob:
        if self._blob is None or value is not self._value:
            self.close()
            self._value, self._blob = value, Blob.of(value)
        return self._blob

    def close(self) -> None:
        if self._blob is not None:
            self._blob.close()
            self._blob = None


class _OneState:
    """A client store for a single call: what came with the task, what goes back with the answer."""

    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self.put_bytes: Any = None

    def get(self, client: int) -> Any | None:  # noqa: ARG002
        return self._packed

    def put(self, client: int, packed: Any) -> None:  # noqa: ARG002
        self.put_bytes = packed


class _Worker:
    """A forked process that runs clients; messages are JSON, payloads are descriptors."""

    def __init__(self, engine: InProcess) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = get_context("fork").Process(
            target=_work, args=(engine, theirs, self.socket, os.getpid()), daemon=True
        )
        process.start()
        theirs.close()
        self.process = process

    def send(self, exchange: Exchange, client: int, down: Blob, state: Blob | None) -> None:
        """Give the worker a client to run."""
        blobs = [down] if state is None else [down, state]
        message = {"exchange": asdict(exchange), "client": client, "sizes": [b.size for b in blobs]}
        fds = [blob.open() for blob in blobs]
        try:
            socket.send_fds(self.socket, [json.dumps(message).encode()], fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone: ``receive`` reports it
        finally:
            for fd in fds:
                os.close(fd)

    def receive(self, client: int) -> tuple[Blob, Blob | None] | Failure:
        """The packed report and new state of ``client``."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _MESSAGE, 2)
        except OSError:
            data, fds = b"", []
        if not data:
            self.process.join(5)
            code = self.process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
            return Failure(client, "lost", f"its worker process ended ({how})")
        message = json.loads(data)
        if "raised" in message:
            return Failure(client, "raised", message["raised"])
        blobs = [Blob(size, fd) for size, fd in zip(message["sizes"], fds, strict=True)]
        return blobs[0], blobs[1] if len(blobs) > 1 else None

    def end(self) -> None:
        """Close the connection, upon which the process ends; kill it if it is busy."""
        self.socket.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _work(engine: InProcess, server: socket.socket, other: socket.socket, parent: int) -> None:
    """A worker's life: until the connection closes or the parent dies."""
    for inherited in (other, *(worker.socket for worker in engine._pool)):
        inherited.close()  # or the others would not notice when the parent closes theirs
    for blob in _BLOBS:  # or a worker that replaces another would hold all states of that moment
        if blob.fd is not None:
            os.close(blob.fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    while True:
        data, fds, _, _ = socket.recv_fds(server, _MESSAGE, 2)
        if not data:
            return
        task = json.loads(data)
        blobs = [Blob(size, fd) for size, fd in zip(task["sizes"], fds, strict=True)]
        slot = _OneState(blobs[1].map() if len(blobs) > 1 else None)
        out: list[Blob] = []
        try:
            exchange = Exchange(**task["exchange"])
            report = engine.client(unpack(blobs[0].map()), exchange, task["client"], slot)
            out.append(Blob.of(report))
            if slot.put_bytes is not None:
                out.append(Blob.of_bytes(slot.put_bytes))
            answer: dict[str, Any] = {"sizes": [blob.size for blob in out]}
        except Exception as error:
            out, answer = [], {"raised": describe(error)}
        message = json.dumps(answer).encode()
        socket.send_fds(server, [message], [b.fd for b in out if b.fd is not None])
        for blob in (*blobs, *out):
            blob.close()


def describe(error: BaseException) -> str:
    """One line that names the error and where it was raised, unless it is for a user."""
    if isinstance(error, FurlongError):
        return str(error)[:2000]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:2000]}{where}"
