"""Encoders and heads: sizes from the papers, names that others rely on, users' own modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from furlong.errors import FurlongError
from furlong.nn.encoders import ENCODERS, build_encoder, evaluating, out_dim
from furlong.nn.heads import HEADS, head, head_dim

PARAMS = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["params"]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def float_buffers(module: nn.Module) -> int:
    return sum(b.numel() for b in module.buffers() if b.is_floating_point())


@pytest.mark.parametrize("depth", [18, 50])
def test_resnet_sizes_and_names(depth: int) -> None:
    encoder = build_encoder(f"resnet{depth}")
    assert count(encoder) == PARAMS[f"resnet{depth}_cifar_trunk"]
    assert float_buffers(encoder) == PARAMS[f"resnet{depth}_bn_floats"]
    names = [name for name, _ in encoder.named_parameters()]
    convs = [name for name in names if "conv" in name and "weight" in name]
    assert len(convs) == PARAMS[f"dapu_conv_tensors_resnet{depth}"]
    shapes = {name: tuple(p.shape) for name, p in encoder.named_parameters()}
    expansion = 1 if depth == 18 else 4
    assert shapes["conv1.weight"] == (64, 3, 3, 3)
    assert shapes["layer2.0.downsample.0.weight"] == (128 * expansion, 64 * expansion, 1, 1)
    assert shapes["layer4.1.bn2.weight"] == (512,)
    assert ("layer1.0.downsample.1.weight" in names) == (depth == 50)


def test_resnet_stride_is_on_the_3x3_convolution() -> None:
    strides = {
        name: part.stride
        for name, part in build_encoder("resnet50").named_modules()
        if isinstance(part, nn.Conv2d) and part.stride != (1, 1)
    }
    assert set(strides) == {
        f"layer{i}.0.{part}" for i in (2, 3, 4) for part in ("conv2", "downsample.0")
    }


def test_cnn5_size_and_features() -> None:
    encoder = build_encoder("cnn5").eval()
    assert count(encoder) == 3_912_256
    for size in (32, 84):
        assert encoder(torch.zeros(1, 3, size, size)).shape == (1, 2048)


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_every_encoder_maps_images_to_its_out_dim(name: str) -> None:
    encoder = build_encoder(name, in_channels=1, image_size=32).eval()
    with torch.no_grad():
        assert encoder(torch.zeros(1, 1, 32, 32)).shape == (1, encoder.out_dim)
    assert any("conv" in key for key in encoder.state_dict())


def test_stem_follows_image_size_unless_named() -> None:
    def kernel(name: str, size: int) -> int:
        return build_encoder(name, image_size=size).get_parameter("conv1.weight").shape[-1]

    assert kernel("resnet18", 32) == kernel("resnet18", 96) == kernel("resnet18_small", 224) == 3
    assert kernel("resnet18", 97) == kernel("resnet18_large", 32) == 7


def test_large_stem_reaches_the_usual_resolution() -> None:
    encoder = build_encoder("resnet18", image_size=224).eval()
    seen: list[torch.Size] = []
    encoder.get_submodule("layer4").register_forward_hook(lambda *args: seen.append(args[2].shape))
    with torch.no_grad():
        encoder(torch.zeros(1, 3, 224, 224))
    assert seen == [(1, 512, 7, 7)]


def test_all_parameters_learn_and_state_dict_is_everything() -> None:
    torch.manual_seed(0)
    encoder, copy = build_encoder("small"), build_encoder("small")
    x = torch.randn(8, 3, 32, 32)
    encoder(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
    copy.load_state_dict(encoder.state_dict())
    assert torch.equal(copy.eval()(x), encoder.eval()(x))


def test_same_seed_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build_encoder("resnet18").state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 7, 3), nn.BatchNorm2d(7), nn.Dropout(), nn.AdaptiveAvgPool2d(1)
        )
    def forward(self, x):
        return self.net(x).flatten(1) + 0 * torch.rand(1)

def plain():
    return nn.Flatten()

def maps(in_channels, image_size):
    return nn.Conv2d(in_channels, 4, 3)

def number():
    return 3
"""


def test_users_encoder_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    torch.manual_seed(5)
    encoder = build_encoder(f"{file}:Own", in_channels=2)
    state = {key: value.clone() for key, value in encoder.state_dict().items()}
    before = torch.get_rng_state()
    del encoder.out_dim
    assert out_dim(encoder, in_channels=2) == 7
    assert torch.equal(torch.get_rng_state(), before)
    assert encoder.training
    assert all(torch.equal(state[key], value) for key, value in encoder.state_dict().items())
    assert build_encoder(f"{file}:plain", image_size=8).out_dim == 3 * 8 * 8


