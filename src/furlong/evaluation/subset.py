"""Which images get labels in the protocols with few of them: fixed by a seed, exact per class."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from furlong.errors import FurlongError


def stratified(labels: Tensor, share: float, seed: int) -> Tensor:
    """Ascending rows (int64) of ⌈share·N_c⌉ images of every class c that ``labels`` (N) holds.

    They depend on the labels, the share and the seed only, so every encoder gets the same.
    """
    if not 0 < share <= 1:
        raise FurlongError(f"a share of {share} of the labels: it must be above 0 and at most 1.")
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for each in labels.bincount().nonzero()[:, 0].tolist():
        rows = (labels == each).nonzero()[:, 0]
        # 0.07·100 is a little more than 7 in floating point
        count = math.ceil(share * len(rows) - 1e-9)
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    return torch.cat(chosen).sort()[0]
