"""The in-process engine: failures by name, dead workers, memory budget, no leaks."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.core.context import ClientContext, Exchange
from furlong.core.exchange import Server, draw_cohort
from furlong.core.method import Local
from furlong.core.payload import pack, unpack
from furlong.engines.blobs import Blob, Sheets
from furlong.engines.inprocess import InProcess
from furlong.engines.pool import Pool
from furlong.engines.states import StateFolder, States
from furlong.errors import FurlongError
from furlong.methods.fedsimclr import FedSimCLR
from furlong.seeding import seed_of


@dataclass(frozen=True)
class Faulty(FedSimCLR):
    """Misbehaves on one client."""

    how: str = "raise"
    whom: int = 1

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        if ctx.client == self.whom or self.whom < 0:
            if self.how == "raise":
                raise ValueError("bad scanner")
            if self.how == "starve":
                raise MemoryError
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(600)
        if self.how == "hang":  # the others answer at once: a busy machine must not make them late
            return Local(state, down)
        return super().local_update(state, down, ctx)


def pids(engine: InProcess) -> list[int]:
    """Of the worker processes."""
    found = [process.pid for process in engine.pool.processes] if engine.pool else []
    return [pid for pid in found if pid is not None]


def faulty(p: Any, **fields: Any) -> Faulty:
    return Faulty(projection_head=p.method.projection_head, **fields)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_raises_is_named(prepared: Any, workers: int) -> None:
    p = prepared("fedsimclr")
    method = faulty(p)
    server = Server(method, p.setup)
    with InProcess(method, p.federation, p.setup, workers) as transport:
        results = list(server.run(transport, server.init()))
    assert len(results) == 2
    for result in results:
        assert sorted(result.metrics) == [0, 2]
        (failure,) = result.failures
        assert (failure.client, failure.kind) == (1, "raised")
        assert "ValueError: bad scanner" in failure.reason


@pytest.mark.parametrize("workers", [1, 2])
def test_too_little_memory_is_not_a_client_s_fault(prepared: Any, workers: int) -> None:
    """Going on without that client would silently give another result."""
    p = prepared("fedsimclr")
    method = faulty(p, how="starve")
    with (
        InProcess(method, p.federation, p.setup, workers) as transport,
        pytest.raises(FurlongError, match=r"client 1 could not train, .*not enough memory.*resume"),
    ):
        list(Server(method, p.setup).run(transport, p.server.init()))


def test_a_worker_that_dies_is_replaced(prepared: Any) -> None:
    p = prepared("fedsimclr")
    method = faulty(p, how="die")
    server = Server(method, p.setup)
    with InProcess(method, p.federation, p.setup, 2) as transport:
        results = list(server.run(transport, server.init()))
    for result in results:
        assert sorted(result.metrics) == [0, 2]
        assert "SIGKILL" in result.failures[0].reason
        assert result.failures[0].client == 1


def test_if_everybody_fails_the_run_stops(prepared: Any) -> None:
    p = prepared("fedsimclr")
    method = faulty(p, whom=-1)
    server = Server(method, p.setup)
    with (
        InProcess(method, p.federation, p.setup) as transport,
        pytest.raises(FurlongError, match=r"no client could.*bad scanner"),
    ):
        list(server.run(transport, server.init()))


def test_closing_leaves_no_process_and_no_descriptor(prepared: Any) -> None:
    p = prepared("fedu")
    before = len(os.listdir("/proc/self/fd"))
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        workers = pids(transport)
        list(p.server.run(transport, p.server.init()))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_states_are_files_and_only_saved_ones_outlive_their_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [{"t": torch.full((1000,), float(k))} for k in range(4)]
    packed = [bytes(pack(state)) for state in states]

    def there() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    store = StateFolder(tmp_path)
    for client in (7, 3, 7):
        store.put(client, states[client % 4])
    assert "00007-000001.safetensors" in there()  # free to be written over
    saved = dict(store.items())
    assert list(saved) == [3, 7]
    assert there() == ["00003-000002.safetensors", "00007-000003.safetensors"]
    assert store.get(0) is None
    store.put(3, states[0])
    store.put(3, states[1])
    free = (tmp_path / "00003-000004.safetensors").stat().st_ino
    assert bytes(store.get(3) or b"") == packed[1]  # it is asked: the free file waits for it
    assert saved[3].read_bytes() == packed[3]  # a checkpoint has it
    names = [".00003.draft", *(p.name for p in saved.values()), "00003-000005.safetensors"]
    assert there() == sorted(names)
    small = {"t": torch.zeros(3)}
    store.put(3, small)
    blob = store.blob(3)
    assert blob is not None
    assert blob.path is not None
    assert blob.path.stat().st_ino == free
    assert blob.path.read_bytes() == bytes(pack(small))  # nothing of what was there
    store.put(3, states[0])
    store.close()
    assert there() == [p.name for p in saved.values()]
    monkeypatch.chdir(tmp_path)
    again = StateFolder(tmp_path)
    again.restore({client: Path(path.name) for client, path in saved.items()})  # the same files
    again.put(3, states[2])
    assert there()[1] == "00003-000004.safetensors"  # no name is used twice
    assert bytes(again.get(7) or b"") == packed[3]


def test_a_store_without_a_folder_leaves_none() -> None:
    store = StateFolder()
    store.put(0, 7)
    assert store.folder.is_dir()
    store.close()
    assert not store.folder.exists()


@pytest.mark.parametrize(("workers", "code"), [(1, errno.EIO), (2, errno.ENOSPC)])
def test_no_room_for_a_state_stops_the_run(
    prepared: Any, workers: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on without that client would silently give another result."""

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    p = prepared("fedu")
    monkeypatch.setattr("furlong.engines.states.write", full)
    with (
        InProcess(p.method, p.federation, p.setup, workers) as transport,
        pytest.raises(FurlongError, match=r"client 0 could not train, .*state cannot be .*resume"),
    ):
        p.server.step(transport, p.server.init(), p.server.exchanges()[0])


