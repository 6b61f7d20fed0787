"""FedSwAV (2.5): prototypes, their first epochs, the queue."""

from __future__ import annotations

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
from furlong.core.payload import pack
from furlong.methods.fedswav import FedSwAV, Prototyped
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
        run_round(method, p.server.init(), local_context(p, exchange, epochs=2))
        assert [rows.shape[1] for *_, rows in calls] == held
        assert {tuple(scores.shape) for _, scores, _ in calls} == {(2, 8, 6)}


def test_the_queue_counts_in_a_round_of_one_epoch(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the defaults it is longer than the epoch and never gets full."""
    p = prepared("fedswav")
    calls = spy(monkeypatch, FedSwAV, "codes")
    method = replace(p.method, queue=FedSwAV().queue)
    upload = run_round(method, p.server.init(), local_context(p)).upload
    held = [rows for *_, rows in calls]
    assert [rows.shape[1] for rows in held] == [0, 8, 16]
    assert held[2].abs().max() <= 1 + 1e-5  # cosines: rows that were written, nothing else
    without = run_round(replace(method, queue=0), p.server.init(), local_context(p)).upload
    assert pack(without) != pack(upload)


def test_the_queue_only_enlarges_the_batch() -> None:
    method = FedSwAV()
    scores, held = torch.randn(2, 8, 5).tanh(), torch.randn(2, 20, 5).tanh()
    want = sinkhorn(torch.cat([scores, held], 1) / 0.05, 3)[:, :8]
    torch.testing.assert_close(method.codes(scores, held), want)
    torch.testing.assert_close(method.codes(scores, held[:, :0]), sinkhorn(scores / 0.05, 3))


@pytest.mark.parametrize("batch_size", [24, 12])
def test_fedswav_predicts_the_code_of_the_other_view(prepared: Any, batch_size: int) -> None:
    """One step with an empty queue; or two, and the queue of the second is the first batch."""
    options = {"queue": 12, "freeze_epochs": 0, "projection_head": SMALL}
    p = prepared("fedswav", **{f"method.{name}": value for name, value in options.items()})
    down, ctx = p.server.init(), plain_client(p, batch_size=batch_size)
    local = trained(p, ctx, down)
    net, prototypes = twin(p, ctx, down.encoder), nn.Linear(16, 6, bias=False)
    prototypes.load_state_dict(down.prototypes)
    held: list[Tensor] = [torch.zeros(0, 16), torch.zeros(0, 16)]

    def code(view: int, z: Tensor) -> Tensor:
        rows = torch.cat([z, held[view]]).detach()
        return sinkhorn(prototypes(rows).detach() / 0.05, 3)[: len(z)]

    def loss_of(batch: Batch) -> Tensor:
        with torch.no_grad():
            prototypes.weight.copy_(F.normalize(prototypes.weight, dim=1))
        z1, z2 = F.normalize(net(torch.cat(batch.views())), dim=1).chunk(2)
        q1, q2 = code(0, z1), code(1, z2)
        held[:] = z1.detach(), z2.detach()
        p1, p2 = ((prototypes(z) / 0.1).log_softmax(1) for z in (z1, z2))
        return -((q1 * p2).sum(1).mean() + (q2 * p1).sum(1).mean()) / 2

    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), loss_of, net, prototypes)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.encoder, down.encoder)
    unit = F.normalize(prototypes.weight.detach(), dim=1)
    torch.testing.assert_close(local.upload.prototypes["weight"], unit)
