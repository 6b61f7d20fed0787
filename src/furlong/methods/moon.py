"""MOON: model-contrastive federated learning (Li, He, Song, CVPR 2021), supervised.

    L = CE(c(z), y) + μ·ℓ,   z = g(f(x)),
    ℓ = -log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )

z_glob is the received model's projection, z_prev that of the client's own last model (before its
first participation: the received one, which makes ℓ the constant ln 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import ClientContext, Context, ServerContext
from furlong.core.method import Local
from furlong.core.weights import snapshot
from furlong.methods.base import Model, OneModel
from furlong.methods.fedavg import LABELS_REVEAL
from furlong.methods.networks import Projecting, extended, filled, named_head
from furlong.nn.losses import moon_contrast
from furlong.settings import setting


@dataclass(frozen=True)
class MOON(Projecting, OneModel[Model | None]):
    """Learn the labels; stay nearer to the global model's view of an image than to one's own."""

    paper = "Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021"
    needs_labels = True
    keeps = "its last local model"
    leaves = f"Encoder, projector and classifier weights, never labels. {LABELS_REVEAL}"
    usual_augment = "flip_crop"
    usual_small = {"projection_head": "mlp:256:128"}

    mu: float = setting(5.0, "The weight μ of the contrastive term.", at_least=0)
    temperature: float = setting(0.5, "The temperature τ of the contrastive term.", above=0)
    projection_head: str = named_head("moon_proj")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone, projector and classifier in a row: images B×C×H×W to scores B×n."""
        net = super().network(ctx)  # first: the same start as other methods
        return extended(net, classifier=nn.Linear(self.width(ctx), ctx.setup.classes))

    def local_update(
        self, state: Model | None, down: Model, ctx: ClientContext
    ) -> Local[Model | None, Model]:
        """Train the received network beside two frozen ones."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        received = ctx.network("received", lambda: self.network(ctx), down.weights).eval()
        last = (down if state is None else state).weights
        previous = ctx.network("previous", lambda: self.network(ctx), last).eval()
        optimiser = ctx.optimiser(net)
        for batch in ctx.batches():
            (view,) = batch.views(1)
            z = self.projections(net, view)
            assert batch.labels is not None
            loss = F.cross_entropy(net.get_submodule("classifier")(z), batch.labels)
            if self.mu:
                with torch.no_grad():
                    z_glob, z_prev = (self.projections(n, view) for n in (received, previous))
                loss = loss + self.mu * moon_contrast(z, z_glob, z_prev, self.temperature)
            optimiser.step(loss)
        trained = Model(snapshot(net))
        return Local(trained, trained, optimiser.metrics())

    def projections(self, net: nn.Module, view: Tensor) -> Tensor:
        """Images B×C×H×W to B×d_z."""
        z: Tensor = net.get_submodule("projector")(net.get_submodule("backbone")(view))
        return z

    def classifier(self, server: Model, ctx: ServerContext) -> nn.Module:
        """The whole network."""
        return filled(self.network(ctx), server.weights)
