"""FedUniform: alignment and uniformity on every client, FedAvg of encoder and projector.

Wang & Isola, "Understanding Contrastive Representation Learning through Alignment and Uniformity
on the Hypersphere", ICML 2020.

    L = mean ‖z₁ - z₂‖² + λ·½ Σ_v log mean_{i<j} exp(-2‖z_vi - z_vj‖²),   z on the unit sphere

    furlong run --method examples/new_method.py:FedUniform --data shapes --rounds 5
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong import OneNetwork
from furlong.core.context import Batch
from furlong.methods.base import WEIGHTS_REVEAL
from furlong.methods.networks import Projecting, named_head
from furlong.settings import setting


def uniformity(z: Tensor) -> Tensor:
    """Of B×d unit rows: 0 if they are all the same, lower the more evenly they spread."""
    return torch.pdist(z).square().mul(-2).exp().mean().log()


@dataclass(frozen=True)
class FedUniform(Projecting, OneNetwork):
    """Bring the views of an image together and spread the images over the sphere."""

    paper = "Wang & Isola 2020, averaged as in McMahan et al. 2017"
    leaves = f"Encoder and projector weights. {WEIGHTS_REVEAL}"

    spread: float = setting(1.0, "The weight λ of the uniformity term.", at_least=0)
    projection_head: str = named_head("proj_128")

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Of two views of each image, B×C×S×S."""
        z1, z2 = F.normalize(net(torch.cat(batch.views())), dim=1).chunk(2)
        align = (z1 - z2).square().sum(dim=1).mean()
        return align + self.spread * (uniformity(z1) + uniformity(z2)) / 2
