"""FedU: divergence-aware predictor update (Zhuang et al., ICCV 2021), and with it FedBYOL.

Every client trains BYOL. Three independent choices make the protocol:
which encoder is averaged to Φ, which of a client's encoders Φ overwrites, whose predictor goes on
(Ψ = the averaged one). DAPU: Ψ if the online encoder moved less than μ in the client's last local
training, else the client's own. FedU = (online, online, dapu), FedBYOL = (online, online, global).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from furlong.core.context import ClientContext, ServerContext
from furlong.core.method import Local
from furlong.core.payload import Weights, payload
from furlong.core.weights import DIVERGENCES
from furlong.errors import require
from furlong.methods.base import WEIGHTS_REVEAL, Averaging, backbone
from furlong.methods.byol import Byol, Shared, Triple


@payload("furlong.methods.fedu.State")
class State:
    """What a client keeps: the networks that its next merge may need, and the divergence."""

    online: Weights | None
    target: Weights | None
    predictor: Weights | None
    divergence: float


def _choose(keep: bool, own: Weights | None, shared: Weights) -> Weights:
    return own if keep and own is not None else shared


@dataclass(frozen=True)
class FedU(Averaging[Shared, State | None]):
    """BYOL; which encoder travels, which slots it overwrites, whose predictor goes on."""

    paper: ClassVar[str] = (
        "Zhuang et al., Collaborative Unsupervised Visual Representation Learning from "
        "Decentralized Data, ICCV 2021"
    )
    keeps: ClassVar[str] = (
        "those of its networks that the global ones do not replace (FedU: target and predictor; "
        "FedBYOL: target), and how far its encoder moved last"
    )
    leaves: ClassVar[str] = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"

    aggregate_from: Literal["online", "target"] = "online"
    update: Literal["online", "target", "both", "none"] = "online"
    predictor: Literal["global", "local", "dapu"] = "dapu"
    threshold: float = 0.4  # μ: 0.4 for CIFAR-10, 0.6 for CIFAR-100 in the paper
    divergence: Literal["mean_conv_l2", "sq_l2"] = "mean_conv_l2"
    decay: float = 0.99
    symmetric: bool = True  # False: the one direction that the paper prints
    projection_head: str = "easyfl_proj"
    prediction_head: str = "easyfl_pred"

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "at least 0")
        _ = self.byol

    @property
    def byol(self) -> Byol:
        """The local learner."""
        return Byol(self.projection_head, self.prediction_head, self.decay, self.symmetric)

    @property
    def keeps_online(self) -> bool:
        """Whether Φ leaves a client's online encoder alone."""
        return self.update in ("target", "none")

    @property
    def keeps_target(self) -> bool:
        """Whether Φ leaves a client's target encoder alone."""
        return self.update in ("online", "none")

    def init_server(self, ctx: ServerContext) -> Shared:
        """Φ and Ψ, freshly initialised."""
        return self.byol.init(ctx)

    def merge(self, state: State | None, down: Shared) -> Triple:
        """The networks local training starts from."""
        if state is None:
            return Triple(online=down.encoder, target=down.encoder, predictor=down.predictor)
        keeps_predictor = self.predictor == "local" or (
            self.predictor == "dapu" and state.divergence >= self.threshold
        )
        return Triple(
            online=_choose(self.keeps_online, state.online, down.encoder),
            target=_choose(self.keeps_target, state.target, down.encoder),
            predictor=_choose(keeps_predictor, state.predictor, down.predictor),
        )

    def local_update(
        self, state: State | None, down: Shared, ctx: ClientContext
    ) -> Local[State | None, Shared]:
        """Merge, train, measure the divergence."""
        start = self.merge(state, down)
        nets, metrics = self.byol.train(start, ctx)
        kept = State(
            online=nets.online if self.keeps_online else None,
            target=nets.target if self.keeps_target else None,
            predictor=nets.predictor if self.predictor != "global" else None,
            divergence=DIVERGENCES[self.divergence](nets.online, start.online),
        )
        upload = Shared(
            encoder=nets.online if self.aggregate_from == "online" else nets.target,
            predictor=nets.predictor,
        )
        return Local(kept, upload, metrics | {"divergence": kept.divergence})

    def encoder(self, server: Shared, ctx: ServerContext) -> nn.Module:
        """The backbone of Φ."""
        return backbone(server.encoder, ctx)
