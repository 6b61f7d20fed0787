"""Federated fine-tuning: few labels that stay with their clients (FedCA's semi-supervised tables).

Every client labels a share of its own images; encoder and a new head are trained by supervised
FedAvg. Central fine-tuning with the same number of labels is ``furlong.evaluation.semi`` and gives
much higher numbers on non-IID splits: the two are never to be mixed in one table.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from furlong.core.context import ClientContext, Context, Exchange, OptimiserSettings, Setup
from furlong.core.exchange import Server
from furlong.core.federation import Federation
from furlong.core.guard import Guard
from furlong.core.method import Local
from furlong.core.weights import snapshot
from furlong.data.augment import crop_flip
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.evaluation.metrics import top1
from furlong.evaluation.protocol import Encoded, Images, Progress, Protocol, silent, stratified
from furlong.evaluation.tuning import TuningResult, class_scores, new_head
from furlong.methods.base import Model
from furlong.methods.fedavg import FedAvg
from furlong.nn.encoders import out_dim
from furlong.seeding import seed_of
from furlong.settings import setting


@dataclass(frozen=True)
class ClientImages(Images):
    """Images that clients hold, and what is needed to let these train."""

    federation: Federation
    partition: str
    encoder: str  # the architecture
    device: torch.device
    workers: int
    server_threads: int


@dataclass(frozen=True)
class TwoRates(FedAvg):
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


@dataclass(frozen=True)
class Federated(Protocol):
    """The accuracy of an encoder after its clients have fine-tuned it with their labels.

    How long and how fast FCL and FedCA do not say, so all of it is our choice. Labelled images,
    head and batches depend on the seed only, so every encoder meets the same.
    """

    kind: ClassVar[str] = "federated"
    with_random: ClassVar[bool] = True
    needs_share: ClassVar[bool] = True

    labels: float = setting(1.0, "The share of the labels that is used.", above=0, at_most=1)
    rounds: int = setting(100, "Rounds of communication.", above=0)
    epochs: int = setting(1, "Local epochs per round.", above=0)
    batch_size: int = setting(64, "Local batch size.", at_least=2)
    lr: float = setting(0.01, "The encoder's learning rate.", above=0)
    head_lr: float = setting(0.1, "The head's learning rate.", above=0)
    momentum: float = setting(0.9, "Of SGD.", at_least=0, below=1)
    head: Literal["linear", "mlp"] = setting("linear", "mlp has one hidden layer (FedCA).")

    def check(self, images: Images) -> None:
        """Every client must have labels enough."""
        super().check(images)
        labelled(_held(images).federation, self.labels, images.seed)

    def settings(self, images: Images) -> dict[str, Any]:
        """As given, and who held the images."""
        held = _held(images)
        split = {"partition": held.partition, "clients": len(held.federation.rows)}
        return {**super().settings(images), **split}

    def measure(self, encoded: Encoded, progress: Progress = silent) -> dict[str, Any]:
        """The accuracies on test and labelled images, and how many of these there were."""
        images, encoder = _held(encoded.images), encoded.encoder
        train, test = images.labelled()
        federation = labelled(images.federation, self.labels, images.seed)
        setup = Setup(
            encoder=images.encoder,
            width=out_dim(encoder, train.channels, train.size[0]),
            channels=train.channels,
            image_size=train.size[0],
            augment=crop_flip(images.augment),
            rounds=self.rounds,
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimiser=OptimiserSettings("sgd", self.lr, self.momentum, 0.0, "constant"),
            sizes=federation.sizes,
            classes=train.n_classes,
            seed=images.seed,
            server_threads=images.server_threads,
            device=images.device,
        )
        method = TwoRates(head_lr=self.head_lr, head=self.head)
        server: Server[Model, Model, Model] = Server(method, setup, guard=Guard(sizes=setup.sizes))
        start = {f"backbone.{name}": tensor for name, tensor in snapshot(encoder).items()}
        state = Model(server.init().weights | start)
        with InProcess(method, federation, setup, images.workers) as engine:
            for result in server.run(engine, state):
                state = result.server
                progress(result.exchange.index + 1, self.rounds)
        with torch.random.fork_rng(devices=[]):
            model = method.classifier(state, server.context(Exchange(round=self.rounds)))
        chosen = torch.cat([federation.rows[client] for client in federation.clients])
        scores = class_scores(model.to(setup.device), test, setup.augment)
        own = train.subset(chosen)
        assert own.labels is not None
        assert test.labels is not None
        trained = top1(class_scores(model, own, setup.augment), own.labels)
        found = TuningResult(top1(scores, test.labels), trained, len(chosen), scores)
        return found.numbers(test, images.seed)


def _held(images: Images) -> ClientImages:
    assert isinstance(images, ClientImages)
    return images
