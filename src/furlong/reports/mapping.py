"""A run's representations in the plane, kept as RUN/tsne.json for its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from furlong.evaluation.features import features
from furlong.reports import tsne
from furlong.runs import config
from furlong.runs.datasets import load_data
from furlong.runs.folder import RunFolder, load_encoder
from furlong.runs.split import split_data
from furlong.seeding import shuffled

FILE = "tsne.json"


def make(run: Path) -> Path:
    """t-SNE of at most 2,000 training images under the run's encoder, with class and client."""
    folder = RunFolder.open(run)
    encoder = load_encoder(run)
    settings = config.load(run / "config.toml")
    train, _, _ = load_data(settings)
    owner = torch.empty(len(train), dtype=torch.int64)
    for client, rows in enumerate(split_data(settings, train).indices):
        owner[rows] = client
    chosen = shuffled(len(train), settings.run.seed, "t-SNE")[: tsne.MOST]
    transform: Any = encoder.transform
    vectors = features(encoder, train.pixels[chosen], transform)
    points = tsne.coordinates(vectors, settings.run.seed)
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
