"""FedDC (2.6): the bank and its clusters."""

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
from torch import Tensor

from furlong.core.context import Batch
from furlong.core.payload import pack
from furlong.methods.feddc import FedDC
from furlong.nn.clustering import random_rows, spherical_kmeans
from furlong.nn.losses import IGNORED
from furlong.seeding import seeded


def test_prototypes_of_feddc_never_travel(prepared: Any) -> None:
    p = prepared("feddc")
    local = run_round(p.method, p.server.init(), local_context(p))
    assert local.state is None
    names = p.method.network(p.server.context(p.server.exchanges()[0])).state_dict().keys()
    assert local.upload.weights.keys() == names


def test_filling_the_bank_changes_nothing(prepared: Any) -> None:
    p = prepared("feddc")
    start = p.server.init()
    assert pack(run_round(p.method, start, local_context(p, epochs=0)).upload) == pack(start)


def test_clusters_are_of_the_bank_of_the_epoch_before(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared("feddc")
    calls = spy(monkeypatch, FedDC, "cluster")
    run_round(p.method, p.server.init(), local_context(p, epochs=3))
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
    ctx = local_context(p)
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
    found = FedDC(heads=4, images_per_prototype=4).cluster(bank, local_context(p))
    for head, (centroids, assigned) in enumerate(found):
        left = sorted(set(range(24)) - set(index.tolist()))
        assert (assigned == IGNORED).nonzero()[:, 0].tolist() == left
        torch.testing.assert_close(centroids[assigned[index]], views[head % 2])


def test_feddc_predicts_the_cluster_of_the_same_image(prepared: Any) -> None:
    """The bank has the images in another order than the epoch, and the epoch has two batches."""
    options = {"images_per_prototype": 4, "projection_head": SMALL}
    p = prepared("feddc", **{f"method.{name}": value for name, value in options.items()})
    down, ctx = p.server.init(), plain_client(p, batch_size=12)
    local = trained(p, ctx, down)
    net = twin(p, ctx, down.weights)

    def projected(batch: Batch) -> tuple[Tensor, Tensor]:
        z1, z2 = F.normalize(net(torch.cat(batch.views())), dim=1).chunk(2)
        return z1, z2

    with seeded(p.setup.device, "train"):
        with torch.no_grad():
            bank = [(batch.index.tolist(), projected(batch)) for batch in ctx.batches()]
        images = [image for index, _ in bank for image in index]
        assert images != sorted(images)
        heads = []
        for head in range(3):
            rows = torch.cat([views[head % 2] for _, views in bank])
            centroids, found = spherical_kmeans(rows, random_rows(rows, 6), 10)
            heads.append((centroids, dict(zip(images, found.tolist(), strict=True))))

        def loss_of(batch: Batch) -> Tensor:
            losses = [
                F.cross_entropy(
                    z @ centroids.T / 0.1, torch.tensor([cluster[i] for i in batch.index.tolist()])
                )
                for z in projected(batch)
                for centroids, cluster in heads
            ]
            return torch.stack(losses).mean()

        loss = descend(ctx.batches(), loss_of, net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, down.weights)
