"""What an encoder begins with: frozen parts, adapters, and the plain network at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from furlong.core.aggregation import Average
from furlong.core.context import Optimiser, OptimiserSettings
from furlong.core.given import Given, plain
from furlong.core.products import Products
from furlong.core.weights import recalibrate, snapshot
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.nn.fixed import stages
from furlong.nn.lora import Adapted, Rank, factored, product

IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def start(name: str = "small") -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return snapshot(build_encoder(name, 3, 16))


def begun(name: str = "small", **given: Any) -> nn.Module:
    return Given(start(name), **given).begin(build_encoder(name, 3, 16))


def trained(net: nn.Module, steps: int = 2) -> nn.Module:
    optimiser = torch.optim.SGD(net.parameters(), 0.01)
    net.train()
    for _ in range(steps):
        optimiser.zero_grad()
        net(IMAGES).square().sum(1).mean().backward()
        optimiser.step()
    return net


# ---------------------------------------------------------------- frozen parts


def test_stages() -> None:
    assert stages(build_encoder("resnet18")) == [
        ["conv1.", "bn1."], ["layer1."], ["layer2."], ["layer3."], ["layer4."]
    ]  # fmt: skip
    assert stages(build_encoder("small"))[:2] == [["conv1.", "bn1."], ["conv2.", "bn2."]]

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1))
            self.patch_embed = nn.Linear(2, 2)
            self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.norm = nn.LayerNorm(2)

    assert stages(Transformer()) == [["pos_embed", "patch_embed."], ["blocks.0."], ["blocks.1."]]


@pytest.mark.parametrize(
    ("freeze", "left"), [("none", 24), ("stem", 18), ("2", 6), ("3", 0), ("all", 0)]
)
def test_what_is_frozen_is_not_in_the_state_and_never_changes(freeze: str, left: int) -> None:
    net = begun(freeze=freeze)
    assert len(net.state_dict()) == left
    before = start()
    if left:
        trained(net)
    after = plain(net).state_dict()
    assert list(after) == list(before)
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    fixed = [n for n in before if n not in moved]
    assert len(moved) == left
    assert freeze == "none" or "bn1.running_mean" in fixed


def test_frozen_norms_use_their_running_statistics_while_training() -> None:
    net = begun(freeze="all")
    net.train()
    wanted = plain(begun()).eval()(IMAGES)
    assert torch.equal(net(IMAGES), wanted)
    net.requires_grad_(True)
    assert not net(IMAGES).requires_grad


def test_recalibration_leaves_frozen_statistics() -> None:
    net = begun(freeze="1")
    recalibrate(net, [IMAGES])
    after, before = plain(net).state_dict(), start()
    assert torch.equal(after["bn2.running_mean"], before["bn2.running_mean"])
    assert not torch.equal(after["bn3.running_mean"], before["bn3.running_mean"])


def test_a_plain_network_trains_whole() -> None:
    net = trained(plain(begun(freeze="2", adapter="lora:2")))
    before, after = start(), net.state_dict()
    assert not [n for n in before if torch.equal(before[n], after[n])]


@pytest.mark.parametrize("freeze", ["4", "-1", "stemm", "1.5"])
def test_unknown_parts_are_named(freeze: str) -> None:
    with pytest.raises(FurlongError, match=r"model\.freeze is .* \(this Small has 3\)"):
        begun(freeze=freeze)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"conv1\.weight, which does not fit"):
        Given({"conv1.weight": torch.zeros(1)}).begin(build_encoder("small"))


def test_the_encoder_has_its_own_rate() -> None:
    net = begun(freeze="stem")
    head = nn.Linear(2, 2)
    settings = OptimiserSettings(lr=0.1, encoder_rate=0.25)
    groups = Optimiser([*net.parameters(), *head.parameters()], settings, 0.1).torch.param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.025]
    assert [len(group["params"]) for group in groups] == [2, 9]
    one = Optimiser([*net.parameters(), *head.parameters()], OptimiserSettings(), 0.1)
    assert len(one.torch.param_groups) == 1


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("name", ["small", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_an_adapter_begins_as_nothing_and_is_merged_exactly(name: str) -> None:
    net = begun(name, adapter="lora:2:6").eval()
    base = plain(begun(name)).eval()
    assert torch.equal(net(IMAGES), base(IMAGES))
    assert {n.rsplit(".", 2)[1] for n in net.state_dict()} == {"lora_A", "lora_B"}
    trained(net)
    net.eval()
    wanted = net(IMAGES)
    assert (wanted - base(IMAGES)).abs().max() > 1e-4
    merged = plain(net)
    assert not [part for part in merged.modules() if isinstance(part, Adapted)]
    torch.testing.assert_close(merged(IMAGES), wanted, rtol=1e-4, atol=1e-5)
    changed = {n for n, t in merged.state_dict().items() if not torch.equal(t, start(name)[n])}
    assert all(n.endswith("weight") and "bn" not in n for n in changed)


def test_the_formula() -> None:
    layer = nn.Linear(5, 4)
    adapted = Adapted(layer, Rank(2, 6.0), seed=1)
    assert adapted.lora_A.weight.shape == (2, 5)
    assert adapted.lora_B.weight.shape == (4, 2)
    nn.init.normal_(adapted.lora_B.weight)
    x = torch.randn(3, 5)
    weight = layer.weight + 3 * adapted.lora_B.weight @ adapted.lora_A.weight
    torch.testing.assert_close(adapted(x), x @ weight.T + layer.bias)


def test_layers_without_anything_to_save_stay_fixed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(32, 32)
            self.narrow = nn.Linear(2, 2)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
            self.attention = nn.MultiheadAttention(32, 2)

    net = Given({}, adapter="lora:2").begin(Odd())
    assert [name for name in net.state_dict() if "lora" in name] == [
        "wide.lora_A.weight", "wide.lora_B.weight"
    ]  # fmt: skip


def test_freeze_a_is_the_same_for_everybody_and_only_b_is_left() -> None:
    nets = [begun(adapter="lora:2", average="freeze_a", seed=7) for _ in range(2)]
    assert all(name.endswith("lora_B.weight") for name in nets[0].state_dict())
    first, second = (net.get_submodule("conv2").lora_A.weight for net in nets)
    assert torch.equal(first, second)
    other = begun(adapter="lora:2", average="freeze_a", seed=8)
    assert not torch.equal(first, other.get_submodule("conv2").lora_A.weight)


@pytest.mark.parametrize("text", ["lora", "lora:0", "lora:x", "lora:2:0", "lora:2:1:1", "ia3:2"])
def test_adapters_that_there_are_not(text: str) -> None:
    with pytest.raises(FurlongError, match=r"model\.adapter is"):
        Rank.parse(text)


# ---------------------------------------------------------------- their average


def test_factoring_is_exact_up_to_the_rank_and_best_beyond_it() -> None:
    torch.manual_seed(0)
    a = torch.randn(3, 40)
    low = torch.randn(20, 3).double() @ torch.randn(3, 40).double()
    assert (product(*factored(low, a)) - low).norm() < 1e-9 * low.norm()
    high = torch.randn(20, 40).double()
    best = torch.linalg.svdvals(high)[3:].square().sum().sqrt()
    torch.testing.assert_close((product(*factored(high, a)) - high).norm(), best)
    none, b = factored(torch.zeros(20, 40).double(), a)
    assert torch.equal(none, a.double())
    assert not b.any()


def test_factors_of_an_unchanged_product_stay_near() -> None:
    torch.manual_seed(0)
    a = torch.linalg.qr(torch.randn(40, 3))[0].T.contiguous()
    b = 0.1 * torch.randn(20, 3)
    again, b_again = factored(product(a.double(), b.double()), a)
    torch.testing.assert_close(again, a.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(b_again, b.double(), atol=1e-5, rtol=0)
    deficient = product(a[:1].double(), b[:, :1].double())  # rank 1 of 3
    kept, _ = factored(deficient, a)
    torch.testing.assert_close(kept, a.double(), atol=1e-5, rtol=0)


def _clients(rank: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    shapes = {"x.lora_A.weight": (rank, 4, 3, 3), "x.lora_B.weight": (20, rank, 1, 1)}
    return [
        {"head": torch.randn(2), **{n: torch.randn(s) for n, s in shapes.items()}} for _ in range(2)
    ]


def _product(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return product(weights["x.lora_A.weight"].double(), weights["x.lora_B.weight"].double())


def test_products_average_exactly_where_factors_do_not() -> None:
    clients = _clients(2)
    for client in clients:  # of rank 1, so that the mean has rank 2
        client["x.lora_B.weight"][:, 1] = 0
    wanted = sum(w * _product(c) for w, c in zip((0.25, 0.75), clients, strict=True))

    def merged(combiner: Any) -> tuple[dict[str, torch.Tensor], float]:
        for weight, client in zip((1.0, 3.0), clients, strict=True):
            combiner.add(client, weight)
        found = combiner.onto(clients[0])
        return found, float((_product(found) - wanted).norm() / wanted.norm())

    factors, off = merged(Average("average"))
    products, exact = merged(Products(Average("average")))
    assert exact < 1e-6 < 0.1 < off
    torch.testing.assert_close(products["head"], factors["head"])
    assert products["x.lora_B.weight"].shape == (20, 2, 1, 1)


def test_nobody_answered() -> None:
    current = _clients(2)[0]
    assert Products(Average("average")).onto(current) is current
