"""FedAE: an autoencoder on every client, FedAvg of encoder and decoder.

A baseline of FedCA, which only says that the encoding shall give back "its original input".

    L = mean over pixels of (x - dec(f(x)))²,   x in [0, 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, Context
from furlong.data.augment import unit
from furlong.errors import require
from furlong.methods.base import OneNetwork
from furlong.methods.networks import chained
from furlong.settings import setting


class Decoder(nn.Module):
    """Representations B×d to images B×C×S×S in [0, 1].

    Linear to first×s×s, then transposed convolutions that double the side and halve the channels
    (512-256-128-64, and no fewer than an eighth from there on), then a convolution to C channels;
    what is beyond S is cut off around the centre. 32 pixels: s = 4, three doublings; 84 pixels:
    s = 6, four. The papers give none of this.
    """

    def __init__(self, width: int, channels: int, image_size: int, first: int = 512) -> None:
        super().__init__()
        doublings = max(3, ceil(log2(image_size / 6)))
        self.image_size, self.start = image_size, ceil(image_size / 2**doublings)
        self.linear = nn.Linear(width, first * self.start**2)
        layers: list[nn.Module] = []
        for i in range(doublings):
            into, out = first >> min(i, 3), first >> min(i + 1, 3)
            layers += [
                nn.ConvTranspose2d(into, out, 4, 2, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(out, channels, 3, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        """B×d to B×C×S×S."""
        x = self.linear(h).view(len(h), -1, self.start, self.start)
        x = self.layers(x).sigmoid()
        cut = (x.shape[-1] - self.image_size) // 2
        stop = cut + self.image_size
        out: Tensor = x[..., cut:stop, cut:stop]
        return out


@dataclass(frozen=True)
class FedAE(OneNetwork):
    """Rebuild the image from its representation."""

    paper = "Autoencoder, averaged as in McMahan et al. 2017; a baseline of FedCA"
    leaves = (
        "Encoder and decoder weights. The decoder turns representations back into images: whoever "
        "gets a representation as well can look at the image. There is no formal privacy guarantee."
    )
    decomposes = "records"
    usual_augment = "flip"
    usual_small = {"decoder_width": 64}

    decoder_width: int = setting(512, "The decoder's channels at its start.", at_least=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.decoder_width
        require(width % 8 == 0, "decoder_width", width, "a multiple of 8")

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and decoder."""
        setup = ctx.setup
        decoder = Decoder(ctx.width, setup.channels, setup.image_size, self.decoder_width)
        return chained(backbone=ctx.encoder(), decoder=ctx.normed(decoder))

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Against the pixels as the encoder sees them, before normalisation."""
        (view,) = batch.views(1)
        return F.mse_loss(net(view), unit(view, batch.augment))
