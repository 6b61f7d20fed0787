"""Augmentation against a slow reference that handles one image, and one pixel, at a time."""

from __future__ import annotations

import colorsys
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.data import augment
from furlong.data.augment import PRESETS, Augmentation, Draw, preset, rotated
from furlong.errors import FurlongError


def images(n: int = 6, channels: int = 3, height: int = 12, width: int = 12) -> Tensor:
    """Random bytes with some grey, black and white pixels, where hue is undefined."""
    generator = torch.Generator().manual_seed(n + channels + height)
    x = torch.randint(0, 256, (n, channels, height, width), generator=generator, dtype=torch.uint8)
    x[:, :, 0, :3] = torch.tensor([0, 255, 77], dtype=torch.uint8)
    x[:, 1:, 1] = x[:, 1:2, 1]  # g = b: exactly red or cyan
    return x


# The reference: torchvision's definitions for a single float image C×H×W.


def luma(x: Tensor) -> Tensor:
    return 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2] if len(x) == 3 else x[0]


def blend(x: Tensor, other: Tensor | float, factor: float) -> Tensor:
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def turn_hue(x: Tensor, turn: float) -> Tensor:
    out = x.clone()
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            h, s, v = colorsys.rgb_to_hsv(*x[:, i, j].tolist())
            out[:, i, j] = torch.tensor(colorsys.hsv_to_rgb((h + turn) % 1.0, s, v))
    return out


def colour(x: Tensor, op: int, draw: Draw, i: int) -> Tensor:
    if op == 3:
        return turn_hue(x, float(draw.hue[i])) if len(x) == 3 else x
    factor = float(draw.factors[i, op])
    other = (0.0, luma(x).mean(), luma(x))[op]
    return blend(x, other, factor)


def convolve(x: Tensor, sigma: float, size: int) -> Tensor:
    half = size // 2
    line = [math.exp(-0.5 * (o / sigma) ** 2) for o in range(-half, half + 1)]
    kernel = torch.tensor([[a * b for b in line] for a in line]) / sum(line) ** 2
    padded = F.pad(x[:, None], (half,) * 4, mode="reflect")
    return F.conv2d(padded, kernel[None, None])[:, 0]


def one(aug: Augmentation, pixels: Tensor, draw: Draw, i: int) -> Tensor:
    """View i of C×H×W bytes by the definition."""
    x = pixels.float() / 255
    size = (aug.size or x.shape[1], aug.size or x.shape[2])
    mode = "bicubic" if aug.bicubic else "bilinear"
    if draw.box is not None:
        pad = aug.pad_crop
        top, left, height, width = (int(v) for v in draw.box[i])
        x = F.pad(x, (pad,) * 4)[:, top + pad :, left + pad :][:, :height, :width]
    if x.shape[1:] != size:
        x = F.interpolate(x[None], size, mode=mode, align_corners=False, antialias=True)[0]
        x = x.clamp(0, 1)  # as bytes are
    if draw.flip is not None and draw.flip[i]:
        x = x.flip(2)
    if draw.jitter is not None and draw.jitter[i]:
        ops = draw.order[i].tolist()
        ops.insert(int(draw.hue_slot[i]), 3)
        for op in ops:
            x = colour(x, op, draw, i)
    if draw.gray is not None and draw.gray[i]:
        x = luma(x).expand_as(x)
    if draw.sigma is not None and draw.sigma[i] > 0:
        x = convolve(x, float(draw.sigma[i]), aug.blur_kernel)
    if draw.solarise is not None and draw.solarise[i]:
        x = torch.where(x >= aug.solarise_from, 1 - x, x)
    mean, std = torch.tensor(aug.mean), torch.tensor(aug.std)
    if len(x) == 1:
        mean, std = mean.mean()[None], std.mean()[None]
    return (x - mean[:, None, None]) / std[:, None, None]


def check(aug: Augmentation, pixels: Tensor, draw: Draw, n: int) -> None:
    got = aug.apply(pixels, draw)
    want = torch.stack([one(aug, pixels[i % len(pixels)], draw, i) for i in range(n)])
    torch.testing.assert_close(got, want, rtol=0, atol=3e-5)


RECIPES = {
    f"{name}{i}": recipe
    for name, found in PRESETS.items()
    for i, recipe in enumerate(filter(None, [replace(found, second=None), found.second]))
}
OPERATIONS = {
    "crop": Augmentation(scale=(0.08, 1.0)),
    "bicubic": Augmentation(scale=(0.2, 1.0), bicubic=True),
    "pad": Augmentation(pad_crop=3),
    "flip": Augmentation(flip=0.5),
    "crop_flip": Augmentation(scale=(0.08, 1.0), flip=0.5),
    "jitter": Augmentation(jitter=(0.8, 0.8, 0.8, 0.5), jitter_p=1.0),
    "no_hue": Augmentation(jitter=(0.4, 0.4, 0.0, 0.0), jitter_p=0.5),
    "gray": Augmentation(gray=0.5),
    "blur": Augmentation(blur=0.6),
    "blur5": Augmentation(blur=1.0, blur_kernel=5),
    "solarise": Augmentation(solarise=0.5, solarise_from=0.3),
    "invert": Augmentation(solarise=0.5, solarise_from=0.0),
    "normalise": Augmentation(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)),
}


