"""A run's representations in the plane by t-SNE (openTSNE), kept as RUN/tsne.json for its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.errors import FurlongError
from furlong.evaluation.features import features
from furlong.runs.datasets import load_data
from furlong.runs.folder import RunFolder
from furlong.runs.saved_encoder import load_encoder
from furlong.runs.split import split_data
from furlong.seeding import shuffled

FILE = "tsne.json"
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


def make(run: Path) -> Path:
    """Map at most 2,000 training images under the run's encoder, with class and client."""
    folder = RunFolder.open(run)
    encoder, settings = load_encoder(run), folder.record.config()
    train, _, _ = load_data(settings)
    owner = torch.empty(len(train), dtype=torch.int64)
    for client, rows in enumerate(split_data(settings, train).indices):
        owner[rows] = client
    chosen = shuffled(len(train), settings.run.seed, "t-SNE")[:MOST]
    transform: Any = encoder.transform
    vectors = features(encoder, train.pixels[chosen], transform)
    points = coordinates(vectors, settings.run.seed)
    folder.write(
        FILE,
        {
            "points": [[round(float(x), 4), round(float(y), 4)] for x, y in points],
            "labels": None if train.labels is None else train.labels[chosen].tolist(),
            "clients": owner[chosen].tolist(),
            "classes": list(train.classes),
        },
    )
    return run / FILE
