"""FedX: relations to other images, and the received network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import (
    assert_same,
    descend,
    draw,
    local_context,
    plain_client,
    trained,
    twin,
)
from torch import Tensor

from furlong.core.context import Batch
from furlong.core.weights import recalibrate, snapshot
from furlong.methods.base import Model
from furlong.methods.fedx import FedX
from furlong.nn.losses import nt_xent, relational
from furlong.seeding import seeded


def test_relations_are_the_jensen_shannon_divergence() -> None:
    from scipy.spatial.distance import jensenshannon

    z1, z2, anchors = draw(5, 6), draw(5, 6, seed=1), draw(9, 6, seed=2)
    relation = [
        (F.normalize(z, dim=1) @ F.normalize(anchors, dim=1).T / 0.2).softmax(1).numpy()
        for z in (z1, z2)
    ]
    expected = (jensenshannon(*relation, axis=1) ** 2).mean()
    assert relational(z1, z2, anchors, 0.2, 0.2).item() == pytest.approx(expected)
    assert relational(z1, 3 * z1, anchors, 0.2, 0.2).item() == pytest.approx(0, abs=1e-12)
    mean = torch.from_numpy(sum(relation) / 2)
    turned = [F.kl_div(torch.from_numpy(r).log(), mean, reduction="batchmean") for r in relation]
    assert relational(z1, z2, anchors, 0.2, 0.2, reverse=True).item() == pytest.approx(
        float(sum(turned)) / 2
    )
    assert relational(z1, z1, anchors, 0.2, 0.05).item() > 0.01  # a sharper target


def test_fedx_learns_from_the_received_model_without_changing_it(prepared: Any) -> None:
    p = prepared("fedx")
    down, ctx = p.server.init(), local_context(p)
    with seeded(p.setup.device, "fedx"):
        p.method.local_update(None, down, ctx)
    for name, tensor in ctx.networks._slots["received"].state_dict().items():
        assert torch.equal(tensor, down.weights[name])
    projected, predicted = draw(9, 4).requires_grad_(), draw(9, 4, seed=1).requires_grad_()
    taught = draw(9, 4, seed=2).requires_grad_()
    FedX().loss(projected, predicted, taught.detach()).backward()
    assert projected.grad is not None
    assert projected.grad.abs().sum() > 0


def test_fedx_adds_four_terms_of_two_networks(prepared: Any) -> None:
    temperatures = {"temperature": 0.05, "local_temperature": 0.1, "global_temperature": 0.2}
    p = prepared("fedx", **{f"method.{name}": value for name, value in temperatures.items()})
    ctx = plain_client(p)
    start = twin(p, ctx, p.server.init().weights)
    # with the BatchNorm statistics of a new network all images would look the same to the received
    recalibrate(start, [batch.plain for batch in ctx.batches(1, shuffle=False)])
    down = Model(snapshot(start))
    local = trained(p, ctx, down)
    net, received = twin(p, ctx, down.weights), twin(p, ctx, down.weights).eval()

    def loss_of(pair: tuple[Batch, Batch]) -> Tensor:
        batch, others = pair
        (v1, v2), (v3,) = batch.views(), others.views(1)
        z1, z2, z3 = net[:2](torch.cat([v1, v2, v3])).chunk(3)
        # together: a BatchNorm in the predictor sees the third part too
        y1, y2, _ = net.predictor(torch.cat([z1, z2, z3])).chunk(3)
        g2, g3 = (received[:2](view).detach() for view in (v2, v3))
        own = nt_xent(z1, z2, 0.05) + relational(z1, z2, z3, 0.05, 0.1)
        return own + nt_xent(y1, g2, 0.05) + relational(y1, y2, g3, 0.05, 0.2)

    with seeded(p.setup.device, "train"):
        loss = descend(zip(ctx.batches(), ctx.batches(), strict=True), loss_of, net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, down.weights)
