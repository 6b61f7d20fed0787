"""FedSimSiam (2.3): a symmetric loss that predicts the other view."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import LR, assert_round, draw
from torch import Tensor

from furlong.core.context import Batch
from furlong.errors import FurlongError
from furlong.methods.fedsimsiam import symmetric
from furlong.nn.losses import cosine_simsiam


def test_simsiam_loss_is_symmetric_and_in_range() -> None:
    predictor = torch.nn.Linear(6, 6).double()
    z1, z2 = draw(4, 6), draw(4, 6, seed=1)
    loss = symmetric(predictor, z1, z2)
    assert -1 <= loss.item() <= 1
    torch.testing.assert_close(loss, symmetric(predictor, z2, z1))


def test_simsiam_without_predictor_and_stop_gradient_is_a_cosine() -> None:
    z1, z2 = draw(4, 6).requires_grad_(), draw(4, 6, seed=1).requires_grad_()
    plain = -F.cosine_similarity(z1, z2, dim=1).mean()
    torch.testing.assert_close(cosine_simsiam(z1, z2), plain)
    plain.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    assert min(z1.grad.norm(), z2.grad.norm()) > 1e-3


def there_and_back(predictor: Any, z1: Tensor, z2: Tensor) -> Tensor:
    there = F.cosine_similarity(predictor(z1), z2.detach())
    back = F.cosine_similarity(predictor(z2), z1.detach())
    return -(there.mean() + back.mean()) / 2


@pytest.mark.parametrize("steps", [0, 2])
def test_fedsimsiam_predicts_the_other_view(prepared: Any, steps: int) -> None:
    """Before the step of all, the predictor alone takes its own on the same projections."""

    def loss_of(net: Any, batch: Batch) -> Tensor:
        z1, z2 = (net.projector(net.backbone(view)) for view in batch.views())
        for _ in range(steps):
            fixed = z1.detach(), z2.detach()
            weights = list(net.predictor.parameters())
            slopes = torch.autograd.grad(there_and_back(net.predictor, *fixed), weights)
            with torch.no_grad():
                for weight, slope in zip(weights, slopes, strict=True):
                    weight -= LR * slope
        return there_and_back(net.predictor, z1, z2)

    assert_round(prepared("fedsimsiam", **{"method.predictor_steps": steps}), loss_of)


def test_a_privacy_budget_needs_a_predictor_without_steps_of_its_own(prepared: Any) -> None:
    """They are on whole batches, and not clipped."""
    with pytest.raises(FurlongError, match=r"--method\.predictor-steps 0"):
        prepared(
            "fedsimsiam",
            **{"method.predictor_steps": 2, "privacy.level": "record", "privacy.epsilon": 8},
        )
