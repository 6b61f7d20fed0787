"""Vision transformers (Dosovitskiy et al., ICLR 2021), named and computed as in timm and DINOv2.

An image is cut into patches of p×p pixels, each patch becomes a token of width d, and blocks of
attention and a two-layer network follow; the class token after the last norm is the feature. State
dicts have the names of timm's ``vit_*_patch*`` and of DINOv2, so that such weights load.
"""

from __future__ import annotations

import re
from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.errors import FurlongError


class Size(NamedTuple):
    """Width d of a token, number of blocks, attention heads per block."""

    width: int
    depth: int
    heads: int
    fewest: int = 7  # patches along a side, unless the name says their size


SIZES = {
    "vit_mini": Size(96, 4, 3, fewest=4),  # for a CPU, as ``small`` is; timm has no such one
    "vit_tiny": Size(192, 12, 3),
    "vit_small": Size(384, 12, 6),
    "vit_base": Size(768, 12, 12),
}
_NAME = re.compile(
    r"(?P<size>vit_[a-z]+)(_patch(?P<patch>[1-9]\d*))?(_reg(?P<registers>[1-9]\d*))?(?P<dinov2>_dinov2)?"
)


def build_vit(name: str, in_channels: int, image_size: int) -> VisionTransformer | None:
    """The transformer called ``name``, or ``None`` if no transformer is called so.

    ``vit_tiny``, ``vit_tiny_patch4`` and, with DINOv2's layer scale, ``vit_small_patch14_dinov2``
    or ``vit_small_patch14_reg4_dinov2`` (four register tokens).
    """
    found = _NAME.fullmatch(name)
    if found is None or found["size"] not in SIZES:
        return None
    size = SIZES[found["size"]]
    patch = int(found["patch"]) if found["patch"] else usual_patch(image_size, size.fewest)
    if image_size % patch:
        raise FurlongError(
            f"Encoder {name!r}: patches of {patch} pixels do not fill an image of {image_size}. "
            f"Give --data.image-size {max(1, round(image_size / patch)) * patch} or another patch, "
            f"e.g. --encoder {found['size']}_patch{usual_patch(image_size, size.fewest)}."
        )
    return VisionTransformer(
        size,
        patch,
        image_size,
        in_channels,
        registers=int(found["registers"] or 0),
        layer_scale=found["dinov2"] is not None,
    )


