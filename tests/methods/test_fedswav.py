"""FedSwAV (2.5): prototypes, their first epochs, the queue."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import (
    SMALL,
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
from furlong.core.payload import pack, unpack
from furlong.methods import fedswav
from furlong.methods.fedswav import FedSwAV, Prototyped, Queue, project
from furlong.nn.clustering import sinkhorn
from furlong.seeding import seeded


def lengths(value: Prototyped) -> Tensor:
    return value.prototypes["weight"].norm(dim=1)


def test_prototypes_travel_and_have_unit_length(prepared: Any) -> None:
    p = prepared("fedswav")
    start = p.server.init()
    assert start.prototypes["weight"].shape == (6, 128)
    torch.testing.assert_close(lengths(start), torch.ones(6))
    upload = run_round(p.method, start, local_context(p, exchange=1)).upload
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
        ctx = local_context(p, exchange, epochs=2, optimiser=settings)
        after = run_round(method, start, ctx).upload.prototypes["weight"]
        return not torch.equal(after, start.prototypes["weight"])

    assert moved(0) is moves
    assert moved(1)  # its epochs are the run's third and fourth


@pytest.mark.parametrize(
    ("queue", "since", "first", "second"),
    [
        (0, 0, [0] * 6, [0] * 6),
        (16, 0, [0, 0, 16, 16, 16, 16], [16] * 6),
        (12, 0, [0, 0, 12, 12, 12, 12], [12] * 6),
        (99, 0, [0, 0, 0, 24, 24, 24], [24] * 6),  # not longer than an epoch
        (16, 1, [0, 0, 0, 0, 0, 16], [16] * 6),
        (16, 2, [0] * 6, [0, 0, 16, 16, 16, 16]),
        (16, 3, [0] * 6, [0, 0, 0, 0, 0, 16]),
        (16, 4, [0] * 6, [0] * 6),
    ],
)
def test_the_queue_counts_when_it_is_full(
    prepared: Any,
    queue: int,
    since: int,
    first: list[int],
    second: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """24 images in batches of 8, two rounds of two epochs."""
    p = prepared("fedswav")
    calls = spy(monkeypatch, FedSwAV, "codes")
    method, state = replace(p.method, queue=queue, queue_from=since), None
    for exchange, held in enumerate((first, second)):
        calls.clear()
        ctx = local_context(p, exchange, epochs=2)
        state = run_round(method, p.server.init(), ctx, state).state
        assert [rows.shape[1] for *_, rows in calls] == held
        assert {tuple(scores.shape) for _, scores, _ in calls} == {(2, 8, 6)}


def test_the_queue_is_what_a_client_keeps(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are the last projections, the newest last; without a queue nothing is kept."""
    p = prepared("fedswav")
    seen: list[Tensor] = []
    monkeypatch.setattr(fedswav, "project", lambda *a: seen.append(project(*a)) or seen[-1])
    method, down = replace(p.method, queue=20), p.server.init()
    first = run_round(method, down, local_context(p, 0)).state
    assert isinstance(first, Queue)
    assert torch.equal(first.rows, torch.cat(seen, 1)[:, -20:])
    before = first.rows.clone()
    second = run_round(method, down, local_context(p, 1, batch_size=12), first).state
    assert torch.equal(first.rows, before)
    assert torch.equal(second.rows, torch.cat(seen, 1)[:, -20:])
    assert torch.equal(unpack(pack(second)).rows, second.rows)
    late = replace(method, queue_from=9)
    assert run_round(late, down, local_context(p, 0)).state.rows.shape == (2, 0, 128)
    assert run_round(replace(method, queue=0), down, local_context(p, 0)).state is None


def test_swav_runs_without_a_queue_unless_one_is_asked_for() -> None:
    """Values under which small encoders learn; SwAV's own are in the papers' rows."""
    method = FedSwAV()
    assert (method.epsilon, method.queue, method.queue_from) == (0.01, 0, 15)


@pytest.mark.parametrize(("epsilon", "low", "high"), [(100.0, 0.9999, 1.0), (0.001, 0.0, 0.5)])
def test_the_log_says_how_uniform_the_codes_are(
    prepared: Any, epsilon: float, low: float, high: float
) -> None:
    p = prepared("fedswav", **{"method.epsilon": epsilon})
    metrics = run_round(p.method, p.server.init(), local_context(p)).metrics
    assert low <= metrics["code_entropy"] <= high + 1e-6


def test_the_queue_only_enlarges_the_batch() -> None:
    method = FedSwAV(epsilon=0.05)
    scores, held = torch.randn(2, 8, 5).tanh(), torch.randn(2, 20, 5).tanh()
    want = sinkhorn(torch.cat([scores, held], 1) / 0.05, 3)[:, :8]
    torch.testing.assert_close(method.codes(scores, held), want)
    torch.testing.assert_close(method.codes(scores, held[:, :0]), sinkhorn(scores / 0.05, 3))


@pytest.mark.parametrize("rows", [0, 12])
@pytest.mark.parametrize("batch_size", [24, 12])
def test_fedswav_predicts_the_code_of_the_other_view(
    prepared: Any, batch_size: int, rows: int
) -> None:
    """One step or two; the queue of 12 is empty at first or full from an earlier round."""
    options = {"queue": 12, "freeze_epochs": 0, "projection_head": SMALL, "epsilon": 0.05}
    p = prepared("fedswav", **{f"method.{name}": value for name, value in options.items()})
    down, ctx = p.server.init(), plain_client(p, batch_size=batch_size)
    with seeded(p.setup.device, "rows"):
        held = F.normalize(torch.randn(2, rows, 16), dim=2)
    local = trained(p, ctx, down, Queue(held))
    net, prototypes = twin(p, ctx, down.encoder), nn.Linear(16, 6, bias=False)
    prototypes.load_state_dict(down.prototypes)
    entropies = []

    def code(view: int, z: Tensor) -> Tensor:
        batch = torch.cat([z, held[view]]).detach()
        q = sinkhorn(prototypes(batch).detach() / 0.05, 3)[: len(z)]
        entropies.append(-(q * q.log()).sum(1).mean().item() / math.log(6))
        return q

    def loss_of(batch: Batch) -> Tensor:
        nonlocal held
        with torch.no_grad():
            prototypes.weight.copy_(F.normalize(prototypes.weight, dim=1))
        z1, z2 = F.normalize(net(torch.cat(batch.views())), dim=1).chunk(2)
        q1, q2 = code(0, z1), code(1, z2)
        held = torch.stack([z1, z2]).detach()[:, -12:]
        p1, p2 = ((prototypes(z) / 0.1).log_softmax(1) for z in (z1, z2))
        return -((q1 * p2).sum(1).mean() + (q2 * p1).sum(1).mean()) / 2

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, net, prototypes)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    entropy = sum(entropies) / len(entropies)
    assert local.metrics["code_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert_same(net, local.upload.encoder, down.encoder)
    unit = F.normalize(prototypes.weight.detach(), dim=1)
    torch.testing.assert_close(local.upload.prototypes["weight"], unit)
    torch.testing.assert_close(local.state.rows, held)
