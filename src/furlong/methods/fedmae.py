"""FedMAE: a masked autoencoder on every client, FedAvg of encoder and decoder.

He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022.

    Of an image's N patches x_i a random share r is masked: i ∈ M, |M| = r·N.
    L = mean over i ∈ M of (dec(f({x_j : j ∉ M}))_i - x̂_i)²,   x̂ = (x - mean(x)) / std(x) per patch

The encoder f sees the patches that are left; the decoder gets its tokens and one learnt token in
every masked place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, Context, Setup
from furlong.core.method import USUAL
from furlong.devices import moved
from furlong.errors import FurlongError, require
from furlong.methods.base import OneNetwork
from furlong.nn.encoders import build_encoder
from furlong.nn.vit import Block, VisionTransformer, init_linear, sine_cosine
from furlong.settings import setting

HEAD = 32  # width of the decoder's attention heads, as in the paper


class Decoder(nn.Module):
    """Tokens of some patches to the pixels of all; its positions are fixed, as in the paper."""

    mask_token: Tensor
    places: Tensor

    def __init__(self, encoder: VisionTransformer, channels: int, width: int, depth: int) -> None:
        super().__init__()
        self.prefix = encoder.prefix_tokens
        self.embed = nn.Linear(encoder.out_dim, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))
        self.register_buffer("places", sine_cosine(encoder.grid, width), persistent=False)
        self.blocks = nn.Sequential(*(Block(width, width // HEAD) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pixels = nn.Linear(width, channels * encoder.patch**2)
        init_linear(self)

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """B×(P+n)×d, the n tokens of the patches ``order``[:, :n], to B×N×p²C.

        ``order``: int64 B×N, a permutation of the patches of each image.
        """
        tokens = self.embed(tokens)
        prefix, seen = tokens[:, : self.prefix], tokens[:, self.prefix :]
        masked = self.mask_token.expand(len(tokens), order.shape[1] - seen.shape[1], -1)
        every = rows(torch.cat([seen, masked], dim=1), order.argsort(1)) + self.places
        found = self.norm(self.blocks(torch.cat([prefix, every], dim=1)))
        out: Tensor = self.pixels(found[:, self.prefix :])
        return out


class MaskedAutoencoder(nn.Module):
    """The run's encoder and the decoder."""

    def __init__(self, backbone: VisionTransformer, decoder: Decoder) -> None:
        super().__init__()
        self.backbone, self.decoder = backbone, decoder

    def forward(self, images: Tensor, order: Tensor, seen: int) -> Tensor:
        """B×C×S×S, of which only the patches ``order``[:, :seen] are used, to B×N×p²C."""
        patches = rows(self.backbone.embed(images), order[:, :seen])
        out: Tensor = self.decoder(self.backbone.encode(patches), order)
        return out


def transformer(encoder: nn.Module, setup: Setup) -> VisionTransformer:
    """The encoder itself, if it is one."""
    if not isinstance(encoder, VisionTransformer):
        raise FurlongError(
            f"method fedmae masks patches, so its encoder must be a vision transformer; "
            f"{setup.encoder} is none. Give --encoder vit_tiny, or another method."
        )
    return encoder


def rows(values: Tensor, index: Tensor) -> Tensor:
    """Of every B×N×d those in int64 B×n: B×n×d."""
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))


def patches_of(images: Tensor, patch: int) -> Tensor:
    """B×C×S×S to B×N×Cp²: the pixels of every patch, row by row."""
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


@dataclass(frozen=True)
class FedMAE(OneNetwork):
    """Rebuild the masked patches of an image from the others; the encoder is a transformer."""

    paper = (
        "He et al., Masked Autoencoders Are Scalable Vision Learners (MAE), CVPR 2022, averaged as "
        "in McMahan et al. 2017"
    )
    leaves = (
        "Encoder and decoder weights. The decoder turns tokens back into images: whoever gets an "
        "image's tokens as well can look at it. There is no formal privacy guarantee."
    )
    usual = {
        **USUAL,
        "model.encoder": "vit_mini",
        "train.batch_size": 16,
        "optimiser.lr": 0.001,
    }
    # in small images a patch is often flat ground, and normalised it would be noise
    usual_small = {"decoder_width": 64, "mask": 0.6, "normalise": False}
    decomposes = "records"
    usual_augment = "flip"
    remedy = "Try a lower --optimiser.lr or more --rounds: a masked autoencoder learns slowly."

    mask: float = setting(0.75, "The share of patches that is masked.", above=0, below=1)
    decoder_width: int = setting(128, "The width of the decoder's tokens.", at_least=HEAD)
    decoder_depth: int = setting(2, "The decoder's blocks; the paper has 8.", at_least=1)
    normalise: bool = setting(True, "Rebuild every patch in units of its own mean and deviation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.decoder_width
        require(width % HEAD == 0, "decoder_width", width, f"a multiple of {HEAD}")

    def advice(self, setup: Setup) -> list[str]:
        """None; but another encoder is refused before the run begins."""
        with torch.device("meta"):  # only its kind is wanted
            transformer(build_encoder(setup.encoder, setup.channels, setup.image_size), setup)
        return []

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and decoder."""
        encoder = transformer(ctx.encoder(), ctx.setup)
        decoder = Decoder(encoder, ctx.setup.channels, self.decoder_width, self.decoder_depth)
        return MaskedAutoencoder(encoder, decoder)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Over the masked patches alone."""
        assert isinstance(net, MaskedAutoencoder)
        (view,) = batch.views(1)
        wanted = patches_of(view, net.backbone.patch)
        if self.normalise:
            variance, mean = torch.var_mean(wanted, dim=2, keepdim=True)
            wanted = (wanted - mean) * torch.rsqrt(variance + 1e-6)
        count, total = wanted.shape[:2]
        seen = min(max(1, round(total * (1 - self.mask))), total - 1)
        order = moved(torch.rand(count, total).argsort(1), view.device)
        found = net(view, order, seen)
        masked = order[:, seen:]
        return F.mse_loss(rows(found, masked), rows(wanted, masked))