def test_users_encoder_from_a_module() -> None:
    assert build_encoder("torch.nn:Flatten", in_channels=1, image_size=4).out_dim == 16
    assert build_encoder("furlong.nn.encoders:CNN5", in_channels=1).out_dim == 2048


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet81", "Did you mean 'resnet18'"),
        ("no.such.module:make", "cannot import"),
        (":make", "empty"),
        ("no/such/file.py:make", "cannot import"),
        ("{file}:own", "Did you mean 'Own'"),
        ("{file}:maps", "pool or flatten"),
        ("{file}:number", "not an nn.Module"),
        ("math:pi", "not a function or class"),
    ],
)
def test_bad_encoder_names_say_what_to_do(name: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(FurlongError, match=message):
        build_encoder(name.replace("{file}", str(file)))


@pytest.mark.parametrize(
    ("name", "in_dim", "out", "params"),
    [
        ("proj_128", 512, 128, PARAMS["mlp_512_512_128_nobn"]),
        ("proj_128", 2048, 128, PARAMS["mlp_2048_2048_128_nobn"]),
        ("easyfl_proj", 512, 2048, PARAMS["mlp_bn_512_4096_2048"]),
        ("easyfl_proj", 2048, 2048, PARAMS["mlp_bn_2048_4096_2048"]),
        ("easyfl_pred", 2048, 2048, PARAMS["mlp_bn_2048_4096_2048"]),
        ("mfcl_proj", 512, 128, PARAMS["mfcl_projection_512_512_128_bn_nobias"]),
        ("orchestra_proj", 512, 512, 2 * 512 * 512 + 2 * 512),
        ("simsiam_proj", 512, 2048, 512 * 2048 + 2 * 2048**2 + 2 * 2 * 2048),
        ("small_proj", 256, 128, 256 * 256 + 256 + 512 + 256 * 128 + 128),
        ("small_pred", 128, 128, 128 * 256 + 256 + 512 + 256 * 128 + 128),
        ("mlp:12:5", 7, 5, 7 * 12 + 12 + 24 + 12 * 5 + 5),
        ("mlp:12:5:bn", 7, 5, 7 * 12 + 12 + 24 + 12 * 5 + 5 + 10),
        ("mlp:12:5:centred", 7, 5, 7 * 12 + 24 + 12 * 5),
    ],
)
def test_heads(name: str, in_dim: int, out: int, params: int) -> None:
    module = head(name, in_dim)
    assert count(module) == params
    assert head_dim(module) == out
    with torch.no_grad():
        assert module(torch.randn(4, in_dim)).shape == (4, out)


def test_a_centred_head_cannot_move_all_projections_together() -> None:
    module = head("mlp:12:12:5:centred", 7)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
        mean = module(torch.randn(64, 7) + 3).mean(0)
    assert mean.abs().max() < 1e-5


def test_fedu_payload_matches_the_paper() -> None:
    for name, floats in (("resnet18", 38_460_480), ("resnet50", 57_083_456)):
        encoder = build_encoder(name)
        projector = head("easyfl_proj", out_dim(encoder))
        predictor = head("easyfl_pred", head_dim(projector))
        assert sum(map(count, (encoder, projector, predictor))) == floats


@pytest.mark.parametrize(
    "name",
    ["proj128", "mlp", "mlp:3", "mlp:0:4", "mlp:a:4", "mlp:4:bn", "mlp:4:4:ln", "mlp:4:centred"],
)
def test_unknown_head(name: str) -> None:
    with pytest.raises(FurlongError, match="Unknown head"):
        head(name, 8)


def test_heads_table_is_complete() -> None:
    assert {"proj_128", "easyfl_proj", "easyfl_pred", "mfcl_proj", "orchestra_proj"} <= set(HEADS)
    with pytest.raises(FurlongError, match="linear"):
        head_dim(nn.ReLU())


def test_evaluating_puts_mixed_flags_back_even_after_an_error() -> None:
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval(), nn.Linear(2, 2))
    flags = [part.training for part in module.modules()]
    with evaluating(module):
        assert not any(part.training for part in module.modules())
        assert not module(torch.zeros(2, 2)).requires_grad
    assert [part.training for part in module.modules()] == flags
    with pytest.raises(RuntimeError), evaluating(module):
        module(torch.zeros(2, 3))
    assert [part.training for part in module.modules()] == flags
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["small", "resnet18"])
def test_with_group_norms_everywhere_an_image_is_by_itself(name: str) -> None:
    """Nothing is left that depends on the others of a batch, or keeps anything of them."""
    encoder = build_encoder(f"{name}+all_gn", 3, 16)
    assert encoder.state_dict().keys() == dict(encoder.named_parameters()).keys()
    images = torch.randn(3, 3, 16, 16)
    together, alone = encoder(images), encoder(images[1:2])
    assert torch.allclose(together[1:2], alone, atol=1e-5)
    assert build_encoder(name, 3, 16).state_dict().keys() > encoder.state_dict().keys()
