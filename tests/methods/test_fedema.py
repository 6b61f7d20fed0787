"""FedEMA (2.12): the blend of own and global networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import byol_by_hand, local_context, plain_client, trained, twin

from furlong.core.weights import lerp, snapshot
from furlong.methods import fedema
from furlong.methods.byol import Shared, Triple
from furlong.methods.fedema import FedEMA
from furlong.seeding import seeded


def scalar(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(value)}


def test_fedema_mu(golden: dict[str, Any]) -> None:
    down = Shared(scalar(0.0), scalar(0.0))
    for case in golden["fedema_mu"]:
        method = FedEMA(autoscale=False, scale=case["lam"])
        state = fedema.State(scalar(1.0), scalar(5.0), scalar(1.0), case["d"], None, 0)
        start = method.merge(state, down, method.scale_of(state, case["d"]), case["d"])
        assert start.online["w"].item() == pytest.approx(case["mu"])  # own 1, global 0
        assert start.predictor["w"].item() == pytest.approx(case["mu"])
        assert start.target["w"].item() == 5.0
    zero = replace(state, divergence=0.0)
    assert FedEMA().merge(zero, down, None, 0.0).online["w"].item() == 0.0  # pure global


def test_fedema_autoscaler_is_frozen(prepared: Any) -> None:
    p = prepared("fedema", rounds=4)
    down, state, scales, divergences = p.server.init(), None, [], []
    for i in range(4):
        local = p.method.local_update(state, down, local_context(p, i))
        state = local.state
        scales.append(state.scale)
        divergences.append(state.divergence)
    assert scales[0] is None
    assert scales[1] == scales[2] == scales[3] == pytest.approx(p.method.tau / divergences[0])


def test_fedema_identity_and_selective(prepared: Any) -> None:
    weights = {"conv.weight": torch.randn(50), "bn.running_mean": torch.randn(3)}
    state = fedema.State(weights, weights, weights, 0.37, 1.0, 0)
    start = FedEMA().merge(state, Shared(weights, weights), 1.0, 0.37)
    assert all(torch.equal(start.online[n], t) for n, t in weights.items())
    p = prepared("fedema", rounds=4, **{"method.selective": True})
    down = p.server.init()
    first = p.method.local_update(None, down, local_context(p, 0)).state
    seen: list[Triple] = []
    original = type(p.method).train

    def spy(self: Any, start: Triple, ctx: Any) -> Any:
        seen.append(start)
        return original(self, start, ctx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(p.method), "train", spy)
        p.method.local_update(first, down, local_context(p, 1))  # trained in the round before
        p.method.local_update(first, down, local_context(p, 3))  # did not
    assert seen[0].target is first.target
    assert seen[1].target is down.encoder
    assert seen[1].predictor is down.predictor


def test_lerp_takes_buffers_from_the_global_model() -> None:
    own = {"w": torch.ones(1), "bn.running_mean": torch.ones(1)}
    other = {"w": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
    blended = lerp(own, other, 0.3)
    assert blended["w"].item() == pytest.approx(0.7)
    assert blended["bn.running_mean"].item() == 0.0


def test_two_rounds_of_a_client_by_hand(prepared: Any) -> None:
    """The second from 0.7·own + 0.3·global: μ is τ at the first blend; the target stays."""
    p = prepared("fedema", **{"method.decay": 0.6})
    down, ctx = p.server.init(), plain_client(p, batch_size=12)
    first = trained(p, ctx, down)
    hand = byol_by_hand(p, ctx, (down.encoder, down.encoder, down.predictor), 0.6)
    kept = first.state
    hand.assert_are(online=kept.online, target=kept.target, predictor=kept.predictor)
    assert first.metrics["loss"] == pytest.approx(hand.loss, rel=1e-4)
    encoder = snapshot(twin(p, ctx))
    with seeded(p.setup.device, "Ψ"):
        predictor = snapshot(p.method.new_predictor(ctx))
    ctx = plain_client(p, exchange=1, batch_size=12)
    second = trained(p, ctx, Shared(encoder, predictor), kept)
    online, target, own = hand.weights

    def blend(mine: Any, theirs: Any) -> Any:
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        return {
            name: theirs[name]
            if name.endswith(statistics)
            else 0.7 * mine[name] + 0.3 * theirs[name]
            for name in mine
        }

    hand = byol_by_hand(p, ctx, (blend(online, encoder), target, blend(own, predictor)), 0.6)
    kept = second.state
    hand.assert_are(online=kept.online, target=kept.target, predictor=kept.predictor)
    hand.assert_are(online=second.upload.encoder, predictor=second.upload.predictor)
    assert second.metrics["loss"] == pytest.approx(hand.loss, rel=1e-4)
