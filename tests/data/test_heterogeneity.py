"""Metrics: closed forms, golden values and hand-made cases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.data.heterogeneity import (
    angles,
    beta_cib,
    beta_hetero,
    expected_false_negatives,
)
from furlong.errors import FurlongError

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden.json").read_text())


def test_skew_of_even_and_single_clients() -> None:
    even = torch.full((4, 6), 9)
    assert beta_cib(even) == pytest.approx(0, abs=1e-12)
    assert beta_hetero(even) == pytest.approx(0, abs=1e-12)
    assert beta_hetero(torch.tensor([[1, 0]]), "MM1") == 0


def test_skew_by_hand() -> None:
    counts = torch.tensor([[3, 1], [1, 3]])
    assert beta_cib(counts) == pytest.approx(1 + 0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert beta_hetero(counts, "MM1") == pytest.approx(0.5 * math.log2(3))
    assert beta_hetero(counts, "M2") == pytest.approx(0.25 * math.log2(3))


@settings(deadline=None)
@given(s=st.integers(1, 10))
def test_closed_form_of_class_windows(s: int) -> None:
    counts = torch.zeros(10, 10)
    for m in range(10):
        counts[m, [(m + i) % 10 for i in range(s)]] = 5
    floor = 1e-6
    cib = math.log2(10 / s) + (10 - s) * floor * math.log2(10 * floor)
    assert beta_cib(counts) == pytest.approx(cib, abs=1e-9)
    assert beta_hetero(counts) == pytest.approx((1 - s / 10) * -math.log2(s * floor), abs=3e-4)


def test_skew_refusals() -> None:
    with pytest.raises(FurlongError, match="Client 1 holds no image"):
        beta_cib(torch.tensor([[1, 2], [0, 0]]))
    with pytest.raises(FurlongError, match="clients × classes"):
        beta_hetero(torch.tensor([1, 2]))
    with pytest.raises(FurlongError, match="M2, MM1"):
        beta_hetero(torch.eye(2), "M")  # type: ignore[arg-type]


@pytest.mark.parametrize("row", GOLDEN["fcl_false_negative"])
def test_false_negatives_of_a_split(row: dict[str, float]) -> None:
    """With m classes each on a+1 clients, in turn: FCL's table, and counting labels, agree."""
    m, clients, a = int(row["m"]), int(row["C"]), int(row["others_with_class"])
    classes = m * clients // (a + 1)
    counts = torch.zeros(clients, classes, dtype=torch.long)
    for client in range(clients):
        for i in range(m):
            counts[client, (client * m + i) % classes] = 4
    found = expected_false_negatives(counts)
    assert found == pytest.approx((row["local"], row["union_eq4"], row["remote_only_eq5"]))
    banks = [torch.arange(classes).repeat_interleave(row) for row in counts]
    everything = torch.cat(banks)
    for k, bank in enumerate(banks):
        remote = torch.cat([other for i, other in enumerate(banks) if i != k])
        counted = [shares(bank, rows) for rows in (bank, everything, remote)]
        assert counted == pytest.approx(found)


def shares(queries: torch.Tensor, bank: torch.Tensor) -> float:
    """How much of ``bank`` has the class of a query, on average, by counting."""
    return float((queries[:, None] == bank).double().mean())


@settings(deadline=None)
@given(m=st.integers(1, 6), clients=st.integers(2, 6), seed=st.integers(0, 99))
def test_false_negatives_of_any_split(m: int, clients: int, seed: int) -> None:
    """All features are a mean of the local and the others' ones; every share is one."""
    counts = torch.randint(1, 9, (clients, m), generator=torch.Generator().manual_seed(seed))
    local, union, remote = expected_false_negatives(counts)
    assert 0 < remote <= 1
    assert union == pytest.approx((local + (clients - 1) * remote) / clients)


def test_angles() -> None:
    h = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    turn = math.radians(20)
    rotation = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    assert angles(h, h).abs().max() == 0
    assert torch.allclose(angles(h, 3 * h), torch.zeros(50, dtype=torch.float64), atol=1e-5)
    twenty = torch.full((50,), 20.0, dtype=torch.float64)
    assert torch.allclose(angles(h, h @ rotation), twenty, atol=1e-4)
    assert torch.allclose(angles(h, -h), twenty * 9)
    assert angles(torch.zeros(1, 2), torch.ones(1, 2)).item() == pytest.approx(90)
    with pytest.raises(FurlongError, match="one shape"):
        angles(h, h[:4])
