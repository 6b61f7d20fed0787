"""An encoder of the laboratory: ``small`` with GroupNorm in place of BatchNorm (recipe.py)."""

from __future__ import annotations

from torch import nn

from furlong.nn.backbones import Small


def small_gn(in_channels: int = 3) -> nn.Module:
    """``small`` whose norms take groups of eight channels of one image: B×C×H×W to B×192."""
    encoder = Small(in_channels)
    for i in range(1, encoder.depth + 1):
        width = encoder.get_submodule(f"bn{i}").num_features
        encoder.add_module(f"bn{i}", nn.GroupNorm(width // 8, width))
    return encoder
