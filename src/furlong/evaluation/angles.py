"""The angle between what two encoders make of the same images (FedCA's Figure 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.errors import FurlongError


def angles(features_a: Tensor, features_b: Tensor) -> Tensor:
    """The angle between corresponding rows of two N×d tensors in degrees: float64, N.

    A zero row has no direction; it counts as orthogonal to every other row.
    """
    if features_a.shape != features_b.shape or features_a.ndim != 2:
        raise FurlongError(
            f"Angles need two N×d tensors of one shape, not {tuple(features_a.shape)} and "
            f"{tuple(features_b.shape)}."
        )
    a, b = (
        F.normalize(f.detach().to(torch.float64), dim=1, eps=1e-300)
        for f in (features_a, features_b)
    )
    # arccos loses half the digits near 0° and 180°; this form (Kahan) keeps them.
    half = torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1))
    return torch.rad2deg(2 * half)
