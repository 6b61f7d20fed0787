"""The two halves of an exchange: ``run`` at the server, ``run_client`` at a client.

Sampling, order, seeding, validation and byte counts live here once, so that engines cannot drift.
torch is seeded from hash(seed, who, exchange) around every call of a method, clients compute with
one CPU thread, and reports are aggregated in client order: any engine and any number of workers
gives the same bits.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from furlong.core.aggregation import Average
from furlong.core.context import ClientContext, Exchange, Networks, ServerContext, Setup, Shard
from furlong.core.guard import Expected, Guard
from furlong.core.method import Method, Report
from furlong.core.outliers import USUAL, Size, suspects
from furlong.core.payload import (
    Traffic,
    Weights,
    flatten,
    is_buffer,
    payload,
    replace_tensors,
    split_weights,
    traffic,
    unpack,
)
from furlong.core.products import merging
from furlong.core.weights import first_nonfinite
from furlong.errors import FurlongError, fitting
from furlong.seeding import made_with_one_thread, seeded, shuffled, threads

S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")


@dataclass(frozen=True)
class Failure:
    """A client without a valid report, and why."""

    client: int
    kind: Literal["raised", "refused", "lost"]
    reason: str


class Engine(Protocol):
    """Carries exchanges to clients, wherever they are; a context manager that closes itself."""

    def exchange(
        self, exchange: Exchange, downloads: Downloads[Any, Any]
    ) -> Iterable[tuple[int, Report[Any] | Failure]]:
        """Run ``run_client`` for every client in ``downloads``; answers come in client order.

        Yields the client that was asked, as the engine knows it, and what it answered.
        """

    def states(self) -> Iterable[tuple[int, Any]]:
        """(client, packed state or the file of it) of all that have one, for a checkpoint."""

    def restore(self, states: Mapping[int, Path]) -> None:
        """Take the clients' states from the files of a checkpoint."""

    def finish(self, encoder: Any) -> None:
        """The run is over: ``encoder`` is what was learnt, packed, for whoever took part."""

    def close(self) -> None:
        """Give back what the engine holds: processes, connections, memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClientStore(Protocol):
    """Where a client's state stays between exchanges."""

    def get(self, client: int) -> Any | None:
        """The packed state, or ``None`` before the first participation."""

    def put(self, client: int, state: Any) -> None:
        """Keep a state, which is a payload."""


@dataclass(frozen=True)
class ExchangeResult(Generic[S]):
    """What one exchange did."""

    exchange: Exchange
    server: S
    cohort: list[int]
    metrics: dict[int, dict[str, float]]
    examples: dict[int, int]
    failures: list[Failure]
    down: Traffic
    up: Traffic
    own: dict[str, float]  # the server's metrics
    seconds: float


# ---------------------------------------------------------------- sampling


def cohort_size(clients: int, fraction: float) -> int:
    """max(1, ⌊fraction·M⌋)."""
    return max(1, int(fraction * clients + 1e-9))


def draw_cohort(seed: int, exchange: Exchange, clients: list[int], fraction: float) -> list[int]:
    """:func:`cohort_size` clients, a function of (seed, round), ascending."""
    if exchange.clients is not None:
        return [client for client in clients if client in exchange.clients]
    if fraction >= 1:
        return clients
    chosen = shuffled(len(clients), seed, "cohort", exchange.round)
    chosen = chosen[: cohort_size(len(clients), fraction)]
    return [clients[i] for i in sorted(chosen.tolist())]


# ---------------------------------------------------------------- the client's half


@payload("furlong.rounds.Kept")
class Kept:
    """What is kept for a client: the method's state, and what the run's settings ask for."""

    state: Any
    stats: Weights  # bn_stats="local": BatchNorm statistics that never leave the client
    moments: tuple[Weights, ...]  # optimiser.persist