@pytest.mark.parametrize("name", [*OPERATIONS, *RECIPES])
@pytest.mark.parametrize("shape", [(3, 12, 12), (1, 12, 12), (3, 9, 14)])
@pytest.mark.parametrize("size", [None, 8, 17])
def test_equals_the_reference(name: str, shape: tuple[int, int, int], size: int | None) -> None:
    aug = replace({**OPERATIONS, **RECIPES}[name], size=size)
    pixels = images(6, *shape)
    torch.manual_seed(3)
    check(aug, pixels, aug.draw(12, *shape[1:]), 12)


def test_every_order_of_the_jitter() -> None:
    aug = OPERATIONS["jitter"]
    draw = aug.draw(24, 6, 6)
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
    draw = replace(draw, order=orders.repeat(4, 1), hue_slot=torch.arange(4).repeat_interleave(6))
    check(aug, images(24, 3, 6, 6), draw, 24)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, aug = images(7), RECIPES["fedca0"]
    draw = aug.draw(14, 12, 12)
    whole = aug.apply(pixels, draw)
    monkeypatch.setattr(augment, "CHUNK", 3 * 12 * 12 * 4)
    torch.testing.assert_close(aug.apply(pixels, draw), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 3, 1, 2), (0, 3, 2, 1), (3, 1, 0, 2)])
def test_strides_of_the_input_do_not_matter(axes: tuple[int, ...]) -> None:
    aug = RECIPES["fedca0"]
    inverse = torch.tensor(axes).argsort().tolist()
    pixels = images(6)
    strided = pixels.permute(axes).contiguous().permute(inverse)
    draw = aug.draw(6, 12, 12)
    assert torch.equal(aug.apply(strided, draw), aug.apply(pixels, draw))
    plain = OPERATIONS["jitter"]
    draw = plain.draw(6, 12, 12)
    assert torch.equal(plain.apply(strided, draw), plain.apply(pixels, draw))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("channels", [1, 3])
def test_view_properties(name: str, channels: int) -> None:
    aug, pixels = preset(name, size=10), images(5, channels)
    before = pixels.clone()
    torch.manual_seed(1)
    first = aug.views(pixels, 3)
    torch.manual_seed(1)
    again = aug.views(pixels, 3)
    assert len(first) == 3
    for x, y in zip(first, again, strict=True):
        assert x.shape == (5, channels, 10, 10)
        assert x.dtype == torch.float32
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(x, y)
    assert torch.equal(pixels, before)
    assert aug.view(pixels[:1]).shape == (1, channels, 10, 10)
    assert aug.view(pixels[:0]).shape == (0, channels, 10, 10)
    if name != "none":
        assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("name", ["fedu", "mfcl", "flip_crop", "flip", "none"])
def test_unnormalised_presets_stay_in_the_unit_interval(name: str) -> None:
    x = torch.cat(preset(name).views(images(64)))
    assert x.min() >= 0
    assert x.max() <= 1


@pytest.mark.parametrize("name", PRESETS)
def test_images_do_not_affect_each_other(name: str) -> None:
    aug, pixels = preset(name), images(8)
    other = pixels.clone()
    other[2] = 255 - other[2]
    torch.manual_seed(5)
    a = torch.stack(aug.views(pixels))
    torch.manual_seed(5)
    b = torch.stack(aug.views(other))
    rest = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(a[:, rest], b[:, rest])
    assert not torch.equal(a[:, 2], b[:, 2])


