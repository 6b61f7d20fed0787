"""FedAvg's server half (McMahan et al., AISTATS 2017): base classes of methods that average.

θ ← Σ_k w_k θ_k with w_k = n_k / Σ_j n_j over those who took part in the round.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import Batch, ClientContext, Context, ServerContext
from furlong.core.method import Local, Method, Reports
from furlong.core.payload import Weights, payload
from furlong.core.weights import snapshot
from furlong.methods.networks import backbone

C = TypeVar("C")
D = TypeVar("D")

WEIGHTS_REVEAL = (
    "Weights after local training can reveal training images (inversion, membership inference); "
    "there is no formal privacy guarantee."
)
CONTRASTIVE_REMEDY = (
    "Try a larger --batch-size, which gives more negatives, a lower --method.temperature, which "
    "pushes similar images further apart, or a lower --optimiser.lr."
)
NO_NEGATIVES_REMEDY = (
    "There are no negatives, so what holds features apart is a projection head that ends in "
    "BatchNorm: --method.projection-head mlp:256:128:bn. If it has one, try a lower "
    "--optimiser.lr, or more steps per round: more --epochs or a smaller --batch-size."
)


@payload("furlong.methods.averaging.Model")
class Model:
    """One network's weights."""

    weights: Weights


@dataclass(frozen=True)
class Averaging(Method[D, C, D, D]):
    """Everybody gets the same payload, the answers look like it and are averaged.

    If an ``aggregate`` of its own needs more than the answers' mean, ``singles`` must say so.
    """

    singles = ""

    def download(self, server: D, client: int, ctx: ServerContext) -> D:  # noqa: ARG002
        """The server's state itself."""
        return server

    def expected(self, server: D, client: int, ctx: ServerContext) -> D:  # noqa: ARG002
        """Uploads look like the server's state."""
        return server

    def aggregate(self, server: D, reports: Reports[D], ctx: ServerContext) -> D:
        """By the run's rule: the mean weighted by the images of those who took part."""
        combined: Combiner[D] = ctx.combining(self.bn_stats)
        for report in reports:
            combined.add(report.upload, report.examples)
        return combined.onto(server)

    def local_encoder(self, upload: D, ctx: ServerContext) -> nn.Module | None:
        """What would be the global encoder if this client were the only one."""
        return None if self.bn_stats == "local" else self.encoder(upload, ctx)


@dataclass(frozen=True)
class OneModel(Averaging[Model, C]):
    """One network's weights are all that travels."""

    @abstractmethod
    def network(self, ctx: Context) -> nn.Module:
        """The network; its part ``backbone`` is the encoder."""

    def init_server(self, ctx: ServerContext) -> Model:
        """A freshly initialised network."""
        return Model(snapshot(self.network(ctx)))

    def encoder(self, server: Model, ctx: ServerContext) -> nn.Module:
        """The backbone."""
        return backbone(server.weights, ctx)


@dataclass(frozen=True)
class OneNetwork(OneModel[None]):
    """One network, trained by one loss; clients keep nothing. Most baselines are no more."""

    @abstractmethod
    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """What a step on ``batch`` lowers."""

    def penalty(self, net: nn.Module, start: Weights) -> Tensor | None:  # noqa: ARG002
        """What comes on top for moving away from ``start``, the global network."""
        return None

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """Replace the network by the global one and train it."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        start = ctx.on_device(down.weights)
        optimiser = ctx.optimiser(net)

        def loss_of(batch: Batch) -> Tensor:
            loss, penalty = self.loss(net, batch), self.penalty(net, start)
            return loss if penalty is None else loss + penalty

        for batch in ctx.batches():
            optimiser.descend(loss_of, batch)
        return Local(state, Model(snapshot(net)), optimiser.metrics())
