"""A map of representations: training images as points in the plane, near where they are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from furlong.data.images import ImageSet
from furlong.data.partition import Partition
from furlong.evaluation.features import features
from furlong.seeding import shuffled

MAP = "map.json"  # in a run folder: by principal components, made at the end of every run
MOST = 2000  # points: enough to see, and a page stays small
FEWEST = 5


def points(
    encoder: nn.Module,
    train: ImageSet,
    split: Partition,
    transform: Callable[[Tensor], Tensor],
    seed: int,
    place: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """What a map holds of at most 2,000 training images: points, labels and clients.

    ``place`` brings features N×d to points N×2 in the unit square.
    """
    owner = torch.full((len(train),), -1)
    for client, rows in enumerate(split.indices):
        owner[rows] = client
    held = (owner >= 0).nonzero()[:, 0]
    chosen = held[shuffled(len(held), seed, "t-SNE")[:MOST]]
    found = place(features(encoder, train.pixels[chosen], transform))
    return {
        "points": [[round(x, 4), round(y, 4)] for x, y in found.tolist()],
        "labels": None if train.labels is None else train.labels[chosen].tolist(),
        "clients": owner[chosen].tolist(),
        "classes": list(train.classes),
    }


def principal(rows: Tensor) -> Tensor:
    """Features N×d to points N×2: their two principal components, scaled to the unit square.

    A component's sign means nothing; the entry of largest size in its direction is made positive.
    """
    x = rows.detach().cpu().double()
    x = x - x.mean(dim=0)
    directions = torch.linalg.eigh(x.T @ x)[1][:, -2:].flip(1)
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    found = x @ (directions * torch.where(largest < 0, -1.0, 1.0))
    low, high = found.amin(dim=0), found.amax(dim=0)
    scale = (high - low).max().clamp(min=1e-12)  # one for both
    scaled: Tensor = (found - low) / scale
    return scaled
