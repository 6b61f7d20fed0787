"""FedX: unsupervised federated learning with cross knowledge distillation.

Han et al., ECCV 2022 (arXiv 2207.09158), on SimCLR.

    z = g(f(x)), y = p(z); z^G by the received network, which stays as it is; x₃ = other images
    L = NT(z₁, z₂) + JS(z₁, z₂; z₃)  [local distillation]
      + NT(y₁, z₂^G) + JS(y₁, y₂; z₃^G)  [global distillation]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.core.context import ClientContext
from furlong.core.method import Local
from furlong.core.weights import snapshot
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL, Model, OneModel
from furlong.methods.networks import WithPredictor, named_head
from furlong.nn.losses import nt_xent, relational
from furlong.settings import setting


@dataclass(frozen=True)
class FedX(WithPredictor, OneModel[None]):
    """Contrast, and relate to other images, as oneself and as the global model does."""

    paper = (
        "Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, "
        "ECCV 2022"
    )
    leaves = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"
    usual_small = {"projection_head": "mlp:256:128", "prediction_head": "mlp:256:128"}
    remedy = CONTRASTIVE_REMEDY

    temperature: float = setting(0.1, "The temperature of the losses.", above=0)
    local_temperature: float = setting(
        0.1, "The local mean's temperature (the code's ts).", above=0
    )
    global_temperature: float = setting(0.1, "The global mean's temperature (tt).", above=0)
    reverse_kl: bool = setting(False, "Use KL(mean‖relation) as in the authors' code, not JS.")
    projection_head: str = named_head("fedx_proj")
    prediction_head: str = named_head("fedx_pred")

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """Two views of a batch and one view of another, through both networks."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        received = ctx.network("received", lambda: self.network(ctx), down.weights).eval()
        optimiser = ctx.optimiser(net)
        for batch, others in zip(ctx.batches(), ctx.batches(counted=False), strict=True):
            images = torch.cat([*batch.views(), *others.views(1)])
            projected = net[:2](images)  # type: ignore[index]
            predicted = net[2](projected)  # type: ignore[index]
            with torch.no_grad():
                taught = received[:2](images)  # type: ignore[index]
            optimiser.step(self.loss(projected, predicted, taught))
        return Local(state, Model(snapshot(net)), optimiser.metrics())

    def loss(self, projected: Tensor, predicted: Tensor, taught: Tensor) -> Tensor:
        """Of 3B×d each: first views, second views, other images."""
        (z1, z2, z3), (y1, y2, _) = projected.chunk(3), predicted.chunk(3)
        _, g2, g3 = taught.chunk(3)
        t, turned = self.temperature, self.reverse_kl
        own = nt_xent(z1, z2, t) + relational(z1, z2, z3, t, self.local_temperature, turned)
        taught_by = relational(y1, y2, g3, t, self.global_temperature, turned)
        return own + nt_xent(y1, g2, t) + taught_by
