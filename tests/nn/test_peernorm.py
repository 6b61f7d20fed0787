"""Peer Normalization against its definition, and who is whose peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.nn.peernorm import PeerNorm, norm, peers, with_early_norm

SHARED = ["pooled", "avg_moments"]
WAYS: list[Any] = [*SHARED, "eq3_literal"]
K, C, G, H, W = 3, 8, 4, 5, 6


@pytest.fixture
def views() -> Tensor:
    """K first and then K second views that differ in mean and spread."""
    torch.manual_seed(0)
    scale = torch.rand(2 * K, C, 1, 1, dtype=torch.double) + 0.5
    return torch.randn(2 * K, C, H, W, dtype=torch.double) * scale + 3 * scale


def make(statistics: Any = "pooled", eps: float = 1e-3) -> PeerNorm:
    """A PN whose affine parameters are not the initial ones."""
    torch.manual_seed(1)
    pn = PeerNorm(C, G, eps, statistics).double()
    nn.init.uniform_(pn.weight, 0.5, 2)
    nn.init.uniform_(pn.bias)
    return pn


def paired(pn: PeerNorm, x: Tensor) -> Tensor:
    with peers(pn):
        return pn(x)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each image and group, 2×K×G."""
    var, mean = torch.var_mean(x.view(2, K, G, -1), -1, correction=0)
    return var, mean


def by_definition(x: Tensor, pn: PeerNorm) -> Tensor:
    """Pair by pair and group by group."""
    out = torch.empty_like(x)
    for i in range(K):
        for g in range(G):
            channels = slice(g * C // G, (g + 1) * C // G)
            pair = torch.stack([x[i, channels], x[i + K, channels]])  # 2×Λ×H×W
            if pn.statistics == "pooled":
                mean, var = pair.mean(), pair.var(correction=0)
            elif pn.statistics == "avg_moments":
                mean, var = pair.mean(), (pair[0].var(correction=0) + pair[1].var(correction=0)) / 2
            else:
                mean = pair.mean((0, 1))  # per pixel
                var = (pair - mean).square().sum() / (2 * C // G)
            normal = (pair - mean) / torch.sqrt(var + pn.eps)
            gain, offset = pn.weight[channels].view(-1, 1, 1), pn.bias[channels].view(-1, 1, 1)
            out[i, channels], out[i + K, channels] = (normal * gain + offset).detach()
    return out


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("statistics", WAYS)
def test_equals_the_definition_in_either_layout(
    statistics: Any, layout: torch.memory_format, views: Tensor
) -> None:
    pn, x = make(statistics), views.contiguous(memory_format=layout).requires_grad_()
    out = paired(pn, x)
    torch.testing.assert_close(out, by_definition(views, pn))
    assert out.is_contiguous(memory_format=layout)
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("statistics", WAYS)
def test_gradients(statistics: Any, views: Tensor) -> None:
    pn = make(statistics)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values = {"weight": weight, "bias": bias}
        with peers(pn):
            out: Tensor = torch.func.functional_call(pn, values, (x,))
        return out

    x = views[..., :2, :2].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, pn.weight, pn.bias), fast_mode=True)


def test_gradient_of_an_expanded_one() -> None:
    """``sum().backward()`` hands over a gradient without memory of its own; x is half a tensor."""
    pn, x = PeerNorm(C, G), torch.randn(8, 2 * C, H, W, requires_grad=True)
    paired(pn, x[:, ::2]).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-4
    torch.testing.assert_close(pn.bias.grad, torch.full((C,), 8.0 * H * W))


@pytest.mark.parametrize("statistics", SHARED)
def test_two_equal_views_make_it_a_group_norm(statistics: Any, views: Tensor) -> None:
    pn, x = make(statistics), views[:K]
    expected = F.group_norm(x, G, pn.weight, pn.bias, pn.eps)
    torch.testing.assert_close(paired(pn, torch.cat([x, x])), torch.cat([expected, expected]))


@pytest.mark.parametrize("statistics", WAYS)
def test_a_lone_image_is_its_own_peer(statistics: Any, views: Tensor) -> None:
    pn, x = make(statistics), views[: K if K % 2 else K - 1]
    twice = paired(pn, torch.cat([x, x]))
    torch.testing.assert_close(pn(x), twice[: len(x)])
    torch.testing.assert_close(pn.eval()(x[:1]), twice[:1])