def run_client(
    method: Method[Any, Any, D, U], down: D, ctx: ClientContext, store: ClientStore
) -> Report[U]:
    """Load or make the client's state, train, store the state, answer."""
    setup = ctx.setup
    with threads(), seeded(setup.device, setup.seed, "client", ctx.client, ctx.exchange.index):
        packed = store.get(ctx.client)
        kept: Kept = Kept(method.init_client(ctx), {}, ()) if packed is None else unpack(packed)
        if kept.stats:
            down = replace_tensors(down, kept.stats)
        ctx.moments = list(kept.moments)
        local = method.local_update(kept.state, down, ctx)
        upload, own = own_statistics(method, local.upload)
        stats = kept.stats | own
        moments = kept.moments
        if setup.optimiser.persist and ctx.optimisers:
            moments = tuple(o.moments() for o in ctx.optimisers)
    kept = Kept(local.state, stats, moments)
    bad = first_nonfinite((upload, kept))
    if bad is not None:  # what the client keeps must stay fit for the next round
        raise ValueError(f"training diverged: {bad} holds NaN or infinity")
    if local.state is not None or stats or moments:
        store.put(ctx.client, kept)
    metrics = {**local.metrics, "images": float(ctx.images_seen)}
    examples = 1 if method.equal_weights else len(ctx.data)
    return Report(ctx.client, ctx.exchange.index, examples, upload, metrics)


def own_statistics(method: Method[Any, Any, Any, U], upload: U) -> tuple[U, Weights]:
    """What of an upload is sent, and the BatchNorm statistics that stay (bn_stats="local")."""
    return split_weights(upload, is_buffer) if method.bn_stats == "local" else (upload, {})


# ---------------------------------------------------------------- the server's half


def expected_upload(method: Method[S, Any, Any, U], state: S, client: int, ctx: ServerContext) -> U:
    """What ``client`` must send: names, shapes and dtypes, without what stays with it."""
    return own_statistics(method, method.expected(state, client, ctx))[0]


@dataclass
class Server(Generic[S, D, U]):
    """The server of one run: a method, the clients it knows of, and what it accepts."""

    method: Method[S, Any, D, U]
    setup: Setup
    public: Shard | None = None
    fraction: float = 1.0
    guard: Guard = field(default_factory=Guard)
    networks: Networks = field(default_factory=Networks)
    folder: Path | None = None  # room on disk; a temporary folder if none is given
    min_clients: int = 0  # valid answers that an exchange needs (at most all); else the run stops
    tell: Callable[[str], None] = lambda _: None
    watch: Callable[[Exchange, Report[U]], None] | None = None  # sees every accepted report
    suspected: set[int] = field(default_factory=set)  # clients that have been named as outliers

    def workspace(self) -> Path:
        """The folder for what is too large for the server's state, made when it is asked for."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="furlong-"))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def context(self, exchange: Exchange) -> ServerContext:
        """What the method's server half may touch in ``exchange``."""
        return ServerContext(
            self.setup,
            exchange,
            self.networks,
            public=self.public,
            workspace=self.workspace,
            tell=self.tell,
            combining=merging(Average, self.setup.given),
        )

    @contextmanager
    def computing(self, *where: object) -> Iterator[None]:
        """Threads and random numbers of the server's own work."""
        setup = self.setup
        with threads(setup.server_threads), seeded(setup.device, setup.seed, "server", *where):
            yield

    def init(self) -> S:
        """The server's state before the first exchange."""
        with self.computing("init"), fitting("what the server begins with (networks, prototypes)"):
            return self.method.init_server(self.context(Exchange(round=0)))

    def exchanges(self) -> list[Exchange]:
        """All exchanges of the run, numbered."""
        planned = self.method.plan(self.setup)
        return [replace(exchange, index=i) for i, exchange in enumerate(planned)]

    @property
    def clients(self) -> list[int]:
        """The clients' numbers, ascending; a client may join between two exchanges."""
        return sorted(self.setup.sizes)

    def cohort(self, exchange: Exchange) -> list[int]:
        """The clients that are asked in ``exchange``."""
        return draw_cohort(self.setup.seed, exchange, self.clients, self.fraction)

    def run(self, engine: Engine, state: S, first: int = 0) -> Iterator[ExchangeResult[S]]:
        """Carry out the exchanges from number ``first`` on, yielding after each."""
        heard = first > 0
        for exchange in self.exchanges()[first:]:
            result = self.step(engine, state, exchange)
            state = result.server
            heard = heard or bool(result.metrics)
            yield result
        if not heard:
            raise FurlongError("no client ever answered: nothing has been learnt.")

    def step(self, engine: Engine, state: S, exchange: Exchange) -> ExchangeResult[S]:
        """One exchange: sample, send, check, aggregate."""
        began = time.perf_counter()
        ctx = self.context(exchange)
        cohort = self.method.asked(state, self.cohort(exchange), ctx)
        downloads = Downloads(self.method, state, cohort, ctx)
        gate = _Gate(self, state, exchange, cohort)
        # a second thread would wait for a core that a client has
        replies = made_with_one_thread(gate.admit(engine.exchange(exchange, downloads)))
        with self.computing(exchange.index):
            state = self.method.aggregate(state, replies, ctx)
        gate.finish(replies)
        return ExchangeResult(
            exchange,
            state,
            cohort,
            gate.metrics,
            gate.examples,
            gate.failures,
            downloads.sent,
            gate.received,
            ctx.metrics,
            time.perf_counter() - began,
        )


