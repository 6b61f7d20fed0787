"""MFCL's nets: sizes of its tables, shapes, and names under which a run folder finds them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from furlong.core.weights import snapshot
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder, modular, trunk
from furlong.nn.peernorm import PeerNorm, peers
from furlong.nn.sensor import SENSORS, Modular, Sensor, Trunk
from furlong.runs.folder import RunFolder
from furlong.runs.saved_encoder import load_encoder

PARAMS = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["params"]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("representation", "side"), [("rep32", 32), ("rep16", 16)])
def test_sensor_of_table_5(representation: Any, side: int) -> None:
    sensor = Sensor(representation=representation)
    assert count(sensor) == PARAMS["mfcl_sensor_table5"] == 77_853
    assert [part.groups for part in sensor.modules() if isinstance(part, PeerNorm)] == [
        *(16, 16, 16),
        1,
    ]
    x = torch.rand(2, 3, 32, 32)
    code = sensor.encoder(x)
    assert code.shape == (2, 64, side, side)
    assert code[0].numel() == (65_536 if side == 32 else 16_384)
    assert code.min() >= 0
    assert torch.equal(sensor(x), sensor.decoder(code))
    assert sensor(x).shape == x.shape


@pytest.mark.parametrize("seed", range(10))
def test_no_sensor_is_born_dead(seed: int) -> None:
    """Without a norm the ReLU on one grey channel could be zero everywhere."""
    torch.manual_seed(seed)
    sensor = Sensor(1, norm="none")
    sensor(torch.rand(2, 1, 8, 8)).sum().backward()
    grad = sensor.encoder.conv1.weight.grad
    assert grad is not None
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("norm", ["pn", "gn", "bn", "none"])
@pytest.mark.parametrize("representation", ["rep32", "rep16"])
def test_every_sensor_reconstructs_and_learns(norm: Any, representation: Any) -> None:
    torch.manual_seed(0)
    sensor = Sensor(1, representation, norm).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    affine = 0 if norm == "none" else 2 * (64 + 64 + 64 + 1)
    assert count(sensor) == 640 + 2 * 36_928 + 577 + 10 + affine
    x = torch.rand(8, 1, 20, 28).contiguous(memory_format=torch.channels_last)
    with peers(sensor):
        logits = sensor(x)
    F.binary_cross_entropy_with_logits(logits, x).backward()
    assert logits.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sensor.parameters())
    assert sensor.get_parameter("encoder.conv1.weight").grad.abs().sum() > 0


def test_loss_of_a_reconstruction() -> None:
    sensor, x = Sensor(), torch.rand(2, 3, 8, 8)
    picture = sensor.reconstruct(x)
    assert picture.min() >= 0
    assert picture.max() <= 1
    loss = F.binary_cross_entropy_with_logits(sensor(x), x)
    torch.testing.assert_close(loss, F.binary_cross_entropy(picture, x))
    nn.init.zeros_(sensor.decoder.conv3.weight)
    nn.init.zeros_(sensor.decoder.conv3.bias)
    half = F.binary_cross_entropy_with_logits(sensor(x), x)
    assert half.item() == pytest.approx(math.log(2), abs=1e-6)
    perfect = F.binary_cross_entropy_with_logits(torch.logit(x), x)
    entropy = -(x * x.log() + (1 - x) * (1 - x).log()).mean()
    torch.testing.assert_close(perfect, entropy)
    assert entropy > 0


def test_a_pair_is_encoded_alike_in_any_batch() -> None:
    torch.manual_seed(0)
    sensor, x = Sensor(), torch.rand(6, 3, 16, 16)
    with peers(sensor):
        whole = sensor.encoder(x)
        torch.testing.assert_close(sensor.encoder(x[[2, 5]]), whole[[2, 5]])
        swapped = sensor.encoder(x.roll(3, dims=0))
    torch.testing.assert_close(swapped, whole.roll(3, dims=0))


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    sensor = Sensor()
    colours = torch.rand(4, 3, 1, 1)
    x = torch.cat([colours, colours]).expand(8, 3, 8, 8) * torch.linspace(0.2, 1, 8)
    optimiser = torch.optim.Adam(sensor.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        with peers(sensor):
            loss = F.binary_cross_entropy_with_logits(sensor(x), x)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02


def test_names_of_the_weights() -> None:
    affine = ("weight", "bias")
    parts = [f"{part}{i}" for i in (1, 2) for part in ("conv", "norm")]
    encoder = [f"encoder.{part}.{a}" for part in parts for a in affine]
    decoder = [key.replace("encoder", "decoder") for key in encoder]
    decoder += [f"decoder.conv3.{a}" for a in affine]
    for representation in ("rep32", "rep16"):
        assert list(Sensor(representation=representation).state_dict()) == encoder + decoder  # type: ignore[arg-type]
    keys = modular("rep32_pn+small+small_proj", 3, 32).state_dict().keys()
    assert {key.split(".")[0] for key in keys} == {"sensor", "discriminator", "projector"}
    assert [f"encoder.{k[7:]}" for k in keys if k.startswith("sensor.")] == encoder


@pytest.mark.parametrize("representation", ["rep32", "rep16"])
@pytest.mark.parametrize("shape", [(2, 3, 27, 28), (2, 3, 28, 27)])
def test_odd_images_are_refused(representation: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(FurlongError, match=r"27.*even"):
        Sensor(representation=representation)(torch.rand(shape))
    with pytest.raises(FurlongError, match="27×27"):
        modular(f"{representation}_pn+small", 3, 27)


def test_unknown_representation() -> None:
    with pytest.raises(FurlongError, match="Did you mean 'rep32'"):
        Sensor(representation="rep_32")  # type: ignore[arg-type]


def test_trunks() -> None:
    body = trunk("resnet18", 32)
    assert count(body) == PARAMS["mfcl_discriminator_resnet18_minus_stem"] == 11_166_976
    whole = build_encoder("resnet18").state_dict()
    assert list(body.state_dict()) == [key for key in whole if key.startswith("layer")]
    x = torch.randn(2, 64, 8, 8)
    assert body(x).shape == (2, body.out_dim) == (2, 512)
    assert isinstance(trunk("resnet18_large", 224), Trunk)
    for name, width in (("small", 192), ("furlong.nn.encoders:Small", 192), ("small+gn", 192)):
        other = trunk(name, 32)
        assert other(x).shape == (2, other.out_dim) == (2, width)


def test_trunk_is_the_rest_of_the_resnet() -> None:
    whole, body = build_encoder("resnet18").eval(), trunk("resnet18", 32).eval()
    body.load_state_dict({k: v for k, v in whole.state_dict().items() if k.startswith("layer")})
    seen: list[torch.Tensor] = []
    whole.get_submodule("layer1").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        features = whole(torch.randn(2, 3, 8, 8))
        assert torch.equal(body(seen[0]), features)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("rep16_bn+small", 192),
        ("rep16_pn+torch.nn:Flatten", 16_384),
        ("rep32_pn+torch.nn:Flatten", 65_536),
        ("rep32_none+small", 192),
        ("rep16_pn+cnn5", 2048),
        ("rep32_pn.avg_moments+small", 192),
        ("rep16_pn+resnet18+mfcl_proj", 128),
        ("rep16_gn+small+mlp:7:5", 5),
        ("rep32_pn+furlong.nn.backbones:Small+small_proj", 128),
    ],
)
def test_composed_encoders(name: str, width: int) -> None:
    encoder = build_encoder(name, 1, 32).eval()
    assert isinstance(encoder, Modular)
    assert encoder.out_dim == width
    with torch.no_grad():
        assert encoder(torch.rand(2, 1, 32, 32)).shape == (2, width)


def test_statistics_by_name() -> None:
    for name, (_, kind, statistics) in SENSORS.items():
        encoder = build_encoder(f"{name}+small")
        found = {p.statistics for p in encoder.modules() if isinstance(p, PeerNorm)}
        assert found == ({statistics} if kind == "pn" else set())
    assert SENSORS["rep16_pn.eq3_literal"] == ("rep16", "pn", "eq3_literal")
    assert len(SENSORS) == 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rep23_pn+small", "unknown sensor 'rep23_pn'. Did you mean 'rep"),
        ("rep32_qn+small", "unknown sensor 'rep32_qn'"),
        ("rep32+small", "unknown sensor 'rep32'"),
        ("rep32_pn.averages+small", "unknown sensor"),
        ("rep32_gn.pooled+small", "unknown sensor"),
        ("rep32_pn+smal", "Did you mean 'small'"),
        ("rep32_pn+", "Unknown encoder ''"),
        ("rep32_pn+small+mfcl", "Did you mean 'mfcl_proj'"),
        ("rep32_pn+small+pn", "Unknown head 'pn'"),
        ("rep32_pn+small+mfcl_proj+pn", "4 parts"),
        ("rep32_pn", "Or composed"),
    ],
)
def test_malformed_names_say_what_to_do(name: str, message: str) -> None:
    with pytest.raises(FurlongError, match=message):
        build_encoder(name)


def test_a_module_called_like_a_sensor_is_the_users() -> None:
    with pytest.raises(FurlongError, match=r"cannot import 'report\.py'"):
        build_encoder("report.py:make+pn")


@pytest.mark.parametrize("name", ["small+pn", "rep16_pn.avg_moments+small+small_proj"])
def test_a_run_folder_gives_the_encoder_back(name: str, tmp_path: Path) -> None:
    about = {"encoder": name, "channels": 1, "image_size": 32, "augment": "none"}
    encoder = build_encoder(name, 1, 32).eval()
    RunFolder.create(tmp_path / "run").save_encoder(snapshot(encoder), about)
    x = torch.rand(3, 1, 32, 32)
    assert torch.equal(load_encoder(tmp_path / "run")(x), encoder(x))