def test_pooled_is_a_group_norm_of_the_stacked_views(views: Tensor) -> None:
    pn = make()
    stacked = torch.cat([views[:K], views[K:]], dim=2)
    expected = F.group_norm(stacked, G, pn.weight, pn.bias, pn.eps)
    torch.testing.assert_close(paired(pn, views), torch.cat(expected.split(H, dim=2)))


def test_pairs_of_groups_come_out_standardised(views: Tensor) -> None:
    out = paired(PeerNorm(C, G, eps=1e-12).double(), views)
    var, mean = torch.var_mean(out.view(2, K, G, -1), (0, 3), correction=0)
    torch.testing.assert_close(mean, torch.zeros_like(mean))
    torch.testing.assert_close(var, torch.ones_like(var))


def test_variance_identity(views: Tensor) -> None:
    """var_pooled = var_avg + ((μ₁−μ₂)/2)², read off the ratio of the two outputs."""
    one, other = (paired(PeerNorm(C, G, 0.0, way).double(), views) for way in SHARED)
    var, mean = moments(views)
    averaged = var.mean(0)
    between = ((mean[0] - mean[1]) / 2).square()
    assert between.min() > 0
    ratio = (other / one).square().view(2, K, G, -1)  # both are centred on the same mean
    torch.testing.assert_close(ratio, ((averaged + between) / averaged)[..., None].expand_as(ratio))


def test_the_literal_formula_shrinks_with_the_image(views: Tensor) -> None:
    out = paired(PeerNorm(C, G, 0.0, "eq3_literal").double(), views)
    rms = out.square().view(2, K, G, -1).mean((0, 3)).sqrt()
    torch.testing.assert_close(rms, torch.full_like(rms, (H * W) ** -0.5))


@pytest.mark.parametrize("statistics", WAYS)
def test_other_samples_never_enter(statistics: Any, views: Tensor) -> None:
    pn = make(statistics)
    out = paired(pn, views)
    order = torch.tensor([2, 0, 1])
    rows = torch.cat([order, order + K])
    torch.testing.assert_close(paired(pn, views[rows]), out[rows])
    swapped = torch.arange(2 * K).roll(K)
    torch.testing.assert_close(paired(pn, views[swapped]), out[swapped])
    torch.testing.assert_close(paired(pn, views[[1, 1 + K]]), out[[1, 1 + K]])
    torch.testing.assert_close(pn(views)[2:3], pn(views[2:3]))


def test_an_odd_batch_has_no_pairs() -> None:
    pn = PeerNorm(C, G)
    assert pn(torch.randn(3, C, 2, 2)).shape == (3, C, 2, 2)
    with pytest.raises(FurlongError, match=r"3 images.*second views"), peers(pn):
        pn(torch.randn(3, C, 2, 2))
    assert not pn.paired


def test_peers_reaches_every_norm_inside_and_nests() -> None:
    inner = PeerNorm(4)
    net = nn.Sequential(nn.Sequential(inner), PeerNorm(4))
    flags = lambda: [part.paired for part in net.modules() if isinstance(part, PeerNorm)]  # noqa: E731
    with peers(inner):
        assert flags() == [True, False]
        with peers(net):
            assert flags() == [True, True]
            with peers(net):
                pass
            assert flags() == [True, True]
        assert flags() == [True, False]
        with pytest.raises(ZeroDivisionError), peers(net):
            _ = 1 / 0
        assert flags() == [True, False]
    assert flags() == [False, False]


def test_groups_and_state() -> None:
    assert [PeerNorm(c).groups for c in (64, 16, 3, 24)] == [16, 16, 1, 1]
    pn = PeerNorm(64)
    assert list(pn.state_dict()) == ["weight", "bias"]
    assert torch.equal(pn.weight, torch.ones(64))
    assert torch.equal(pn.bias, torch.zeros(64))
    assert "groups=16" in repr(pn)
    with pytest.raises(FurlongError, match="Did you mean 'pooled'"):
        PeerNorm(4, statistics="pool")  # type: ignore[arg-type]


