"""The in-process engine: clients of this machine, in worker processes or one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.core.context import ClientContext, Exchange, Networks, Setup
from furlong.core.exchange import Engine, Failure, run_client
from furlong.core.federation import Federation
from furlong.core.layout import PayloadError
from furlong.core.method import AnyMethod, Report
from furlong.core.payload import unpack
from furlong.engines.blobs import Blob, Sheets
from furlong.engines.pool import Answer, Pool, can_fork
from furlong.engines.states import StateFolder, States
from furlong.errors import FurlongError, describe, exhausted

SCARCE = "on this machine: "  # begins the reason of a client that could not train for want of room

if TYPE_CHECKING:
    from furlong.core.secure.identity import Identity


class _NotKept(Exception):
    """A client's state could not be read or written: that is never the client's fault."""


@contextmanager
def _keeping() -> Iterator[None]:
    """Tell errors of files that hold states from those of a client."""
    try:
        yield
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise _NotKept(f"its state cannot be kept ({why})") from error


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
    store: States = field(default_factory=StateFolder)
    isolate: bool = False
    deadline: float = 0.0
    identity: Identity | None = None  # of the one client, at a site

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise FurlongError(f"--workers is {self.workers}; it must be at least 1.")
        if self.workers > 1 and self.setup.device.type != "cpu":
            raise FurlongError(
                f"--workers {self.workers} with --device {self.setup.device}: clients run one "
                "after another on an accelerator. Use --workers 1, or --device cpu."
            )
        self._networks, self._sheets = Networks(), Sheets()
        self.pool: Pool | None = None  # the worker processes, unless clients run in this one
        self._start()

    def _start(self) -> None:
        """Make the worker processes as soon as something asks for them."""
        device, useful = self.setup.device, min(self.workers, len(self.federation.clients))
        if (self.deadline or self.isolate) and not can_fork(device):
            name, value = ("isolate", True) if self.isolate else ("run.deadline", self.deadline)
            raise FurlongError(
                f"{name} is {value}, which cannot be kept with --device {device} on "
                f"{sys.platform}: clients run in this process there, and nothing can stop one. Use "
                f"--device cpu on Linux, or leave {name} out."
            )
        wanted = useful > 1 or self.deadline or self.isolate
        if self.pool is None and wanted and can_fork(device):
            self.pool = Pool(max(1, useful), self._run, self._sheets)

    def close(self) -> None:
        """End the workers and drop the client states."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        self.store.close()

    def states(self) -> Iterable[tuple[int, Path]]:
        """(client, file) of every client that has a state, for a checkpoint."""
        return self.store.items()

    def restore(self, states: Mapping[int, Path]) -> None:
        """Take the clients' states from a checkpoint."""
        self.store.restore(states)

    def finish(self, encoder: Any) -> None:
        """The run is over; there is nobody to tell."""

    def exchange(
        self, exchange: Exchange, downloads: Mapping[int, Any]
    ) -> Iterator[tuple[int, Report[Any] | Failure]]:
        """Who was asked and what came back, in client order."""
        self._start()
        if self.pool is not None:
            answers = self.pool.exchange(
                exchange, downloads, self.store.blob, self._length, self.deadline
            )
        else:
            answers = self._here(exchange, downloads)
        with closing(answers):
            for client, answer in answers:
                yield client, self._accept(client, answer)

    def _length(self, client: int) -> int:
        """A client's work is in proportion to its images."""
        return len(self.federation.rows[client])

    def _here(
        self, exchange: Exchange, downloads: Mapping[int, Any]
    ) -> Generator[tuple[int, Answer], None, None]:
        """One client after another, in this process."""
        for client in downloads:
            down = partial(downloads.__getitem__, client)
            yield client, self._run(down, exchange, client, self.store.blob(client))

    def _run(
        self, download: Callable[[], Any], exchange: Exchange, client: int, state: Blob | None
    ) -> Answer:
        """A client's part, wherever it runs; its answer is packed, as it would travel."""
        try:
            with _keeping():
                before = None if state is None else state.read()
            slot = _OneState(before, partial(self._draft, client))
            shard = self.federation.shard(client, labels=self.method.needs_labels)
            ctx = ClientContext(
                self.setup,
                exchange,
                self._networks,
                client=client,
                data=shard,
                identity=self.identity,
            )
            report = self._sheets.write(run_client(self.method, download(), ctx, slot))
            return report, slot.new
        except Exception as error:
            scarce = str(error) if isinstance(error, _NotKept) else exhausted(error)
            return Failure(client, "raised", f"{SCARCE}{scarce}" if scarce else describe(error))

    def _draft(self, client: int, state: Any) -> Blob:
        with _keeping():
            return self.store.draft(client, state)

    def _accept(self, client: int, answer: Answer) -> Report[Any] | Failure:
        """The report, after the client's new state has been kept."""
        if isinstance(answer, Failure):
            if answer.reason.startswith(SCARCE):  # the fault of this machine, not of the client
                raise FurlongError(
                    f"client {client} could not train, {answer.reason}. Make room, or use fewer "
                    "--workers; 'furlong resume RUN' goes on after the last checkpoint."
                )
            return answer
        packed, state = answer
        if state is not None:
            self.store.keep(client, state)
        try:
            report: Report[Any] = unpack(packed.map())
            return report
        except PayloadError as error:
            return Failure(client, "refused", str(error))
        finally:
            packed.close()


class _OneState:
    """A client store for a single call: the state that it had, and the one that it has now."""

    def __init__(self, packed: Any, draft: Callable[[Any], Blob]) -> None:
        self._packed, self._draft = packed, draft
        self.new: Blob | None = None

    def get(self, client: int) -> Any | None:  # noqa: ARG002
        return self._packed

    def put(self, client: int, state: Any) -> None:  # noqa: ARG002
        self.new = self._draft(state)
