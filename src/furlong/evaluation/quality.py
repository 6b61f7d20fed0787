"""How good a representation looks without any label, and whether it has collapsed.

Wang & Isola, "Understanding contrastive representation learning through alignment and uniformity on
the hypersphere", ICML 2020; Roy & Vetterli, "The effective rank", EUSIPCO 2007.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.data.augment import Recipe
from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation.features import device_of, features
from furlong.evaluation.protocol import Encoded, Images, Progress, Protocol, silent
from furlong.seeding import shuffled, with_seed
from furlong.settings import setting
from furlong.words import percent

MIN_RANK, MIN_SPREAD = 2.0, 0.01
"""Below one of these a representation counts as collapsed: images differ in fewer than two
directions, or by less than about 1°. Encoders that were never trained lie far above both
(ResNet-18, CNN-5 and the small one on CIFAR-10 and shapes: ranks 25 to 44, spreads from 0.07)."""
FALLEN, FAR_FALLEN, LOST = 0.5, 0.25, 0.95
"""A run is heading for collapse if its rank is below FALLEN times that of the untrained encoder and
its kNN below LOST times; or if its rank is below FAR_FALLEN times and kNN, where labels are known,
not above. On shapes, BYOL and SimSiam whose head does not end in BatchNorm, and SwAV with ε too
large, came to 0.1 to 0.5 of the rank and 0.7 to 0.96 of kNN. Runs that learnt kept more than 0.5 of
the rank, or, down to 0.36 (SimCLR after many rounds), had a higher kNN than the untrained
encoder."""


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


QUALITY = tuple(field.name for field in fields(Quality))


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
    """In how many directions the rows N×d differ: from 1 (a line) to d; 0 if they are all the same.

    Exp of the entropy of the variances along the principal directions, as shares of their sum. The
    mean is taken away: it is large in untrained encoders and tells no image from another.
    """
    x = rows.double()
    size, x = float(x.square().sum()), x - x.mean(dim=0)
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x  # the smaller one: much faster
    variances = torch.linalg.eigvalsh(gram).clamp_(min=0)
    if float(variances.sum()) <= 1e-12 * size:  # what rounding leaves of equal rows
        return 0.0
    share = variances / variances.sum()
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


@torch.no_grad()
def spread(rows: Tensor) -> float:
    """Root of the summed variances of the rows N×d, normalised: their distance from their mean."""
    x = F.normalize(rows.double(), dim=1)
    return math.sqrt(float(x.var(dim=0, correction=0).sum()))


# ---------------------------------------------------------------- the course of a run


State = Literal["", "heading for collapse", "collapsed"]


def diagnosis(course: Sequence[Mapping[str, Any]], untrained: Mapping[str, Any]) -> State:
    """What the measurements of a run say, of which the last two count; "": nothing wrong.

    A measurement has the numbers of :class:`Quality` by name, and ``knn`` where labels are known;
    ``untrained`` is that of the encoder before training.
    """
    latest = [each for each in course if each.get("effective_rank") is not None][-2:]
    if not latest:
        return ""
    now, gained = latest[-1], _knn_gain(latest[-1], untrained)
    gone = now["effective_rank"] < MIN_RANK or now["spread"] < MIN_SPREAD
    # few directions are enough to tell few classes apart: with labels one learns to use no others
    if gone and (gained is None or gained <= 1):
        return "collapsed"
    fallen = len(latest) == 2 and all(_fallen(each, untrained) for each in latest)
    return "heading for collapse" if fallen else ""


def _fallen(now: Mapping[str, Any], untrained: Mapping[str, Any]) -> bool:
    """Whether images differ in far fewer directions than before, and nothing shows what for."""
    before, gained = untrained.get("effective_rank"), _knn_gain(now, untrained)
    if not before:
        return False
    left = now["effective_rank"] / before
    if left < FAR_FALLEN:
        return gained is None or gained <= 1
    return bool(left < FALLEN) and gained is not None and gained < LOST


def _knn_gain(now: Mapping[str, Any], untrained: Mapping[str, Any]) -> float | None:
    """The kNN accuracy as a multiple of the untrained encoder's; ``None`` without labels."""
    score, start = now.get("knn"), untrained.get("knn")
    return score / max(start, 1e-9) if score is not None and start is not None else None


def in_words(state: State, now: Mapping[str, Any], untrained: Mapping[str, Any]) -> str:
    """A diagnosis with its numbers, for a person."""
    before = untrained.get("effective_rank")
    beside = "" if before is None else f" (untrained encoder: {before:.1f})"
    rank = f"effective rank {now['effective_rank']:.1f}{beside}"
    if state == "collapsed":
        return (
            f"the representation has collapsed: {rank}, spread {now['spread']:.3f}. All images "
            "look alike to the encoder."
        )
    known = _knn_gain(now, untrained) is not None
    both = (percent(each.get("knn")) for each in (now, untrained))
    accuracy = ", kNN {} (untrained encoder: {})".format(*both) if known else ""
    return (
        f"the representation is heading for collapse: {rank}{accuracy}. The encoder tells images "
        "apart in fewer and fewer directions."
    )


def _looked_at(images: Images) -> ImageSet:
    """Training images, or those that were held out where nothing has labels."""
    held = images.test
    return held if held is not None and held.labels is None and len(held) else images.train


def sample(images: Images, count: int) -> Tensor:
    """Pixels of at most ``count`` images; which ones depends on the seed."""
    pool = _looked_at(images)
    return pool.pixels[shuffled(len(pool), images.seed, "quality")[:count]]


@dataclass(frozen=True)
class LabelFree(Protocol):
    """The quality of the features of training images, or of held-out ones without labels."""

    kind: ClassVar[str] = "quality"
    labels = 0.0

    images: int = setting(1000, "How many images are looked at.", above=0)

    def check(self, images: Images) -> None:
        """Labels are not needed."""

    def settings(self, images: Images) -> dict[str, Any]:
        """How many images there were."""
        return {"images": min(self.images, len(_looked_at(images)))}

    def measure(self, encoded: Encoded, _: Progress = silent) -> dict[str, Any]:
        """All numbers of :class:`Quality`, and whether the representation has collapsed."""
        images = encoded.images
        pixels = sample(images, self.images)
        found = quality(encoded.encoder, pixels, images.augment, images.seed)
        return {**asdict(found), "collapsed": found.collapsed}
