"""FedEMA: divergence-aware moving average (Zhuang, Wen, Zhang, ICLR 2022).

    online    ← μ_k·own + (1 - μ_k)·Φ,   predictor ← μ_k·own + (1 - μ_k)·Ψ,   μ_k = min(λ_k·d_k, 1)

The target stays the client's own. λ_k = τ/d_k at the first divergence a client has, then frozen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from furlong.core.context import ClientContext
from furlong.core.method import Local
from furlong.core.payload import Weights, payload
from furlong.core.weights import lerp, mean_conv_l2, sq_l2
from furlong.methods.base import WEIGHTS_REVEAL
from furlong.methods.byol import Byol, Shared, Triple
from furlong.methods.networks import named_head
from furlong.settings import setting


@payload("furlong.methods.fedema.State")
class State:
    """What a client keeps: its networks, d_k of its last local training, λ_k, and when that was."""

    online: Weights
    target: Weights
    predictor: Weights
    divergence: float
    scale: float | None
    round: int


@dataclass(frozen=True)
class FedEMA(Byol[State | None]):
    """BYOL; clients blend the global networks into their own instead of taking them over."""

    paper = "Zhuang, Wen, Zhang, Divergence-aware Federated Self-Supervised Learning, ICLR 2022"
    decomposes = "records"
    keeps = "online and target encoder, predictor, last divergence, scale λ"
    leaves = f"Encoder, projector and predictor weights. {WEIGHTS_REVEAL}"
    usual_small = {"projection_head": "mlp:256:128:bn", "prediction_head": "mlp:256:128"}

    tau: float = setting(0.7, "The μ of a client's first blend, with autoscale.", above=0)
    autoscale: bool = setting(True, "Choose λ for each client at its first divergence, by tau.")
    scale: float = setting(1.0, "The λ of all clients, without autoscale.", at_least=0)
    divergence: Literal["displacement", "to_global"] = setting(
        "displacement",
        "What d is: how far the client's encoder moved in its local training (the authors' code), "
        "or its distance ‖Φ - own‖ from the global one (the paper).",
    )
    selective: bool = setting(
        False, "Blend only if the client also trained in the round before; else take over."
    )
    decay: float = setting(0.99, "The decay m of the target network.", at_least=0, at_most=1)
    symmetric: bool = setting(True, "Add the loss with the views swapped.")
    projection_head: str = named_head("easyfl_proj")
    prediction_head: str = named_head("easyfl_pred")

    def distance(self, state: State, down: Shared) -> float:
        """d_k at the time of the merge."""
        if self.divergence == "displacement":
            return state.divergence
        return math.sqrt(sq_l2(down.encoder, state.online))

    def scale_of(self, state: State | None, distance: float) -> float | None:
        """λ_k: what was set once, else τ/d_k as soon as there is a divergence."""
        if not self.autoscale:
            return self.scale
        if state is not None and state.scale is not None:
            return state.scale
        return self.tau / distance if distance > 0 else None

    def merge(self, state: State, down: Shared, scale: float | None, distance: float) -> Triple:
        """Blend; an amount of 0 keeps the client's own, 1 takes the global networks."""
        mu = 0.0 if scale is None else min(scale * distance, 1.0)
        return Triple(
            online=lerp(state.online, down.encoder, 1 - mu),
            target=state.target,
            predictor=lerp(state.predictor, down.predictor, 1 - mu),
        )

    def local_update(
        self, state: State | None, down: Shared, ctx: ClientContext
    ) -> Local[State | None, Shared]:
        """Merge, train, remember how far the encoder went."""
        fresh = Triple(online=down.encoder, target=down.encoder, predictor=down.predictor)
        scale, start = None, fresh
        if state is not None:
            distance = self.distance(state, down)
            scale = self.scale_of(state, distance)
            if not self.selective or state.round == ctx.exchange.round - 1:
                start = self.merge(state, down, scale, distance)
        nets, metrics = self.train(start, ctx)
        moved = mean_conv_l2(nets.online, start.online)
        kept = State(nets.online, nets.target, nets.predictor, moved, scale, ctx.exchange.round)
        return Local(kept, Shared(nets.online, nets.predictor), metrics | {"divergence": moved})
