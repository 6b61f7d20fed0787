"""Losses against published values, symmetries, and references written as loops over pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from furlong.nn.losses import byol, cosine_simsiam, info_nce, nt_xent, nt_xent_views

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["losses"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def cos(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


def slow_nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> float:
    rows, size, total = [*z1, *z2], len(z1), 0.0
    for i, anchor in enumerate(rows):
        others = [math.exp(cos(anchor, r) / temperature) for k, r in enumerate(rows) if k != i]
        partner = math.exp(cos(anchor, rows[(i + size) % (2 * size)]) / temperature)
        total -= math.log(partner / sum(others))
    return total / (2 * size)


def slow_info_nce(query: Tensor, key: Tensor, negatives: Tensor, temperature: float) -> float:
    total = 0.0
    for q, k in zip(query, key, strict=True):
        positive = math.exp(cos(q, k) / temperature)
        total -= math.log(
            positive / (positive + sum(math.exp(cos(q, n) / temperature) for n in negatives))
        )
    return total / len(query)


def test_nt_xent_golden_values() -> None:
    same = torch.ones(4, 8)
    assert nt_xent(same, same, 0.5).item() == pytest.approx(
        GOLDEN["ntxent_N4_all_identical"], abs=1e-6
    )
    pairs = torch.eye(4)
    assert nt_xent(pairs, pairs, 0.5).item() == pytest.approx(
        GOLDEN["ntxent_N4_orthonormal_pairs_tau0.5"], abs=1e-6
    )


@pytest.mark.parametrize("temperature", [0.07, 0.5, 2.0])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_nt_xent_equals_the_loop_over_pairs(size: int, temperature: float) -> None:
    z1, z2 = draw(size, 6), draw(size, 6, seed=1)
    expected = slow_nt_xent(z1, z2, temperature)
    assert nt_xent(z1, z2, temperature).item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nt_xent_of_two_views_is_nt_xent(size: int) -> None:
    z1, z2 = draw(size, 6), draw(size, 6, seed=1)
    both = nt_xent_views(torch.stack([z1, z2]), 0.2)
    torch.testing.assert_close(both, nt_xent(z1, z2, 0.2))


def test_nt_xent_of_several_views_equals_the_loop() -> None:
    views, size, temperature = 3, 4, 0.3
    z, total = draw(views, size, 6), 0.0
    for v in range(views):
        for i in range(size):
            rest = [z[w, k] for w in range(views) for k in range(size) if k != i]
            others = sum(math.exp(cos(z[v, i], row) / temperature) for row in rest)
            for w in range(views):
                if w != v:
                    own = math.exp(cos(z[v, i], z[w, i]) / temperature)
                    total -= math.log(own / (own + others))
    expected = total / (views * size * (views - 1))
    assert nt_xent_views(z, temperature).item() == pytest.approx(expected, abs=1e-10)


def test_nt_xent_of_a_single_image_moves_nothing() -> None:
    z = draw(3, 1, 6).requires_grad_()
    nt_xent_views(z, 0.2).backward()
    assert z.grad is not None
    assert not z.grad.any()


def test_nt_xent_symmetries() -> None:
    z1, z2 = draw(5, 6), draw(5, 6, seed=1)
    loss = nt_xent(z1, z2, 0.2)
    torch.testing.assert_close(nt_xent(z2, z1, 0.2), loss)
    torch.testing.assert_close(nt_xent(30 * z1, 0.01 * z2, 0.2), loss)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(nt_xent(z1[order], z2[order], 0.2), loss)


def test_nt_xent_gradient_is_orthogonal_to_the_rows() -> None:
    z1, z2 = draw(5, 6).requires_grad_(), draw(5, 6, seed=1).requires_grad_()
    nt_xent(z1, z2, 0.2).backward()
    for z in (z1, z2):
        assert z.grad is not None
        assert z.grad.norm(dim=1).min() > 1e-4
        assert (z.grad * z).sum(dim=1).abs().max() < 1e-12


def test_losses_stay_finite_at_extreme_temperatures() -> None:
    z1, z2 = draw(4, 6).float().requires_grad_(), draw(4, 6, seed=1).float()
    (nt_xent(z1, z2, 1e-4) + info_nce(z1, z2, z2, 1e-4)).backward()
    assert z1.grad is not None
    assert z1.grad.isfinite().all()


def test_nt_xent_gradient_is_that_of_finite_differences() -> None:
    z1, z2 = draw(3, 4).requires_grad_(), draw(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: nt_xent(a, b, 0.5), (z1, z2))


def test_info_nce_golden_values() -> None:
    rows = torch.eye(2)[:1].repeat(3, 1)
    orthogonal = torch.eye(2)[1:].repeat(4096, 1)
    assert info_nce(rows, rows, orthogonal, 0.1).item() == pytest.approx(
        GOLDEN["infonce_aligned_K4096_orthogonal_negs_tau0.1"], abs=1e-5
    )
    for banks, name in ((1, "all_equal_K4096"), (5, "all_equal_5_banks_of_4096")):
        same = rows[:1].repeat(4096 * banks, 1)
        loss = info_nce(rows, rows, same, 0.1).item()
        assert loss == pytest.approx(GOLDEN[f"infonce_{name}"], abs=1e-5)


def test_info_nce_equals_the_loop_over_pairs() -> None:
    query, key, negatives = draw(4, 6), draw(4, 6, seed=1), draw(9, 6, seed=2)
    expected = slow_info_nce(query, key, negatives, 0.2)
    assert info_nce(query, key, negatives, 0.2).item() == pytest.approx(expected, abs=1e-10)
    assert info_nce(3 * query, key / 7, 2 * negatives, 0.2).item() == pytest.approx(expected)


def test_info_nce_without_negatives_is_zero() -> None:
    assert info_nce(draw(4, 6), draw(4, 6, seed=1), torch.empty(0, 6).double(), 0.1).item() == 0


@pytest.mark.parametrize(("name", "sign"), [("equal", 1.0), ("orthogonal", 0.0), ("opposite", -1)])
def test_byol_golden_values(name: str, sign: float) -> None:
    prediction = torch.eye(2)[:1].repeat(3, 1)
    target = sign * prediction if sign else torch.eye(2)[1:].repeat(3, 1)
    assert byol(prediction, 5 * target).item() == pytest.approx(GOLDEN[f"byol_{name}"], abs=1e-6)


def test_byol_is_the_squared_distance_of_unit_vectors() -> None:
    y, t = draw(5, 6), draw(5, 6, seed=1)
    unit = [z / z.norm(dim=1, keepdim=True) for z in (y, t)]
    torch.testing.assert_close(byol(y, t), (unit[0] - unit[1]).square().sum(dim=1).mean())
    torch.testing.assert_close(byol(y, t), 2 + 2 * cosine_simsiam(y, t))
    assert cosine_simsiam(y, y).item() == pytest.approx(GOLDEN["simsiam_equal"])


@pytest.mark.parametrize("loss", [byol, cosine_simsiam])
def test_no_gradient_reaches_the_target(loss: object) -> None:
    assert callable(loss)
    y, t = draw(5, 6).requires_grad_(), draw(5, 6, seed=1).requires_grad_()
    loss(y, t).backward()
    assert t.grad is None
    assert y.grad is not None
    assert (y.grad * y).sum(dim=1).abs().max() < 1e-12
