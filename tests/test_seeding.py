"""Random numbers depend on names only: not on what was drawn before, nor on who else draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from furlong.core.context import ClientContext, Networks
from furlong.core.exchange import run_client
from furlong.core.payload import pack
from furlong.engines.states import StateFolder
from furlong.seeding import made_with_one_thread, seeded, shuffled, threads, with_seed


def test_numbers_depend_on_the_seed_only() -> None:
    def draw(seed: int) -> list[float]:
        with with_seed(seed):
            return torch.rand(4).tolist()

    first = draw(3)
    torch.rand(7)
    assert draw(3) == first
    assert draw(4) != first


def test_numbers_outside_go_on() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wanted = torch.rand(2).tolist()
        torch.manual_seed(1)
        found = [float(torch.rand(()))]
        with seeded(torch.device("cpu"), "anything"):
            torch.rand(5)
        found.append(float(torch.rand(())))
    assert found == wanted


def test_made_with_one_thread_and_taken_with_as_many_as_before() -> None:
    with threads(2):
        for inside in made_with_one_thread(torch.get_num_threads() for _ in range(2)):
            assert (inside, torch.get_num_threads()) == (1, 2)
        assert torch.get_num_threads() == 2


def test_permutations() -> None:
    assert shuffled(50, "a").tolist() == shuffled(50, "a").tolist()
    assert shuffled(50, "a").tolist() != shuffled(50, "b").tolist()
    assert sorted(shuffled(50, "a").tolist()) == list(range(50))


def test_clients_and_rounds_draw_other_numbers(prepared: Any) -> None:
    """The same weights and the same images: views and batches still differ."""
    p = prepared("fedsimclr", **{"optimiser.schedule": "constant"})
    first, second = p.server.exchanges()
    shard = p.federation.shard(0, labels=False)

    def trained(client: int, exchange: Any) -> bytes:
        ctx = ClientContext(p.setup, exchange, Networks(), client=client, data=shard)
        report = run_client(p.method, p.server.init(), ctx, StateFolder())
        return bytes(pack(replace(report, client=0, exchange=0).upload))

    assert trained(0, first) == trained(0, first)
    assert trained(0, first) != trained(1, first)
    assert trained(0, first) != trained(0, second)