def test_an_exchange_may_name_any_number_of_clients(prepared: Any) -> None:
    """Workers need not know them, and a message to them has an end."""
    p = prepared()
    named = replace(p.server.exchanges()[0], clients=tuple(range(20_000)))
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        assert not p.server.step(transport, p.server.init(), named).failures


def test_cohorts() -> None:
    clients = list(range(10))
    one = draw_cohort(0, Exchange(round=3), clients, 0.35)
    assert len(one) == 3
    for r in range(20):  # reports are added in this order
        cohort = draw_cohort(0, Exchange(round=r), clients, 0.5)
        assert cohort == sorted(cohort)
    assert one == draw_cohort(0, Exchange(round=3, index=9), clients, 0.35)
    assert any(draw_cohort(0, Exchange(round=r), clients, 0.35) != one for r in range(4, 9))
    assert draw_cohort(0, Exchange(round=3, clients=(1, 2)), clients, 0.1) == [1, 2]
    assert len(draw_cohort(0, Exchange(round=0), clients, 0.01)) == 1
    many = list(range(100))
    assert len(draw_cohort(0, Exchange(round=0), many, 0.29)) == 29  # 0.29·100 < 29 in floats
    seen = {c for r in range(60) for c in draw_cohort(0, Exchange(round=r), clients, 0.2)}
    assert seen == set(clients)


def test_seeds_differ() -> None:
    seeds = {seed_of(0, "client", c, e) for c in range(50) for e in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= s < 2**63 for s in seeds)


def test_impossible_settings(prepared: Any) -> None:
    p = prepared("fedsimclr")
    with pytest.raises(FurlongError, match="at least 1"):
        InProcess(p.method, p.federation, p.setup, 0)


def test_an_abandoned_exchange_leaves_nothing_behind(prepared: Any) -> None:
    """Answers of an exchange that was given up must not reach the next one."""
    p = prepared("fedu", clients=6)
    first, second = p.server.exchanges()[:2]
    downloads = dict.fromkeys(p.federation.clients, p.server.init())
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        given_up = transport.exchange(first, downloads)
        next(given_up)
        given_up.close()
        replies = list(transport.exchange(second, downloads))
    assert [client for client, _ in replies] == p.federation.clients
    for client, reply in replies:
        assert (reply.client, reply.exchange) == (client, second.index)


def test_an_idle_worker_that_dies_is_replaced(prepared: Any) -> None:
    p = prepared("fedsimclr")
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        os.kill(pids(transport)[1], signal.SIGKILL)
        time.sleep(0.2)
        result = p.server.step(
            transport, p.server.init(), replace(p.server.exchanges()[0], clients=(0,))
        )
        assert not result.failures
        again = p.server.step(transport, result.server, p.server.exchanges()[1])
    assert not again.failures


