"""FedU²: uniform and unified representations (Liao et al., CVPR 2024).

A client trains BYOL with a *flexible uniform regulariser* on its projections z,

    L = BYOL + λ·[SSW(z₁) + SSW(z₂)],

where SSW is the sliced Wasserstein distance from the uniform distribution on the sphere. Online
network, target and predictor are all averaged, by the server's rule ``eua``
(:mod:`furlong.core.aggregation`): clients that went far, or where many others went, count less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.core.context import ClientContext, ServerContext
from furlong.core.method import Local
from furlong.core.payload import Weights, payload
from furlong.devices import moved
from furlong.methods.base import WEIGHTS_REVEAL
from furlong.methods.byol import Byol, Shared, Triple
from furlong.methods.networks import named_head
from furlong.nn.losses import distance_from_uniform
from furlong.settings import setting


@payload("furlong.methods.fedu2.Nets")
class Nets(Shared):
    """What travels: an encoder, its target and a predictor."""

    target: Weights


@dataclass(frozen=True)
class FedU2(Byol[None]):
    """BYOL whose projections are drawn towards covering the sphere evenly."""

    paper = (
        "Liao et al., Rethinking the Representation in Federated Unsupervised Learning with "
        "Non-IID Data, CVPR 2024"
    )
    leaves = f"Encoder, projector, predictor and target weights. {WEIGHTS_REVEAL}"
    caution = (
        "The regulariser is the closed form of the sliced Wasserstein distance from the uniform "
        "distribution. The paper approximates one from random points by unbalanced transport in "
        "tangent spaces, and its public code cannot be run: it names losses that it does not have."
    )
    usual_small = {"projection_head": "mlp:256:128:bn", "prediction_head": "mlp:256:128"}

    uniform: float = setting(0.01, "The weight λ of the uniform regulariser.", at_least=0)
    planes: int = setting(64, "How many random planes the distance is taken in.", at_least=1)
    decay: float = setting(0.99, "The decay m of the target network.", at_least=0, at_most=1)
    symmetric: bool = setting(True, "Add the loss with the views swapped.")
    projection_head: str = named_head("easyfl_proj")
    prediction_head: str = named_head("easyfl_pred")

    def init_server(self, ctx: ServerContext) -> Nets:
        """Freshly initialised networks; the target is the encoder."""
        start = super().init_server(ctx)
        return Nets(start.encoder, start.predictor, start.encoder)

    def local_update(self, state: None, down: Shared, ctx: ClientContext) -> Local[None, Shared]:
        """Take over all three networks and train."""
        assert isinstance(down, Nets)
        nets, metrics = self.train(Triple(down.encoder, down.target, down.predictor), ctx)
        return Local(state, Nets(nets.online, nets.predictor, nets.target), metrics)

    def regulariser(self, z: Tensor) -> Tensor | float:
        """λ·SSW(z) in random planes."""
        if not self.uniform:
            return 0.0
        planes = torch.linalg.qr(torch.randn(self.planes, z.shape[1], 2))[0]
        return self.uniform * distance_from_uniform(z, moved(planes, z.device).to(z.dtype))
