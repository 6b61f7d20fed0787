"""InstaHide's mixtures: the rules for coefficients and signs, and both variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from furlong.errors import FurlongError
from furlong.methods import instahide as module
from furlong.methods.instahide import check_limits, coefficients, instahide


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_coefficients_keep_the_rules() -> None:
    inside = coefficients(5000, 4, 0.65)
    torch.testing.assert_close(inside.sum(dim=1), torch.ones(5000))
    assert inside.min() >= 0
    assert inside.max() <= 0.65
    assert inside.max() > 0.64  # the limit cuts a distribution off, it does not scale one
    cross = coefficients(5000, 6, 0.65, private=2, private_share=0.3)
    torch.testing.assert_close(cross.sum(dim=1), torch.ones(5000))
    assert cross.max() <= 0.65
    assert cross[:, :2].sum(dim=1).min() >= 0.3


@pytest.mark.parametrize(("mix", "acceptance"), [(4, 0.928), (2, 0.368)])
def test_acceptance_of_the_first_draw(
    mix: int, acceptance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec 2.10: so many rows need no second draw."""
    sizes = []
    real = torch.randn

    def spy(*shape: int) -> torch.Tensor:
        sizes.append(shape[0])
        return real(*shape)

    monkeypatch.setattr(module.torch, "randn", spy)
    coefficients(200_000, mix, 0.65)
    assert 1 - sizes[1] / sizes[0] == pytest.approx(acceptance, abs=0.005)


def test_values_are_mixtures_with_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 3, 8, 8)
    mixtures = []
    real = module._signed

    def spy(mixed: torch.Tensor) -> torch.Tensor:
        mixtures.append(mixed)
        return real(mixed)

    monkeypatch.setattr(module, "_signed", spy)
    hidden = instahide(x, 4, 0.65)
    again = instahide(x, 4, 0.65)
    assert torch.equal(hidden.abs(), mixtures[0].abs())
    flipped = (hidden * mixtures[0]).sign()
    assert abs(flipped.mean().item()) < 0.05
    assert (flipped[0] != flipped[1]).any()  # drawn per image …
    assert (flipped != (again * mixtures[1]).sign()).any()  # … and per use


def test_what_is_mixed_is_the_image_and_three_of_the_batch() -> None:
    x = torch.eye(32)[:, :, None, None]  # image i is the i-th unit vector: mixtures show weights
    weights = instahide(x, 4, 0.65).abs()[:, :, 0, 0]
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(32))
    assert (weights.diagonal() > 0).all()
    assert ((weights > 0).sum(dim=1) <= 4).all()
    assert (weights > 0).sum() > 32 * 3
    once = weights.sum(dim=0)  # permutations: every image is used four times
    assert (((weights > 0).sum(dim=0)) <= 4).all()
    assert (once > 0).all()


def test_one_image_is_itself_up_to_signs() -> None:
    x = torch.randn(5, 3, 4, 4)
    hidden = instahide(x, 1, 1.0)
    assert torch.equal(hidden.abs(), x.abs())
    assert not torch.equal(hidden, x)


def test_cross_mixes_two_private_and_four_public() -> None:
    private = torch.eye(24)[:16, :, None, None]
    public = torch.eye(24)[16:, :, None, None]
    weights = instahide(private, 6, 0.65, public).abs()[:, :, 0, 0]
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(16))
    assert (weights[:, :16] > 0).sum(dim=1).max() == 2
    assert (weights[:, :16].diagonal() > 0).all()
    assert weights[:, :16].sum(dim=1).min() >= 0.3 - 1e-6
    assert (weights[:, 16:] > 0).sum(dim=1).max() <= 4
    assert (weights[:, 16:] > 0).any(dim=1).all()


def test_shapes_layouts_and_dtypes() -> None:
    x = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last)
    assert instahide(x, 4, 0.65).shape == x.shape
    assert instahide(x.double(), 6, 0.65, torch.randn(1, 3, 8, 8).double()).dtype == torch.float64
    torch.manual_seed(3)
    first = instahide(x, 4, 0.65)
    torch.manual_seed(3)
    torch.testing.assert_close(first, instahide(x.contiguous(), 4, 0.65))


@pytest.mark.parametrize("limits", [(4, 0.2), (1, 0.65), (6, 0.65, 2, 0.95), (8, 0.13)])
def test_limits_that_leave_no_coefficients(limits: tuple[Any, ...]) -> None:
    state = torch.get_rng_state()
    with pytest.raises(FurlongError, match="hardly any"):
        check_limits(*limits)
    check_limits(4, 0.65)
    check_limits(6, 0.65, 2, 0.3)
    assert torch.equal(torch.get_rng_state(), state)
    if limits == (4, 0.2):
        with pytest.raises(FurlongError, match=r"4 coefficients of at most 0\.2"):
            instahide(torch.randn(2, 1, 2, 2), 4, 0.2)
