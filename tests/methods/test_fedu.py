"""FedU and FedBYOL (2.2, 2.11): what a client starts from, the target network, the divergence."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from by_hand import local_context
from torch import nn

from furlong.core.weights import ema_, mean_conv_l2, sq_l2
from furlong.methods.byol import Shared
from furlong.methods.fedu import FedU, State
from furlong.nn.encoders import build_encoder
from furlong.seeding import seeded


def scalar(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(value)}


@pytest.mark.parametrize("source", ["online", "target"])
@pytest.mark.parametrize(
    ("update", "expected"),
    [("online", (10, 2)), ("target", (1, 10)), ("both", (10, 10)), ("none", (1, 2))],
)
def test_fedu_merge_rules(
    source: Literal["online", "target"], update: Any, expected: tuple[float, float]
) -> None:
    method = FedU(aggregate_from=source, update=update)
    state = State(scalar(1), scalar(2), scalar(3), divergence=0.0)
    start = method.merge(state, Shared(scalar(10), scalar(30)))
    assert (start.online["w"].item(), start.target["w"].item()) == expected


@pytest.mark.parametrize(
    ("policy", "threshold", "divergence", "expected"),
    [
        ("dapu", 0.0, 0.0, 3),
        ("dapu", 0.0, 5.0, 3),
        ("dapu", float("inf"), 1e9, 30),
        ("dapu", 0.4, 0.4, 3),
        ("dapu", 0.4, 0.39, 30),
        ("local", 0.4, 0.0, 3),
        ("global", 0.4, 9.0, 30),
    ],
)
def test_dapu(policy: Any, threshold: float, divergence: float, expected: float) -> None:
    method = FedU(predictor=policy, threshold=threshold)
    state = State(scalar(1), scalar(2), scalar(3), divergence)
    start = method.merge(state, Shared(scalar(10), scalar(30)))
    assert start.predictor["w"].item() == expected
    first = method.merge(None, Shared(scalar(10), scalar(30)))
    assert first.predictor["w"].item() == 30


def test_online_and_target_never_share_storage(prepared: Any) -> None:
    p = prepared("fedu")
    ctx = local_context(p)
    start = p.method.merge(None, p.server.init())
    assert start.online is start.target  # equal values at first participation …
    with seeded(p.setup.device, 0):
        nets, _ = p.method.train(start, ctx)
    online = ctx.networks._slots["online"].state_dict()
    target = ctx.networks._slots["target"].state_dict()
    for name, tensor in online.items():  # … in distinct modules
        assert tensor.data_ptr() != target[name].data_ptr()
    assert any(not torch.equal(nets.online[n], nets.target[n]) for n in nets.online)


@pytest.mark.parametrize(("decay", "same"), [(1.0, "start"), (0.0, "online")])
def test_decay_freezes_or_copies(prepared: Any, decay: float, same: str) -> None:
    p = prepared("fedu", **{"method.decay": decay})
    start = p.method.merge(None, p.server.init())
    with seeded(p.setup.device, 0):
        nets, _ = p.method.train(start, local_context(p))
    wanted = start.online if same == "start" else nets.online
    for name, tensor in nets.target.items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(tensor, wanted[name])


def test_ema_golden(golden: dict[str, Any]) -> None:
    target, online = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    target.weight.data.zero_()
    online.weight.data.fill_(1.0)
    for _ in range(100):
        ema_(target, online, 0.99)
    assert target.weight.item() == pytest.approx(golden["ema_m0.99_100_steps_0_to_1"], abs=1e-5)


def test_no_gradient_reaches_the_target(prepared: Any) -> None:
    p = prepared("fedu")
    ctx = local_context(p)
    p.method.train(p.method.merge(None, p.server.init()), ctx)
    assert all(q.grad is None for q in ctx.networks._slots["target"].parameters())
    assert all(q.grad is not None for q in ctx.networks._slots["online"].parameters())


def test_state_holds_only_what_the_next_merge_needs(prepared: Any) -> None:
    p = prepared("fedu", **{"method.update": "both", "method.predictor": "global"})
    local = p.method.local_update(None, p.server.init(), local_context(p))
    assert local.state.online is None
    assert local.state.target is None
    assert local.state.predictor is None
    assert local.state.divergence > 0


def test_divergence_counts_and_zero() -> None:
    for name, count in (("resnet18", 17), ("resnet50", 49)):
        with torch.device("meta"):
            encoder = build_encoder(name)
        weights = {n: torch.zeros(1) for n in encoder.state_dict()}
        names = [n for n in weights if "conv" in n and "weight" in n]
        assert len(names) == count
        moved = {n: t + 1 for n, t in weights.items()}
        assert mean_conv_l2(moved, weights) == pytest.approx(1.0)
        assert mean_conv_l2(weights, weights) == sq_l2(weights, weights) == 0.0
    a = {"conv.weight": torch.tensor([3.0, 4.0]), "bn.running_mean": torch.ones(1)}
    b = {"conv.weight": torch.zeros(2), "bn.running_mean": torch.zeros(1)}
    assert mean_conv_l2(a, b) == 5.0
    assert sq_l2(a, b) == 25.0  # squared, buffers left out
