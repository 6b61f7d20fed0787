"""FedU and FedBYOL (2.2, 2.11): what a client starts from, the target network, the divergence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from by_hand import ByolNets, byol_by_hand, local_context, plain_client, trained, twin
from torch import nn

from furlong.core.payload import flatten, pack, rebuild, unpack
from furlong.core.weights import ema_, mean_conv_l2, snapshot, sq_l2
from furlong.methods.byol import Shared
from furlong.methods.fedu import FedU, State
from furlong.nn.encoders import build_encoder
from furlong.nn.optimisers import Fused
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


@pytest.mark.parametrize(
    ("threshold", "divergence", "first", "expected"),
    [
        (0.5, 2.0, 5.0, 30),
        (0.5, 2.5, 5.0, 3),
        (0.5, 0.02, 0.05, 30),
        (0.5, 0.03, 0.05, 3),
        (0.0, 0.0, 5.0, 3),
        (float("inf"), 1e9, 5.0, 30),
    ],
)
def test_a_relative_threshold_counts_in_first_divergences(
    threshold: float, divergence: float, first: float, expected: float
) -> None:
    method = FedU(threshold=threshold, threshold_kind="relative")
    state = State(scalar(1), scalar(2), scalar(3), divergence, first)
    start = method.merge(state, Shared(scalar(10), scalar(30)))
    assert start.predictor["w"].item() == expected


def test_the_threshold_is_the_papers_unless_asked_otherwise() -> None:
    assert (FedU().threshold, FedU().threshold_kind) == (0.4, "absolute")


def test_a_state_of_an_earlier_version_can_be_read() -> None:
    tensors, tree = flatten(State(None, scalar(2), scalar(3), 0.5, 0.7))
    del tree["fields"]["first"]
    old = rebuild(tree, tensors)
    assert (old.divergence, old.first) == (0.5, 0.0)
    assert FedU().keeps_predictor(old)


# ---------------------------------------------------------------- a client's rounds by hand

DECAY = 0.6  # far from 0, 1 and a half, so that no two networks are alike


def another(p: Any, ctx: Any) -> Shared:
    """Φ and Ψ that no client has seen."""
    with seeded(p.setup.device, "Ψ"):
        predictor = snapshot(p.method.new_predictor(ctx))
    return Shared(snapshot(twin(p, ctx)), predictor)


def assert_client(p: Any, local: Any, hand: ByolNets) -> None:
    """What the client sends, keeps and logs is what training by hand gave."""
    method, kept, sent = p.method, local.state, local.upload
    hand.assert_are(**{method.aggregate_from: sent.encoder}, predictor=sent.predictor)
    hand.assert_are(online=kept.online, target=kept.target, predictor=kept.predictor)
    assert (kept.online is None) == (method.update in ("online", "both"))
    assert (kept.target is None) == (method.update in ("target", "both"))
    assert local.metrics["loss"] == pytest.approx(hand.loss, rel=1e-4)
    start, convolutions, squares = hand.start[0], [], 0.0
    for name, parameter in hand.online.named_parameters():
        way = (parameter.detach() - start[name]).norm().item()
        squares += way**2
        convolutions += [way] if parameter.dim() == 4 else []
    mean = sum(convolutions) / len(convolutions)
    moved = squares if method.divergence == "sq_l2" else mean
    assert local.metrics["divergence"] == kept.divergence == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize(
    ("update", "source", "symmetric", "divergence"),
    [
        ("online", "online", True, "mean_conv_l2"),
        ("online", "target", True, "mean_conv_l2"),
        ("target", "online", False, "mean_conv_l2"),
        ("target", "target", True, "sq_l2"),
        ("both", "online", True, "mean_conv_l2"),
        ("both", "target", True, "mean_conv_l2"),
        ("none", "online", True, "mean_conv_l2"),
        ("none", "target", False, "sq_l2"),
    ],
)
def test_two_rounds_of_a_client_by_hand(
    prepared: Any, update: str, source: str, symmetric: bool, divergence: str
) -> None:
    """Two steps from the server's networks; then two from what the paper's Table 4 says."""
    options = {
        "update": update,
        "aggregate_from": source,
        "symmetric": symmetric,
        "divergence": divergence,
        "decay": DECAY,
        "predictor": "local",
    }
    p = prepared("fedu", **{f"method.{name}": value for name, value in options.items()})
    down, ctx = p.server.init(), plain_client(p, batch_size=12)
    first = trained(p, ctx, down)
    start = (down.encoder, down.encoder, down.predictor)
    hand = byol_by_hand(p, ctx, start, DECAY, symmetric)
    assert_client(p, first, hand)
    new, ctx = another(p, ctx), plain_client(p, exchange=1, batch_size=12)
    second = trained(p, ctx, new, first.state)
    online, target, predictor = hand.weights
    start = (
        new.encoder if update in ("online", "both") else online,
        new.encoder if update in ("target", "both") else target,
        predictor,
    )
    assert_client(p, second, byol_by_hand(p, ctx, start, DECAY, symmetric))
    assert "took_global_predictor" not in second.metrics  # nobody decides
    assert second.state.first == first.state.divergence != second.state.divergence


@pytest.mark.parametrize(
    ("kind", "factor", "last", "takes"),
    [
        ("absolute", 0.9, 1.0, False),
        ("absolute", 1.1, 1.0, True),
        ("absolute", 0.9, 0.5, True),
        ("relative", 0.9, 1.0, False),
        ("relative", 1.1, 1.0, True),
        ("relative", 0.9, 0.5, True),
        ("relative", 0.4, 0.5, False),
    ],
)
def test_whose_predictor_dapu_trains_on(
    prepared: Any, kind: str, factor: float, last: float, takes: bool
) -> None:
    """μ is ``factor`` times the first divergence, and the last one ``last`` times the first."""
    p = prepared("fedu", **{"method.decay": DECAY})
    down, ctx = p.server.init(), plain_client(p, batch_size=12)
    first = trained(p, ctx, down)
    assert first.metrics["took_global_predictor"] == 1  # there is no other yet
    moved = first.state.divergence
    assert 0.01 < moved < 0.5  # so that absolute and relative thresholds cannot be confused
    mu = factor * moved if kind == "absolute" else factor
    p.method = replace(p.method, threshold=mu, threshold_kind=kind)
    state = replace(unpack(pack(first.state)), divergence=last * moved)
    new, ctx = another(p, ctx), plain_client(p, exchange=1, batch_size=12)
    second = trained(p, ctx, new, state)
    _, target, own = byol_by_hand(
        p, plain_client(p, batch_size=12), (down.encoder, down.encoder, down.predictor), DECAY
    ).weights
    start = (new.encoder, target, new.predictor if takes else own)
    assert_client(p, second, byol_by_hand(p, ctx, start, DECAY))
    assert second.metrics["took_global_predictor"] == takes
    assert second.state.first == moved


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


def test_no_gradient_reaches_the_target(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("fedu")
    ctx = local_context(p)
    step, seen = Fused.step, []

    def look(self: Fused) -> None:  # gradients are gone after a step
        slots = ctx.networks._slots
        seen.append([[q.grad is not None for q in slots[n].parameters()] for n in names])
        step(self)

    names = ("target", "online")
    monkeypatch.setattr(Fused, "step", look)
    p.method.train(p.method.merge(None, p.server.init()), ctx)
    assert seen
    assert all(not any(target) and all(online) for target, online in seen)


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
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in build_encoder("vit_tiny").state_dict().items()}
    a = {f"backbone.{n}": torch.zeros(shape) for n, shape in shapes.items()}
    a["projector.0.weight"] = torch.zeros(3, 3)
    # a transformer: the four matrices of each of twelve blocks and the patches' projection
    b = {n: t + (1.0 if n.endswith("attn.qkv.weight") else 0.0) for n, t in a.items()}
    assert mean_conv_l2(a, b) == pytest.approx(12 * math.sqrt(3 * 192 * 192) / 49)
    others = ("pos_embed", "cls_token", "projector", "norm", "bias")
    b = {n: t + (1.0 if any(word in n for word in others) else 0.0) for n, t in a.items()}
    assert mean_conv_l2(a, b) == 0.0
    a = {"conv.weight": torch.tensor([3.0, 4.0]), "bn.running_mean": torch.ones(1)}
    b = {"conv.weight": torch.zeros(2), "bn.running_mean": torch.zeros(1)}
    assert mean_conv_l2(a, b) == 5.0
    assert sq_l2(a, b) == 25.0  # squared, buffers left out
