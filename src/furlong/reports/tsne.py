"""A run's representations in the plane by t-SNE (openTSNE), kept as RUN/tsne.json for its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.errors import FurlongError
from furlong.runs.datasets import load_data
from furlong.runs.folder import RunFolder
from furlong.runs.plane import FEWEST, MOST, points
from furlong.runs.saved_encoder import load_encoder
from furlong.runs.split import split_data

FILE = "tsne.json"
PERPLEXITY = 30.0


def coordinates(features: Tensor, seed: int = 0) -> NDArray[np.float64]:
    """Features N×d, N ≤ 2000, to points N×2 in the unit square; starts from the PCA."""
    try:
        from openTSNE import TSNE
    except ImportError:
        raise FurlongError("t-SNE needs openTSNE: pip install openTSNE.") from None
    count = len(features)
    if not FEWEST <= count <= MOST:
        raise FurlongError(f"t-SNE of {count} points: give {FEWEST} to {MOST:,}.")
    fitted = TSNE(
        perplexity=min(PERPLEXITY, (count - 1) / 3),
        initialization="pca",
        metric="euclidean",
        negative_gradient_method="bh",  # for few points the faster one
        neighbors="exact",
        n_jobs=torch.get_num_threads(),  # any number gives the same bits
        random_state=seed,
    ).fit(features.detach().to("cpu").double().numpy())
    points = np.asarray(fitted, dtype=np.float64)
    low, high = points.min(0), points.max(0)
    return np.asarray((points - low) / np.maximum(high - low, 1e-12))


def make(run: Path) -> Path:
    """Map at most 2,000 training images under the run's encoder, with class and client."""
    folder = RunFolder.open(run)
    encoder, settings = load_encoder(run), folder.record.config()
    train, _, _ = load_data(settings)
    split, seed = split_data(settings, train), settings.run.seed
    transform: Callable[[Tensor], Tensor] = encoder.transform  # type: ignore[assignment]

    def place(vectors: Tensor) -> Tensor:
        return torch.from_numpy(coordinates(vectors, seed))

    folder.write(FILE, points(encoder, train, split, transform, seed, place))
    return run / FILE
