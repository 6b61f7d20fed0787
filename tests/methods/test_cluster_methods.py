"""FedSwAV, FedDC and Orchestra: what the specification lists for them (2.5, 2.6, 2.14)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.core.context import ClientContext, Networks
from furlong.core.method import Report
from furlong.core.payload import flatten, pack, traffic, unpack
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.methods import orchestra
from furlong.methods.feddc import FedDC
from furlong.methods.fedswav import FedSwAV, Prototyped
from furlong.methods.orchestra import Orchestra
from furlong.nn.clustering import sinkhorn
from furlong.nn.losses import IGNORED
from furlong.runs.cost import flows
from furlong.seeding import seeded


def client(p: Any, exchange: int = 0, **setup: Any) -> ClientContext:
    changed = replace(p.setup, **setup)
    return ClientContext(
        changed, p.server.exchanges()[exchange], Networks(), client=0, data=p.federation.shard(0)
    )


def train(method: Any, down: Any, ctx: ClientContext, state: Any = None) -> Any:
    with seeded(ctx.setup.device, 0):
        return method.local_update(state, down, ctx)


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of all calls of ``owner.name`` from now on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def record(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, record)
    return calls


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (FedSwAV, "prototypes", 0),
        (FedSwAV, "epsilon", 0.0),
        (FedSwAV, "temperature", float("nan")),
        (FedSwAV, "sinkhorn_iterations", 0),
        (FedSwAV, "queue", -1),
        (FedSwAV, "freeze_epochs", -1),
        (FedDC, "heads", 0),
        (FedDC, "prototypes", 1),
        (FedDC, "images_per_prototype", 0),
        (FedDC, "temperature", 0.0),
        (FedDC, "iterations", 0),
        (Orchestra, "temperature", 0.0),
        (Orchestra, "decay", 1.1),
        (Orchestra, "memory", 15),
        (Orchestra, "local_clusters", 0),
        (Orchestra, "global_clusters", 0),
        (Orchestra, "server_steps", 0),
    ],
)
def test_settings_that_cannot_work_are_refused(method: Any, field: str, value: float) -> None:
    with pytest.raises(FurlongError, match=rf"method\.{field} is {value}"):
        method(**{field: value})


# ---------------------------------------------------------------- FedSwAV


WIDTH = 128  # of the projections that go with the small encoder


def lengths(value: Prototyped) -> Tensor:
    return value.prototypes["weight"].norm(dim=1)


def test_prototypes_travel_and_have_unit_length(prepared: Any) -> None:
    p = prepared("fedswav")
    start = p.server.init()
    assert start.prototypes["weight"].shape == (6, 128)
    torch.testing.assert_close(lengths(start), torch.ones(6))
    upload = train(p.method, start, client(p, exchange=1)).upload
    torch.testing.assert_close(lengths(upload), torch.ones(6))
    assert not torch.equal(upload.prototypes["weight"], start.prototypes["weight"])
    other = replace(upload, prototypes={"weight": upload.prototypes["weight"].roll(1, 1)})
    reports = [Report(k, 0, 24, up, {}) for k, up in enumerate((upload, other))]
    mean = (upload.prototypes["weight"] + other.prototypes["weight"]) / 2
    assert mean.norm(dim=1).max() < 0.99  # an average of unit rows is not unit
    new = p.method.aggregate(start, reports, p.server.context(p.server.exchanges()[0]))
    torch.testing.assert_close(new.prototypes["weight"], F.normalize(mean, dim=1))


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "lars"])
@pytest.mark.parametrize(("freeze", "moves"), [(0, True), (1, True), (2, False), (3, False)])
def test_prototypes_are_frozen_in_the_first_epochs_of_the_run(
    prepared: Any, freeze: int, moves: bool, optimiser: Any
) -> None:
    p = prepared("fedswav")
    method, start = replace(p.method, freeze_epochs=freeze), p.server.init()
    settings = replace(p.setup.optimiser, name=optimiser)

    def moved(exchange: int) -> bool:
        ctx = client(p, exchange, epochs=2, optimiser=settings)
        after = train(method, start, ctx).upload.prototypes["weight"]
        return not torch.equal(after, start.prototypes["weight"])

    assert moved(0) is moves
    assert moved(1)  # its epochs are the run's third and fourth


@pytest.mark.parametrize(
    ("queue", "held"),
    [
        (0, [0] * 6),
        (16, [0, 8, 16, 16, 16, 16]),
        (12, [0, 8, 12, 12, 12, 12]),
        (99, [0, 8, 16, 24, 24, 24]),
    ],
)
def test_the_queue_enlarges_the_batch_of_sinkhorn(
    prepared: Any, queue: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 images in batches of 8, two epochs; the queue is not longer than an epoch."""
    p = prepared("fedswav")
    calls = spy(monkeypatch, FedSwAV, "codes")
    method = replace(p.method, queue=queue)
    for exchange in (0, 1):  # it begins empty in every round
        calls.clear()
        train(method, p.server.init(), client(p, exchange, epochs=2))
        assert [rows.shape[1] for *_, rows in calls] == held
        assert {tuple(scores.shape) for _, scores, _ in calls} == {(2, 8, 6)}


