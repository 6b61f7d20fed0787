"""Sinkhorn codes and k-means: the specification's lists (2.5, 2.6, 2.14) and slow references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.nn import clustering
from furlong.nn.clustering import (
    equalised_kmeans,
    fit_prototypes,
    nearest,
    random_rows,
    sinkhorn,
    spherical_kmeans,
    unit_rows,
)
from furlong.nn.losses import IGNORED, cluster_agreement, cluster_cross_entropy, swapped_prediction


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return F.normalize(draw(*shape, seed=seed, dtype=dtype), dim=-1)


# ---------------------------------------------------------------- Sinkhorn (2.5, 2.14)


def slow_sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """The specification's words: Q = exp(s/ε)ᵀ of sum 1, rows to 1/P, columns to 1/B, times B."""
    q = (scores / epsilon).exp().T
    q = q / q.sum()
    for _ in range(iterations):
        q = q / q.sum(1, keepdim=True) / q.shape[0]
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_sinkhorn_is_the_definition(epsilon: float, iterations: int) -> None:
    scores = unit(64, 16, dtype=torch.float64) @ unit(10, 16, seed=1, dtype=torch.float64).T
    got = sinkhorn(scores / epsilon, iterations)
    torch.testing.assert_close(got, slow_sinkhorn(scores, epsilon, iterations))
    half = sinkhorn((scores / epsilon).float(), iterations).double()
    torch.testing.assert_close(half, got, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("iterations", [0, 1, 3, 50])
def test_rows_sum_to_one_after_any_number_of_iterations(iterations: int) -> None:
    codes = sinkhorn(draw(64, 10) / 0.05, iterations)
    torch.testing.assert_close(codes.sum(1), torch.ones(64, dtype=torch.float64))


def test_clusters_tend_to_equal_shares() -> None:
    scores = unit(64, 128, dtype=torch.float64) @ unit(10, 128, seed=1, dtype=torch.float64).T
    few, many = (sinkhorn(scores / 0.05, n).sum(0) for n in (3, 200))
    assert (many - 6.4).abs().max() < 1e-12
    assert 1e-6 < (few - 6.4).abs().max() < 1.3  # the specification's draw: 5.68 to 7.60


def test_constant_scores_give_uniform_codes_and_ln_p(golden: dict[str, Any]) -> None:
    scores = torch.full((2, 128, 300), 0.7)
    codes = sinkhorn(scores / 0.05, 3)
    torch.testing.assert_close(codes, torch.full_like(codes, 1 / 300))
    want = golden["losses"]["swav_constant_scores_300_prototypes"]
    assert want == pytest.approx(math.log(300))
    assert swapped_prediction(scores, codes, 0.1).item() == pytest.approx(want, abs=1e-5)


def test_codes_carry_no_gradient() -> None:
    scores = draw(2, 8, 5).requires_grad_()
    codes = sinkhorn(scores / 0.05, 3)
    assert not codes.requires_grad
    fixed = codes.clone().requires_grad_()
    swapped_prediction(scores, fixed, 0.1).backward()
    assert fixed.grad is None
    assert scores.grad.abs().max() > 0


def test_permuting_prototypes_permutes_codes() -> None:
    scores, order = draw(32, 9), torch.randperm(9, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(sinkhorn(scores[:, order], 3), sinkhorn(scores, 3)[:, order])


def test_a_batch_of_problems_is_each_by_itself() -> None:
    scores = draw(3, 16, 5)
    each = torch.stack([sinkhorn(s / 0.05, 3) for s in scores])
    torch.testing.assert_close(sinkhorn(scores / 0.05, 3), each)


@pytest.mark.parametrize("epsilon", [0.05, 1e-3, 1e-6])
def test_sinkhorn_is_finite_for_small_temperatures(epsilon: float) -> None:
    """Float32 ends at e^88, and cosines over 0.05 already span 40; zero columns must stay zero."""
    near = torch.ones(64, 10).index_fill_(1, torch.tensor([3]), -1.0)  # nobody likes cluster 3
    for scores in (unit(64, 8) @ unit(10, 8, seed=1).T, near):
        codes = sinkhorn(scores / epsilon, 30)
        assert codes.isfinite().all()
        torch.testing.assert_close(codes.sum(1), torch.ones(64))


def test_a_tolerance_stops_early_and_only_then() -> None:
    hard = (25 * unit(64, 64) @ unit(8, 64, seed=1).T).log_softmax(1)
    by_then = [float((sinkhorn(hard, n) - sinkhorn(hard, n + 1)).abs().sum()) for n in (11, 21)]
    assert by_then[0] > 1e-2 > by_then[1]
    assert torch.equal(sinkhorn(hard, 1000, tolerance=1e-2), sinkhorn(hard, 21))
    assert torch.equal(sinkhorn(hard, 16, tolerance=1e-2), sinkhorn(hard, 16))
    assert torch.equal(sinkhorn(hard, 40, tolerance=1e-30), sinkhorn(hard, 40))


def test_orchestra_codes_of_a_memory() -> None:
    rows = unit(128, 512, dtype=torch.float64)
    centroids = unit(16, 512, seed=1, dtype=torch.float64)
    codes = clustering._equal_codes(rows @ centroids.T, 25.0, 10, 0.0)
    torch.testing.assert_close(codes.sum(1), torch.ones(128, dtype=torch.float64))
    assert (codes.sum(0) - 8).abs().max() < 1e-6


# ---------------------------------------------------------------- k-means (2.6)


def slow_kmeans(rows: Tensor, seeds: Tensor, iterations: int) -> tuple[Tensor, list[int]]:
    centroids = [seed.clone() for seed in seeds]

    def assign() -> list[int]:
        return [max(range(len(centroids)), key=lambda k: float(r @ centroids[k])) for r in rows]

    for _ in range(iterations):
        assigned = assign()
        for k in range(len(centroids)):
            mine = [row for row, a in zip(rows, assigned, strict=True) if a == k]
            if mine:
                total = torch.stack(mine).sum(0)
                centroids[k] = total / total.norm()
    return torch.stack(centroids), assign()


@pytest.mark.parametrize("block", [1, 50, 1 << 22])
def test_kmeans_is_the_loop(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustering, "BLOCK", block)  # in parts or at once
    rows = unit(60, 6, dtype=torch.float64)
    centroids, assigned = spherical_kmeans(rows, rows[:7], 10)
    want, labels = slow_kmeans(rows, rows[:7], 10)
    torch.testing.assert_close(centroids, want)
    assert assigned.tolist() == labels


def test_orthonormal_directions_are_recovered_from_seeds_that_cover_them() -> None:
    kinds = torch.arange(40) % 8
    rows = torch.eye(8)[kinds]
    for seed in range(5):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        centroids, assigned = spherical_kmeans(rows, rows[:8][order])
        assert torch.equal(centroids[assigned], rows)


def test_an_empty_cluster_keeps_its_centroid() -> None:
    rows = unit(20, 4).abs()
    rows = F.normalize(rows, dim=1)
    away = torch.tensor([[-1.0, 0, 0, 0]])
    centroids, assigned = spherical_kmeans(rows, torch.cat([rows[:2], away]))
    assert torch.equal(centroids[2:], away)
    assert set(assigned.tolist()) == {0, 1}


def test_a_cluster_that_cancels_out_keeps_its_centroid() -> None:
    rows = torch.tensor([[1.0, 0], [-1.0, 0]])
    seed = torch.tensor([[0.0, 1.0]])
    assert torch.equal(spherical_kmeans(rows, seed)[0], seed)


def test_centroids_have_unit_norm() -> None:
    centroids, assigned = spherical_kmeans(unit(200, 16), unit(200, 16)[:20])
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(20))
    assert assigned.shape == (200,)
    torch.manual_seed(0)
    local = equalised_kmeans(unit(128, 32), 16)
    torch.testing.assert_close(local.norm(dim=1), torch.ones(16))


class Largest(TorchDispatchMode):
    """The most values that any operation inside has returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.most = max(self.most, out.numel())
        return out


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank of 50,000 against 3,000 centroids would be 600 MB of similarities at once."""
    rows, seeds = unit(5000, 4), unit(300, 4, seed=1)
    with Largest() as largest:
        at_once = spherical_kmeans(rows, seeds, 2)
    assert largest.most == 5000 * 300
    monkeypatch.setattr(clustering, "BLOCK", 30_000)
    with Largest() as largest:
        in_parts = spherical_kmeans(rows, seeds, 2)
    assert largest.most == 30_000
    torch.testing.assert_close(in_parts[0], at_once[0])


def test_random_rows_are_different_ones() -> None:
    rows = torch.arange(12.0)[:, None]
    torch.manual_seed(0)
    assert sorted(random_rows(rows, 12)[:, 0].tolist()) == rows[:, 0].tolist()
    for count in (0, 13):
        with pytest.raises(ValueError, match=f"{count} of 12"):
            random_rows(rows, count)


def test_unit_rows_leave_unit_rows_alone() -> None:
    rows = draw(50, 128, dtype=torch.float32)
    once = unit_rows(rows)
    torch.testing.assert_close(once, F.normalize(rows, dim=1))
    assert torch.equal(unit_rows(once), once)


# ---------------------------------------------------------------- DeepCluster's loss (2.6)


def test_a_batch_without_clusters_costs_nothing() -> None:
    z = draw(4, 6).requires_grad_()
    ignored = torch.full((4,), IGNORED)
    loss = cluster_cross_entropy(z, unit(3, 6, dtype=torch.float64), ignored, 0.1)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(z.grad, torch.zeros_like(z))
    assert F.cross_entropy(torch.randn(4, 3), ignored).isnan()  # why it is guarded


def test_ignored_rows_do_not_count() -> None:
    z, prototypes = draw(6, 5), unit(4, 5, seed=1, dtype=torch.float64)
    assigned = torch.tensor([0, IGNORED, 3, 1, IGNORED, 2])
    kept = assigned != IGNORED
    want = F.cross_entropy(F.normalize(z[kept], dim=1) @ prototypes.T / 0.1, assigned[kept])
    torch.testing.assert_close(cluster_cross_entropy(z, prototypes, assigned, 0.1), want)


def test_prototypes_receive_no_gradient() -> None:
    z, prototypes = draw(6, 5).requires_grad_(), draw(4, 5, seed=1).requires_grad_()
    cluster_cross_entropy(z, prototypes, torch.zeros(6, dtype=torch.long), 0.1).backward()
    assert prototypes.grad is None
    assert z.grad.abs().max() > 0
    z.grad = None
    target = draw(6, 5, seed=2).requires_grad_()
    cluster_agreement(z, target, prototypes, 0.1).backward()
    assert prototypes.grad is None
    assert target.grad is None
    assert z.grad.abs().max() > 0


def test_permuting_cluster_numbers_changes_nothing() -> None:
    z, prototypes = draw(12, 5), unit(4, 5, seed=1, dtype=torch.float64)
    assigned, order = torch.arange(12) % 4, torch.tensor([2, 0, 3, 1])
    place = order.argsort()  # prototype k is now at place[k]
    torch.testing.assert_close(
        cluster_cross_entropy(z, prototypes[order], place[assigned], 0.1),
        cluster_cross_entropy(z, prototypes, assigned, 0.1),
    )


# ---------------------------------------------------------------- SwAV's and Orchestra's losses


def test_swapped_prediction_is_the_definition() -> None:
    s1, s2 = draw(7, 5), draw(7, 5, seed=1)
    q1, q2 = (draw(7, 5, seed=s).softmax(1) for s in (2, 3))
    total = 0.0
    for b in range(7):
        for q, s in ((q1, s2), (q2, s1)):
            total -= float((q[b] * (s[b] / 0.1).log_softmax(0)).sum())
    got = swapped_prediction(torch.stack([s1, s2]), torch.stack([q1, q2]), 0.1)
    assert got.item() == pytest.approx(total / 14)
    swapped = swapped_prediction(torch.stack([s2, s1]), torch.stack([q2, q1]), 0.1)
    torch.testing.assert_close(swapped, got)


def test_orchestra_loss_with_equal_scores() -> None:
    same = unit(1, 16).expand(128, 16)
    loss = cluster_agreement(draw(8, 16, dtype=torch.float32), draw(8, 16).float(), same, 0.1)
    assert loss.item() == pytest.approx(math.log(128), abs=1e-5)
    assert math.log(128) == pytest.approx(4.852030, abs=1e-6)


def test_orchestra_loss_is_the_definition() -> None:
    online, target, centroids = (unit(6, 8, seed=s, dtype=torch.float64) for s in range(3))
    total = 0.0
    for z, t in zip(online, target, strict=True):
        wanted = (centroids @ t / 0.1).softmax(0)
        total -= float((wanted * (centroids @ z / 0.1).softmax(0).log()).sum())
    got = cluster_agreement(3 * online, 5 * target, centroids, 0.1)
    assert got.item() == pytest.approx(total / 6)


# ---------------------------------------------------------------- Orchestra's clusterings (2.14)


def test_equalised_clusters_are_about_equal() -> None:
    """Rows crowd around two directions; plain k-means from the same rows is lopsided."""
    rows = F.normalize(
        torch.cat([torch.eye(2, 8)[0] + 0.3 * draw(112, 8), torch.eye(2, 8)[1] + draw(16, 8)]),
        dim=1,
    ).float()
    torch.manual_seed(0)
    sizes = nearest(rows, equalised_kmeans(rows, 8)).bincount(minlength=8)
    torch.manual_seed(0)
    plain = spherical_kmeans(rows, random_rows(rows, 8), 5)[1].bincount(minlength=8)
    assert sizes.max() < plain.max()


def test_an_empty_equalised_cluster_gets_a_random_row() -> None:
    rows = torch.eye(4)[[0, 0, 0, 0, 1, 1, 1, 1]]  # two directions cannot fill five clusters
    torch.manual_seed(0)
    centroids = equalised_kmeans(rows, 5)
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(5))
    assert all(any(torch.allclose(c, r) for r in rows) for c in centroids)


