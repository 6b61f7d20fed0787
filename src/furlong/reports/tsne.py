"""t-SNE: features to points in the plane, for looking at them (openTSNE)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from furlong.errors import FurlongError

MOST = 2000  # points: enough to see, and a page stays small
PERPLEXITY = 30.0


def coordinates(features: Tensor, seed: int = 0) -> NDArray[np.float64]:
    """Features N×d, N ≤ 2000, to points N×2 in the unit square; starts from the PCA."""
    try:
        from openTSNE import TSNE
    except ImportError:
        raise FurlongError("t-SNE needs openTSNE: pip install openTSNE.") from None
    count = len(features)
    if not 5 <= count <= MOST:
        raise FurlongError(f"t-SNE of {count} points: give 5 to {MOST:,}.")
    fitted = TSNE(
        perplexity=min(PERPLEXITY, (count - 1) / 3),
        initialization="pca",
        metric="euclidean",
        negative_gradient_method="bh",  # for few points the faster one
        neighbors="exact",
        n_jobs=1,
        random_state=seed,
    ).fit(features.detach().to("cpu").double().numpy())
    points = np.asarray(fitted, dtype=np.float64)
    low, high = points.min(0), points.max(0)
    return np.asarray((points - low) / np.maximum(high - low, 1e-12))
