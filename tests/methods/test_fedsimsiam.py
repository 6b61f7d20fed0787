"""FedSimSiam (2.3): a symmetric loss that predicts the other view."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from by_hand import a_batch, assert_round, draw
from torch import Tensor

from furlong.core.context import Batch
from furlong.data.augment import preset
from furlong.nn.losses import cosine_simsiam


def test_simsiam_loss_is_symmetric_and_in_range(prepared: Any) -> None:
    p = prepared("fedsimsiam")
    net = p.method.network(p.server.context(p.server.exchanges()[0]))

    class Fixed(Batch):
        def views(self, n: int = 2) -> tuple[Tensor, ...]:  # noqa: ARG002
            one, two = preset("none").views(self.pixels[:3]), preset("none").views(self.pixels[3:])
            return (one[0], two[0]) if self.index[0] == 0 else (two[0], one[0])

    batch = a_batch(p)
    forth = Fixed(batch.pixels, batch.index, None, batch.augment)
    back = Fixed(batch.pixels, batch.index + 1, None, batch.augment)
    loss = p.method.loss(net, forth)
    assert -1 <= loss.item() <= 1
    torch.testing.assert_close(loss, p.method.loss(net, back))


def test_simsiam_without_predictor_and_stop_gradient_is_a_cosine() -> None:
    z1, z2 = draw(4, 6).requires_grad_(), draw(4, 6, seed=1).requires_grad_()
    plain = -F.cosine_similarity(z1, z2, dim=1).mean()
    torch.testing.assert_close(cosine_simsiam(z1, z2), plain)
    plain.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    assert min(z1.grad.norm(), z2.grad.norm()) > 1e-3


def test_fedsimsiam_predicts_the_other_view(prepared: Any) -> None:
    def loss_of(net: Any, batch: Batch) -> Tensor:
        z1, z2 = (net.projector(net.backbone(view)) for view in batch.views())
        there = F.cosine_similarity(net.predictor(z1), z2.detach())
        back = F.cosine_similarity(net.predictor(z2), z1.detach())
        return -(there.mean() + back.mean()) / 2

    assert_round(prepared("fedsimsiam"), loss_of)