def test_prototypes_move_to_the_rows_they_stand_for() -> None:
    kinds = F.normalize(torch.eye(4, 32), dim=1)
    rows = F.normalize(kinds.repeat(8, 1) + 0.05 * draw(32, 32, dtype=torch.float32), dim=1)
    start = unit(4, 32, seed=5)
    before = start.clone()
    fitted = fit_prototypes(start, rows, 0.1, steps=200)
    assert torch.equal(start, before)
    assert not fitted.requires_grad
    torch.testing.assert_close(fitted.norm(dim=1), torch.ones(4))
    assert nearest(rows, start).bincount(minlength=4).tolist() != [8, 8, 8, 8]
    assert nearest(rows, fitted).bincount(minlength=4).tolist() == [8, 8, 8, 8]
    assert (fitted @ kinds.T).amax(1).min() > (start @ kinds.T).amax(1).max()


def test_one_step_of_the_fit_by_hand() -> None:
    start, rows = unit(5, 6, dtype=torch.float64), unit(12, 6, seed=1, dtype=torch.float64)
    weight = start.clone().requires_grad_()
    codes = sinkhorn((25 * rows @ start.T).log_softmax(1), 100, 1e-2)
    soft = (rows @ weight.T / 0.1).softmax(1)
    cosine = (codes * soft).sum(1) / codes.norm(dim=1) / soft.norm(dim=1)
    (-cosine.mean()).backward()
    want = start - 0.01 * (weight.grad + 1e-4 * start)
    got = fit_prototypes(start, rows, 0.1, steps=1)
    torch.testing.assert_close(got, F.normalize(want, dim=1))
