"""FedSimSiam: SimSiam on every client, FedAvg of encoder, projector and predictor.

Chen & He, "Exploring Simple Siamese Representation Learning", CVPR 2021; a baseline of FedU.

    z = g(f(v)),   L = -½ cos(p(z₁), sg[z₂]) - ½ cos(p(z₂), sg[z₁])

Ours, where ``predictor_steps`` is not 0: before every step the predictor p alone takes some steps
on the same z. The paper explains SimSiam by a predictor that is at its best for the encoder of the
moment (section 5). One that has just been averaged, or that a quick encoder leaves behind, is not,
and the encoder collapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext
from furlong.core.method import USUAL, Local
from furlong.core.weights import snapshot
from furlong.methods.base import NO_NEGATIVES_REMEDY, WEIGHTS_REVEAL, Model, OneNetwork
from furlong.methods.networks import WithPredictor, named_head
from furlong.nn.losses import cosine_simsiam
from furlong.settings import setting


@dataclass(frozen=True)
class FedSimSiam(WithPredictor, OneNetwork):
    """Predict the one view's projection from the other's; no negatives, no target network."""

    paper = "Chen & He 2021 (SimSiam), averaged as in McMahan et al. 2017"
    leaves = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "method.predictor_steps": 10}
    usual_small = {"projection_head": "mlp:256:256:128:bn", "prediction_head": "mlp:256:128"}
    remedy = f"{NO_NEGATIVES_REMEDY} More --method.predictor-steps allow a higher rate."

    # easyfl_proj (no BN at its end) and easyfl_pred to compare with FedU
    projection_head: str = named_head("simsiam_proj")
    prediction_head: str = named_head("simsiam_pred")
    predictor_steps: int = setting(
        0,
        "Steps of the predictor alone before every step, which cost time; the paper has none.",
        at_least=0,
    )

    @property
    def decomposes(self) -> Literal["no", "records"]:  # type: ignore[override]
        """The predictor's own steps are on whole batches."""
        return "no" if self.predictor_steps else "records"

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """L for a predictor as it is."""
        return symmetric(net.get_submodule("predictor"), *projections(net, batch))

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """Steps of the predictor alone, then one of the whole network, on each batch."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        predictor = net.get_submodule("predictor")
        alone = ctx.optimiser(predictor) if self.predictor_steps else None
        optimiser = ctx.optimiser(net)

        def loss_of(batch: Batch) -> Tensor:
            z1, z2 = projections(net, batch)
            if alone is not None:
                for _ in range(self.predictor_steps):
                    alone.step(symmetric(predictor, z1.detach(), z2.detach()))
            return symmetric(predictor, z1, z2)

        for batch in ctx.batches():
            optimiser.descend(loss_of, batch)
        return Local(state, Model(snapshot(net)), optimiser.metrics())


def projections(net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Z of two views, B×d_z each; one pass per view, so that BatchNorm sees one view at a time."""
    backbone, projector, _ = net.children()
    z1, z2 = (projector(backbone(view)) for view in batch.views())
    return z1, z2


def symmetric(predictor: nn.Module, z1: Tensor, z2: Tensor) -> Tensor:
    """The loss L of two views' projections, B×d_z each."""
    there, back = cosine_simsiam(predictor(z1), z2), cosine_simsiam(predictor(z2), z1)
    return (there + back) / 2