AnyServer: TypeAlias = Server[Any, Any, Any]
"""A server of which only the contract is known."""


class Downloads(Mapping[int, D], Generic[S, D]):
    """Downloads made when they are asked for, and counted: a cohort's need not fit in memory."""

    def __init__(
        self, method: Method[S, Any, D, Any], state: S, cohort: list[int], ctx: ServerContext
    ) -> None:
        self._method, self._state, self._cohort, self._ctx = method, state, cohort, ctx
        self._last: tuple[Any, Traffic] | None = None
        self.sent = Traffic()

    def __getitem__(self, client: int) -> D:
        setup = self._ctx.setup
        where = (setup.seed, "download", self._ctx.exchange.index, client)
        with threads(), seeded(setup.device, *where):
            down = self._method.download(self._state, client, self._ctx)
        if self._last is None or self._last[0] is not down:  # most methods send all the same
            self._last = (down, traffic(down))
        self.sent += self._last[1]
        return down

    def limit(self, client: int) -> int:
        """Bytes that a packed answer of ``client`` may have: no engine needs to take more."""
        ctx = self._ctx
        with threads(), seeded(ctx.setup.device, "limit"):
            tensors, _ = flatten(expected_upload(self._method, self._state, client, ctx))
        return sum(t.nbytes for t in tensors.values()) + 400 * len(tensors) + (1 << 20)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cohort)

    def __len__(self) -> int:
        return len(self._cohort)


