"""MOON (2.15): the contrastive term and the networks that it compares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_same, descend, draw, local_context, plain_client, train, trained, twin
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.payload import pack
from furlong.core.weights import snapshot
from furlong.methods.base import Model
from furlong.methods.fedavg import FedAvg
from furlong.nn.losses import moon_contrast
from furlong.seeding import seeded


def test_moon_without_mu_is_cross_entropy_on_the_same_network(prepared: Any) -> None:
    p = prepared("moon", **{"method.mu": 0.0})
    down = p.server.init()

    class Same(FedAvg):
        def network(self, ctx: Any) -> nn.Module:
            return p.method.network(ctx)

    plain = replace(p, method=Same())
    assert pack(train(p, None, down).upload) == pack(train(plain, None, down).upload)


def test_moon_golden_values(golden: Any) -> None:
    z = draw(3, 6)
    same = moon_contrast(z, z, z, 0.5).item()
    assert same == pytest.approx(golden["losses"]["moon_equal_global_prev"])
    apart = moon_contrast(z, 2 * z, -z, 0.5).item()
    assert apart == pytest.approx(golden["losses"]["moon_tau0.5_glob1_prev-1"], abs=1e-7)


def test_moon_keeps_its_last_model_and_trains_only_one(prepared: Any) -> None:
    p = prepared("moon")
    down = p.server.init()
    first = train(p, None, down)
    assert pack(first.state) == pack(first.upload)
    ctx = local_context(p, 1)
    with seeded(p.setup.device, "moon"):
        p.method.local_update(first.state, down, ctx)
    for slot, weights in (("received", down.weights), ("previous", first.state.weights)):
        for name, tensor in ctx.networks._slots[slot].state_dict().items():
            assert torch.equal(tensor, weights[name]), (slot, name)


def test_moon_is_drawn_to_the_received_network_and_away_from_its_last(prepared: Any) -> None:
    p = prepared("moon", **{"method.mu": 2.0})
    down, ctx = p.server.init(), plain_client(p)
    last = Model(snapshot(twin(p, ctx)))
    local = trained(p, ctx, down, last)
    net, received = twin(p, ctx, down.weights), twin(p, ctx, down.weights).eval()
    previous = twin(p, ctx, last.weights).eval()

    def loss_of(batch: Batch) -> Tensor:
        (view,) = batch.views(1)
        z = net[:2](view)
        cosines = [F.cosine_similarity(z, n[:2](view).detach()) for n in (received, previous)]
        near = (torch.stack(cosines, 1) / 0.5).softmax(1)[:, 0]
        return F.cross_entropy(net.classifier(z), batch.labels) - 2.0 * near.log().mean()

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, down.weights)
