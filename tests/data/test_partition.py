"""Partitions: the published splits exactly, the properties all rules share, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from furlong.data.heterogeneity import beta_cib, beta_hetero
from furlong.data.partition import (
    RULES,
    Partition,
    class_windows,
    mfcl_window,
    partition,
    proportional_sizes,
)
from furlong.errors import FurlongError

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden.json").read_text())


def balanced(n_classes: int, each: int) -> Tensor:
    """Labels of ``each`` images per class, classes interleaved."""
    return torch.arange(n_classes).repeat(each)


def held(p: Partition, labels: Tensor) -> list[list[int]]:
    return [sorted(set(labels[i].tolist())) for i in p.indices]


def check(p: Partition, n: int) -> None:
    """What every partition promises."""
    together = torch.cat(p.indices)
    assert together.dtype == torch.int64
    assert len(set(together.tolist())) == len(together) == n - p.unused
    assert 0 <= together.min() <= together.max() < n
    assert min(p.sizes) > 0
    assert all(torch.equal(i, i.sort().values) for i in p.indices)


@pytest.mark.parametrize("name", GOLDEN["mfcl_scenarios"])
def test_mfcl_scenarios_match_the_tables(name: str) -> None:
    scenario = GOLDEN["mfcl_scenarios"][name]
    n, clients, s = scenario["n"], scenario["M"], scenario["classes_per_client"]
    for client, (first, last) in scenario["clients_first_last"].items():
        window = mfcl_window(int(client) - 1, s, n)
        assert [window[0] + 1, window[-1] + 1] == [first, last]
        assert len(set(window)) == s
    labels = balanced(n, s)  # every class has s holders: one image for each
    p = partition(f"mfcl:{s}", labels, clients, seed=3)
    check(p, len(labels))
    assert p.unused == 0
    assert held(p, labels) == [sorted(mfcl_window(m, s, n)) for m in range(clients)]
    counts = p.class_counts(labels, n)
    assert beta_cib(counts) == pytest.approx(scenario["beta_cib"], abs=1e-9)
    assert beta_hetero(counts) == pytest.approx(scenario["beta_hetero_over_M2"], abs=1e-9)
    assert beta_hetero(counts, "MM1") == pytest.approx(scenario["beta_hetero_over_MM1"], abs=1e-9)


def test_mfcl_sequential_never_shifts() -> None:
    assert mfcl_window(9, 2, 10, "sequential") == [8, 9]
    assert mfcl_window(9, 2, 10) == [9, 0]
    labels = balanced(10, 4)
    assert held(partition("mfcl:2:sequential", labels, 10), labels)[9] == [8, 9]


def test_mfcl_shards_differ_by_at_most_one() -> None:
    labels = balanced(10, 50)
    p = partition("mfcl:3", labels, 10)
    counts = p.class_counts(labels, 10)
    assert set(counts[counts > 0].tolist()) == {16, 17}
    assert p.unused == 0


@pytest.mark.parametrize(("s", "n", "each"), [(3, 10, 5000), (6, 10, 5000), (60, 100, 500)])
def test_mfcl_clients_of_cifar_are_equal(s: int, n: int, each: int) -> None:
    p = partition(f"mfcl:{s}", balanced(n, each), n)
    assert p.unused == 0
    assert max(abs(size - each) for size in p.sizes) <= 2


@settings(deadline=None)
@given(clients=st.integers(1, 30), s=st.integers(1, 12), n=st.integers(1, 12))
def test_mfcl_covers_every_class_evenly(clients: int, s: int, n: int) -> None:
    if s > n or clients * s < n:
        return
    held_by = torch.zeros(n, dtype=torch.int64)
    for m in range(clients):
        held_by[mfcl_window(m, s, n)] += 1
    assert held_by.min() >= 1
    assert held_by.max() - held_by.min() <= 1


def test_classes_gives_consecutive_pairs_and_the_published_metrics() -> None:
    labels = balanced(10, 20)
    p = partition("classes:2", labels, 5)
    assert held(p, labels) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert p.unused == 0
    counts = p.class_counts(labels, 10)
    # The published figures leave out the terms P^m(v) = ς (at most 1e-4); the golden ones do not.
    assert beta_cib(counts) == pytest.approx(math.log2(5), abs=2e-4)
    assert beta_hetero(counts, "MM1") == pytest.approx(18.9316, abs=1e-4)
    assert beta_hetero(counts, "M2") == pytest.approx(15.1453, abs=1e-4)
    golden = GOLDEN["mfcl_scenarios"]["Sc2"]  # the closed forms depend on s/n only
    assert beta_cib(counts) == pytest.approx(golden["beta_cib"], abs=1e-9)
    assert beta_hetero(counts) == pytest.approx(golden["beta_hetero_over_M2"], abs=1e-4)
    same = partition("fcl_noniid1_standin", labels, None)
    assert all(torch.equal(a, b) for a, b in zip(p.indices, same.indices, strict=True))


def test_classes_leaves_the_parts_nobody_takes() -> None:
    # 4 clients × 3 classes of 10: two parts per class, the second one taken for two classes only.
    assert class_windows(4, 3, 10) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    labels = balanced(10, 20)
    p = partition("classes:3", labels, 4)
    check(p, 200)
    assert p.sizes == (30, 30, 30, 30)
    assert p.unused == 80


@pytest.mark.parametrize("seed", range(5))
def test_second_fcl_standin(seed: int) -> None:
    labels = balanced(10, 20)
    p = partition("fcl_noniid2_standin", labels, 10, seed=seed)
    counts = p.class_counts(labels, 10)
    assert p.sizes == (20,) * 10
    assert ((counts > 0).sum(1) == 2).all()
    assert ((counts > 0).sum(0) == 2).all()


@settings(deadline=None)
@given(
    clients=st.integers(1, 12), k=st.integers(1, 8), n=st.integers(1, 8), seed=st.integers(0, 99)
)
def test_shards_are_of_different_classes(clients: int, k: int, n: int, seed: int) -> None:
    if k > n or clients * k < n:
        return
    labels = balanced(n, 12)
    p = partition(f"shards:{k}", labels, clients, seed=seed)
    check(p, len(labels))
    assert p.unused == 0
    assert all(len(classes) == k for classes in held(p, labels))


@settings(deadline=None)
@given(n=st.integers(1, 200), clients=st.integers(1, 20), seed=st.integers(0, 1000))
def test_iid_sizes_differ_by_one(n: int, clients: int, seed: int) -> None:
    if clients > n:
        return
    p = partition("iid", None, clients, n=n, seed=seed)
    check(p, n)
    assert p.unused == 0
    assert max(p.sizes) - min(p.sizes) <= 1


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=8, max_size=120),
    clients=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_stratified_evens_out_classes_and_sizes(labels: list[int], clients: int, seed: int) -> None:
    y = torch.tensor(labels)
    p = partition("iid:stratified", y, clients, seed=seed)
    check(p, len(y))
    assert max(p.sizes) - min(p.sizes) <= 1
    counts = p.class_counts(y, 5)
    assert int((counts.amax(0) - counts.amin(0)).max()) <= 1


@settings(max_examples=40, deadline=None)
@given(
    alpha=st.floats(0.3, 100),
    clients=st.integers(1, 6),
    least=st.integers(1, 15),
    seed=st.integers(0, 1000),
)
def test_dirichlet_honours_the_minimum(alpha: float, clients: int, least: int, seed: int) -> None:
    labels = balanced(10, 40)
    p = partition(f"dirichlet:{alpha}:{least}", labels, clients, seed=seed)
    check(p, 400)
    assert p.unused == 0
    assert min(p.sizes) >= least


@settings(max_examples=40, deadline=None)
@given(alpha=st.floats(0.05, 1e6), clients=st.integers(1, 8), seed=st.integers(0, 1000))
def test_dirichlet_balanced_sizes(alpha: float, clients: int, seed: int) -> None:
    labels = balanced(10, 80)
    p = partition(f"dirichlet_balanced:{alpha}", labels, clients, seed=seed)
    check(p, 800)
    assert p.unused <= 10 * clients  # the floors
    # Equal within 5 % and what the floors take.
    assert max(p.sizes) <= 1.05 * 800 / clients
    assert min(p.sizes) >= 0.95 * 800 / clients - 10


@pytest.mark.parametrize("rule", ["dirichlet", "dirichlet_balanced"])
def test_dirichlet_limits(rule: str) -> None:
    labels = balanced(10, 100)
    even = partition(f"{rule}:1e9", labels, 5).class_counts(labels, 10)
    assert beta_hetero(even) < 0.01
    assert beta_cib(even) < 0.01
    sharp = partition(f"{rule}:0.0001", labels, 10).class_counts(labels, 10).double()
    assert (sharp.amax(1) / sharp.sum(1)).mean() > 0.85
    middle = partition(f"{rule}:0.5", labels, 5).class_counts(labels, 10)
    assert beta_hetero(even) < beta_hetero(middle) < beta_hetero(sharp)


@settings(deadline=None)
@given(
    total=st.integers(0, 10_000),
    weights=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=20),
)
def test_proportional_sizes_sum_up(total: int, weights: list[float]) -> None:
    sizes = proportional_sizes(total, weights)
    assert sum(sizes) == total
    assert min(sizes) >= 0
    top = max(weights)
    exact = [total * (w / top) / sum(v / top for v in weights) for w in weights]
    assert all(abs(s - e) <= 1 + 1e-6 for s, e in zip(sizes, exact, strict=True))


def test_quantity_rules() -> None:
    p = partition("quantity:1,2,5", None, 3, n=80)
    check(p, 80)
    assert p.sizes == (10, 20, 50)
    assert partition("quantity:powerlaw:1", None, 3, n=110).sizes == (60, 30, 20)
    assert partition("quantity:lognormal:0", None, 4, n=40).sizes == (10,) * 4
    skewed = partition("quantity:lognormal:1", None, 4, n=1000)
    check(skewed, 1000)
    assert max(skewed.sizes) > 1.5 * min(skewed.sizes)


def test_natural_is_one_client_per_group() -> None:
    groups = torch.tensor([7, 2, 7, 2, 5])
    for clients in (None, 0, 3):
        p = partition("natural", None, clients, groups=groups)
        assert [i.tolist() for i in p.indices] == [[1, 3], [4], [0, 2]]
    with pytest.raises(FurlongError, match="3 groups, not 4"):
        partition("natural", None, 4, groups=groups)


SPECS = [
    "iid",
    "iid:stratified",
    "shards:2",
    "mfcl:2",
    "classes:2",
    "dirichlet:0.5",
    "dirichlet_balanced:0.5",
    "quantity:lognormal:0.5",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_seed_decides(spec: str) -> None:
    labels = balanced(10, 40)
    one, again, other = (partition(spec, labels, 10, seed=s) for s in (1, 1, 2))
    check(one, 400)
    assert (len(one), one.name, one.n, one.seed) == (10, spec, 400, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.indices, again.indices, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.indices, other.indices, strict=True))
    assert one.class_counts(labels, 10).sum() == sum(one.sizes)


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("dirichelt:1", 5, "Did you mean 'dirichlet'"),
        ("", 5, "Unknown partition"),
        ("iid", 41, "41 clients cannot share 40 images"),
        ("iid", 0, "at least 1"),
        ("iid", None, "at least 1"),
        ("iid", -2, "at least 1"),
        ("iid:strat", 5, "stratified"),
        ("classes", 5, "write it as classes:K"),
        ("classes:", 5, "write it as classes:K"),
        ("classes:2:3", 5, "write it as classes:K"),
        ("classes:two", 5, "whole number, not 'two'"),
        ("classes:11", 5, "only 10 classes"),
        ("classes:0", 5, "at least 1"),
        ("classes:1", 5, "cover only 5 of the 10"),
        ("shards:1", 5, "at least 2 classes per client or 10 clients"),
        ("mfcl:1", 5, "cover only 5"),
        ("mfcl:2:tabel", 10, "Did you mean 'table'"),
        ("dirichlet:-1", 2, "above 0"),
        ("dirichlet:nan", 2, "finite"),
        ("dirichlet:x", 2, "must be a number"),
        ("dirichlet:1", 5, "need 50 images, there are 40"),
        ("dirichlet:0.0001:13", 3, "1000 draws"),
        ("dirichlet:1:1.5", 2, "whole number"),
        ("quantity:1,2", 5, "2 weights for 5 clients"),
        ("quantity:1,0", 2, "above 0"),
        ("quantity:lognormal", 2, "write it as"),
        ("quantity:zipf:1", 2, "write it as"),
        ("quantity:powerlaw:20", 3, "client 1 would get no image"),
        ("natural", None, "the data has none"),
        ("fcl_noniid1_standin", 4, "defined for 5 clients"),
    ],
)
def test_refusals(spec: str, clients: int | None, message: str) -> None:
    with pytest.raises(FurlongError, match=message):
        partition(spec, balanced(10, 4), clients)


@pytest.mark.parametrize(
    "spec", ["classes:2", "shards:2", "mfcl:2", "dirichlet:1", "dirichlet_balanced:1",
             "iid:stratified", "fcl_noniid2_standin"]
)  # fmt: skip
def test_rules_by_label_refuse_unlabelled_images(spec: str) -> None:
    with pytest.raises(FurlongError, match="needs labels"):
        partition(spec, None, 5, n=100)
    with pytest.raises(FurlongError, match="labels run from -1 to 3"):
        partition(spec, torch.tensor([-1, 0, 3] * 10), 5)


def test_inconsistent_requests() -> None:
    with pytest.raises(FurlongError, match="unknown"):
        partition("iid", None, 5)
    with pytest.raises(FurlongError, match="disagree"):
        partition("iid", balanced(2, 5), 5, n=11)
    with pytest.raises(FurlongError, match="negative"):
        partition("iid", None, 5, n=10, seed=-1)
    with pytest.raises(FurlongError, match="outside the 3 classes"):
        partition("classes:2", balanced(4, 5), 2, n_classes=3)
    with pytest.raises(FurlongError, match="cannot share 0 images"):
        partition("iid", None, 1, n=0)


def test_absent_classes_are_tolerated() -> None:
    labels = torch.tensor([0, 2] * 30)
    for spec in ("dirichlet:1", "dirichlet_balanced:1", "iid:stratified", "mfcl:2"):
        check(partition(spec, labels, 3, n_classes=4), 60)


def test_rule_names_are_public() -> None:
    assert {"iid", "natural", "fcl_noniid1_standin", "fcl_noniid2_standin"} <= set(RULES)
