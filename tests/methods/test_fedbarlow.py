"""FedBarlow: the loss, and what it is computed of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SMALL, assert_round, draw
from torch import Tensor

from furlong.core.context import Batch
from furlong.nn.losses import barlow_twins


def test_barlow_twins() -> None:
    z = draw(50, 6)
    white = torch.linalg.qr(z - z.mean(0))[0]  # centred, orthogonal columns
    white = white - white.mean(0)
    assert barlow_twins(white, white, 0.005).item() < 1e-3
    z1, z2 = draw(8, 3), draw(8, 3, seed=1)
    corr = np.corrcoef(z1.T, z2.T)[:3, 3:]
    by_hand = sum(
        (1 - corr[i, j]) ** 2 if i == j else 0.1 * corr[i, j] ** 2
        for i in range(3)
        for j in range(3)
    )
    assert barlow_twins(z1, z2, 0.1).item() == pytest.approx(by_hand, rel=1e-4)
    torch.testing.assert_close(
        barlow_twins(5 * z1 + 2, z2, 0.1), barlow_twins(z1, z2, 0.1), rtol=1e-4, atol=1e-4
    )


def test_fedbarlow_correlates_two_views(prepared: Any) -> None:
    def loss_of(net: Any, batch: Batch) -> Tensor:
        v1, v2 = batch.views()
        return barlow_twins(net(v1), net(v2), 0.3)

    options = {"method.projection_head": SMALL, "method.off_diagonal": 0.3}
    assert_round(prepared("fedbarlow", **options), loss_of)
