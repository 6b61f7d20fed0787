"""FedU²: projections that cover the sphere, and FedDecorr's term, which goes with any method."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import assert_same, descend, draw, local_context, plain_client, trained, twin

from furlong.core.context import Batch, ClientContext, OptimiserSettings
from furlong.core.weights import ema_
from furlong.nn.losses import byol, decorrelation, distance_from_uniform, nt_xent
from furlong.seeding import seeded


def test_the_distance_on_a_circle_is_that_of_many_angles() -> None:
    """Against matching each of n points to its share of a fine grid, over all rotations."""
    z = draw(6, 2)
    found = float(distance_from_uniform(z, torch.eye(2, dtype=z.dtype)[None]))
    angles = (torch.atan2(z[:, 1], z[:, 0]) / (2 * math.pi) % 1).sort()[0]
    fine = angles.repeat_interleave(500)
    grid = (torch.arange(3000, dtype=z.dtype) + 0.5) / 3000
    costs = [float((fine - grid - shift).square().mean()) for shift in torch.arange(-1, 1, 0.0005)]
    assert found == pytest.approx(min(costs), rel=1e-3)


def test_even_directions_are_nearer_than_bundled_ones() -> None:
    planes = torch.linalg.qr(draw(50, 8, 2, seed=3))[0]
    even, bundled = draw(200, 8), draw(200, 8) * 0.1 + 1
    longer, plain = distance_from_uniform(5 * even, planes), distance_from_uniform(even, planes)
    assert float(longer) == pytest.approx(float(plain), rel=1e-6)
    assert distance_from_uniform(even, planes) < 0.1 * distance_from_uniform(bundled, planes)


def test_a_client_s_round_by_hand(prepared: Any) -> None:
    options = {"method.uniform": 3.0, "method.planes": 5, "method.decay": 0.5}
    ruled = prepared("fedu2", **options)
    ctx, down = plain_client(ruled, batch_size=8), ruled.server.init().inner
    down = replace(down, target={name: 0.9 * value for name, value in down.target.items()})
    p = SimpleNamespace(method=ruled.method.inner, setup=ruled.setup)
    local = trained(p, ctx, down)
    online, target = twin(p, ctx, down.encoder), twin(p, ctx, down.target)
    with seeded(p.setup.device, "another"):
        predictor = p.method.new_predictor(ctx)
    predictor.load_state_dict(down.predictor)
    parameters = [*online.parameters(), *predictor.parameters()]
    optimiser = torch.optim.SGD(parameters, 0.1)
    losses = []
    with seeded(p.setup.device, "train"):
        for batch in ctx.batches():
            v1, v2 = batch.views()
            with torch.no_grad():
                t1, t2 = target(v1), target(v2)
            loss = torch.zeros(())
            for view, goal in ((v1, t2), (v2, t1)):
                z = online(view)
                loss = loss + byol(predictor(z), goal)
                planes = torch.linalg.qr(torch.randn(5, z.shape[1], 2))[0]
                loss = loss + 3 * distance_from_uniform(z, planes)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            ema_(target, online, 0.5)
            losses.append(loss.item())
    assert local.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert_same(online, local.upload.encoder, down.encoder)
    assert_same(target, local.upload.target, down.target)


def test_correlated_columns_cost() -> None:
    h = draw(50, 4)
    expected = torch.corrcoef(h.T).square().mean()
    assert float(decorrelation(3 * h - 7)) == pytest.approx(float(expected), rel=1e-4)
    assert float(decorrelation(h[:, :1].expand(50, 4))) == pytest.approx(1, rel=1e-4)
    assert decorrelation(h[:1]) == 0


def watched(p: Any, beta: float, batch_size: int = 24) -> ClientContext:
    """Client 0 with plain descent, all of its images in a step, and the term's weight ``beta``."""
    plain = OptimiserSettings("sgd", 0.1, 0, 0, "constant", decorrelation=beta)
    return local_context(p, optimiser=plain, batch_size=batch_size, epochs=1)


@pytest.mark.parametrize("method", ["fedsimclr", "fedbyol"])
def test_feddecorr_adds_to_any_loss(prepared: Any, method: str) -> None:
    """In one step; :func:`test_feddecorr_is_of_this_step` has several."""
    p, weight = prepared(method), 50.0
    down = p.server.init()
    key = "weights" if method == "fedsimclr" else "encoder"
    plain, added = (trained(p, watched(p, beta), down) for beta in (0.0, weight))
    ctx = watched(p, 0.0)
    net = twin(p, ctx, getattr(down, key))
    with seeded(p.setup.device, "train"), torch.no_grad():
        (batch,) = ctx.batches()
        v1, v2 = batch.views()
        passes = [torch.cat([v1, v2])] if method == "fedsimclr" else [v1, v2]
        term = torch.stack([decorrelation(net.backbone(images)) for images in passes]).mean()
    expected = plain.metrics["loss"] + weight * float(term)
    assert added.metrics["loss"] == pytest.approx(expected, rel=1e-3)
    first, second = (getattr(local.upload, key) for local in (plain, added))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_feddecorr_is_of_this_step(prepared: Any) -> None:
    p = prepared("fedsimclr")
    ctx, down = watched(p, 50.0, batch_size=12), p.server.init()
    local = trained(p, ctx, down)
    net = twin(p, ctx, down.weights)

    def loss_of(batch: Batch) -> torch.Tensor:
        h = net.backbone(torch.cat(batch.views()))
        z1, z2 = net.projector(h).chunk(2)
        return nt_xent(z1, z2, p.method.temperature) + 50 * decorrelation(h)

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-3)


def test_hooks_of_the_last_client_are_gone(prepared: Any) -> None:
    p = prepared("fedsimclr")
    ctx, down = watched(p, 0.1), p.server.init()
    for _ in range(3):
        trained(p, ctx, down)
    hooks = [len(m._forward_hooks) for net in ctx.networks._slots.values() for m in net.modules()]
    assert sum(hooks) == 1