class _Gate(Generic[S, U]):
    """Lets valid reports through to ``aggregate`` one by one and remembers the rest."""

    def __init__(
        self, server: Server[S, Any, U], state: S, exchange: Exchange, cohort: list[int]
    ) -> None:
        self._server, self._state, self._exchange, self._cohort = server, state, exchange, cohort
        self._ctx = server.context(exchange)
        self._waiting = dict.fromkeys(cohort)  # a set in the order of the clients
        self.failures: list[Failure] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.examples: dict[int, int] = {}
        self.received = Traffic()
        self._sizes: dict[int, Size] = {}
        self._uploads: dict[int, Traffic] = {}  # of those that are valid
        self._last: Expected | None = None

    def admit(self, replies: Iterable[tuple[int, Report[U] | Failure]]) -> Iterator[Report[U]]:
        """The reports that pass the guard and, if outliers are left out, are none."""
        valid = self._valid(replies)
        for reply in self._without_outliers(valid) if self._server.guard.outlier else valid:
            self.received += self._uploads.pop(reply.client) + traffic(
                {**vars(reply), "upload": None}
            )
            self.metrics[reply.client] = reply.metrics
            self.examples[reply.client] = reply.examples
            if self._server.watch is not None:
                self._server.watch(self._exchange, reply)
            yield reply

    def _without_outliers(self, replies: Iterable[Report[U]]) -> Iterator[Report[U]]:
        """All have to be there before one can be compared: copies, as robust rules hold them."""
        held = [_copied(reply) for reply in replies]
        found = suspects(self._sizes, self._server.guard.outlier or 0.0)
        for reply in held:
            if reply.client in found:
                reason = f"{found[reply.client]}; if it is honest, raise server.outlier"
                self.failures.append(Failure(reply.client, "refused", reason))
            else:
                yield reply

    def _tell_of_outliers(self) -> None:
        """Name those that were merged although they are far too large; each once in a run."""
        server = self._server
        found = suspects(self._sizes, USUAL) if server.guard.outlier == 0 else {}
        for client, what in found.items():
            if client not in server.suspected:
                server.suspected.add(client)
                server.tell(
                    f"warning: round {self._exchange.round + 1}, client {client}: {what}, and a "
                    f"mean follows it. --server.outlier {USUAL:g} would leave it out; "
                    "--server.rule median or multi_krum withstands it."
                )

    def _valid(self, replies: Iterable[tuple[int, Report[U] | Failure]]) -> Iterator[Report[U]]:
        for client, reply in replies:
            if client not in self._waiting:  # duplicates, and clients nobody asked
                self.failures.append(Failure(client, "refused", "an answer nobody asked for"))
                continue
            del self._waiting[client]
            if isinstance(reply, Failure):
                self.failures.append(reply)
                continue
            reason = self._refuse(client, reply)
            if reason is None:
                yield reply
            else:
                self.failures.append(Failure(client, "refused", reason))

    def _refuse(self, client: int, reply: Report[U]) -> str | None:
        try:
            expected = self._expected(client)
            guard = self._server.guard
            unit_rows = self._server.method.unit_rows
            reason = guard.check(reply, expected, self._exchange, client, unit_rows)
            if reason is None:
                self._uploads[client] = expected.traffic  # it looks the same
                if guard.outlier is not None:
                    self._sizes[client] = expected.start.size(reply.upload, reply.examples)
            return reason
        except Exception as error:  # a hostile reply must not end the run
            return f"cannot be checked ({type(error).__name__})"

    def _expected(self, client: int) -> Expected:
        """What ``client`` must send; most methods expect the same object of everybody."""
        upload = expected_upload(self._server.method, self._state, client, self._ctx)
        if self._last is None or self._last.upload is not upload:
            self._last = Expected(upload)
        return self._last

    def finish(self, replies: Iterator[Report[U]]) -> None:
        """Drain what the method left, name the silent, and stop when too few could train."""
        for _ in replies:
            pass
        self._tell_of_outliers()
        self.failures += [Failure(c, "lost", "no answer") for c in self._waiting]
        where = f"exchange {self._exchange.index + 1} (round {self._exchange.round + 1})"
        reasons = "; ".join(f"client {f.client}: {f.reason}" for f in self.failures[:3])
        if not self.metrics and any(f.kind != "lost" for f in self.failures):
            raise FurlongError(f"no client could do its part of {where}: {reasons}")
        fewest, answers = self._server.min_clients, len(self.metrics)
        if answers < min(fewest, len(self._cohort)):
            more = "; …" if len(self.failures) > 3 else ""
            raise FurlongError(
                f"{answers} of {len(self._cohort)} clients answered in {where}; train.min_clients "
                f"is {fewest} ({reasons}{more}). What was saved stays; 'furlong resume RUN' goes "
                "on, and takes other values of --train.min-clients and --run.deadline."
            )


def _copied(report: Report[U]) -> Report[U]:
    """With tensors of its own: views would hold the memory and a descriptor of every message."""
    tensors = {name: tensor.clone() for name, tensor in flatten(report.upload)[0].items()}
    return replace(report, upload=replace_tensors(report.upload, tensors))
