"""What methods make of their losses: which view, which network, which rows go where.

Every test repeats a client's round by hand, from the same seed with plain gradient descent, and
compares the loss that the client reports and the parameters that it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, Networks, OptimiserSettings
from furlong.core.method import Report
from furlong.core.payload import Weights
from furlong.core.weights import recalibrate, snapshot
from furlong.data.augment import rotated
from furlong.methods.base import Model
from furlong.methods.fedmoco import Nets
from furlong.methods.orchestra import Shared, Up
from furlong.nn.clustering import (
    equalised_kmeans,
    fit_prototypes,
    random_rows,
    sinkhorn,
    spherical_kmeans,
)
from furlong.nn.losses import barlow_twins, cluster_agreement, info_nce, nt_xent, relational, vicreg
from furlong.seeding import seeded

LR = 0.1
SMALL = "mlp:32:16"


def client(p: Any, exchange: int = 0, batch_size: int = 24) -> ClientContext:
    """Client 0 with its 24 images, an epoch and plain gradient descent."""
    plain = OptimiserSettings("sgd", LR, momentum=0, weight_decay=0, schedule="constant")
    setup = replace(p.setup, optimiser=plain, batch_size=batch_size, epochs=1)
    shard = p.federation.shard(0, labels=p.method.needs_labels)
    return ClientContext(setup, p.server.exchanges()[exchange], Networks(), client=0, data=shard)


def trained(p: Any, ctx: ClientContext, down: Any, state: Any = None) -> Any:
    with seeded(p.setup.device, "train"):
        return p.method.local_update(state, down, ctx)


def twin(p: Any, ctx: ClientContext, weights: Weights | None = None) -> Any:
    """The method's network outside of the method; without ``weights`` one of its own."""
    with seeded(p.setup.device, "another"):
        net = p.method.network(ctx)
    if weights is not None:
        net.load_state_dict(weights)
    return net.to(memory_format=torch.channels_last).train()


def descend(batches: Iterable[Any], loss_of: Callable[[Any], Tensor], *nets: nn.Module) -> float:
    """A step for each batch; the mean loss."""
    parameters = [p for net in nets for p in net.parameters()]
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= LR * gradient
        losses.append(loss.item())
    return sum(losses) / len(losses)


def assert_same(net: nn.Module, sent: Weights, start: Weights) -> None:
    """The parameters were moved from ``start`` to where ``net`` is, up to 1 % of the way."""
    for name, parameter in net.named_parameters():
        way = (parameter.detach() - start[name]).norm()
        assert (sent[name] - parameter.detach()).norm() <= 0.01 * way + 1e-6, name


def assert_round(p: Any, loss_of: Callable[[Any, Batch], Tensor], batch_size: int = 24) -> None:
    """The client's round is gradient descent on ``loss_of``."""
    down, ctx = p.server.init(), client(p, batch_size=batch_size)
    local = trained(p, ctx, down)
    net = twin(p, ctx, down.weights)
    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), lambda batch: loss_of(net, batch), net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, down.weights)


# ---------------------------------------------------------------- one network


def distance(part: nn.Module, start: list[Tensor]) -> Tensor:
    """Squared, from the ``start`` of a round."""
    moved = [((p - s) ** 2).sum() for p, s in zip(part.parameters(), start, strict=True)]
    return torch.stack(moved).sum()


def test_fedprox_holds_on_to_the_received_network(prepared: Any) -> None:
    p = prepared("fedprox", **{"method.mu": 5.0})
    start = [v.detach() for v in twin(p, client(p), p.server.init().weights).parameters()]

    def loss_of(net: Any, batch: Batch) -> Tensor:
        (view,) = batch.views(1)
        return F.cross_entropy(net(view), batch.labels) + 5.0 / 2 * distance(net, start)

    assert_round(p, loss_of, batch_size=12)