def usual_patch(image_size: int, fewest: int = 7) -> int:
    """The largest patch size up to 16 that leaves at least ``fewest``² patches, else the smallest.

    With 7 it is 4 for images of 32 pixels and 16 for 224.
    """
    fitting = [p for p in range(2, 17) if image_size % p == 0]
    if not fitting:
        raise FurlongError(
            f"No patch of 2 to 16 pixels fills an image of {image_size}, as a vision transformer "
            f"needs it. Give --data.image-size {(image_size + 7) // 8 * 8}, or name the patch: "
            f"--encoder vit_tiny_patch{image_size}."
        )
    return max((p for p in fitting if image_size // p >= fewest), default=fitting[0])


def sine_cosine(grid: int, width: int) -> Tensor:
    """grid²×width: fixed positions in two dimensions (MAE): a quarter of the width each for the
    sine and cosine of the row, and of the column, at frequencies from 1 down to 1/10,000.
    """
    if width % 4:
        raise FurlongError(f"Positions of width {width}: it must be a multiple of 4.")
    frequencies = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.outer(torch.arange(grid, dtype=torch.float64), frequencies)
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)  # grid×width/2
    rows, columns = axis.repeat_interleave(grid, 0), axis.repeat(grid, 1)
    return torch.cat([rows, columns], dim=1).float()


def resized_position(
    pos_embed: Tensor, grid: int | tuple[int, int], prefix_tokens: int = 1
) -> Tensor:
    """Positions 1×(P+N)×d of a square grid brought to ``grid``: 1×(P+h·w)×d, bicubic as in timm.

    The first ``prefix_tokens`` P (the class token) belong to no place and stay as they are.
    """
    height, width = (grid, grid) if isinstance(grid, int) else grid
    prefix, places = pos_embed[:, :prefix_tokens], pos_embed[:, prefix_tokens:]
    side = isqrt(places.shape[1])
    if side * side != places.shape[1]:
        raise FurlongError(
            f"{places.shape[1]} positions (without the first {prefix_tokens}) are not those of a "
            "square grid."
        )
    if (height, width) == (side, side):
        return pos_embed
    maps = places.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
    maps = F.interpolate(maps, (height, width), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([prefix, maps.flatten(2).transpose(1, 2).to(places.dtype)], dim=1)


class Attention(nn.Module):
    """Every token takes from all others what its queries match: softmax(QKᵀ/√k)·V, in heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """B×T×d to the same."""
        batch, tokens, width = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each B×heads×T×k
        found = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(found.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """B×T×d to the same."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class LayerScale(nn.Module):
    """A learnt factor per channel, close to zero at first (DINOv2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """B×T×d to the same."""
        return x * self.gamma


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, layer_scale: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.ls1 = LayerScale(width) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width)
        self.ls2 = LayerScale(width) if layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """B×T×d to the same."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class PatchEmbed(nn.Module):
    """Patches to tokens: a convolution whose stride is its size."""

    def __init__(self, in_channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×N×d, row by row."""
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


def init_linear(module: nn.Module) -> None:
    """Glorot initialisation of every linear layer, as in MAE; also of the patches' convolution."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1))
            nn.init.zeros_(part.bias)  # type: ignore[arg-type]


class VisionTransformer(nn.Module):
    """Images to the class token after the last norm.

    Positions start from sines and cosines, as in MAE and MoCo v3, and are trained: from nothing and
    within few steps, a random start (timm's) would first have to learn where things are. There is
    neither dropout nor stochastic depth.
    """

    pos_embed: Tensor
    cls_token: Tensor

    def __init__(
        self,
        size: Size,
        patch: int,
        image_size: int,
        in_channels: int = 3,
        *,
        registers: int = 0,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        width, depth, heads = size.width, size.depth, size.heads
        self.patch, self.grid = patch, image_size // patch
        self.prefix_tokens, self.out_dim = 1 + registers, width
        self.cls_token = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))
        places = torch.cat([torch.zeros(1, width), sine_cosine(self.grid, width)])
        self.pos_embed = nn.Parameter(places.unsqueeze(0))
        # as DINOv2 calls them; they have no position
        self.register_tokens = (
            nn.Parameter(torch.empty(1, registers, width).normal_(std=0.02)) if registers else None
        )
        self.patch_embed = PatchEmbed(in_channels, width, patch)
        self.blocks = nn.Sequential(*(Block(width, heads, layer_scale) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        init_linear(self)

    def embed(self, x: Tensor) -> Tensor:
        """Images B×C×H×W to their patches' tokens with positions, B×N×d.

        Of another size than the network was made for, as long as patches fill it.
        """
        height, width = x.shape[-2:]
        if height % self.patch or width % self.patch:
            raise FurlongError(
                f"The vision transformer got images of {height}×{width}, which patches of "
                f"{self.patch} pixels do not fill. Resize the images to a multiple of it."
            )
        grid = height // self.patch, width // self.patch
        places = resized_position(self.pos_embed, grid)
        out: Tensor = self.patch_embed(x) + places[:, 1:]
        return out

    def adapted(self, name: str, tensor: Tensor) -> Tensor | None:
        """What a tensor of another shape becomes here: positions follow the grid of patches.

        ``None`` if nothing can be made of it. ``--init`` asks.
        """
        if name != "pos_embed" or tensor.dim() != 3 or tensor.shape[2] != self.out_dim:
            return None
        places = tensor.shape[1] - 1
        if places < 1 or isqrt(places) ** 2 != places:
            return None
        return resized_position(tensor, isqrt(self.pos_embed.shape[1] - 1))

    def encode(self, patches: Tensor) -> Tensor:
        """Any patches' tokens B×N×d to B×(P+N)×d: class token, registers, patches, normalised."""
        first = [self.cls_token + self.pos_embed[:, :1]]
        if self.register_tokens is not None:
            first.append(self.register_tokens)
        tokens = torch.cat([*(t.expand(patches.shape[0], -1, -1) for t in first), patches], dim=1)
        out: Tensor = self.norm(self.blocks(tokens))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×d."""
        return self.encode(self.embed(x))[:, 0]
