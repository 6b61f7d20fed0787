"""Weights in and out of modules, BatchNorm recalibration, and what a context hands to a method."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from furlong.core.context import (
    ClientContext,
    Context,
    Exchange,
    Networks,
    Optimiser,
    OptimiserSettings,
)
from furlong.core.federation import Federation
from furlong.core.weights import first_nonfinite, prefixed, recalibrate, restore, snapshot
from furlong.data.images import ImageSet
from furlong.nn.encoders import build_encoder

# ---------------------------------------------------------------- snapshot, restore, prefixed


def small_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


def test_snapshot_is_a_copy_in_the_default_layout() -> None:
    net = small_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not net[0].weight.is_contiguous()
    taken = snapshot(net)
    assert taken.keys() == net.state_dict().keys()
    for name, tensor in net.state_dict().items():
        assert torch.equal(taken[name], tensor)
        assert taken[name].is_contiguous()
        assert taken[name].data_ptr() != tensor.data_ptr()
        assert not taken[name].requires_grad
    before = taken["0.weight"].clone()
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(taken["0.weight"], before)


def test_restore_keeps_storage_and_layout() -> None:
    net = small_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    where = {n: t.data_ptr() for n, t in net.state_dict().items()}
    torch.manual_seed(7)
    wanted = snapshot(small_net())
    wanted["1.num_batches_tracked"] += 5
    kept = {n: t.clone() for n, t in wanted.items()}
    restore(net, wanted)
    assert {n: t.data_ptr() for n, t in net.state_dict().items()} == where
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    for name, tensor in snapshot(net).items():
        assert torch.equal(tensor, wanted[name])
    with torch.no_grad():
        net[0].weight.add_(1)
    assert all(torch.equal(wanted[n], kept[n]) for n in kept)


def test_restore_refuses_what_would_broadcast() -> None:
    net = nn.Linear(3, 4)
    before = snapshot(net)
    with pytest.raises(ValueError, match=r"weight has shape \(1, 1\), not \(4, 3\)"):
        restore(net, {"weight": torch.zeros(1, 1), "bias": torch.zeros(4)})
    assert torch.equal(net.weight, before["weight"])


@pytest.mark.parametrize("change", ["missing", "extra", "renamed"])
def test_restore_refuses_other_names(change: str) -> None:
    net = nn.Linear(3, 4)
    weights = snapshot(net)
    if change != "extra":
        weights.pop("bias")
    if change != "missing":
        weights["offset"] = torch.zeros(4)
    with pytest.raises(ValueError, match="offset" if change == "extra" else "bias"):
        restore(net, weights)


def test_prefixed_takes_whole_names_only() -> None:
    weights = {n: torch.tensor(i) for i, n in enumerate(("a.w", "a.b.w", "ab.w", "b.a.w", "a"))}
    assert prefixed(weights, "a") == {"w": weights["a.w"], "b.w": weights["a.b.w"]}
    assert prefixed(weights, "a.b") == {"w": weights["a.b.w"]}
    assert prefixed(weights, "c") == {}


# ---------------------------------------------------------------- recalibrate


def test_recalibrated_statistics_are_those_of_the_data() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=0.3)
    norm(torch.randn(8, 3, 2, 2) * 9)  # some history, to be forgotten
    data = torch.randn(40, 3, 5, 5) * torch.tensor([1.0, 2.0, 3.0])[:, None, None] + 4
    recalibrate(norm, [data])
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, data.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(norm.running_var, data.var(dim=(0, 2, 3)))
    chunks = data.split(10)
    recalibrate(norm, iter(chunks))
    torch.testing.assert_close(norm.running_mean, data.mean(dim=(0, 2, 3)))
    spread = torch.stack([c.var(dim=(0, 2, 3)) for c in chunks]).mean(dim=0)
    torch.testing.assert_close(norm.running_var, spread)
    assert norm.momentum == 0.3
    assert norm.training
    assert norm.num_batches_tracked == 4


def test_recalibration_restores_flags_and_leaves_parameters() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(small_net(), nn.Dropout(0.9), nn.BatchNorm2d(4, momentum=None)).train()
    net[0].eval()
    net[1].train()
    flags = [m.training for m in net.modules()]
    before = snapshot(net)
    recalibrate(net, [torch.randn(16, 3, 4, 4)])
    assert [m.training for m in net.modules()] == flags
    assert (net[0][1].momentum, net[2].momentum) == (0.1, None)
    for name, tensor in snapshot(net).items():
        assert torch.equal(tensor, before[name]) == name.endswith(("weight", "bias")), name
        assert not tensor.requires_grad
    assert all(p.grad is None for p in net.parameters())
    once = snapshot(net)
    torch.manual_seed(0)
    net[1].p = 0.0  # dropout was off while measuring, so this changes nothing
    torch.manual_seed(1)
    data = torch.randn(16, 3, 4, 4)
    recalibrate(net, [data])
    twice = snapshot(net)
    net[1].p = 0.9
    recalibrate(net, [data])
    assert all(torch.equal(t, twice[n]) for n, t in snapshot(net).items())
    assert not torch.equal(once["2.running_mean"], twice["2.running_mean"])


# ---------------------------------------------------------------- learning rate


def context(p: Any, round: int = 0, **changes: Any) -> Context:
    return Context(replace(p.setup, **changes), Exchange(round=round))


@pytest.mark.parametrize("rounds", [1, 2, 50])
def test_cosine_over_rounds(prepared: Any, rounds: int) -> None:
    p = prepared()
    rates = [context(p, r, rounds=rounds).learning_rate for r in range(rounds)]
    start = p.setup.optimiser.lr
    assert rates[0] == start
    assert rates[-1] > 0
    assert rates == sorted(rates, reverse=True)
    wanted = [start / 2 * (1 + math.cos(math.pi * r / rounds)) for r in range(rounds)]
    assert rates == pytest.approx(wanted)


def test_constant_rate(prepared: Any) -> None:
    settings = OptimiserSettings(lr=0.3, schedule="constant")
    p = prepared()
    assert {context(p, r, optimiser=settings).learning_rate for r in (0, 1, 9)} == {0.3}


def test_the_optimiser_gets_the_rounds_rate(prepared: Any) -> None:
    ctx = context(prepared(), 1)
    made = ctx.optimiser(nn.Linear(2, 2), nn.Linear(2, 2))
    (group,) = made.torch.param_groups
    assert group["lr"] == ctx.learning_rate
    assert len(group["params"]) == 4
    assert ctx.optimisers == [made]


# ---------------------------------------------------------------- batches


def client(p: Any, n: int = 22, **changes: Any) -> ClientContext:
    """A client of ``n`` images whose first pixel is the image's number, from row 100 on."""
    pixels = torch.zeros(200, 3, 16, 16, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(200)
    images = ImageSet(pixels, torch.arange(200) % 7, tuple("abcdefg"))
    federation = Federation(images, {3: torch.arange(100, 100 + n)})
    labels = changes.pop("labels", False)
    return ClientContext(
        replace(p.setup, **{"batch_size": 8, "epochs": 3} | changes),
        Exchange(round=0),
        Networks(),
        client=3,
        data=federation.shard(3, labels=labels),
    )


def test_shuffled_batches_drop_the_rest_of_every_epoch(prepared: Any) -> None:
    ctx = client(prepared())
    torch.manual_seed(0)
    batches = list(ctx.batches())
    assert [len(b.index) for b in batches] == [8, 8] * 3
    assert ctx.images_seen == 48
    for b in batches:
        assert torch.equal(b.pixels[:, 0, 0, 0].long(), 100 + b.index)
        assert b.labels is None
    epochs = [torch.cat([a.index, b.index]).tolist() for a, b in zip(*[iter(batches)] * 2)]  # noqa: B905
    assert all(len(set(epoch)) == 16 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_every_image_comes_when_the_batch_size_divides(prepared: Any) -> None:
    ctx = client(prepared(), n=24)
    index = torch.cat([b.index for b in ctx.batches(epochs=1)])
    assert sorted(index.tolist()) == list(range(24))
    assert index.tolist() != list(range(24))


def test_ordered_batches_keep_everything(prepared: Any) -> None:
    ctx = client(prepared(), labels=True)
    batches = list(ctx.batches(epochs=1, shuffle=False))
    assert [len(b.index) for b in batches] == [8, 8, 6]
    assert torch.cat([b.index for b in batches]).tolist() == list(range(22))
    labels = torch.cat([b.labels for b in batches if b.labels is not None])
    assert torch.equal(labels, torch.arange(100, 122) % 7)
    assert ctx.images_seen == 22


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_small_shard_is_one_batch(prepared: Any, shuffle: bool) -> None:
    ctx = client(prepared(), n=5)
    assert [len(b.index) for b in ctx.batches(2, shuffle=shuffle)] == [5, 5]
    assert list(ctx.batches(0)) == []


def test_views_and_plain(prepared: Any) -> None:
    (batch,) = client(prepared(), n=5, epochs=1).batches()
    a, b = batch.views()
    assert a.shape == b.shape == batch.plain.shape == (5, 3, 16, 16)
    assert not torch.equal(a, b)
    assert torch.equal(batch.plain, batch.plain)
    assert len(batch.views(3)) == 3


# ---------------------------------------------------------------- networks and optimisers


def test_a_slot_is_built_once_and_refilled(prepared: Any) -> None:
    ctx = context(prepared())

    def build() -> nn.Module:
        return build_encoder("small", 3, 16)

    state = torch.get_rng_state()
    weights = snapshot(ctx.encoder())
    torch.set_rng_state(state)
    net = ctx.network("net", build, weights)
    assert torch.equal(torch.get_rng_state(), state)  # building draws nothing
    net.requires_grad_(False).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    again = ctx.network("net", build, weights)
    assert again is net
    assert again.training
    assert all(p.requires_grad for p in again.parameters())
    assert all(torch.equal(t, weights[n]) for n, t in snapshot(again).items())
    assert ctx.network("other", build, weights) is not net


def test_a_step_has_no_gradients_of_another_loss_and_leaves_none() -> None:
    """Two optimisers in turn, and gradients that a client left that failed."""
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    one, other = nn.Linear(3, 3), nn.Linear(3, 1)
    first, second = (Optimiser(n.parameters(), OptimiserSettings(), 0.1) for n in (one, other))
    late = nn.Linear(3, 1)
    second.torch.add_param_group({"params": list(late.parameters())})
    for net in (other, late):
        net(data).sum().backward()  # of a client that failed
    first.step(other(one(data)).mean())  # reaches the other network, too
    start = [p.clone() for p in (*other.parameters(), *late.parameters())]
    loss = other(one(data).detach()).square().mean() + late(data).square().mean()
    wanted = torch.autograd.grad(loss, [*other.parameters(), *late.parameters()])
    second.step(other(one(data).detach()).square().mean() + late(data).square().mean())
    decay = OptimiserSettings().weight_decay
    for before, gradient, p in zip(
        start, wanted, (*other.parameters(), *late.parameters()), strict=True
    ):
        assert torch.allclose(before - p, 0.1 * (gradient + decay * before), atol=1e-6)
    assert all(p.grad is None for net in (other, late) for p in net.parameters())


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_moments_round_trip(name: Any) -> None:
    settings = OptimiserSettings(name=name)
    data = torch.randn(6, 8, 3, generator=torch.Generator().manual_seed(0))

    def train(net: nn.Module, optimiser: Optimiser, batches: Tensor) -> None:
        for batch in batches:
            optimiser.step(net(batch).square().mean())

    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    start = snapshot(net)
    whole = Optimiser(net.parameters(), settings, 0.1)
    assert whole.metrics() == {}
    assert not any(moment.any() for moment in whole.moments().values())
    train(net, whole, data)
    assert whole.metrics()["loss"] > 0
    wanted = snapshot(net)

    results = {}
    for keep in (True, False):
        restore(net, start)
        first = Optimiser(net.parameters(), settings, 0.1)
        train(net, first, data[:3])
        moments = {n: t.clone() for n, t in first.moments().items()}
        assert all(t.device.type == "cpu" for t in moments.values())
        second = Optimiser(net.parameters(), settings, 0.1)
        if keep:
            second.set_moments(moments)
            assert second.moments().keys() == moments.keys()
        given = {n: t.clone() for n, t in moments.items()}
        train(net, second, data[3:])
        assert all(torch.equal(moments[n], given[n]) for n in given)  # not trained in place
        results[keep] = snapshot(net)
    assert all(torch.equal(results[True][n], wanted[n]) for n in wanted)
    assert not torch.equal(results[False]["weight"], wanted["weight"])


def test_frozen_parameters_are_left_out() -> None:
    net = nn.Linear(3, 4)
    net.bias.requires_grad_(False)
    optimiser = Optimiser(net.parameters(), OptimiserSettings(), 0.1)
    assert len(optimiser.torch.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_moments_survive_packing_in_any_layout(name: Any) -> None:
    """Fused kernels pair elements by memory offset: the layout must come back with the values."""
    from furlong.core.context import Optimiser, OptimiserSettings
    from furlong.core.payload import pack, unpack

    def train(through_bytes: bool) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            batches = [torch.randn(2, 3, 8, 8) for _ in range(6)]
        settings = OptimiserSettings(name=name)
        optimiser = Optimiser(net.parameters(), settings, 0.1)
        for step, batch in enumerate(batches):
            if step == 3 and through_bytes:
                moments = unpack(pack(optimiser.moments()))
                optimiser = Optimiser(net.parameters(), settings, 0.1)
                optimiser.set_moments(moments)
            optimiser.step(net(batch).square().mean())
        return net.weight.detach().clone()

    assert torch.equal(train(True), train(False))


def test_sgd_is_torchs_and_takes_a_parameter_that_was_frozen_at_first() -> None:
    data = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Linear(3, 4), nn.Linear(3, 4)
    restore(theirs, snapshot(ours))
    optimiser = Optimiser(ours.parameters(), OptimiserSettings(), 0.1)
    plain = torch.optim.SGD(theirs.parameters(), 0.1, 0.9, weight_decay=5e-4, fused=True)
    for batch in data:
        optimiser.step(ours(batch).square().mean())
        plain.zero_grad()
        theirs(batch).square().mean().backward()
        plain.step()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    late = nn.Linear(3, 4)
    optimiser = Optimiser(late.parameters(), OptimiserSettings(), 0.1)
    before = late.bias.detach().clone()
    for wanted in (False, True):
        late.bias.requires_grad_(wanted)
        optimiser.step(late(data[0]).square().mean())
    assert not torch.equal(late.bias, before)


def test_finite_numbers_whose_sum_overflows_are_finite() -> None:
    large = {"w": torch.full((1000,), 3e38), "half": torch.full((100,), 6e4, dtype=torch.half)}
    assert first_nonfinite(large) is None
    for bad in (torch.nan, torch.inf, -torch.inf):
        large["half"][7] = bad
        assert first_nonfinite(large) == "half"
