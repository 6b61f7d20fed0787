"""Orchestra (2.14): the memory, the target network, local and global centroids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import (
    WIDTH,
    assert_same,
    descend,
    local_context,
    plain_client,
    run_round,
    spy,
    trained,
    twin,
)
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.method import Report
from furlong.core.payload import flatten, pack, traffic, unpack
from furlong.core.weights import snapshot
from furlong.data.augment import rotated
from furlong.engines.inprocess import InProcess
from furlong.methods import orchestra
from furlong.methods.orchestra import Shared, Up
from furlong.nn.clustering import equalised_kmeans, fit_prototypes
from furlong.nn.losses import cluster_agreement
from furlong.runs.cost import flows
from furlong.seeding import seeded


def test_the_first_exchange_changes_no_network(prepared: Any) -> None:
    p = prepared("orchestra")
    kinds = [(e.round, e.kind) for e in p.server.exchanges()]
    assert kinds == [(0, "cluster"), (0, "train"), (1, "train")]
    start = p.server.init()
    with InProcess(p.method, p.federation, p.setup) as transport:
        first = p.server.step(transport, start, p.server.exchanges()[0])
    assert pack(first.server.nets) == pack(start.nets)
    assert not torch.equal(first.server.centroids, start.centroids)
    ctx = local_context(p)
    down = p.method.download(start, 0, p.server.context(ctx.exchange))
    assert down.centroids is None
    local = run_round(p.method, down, ctx)
    assert local.upload.nets is None
    own = ctx.networks._slots["target"].state_dict()
    assert all(torch.equal(own[name], w) for name, w in start.nets.target.items())


def memorised(p: Any, method: Any, memory: Tensor, **setup: Any) -> Any:
    """``Orchestra.train`` from ``memory``: networks, memory and metrics."""
    ctx, start = local_context(p, 1, **setup), p.server.init()
    target = ctx.network("target", lambda: method.network(ctx), start.nets.target)
    with seeded(ctx.setup.device, 0):
        return method.train(target.requires_grad_(False), memory, start, ctx)


@pytest.mark.parametrize(("memory", "old"), [(16, 0), (24, 0), (30, 6), (5, 0)])
def test_memory_holds_the_newest_rows(
    prepared: Any, memory: int, old: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 images in three batches of 8, also with a memory smaller than a batch."""
    p = prepared("orchestra")
    calls = spy(monkeypatch, orchestra, "enqueue")
    kept = memorised(p, replace(p.method, memory=memory), torch.zeros(memory, WIDTH))[1]
    rows = torch.cat([rows for _, _, rows in calls])
    assert torch.equal(kept[old:], rows[-(memory - old) :])  # the oldest first
    assert not kept[:old].any()


def test_memory_is_filled_with_views_of_few_images(prepared: Any) -> None:
    p = prepared("orchestra")
    ctx = local_context(p)
    target = ctx.network("t", lambda: p.method.network(ctx), p.server.init().nets.online)
    rows = replace(p.method, memory=60).fill(target, ctx)
    assert rows.shape == (60, WIDTH)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(60))
    assert len(rows.unique(dim=0)) == 60  # 24 images, other views


def test_the_target_follows_before_the_step(prepared: Any) -> None:
    """With decay 0 it is a copy of the online network as that was before the last step."""
    p = prepared("orchestra")
    start = p.server.init().nets.online
    nets, *_ = memorised(p, replace(p.method, decay=0.0), torch.zeros(16, WIDTH), batch_size=24)
    parameters = [n for n in start if not n.split(".")[-1].startswith(("running", "num_"))]
    assert all(torch.equal(nets.target[n], start[n]) for n in parameters)
    assert not any(torch.equal(nets.online[n], start[n]) for n in parameters)


