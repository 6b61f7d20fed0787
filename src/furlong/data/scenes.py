"""Drawn scenes: things with random outlines and textures that cover each other.

Nobody took these images, so whoever draws them needs no data and gives nothing away. They show
nothing in particular, yet have much of what photographs have: things of all sizes that hide each
other ("dead leaves": Lee, Mumford, Huang, IJCV 2001), textures whose spectrum falls like 1/f^α, few
colours per image. What an encoder learns from such images fits photographs (Baradad et al.,
"Learning to See by Looking at Noise", NeurIPS 2021), and to begin with it helps federations (Chen
et al., "On the Importance and Applicability of Pre-Training for Federated Learning", ICLR 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 64  # pixels: larger views are made of scenes of this size
_CHUNK = 256  # images drawn at once
_THINGS = 16  # per image, the last one in front and near the middle
_FIELDS = 256  # textures that the images of one call share


class _Dice:
    """Random numbers as k×1×1 planes, one per image."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator = count, generator

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform numbers."""
        u = torch.rand(self.count, *(shape or (1, 1)), generator=self.generator)
        return low + (high - low) * u

    def normal(self, deviation: float, *shape: int) -> Tensor:
        """Normal numbers around zero."""
        drawn = torch.randn(self.count, *(shape or (1, 1)), generator=self.generator)
        return drawn * deviation

    def chance(self, share: float) -> Tensor:
        """Booleans."""
        return self.between(0, 1) < share

    def whole(self, low: int, high: int) -> Tensor:
        """Integers, k, from ``low`` to below ``high``."""
        return torch.randint(low, high, (self.count,), generator=self.generator)


def scenes(count: int, size: int, channels: int, generator: torch.Generator) -> Tensor:
    """``count`` images, uint8 n×channels×size×size; if there are not three channels, grey ones."""
    fields = _fields(2 * size, generator)
    out = torch.empty(count, channels, size, size, dtype=torch.uint8)
    for start in range(0, count, _CHUNK):
        part = out[start : start + _CHUNK]
        image = _scene(_Dice(len(part), generator), size, fields)
        if channels != 3:
            image = image.mean(1, keepdim=True)
        part.copy_(image.clamp_(0, 1).mul_(255).round_())
    return out


def _fields(side: int, generator: torch.Generator) -> Tensor:
    """Textures f×side×side of mean 0 and deviation 1, some with a grain in one direction."""
    dice = _Dice(_FIELDS, generator)
    axis = torch.fft.fftfreq(side)
    length = torch.hypot(axis[:, None], axis[None, :])
    length[0, 0] = 1
    angle = torch.atan2(axis[:, None], axis[None, :])
    grain = dice.between(0, 6) * dice.chance(0.4)
    slope, along = dice.between(0.5, 2), dice.between(0, math.pi)
    spectrum = length**-slope * torch.exp(grain * torch.cos(2 * (angle - along)))
    spectrum[:, 0, 0] = 0  # no mean
    field: Tensor = torch.fft.ifft2(torch.fft.fft2(dice.normal(1, side, side)) * spectrum).real
    return field / field.std((1, 2), keepdim=True)


def _scene(dice: _Dice, size: int, fields: Tensor) -> Tensor:
    """Images k×3×size×size, around [0, 1]."""
    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    x, y = axis[None, None, :], axis[None, :, None]
    bright, tint = dice.between(0.2, 0.8, 1), dice.normal(0.12, 3)  # of the whole image

    def surface() -> Tensor:
        """A colour with a texture on it and a slope of brightness over it."""
        first, down, right = dice.whole(0, len(fields)), dice.whole(0, size), dice.whole(0, size)
        steps = torch.arange(size)
        rows, columns = down[:, None] + steps, right[:, None] + steps
        field = fields[first[:, None, None], rows[:, :, None], columns[:, None, :]]
        angle = dice.between(0, math.pi)
        wave = dice.between(2, 16) * (angle.cos() * x + angle.sin() * y)
        stripes = torch.sin(wave + dice.between(0, 2 * math.pi))
        stripes = torch.where(dice.chance(0.5), stripes.sign(), stripes)
        strength = 0.35 * dice.between(0, 1) ** 2
        pattern = strength * torch.where(dice.chance(0.25), stripes, field)
        slope = dice.normal(0.15) * x + dice.normal(0.15) * y
        colour = bright + dice.normal(0.25, 1) + 0.5 * tint + dice.normal(0.12, 3)
        contrast = 1 + dice.normal(0.3, 3)
        light = slope[:, None] + contrast[..., None, None] * pattern[:, None]
        return light + colour[..., None, None]

    image = surface()
    for thing in range(_THINGS):
        if thing == 0:
            reach = dice.between(0.5, 1)
        elif thing < _THINGS - 1:  # many small ones, few large ones
            reach = (0.12 * (1 - dice.between(0, 0.97)) ** -0.6).clamp_(max=1)
        else:
            reach = dice.between(0.3, 0.7)
        if thing < _THINGS - 1:
            dx, dy = x - dice.between(-1.2, 1.2), y - dice.between(-1.2, 1.2)
        else:
            dx, dy = x - dice.normal(0.25), y - dice.normal(0.25)
        cover = torch.sigmoid(-0.9 * size * _outline(dice, dx, dy, reach))
        image = torch.lerp(image, surface(), cover[:, None])
    image = (image - 0.5) * dice.between(0.7, 1.3, 1, 1, 1) + 0.5 + dice.normal(0.05, 1, 1, 1)
    return image + dice.normal(0.02, 3, size, size) * dice.between(0, 1, 1, 1, 1)


def _outline(dice: _Dice, dx: Tensor, dy: Tensor, reach: Tensor) -> Tensor:
    """About the distance k×S×S from a thing's edge, negative inside.

    Discs, boxes, stars and what is between them, stretched, with lobes, some of them rings.
    """
    turn, stretch = dice.between(0, 2 * math.pi), dice.normal(0.4).exp()
    x = (dx * turn.cos() + dy * turn.sin()) * stretch
    y = (dy * turn.cos() - dx * turn.sin()) / stretch
    power = dice.between(-0.5, 2.1).exp()
    away = ((x.abs() + 1e-4) ** power + (y.abs() + 1e-4) ** power) ** (1 / power)
    angle = torch.atan2(y, x)
    lobes = dice.chance(0.6) * dice.between(0, 0.4)
    waves = lobes * torch.cos(dice.whole(2, 8)[:, None, None] * angle)
    waves += dice.between(0, 0.15) * torch.cos(2 * angle + dice.between(0, 6))
    edge = away / (1 + waves) - reach
    ring = (edge + 0.12 * reach).abs() - 0.24 * reach
    return torch.where(dice.chance(0.15), ring, edge)
