"""FedU: divergence-aware predictor update (Zhuang et al., ICCV 2021), and with it FedBYOL.

Every client trains BYOL. Three independent choices make the protocol:
which encoder is averaged to Φ, which of a client's encoders Φ overwrites, whose predictor goes on
(Ψ = the averaged one). DAPU: Ψ if the online encoder moved less than μ in the client's last local
training, else the client's own. FedU = (online, online, dapu), FedBYOL = (online, online, global).

How far an encoder moves depends on its size, the learning rate and the steps of a round, so that
the paper's μ decides nothing in other settings: all divergences are above it, or all below. With
``threshold_kind = "relative"`` (not in the paper) μ counts in divergences of the client's own first
local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.core.context import ClientContext
from furlong.core.method import Local
from furlong.core.payload import Weights, payload
from furlong.core.weights import DIVERGENCES
from furlong.methods.base import WEIGHTS_REVEAL
from furlong.methods.byol import Byol, Shared, Triple
from furlong.methods.networks import named_head
from furlong.settings import setting


@payload("furlong.methods.fedu.State")
class State:
    """What a client keeps: the networks that its next merge may need, its last divergence and its
    first (which earlier versions, where μ was always absolute, did not keep).
    """

    online: Weights | None
    target: Weights | None
    predictor: Weights | None
    divergence: float
    first: float = 0.0


def _choose(keep: bool, own: Weights | None, shared: Weights) -> Weights:
    return own if keep and own is not None else shared


@dataclass(frozen=True)
class FedU(Byol[State | None]):
    """BYOL; which encoder travels, which slots it overwrites, whose predictor goes on."""

    paper = (
        "Zhuang et al., Collaborative Unsupervised Visual Representation Learning from "
        "Decentralized Data, ICCV 2021"
    )
    keeps = (
        "those of its networks that the global ones do not replace (FedU: target and predictor; "
        "FedBYOL: target), and how far its encoder moved first and last"
    )
    decomposes = "records"
    leaves = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"
    explains = {
        **Byol.explains,
        "took_global_predictor": "Share of clients that went on with the global predictor Ψ; at 0 "
        "or 1 in all rounds DAPU decides nothing.",
    }
    # the paper's absolute μ is of its own encoder, rate and steps: here it would decide nothing
    usual = {
        **Byol.usual,
        "method.threshold_kind": "relative",
        "method.threshold": 0.75,
    }
    usual_small = {"projection_head": "mlp:256:128:bn", "prediction_head": "mlp:256:128"}

    aggregate_from: Literal["online", "target"] = setting(
        "online", "Which of a client's encoders the server averages."
    )
    update: Literal["online", "target", "both", "none"] = setting(
        "online", "Which of a client's encoders the global one overwrites."
    )
    predictor: Literal["global", "local", "dapu"] = setting(
        "dapu", "Whose predictor goes on: the global one, the client's, or as its divergence says."
    )
    threshold: float = setting(
        0.4,
        "From which divergence μ on a client keeps its own predictor; in the paper 0.4 for "
        "CIFAR-10 and 0.6 for CIFAR-100.",
        at_least=0,
        infinite=True,
    )
    threshold_kind: Literal["absolute", "relative"] = setting(
        "absolute",
        "What μ is compared with: the divergence itself (the paper), or its ratio to that of the "
        "client's first local training, where divergences are larger or smaller than the paper's.",
    )
    divergence: Literal["mean_conv_l2", "sq_l2"] = setting(
        "mean_conv_l2", "How the divergence is measured: as in EasyFL, or as the paper writes it."
    )
    decay: float = setting(0.99, "The decay m of the target network.", at_least=0, at_most=1)
    symmetric: bool = setting(
        True, "Add the loss with the views swapped; the paper prints one direction."
    )
    projection_head: str = named_head("easyfl_proj")
    prediction_head: str = named_head("easyfl_pred")

    @property
    def keeps_online(self) -> bool:
        """Whether Φ leaves a client's online encoder alone."""
        return self.update in ("target", "none")

    @property
    def keeps_target(self) -> bool:
        """Whether Φ leaves a client's target encoder alone."""
        return self.update in ("online", "none")

    def keeps_predictor(self, state: State) -> bool:
        """Whether the client goes on with its own predictor; DAPU does from the divergence μ on."""
        if self.predictor != "dapu":
            return self.predictor == "local"
        scale = state.first if self.threshold_kind == "relative" else 1.0
        return state.divergence >= self.threshold * scale

    def merge(self, state: State | None, down: Shared) -> Triple:
        """The networks local training starts from."""
        if state is None:
            return Triple(online=down.encoder, target=down.encoder, predictor=down.predictor)
        return Triple(
            online=_choose(self.keeps_online, state.online, down.encoder),
            target=_choose(self.keeps_target, state.target, down.encoder),
            predictor=_choose(self.keeps_predictor(state), state.predictor, down.predictor),
        )

    def local_update(
        self, state: State | None, down: Shared, ctx: ClientContext
    ) -> Local[State | None, Shared]:
        """Merge, train, measure the divergence."""
        start = self.merge(state, down)
        nets, metrics = self.train(start, ctx)
        moved = DIVERGENCES[self.divergence](nets.online, start.online)
        kept = State(
            online=nets.online if self.keeps_online else None,
            target=nets.target if self.keeps_target else None,
            predictor=nets.predictor if self.predictor != "global" else None,
            divergence=moved,
            first=moved if state is None else state.first,
        )
        upload = Shared(
            encoder=nets.online if self.aggregate_from == "online" else nets.target,
            predictor=nets.predictor,
        )
        metrics["divergence"] = moved
        if self.predictor == "dapu":  # at its first participation a client has only Ψ to take
            metrics["took_global_predictor"] = float(start.predictor is down.predictor)
        return Local(kept, upload, metrics)
