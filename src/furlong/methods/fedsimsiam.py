"""FedSimSiam: SimSiam on every client, FedAvg of encoder, projector and predictor.

Chen & He, "Exploring Simple Siamese Representation Learning", CVPR 2021; a baseline of FedU.

    z = g(f(v)),   L = -½ cos(p(z₁), sg[z₂]) - ½ cos(p(z₂), sg[z₁])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from furlong.core.context import Batch, Context
from furlong.methods.base import WEIGHTS_REVEAL, OneNetwork, extended, predicting, projecting
from furlong.nn.losses import cosine_simsiam


@dataclass(frozen=True)
class FedSimSiam(OneNetwork):
    """Predict the one view's projection from the other's; no negatives, no target network."""

    paper: ClassVar[str] = "Chen & He 2021 (SimSiam), averaged as in McMahan et al. 2017"
    leaves: ClassVar[str] = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"

    projection_head: str = "simsiam_proj"  # easyfl_proj (no BN at its end) to compare with FedU
    prediction_head: str = "simsiam_pred"  # easyfl_pred likewise

    def network(self, ctx: Context) -> nn.Module:
        """Backbone, projector and predictor in a row."""
        net = projecting(self.projection_head, ctx)  # first: the same start as other methods
        predictor = predicting(self.projection_head, self.prediction_head, ctx)
        return extended(net, predictor=predictor)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One pass per view, so that BatchNorm sees one view at a time, as in SimSiam."""
        backbone, projector, predictor = net.children()
        z1, z2 = (projector(backbone(view)) for view in batch.views())
        return (cosine_simsiam(predictor(z1), z2) + cosine_simsiam(predictor(z2), z1)) / 2
