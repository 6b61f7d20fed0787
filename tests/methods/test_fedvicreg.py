"""FedVICReg: the loss, and what it is computed of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SMALL, assert_round, draw
from torch import Tensor

from furlong.core.context import Batch
from furlong.nn.losses import vicreg


def test_vicreg() -> None:
    z1, z2 = draw(8, 3).numpy(), draw(8, 3, seed=1).numpy()
    invariance = ((z1 - z2) ** 2).mean()
    spread = [np.maximum(0, 1 - np.sqrt(z.var(0, ddof=1) + 1e-4)).mean() for z in (z1, z2)]
    covs = [np.cov(z.T) for z in (z1, z2)]
    mixing = sum((c**2).sum() - (np.diag(c) ** 2).sum() for c in covs) / 3
    by_hand = 25 * invariance + 25 * sum(spread) / 2 + mixing
    got = vicreg(torch.from_numpy(z1), torch.from_numpy(z2), 25, 25, 1).item()
    assert got == pytest.approx(by_hand)
    constant = torch.zeros(8, 3, dtype=torch.float64)  # collapse costs μ·(1 - √ε), and ε keeps the
    constant.requires_grad_()  # gradient finite
    loss = vicreg(constant, constant, 25, 25, 1)
    assert loss.item() == pytest.approx(25 * 0.99)
    loss.backward()
    assert constant.grad is not None
    assert constant.grad.isfinite().all()


def test_fedvicreg_weighs_its_three_terms(prepared: Any) -> None:
    def loss_of(net: Any, batch: Batch) -> Tensor:
        v1, v2 = batch.views()
        return vicreg(net(v1), net(v2), invariance=2, variance=3, covariance=5)

    options = {
        "method.projection_head": SMALL,
        "method.invariance": 2.0,
        "method.variance": 3.0,
        "method.covariance": 5.0,
    }
    assert_round(prepared("fedvicreg", **options), loss_of)
