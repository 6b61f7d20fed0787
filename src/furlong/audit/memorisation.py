"""Does the encoder know a training image by a part of it? After Déjà Vu (arXiv 2304.13850).

Meehan et al. take a part of a training image without the object, and ask whether the encoder,
unlike one that has not seen the image, tells what the object was. That needs labels of objects and
their places. Here, without any: from a corner of an image (a quarter of its area), is the whole
image recognised among others, by the cosine of their features, and more often if it was trained on?
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.data.augment import Augmentation
from furlong.evaluation.features import features

HOW = (
    "Has a corner of an image, a quarter of it, and looks for the whole image among others: what "
    "was trained on is recognised more surely (after Déjà Vu)."
)


def corners(pixels: Tensor) -> Tensor:
    """The upper left quarters of images uint8 N×C×H×W, enlarged to H×W."""
    height, width = pixels.shape[2:]
    part = pixels[:, :, : (height + 1) // 2, : (width + 1) // 2].float()
    grown = F.interpolate(part, (height, width), mode="bilinear", align_corners=False)
    return grown.round_().clamp_(0, 255).to(torch.uint8)


def margins(
    encoder: nn.Module, recipe: Augmentation, pixels: Tensor, distractors: Tensor
) -> Tensor:
    """By how much each corner's own image N is nearer than the nearest of the distractors.

    ``pixels``: uint8 N×C×H×W; ``distractors``: uint8 D×C×H×W, none of which is among them.
    """
    part, whole, rest = (
        F.normalize(features(encoder, x, recipe.plain), dim=1)
        for x in (corners(pixels), pixels, distractors)
    )
    return (part * whole).sum(dim=1) - (part @ rest.T).amax(dim=1)