def test_constant_images_stay_finite() -> None:
    pn, x = PeerNorm(64), torch.ones(4, 64, 4, 4, requires_grad=True)
    out = paired(pn, x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_norm_by_name() -> None:
    kinds = {kind: norm(kind, 64) for kind in ("pn", "gn", "bn", "none")}  # type: ignore[arg-type]
    assert isinstance(kinds["bn"], nn.BatchNorm2d)
    assert not list(kinds["none"].parameters())
    pn, gn = kinds["pn"], kinds["gn"]
    assert isinstance(gn, nn.GroupNorm)
    assert gn.num_groups == 16
    assert norm("gn", 3).num_groups == 1
    x = torch.randn(5, 64, 4, 4)
    assert torch.equal(pn(x), gn(x))
    assert norm("pn", 64, statistics="avg_moments").statistics == "avg_moments"
    with pytest.raises(FurlongError, match="Unknown norm 'ln'"):
        norm("ln", 64)  # type: ignore[arg-type]


def norms(encoder: nn.Module) -> dict[str, type]:
    kinds = (nn.BatchNorm2d, nn.GroupNorm, PeerNorm)
    return {name: type(part) for name, part in encoder.named_modules() if isinstance(part, kinds)}


@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("resnet18", {"bn1", "layer1.0.bn1"}),
        ("resnet50", {"bn1", "layer1.0.bn1"}),
        ("cnn5", {"bn1", "bn2"}),
        ("small", {"bn1", "bn2"}),
    ],
)
def test_early_norm_leaves_the_others_alone(name: str, early: set[str]) -> None:
    torch.manual_seed(0)
    before = build_encoder(name)
    torch.manual_seed(0)
    after = build_encoder(f"{name}+pn")
    assert after.out_dim == before.out_dim
    assert norms(after) == {n: PeerNorm if n in early else nn.BatchNorm2d for n in norms(before)}
    assert sum(p.numel() for p in after.parameters()) == sum(p.numel() for p in before.parameters())
    state = before.state_dict()
    assert all(torch.equal(state[key], value) for key, value in after.state_dict().items())
    lost = {key.rpartition(".")[0] for key in state.keys() - after.state_dict().keys()}
    assert lost == early  # their running statistics


def test_early_group_norm() -> None:
    encoder = build_encoder("small+gn", in_channels=1)
    assert [kind is nn.GroupNorm for kind in norms(encoder).values()] == [True, True, False, False]
    x = torch.randn(4, 1, 32, 32)
    encoder(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_early_norm_pairs_within_peers_only() -> None:
    encoder = build_encoder("small+pn").eval()
    x = torch.randn(4, 3, 32, 32)
    alone = encoder(x)
    torch.testing.assert_close(encoder(x[:1]), alone[:1])
    with peers(encoder):
        together = encoder(x)
        torch.testing.assert_close(encoder(x[[1, 3]]), together[[1, 3]])
    assert (together - alone).abs().max() > 1e-3


OWN = """
from torch import nn

def two():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()),
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 8, 3), nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )

def one():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
"""


def test_early_norm_of_a_users_encoder(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"  # a plus sign in a path is not a suffix
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    name = f"{folder / 'own.py'}:two"
    assert set(norms(build_encoder(name)).values()) == {nn.BatchNorm2d}
    encoder = build_encoder(f"{name}+pn")
    assert norms(encoder) == {"1.0": PeerNorm, "3": PeerNorm, "5": nn.BatchNorm2d}
    assert encoder(torch.randn(2, 3, 32, 32)).shape == (2, encoder.out_dim) == (2, 8)
    with pytest.raises(FurlongError, match="first two BatchNorm2d"):
        build_encoder(f"{folder / 'own.py'}:one+gn")


def test_early_norm_twice_is_refused() -> None:
    with pytest.raises(FurlongError, match="does not have them"):
        with_early_norm(build_encoder("resnet18+pn"), "gn")
    with pytest.raises(FurlongError, match="Unknown early norm"):
        with_early_norm(build_encoder("small"), "bn")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18+xx", r"early norm is called 'xx'.*Valid: all_gn, gn, pn"),
        ("resnet18+pnn", "Did you mean 'pn'"),
        ("resnet18+", "early norm is called ''"),
        ("+pn", "Unknown encoder ''"),
        ("resnet81+pn", "Did you mean 'resnet18'"),
        ("small+pn+gn", "only one norm"),
        ("torch.nn:Flatten+pn+gn", "only one norm"),
        ("torch.nn:Flatten+pn", "first two BatchNorm2d"),
        ("small+rep32_pn", "sensor would come first"),
    ],
)
def test_malformed_names_say_what_to_do(name: str, message: str) -> None:
    with pytest.raises(FurlongError, match=message):
        build_encoder(name)
