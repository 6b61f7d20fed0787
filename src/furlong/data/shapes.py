"""A procedural set of small RGB images: one figure each, drawn so that only its outline tells.

Position, size, rotation, the colours of figure and ground, gradients, stripes, clutter and noise
are random and drawn in the same way for every class, so neither colour nor texture predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from furlong.data.images import ImageSet
from furlong.errors import FurlongError, nearest

_Points = list[tuple[float, float]]
_Distance = Callable[[Tensor, Tensor], Tensor]

_SPLITS = {"train": 0, "test": 1}
_CHUNK = 256  # images drawn at once: a chunk's planes then stay within a few MB, near the caches
_BLOBS = 4
_LUMA = (0.299, 0.587, 0.114)


def _polar(radii: list[float], turn: float = 0.0) -> _Points:
    """Corners at equal angles and the given radii, the first one straight up (y points down)."""
    step = 2 * math.pi / len(radii)
    return [
        (r * math.sin(i * step + turn), -r * math.cos(i * step + turn)) for i, r in enumerate(radii)
    ]


def _polygon(corners: _Points) -> _Distance:
    """The signed distance to a simple polygon: negative inside, in the units of its corners."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        squared = torch.full_like(x, math.inf)
        inside = torch.zeros_like(x, dtype=torch.bool)
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
            ex, ey, wx, wy = bx - ax, by - ay, x - ax, y - ay
            t = ((wx * ex + wy * ey) / (ex * ex + ey * ey)).clamp_(0, 1)
            squared = torch.minimum(squared, (wx - ex * t) ** 2 + (wy - ey * t) ** 2)
            # Even-odd rule: an edge flips the points whose ray to the right crosses it.
            if ey != 0:
                inside ^= ((y >= ay) != (y >= by)) & (wx < ex / ey * wy)
        edge = squared.sqrt_()
        return torch.where(inside, -edge, edge)

    return distance


def _disk(radius: float, cx: float = 0.0, cy: float = 0.0) -> _Distance:
    return lambda x, y: torch.hypot(x - cx, y - cy) - radius


def _hollow(figure: _Distance, width: float) -> _Distance:
    """The band of ``width`` just inside the edge of ``figure``."""
    return lambda x, y: (figure(x, y) + width / 2).abs() - width / 2


def _minus(figure: _Distance, hole: _Distance) -> _Distance:
    return lambda x, y: torch.maximum(figure(x, y), -hole(x, y))


def _union(*figures: _Distance) -> _Distance:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([figure(x, y) for figure in figures]).amin(0)

    return distance


def _box(left: float, top: float, right: float, bottom: float) -> _Distance:
    return _polygon([(left, top), (right, top), (right, bottom), (left, bottom)])


def _heart(points: int = 20) -> _Points:
    turns = [2 * math.pi * i / points for i in range(points)]
    return [
        (
            0.95 * math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17
            - 0.15,
        )
        for t in turns
    ]


