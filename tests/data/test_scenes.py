"""Drawn scenes: by the seed alone, all different, and like photographs in how they vary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.data.scenes import scenes


def drawn(count: int, size: int = 16, channels: int = 3, seed: int = 0) -> Tensor:
    return scenes(count, size, channels, torch.Generator().manual_seed(seed))


def test_the_generator_decides() -> None:
    first, again, other = drawn(12), drawn(12), drawn(12, seed=1)
    assert first.dtype == torch.uint8
    assert first.shape == (12, 3, 16, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_global_random_numbers_stay_as_they_were() -> None:
    before = torch.random.get_rng_state()
    drawn(4)
    assert torch.equal(before, torch.random.get_rng_state())


def test_other_numbers_of_channels_are_grey() -> None:
    for channels in (1, 2, 4):
        images = drawn(3, channels=channels)
        assert images.shape == (3, channels, 16, 16)
        assert all(torch.equal(images[:, 0], images[:, c]) for c in range(channels))


def test_images_differ_and_are_neither_flat_nor_noise() -> None:
    images = drawn(64, size=32).float()
    assert len({image.numpy().tobytes() for image in images}) == 64
    assert images.mean((1, 2, 3)).std() > 20  # dark ones and bright ones
    assert (images.std((1, 2, 3)) > 8).float().mean() > 0.95
    # of photographs and of these, most of the power is in large structures; of noise it is not
    grey = images.mean(1)
    power = torch.fft.fft2(grey - grey.mean((1, 2), keepdim=True)).abs().square().mean(0)
    axis = torch.fft.fftfreq(32)
    length = torch.hypot(axis[:, None], axis[None, :])
    assert power[length < 0.15].sum() > 0.6 * power.sum()


def test_things_of_other_colours_cover_the_ground() -> None:
    """The ground has one hue, whatever its texture; where hues differ, things were drawn."""
    blocks = F.avg_pool2d(drawn(64, size=32).float(), 8)
    hue = (blocks[:, 0] - blocks[:, 1]).flatten(1)
    assert hue.std(1).median() > 12
