"""The numeric properties that the specification lists for each method (2.1, 2.2, 2.11, 2.12)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from furlong.core.aggregation import Average
from furlong.core.context import ClientContext, Networks
from furlong.core.exchange import Server, run_client
from furlong.core.method import Report
from furlong.core.payload import unpack
from furlong.core.weights import Mean, ema_, lerp, mean_conv_l2, snapshot, sq_l2
from furlong.errors import FurlongError
from furlong.methods import fedema
from furlong.methods.base import Averaging, Model
from furlong.methods.byol import Shared, Triple
from furlong.methods.fedema import FedEMA
from furlong.methods.fedu import FedU, State
from furlong.nn.encoders import build_encoder
from furlong.runs.config import from_tree
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


def local_context(p: Any, exchange: int = 0) -> ClientContext:
    return ClientContext(
        p.setup, p.server.exchanges()[exchange], Networks(), client=0, data=p.federation.shard(0)
    )


def test_online_and_target_never_share_storage(prepared: Any) -> None:
    p = prepared("fedu")
    ctx = local_context(p)
    start = p.method.merge(None, p.server.init())
    assert start.online is start.target  # equal values at first participation …
    with seeded(p.setup.device, 0):
        nets, _ = p.method.byol.train(start, ctx)
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
        nets, _ = p.method.byol.train(start, local_context(p))
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
    p.method.byol.train(p.method.merge(None, p.server.init()), ctx)
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
    original = type(p.method.byol).train

    def spy(self: Any, start: Triple, ctx: Any) -> Any:
        seen.append(start)
        return original(self, start, ctx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(p.method.byol), "train", spy)
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


class OnlyAverage(Averaging[Model, None]):
    def init_server(self, ctx: Any) -> Any: ...
    def local_update(self, state: Any, down: Any, ctx: Any) -> Any: ...
    def encoder(self, server: Any, ctx: Any) -> Any: ...


def report(client: int, examples: int, **weights: Any) -> Report[Model]:
    tensors = {k.replace("__", "."): torch.as_tensor(v) for k, v in weights.items()}
    return Report(client, 0, examples, Model(tensors), {})


def aggregate(policy: Any, *reports: Report[Model]) -> dict[str, torch.Tensor]:
    server = Model({k: torch.zeros_like(v) for k, v in reports[0].upload.weights.items()})
    ctx: Any = SimpleNamespace(combining=Average)
    return OnlyAverage(bn_stats=policy).aggregate(server, iter(reports), ctx).weights


def test_weighted_mean_is_renormalised_over_participants() -> None:
    got = aggregate("average", report(0, 1, w=0.0), report(1, 3, w=4.0))
    assert got["w"].item() == 3.0


def test_mean_of_one_is_the_identity() -> None:
    weight = torch.randn(1000)
    assert torch.equal(aggregate("average", report(0, 9973, w=weight))["w"], weight)


def test_mean_of_equals_is_the_identity() -> None:
    weight = torch.randn(1000)
    reports = [report(k, n, w=weight.clone()) for k, n in enumerate((10, 999, 5000))]
    assert torch.equal(aggregate("average", *reports)["w"], weight)


def test_pooled_variance_counts_the_spread_of_means() -> None:
    reports = [
        report(0, 5, bn__running_mean=-1.0, bn__running_var=1.0, bn__num_batches_tracked=3),
        report(1, 5, bn__running_mean=1.0, bn__running_var=1.0, bn__num_batches_tracked=8),
    ]
    average, pooled = aggregate("average", *reports), aggregate("pooled", *reports)
    assert average["bn.running_var"].item() == 1.0
    assert pooled["bn.running_var"].item() == 2.0
    assert average["bn.num_batches_tracked"].item() == 8
    assert average["bn.num_batches_tracked"].dtype == torch.int64


def test_mean_is_float64_inside() -> None:
    mean: Mean[Model] = Mean()
    for _ in range(1000):
        mean.add(Model({"w": torch.tensor(0.1)}), 1)
    result = mean.result()
    assert result is not None
    assert result.weights["w"].item() == torch.tensor(0.1).item()
    assert Mean[Model]().result() is None


def test_local_statistics_never_leave(prepared: Any) -> None:
    p = prepared("fedsimclr", **{"method.bn_stats": "local"})
    from furlong.engines.blobs import BlobStore
    from furlong.engines.inprocess import InProcess

    store = BlobStore(1 << 30)
    server = p.server.init()
    answer = run_client(p.method, server, local_context(p), store)
    assert not any("running" in name for name in answer.upload.weights)
    kept = unpack(store.get(0))
    assert any("running_mean" in name for name in kept.stats)
    again = ClientContext(
        p.setup, p.server.exchanges()[1], Networks(), client=0, data=p.federation.shard(0)
    )
    run_client(p.method, server, again, store)
    name = next(n for n in kept.stats if n.endswith("num_batches_tracked"))
    assert unpack(store.get(0)).stats[name] == 2 * kept.stats[name]  # the statistics went on
    with InProcess(p.method, p.federation, p.setup) as transport:
        *_, last = Server(p.method, p.setup).run(p.federation, transport, server)
    assert not last.failures
    start = snapshot(p.method.network(p.server.context(last.exchange)))
    untouched = [n for n in start if n.endswith("running_var")]
    assert all(torch.equal(last.server.weights[n], start[n]) for n in untouched)
    store.close()


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("fedsimclr", "temperature", 0), ("fedsimclr", "temperature", "nan"),
        ("fedsimclr", "head_prox_mu", -1), ("fedu", "decay", 1.5), ("fedu", "threshold", -1),
        ("fedema", "tau", 0), ("fedema", "scale", "nan"), ("fedbyol", "decay", "nan"),
    ],
)  # fmt: skip
def test_fields_that_cannot_work_are_refused(method: str, field: str, value: Any) -> None:
    with pytest.raises(FurlongError, match=rf"method\.{field} is"):
        from_tree({}, {"method": method, f"method.{field}": value}, "test")
