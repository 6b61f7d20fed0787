"""Supervised FedAvg, and with a proximal term FedProx: the upper bounds of FCL and FedU.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017; Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    L = CE(c(f(x)), y) + (μ/2)‖w - w_global‖²,   FedAvg: μ = 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, Context, ServerContext
from furlong.core.payload import Weights
from furlong.methods.base import Model, OneNetwork
from furlong.methods.networks import chained, filled, proximal
from furlong.settings import setting

LABELS_REVEAL = (
    "Weights after local training can reveal training images and which classes a client has "
    "(the classifier's rows and biases move with them); there is no formal privacy guarantee."
)


@dataclass(frozen=True)
class FedAvg(OneNetwork):
    """Learn the labels; what unsupervised methods are measured against."""

    paper = "McMahan et al., AISTATS 2017"
    decomposes = "records"
    needs_labels = True
    leaves = f"Encoder and classifier weights, never labels. {LABELS_REVEAL}"
    usual_augment = "flip_crop"

    mu: float = setting(0.0, "The weight μ of FedProx's proximal term.", at_least=0)

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and classifier: images B×C×H×W to scores B×n."""
        classifier = nn.Linear(ctx.width, ctx.setup.classes)
        return chained(backbone=ctx.encoder(), classifier=classifier)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy of one view."""
        assert batch.labels is not None
        return F.cross_entropy(net(*batch.views(1)), batch.labels)

    def penalty(self, net: nn.Module, start: Weights) -> Tensor | None:
        """FedProx's term over all parameters."""
        return self.mu * proximal(net, start) if self.mu else None

    def classifier(self, server: Model, ctx: ServerContext) -> nn.Module:
        """The whole network."""
        return filled(self.network(ctx), server.weights)
