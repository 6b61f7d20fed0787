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
    assert {c: bytes(v) for c, _, v in store.items()} == packed
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
    assert draw_cohort(0, Exchange(round=3, everyone=True), clients, 0.1) == clients
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
