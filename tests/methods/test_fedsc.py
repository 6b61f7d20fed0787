"""FedSC: moments of the others instead of their images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import WIDTH, assert_same, descend, draw, plain_client, trained, twin

from furlong.core.context import Batch
from furlong.methods.fedsc import Down, FedSC
from furlong.nn.encoders import untracked
from furlong.nn.losses import spectral_contrast
from furlong.seeding import seeded


def test_the_loss_is_a_sum_over_pairs() -> None:
    z1, z2, others = draw(5, 4), draw(5, 4, seed=1), draw(7, 4, seed=2)
    z = torch.cat([z1, z2])
    near = -2 * sum(float(a @ b) for a, b in zip(z1, z2, strict=True)) / 5
    own = sum(float(a @ b) ** 2 for a in z for b in z) / 100
    across = sum(float(a @ b) ** 2 for a in z for b in others) / 70
    assert float(spectral_contrast(z1, z2)) == pytest.approx(near + own)
    moment = others.T @ others / 7
    expected = near + 0.3 * own + 2 * 0.7 * across
    assert float(spectral_contrast(z1, z2, moment, 0.3)) == pytest.approx(expected)


def test_long_projections_are_shortened() -> None:
    net = torch.nn.Identity()
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = FedSC(length=4.0).projected(net, z)
    assert found.norm(dim=1).tolist() == pytest.approx([2.0, 0.5, 0.0])
    assert torch.equal(found[1:], z[1:])


def test_the_share_of_one_s_own_falls_over_the_rounds(prepared: Any) -> None:
    p = prepared("fedsc")
    ctx = plain_client(p, exchange=1)
    shares = [
        p.method.own_share(replace(ctx, exchange=replace(ctx.exchange, round=r))) for r in (0, 1)
    ]
    assert shares == pytest.approx([1.0, 0.6])  # two rounds, least 0.2


def test_a_round_is_moments_and_then_training(prepared: Any) -> None:
    p = prepared("fedsc")
    kinds = [(e.round, e.kind) for e in p.method.plan(p.setup)]
    assert kinds == [(0, "moments"), (0, "train"), (1, "moments"), (1, "train")]


def test_the_moment_is_of_all_images_and_changes_no_statistics(prepared: Any) -> None:
    p = prepared("fedsc", **{"method.length": 0.5})
    ctx, start = plain_client(p, batch_size=8), p.server.init().weights
    sent = trained(p, ctx, Down(start, None)).upload
    assert sent.weights is None
    net = twin(p, ctx, start)
    with seeded(p.setup.device, "train"), torch.no_grad(), untracked(net):
        rows = torch.cat([net(batch.views(1)[0]) for batch in ctx.batches(1)])
    rows = rows * (0.5**0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    assert len(rows) == 24
    assert torch.allclose(sent.moment, rows.T @ rows / 24, atol=1e-6)
    assert float(sent.moment.trace()) <= 0.5 + 1e-5  # so one image moves it by at most μ/n


def test_noise_is_added_to_every_entry(prepared: Any) -> None:
    found = []
    for noise in (0.0, 0.1):
        p = prepared("fedsc", **{"method.noise": noise})
        found.append(trained(p, plain_client(p), Down(p.server.init().weights, None)).upload.moment)
    noise = (found[1] - found[0]).flatten()
    assert noise.std() == pytest.approx(0.1, rel=0.05)
    assert (noise != 0).all()


@pytest.mark.parametrize("alone", [False, True])
def test_a_client_s_round_by_hand(prepared: Any, alone: bool) -> None:
    p = prepared("fedsc")
    ctx, start = plain_client(p, exchange=3), p.server.init().weights  # of round 1
    others = None if alone else draw(40, WIDTH).T.float() @ draw(40, WIDTH).float() / 40
    local = trained(p, ctx, Down(start, others))
    net = twin(p, ctx, start)

    def loss_of(batch: Batch) -> torch.Tensor:
        z = net(torch.cat(batch.views()))
        z = z * (2**0.5 / z.norm(dim=1, keepdim=True)).clamp(max=1)
        z1, z2 = z.chunk(2)
        moment = z.T @ z / len(z)
        loss = -2 * (z1 * z2).sum() / len(z1)
        if others is None:
            return loss + (moment**2).sum()
        return loss + 0.6 * (moment**2).sum() + 0.8 * torch.trace(moment @ others)

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, start)


def test_a_client_gets_the_mean_of_all_others(prepared: Any) -> None:
    p = prepared("fedsc")
    server = p.server.init()
    moments = {k: torch.full((WIDTH, WIDTH), float(k)) for k in (0, 1, 2)}
    known = replace(server, moments=moments)
    first, second = p.server.exchanges()[:2]
    ctx = p.server.context(second)
    assert p.method.download(known, 1, ctx).others.unique().tolist() == [1.0]
    assert p.method.download(known, 0, ctx).others.unique().tolist() == [1.5]
    assert p.method.download(replace(server, moments={0: moments[0]}), 0, ctx).others is None
    assert p.method.download(known, 0, p.server.context(first)).others is None
