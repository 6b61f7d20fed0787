"""Vision transformers: outputs by their definition, names of timm and DINOv2, sizes, positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder, trunk
from furlong.nn.vit import VisionTransformer, resized_position, sine_cosine, usual_patch


def vit(name: str, channels: int = 3, size: int = 32) -> VisionTransformer:
    encoder = build_encoder(name, channels, size)
    assert isinstance(encoder, VisionTransformer)
    return encoder


def shaken(encoder: nn.Module, seed: int = 0) -> nn.Module:
    """With every tensor drawn anew, so that none is at a value which hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in encoder.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if p.ndim == 1 else 0.1))
    return encoder.eval()


# ---------------------------------------------------------------- outputs by the definition


def layer_norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(x: Tensor, w: dict[str, Tensor], at: str, heads: int) -> Tensor:
    """Head by head, row by row of one image's T×d."""
    width = x.shape[1]
    key = width // heads
    joined = linear(x, w, f"{at}.qkv")
    q, k, v = joined[:, :width], joined[:, width : 2 * width], joined[:, 2 * width :]
    found = []
    for head in range(heads):
        part = slice(head * key, (head + 1) * key)
        weight = (q[:, part] @ k[:, part].T / math.sqrt(key)).softmax(1)
        found.append(weight @ v[:, part])
    return linear(torch.cat(found, 1), w, f"{at}.proj")


def reference(w: dict[str, Tensor], image: Tensor, patch: int, heads: int) -> Tensor:
    """DINOv2's (without layer scale and registers: timm's) feature of one image, in float64."""
    kernel = w["patch_embed.proj.weight"].flatten(1)
    tokens = []
    for top in range(0, image.shape[1], patch):
        for left in range(0, image.shape[2], patch):
            square = image[:, top : top + patch, left : left + patch].reshape(-1)
            tokens.append(kernel @ square + w["patch_embed.proj.bias"])
    x = torch.cat([w["cls_token"][0], torch.stack(tokens)]) + w["pos_embed"][0]
    if "register_tokens" in w:  # between class token and patches, after positions were added
        x = torch.cat([x[:1], w["register_tokens"][0], x[1:]])
    one = torch.ones(1, dtype=x.dtype)
    for n in range(sum(name.endswith("attn.qkv.weight") for name in w)):
        at = f"blocks.{n}"
        y = attention(layer_norm(x, w, f"{at}.norm1"), w, f"{at}.attn", heads)
        x = x + w.get(f"{at}.ls1.gamma", one) * y
        y = linear(layer_norm(x, w, f"{at}.norm2"), w, f"{at}.mlp.fc1")
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        y = linear(y, w, f"{at}.mlp.fc2")
        x = x + w.get(f"{at}.ls2.gamma", one) * y
    return layer_norm(x, w, "norm")[0]


@pytest.mark.parametrize(
    ("name", "channels", "size", "heads"),
    [
        ("vit_mini", 3, 32, 3),
        ("vit_tiny_patch8", 1, 16, 3),
        ("vit_small_patch14_reg4_dinov2", 3, 28, 6),
        pytest.param("vit_base_patch16", 3, 32, 12, marks=pytest.mark.slow),
    ],
)
def test_the_output_is_as_defined(name: str, channels: int, size: int, heads: int) -> None:
    encoder = vit(name, channels, size)
    shaken(encoder)
    images = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))
    w = {key: value.detach().double() for key, value in encoder.state_dict().items()}
    wanted = [reference(w, image.double(), encoder.patch, heads) for image in images]
    for layout in (torch.contiguous_format, torch.channels_last):
        with torch.no_grad():
            found = encoder(images.contiguous(memory_format=layout))
        torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- names and sizes


def expected_shapes(
    width: int, depth: int, patch: int, tokens: int, scaled: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of timm's VisionTransformer without classifier."""
    found: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + tokens, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    layers = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}
    for n in range(depth):
        for norm in ("norm1", "norm2"):
            found |= {f"blocks.{n}.{norm}.{part}": (width,) for part in ("weight", "bias")}
        for layer, (out, into) in layers.items():
            found[f"blocks.{n}.{layer}.weight"] = (out * width, into * width)
            found[f"blocks.{n}.{layer}.bias"] = (out * width,)
        if scaled:
            found |= {f"blocks.{n}.ls{i}.gamma": (width,) for i in (1, 2)}
    return found