# Every figure fits the unit disk. The first ten are the default classes: keep them well apart.
_FIGURES: dict[str, _Distance] = {
    "disk": _disk(0.9),
    "ring": _hollow(_disk(0.95), 0.32),
    "square": _polygon(_polar([1.0] * 4, math.pi / 4)),
    "triangle": _polygon(_polar([1.0] * 3)),
    "star": _polygon(_polar([1.0, 0.4] * 5)),
    "cross": _union(_box(-0.3, -0.95, 0.3, 0.95), _box(-0.95, -0.3, 0.95, 0.3)),
    "crescent": _minus(_disk(0.95), _disk(0.8, 0.45, 0.0)),
    "heart": _polygon(_heart()),
    "bars": _union(_box(-0.85, -0.6, 0.85, -0.18), _box(-0.85, 0.18, 0.85, 0.6)),
    "arrow": _polygon(
        [(1, 0), (0.1, -0.8), (0.1, -0.28), (-1, -0.28), (-1, 0.28), (0.1, 0.28), (0.1, 0.8)]
    ),
    "frame": _hollow(_polygon(_polar([1.0] * 4, math.pi / 4)), 0.25),
    "hexagon": _polygon(_polar([1.0] * 6)),
    "bowtie": _polygon([(-0.9, -0.7), (0, -0.15), (0.9, -0.7), (0.9, 0.7), (0, 0.15), (-0.9, 0.7)]),
    "chevron": _polygon([(-0.9, 0.3), (0, -0.7), (0.9, 0.3), (0.9, 0.8), (0, -0.1), (-0.9, 0.8)]),
    "dots": _union(_disk(0.38, 0.0, -0.58), _disk(0.38, -0.52, 0.4), _disk(0.38, 0.52, 0.4)),
    "half": _minus(_disk(0.95), _box(-1.5, 0.0, 1.5, 1.5)),
    "tee": _union(_box(-0.85, -0.8, 0.85, -0.3), _box(-0.25, -0.8, 0.25, 0.95)),
    "gem": _polygon(_polar([1.0, 0.42] * 2)),
    "wedge": _minus(_disk(0.95), _polygon([(-0.1, 0.0), (1.5, -1.1), (1.5, 1.1)])),
    "aitch": _union(
        _box(-0.75, -0.8, -0.33, 0.8), _box(0.33, -0.8, 0.75, 0.8), _box(-0.5, -0.2, 0.5, 0.2)
    ),
}
KINDS: tuple[str, ...] = tuple(_FIGURES)


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * u


def _colour(luma: Tensor, u: Tensor, chroma: float) -> Tensor:
    """RGB colours k×3×1×1 of brightness ``luma`` (k) and a random hue from ``u`` (k×3)."""
    grey = u[:, 0] * _LUMA[0] + u[:, 1] * _LUMA[1] + u[:, 2] * _LUMA[2]
    return (luma[:, None] + chroma * (u - grey[:, None]))[..., None, None]


_DRAWS = 24 + 6 * _BLOBS


def _draw(kinds: Tensor, u: Tensor, noise: Tensor, size: int) -> Tensor:
    """Pixels k×3×size×size (uint8) of the figures ``kinds`` (k).

    ``u`` (k×_DRAWS, uniform) decides everything but the pixel noise (k×3×size×size, normal).
    """
    axis = (torch.arange(size, dtype=torch.float32) + 0.5) * (2 / size) - 1
    gx, gy = axis[None, None, :], axis[None, :, None]
    pixel = 2 / size
    v = u[:, :, None, None]  # one draw per image as a k×1×1 plane: v[:, j]

    # The figure: its frame of reference, then the share of each pixel that it covers.
    radius = _between(v[:, 0], 0.5, 0.88)
    room = 1.05 - radius
    dx = gx - room * _between(v[:, 1], -1, 1)
    dy = gy - room * _between(v[:, 2], -1, 1)
    turn = _between(v[:, 3], -0.4, 0.4)
    cos, sin = turn.cos(), turn.sin()
    fx, fy = (cos * dx + sin * dy) / radius, (cos * dy - sin * dx) / radius
    figure = torch.empty_like(fx)
    for kind in sorted(set(kinds.tolist())):
        rows = (kinds == kind).nonzero()[:, 0]
        figure[rows] = _FIGURES[KINDS[kind]](fx[rows], fy[rows])
    cover = (0.5 - figure * radius / pixel).clamp_(0, 1)[:, None]

    # Colours: hue free, brightness apart by a visible step in either direction.
    ground_luma = _between(u[:, 4], 0.15, 0.85)
    step = _between(u[:, 5], 0.28, 0.6)
    # The step goes where there is room for it: up from dark ground, down from bright ground.
    figure_luma = torch.where(ground_luma + 0.6 * (u[:, 6] - 0.5) < 0.5, 1.0, -1.0) * step
    figure_luma = (ground_luma + figure_luma).clamp_(0.02, 0.98)
    ground = _colour(ground_luma, u[:, 7:10], 0.8)
    ink = _colour(figure_luma, u[:, 10:13], 0.8)

    # A slope of brightness over the frame and stripes, of independent make on ground and figure.
    slope = _between(v[:, 13], -0.15, 0.15) * gx + _between(v[:, 14], -0.15, 0.15) * gy
    image = ground + (slope + _stripes(v[:, 15:19], gx, gy))[:, None]
    for b in range(_BLOBS):
        w = v[:, 24 + 6 * b : 30 + 6 * b]
        reach = _between(w[:, 2], 0.06, 0.2)
        away = torch.hypot(gx - _between(w[:, 0], -1, 1), gy - _between(w[:, 1], -1, 1))
        spot = (0.5 + (reach - away) / pixel).clamp_(0, 1)[:, None]
        image = torch.lerp(image, w[:, 3:6], 0.7 * spot)
    image = torch.lerp(image, ink + (slope + _stripes(v[:, 19:23], gx, gy))[:, None], cover)
    image += noise * _between(v[:, 23:24], 0.01, 0.05)
    return image.mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def _stripes(v: Tensor, gx: Tensor, gy: Tensor) -> Tensor:
    """A wave k×H×W in a random direction; ``v`` (k×4×1×1): its angle, pitch, phase, strength."""
    angle, pitch = 2 * math.pi * v[:, 0], _between(v[:, 1], 2, 14)
    wave = torch.sin(pitch * (angle.cos() * gx + angle.sin() * gy) + 2 * math.pi * v[:, 2])
    return wave * _between(v[:, 3], 0.0, 0.1)


