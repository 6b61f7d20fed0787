"""FedMoCo (2.4): the queue, the key network, BatchNorm by parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_same, descend, local_context, plain_client, train, trained, twin
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.payload import pack, traffic, unpack
from furlong.core.weights import snapshot
from furlong.methods.bank import enqueue, new_bank
from furlong.methods.base import Model
from furlong.methods.fcl import State
from furlong.methods.fedmoco import FedMoCo, Nets
from furlong.nn.losses import info_nce
from furlong.seeding import seeded


def test_queue_wraps_and_forgets() -> None:
    bank, position = new_bank(10, 4), 0
    start = bank.clone()
    for step in range(math.ceil(10 / 4)):
        position = enqueue(bank, position, torch.full((4, 4), float(step)))
    assert position == 12 % 10
    assert not (bank[:, None] == start).all(-1).any()  # no initial row survives
    assert bank[:, 0].tolist() == [2, 2, 0, 0, 1, 1, 1, 1, 2, 2]


def test_queue_goes_on_between_rounds(prepared: Any) -> None:
    p = prepared("fedmoco")
    server = p.server.init()
    first = train(p, p.method.init_client(local_context(p)), server)
    steps = len(p.federation.shard(0)) // p.setup.batch_size
    assert first.state.position == steps * p.setup.batch_size % p.method.bank
    again = train(p, first.state, server, 1)
    rows = {tuple(r) for r in first.state.rows.tolist()} & {
        tuple(r) for r in again.state.rows.tolist()
    }
    assert len(rows) == max(0, p.method.bank - steps * p.setup.batch_size)


@pytest.mark.parametrize("key_update", ["aggregate", "reset"])
def test_key_network_travels_or_is_reset(prepared: Any, key_update: str) -> None:
    p = prepared("fedmoco", **{"method.key_update": key_update, "method.decay": 1.0})
    server = p.server.init()
    other = replace(
        server, query={n: t + 0.01 if t.is_floating_point() else t for n, t in server.query.items()}
    )
    ctx = local_context(p)
    with seeded(p.setup.device, "moco"):
        local = p.method.local_update(p.method.init_client(ctx), other, ctx)
    key = dict(ctx.networks._slots["key"].named_parameters())
    expected = other.query if key_update == "reset" else server.key
    for name, value in key.items():  # decay 1: the key network stayed where it began
        torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=0)
    assert (local.upload.key is None) == (key_update == "reset")
    sent = traffic(local.upload).params
    assert sent == (1 if key_update == "reset" else 2) * traffic(Model(server.query)).params


def test_moco_is_the_first_row_of_fcls_ablation(prepared: Any) -> None:
    """CL = FCL without fusion and matching, bit for bit, from the same first bank."""
    moco = prepared("fedmoco", **{"method.bank": 16, "method.temperature": 0.2})
    fcl = prepared(
        "fcl",
        **{
            "method.bank": 16,
            "method.temperature": 0.2,
            "method.fusion": False,
            "method.matching": 0,
        },
    )
    a, b = moco.server.init(), fcl.server.init()
    assert pack(Model(a.query)) == pack(Model(b.query))
    down = fcl.method.download(b, 0, fcl.server.context(fcl.server.exchanges()[0]))
    queue = moco.method.init_client(local_context(moco))
    state = State(queue.rows, None, 0, None)  # FCL's own would be filled, not random
    one, two = train(moco, queue, a), train(fcl, state, down)
    assert pack(Model(one.upload.query)) == pack(Model(two.upload.query))
    assert pack(Model(one.upload.key)) == pack(Model(two.upload.key))
    assert torch.equal(one.state.rows, two.state.local)


@pytest.mark.parametrize("options", [{"symmetric": True}, {"bn_groups": 2}, {"bn_groups": 100}])
def test_moco_variants_train(prepared: Any, options: dict[str, Any]) -> None:
    p = prepared("fedmoco", **{f"method.{k}": v for k, v in options.items()})
    plain = prepared("fedmoco")
    server = p.server.init()
    queue = p.method.init_client(local_context(p))
    assert pack(train(p, queue, server).upload) != pack(train(plain, queue, server).upload)


@pytest.mark.parametrize(("images", "groups"), [(7, 3), (50, 8), (3, 8), (8, 4)])
def test_no_part_of_a_batch_is_one_image(images: int, groups: int) -> None:
    """BatchNorm has no variance of one image."""
    sizes = []
    net = nn.BatchNorm1d(4)
    net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    FedMoCo(bn_groups=groups).queries(net, torch.randn(images, 4))
    assert min(sizes) >= 2
    assert len(sizes) == min(groups, images // 2)


def test_keys_come_back_in_order() -> None:
    method = FedMoCo(bn_groups=2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    view = torch.randn(6, 3, 2, 2)
    torch.testing.assert_close(method.keys(net, view), F.normalize(net(view), dim=1))


def test_symmetric_moco_adds_both_directions(prepared: Any) -> None:
    """One step by hand, against the loss that the client reports."""
    p = prepared("fedmoco", batch_size=24, **{"method.symmetric": True})
    server, ctx = p.server.init(), local_context(p)
    queue = p.method.init_client(ctx)
    local = train(p, queue, server)
    with seeded(p.setup.device, "train"):
        (batch,) = list(local_context(p).batches())
        v1, v2 = batch.views()
        net = p.method.network(ctx)
        net.load_state_dict(server.query)
        net.to(memory_format=torch.channels_last).train()
        z1, z2 = net(v1), net(v2)
    by_hand = info_nce(z1, z2, queue.rows, 0.1) + info_nce(z2, z1, queue.rows, 0.1)
    assert local.metrics["loss"] == pytest.approx(by_hand.item(), rel=1e-4)


def test_payloads_are_registered() -> None:
    from furlong.methods.fedmoco import Nets, Queue

    for value in (Nets({"w": torch.ones(2)}, None), Queue(torch.ones(3, 2), 1)):
        assert pack(unpack(pack(value))) == pack(value)


@pytest.mark.parametrize("symmetric", [False, True])
def test_fedmoco_keeps_the_keys_that_it_compared_with(prepared: Any, symmetric: bool) -> None:
    """The key network is another than the query network from the beginning."""
    p = prepared("fedmoco", **{"method.symmetric": symmetric, "method.bank": 60})
    ctx, start = plain_client(p), p.server.init()
    down = Nets(start.query, snapshot(twin(p, ctx)))
    with seeded(p.setup.device, "queue"):
        queue = replace(p.method.init_client(ctx), position=5)
    local = trained(p, ctx, down, queue)
    query, key = twin(p, ctx, down.query), twin(p, ctx, down.key)
    keys: list[Tensor] = []

    def loss_of(batch: Batch) -> Tensor:
        v1, v2 = batch.views()
        k1, k2 = (F.normalize(key(view), dim=1).detach() for view in (v1, v2))
        keys.extend([k1, k2] if symmetric else [k2])
        loss = info_nce(query(v1), k2, queue.rows, 0.1)
        return loss + info_nce(query(v2), k1, queue.rows, 0.1) if symmetric else loss

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, query)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(query, local.upload.query, down.query)
    for name, value in query.named_parameters():  # the key network follows after the step
        followed = 0.99 * down.key[name] + 0.01 * value.detach()
        torch.testing.assert_close(local.upload.key[name], followed)
    added = torch.cat(keys)
    assert local.state.position == 5 + len(added)
    rows = queue.rows.clone()
    rows[5 : 5 + len(added)] = added
    torch.testing.assert_close(local.state.rows, rows)