@pytest.mark.parametrize(
    ("name", "size", "width", "depth", "patch", "parameters"),
    [
        # the numbers of timm's models at 224 pixels, without their classifiers
        ("vit_tiny_patch16", 224, 192, 12, 16, 5_524_416),
        ("vit_small_patch16", 224, 384, 12, 16, 21_665_664),
        ("vit_base_patch16", 224, 768, 12, 16, 85_798_656),
        ("vit_small_patch14_dinov2", 518, 384, 12, 14, 22_056_192),
        ("vit_mini", 32, 96, 4, 8, 467_808),
    ],
)
def test_names_are_timms(
    name: str, size: int, width: int, depth: int, patch: int, parameters: int
) -> None:
    with torch.device("meta"):
        encoder = vit(name, 3, size)
    found = {key: tuple(tensor.shape) for key, tensor in encoder.state_dict().items()}
    scaled = name.endswith("dinov2")
    assert found == expected_shapes(width, depth, patch, (size // patch) ** 2, scaled)
    assert sum(p.numel() for p in encoder.parameters()) == parameters
    assert encoder.out_dim == width


def test_patches_follow_the_image_size() -> None:
    sizes = {16: 2, 28: 4, 32: 4, 64: 8, 84: 12, 96: 12, 128: 16, 224: 16, 512: 16, 518: 14, 8: 2}
    assert {size: usual_patch(size) for size in sizes} == sizes
    assert [vit("vit_mini", size=size).patch for size in (16, 28, 32, 64)] == [4, 7, 8, 16]
    assert vit("vit_tiny", size=64).patch == 8
    assert vit("vit_mini_patch4", size=64).grid == 16


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("vit_mini_patch5", 32, r"patches of 5 pixels.*--data\.image-size 30.*vit_mini_patch8"),
        ("vit_mini_patch64", 32, r"--data\.image-size 64"),
        ("vit_mini", 31, r"an image of 31.*--data\.image-size 32"),
        ("vit_tiney", 32, "Did you mean 'vit_tiny'"),
        ("vit_tiny_patch0", 32, "Unknown encoder"),
        ("vit_mini+gn", 32, "first two BatchNorm2d.*early-norm"),
    ],
)
def test_names_that_cannot_work(name: str, size: int, message: str) -> None:
    with pytest.raises(FurlongError, match=message):
        build_encoder(name, 3, size)


def test_images_of_another_size_get_other_positions() -> None:
    encoder = shaken(vit("vit_mini"))
    with torch.no_grad():
        large = encoder(torch.zeros(1, 3, 48, 40))
        assert large.shape == (1, 96)
        assert not torch.allclose(large, encoder(torch.zeros(1, 3, 32, 32)))
    with pytest.raises(FurlongError, match="30×30, which patches of 8"):
        encoder(torch.zeros(1, 3, 30, 30))


def test_the_trunk_of_mfcl_takes_representations() -> None:
    for size, patch in ((32, 8), (16, 4)):
        body = trunk("vit_mini", size)
        assert isinstance(body, VisionTransformer)
        assert (body.patch, body.grid) == (patch, 4)
        with torch.no_grad():
            assert body(torch.zeros(2, 64, size, size)).shape == (2, 96)


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    encoder = vit("vit_mini_reg2_dinov2")
    encoder(torch.randn(4, 3, 32, 32)).square().sum(0).log().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


# ---------------------------------------------------------------- positions


def test_fixed_positions_are_those_of_mae() -> None:
    grid, width = 5, 16
    found = sine_cosine(grid, width)
    for row in range(grid):
        for column in range(grid):
            wanted = []
            for place in (row, column):
                angles = [place / 10_000 ** (i / (width / 4)) for i in range(width // 4)]
                wanted += [*map(math.sin, angles), *map(math.cos, angles)]
            torch.testing.assert_close(found[row * grid + column], torch.tensor(wanted))
    with pytest.raises(FurlongError, match="multiple of 4"):
        sine_cosine(4, 6)


def cubic(t: float) -> float:
    """Keys' kernel with a = -0.5, which torch takes for antialiased bicubic."""
    t = abs(t)
    if t < 1:
        return 1.5 * t**3 - 2.5 * t**2 + 1
    return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0


def resampling(before: int, after: int) -> Tensor:
    """after×before: bicubic weights along one axis, wider where the axis shrinks."""
    scale = max(before / after, 1.0)
    rows = []
    for i in range(after):
        centre = (i + 0.5) * before / after
        row = torch.tensor([cubic((j + 0.5 - centre) / scale) for j in range(before)])
        rows.append(row / row.sum())
    return torch.stack(rows).double()


@pytest.mark.parametrize(("before", "grid"), [(4, (7, 7)), (7, (4, 4)), (6, (9, 3)), (14, (8, 8))])
def test_resized_positions_are_bicubic(before: int, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    positions = torch.randn(1, 2 + before * before, 5)
    found = resized_position(positions, grid, prefix_tokens=2)
    assert torch.equal(found[:, :2], positions[:, :2])
    maps = positions[0, 2:].reshape(before, before, 5).double()
    across = torch.einsum("ij,jkd->ikd", resampling(before, grid[0]), maps)
    wanted = torch.einsum("ij,kjd->kid", resampling(before, grid[1]), across)
    torch.testing.assert_close(found[0, 2:].double(), wanted.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_positions_of_the_same_grid_keep_their_bits() -> None:
    positions = torch.randn(1, 17, 8)
    assert torch.equal(resized_position(positions, 4, 1), positions)
    assert resized_position(positions, 6, 1).shape == (1, 37, 8)
    assert resized_position(positions.half(), 6, 1).dtype == torch.float16
    with pytest.raises(FurlongError, match="not those of a square grid"):
        resized_position(positions, 4, prefix_tokens=0)


def test_a_network_for_another_size_takes_resized_positions() -> None:
    """It computes what the smaller one does with the larger images."""
    torch.manual_seed(0)
    first = vit("vit_mini_patch4", size=32)
    second = vit("vit_mini_patch4", size=48)
    state = first.state_dict()
    state["pos_embed"] = resized_position(state["pos_embed"], second.grid, 1)
    second.load_state_dict(state)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(first(images), second(images))