def shapes(
    n: int = 5000, *, size: int = 32, classes: int = 10, seed: int = 0, split: str = "train"
) -> ImageSet:
    """Draw ``n`` images (n×3×size×size) of the first ``classes`` figures of ``KINDS``.

    Labels are balanced within one and in random order. Image i depends on ``seed``, ``split``,
    ``size``, ``classes`` and i only: a smaller set is a prefix of a larger one.
    """
    if n < 1:
        raise FurlongError(f"shapes: n = {n} asks for no image; ask for at least 1.")
    if size < 8:
        raise FurlongError(f"shapes: size = {size} px is too small to tell figures apart; use ≥ 8.")
    if not 1 <= classes <= len(KINDS):
        raise FurlongError(
            f"shapes: classes = {classes}, but there are {len(KINDS)} kinds of figures; "
            f"choose 1 to {len(KINDS)}."
        )
    if seed < 0:
        raise FurlongError(f"shapes: seed = {seed} is negative; use 0 or more.")
    if split not in _SPLITS:
        raise FurlongError(f"shapes: unknown split {split!r}. {nearest(split, _SPLITS)}")
    order, draws, grain = (np.random.default_rng([seed, _SPLITS[split], k]) for k in range(3))
    # Shuffled within blocks of one image per class, so that every prefix is balanced too.
    blocks = np.tile(np.arange(classes), (-(-n // classes), 1))
    labels = torch.from_numpy(order.permuted(blocks, axis=1).reshape(-1)[:n].astype(np.int64))
    pixels = torch.empty(n, 3, size, size, dtype=torch.uint8)
    for start in range(0, n, _CHUNK):
        part = slice(start, min(start + _CHUNK, n))
        k = part.stop - start
        # numpy fills arrays value by value from its stream, so the chunk size leaves no trace.
        u = torch.from_numpy(draws.random((k, _DRAWS), dtype=np.float32))
        noise = torch.from_numpy(grain.standard_normal((k, 3, size, size), dtype=np.float32))
        pixels[part] = _draw(labels[part], u, noise, size)
    return ImageSet(pixels, labels, KINDS[:classes], name="shapes")
