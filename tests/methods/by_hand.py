"""A client's work in tests of methods: its context, its training, and the same repeated by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, Networks, OptimiserSettings
from furlong.core.payload import Weights
from furlong.seeding import seeded

LR = 0.1
SMALL = "mlp:32:16"
WIDTH = 128  # of the projections that go with the small encoder


def local_context(p: Any, exchange: int = 0, client: int = 0, **setup: Any) -> ClientContext:
    """Client ``client``, with some of the run's settings changed."""
    shard = p.federation.shard(client, labels=p.method.needs_labels)
    where = p.server.exchanges()[exchange]
    return ClientContext(replace(p.setup, **setup), where, Networks(), client=client, data=shard)


def plain_client(p: Any, exchange: int = 0, batch_size: int = 24) -> ClientContext:
    """Client 0 with its 24 images, an epoch and plain gradient descent."""
    plain = OptimiserSettings("sgd", LR, momentum=0, weight_decay=0, schedule="constant")
    return local_context(p, exchange, optimiser=plain, batch_size=batch_size, epochs=1)


def run_round(method: Any, down: Any, ctx: ClientContext, state: Any = None) -> Any:
    """What the client does in ``ctx``, from a fixed seed."""
    with seeded(ctx.setup.device, "train"):
        return method.local_update(state, down, ctx)


def train(p: Any, state: Any, down: Any, exchange: int = 0) -> Any:
    """A round of client 0."""
    return run_round(p.method, down, local_context(p, exchange), state)


def trained(p: Any, ctx: ClientContext, down: Any, state: Any = None) -> Any:
    """A round of the client of ``ctx``."""
    return run_round(p.method, down, ctx, state)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def a_batch(p: Any, count: int = 6) -> Batch:
    labels = None if p.train.labels is None else p.train.labels[:count]
    return Batch(p.train.pixels[:count], torch.arange(count), labels, p.setup.augment)


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of all calls of ``owner.name`` from now on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def record(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, record)
    return calls


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


class ByolNets(NamedTuple):
    """BYOL's networks after training, what they started from, and the mean loss."""

    online: nn.Module
    target: nn.Module
    predictor: nn.Module
    start: tuple[Weights, Weights, Weights]
    loss: float

    def assert_are(self, **given: Weights | None) -> None:
        """Every parameter, up to 1 % of the way that it went, and every statistic of the given."""
        starts = dict(zip(("online", "target", "predictor"), self.start, strict=True))
        for part, weights in given.items():
            if weights is None:
                continue
            net = getattr(self, part)
            assert_same(net, weights, starts[part])
            for name, value in net.named_buffers():
                torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)

    @property
    def weights(self) -> tuple[Weights, Weights, Weights]:
        """Of the online network, the target and the predictor."""
        online, target, predictor = (
            {name: value.detach().clone() for name, value in net.state_dict().items()}
            for net in (self.online, self.target, self.predictor)
        )
        return online, target, predictor


def byol_by_hand(
    p: Any,
    ctx: ClientContext,
    start: tuple[Weights, Weights, Weights],
    decay: float,
    symmetric: bool = True,
) -> ByolNets:
    """Grill et al. 2020 in plain torch, from the weights of online network, target, predictor.

    Each step lowers |p/‖p‖ - t/‖t‖|², p predicted from one view and t the target of the other view;
    then the target goes to decay·target + (1 - decay)·online.
    """
    online, target = twin(p, ctx, start[0]), twin(p, ctx, start[1])
    predictor = p.method.new_predictor(ctx)
    predictor.load_state_dict(start[2])
    losses = []

    def distance(view: Tensor, wanted: Tensor) -> Tensor:
        predicted = predictor(online(view))
        predicted = predicted / predicted.norm(dim=1, keepdim=True)
        wanted = wanted / wanted.norm(dim=1, keepdim=True)
        return (predicted - wanted).square().sum(1).mean()

    def loss_of(batch: Batch) -> Tensor:
        v1, v2 = batch.views()
        with torch.no_grad():
            t1, t2 = target(v1), target(v2)
        loss = distance(v1, t2)
        return loss + distance(v2, t1) if symmetric else loss

    with seeded(p.setup.device, "train"):
        for batch in ctx.batches():
            losses.append(descend([batch], loss_of, online, predictor))
            with torch.no_grad():
                for own, new in zip(target.parameters(), online.parameters(), strict=True):
                    own.copy_(decay * own + (1 - decay) * new)
    return ByolNets(online, target, predictor, start, sum(losses) / len(losses))


def assert_round(p: Any, loss_of: Callable[[Any, Batch], Tensor], batch_size: int = 24) -> None:
    """The client's round is gradient descent on ``loss_of``."""
    down, ctx = p.server.init(), plain_client(p, batch_size=batch_size)
    local = trained(p, ctx, down)
    net = twin(p, ctx, down.weights)
    with seeded(p.setup.device, "train"):
        loss = descend(ctx.batches(), lambda batch: loss_of(net, batch), net)
    assert local.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(net, local.upload.weights, down.weights)


def distance(part: nn.Module, start: list[Tensor]) -> Tensor:
    """Squared, from the ``start`` of a round."""
    moved = [((p - s) ** 2).sum() for p, s in zip(part.parameters(), start, strict=True)]
    return torch.stack(moved).sum()
