"""How good a representation looks without any label, and whether it has collapsed.

Wang & Isola, "Understanding contrastive representation learning through alignment and uniformity on
the hypersphere", ICML 2020; Roy & Vetterli, "The effective rank", EUSIPCO 2007.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.data.augment import Recipe
from furlong.errors import FurlongError
from furlong.evaluation.features import device_of, features
from furlong.evaluation.protocol import Encoded, Images, Progress, Protocol, silent
from furlong.seeding import shuffled, with_seed
from furlong.settings import setting

MIN_RANK, MIN_SPREAD = 2.0, 0.01
"""Below one of these a representation counts as collapsed: it lies in fewer than two directions, or
features of different images are less than about 1° apart. Encoders that were never trained lie far
above both (ResNet-18, CNN-5 and the small one on CIFAR-10: ranks 13 to 190, spreads from 0.07)."""


@dataclass(frozen=True)
class Quality:
    """Of features on the unit sphere; only comparable between equal images and augmentations."""

    alignment: float  # mean squared distance of two views of an image, 0 to 4; lower is better
    uniformity: float  # about -4 (spread over the sphere) to 0 (one point); lower is better
    effective_rank: float  # 1 (one direction) to d
    spread: float  # standard deviation over all dimensions, 0 (one point) to 1

    @property
    def collapsed(self) -> bool:
        """Whether all images look (nearly) the same to the encoder."""
        return self.effective_rank < MIN_RANK or self.spread < MIN_SPREAD


def quality(
    encoder: nn.Module, pixels: Tensor, augment: Recipe, seed: int = 0, batch_size: int = 512
) -> Quality:
    """Quality of ``encoder`` on images uint8 N×C×H×W, from two views of each by ``augment``.

    The encoder comes back as it was; all randomness comes from ``seed``.
    """
    if len(pixels) < 2:
        raise FurlongError(f"{len(pixels)} image(s): the quality of features needs at least 2.")
    with with_seed(seed, device_of(encoder)):
        first, second = (
            F.normalize(features(encoder, pixels, augment.view, batch_size), dim=1)
            for _ in range(2)
        )
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise FurlongError("features contain NaN or infinity: the training diverged?")
    return Quality(
        alignment(first, second), uniformity(first), effective_rank(first), spread(first)
    )


@torch.no_grad()
def alignment(first: Tensor, second: Tensor) -> float:
    """Mean of ‖x - y‖² over the rows of two N×d tensors, normalised: views of the same images."""
    difference = F.normalize(first, dim=1) - F.normalize(second, dim=1)
    return float(difference.square().sum(dim=1).mean())


@torch.no_grad()
def uniformity(rows: Tensor, t: float = 2.0, block: int = 1024) -> float:
    """Log of the mean of exp(-t·‖x - y‖²) over all pairs of the rows N×d, normalised, N ≥ 2."""
    x = F.normalize(rows.double(), dim=1)
    total = 0.0
    for start in range(0, len(x), block):
        distance = (2 - 2 * x[start : start + block] @ x.T).clamp_(min=0)
        total += float(distance.mul_(-t).exp_().sum())
    norms = x.square().sum(dim=1)  # 1, but 0 for a zero row: what it adds beside itself
    own = float((2 - 2 * norms).clamp_(min=0).mul_(-t).exp_().sum())
    return math.log((total - own) / (len(x) * (len(x) - 1)))


@torch.no_grad()
def effective_rank(rows: Tensor) -> float:
    """Exp of the entropy of the singular values of N×d, as shares of their sum; 0 for all zeros."""
    x = rows.double()
    # singular values from the smaller Gram matrix: much faster, and float64 leaves enough digits
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
    values = torch.linalg.eigvalsh(gram).clamp_(min=0).sqrt_()
    values[values < 1e-7 * values.max()] = 0  # rounding of the Gram matrix, not rank
    if not values.any():
        return 0.0
    share = values / values.sum()
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


@torch.no_grad()
def spread(rows: Tensor) -> float:
    """Root of the summed variances of the rows N×d, normalised: their distance from their mean."""
    x = F.normalize(rows.double(), dim=1)
    return math.sqrt(float(x.var(dim=0, correction=0).sum()))


def sample(images: Images, count: int) -> Tensor:
    """Pixels of at most ``count`` training images; which ones depends on the seed."""
    return images.train.pixels[shuffled(len(images.train), images.seed, "quality")[:count]]


@dataclass(frozen=True)
class LabelFree(Protocol):
    """The quality of the features of training images."""

    kind: ClassVar[str] = "quality"
    labels = 0.0

    images: int = setting(1000, "How many images are looked at.", above=0)

    def check(self, images: Images) -> None:
        """Labels are not needed."""

    def settings(self, images: Images) -> dict[str, Any]:
        """How many images there were."""
        return {"images": min(self.images, len(images.train))}

    def measure(self, encoded: Encoded, _: Progress = silent) -> dict[str, Any]:
        """All numbers of :class:`Quality`, and whether the representation has collapsed."""
        images = encoded.images
        pixels = sample(images, self.images)
        found = quality(encoded.encoder, pixels, images.augment, images.seed)
        return {**asdict(found), "collapsed": found.collapsed}