def test_the_third_view_is_turned(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("orchestra")
    calls = spy(monkeypatch, orchestra, "rotated")
    memorised(p, p.method, torch.zeros(16, WIDTH), epochs=4)
    assert {tuple(images.shape) for images, _ in calls} == {(8, 3, 16, 16)}
    turns = torch.cat([turns for _, turns in calls]).bincount(minlength=4)
    assert turns.min() > 10  # of 96


def test_the_memory_never_leaves(prepared: Any) -> None:
    p = prepared("orchestra")
    upload = run_round(p.method, p.server.init(), local_context(p, 1)).upload
    tensors = flatten(upload)[0]
    assert {name.split("/")[0] for name in tensors} == {"nets", "centroids"}
    assert {"/".join(n.split("/")[:2]) for n in tensors if n.startswith("nets")} == {
        "nets/online",
        "nets/target",
        "nets/rotation",
    }
    assert upload.centroids.shape == (4, WIDTH)
    torch.testing.assert_close(upload.centroids.norm(dim=1), torch.ones(4))


def test_orchestra_sends_what_the_specification_counts() -> None:
    flow = flows("orchestra", "resnet18", **{"method.global_clusters": 128})
    assert set(flow) == {"cluster", "train"}
    up, down = (traffic(flow["train"][way]) for way in ("up", "down"))
    assert up.features == 4 * 8192
    assert down.features == 4 * 65_536
    assert up.params == down.params
    assert traffic(flow["cluster"]["up"]).total == 4 * 8192
    first = traffic(flow["cluster"]["down"])
    assert first.features == 0
    assert 2 * first.params == down.params + 4 * 4 * 513  # one network less


def test_a_stateful_client_keeps_target_and_memory(prepared: Any) -> None:
    p = prepared("orchestra", **{"method.stateful": True})
    start = p.server.init()
    assert start.nets.target is None
    results = []
    for workers in (1, 2):
        with InProcess(p.method, p.federation, p.setup, workers) as transport:
            *_, last = p.server.run(transport, start)
            assert not last.failures
            results.append(
                (pack(last.server), {k: path.read_bytes() for k, path in transport.states()})
            )
    assert results[0] == results[1]
    states = [unpack(bytearray(packed)).state for packed in results[0][1].values()]
    assert [tuple(state.memory.shape) for state in states] == [(16, WIDTH)] * 3
    state, down = states[0], replace(start, nets=replace(start.nets, target=None))
    frozen = replace(p.method, decay=1.0)
    kept = run_round(frozen, down, local_context(p, 1), state).state
    parameters = [n for n in state.target if "weight" in n]
    assert all(torch.equal(kept.target[n], state.target[n]) for n in parameters)
    fresh = run_round(
        frozen, down, local_context(p, 1)
    ).state  # nothing kept: a copy of the online network
    assert all(torch.equal(fresh.target[n], start.nets.online[n]) for n in parameters)


def test_orchestra_predicts_the_targets_clusters_of_the_other_view(prepared: Any) -> None:
    """The target network is another than the online network from the beginning."""
    p = prepared("orchestra", **{"method.decay": 0.7})
    start, ctx = p.server.init(), plain_client(p, exchange=1)
    down = replace(start, nets=replace(start.nets, target=snapshot(twin(p, ctx))))
    local = trained(p, ctx, down)
    online, target = twin(p, ctx, down.nets.online), twin(p, ctx, down.nets.target)
    layer = nn.Linear(128, 4)
    layer.load_state_dict(down.nets.rotation)
    memory: list[Tensor] = []

    def loss_of(batch: Batch) -> Tensor:
        first, second = batch.views()
        turns = torch.randint(4, (24,))
        turned = rotated(batch.views(1)[0], turns)
        with torch.no_grad():
            for own, other in zip(target.parameters(), online.parameters(), strict=True):
                own.copy_(0.7 * own + 0.3 * other)
        wanted = F.normalize(target(first), dim=1).detach()
        memory.append(wanted)
        agreement = cluster_agreement(online(second), wanted, down.centroids, 0.1)
        return agreement + F.cross_entropy(layer(online(turned)), turns)

    with seeded(p.setup.device, "train"):
        next(ctx.batches()).views(1)  # the memory is filled first, and here quite overwritten
        loss = descend(ctx.batches(), loss_of, online, layer)
        centroids = equalised_kmeans(torch.cat(memory)[-16:], 4)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    sent = local.upload.nets
    assert_same(online, sent.online, down.nets.online)
    assert_same(layer, sent.rotation, down.nets.rotation)
    assert_same(target, sent.target, down.nets.target)
    torch.testing.assert_close(local.upload.centroids, centroids)


@pytest.mark.parametrize("exchange", [0, 1, 2])
def test_orchestras_centroids_go_on_from_where_they_are(prepared: Any, exchange: int) -> None:
    p = prepared("orchestra")
    start, ctx = p.server.init(), p.server.context(p.server.exchanges()[exchange])
    with seeded(p.setup.device, "centroids"):
        known, *local = (F.normalize(torch.randn(n, 128), dim=1) for n in (8, 4, 4))
    nets = None if exchange == 0 else start.nets
    reports = [Report(k, 0, 24, Up(nets, rows), {}) for k, rows in enumerate(local)]
    after = p.method.aggregate(Shared(start.nets, known), reports, ctx).centroids
    assert (after * known).sum(1).min() > 0.9  # five small steps lead no further
    assert not torch.equal(after, known)
    torch.testing.assert_close(after, fit_prototypes(known, torch.cat(local), 0.1, 5))
