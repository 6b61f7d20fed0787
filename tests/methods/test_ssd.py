"""SSD: directions of one's own, and representations that follow the projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_same, descend, draw, plain_client, trained, twin

from furlong.core.context import Batch
from furlong.errors import FurlongError
from furlong.nn.losses import align_and_spread
from furlong.runs.prepare import prepare
from furlong.seeding import seeded


def test_alignment_and_uniformity_over_pairs() -> None:
    z1, z2 = F.normalize(draw(5, 4), dim=1), F.normalize(draw(5, 4, seed=1), dim=1)
    near = float((z1 - z2).square().sum(1).mean())
    far = 0.0
    for z in (z1, z2):
        pairs = [(z[i] - z[j]).square().sum() for i in range(5) for j in range(5) if i != j]
        far += float(torch.stack(pairs).mul(-2).exp().mean().log()) / 2
    assert float(align_and_spread(3 * z1, z2, 0.7)) == pytest.approx(near + 0.7 * far)
    assert float(align_and_spread(z1[:1], z2[:1], 1.0)) == pytest.approx(
        float((z1[0] - z2[0]).square().sum())
    )


def test_clients_have_dimensions_of_their_own(prepared: Any) -> None:
    p = prepared("ssd")
    ctx = plain_client(p)
    rows = torch.stack([p.method.scaling(replace(ctx, client=k)) for k in range(3)])
    assert rows.shape == (3, 192)
    assert (rows == 10).sum(dim=1).tolist() == [64, 64, 64]
    assert ((rows == 10).sum(dim=0) == 1).all()
    assert set(rows.unique().tolist()) == {1.0, 10.0}
    crowd = replace(ctx, client=399, setup=replace(ctx.setup, sizes=dict.fromkeys(range(400), 9)))
    assert (p.method.scaling(crowd) == 10).sum() == 1


def test_a_client_s_round_by_hand(prepared: Any) -> None:
    weights = {"spread": 0.9, "separation": 0.3, "distillation": 0.2, "scale": 4.0}
    p = prepared("ssd", **{f"method.{name}": value for name, value in weights.items()})
    ctx, down = plain_client(p), p.server.init()
    local = trained(p, ctx, down)
    net = twin(p, ctx, down.weights)
    own = torch.arange(192) < 64

    def loss_of(batch: Batch) -> torch.Tensor:
        h = net.backbone(torch.cat(batch.views()))
        raw = net.projector(h)
        z = F.normalize(raw, dim=1)
        z1, z2 = z.chunk(2)
        grown = torch.where(own, 4 * z, z).detach()
        p_h, p_z = h.softmax(1), raw.softmax(1)
        taught = (p_h * (p_h / p_z).log()).sum(1).mean()
        apart = (z - grown).square().sum(1).mean()
        return align_and_spread(z1, z2, 0.9) + 0.3 * apart + 0.2 * taught

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, down.weights)


def test_widths_must_agree(tiny_config: Any) -> None:
    p = prepare(tiny_config("ssd", **{"method.projection_head": "mlp:32:16"}))
    with pytest.raises(FurlongError, match=r"gives 16 numbers and the encoder small 192.*192:192"):
        p.server.init()
