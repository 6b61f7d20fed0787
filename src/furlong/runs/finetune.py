"""Federated fine-tuning: few labels that stay with their clients (FedCA's semi-supervised tables).

Every client labels a share of its own images; encoder and a new head are trained by supervised
FedAvg. Central fine-tuning with the same number of labels is ``furlong.evaluate.semi_supervised``
and gives much higher numbers on non-IID splits: the two are never to be mixed in one table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from furlong.core.context import ClientContext, Context, Exchange, OptimiserSettings
from furlong.core.exchange import Server
from furlong.core.federation import Federation
from furlong.core.guard import Guard
from furlong.core.method import Local
from furlong.core.weights import snapshot
from furlong.data.augment import crop_flip
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.evaluation.subset import stratified
from furlong.evaluation.tuning import TuningResult, accuracy, check_batch, new_head
from furlong.methods.base import Model
from furlong.methods.fedavg import FedAvg
from furlong.runs.prepare import Prepared
from furlong.seeding import seed_of


@dataclass(frozen=True)
class FederatedTuning:
    """How long and how fast; FCL and FedCA give none of it, so all of it is our choice."""

    rounds: int = 100
    epochs: int = 1
    batch_size: int = 64
    lr: float = 0.01  # of the encoder
    head_lr: float = 0.1
    momentum: float = 0.9
    head: Literal["linear", "mlp"] = "linear"  # FedCA: mlp, one hidden layer

    def __post_init__(self) -> None:
        check_batch(self.batch_size)


@dataclass(frozen=True)
class FineTuned(FedAvg):
    """Supervised FedAvg in which the head learns at a rate of its own."""

    paper: ClassVar[str] = "FedCA (Zhang et al. 2020), FCL: federated fine-tuning"

    head_lr: float = 0.1
    head: Literal["linear", "mlp"] = "linear"

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and head: images B×C×H×W to scores B×n."""
        head = new_head(self.head, ctx.width, ctx.setup.classes)
        return nn.Sequential(OrderedDict(backbone=ctx.encoder(), classifier=head))

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """As FedAvg, with two learning rates."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        optimiser = ctx.optimiser(net.get_submodule("backbone"))
        head = list(net.get_submodule("classifier").parameters())
        optimiser.torch.add_param_group({"params": head, "lr": self.head_lr})
        for batch in ctx.batches():
            optimiser.step(self.loss(net, batch))
        return Local(state, Model(snapshot(net)), optimiser.metrics())


def labelled(federation: Federation, share: float, seed: int) -> Federation:
    """The same clients with ⌈share·n_kc⌉ images of every class c that client k holds."""
    labels = federation.images.labels
    if labels is None:
        raise FurlongError(f"{federation.images.name} has no labels.")
    rows = {
        client: own[stratified(labels[own], share, seed_of(seed, "labels", client))]
        for client, own in federation.rows.items()
    }
    for client, chosen in rows.items():
        if len(chosen) < 2:
            raise FurlongError(
                f"{share:.1%} of the labels of client {client} is one image, and training needs "
                "two. Take a larger share, more images or fewer clients."
            )
    used, held = (sum(map(len, each.values())) for each in (rows, federation.rows))
    if used > 2 * share * held:  # then it is no longer what it is called
        raise FurlongError(
            f"{share:.1%} of the {held} labels of {federation.images.name}, but at least one of "
            f"every class on every client, are {used / held:.1%}. Take at least that many, more "
            "images or fewer clients."
        )
    return replace(federation, rows=rows)


def federated_fine_tune(
    encoder: nn.Module,
    prepared: Prepared,
    share: float,
    plan: FederatedTuning | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TuningResult:
    """Accuracy of ``encoder`` on the test split after fine-tuning by the clients of ``prepared``.

    ``encoder`` has the architecture of ``prepared`` and is left as it is. Labelled images, head and
    batches depend on the run's seed only, so every encoder meets the same.
    """
    plan = plan or FederatedTuning()
    assert prepared.test is not None
    federation = labelled(prepared.federation, share, prepared.setup.seed)
    setup = replace(
        prepared.setup,
        augment=crop_flip(prepared.setup.augment),
        rounds=plan.rounds,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        optimiser=OptimiserSettings("sgd", plan.lr, plan.momentum, 0.0, "constant"),
        sizes=federation.sizes,
        classes=prepared.train.n_classes,
    )
    method = FineTuned(head_lr=plan.head_lr, head=plan.head)
    server: Server[Model, Model, Model] = Server(method, setup, guard=Guard(sizes=federation.sizes))
    state = server.init()
    start = {f"backbone.{name}": tensor for name, tensor in snapshot(encoder).items()}
    state = Model(state.weights | start)
    with InProcess(method, federation, setup, prepared.workers) as transport:
        for result in server.run(federation, transport, state):
            state = result.server
            if progress is not None:
                progress(result.exchange.index + 1, plan.rounds)
    with torch.random.fork_rng(devices=[]):
        model = method.classifier(state, server.context(Exchange(round=plan.rounds)))
    chosen = torch.cat([federation.rows[client] for client in federation.clients])
    return TuningResult(
        accuracy(model.to(setup.device), prepared.test, setup.augment),
        accuracy(model, prepared.train.subset(chosen), setup.augment),
        len(chosen),
    )
