"""Updates that are far too large for their round: one of them captures a mean.

With Δ_k = w_k - x, n_k images of client k, and medians over the answers of a round, client k is
suspected if

    ‖Δ_k‖ > c · median ‖Δ‖ · max(1, n_k / median n)          and there are at least three answers,
    or ‖Δ_k‖ > 100 · max(1, ‖x‖)                              of weights, however few there are.

An honest client with more images does more steps, and its update is at most as many times larger.
Parameters are one vector, BatchNorm's statistics another, as in ``norm_bound``, and what is sent
beside weights a third (x = 0). The last two have the scale of a site's images and may differ ten
times more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from furlong.core.payload import flatten, parts

USUAL = 5.0  # c across machines
FEWEST = 3  # answers: of two, who is to say which is the bad one?
_KINDS = {  # of ``payload.parts`` -> in words, and how many times more they may differ
    "params": ("its update is", 1.0),
    "buffers": ("the update of its BatchNorm statistics is", 10.0),
    "features": ("what it sent beside weights is", 10.0),
}
_ALONE = 100.0  # times the server's own weights


@dataclass(frozen=True)
class Size:
    """How far one client's weights are from the server's, by kind."""

    images: int
    moved: dict[str, float]  # ‖Δ‖
    whole: dict[str, float]  # ‖x‖


def size_of(upload: Any, before: Any, images: int) -> Size:
    """The size of ``upload``, which has the tensors of ``before``, the server's value."""
    got, want = flatten(upload)[0], flatten(before)[0]
    moved, whole = dict.fromkeys(_KINDS, 0.0), dict.fromkeys(_KINDS, 0.0)
    for name, kind, _, _ in parts(before):
        if kind in _KINDS and want[name].is_floating_point():
            own = want[name].float()
            moved[kind] += _squares(got[name].float() - own)
            whole[kind] += _squares(own)
    roots = ({kind: square**0.5 for kind, square in sums.items()} for sums in (moved, whole))
    return Size(images, *roots)


def _squares(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def suspects(sizes: Mapping[int, Size], times: float) -> dict[int, str]:
    """Client -> what is wrong with its update; ``times``: c."""
    found: dict[int, str] = {}
    usual_images = max(1.0, median(s.images for s in sizes.values())) if sizes else 1.0
    for kind, (what, wider) in _KINDS.items():
        usual = median(s.moved[kind] for s in sizes.values()) if len(sizes) >= FEWEST else 0.0
        for client, size in sizes.items():
            share = max(1.0, size.images / usual_images)
            moved, whole = size.moved[kind], size.whole[kind]
            if usual and moved > times * wider * usual * share:
                found[client] = f"{what} {moved / usual:.3g} times as large as the round's median"
            elif whole and moved > _ALONE * max(1.0, whole):
                found[client] = f"{what} {moved / whole:.3g} times as large as the weights"
    return found
