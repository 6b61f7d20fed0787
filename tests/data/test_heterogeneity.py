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
    beta_cib,
    beta_hetero,
    count_false_negatives,
    expected_false_negatives,
    false_negative_ratios,
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
    """With m classes each on a+1 clients, in turn: the closed form, and counting labels, agree."""
    m, clients, a = int(row["m"]), int(row["C"]), int(row["others_with_class"])
    classes = m * clients // (a + 1)
    counts = torch.zeros(clients, classes, dtype=torch.long)
    for client in range(clients):
        for i in range(m):
            counts[client, (client * m + i) % classes] = 60
    found = expected_false_negatives(counts)
    assert found == pytest.approx(false_negative_ratios(m, clients, a))
    banks = [torch.arange(classes).repeat_interleave(row) for row in counts]
    local = torch.cat([count_false_negatives(bank, bank) for bank in banks]).mean()
    assert float(local) == pytest.approx(found[0])


@pytest.mark.parametrize("row", GOLDEN["fcl_false_negative"])
def test_false_negative_table(row: dict[str, float]) -> None:
    m, clients, a = int(row["m"]), int(row["C"]), int(row["others_with_class"])
    expected = (row["local"], row["union_eq4"], row["remote_only_eq5"])
    assert false_negative_ratios(m, clients, a) == pytest.approx(expected)
    # The same by counting: class 0 is the query's, the other labels are unique to their bank.
    own = [0, *range(1, m)]
    banks = [
        [0 if k < a and i == 0 else 1000 * (k + 1) + i for i in range(m)]
        for k in range(clients - 1)
    ]
    local = torch.tensor(own).repeat(8)
    remote = torch.tensor(banks).repeat(1, 8).flatten()
    query = torch.tensor([0])
    counted = [
        count_false_negatives(query, bank).item()
        for bank in (local, torch.cat([local, remote]), remote)
    ]
    assert counted == pytest.approx(expected)


@settings(deadline=None)
@given(m=st.integers(1, 20), clients=st.integers(2, 20), data=st.data())
def test_remote_never_exceeds_union_nor_union_local(
    m: int, clients: int, data: st.DataObject
) -> None:
    a = data.draw(st.integers(0, clients - 1))
    local, union, remote = false_negative_ratios(m, clients, a)
    if a == clients - 1:
        assert remote == pytest.approx(local)
        assert union == pytest.approx(local)
    else:
        assert remote < union < local


def test_false_negatives_per_query_and_refusals() -> None:
    shares = count_false_negatives(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1, 3]))
    assert shares.dtype == torch.float64
    assert shares.tolist() == [0.5, 0.25, 0]
    assert false_negative_ratios(2, 1, 0) == (0.5, 0.5, 0)
    with pytest.raises(FurlongError, match="a = 5"):
        false_negative_ratios(2, 5, 5)
    with pytest.raises(FurlongError, match="empty bank"):
        count_false_negatives(torch.tensor([0]), torch.tensor([], dtype=torch.int64))
