"""LARS by hand, SGD and Adam beside torch's, and the learning rate's course."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from furlong.core.context import Optimiser, OptimiserSettings
from furlong.errors import FurlongError
from furlong.nn.optimisers import LARS, SGD, Adam, warmup_cosine

Values = list[float] | list[list[float]]


def weight(values: Values, grad: Values) -> Tensor:
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(grad)
    return made


def test_two_steps_by_hand() -> None:
    """‖w‖ = 5 and ‖g + w/2‖ = 10 give the ratio .1·5/10; then the momentum joins in."""
    w = weight([[3.0, 4.0]], [[4.5, 6.0]])
    optimiser = LARS([w], lr=2.0, momentum=0.5, weight_decay=0.5, trust=0.1)
    optimiser.step()
    # d = (6, 8), rate 2·.05 = .1
    torch.testing.assert_close(w.detach(), torch.tensor([[2.4, 3.2]]))
    w.grad = torch.tensor([[0.8 - 1.2, 0.6 - 1.6]])
    optimiser.param_groups[0]["lr"] = 1.0
    optimiser.step()
    # d = (.8, .6) with norm 1, ‖w‖ = 4, rate .4; v = .5·(.6, .8) + .4·d, the old lr still in it
    torch.testing.assert_close(w.detach(), torch.tensor([[2.4 - 0.3 - 0.32, 3.2 - 0.4 - 0.24]]))


def test_one_dimensional_weights_take_plain_sgd() -> None:
    w = weight([3.0, 4.0], [1.0, -1.0])
    optimiser = LARS([w], lr=0.1, weight_decay=0.5)
    optimiser.step()
    torch.testing.assert_close(w.detach(), torch.tensor([2.9, 4.1]))
    optimiser.step()
    torch.testing.assert_close(w.detach(), torch.tensor([2.9 - 0.19, 4.1 + 0.19]))


def test_the_ratio_is_one_where_a_norm_is_zero() -> None:
    zero = weight([[0.0, 0.0]], [[1.0, 2.0]])
    still = weight([[1.0, 2.0]], [[0.0, 0.0]])
    LARS([zero, still], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(zero.detach(), torch.tensor([[-0.1, -0.2]]))
    torch.testing.assert_close(still.detach(), torch.tensor([[1.0, 2.0]]))


def test_the_step_does_not_depend_on_the_size_of_the_gradient() -> None:
    one, other = (weight([[3.0, 4.0]], [[k * 1.0, k * 2.0]]) for k in (1, 1000))
    LARS([one, other], lr=1.0, weight_decay=0.0, trust=0.1).step()
    torch.testing.assert_close(one, other)
    assert (one - torch.tensor([[3.0, 4.0]])).norm().item() == pytest.approx(0.5)


def test_state_closure_and_weights_without_gradient() -> None:
    torch.manual_seed(0)
    net, unused = nn.Linear(4, 3), nn.Parameter(torch.ones(2, 2))
    x = torch.randn(8, 4)
    optimiser = LARS([{"params": net.parameters()}, {"params": [unused], "lr": 3.0}], lr=1.0)

    def closure() -> float:
        optimiser.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return float(loss.detach())

    losses = [optimiser.step(closure) for _ in range(20)]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]
    assert torch.equal(unused, torch.ones(2, 2))
    assert set(optimiser.state) == {net.weight, net.bias}
    copy = deepcopy(net)
    again = LARS([{"params": copy.parameters()}, {"params": [unused]}], lr=9.0)
    again.load_state_dict(deepcopy(optimiser.state_dict()))
    for p, q in zip(net.parameters(), copy.parameters(), strict=True):
        p.grad = q.grad = torch.ones_like(p)
    optimiser.step()
    again.step()
    assert torch.equal(net.weight, copy.weight)
    assert torch.equal(net.bias, copy.bias)
    with pytest.raises(FurlongError, match="lr is -1"):
        LARS(net.parameters(), lr=-1)


@pytest.mark.parametrize(
    ("progress", "warmup", "expected"),
    [
        (0.0, 0.1, 0.0),
        (0.05, 0.1, 0.5),
        (0.1, 0.1, 1.0),
        (0.55, 0.1, 0.5),
        (1.0, 0.1, 0.0),
        (1.2, 0.1, 0.0),
        (0.0, 0.0, 1.0),
        (1 / 3, 0.0, 0.75),
        (0.5, 1.0, 0.5),
        (1.0, 1.0, 1.0),
    ],
)
def test_warmup_then_cosine(progress: float, warmup: float, expected: float) -> None:
    assert warmup_cosine(progress, warmup) == pytest.approx(expected, abs=1e-9)


def test_a_warmup_is_a_share() -> None:
    with pytest.raises(FurlongError, match="10"):
        warmup_cosine(0.5, 10)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sgd", partial(torch.optim.SGD, momentum=0.9)),
        ("plain", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_the_bits_of_torch(name: str, theirs: Any) -> None:
    """With two groups, of which one has a rate of its own, and a weight that is frozen at first."""

    def finish(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 3), nn.Linear(3, 2))
        net = net.to(memory_format=torch.channels_last)
        conv, _, middle, last = net
        groups = [{"params": conv.parameters()}, {"params": last.parameters(), "lr": 0.2}]
        optimiser = make(groups, 0.05)
        optimiser.add_param_group({"params": middle.parameters()})
        for step in range(4):
            optimiser.zero_grad(set_to_none=True)
            middle.requires_grad_(step > 1)
            net(torch.randn(5, 2, 5, 5)).square().sum().backward()
            optimiser.step()
        return [p.detach() for p in net.parameters()]

    ours = {
        "sgd": partial(SGD, momentum=0.9, weight_decay=0.1),
        "plain": partial(SGD, momentum=0.0, weight_decay=0.1),
        "adam": partial(Adam, weight_decay=0.1),
        "adamw": partial(Adam, weight_decay=0.1, decoupled=True),
    }[name]
    pairs = zip(finish(ours), finish(partial(theirs, weight_decay=0.1, fused=True)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_kept_moments_come_to_the_parameters_device() -> None:
    """The count of steps too, which a kernel of an accelerator reads there."""
    far = nn.Parameter(torch.empty(3, 2, device="meta"))
    optimiser = Optimiser([far], OptimiserSettings("adam", lr=0.1, weight_decay=0.0), 0.1)
    optimiser.set_moments({"0/step": torch.tensor(4.0), "0/exp_avg": torch.ones(3, 2)})
    assert {value.device.type for value in optimiser.torch.state[far].values()} == {"meta"}