def test_plain_is_the_normalised_image() -> None:
    pixels, aug = images(4), preset("moco_cifar")
    recipe = RECIPES["moco_cifar0"]
    mean, std = (torch.tensor(v)[:, None, None] for v in (recipe.mean, recipe.std))
    assert torch.equal(preset("none").plain(pixels), pixels.float() / 255)
    assert torch.equal(preset("none").view(pixels), pixels.float() / 255)
    torch.testing.assert_close(aug.plain(pixels), (pixels.float() / 255 - mean) / std)
    assert aug.plain(pixels).is_contiguous(memory_format=torch.channels_last)
    large = images(2, 3, 40, 30)
    want = F.interpolate(large.float() / 255, (8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(preset("fedu", 8).plain(large), want, rtol=0, atol=1e-5)


def test_orchestra_views_differ_in_kind() -> None:
    pair = preset("orchestra", 16)
    assert pair.second is not None
    assert (pair.blur, pair.second.blur) == (0.5, 0.1)
    assert (pair.solarise, pair.second.solarise) == (0.0, 0.2)
    assert pair.size == pair.second.size == 16


def test_rates_and_ranges() -> None:
    torch.manual_seed(0)
    n = 20_000
    draw = preset("fedu").draw(n, 32, 32)
    for value, p in ((draw.flip, 0.5), (draw.gray, 0.2), (draw.jitter, 0.8)):
        assert abs(float(value.float().mean()) - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert draw.factors.min() >= 0.2 - 1e-6
    assert draw.factors.max() <= 1.8 + 1e-6
    assert abs(float(draw.factors.mean()) - 1) < 0.01
    assert draw.hue.abs().max() <= 0.2
    slots = draw.hue_slot.bincount(minlength=4)
    assert (slots - n / 4).abs().max() < 300
    assert torch.equal(draw.order.sort(1).values, torch.arange(3).expand(n, 3))
    top, left, height, width = draw.box.unbind(1)
    assert torch.equal(draw.box, draw.box.round())
    assert min(top.min(), left.min()) == 0
    assert max((top + height).max(), (left + width).max()) == 32
    share = height * width / 1024
    assert 0.06 < share.min() < 0.1
    assert share.max() <= 1
    assert 0.65 < (width / height).min() < 0.78
    assert 1.28 < (width / height).max() < 1.5


def test_boxes_have_the_distribution_of_torchvision() -> None:
    """Compare moments with a loop that follows RandomResizedCrop.get_params."""
    torch.manual_seed(0)
    n, high, wide = 4000, 20, 32
    want = []
    for _ in range(n):
        for _ in range(10):
            area = high * wide * torch.empty(1).uniform_(0.3, 1.0).item()
            ratio = math.exp(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= wide and 0 < h <= high:
                top = int(torch.randint(0, high - h + 1, (1,)))
                want.append((top, int(torch.randint(0, wide - w + 1, (1,))), h, w))
                break
        else:
            want.append((0, (wide - 27) // 2, 20, 27))
    a = torch.tensor(want).float()
    b = Augmentation(scale=(0.3, 1.0)).draw(n, high, wide).box
    spread = a.std(0) * math.sqrt(2 / n)
    assert ((a.mean(0) - b.mean(0)).abs() < 4 * spread).all()
    assert ((a.std(0) / b.std(0) - 1).abs() < 0.08).all()


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 40, [0, 13, 10, 13]), (40, 10, [13, 0, 13, 10]), (16, 16, [0, 0, 16, 16])],
)
def test_the_fallback_is_the_largest_central_crop(height: int, width: int, box: list[int]) -> None:
    draw = Augmentation(scale=(3.0, 4.0)).draw(3, height, width)  # no try can be valid
    assert draw.box.tolist() == [box] * 3


def test_pad_crop_moves_by_whole_pixels() -> None:
    pixels = images(40)
    draw = RECIPES["flip_crop0"].draw(40, 12, 12)
    corners = draw.box[:, :2]
    assert corners.min() == -4
    assert corners.max() == 4
    check(RECIPES["flip_crop0"], pixels, draw, 40)
    bytes_again = RECIPES["flip_crop0"].apply(pixels, draw) * 255
    torch.testing.assert_close(bytes_again, bytes_again.round(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("turns", [[0, 1, 2, 3, 3, 1], [2] * 6, [0] * 6])
def test_quarter_turns_are_exact(layout: torch.memory_format, turns: list[int]) -> None:
    pixels = images(6, height=5, width=5).float().contiguous(memory_format=layout)
    before = pixels.clone()
    out = rotated(pixels, torch.tensor(turns))
    for image, turn, got in zip(before, turns, out, strict=True):
        assert torch.equal(got, image.rot90(turn, (1, 2)))
    assert out.is_contiguous(memory_format=layout)
    assert torch.equal(pixels, before)
    assert out.data_ptr() != pixels.data_ptr()
    with pytest.raises(FurlongError, match="2×3×4×5"):
        rotated(torch.zeros(2, 3, 4, 5), torch.tensor([0, 1]))


def test_errors_name_the_remedy() -> None:
    with pytest.raises(FurlongError, match="Did you mean 'fedu'"):
        preset("fedx")
    with pytest.raises(FurlongError, match="uint8"):
        preset("fedu").view(torch.rand(2, 3, 8, 8))


def test_channels_that_are_not_colours() -> None:
    """Brightness and contrast change each channel as they do a grey image; colour is left alone."""
    pixels = images(6, channels=5, height=8, width=8)
    for name in PRESETS:
        assert preset(name, 8).view(pixels).shape == (6, 5, 8, 8)
    recipe = replace(preset("mfcl", 8), scale=None, flip=0.0, jitter_p=1.0)
    draw = recipe.draw(6, 8, 8)
    together = recipe.apply(pixels, draw)
    for channel in range(5):
        alone = recipe.apply(pixels[:, channel : channel + 1], draw)
        assert torch.allclose(together[:, channel : channel + 1], alone, atol=1e-6)
    normalised = preset("moco_cifar", 8).plain(pixels)
    assert torch.allclose(normalised, (pixels / 255 - 0.4734) / 0.2009, atol=1e-3)
