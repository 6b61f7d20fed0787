"""Random views of batches of images, drawn per image and computed for the whole batch at once.

Every preset follows torchvision's definitions image by image: the parameters are drawn first
(`Augmentation.draw`, from torch's global CPU generator, so that a seed fixes the views on every
device) and then applied (`Augmentation.apply`, which draws nothing). Three things make it fast:

* a crop with its resize and flip is linear along each axis, so it is two small matrix products per
  image, and so is a blur;
* brightness, contrast and saturation are one formula, ``clamp(f·x + (1−f)·t)`` with t = 0, the mean
  grey or the grey pixel, so images in different orders go through the same three passes;
* images are sorted by the place of the hue shift in their order, so each shift runs in place on a
  slice of the batch.

Of images with other than three channels, brightness and contrast change (contrast around each
channel's own mean), and what is about colour does nothing: saturation, hue, grey.

Deviation: torchvision rounds to 8 bits after every operation when it is given 8-bit images. Here
pixels are floats from the crop on, as if torchvision had been given a float tensor, except that the
crop is clamped to [0, 1] as bytes are (bicubic filters overshoot).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.devices import moved
from furlong.errors import FurlongError, nearest

GRAY = (0.2989, 0.587, 0.114)
TRIES = 10
CHUNK = 3 * 32 * 32 * 256
"""Values per pass on a CPU: 3 MB per intermediate result keep to its cache, yet make the fixed cost
of the calls small."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Draw:
    """Random parameters of N views, on the CPU; ``None`` where a preset lacks the operation."""

    count: int
    """N."""
    box: Tensor | None = None
    """N×4: top, left, height and width of the crop in pixels (top and left may be negative)."""
    flip: Tensor | None = None
    """N booleans."""
    jitter: Tensor | None = None
    """N booleans: whether the four fields below apply."""
    factors: Tensor | None = None
    """N×3: factors of brightness, contrast and saturation."""
    order: Tensor | None = None
    """N×3: a permutation of 0 brightness, 1 contrast, 2 saturation."""
    hue: Tensor | None = None
    """N: shift in turns."""
    hue_slot: Tensor | None = None
    """N integers: how many of the other three come before the hue shift."""
    gray: Tensor | None = None
    """N booleans."""
    sigma: Tensor | None = None
    """N: deviation of the blur in pixels, 0 for none."""
    solarise: Tensor | None = None
    """N booleans."""

    def take(self, index: Tensor) -> Draw:
        """The parameters of the views in ``index``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        chosen = {k: v.index_select(0, index) for k, v in values.items() if torch.is_tensor(v)}
        return Draw(len(index), **chosen)


@dataclass(frozen=True)
class Augmentation:
    """A recipe for random views, applied in the order of the fields; the defaults do nothing."""

    size: int | None = None
    """Side of the square output; ``None`` keeps the height and width of the input."""
    scale: Range | None = None
    """Range of the area of a random resized crop, as a share of the image."""
    ratio: Range = (3 / 4, 4 / 3)
    """Range of its width over its height, uniform in the logarithm."""
    bicubic: bool = False
    pad_crop: int = 0
    """Crop to the input's extent after padding by this many zeros (instead of ``scale``)."""
    flip: float = 0.0
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Strength of brightness, contrast, saturation and hue."""
    jitter_p: float = 0.0
    gray: float = 0.0
    blur: float = 0.0
    blur_kernel: int = 3
    blur_sigma: Range = (0.1, 2.0)
    solarise: float = 0.0
    solarise_from: float = 0.5
    """Values from here on are inverted; 0 inverts the image."""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    second: Augmentation | None = None
    """The recipe of every view but the first; ``None`` draws all views alike."""

    def view(self, pixels: Tensor) -> Tensor:
        """One random view: B×C×H×W bytes to B×C×S×S float32, normalised, channels last."""
        return self.views(pixels, 1)[0]

    def views(self, pixels: Tensor, n: int = 2) -> tuple[Tensor, ...]:
        """``n`` independent random views of B×C×H×W bytes, each like `view`."""
        if self.second is not None and n > 1:
            return self.views(pixels, 1) + self.second.views(pixels, n - 1)
        count, (height, width) = len(pixels), pixels.shape[-2:]
        out = self.apply(pixels, self.draw(n * count, height, width))
        return tuple(out[i * count : (i + 1) * count] for i in range(n))

    def plain(self, pixels: Tensor) -> Tensor:
        """The images of B×C×H×W bytes without randomness: resized if needed and normalised."""
        return self.apply(pixels, Draw(len(pixels)))

    def draw(self, count: int, height: int, width: int) -> Draw:
        """Parameters for ``count`` views of height×width images."""
        drawn: dict[str, Tensor] = {}
        if self.scale is not None:
            drawn["box"] = self._boxes(count, height, width, self.scale)
        elif self.pad_crop:
            corner = torch.randint(0, 2 * self.pad_crop + 1, (count, 2)) - self.pad_crop
            extent = torch.tensor([height, width]).expand(count, 2)
            drawn["box"] = torch.cat([corner, extent], 1).float()
        if self.flip:
            drawn["flip"] = _chance(count, self.flip)
        if self.jitter_p:
            strength = torch.tensor(self.jitter[:3])
            low = (1 - strength).clamp_(min=0)
            drawn["jitter"] = _chance(count, self.jitter_p)
            drawn["factors"] = low + torch.rand(count, 3) * (1 + strength - low)
            # A random order of three and a random place among them are a random order of four.
            drawn["order"] = torch.rand(count, 3).argsort(1)
            drawn["hue"] = (torch.rand(count) * 2 - 1) * self.jitter[3]
            drawn["hue_slot"] = torch.randint(0, 4, (count,))
        if self.gray:
            drawn["gray"] = _chance(count, self.gray)
        if self.blur:
            low_sigma, high_sigma = self.blur_sigma
            sigma = low_sigma + torch.rand(count) * (high_sigma - low_sigma)
            drawn["sigma"] = sigma * _chance(count, self.blur)
        if self.solarise:
            drawn["solarise"] = _chance(count, self.solarise)
        return Draw(count, **drawn)

    def _boxes(self, count: int, height: int, width: int, scale: Range) -> Tensor:
        """N×4 boxes of torchvision's RandomResizedCrop, its ten tries drawn side by side."""
        low, high = self.ratio
        area = height * width * (scale[0] + torch.rand(count, TRIES) * (scale[1] - scale[0]))
        logs = torch.tensor(self.ratio).log()
        root = (logs[0] + torch.rand(count, TRIES) * (logs[1] - logs[0])).mul_(0.5).exp_()
        sides = torch.stack([area.sqrt() / root, area.sqrt() * root], 2).round_()  # N×10×2
        # The fallback is the largest central crop within the ratios; it ends the list of tries so
        # that the first valid entry is the answer.
        last = [float(min(height, round(width / low))), float(min(width, round(height * high)))]
        sides = torch.cat([sides, torch.tensor(last).expand(count, 1, 2)], 1)
        room = torch.tensor([height, width]) - sides
        first = ((room >= 0) & (sides > 0)).all(2).int().argmax(1)
        rows = torch.arange(count)
        sides, room = sides[rows, first], room[rows, first]
        corner = (torch.rand(count, 2) * (room + 1)).floor_()
        corner = torch.where(first[:, None] == TRIES, (room / 2).floor_(), corner)
        return torch.cat([corner, sides], 1)

    def apply(self, pixels: Tensor, draw: Draw) -> Tensor:
        """The views that ``draw`` describes, with no randomness of its own.

        ``pixels`` is B×C×H×W bytes and ``draw`` holds N parameters, N a multiple of B; view i is of
        image i mod B. Returns N×C×S×S float32, channels last.
        """
        if pixels.dtype != torch.uint8 or pixels.dim() != 4:
            shape, dtype = "×".join(map(str, pixels.shape)), str(pixels.dtype)
            raise FurlongError(
                f"Augmentation needs B×C×H×W images of type uint8, not {shape} {dtype}."
            )
        count, device = draw.count, pixels.device
        channels, height, width = pixels.shape[1:]
        index, slots = torch.arange(count), None
        if draw.jitter is not None and draw.hue_slot is not None:
            slots, index = torch.where(draw.jitter, draw.hue_slot, 4).sort(stable=True)
        rows, columns = self.size or height, self.size or width
        out = torch.empty(count, rows, columns, channels, device=device)
        chunk = max(1, CHUNK // (channels * height * width) if device.type == "cpu" else count)
        for start in range(0, count, chunk):
            part, bounds = index[start : start + chunk], None
            if slots is not None:  # images bounds[k] … bounds[k + 1] have slot k; 4 is no jitter
                sizes = slots[start : start + chunk].bincount(minlength=5)
                bounds = [0, *sizes.cumsum(0).tolist()]
            x = pixels.index_select(0, moved(part % len(pixels), device))
            x = x.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            x = self._render(x, draw.take(part), bounds).permute(0, 2, 3, 1)
            if bounds is None:
                out[start : start + chunk] = x
            else:
                out.index_copy_(0, moved(part, device), x.contiguous())
        return out.permute(0, 3, 1, 2)

    def _render(self, x: Tensor, draw: Draw, bounds: list[int] | None) -> Tensor:
        """N×C×H×W in [0, 1] to N×C×S×S, normalised; changes ``x``."""
        x = self._crop(x, draw)
        flat = x.flatten(2)
        if bounds is not None:
            _jitter(flat, draw, bounds, hue=self.jitter[3] > 0 and x.shape[1] == 3)
        if draw.gray is not None and x.shape[1] == 3 and len(index := _where(draw.gray, x)):
            gray = _gray(flat.index_select(0, index))
            flat.index_copy_(0, index, gray.expand(-1, 3, -1).contiguous())
        if draw.sigma is not None and len(index := _where(draw.sigma > 0, x)):
            kernel = _gaussian(moved(draw.sigma[draw.sigma > 0], x.device), self.blur_kernel)
            rows, columns = _blurring(kernel, x.shape[2]), _blurring(kernel, x.shape[3])
            x.index_copy_(0, index, _resample(x.index_select(0, index), rows, columns))
        if draw.solarise is not None and len(index := _where(draw.solarise, x)):
            part = x.index_select(0, index)
            x.index_copy_(0, index, part + (part >= self.solarise_from) * (1 - 2 * part))
        if any(self.mean) or set(self.std) != {1.0}:
            mean, std = torch.tensor(self.mean), torch.tensor(self.std)
            if x.shape[1] != len(mean):  # other than colours get the average of their statistics
                mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
            mean, std = (moved(each, x.device)[:, None, None] for each in (mean, std))
            x.sub_(mean).div_(std)
        return x

    def _crop(self, x: Tensor, draw: Draw) -> Tensor:
        """Crop, resize and mirror N×C×H×W to N×C×S×S."""
        height, width = x.shape[2:]
        rows, columns = self.size or height, self.size or width
        flip = draw.flip
        if draw.box is None and (rows, columns) == (height, width):
            if flip is not None and len(index := _where(flip, x)):
                x.index_copy_(0, index, x.index_select(0, index).flip(3))
            return x
        box = draw.box
        if box is None:
            box = torch.tensor([0.0, 0.0, height, width]).expand(len(x), 4)
        top, left, tall, wide = moved(box, x.device).unbind(1)
        if flip is not None:  # a mirrored axis starts at its far end and has a negative extent
            mirror = moved(flip, x.device)
            left = left + wide * mirror
            wide = wide * (1 - 2 * mirror.float())
        down = _resizing(top, tall, rows, height, self.pad_crop, self.bicubic)
        across = _resizing(left, wide, columns, width, self.pad_crop, self.bicubic)
        x = _resample(x, down, across)
        # Cubic filters overshoot; 8-bit images are clamped there, and colour needs [0, 1].
        return x.clamp_(0, 1)


Recipe = Augmentation  # the name by which evaluation and contexts annotate it


def crop_flip(recipe: Augmentation) -> Augmentation:
    """Random resized crops (area 0.08 to 1) and flips, with the size and normalisation of another.

    What MoCo's linear probe and SwAV's fine-tuning train on.
    """
    return Augmentation(
        size=recipe.size, scale=(0.08, 1.0), flip=0.5, mean=recipe.mean, std=recipe.std
    )


def extremes(views: Tensor, recipe: Augmentation) -> tuple[Tensor, Tensor]:
    """What ``recipe`` makes of black and of white, C×1×1 each on the CPU, for views B×C×S×S."""
    values = torch.tensor([0, 255], dtype=torch.uint8)
    images = values.view(2, 1, 1, 1).expand(2, views.shape[1], 1, 1)
    black, white = recipe.plain(images)[..., :1, :1].unbind(0)
    return black, white


def unit(views: Tensor, recipe: Augmentation) -> Tensor:
    """Views B×C×S×S with the normalisation of ``recipe`` undone: values in [0, 1]."""
    black, white = extremes(views, recipe)
    if not black.any() and bool(white.eq(1).all()):
        return views
    black, white = moved(black, views.device), moved(white, views.device)
    return ((views - black) / (white - black)).clamp_(0, 1)


def rotated(images: Tensor, turns: Tensor) -> Tensor:
    """B×C×S×S with image i turned by ``turns[i]`` (int64 B, on the CPU) quarter turns.

    Counter-clockwise, as torch.rot90; no pixel is interpolated and the memory format is kept.
    """
    if images.shape[2] != images.shape[3]:
        shape = "×".join(map(str, images.shape))
        raise FurlongError(f"Only square images can be turned by 90°, not {shape}.")
    out = images.clone()
    for turn in range(1, 4):
        index = _where(turns % 4 == turn, images)
        out.index_copy_(0, index, images.index_select(0, index).rot90(turn, (2, 3)))
    return out


def _chance(count: int, p: float) -> Tensor:
    """N booleans, each true with probability ``p``."""
    return torch.rand(count) < p


def _where(mask: Tensor, like: Tensor) -> Tensor:
    """The indices of a CPU ``mask`` on the device of ``like`` (no device synchronisation)."""
    return moved(mask.nonzero()[:, 0], like.device)


def _resizing(
    start: Tensor, extent: Tensor, size: int, full: int, pad: int, bicubic: bool
) -> Tensor:
    """N×size×full weights that resize pixels ``start`` … ``start + extent`` of an axis to ``size``.

    ``start`` and ``extent`` are N; a negative extent reads backwards. The filters are those of
    torchvision and Pillow with antialias=True: stretched when the crop shrinks, cut off at the
    border of the crop and normalised. When it grows, the bilinear weights equal those
    without antialias.
    """
    stretch = (extent.abs() / size).clamp_(min=1)
    steps = (torch.arange(size, device=start.device) + 0.5) / size
    centre = start[:, None] + extent[:, None] * steps
    low, high = torch.minimum(start, start + extent), torch.maximum(start, start + extent)
    grid = torch.arange(-pad, full + pad, device=start.device) + 0.5
    # No crop exceeds the axis, so this test needs no look at the parameters (on a GPU, no wait).
    grows = size >= full and not bicubic
    if grows:  # clamping the centre does what cutting off and normalising do, in fewer passes
        centre = centre.clamp_(low[:, None] + 0.5, high[:, None] - 0.5)
    x = (grid - centre[:, :, None]).abs_()
    if not grows:
        x.div_(stretch[:, None, None])
    if bicubic:
        near, far = x.clamp(max=1), x.clamp_(1, 2)
        x = (1.5 * near - 2.5) * near * near + 1 + ((-0.5 * far + 2.5) * far - 4) * far + 2
    else:
        x = x.clamp_(max=1).neg_().add_(1)
    if not grows:
        x.mul_(((grid > low[:, None]) & (grid < high[:, None])).float()[:, None])
        x.div_(x.sum(2, keepdim=True))
    return x[:, :, pad : pad + full]


def _resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """N×C×H×W by N×S×H and N×T×W weights to N×C×S×T."""
    n, channels, height, _ = x.shape
    x = torch.bmm(x.flatten(1, 2), columns.mT).view(n, channels, height, -1)
    return rows[:, None] @ x


def _gaussian(sigma: Tensor, size: int) -> Tensor:
    """N×size normalised Gaussian kernels of deviation ``sigma`` (N)."""
    offset = torch.arange(size, device=sigma.device) - (size - 1) / 2
    kernel = (-0.5 * (offset / sigma[:, None]) ** 2).exp()
    return kernel / kernel.sum(1, keepdim=True)


def _blurring(kernel: Tensor, size: int) -> Tensor:
    """N×size×size weights that convolve an axis with N×K kernels, reflecting at the border."""
    taps = kernel.shape[1]
    at = torch.arange(size, device=kernel.device)
    tap = at + torch.arange(taps, device=kernel.device)[:, None] - taps // 2
    tap = size - 1 - (size - 1 - tap.abs()).abs()
    return (kernel @ F.one_hot(tap, size).float().flatten(1)).view(-1, size, size)


def _gray(x: Tensor) -> Tensor:
    """Luma of N×C×P as N×1×P; channels that are not colours are each their own: N×C×P."""
    return moved(torch.tensor([GRAY]), x.device) @ x if x.shape[1] == 3 else x


def _jitter(x: Tensor, draw: Draw, bounds: list[int], hue: bool) -> None:
    """ColorJitter of N×C×P in place; images bounds[k] … bounds[k+1] have their hue shift at k."""
    assert draw.factors is not None
    assert draw.order is not None
    assert draw.hue is not None
    count = bounds[4]
    factor = draw.factors.gather(1, draw.order)[:count, :, None, None]  # n×3×1×1, by slot
    rest = (1 - factor).mul_(draw.order[:count, :, None, None] != 0)
    to_pixel = rest * (draw.order[:count, :, None, None] == 2)
    to_mean = moved(rest - to_pixel, x.device).unbind(1)
    factors, to_gray = (moved(each, x.device).unbind(1) for each in (factor, to_pixel))
    turn = moved(draw.hue, x.device)
    x = x[:count]
    for slot in range(4):
        here = slice(bounds[slot], bounds[slot + 1])
        if hue and here.start < here.stop:
            _shift_hue(x[here], turn[here])
        if slot < 3:
            gray = _gray(x)
            target = torch.addcmul(gray.mean(2, True).mul_(to_mean[slot]), gray, to_gray[slot])
            torch.addcmul(target, x, factors[slot], out=x).clamp_(0, 1)


def _shift_hue(x: Tensor, turn: Tensor) -> None:
    """Turn the hue of N×3×P by ``turn`` (N) in HSV, in place.

    In sixths of a turn from red, the hue is ±(1 + (g + b − r − min) / chroma) with the sign of
    g − b, and a channel is max − chroma·clamp(d − 1, 0, 1) at distance d from its own hue: no
    branches on which channel is largest.
    """
    red, green, blue = x.unbind(1)
    high, low = x.amax(1), x.amin(1)
    chroma = high - low
    hue = (green + blue).sub_(red).sub_(low)
    hue.div_(chroma.clamp(min=1e-12)).add_(1).copysign_(green - blue)
    hue.add_(turn[:, None] * 6 - 3)  # from cyan, where the distance from red folds
    hue.sub_((hue / 6).round_(), alpha=6)
    torch.addcmul(low, (hue.abs().clamp_(1, 2)).sub_(1), chroma, out=red)
    for channel, offset in ((green, 1), (blue, -1)):
        distance = (hue + offset).abs_().clamp_(1, 2).sub_(1)
        torch.addcmul(high, distance, chroma, value=-1, out=channel)
    x.clamp_(0, 1)  # rounding may overstep by one unit


_CIFAR = Augmentation(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
_HALF = Augmentation(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
_SIMCLR = Augmentation(
    scale=(0.08, 1.0), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray=0.2
)
_MOCO = replace(_SIMCLR, mean=_CIFAR.mean, std=_CIFAR.std)
_ORCHESTRA = replace(
    _HALF,
    scale=(0.5, 1.0),
    bicubic=True,
    flip=0.5,
    jitter=(0.4, 0.4, 0.2, 0.1),
    jitter_p=0.8,
    gray=0.2,
)

PRESETS: dict[str, Augmentation] = {
    "fedu": replace(_SIMCLR, jitter=(0.8, 0.8, 0.8, 0.2)),
    "moco_cifar": _MOCO,
    "fedca": replace(_MOCO, blur=0.5),
    "mfcl": _SIMCLR,
    "orchestra": replace(_ORCHESTRA, blur=0.5, second=replace(_ORCHESTRA, blur=0.1, solarise=0.2)),
    # Figures in random colours: any hue, either polarity, never so small that the outline is lost.
    "shapes": replace(
        _HALF,
        scale=(0.4, 1.0),
        flip=0.5,
        jitter=(0.6, 0.6, 0.6, 0.5),
        jitter_p=0.9,
        gray=0.3,
        solarise=0.3,
        solarise_from=0.0,
    ),
    "flip_crop": Augmentation(pad_crop=4, flip=0.5),
    "flip": Augmentation(flip=0.5),
    "none": Augmentation(),
}


def preset(name: str, size: int | None = None) -> Augmentation:
    """The recipe called ``name`` with outputs of side ``size`` (default: as large as the input)."""
    if name not in PRESETS:
        raise FurlongError(f"Unknown augmentation {name!r}. {nearest(name, PRESETS)}")
    found = PRESETS[name]
    second = None if found.second is None else replace(found.second, size=size)
    return replace(found, size=size, second=second)
