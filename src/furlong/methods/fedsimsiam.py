"""FedSimSiam: SimSiam on every client, FedAvg of encoder, projector and predictor.

Chen & He, "Exploring Simple Siamese Representation Learning", CVPR 2021; a baseline of FedU.

    z = g(f(v)),   L = -½ cos(p(z₁), sg[z₂]) - ½ cos(p(z₂), sg[z₁])
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.method import USUAL
from furlong.methods.base import NO_NEGATIVES_REMEDY, WEIGHTS_REVEAL, OneNetwork
from furlong.methods.networks import WithPredictor, named_head
from furlong.nn.losses import cosine_simsiam


@dataclass(frozen=True)
class FedSimSiam(WithPredictor, OneNetwork):
    """Predict the one view's projection from the other's; no negatives, no target network."""

    paper = "Chen & He 2021 (SimSiam), averaged as in McMahan et al. 2017"
    leaves = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "optimiser.lr": 0.0005, "train.rounds": 80}  # slowly, or it collapses
    usual_small = {"projection_head": "mlp:256:256:128:bn", "prediction_head": "mlp:256:128"}
    decomposes = "records"
    remedy = NO_NEGATIVES_REMEDY

    # easyfl_proj (no BN at its end) and easyfl_pred to compare with FedU
    projection_head: str = named_head("simsiam_proj")
    prediction_head: str = named_head("simsiam_pred")

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """One pass per view, so that BatchNorm sees one view at a time, as in SimSiam."""
        backbone, projector, predictor = net.children()
        z1, z2 = (projector(backbone(view)) for view in batch.views())
        return (cosine_simsiam(predictor(z1), z2) + cosine_simsiam(predictor(z2), z1)) / 2