def test_the_queue_counts_in_a_round_of_one_epoch(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the defaults it is longer than the epoch and never gets full."""
    p = prepared("fedswav")
    calls = spy(monkeypatch, FedSwAV, "codes")
    method = replace(p.method, queue=FedSwAV().queue)
    upload = train(method, p.server.init(), client(p)).upload
    held = [rows for *_, rows in calls]
    assert [rows.shape[1] for rows in held] == [0, 8, 16]
    assert held[2].abs().max() <= 1 + 1e-5  # cosines: rows that were written, nothing else
    without = train(replace(method, queue=0), p.server.init(), client(p)).upload
    assert pack(without) != pack(upload)


def test_the_queue_only_enlarges_the_batch() -> None:
    method = FedSwAV()
    scores, held = torch.randn(2, 8, 5).tanh(), torch.randn(2, 20, 5).tanh()
    want = sinkhorn(torch.cat([scores, held], 1) / 0.05, 3)[:, :8]
    torch.testing.assert_close(method.codes(scores, held), want)
    torch.testing.assert_close(method.codes(scores, held[:, :0]), sinkhorn(scores / 0.05, 3))


# ---------------------------------------------------------------- FedDC


def test_prototypes_of_feddc_never_travel(prepared: Any) -> None:
    p = prepared("feddc")
    local = train(p.method, p.server.init(), client(p))
    assert local.state is None
    names = p.method.network(p.server.context(p.server.exchanges()[0])).state_dict().keys()
    assert local.upload.weights.keys() == names


def test_filling_the_bank_changes_nothing(prepared: Any) -> None:
    p = prepared("feddc")
    start = p.server.init()
    assert pack(train(p.method, start, client(p, epochs=0)).upload) == pack(start)


def test_clusters_are_of_the_bank_of_the_epoch_before(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared("feddc")
    calls = spy(monkeypatch, FedDC, "cluster")
    train(p.method, p.server.init(), client(p, epochs=3))
    banks = [bank for _, bank, _ in calls]
    assert len(banks) == 3
    for bank in banks:
        index = torch.cat([rows for rows, _ in bank])
        assert sorted(index.tolist()) == list(range(24))
        z = torch.cat([z for _, z in bank], 1)
        assert z.shape == (2, 24, 128)
        torch.testing.assert_close(z.norm(dim=2), torch.ones(2, 24))
    first, second = (torch.cat([z for _, z in bank], 1) for bank in banks[:2])
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("images", "options", "count"),
    [(24, {}, 2), (5, {}, 2), (1, {}, 1), (60, {}, 6), (60, {"prototypes": 4}, 4)],
)
def test_how_many_prototypes(
    prepared: Any, images: int, options: dict[str, int], count: int
) -> None:
    p = prepared("feddc")
    shard = p.federation.shard(0)
    ctx = client(p)
    ctx.data = replace(shard, rows=torch.arange(images) % 24)
    bank = [(torch.arange(images), F.normalize(torch.randn(2, images, 8), dim=2))]
    found = FedDC(**options).cluster(bank, ctx)
    assert [len(centroids) for centroids, _ in found] == [count] * 3


def test_images_without_a_cluster_are_ignored_and_heads_take_turns(prepared: Any) -> None:
    p = prepared("feddc")
    index = torch.randperm(24)[:20]
    views = torch.stack([torch.eye(2, 8)[index % 2], torch.eye(2, 8)[index // 12]])
    bank = [(index[:8], views[:, :8]), (index[8:], views[:, 8:])]
    torch.manual_seed(3)
    found = FedDC(heads=4, images_per_prototype=4).cluster(bank, client(p))
    for head, (centroids, assigned) in enumerate(found):
        left = sorted(set(range(24)) - set(index.tolist()))
        assert (assigned == IGNORED).nonzero()[:, 0].tolist() == left
        torch.testing.assert_close(centroids[assigned[index]], views[head % 2])


# ---------------------------------------------------------------- Orchestra


def test_the_first_exchange_changes_no_network(prepared: Any) -> None:
    p = prepared("orchestra")
    kinds = [(e.round, e.kind) for e in p.server.exchanges()]
    assert kinds == [(0, "cluster"), (0, "train"), (1, "train")]
    start = p.server.init()
    with InProcess(p.method, p.federation, p.setup) as transport:
        first = p.server.step(transport, start, p.server.exchanges()[0])
    assert pack(first.server.nets) == pack(start.nets)
    assert not torch.equal(first.server.centroids, start.centroids)
    ctx = client(p)
    down = p.method.download(start, 0, p.server.context(ctx.exchange))
    assert down.centroids is None
    local = train(p.method, down, ctx)
    assert local.upload.nets is None
    own = ctx.networks._slots["target"].state_dict()
    assert all(torch.equal(own[name], w) for name, w in start.nets.target.items())


def trained(p: Any, method: Any, memory: Tensor, **setup: Any) -> Any:
    """``Orchestra.train`` from ``memory``: networks, memory and metrics."""
    ctx, start = client(p, 1, **setup), p.server.init()
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
    kept = trained(p, replace(p.method, memory=memory), torch.zeros(memory, WIDTH))[1]
    rows = torch.cat([rows for _, _, rows in calls])
    assert torch.equal(kept[old:], rows[-(memory - old) :])  # the oldest first
    assert not kept[:old].any()


def test_memory_is_filled_with_views_of_few_images(prepared: Any) -> None:
    p = prepared("orchestra")
    ctx = client(p)
    target = ctx.network("t", lambda: p.method.network(ctx), p.server.init().nets.online)
    rows = replace(p.method, memory=60).fill(target, ctx)
    assert rows.shape == (60, WIDTH)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(60))
    assert len(rows.unique(dim=0)) == 60  # 24 images, other views


def test_the_target_follows_before_the_step(prepared: Any) -> None:
    """With decay 0 it is a copy of the online network as that was before the last step."""
    p = prepared("orchestra")
    start = p.server.init().nets.online
    nets, *_ = trained(p, replace(p.method, decay=0.0), torch.zeros(16, WIDTH), batch_size=24)
    parameters = [n for n in start if not n.split(".")[-1].startswith(("running", "num_"))]
    assert all(torch.equal(nets.target[n], start[n]) for n in parameters)
    assert not any(torch.equal(nets.online[n], start[n]) for n in parameters)


def test_the_third_view_is_turned(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("orchestra")
    calls = spy(monkeypatch, orchestra, "rotated")
    trained(p, p.method, torch.zeros(16, WIDTH), epochs=4)
    assert {tuple(images.shape) for images, _ in calls} == {(8, 3, 16, 16)}
    turns = torch.cat([turns for _, turns in calls]).bincount(minlength=4)
    assert turns.min() > 10  # of 96
    assert Orchestra.usual_augment == "orchestra"


def test_the_memory_never_leaves(prepared: Any) -> None:
    p = prepared("orchestra")
    upload = train(p.method, p.server.init(), client(p, 1)).upload
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
    flow = flows("orchestra", "resnet18")
    assert set(flow) == {"cluster", "train"}
    up, down = (traffic(flow["train"][way]) for way in ("up", "down"))
    assert up.features == 4 * 8192
    assert down.features == 4 * 65_536
    assert up.params == down.params
    assert traffic(flow["cluster"]["up"]).total == 4 * 8192
    first = traffic(flow["cluster"]["down"])
    assert first.features == 0
    assert 2 * first.params == down.params + 4 * 4 * 513  # one network less


def test_centroids_that_are_no_unit_rows_are_left_out(prepared: Any) -> None:
    """They go through no rule of the server; the client's networks do."""
    p = prepared("orchestra")
    server, told = p.server.init(), []
    good = train(p.method, server, client(p, 1)).upload
    bad = replace(good, centroids=good.centroids * 1.01)

    def after(*uploads: Any) -> Any:
        ctx = replace(p.server.context(p.server.exchanges()[1]), tell=told.append)
        reports = [Report(k, 1, 24, upload, {}) for k, upload in enumerate(uploads)]
        return p.method.aggregate(server, reports, ctx)

    assert torch.equal(after(good, bad).centroids, after(good).centroids)
    assert told == ["client 1 sent centroids that are no unit rows: left out"]
    nobody = after(bad)
    assert torch.equal(nobody.centroids, server.centroids)
    assert pack(nobody.nets) == pack(good.nets)


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
                (pack(last.server), {k: bytes(packed) for k, packed in transport.store.items()})
            )
    assert results[0] == results[1]
    states = [unpack(bytearray(packed)).state for packed in results[0][1].values()]
    assert [tuple(state.memory.shape) for state in states] == [(16, WIDTH)] * 3
    state, down = states[0], replace(start, nets=replace(start.nets, target=None))
    frozen = replace(p.method, decay=1.0)
    kept = train(frozen, down, client(p, 1), state).state
    parameters = [n for n in state.target if "weight" in n]
    assert all(torch.equal(kept.target[n], state.target[n]) for n in parameters)
    fresh = train(frozen, down, client(p, 1)).state  # nothing kept: a copy of the online network
    assert all(torch.equal(fresh.target[n], start.nets.online[n]) for n in parameters)
