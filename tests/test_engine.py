"""The in-process engine: failures by name, dead workers, memory budget, no leaks."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from furlong.context import ClientContext, Exchange
from furlong.engines.inprocess import BlobStore, InProcess
from furlong.errors import FurlongError
from furlong.method import Local
from furlong.methods.fedsimclr import FedSimCLR
from furlong.payload import pack
from furlong.rounds import Server, draw_cohort, seed_of


@dataclass(frozen=True)
class Faulty(FedSimCLR):
    """Misbehaves on one client."""

    how: str = "raise"
    whom: int = 1

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        if ctx.client == self.whom or self.whom < 0:
            if self.how == "raise":
                raise ValueError("bad scanner")
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(state, down, ctx)


def faulty(p: Any, **fields: Any) -> Faulty:
    return Faulty(projection_head=p.method.projection_head, **fields)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_raises_is_named(prepared: Any, workers: int) -> None:
    p = prepared("fedsimclr")
    method = faulty(p)
    server = Server(method, p.setup)
    with InProcess(method, p.federation, p.setup, workers) as transport:
        results = list(server.run(p.federation, transport, server.init()))
    assert len(results) == 2
    for result in results:
        assert sorted(result.metrics) == [0, 2]
        (failure,) = result.failures
        assert (failure.client, failure.kind) == (1, "raised")
        assert "ValueError: bad scanner" in failure.reason


def test_a_worker_that_dies_is_replaced(prepared: Any) -> None:
    p = prepared("fedsimclr")
    method = faulty(p, how="die")
    server = Server(method, p.setup)
    with InProcess(method, p.federation, p.setup, 2) as transport:
        results = list(server.run(p.federation, transport, server.init()))
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
        list(server.run(p.federation, transport, server.init()))


def test_closing_leaves_no_process_and_no_descriptor(prepared: Any) -> None:
    p = prepared("fedu")
    before = len(os.listdir("/proc/self/fd"))
    with InProcess(p.method, p.federation, p.setup, 2) as transport:
        workers = [w.process.pid for w in transport._pool]
        list(p.server.run(p.federation, transport, p.server.init()))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_states_beyond_the_budget_go_to_disk(tmp_path: Any) -> None:
    packed = {k: bytes(pack({"t": torch.full((1000,), float(k))})) for k in range(5)}
    store = BlobStore(budget=2 * len(packed[0]), folder=tmp_path)
    for k, data in packed.items():
        store.put(k, data)
    on_disk = list(tmp_path.rglob("*.safetensors"))
    assert len(on_disk) == 3
    assert {c: bytes(v) for c, v in store.items()} == packed
    store.put(0, packed[1])
    assert bytes(store.get(0)) == packed[1]
    store.close()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_tiny_budget_changes_nothing(prepared: Any) -> None:
    p = prepared("fedu")

    def finish(budget: int) -> bytes:
        with InProcess(p.method, p.federation, p.setup, 2, BlobStore(budget)) as transport:
            *_, last = p.server.run(p.federation, transport, p.server.init())
            return bytes(pack(last.server))

    assert finish(0) == finish(1 << 30)


def test_cohorts() -> None:
    clients = list(range(10))
    one = draw_cohort(0, Exchange(round=3), clients, 0.35)
    assert len(one) == 3
    assert one == draw_cohort(0, Exchange(round=3, index=9), clients, 0.35)
    assert any(draw_cohort(0, Exchange(round=r), clients, 0.35) != one for r in range(4, 9))
    assert draw_cohort(0, Exchange(round=3, clients=(1, 2)), clients, 0.1) == [1, 2]
    assert len(draw_cohort(0, Exchange(round=0), clients, 0.01)) == 1
    assert len(draw_cohort(0, Exchange(round=0), clients, 0.7)) == 7  # not 6: 0.7·10 < 7 in floats
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
        os.kill(transport._pool[1].process.pid, signal.SIGKILL)
        transport._pool[1].process.join()
        result = p.server.step([0], transport, p.server.init(), p.server.exchanges()[0])
        assert not result.failures
        again = p.server.step([0, 1, 2], transport, result.server, p.server.exchanges()[1])
    assert not again.failures


def test_many_states_do_not_exhaust_descriptors() -> None:
    store = BlobStore(budget=1 << 30)
    store.most = 10
    for k in range(40):
        store.put(k, bytes(pack({"t": torch.tensor(k)})))
    assert sum(blob.fd is not None for blob in store._blobs.values()) <= 10
    assert len(list(store.items())) == 40
    store.close()


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
        one, two = list(server.run(p.federation, transport, server.init()))
    assert [f.client for f in one.failures] == [1]
    assert "diverged" in one.failures[0].reason
    assert not two.failures