def test_fedsimclr_holds_on_to_the_received_projector(prepared: Any) -> None:
    p = prepared("fedsimclr", **{"method.head_prox_mu": 5.0})
    received = twin(p, client(p), p.server.init().weights)
    start = [v.detach() for v in received.projector.parameters()]

    def loss_of(net: Any, batch: Batch) -> Tensor:
        z1, z2 = net(torch.cat(batch.views())).chunk(2)
        return nt_xent(z1, z2, 0.5) + 5.0 / 2 * distance(net.projector, start)

    assert_round(p, loss_of, batch_size=12)


def test_fedsimsiam_predicts_the_other_view(prepared: Any) -> None:
    def loss_of(net: Any, batch: Batch) -> Tensor:
        z1, z2 = (net.projector(net.backbone(view)) for view in batch.views())
        there = F.cosine_similarity(net.predictor(z1), z2.detach())
        back = F.cosine_similarity(net.predictor(z2), z1.detach())
        return -(there.mean() + back.mean()) / 2

    assert_round(prepared("fedsimsiam"), loss_of)


def test_fedbarlow_correlates_two_views(prepared: Any) -> None:
    def loss_of(net: Any, batch: Batch) -> Tensor:
        v1, v2 = batch.views()
        return barlow_twins(net(v1), net(v2), 0.3)

    options = {"method.projection_head": SMALL, "method.off_diagonal": 0.3}
    assert_round(prepared("fedbarlow", **options), loss_of)


def test_fedvicreg_weighs_its_three_terms(prepared: Any) -> None:
    def loss_of(net: Any, batch: Batch) -> Tensor:
        v1, v2 = batch.views()
        return vicreg(net(v1), net(v2), invariance=2, variance=3, covariance=5)

    options = {
        "method.projection_head": SMALL,
        "method.invariance": 2.0,
        "method.variance": 3.0,
        "method.covariance": 5.0,
    }
    assert_round(prepared("fedvicreg", **options), loss_of)


# ---------------------------------------------------------------- two networks


@pytest.mark.parametrize("symmetric", [False, True])
def test_fedmoco_keeps_the_keys_that_it_compared_with(prepared: Any, symmetric: bool) -> None:
    """The key network is another than the query network from the beginning."""
    p = prepared("fedmoco", **{"method.symmetric": symmetric, "method.bank": 60})
    ctx, start = client(p), p.server.init()
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


def test_moon_is_drawn_to_the_received_network_and_away_from_its_last(prepared: Any) -> None:
    p = prepared("moon", **{"method.mu": 2.0})
    down, ctx = p.server.init(), client(p)
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


def test_fedx_adds_four_terms_of_two_networks(prepared: Any) -> None:
    temperatures = {"temperature": 0.05, "local_temperature": 0.1, "global_temperature": 0.2}
    p = prepared("fedx", **{f"method.{name}": value for name, value in temperatures.items()})
    ctx = client(p)
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


# ---------------------------------------------------------------- clusters


@pytest.mark.parametrize("batch_size", [24, 12])
def test_fedswav_predicts_the_code_of_the_other_view(prepared: Any, batch_size: int) -> None:
    """One step with an empty queue; or two, and the queue of the second is the first batch."""
    options = {"queue": 12, "freeze_epochs": 0, "projection_head": SMALL}
    p = prepared("fedswav", **{f"method.{name}": value for name, value in options.items()})
    down, ctx = p.server.init(), client(p, batch_size=batch_size)
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


def test_feddc_predicts_the_cluster_of_the_same_image(prepared: Any) -> None:
    """The bank has the images in another order than the epoch, and the epoch has two batches."""
    options = {"images_per_prototype": 4, "projection_head": SMALL}
    p = prepared("feddc", **{f"method.{name}": value for name, value in options.items()})
    down, ctx = p.server.init(), client(p, batch_size=12)
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


def test_orchestra_predicts_the_targets_clusters_of_the_other_view(prepared: Any) -> None:
    """The target network is another than the online network from the beginning."""
    p = prepared("orchestra", **{"method.decay": 0.7})
    start, ctx = p.server.init(), client(p, exchange=1)
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