@dataclass(frozen=True)
class Diverges(FedSimCLR):
    """Loses its mind once."""

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        local = super().local_update(state, down, ctx)
        if ctx.client == 1 and ctx.exchange.index == 0:
            next(iter(local.upload.weights.values())).fill_(torch.nan)
        return Local({"seen": torch.tensor(ctx.exchange.index)}, local.upload, local.metrics)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_diverged_client_keeps_its_old_state(prepared: Any, workers: int) -> None:
    p = prepared("fedsimclr")
    method = Diverges(projection_head=p.method.projection_head)
    server = Server(method, p.setup)
    with InProcess(method, p.federation, p.setup, workers) as transport:
        one, two = list(server.run(transport, server.init()))
    assert [f.client for f in one.failures] == [1]
    assert "diverged" in one.failures[0].reason
    assert not two.failures


# ---------------------------------------------------------------- deadline, fewest, isolation


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def enough(p: Any) -> float:
    """A deadline that honest clients keep, however busy the machine is."""
    began = time.monotonic()
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        p.server.step(transport, p.server.init(), p.server.exchanges()[0])
    return round(1.5 + 4 * (time.monotonic() - began), 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exchange_ends_by_its_deadline(prepared: Any, workers: int) -> None:
    """Without the client that hangs; with one worker also without those that wait behind it."""
    p = prepared("fedsimclr")
    method = faulty(p, how="hang")
    server = Server(method, p.setup)
    deadline = enough(p)
    before = len(os.listdir("/proc/self/fd"))
    with InProcess(method, p.federation, p.setup, workers, deadline=deadline) as transport:
        old = pids(transport)
        assert len(old) == workers
        results = list(server.run(transport, server.init()))
        new = pids(transport)
    missed = [1, 2] if workers == 1 else [1]
    for result in results:
        assert result.seconds < 60 + deadline
        assert sorted(result.metrics) == [c for c in (0, 1, 2) if c not in missed]
        assert [(f.client, f.kind) for f in result.failures] == [(c, "lost") for c in missed]
        assert {f.reason for f in result.failures} == {f"no answer within {deadline:g} s"}
    assert len(new) == workers
    assert not set(old) >= set(new)
    assert all(map(gone, (*old, *new)))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_who_answered_in_time_counts_even_if_nobody_looked(prepared: Any) -> None:
    """An aggregation that takes longer than the deadline loses nobody who has answered."""
    p = prepared("fedsimclr")
    method = faulty(p, how="hang", whom=99)
    downloads = dict.fromkeys(p.federation.clients, p.server.init())
    deadline = enough(p)
    with InProcess(method, p.federation, p.setup, 3, deadline=deadline) as transport:
        replies = transport.exchange(p.server.exchanges()[0], downloads)
        found = [next(replies)]
        time.sleep(deadline + 0.1)
        found += replies
    assert [reply.client for _, reply in found] == [0, 1, 2]
    assert all(not hasattr(reply, "reason") for _, reply in found)


@pytest.mark.parametrize("how", [{"deadline": 60.0}, {"isolate": True}, {"deadline": 1e12}])
@pytest.mark.parametrize("name", ["fedu", "fedema"])
def test_a_process_of_its_own_gives_the_same_bits(
    prepared: Any, name: str, how: dict[str, Any]
) -> None:
    p = prepared(name, clients=1)

    def finish(**how: Any) -> tuple[bytes, dict[int, bytes]]:
        with InProcess(p.method, p.federation, p.setup, **how) as transport:
            assert len(pids(transport)) == bool(how)
            *_, last = p.server.run(transport, p.server.init())
            assert not last.failures
            kept = {c: path.read_bytes() for c, path in transport.states()}
        return bytes(pack(last.server)), kept

    assert finish(**how) == finish()


def test_a_late_client_keeps_its_old_state_and_comes_back(prepared: Any) -> None:
    """The deadline is the caller's, exchange by exchange."""

    @dataclass(frozen=True)
    class Counts(FedSimCLR):
        def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
            local = super().local_update(state, down, ctx)
            if ctx.exchange.index == 1:
                time.sleep(600)
            count = 1 if state is None else int(state["n"]) + 1
            return Local({"n": torch.tensor(count)}, local.upload, local.metrics)

    p = prepared("fedsimclr", clients=1, rounds=3)
    method = Counts(projection_head=p.method.projection_head)
    server = Server(method, p.setup)
    down = server.init()
    with InProcess(method, p.federation, p.setup, isolate=True) as transport:

        def ask(index: int, deadline: float) -> Any:
            transport.deadline = deadline
            [(client, reply)] = transport.exchange(server.exchanges()[index], {0: down})
            assert client == 0
            return reply

        assert ask(0, 0.0).exchange == 0
        assert ask(1, 0.5).reason == "no answer within 0.5 s"
        assert ask(2, 60.0).exchange == 2
        packed = transport.store.get(0)
    assert int(unpack(packed).state["n"]) == 2


def test_a_crash_of_an_isolated_client_is_a_failure(prepared: Any) -> None:
    p = prepared("fedsimclr", clients=1)
    method = faulty(p, how="die", whom=0)
    exchange, down = p.server.exchanges()[0], p.server.init()
    with InProcess(method, p.federation, p.setup, isolate=True) as transport:
        for _ in range(2):
            [(_, reply)] = transport.exchange(exchange, {0: down})
            assert (reply.client, reply.kind) == (0, "lost")
            assert "SIGKILL" in reply.reason


def test_a_worker_that_died_while_idle_costs_nobody_an_answer(prepared: Any) -> None:
    p = prepared("fedsimclr", clients=1)
    with InProcess(p.method, p.federation, p.setup, isolate=True) as transport:
        os.kill(pids(transport)[0], signal.SIGKILL)
        time.sleep(0.2)
        result = p.server.step(
            transport, p.server.init(), replace(p.server.exchanges()[0], clients=(0,))
        )
    assert not result.failures


def test_what_cannot_be_kept_is_refused(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator nothing can stop a client."""
    p = prepared("fedsimclr")
    there = replace(p.setup, device=torch.device("cuda"))
    with pytest.raises(FurlongError, match=r"run.deadline is 5.0, .*--device cuda.*--device cpu"):
        InProcess(p.method, p.federation, there, deadline=5.0)
    with pytest.raises(FurlongError, match="isolate is True"):
        InProcess(p.method, p.federation, there, isolate=True)
    InProcess(p.method, p.federation, there).close()
    monkeypatch.setattr("furlong.engines.pool._FORK", False)
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        transport.deadline = 5.0
        with pytest.raises(FurlongError, match=r"run.deadline is 5.0"):
            next(iter(transport.exchange(p.server.exchanges()[0], {0: p.server.init()})))


class InMemory(States):
    """The least that the engine needs of a store."""

    def __init__(self) -> None:
        self.kept: dict[int, Blob] = {}

    def blob(self, client: int) -> Blob | None:
        return self.kept.get(client)

    def keep(self, client: int, blob: Blob) -> None:
        if old := self.kept.pop(client, None):
            old.close()
        self.kept[client] = blob


@pytest.mark.parametrize("isolate", [False, True])
def test_any_store_will_do(prepared: Any, isolate: bool) -> None:
    p = prepared("fedu")

    def finish(store: States, **how: Any) -> tuple[bytes, list[bytes]]:
        with InProcess(p.method, p.federation, p.setup, store=store, **how) as transport:
            *_, last = p.server.run(transport, p.server.init())
            kept = [bytes(store.get(client) or b"") for client in p.federation.clients]
        return bytes(pack(last.server)), kept

    usual = finish(StateFolder())
    assert finish(InMemory(), isolate=isolate) == usual
    assert all(usual[1])


@pytest.mark.parametrize(("fewest", "stops"), [(0, False), (2, False), (3, True), (99, True)])
def test_too_few_answers_stop_the_run(prepared: Any, fewest: int, stops: bool) -> None:
    p = prepared("fedsimclr")
    method = faulty(p)
    server = Server(method, p.setup, min_clients=fewest)
    with InProcess(method, p.federation, p.setup) as transport:
        if not stops:
            assert len(list(server.run(transport, server.init()))) == 2
            return
        with pytest.raises(FurlongError) as error:
            list(server.run(transport, server.init()))
    for part in (
        "2 of 3 clients answered in exchange 1 (round 1)",
        f"train.min_clients is {fewest}",
        "client 1: ValueError: bad scanner",
        "furlong resume RUN",
    ):
        assert part in str(error.value)


def test_an_exchange_never_needs_more_than_it_asks(prepared: Any) -> None:
    """A cohort of one, and the server alone, with a minimum of three."""
    p = prepared("mfcl")
    server = Server(p.method, p.setup, fraction=0.4, min_clients=3)
    with InProcess(p.method, p.federation, p.setup) as transport:
        results = list(server.run(transport, server.init()))
    assert {len(r.cohort) for r in results} >= {0, 1}
    assert not [r for r in results if r.failures]


def test_silence_of_all_stops_a_run_that_needs_somebody(prepared: Any) -> None:
    p = prepared("fedsimclr")
    method = faulty(p, how="hang", whom=-1)
    server = Server(method, p.setup, min_clients=1)
    with (
        InProcess(method, p.federation, p.setup, 2, deadline=0.3) as transport,
        pytest.raises(FurlongError, match=r"0 of 3 clients.*no answer within 0.3 s.*resume"),
    ):
        list(server.run(transport, server.init()))


def test_a_new_worker_holds_no_states(prepared: Any) -> None:
    """They would stay in memory after the parent has replaced them."""
    p = prepared("fedsimclr")
    method = faulty(p, how="hang")
    with InProcess(method, p.federation, p.setup, 2, InMemory(), deadline=0.5) as transport:
        states = set()
        for client in (0, 2):
            transport.store.keep(client, transport.store.draft(client, {"t": torch.zeros(1000)}))
            blob = transport.store.blob(client)
            assert blob is not None
            states.add(os.stat(f"/proc/self/fd/{blob.fd}").st_ino)
        old = set(pids(transport))
        list(transport.exchange(p.server.exchanges()[0], {1: p.server.init()}))
        [new] = set(pids(transport)) - old
        for _ in range(100):  # until it has begun
            held = set(states)
            with suppress(FileNotFoundError):  # it is just closing one
                held &= {fd.stat().st_ino for fd in Path(f"/proc/{new}/fd").iterdir()}
            if not held:
                break
            time.sleep(0.02)
    assert not held


@dataclass(frozen=True)
class DiesOnce(FedSimCLR):
    """Trains nobody; one client takes its worker with it."""

    whom: int = 5

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        if ctx.client == self.whom and ctx.exchange.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Local(state, down)


def test_of_clients_in_one_message_only_the_one_that_dies_is_lost(prepared: Any) -> None:
    p = prepared("fedsimclr", clients=24)
    method = DiesOnce(projection_head=p.method.projection_head)
    server = Server(method, p.setup)
    with InProcess(method, p.federation, p.setup, 2) as transport:
        one, two = list(server.run(transport, server.init()))
    assert not one.failures
    assert [(f.client, f.kind) for f in two.failures] == [(5, "lost")]
    assert sorted(two.metrics) == [c for c in range(24) if c != 5]


@pytest.mark.parametrize(
    ("held", "begin"),
    [(64 << 20, {0: 2, 1: 0, 2: 1, 3: 3, 4: 4}), (32 << 20, {0: 1, 1: 0, 2: 3, 3: 2, 4: 4})],
)
def test_the_longest_goes_first_and_answers_keep_their_order(
    held: int, begin: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far ahead as three clients for each worker, if answers are large, or two, if very."""
    monkeypatch.setattr("furlong.engines.pool._HELD", held)
    sheets, begun = Sheets(), itertools.count()

    def run(*_: Any) -> tuple[Blob, None]:
        return sheets.write(
            {"at": torch.tensor(next(begun)), "large": torch.zeros(9_000_000)}
        ), None

    pool = Pool(1, run, sheets)
    lengths = {0: 1, 1: 5, 2: 3, 3: 9, 4: 2}
    try:
        downloads = dict.fromkeys(lengths, 0)
        answers = pool.exchange(Exchange(0), downloads, lambda _: None, lengths.__getitem__, 0.0)
        found = [(client, int(unpack(answer[0].map())["at"])) for client, answer in answers]
    finally:
        pool.close()
    assert found == list(begin.items())


def test_a_sheet_is_written_on_again_when_nobody_reads_it() -> None:
    sheets = Sheets()
    first = sheets.write({"t": torch.ones(1000)})
    value = unpack(first.map())["t"]
    first.close()
    second = sheets.write({"t": torch.zeros(1000)})
    assert second.sheet != first.sheet
    assert bool(value.eq(1).all())
    del value
    third = sheets.write({"t": torch.full((900,), 3.0)})
    assert third.sheet == first.sheet
    third.close()  # it was never read
    assert sheets.write({"t": torch.zeros(1000)}).sheet == first.sheet
