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


class Start:
    """The server's value that the updates of a round are compared with, taken apart once."""

    def __init__(self, before: Any) -> None:
        tensors = flatten(before)[0]
        self._names: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        for name, kind, _, _ in parts(before):
            if kind in _KINDS and tensors[name].is_floating_point():
                self._names[kind].append(name)
        self._own = {
            kind: [tensors[name].float() for name in names] for kind, names in self._names.items()
        }
        self._whole = {kind: _norm(own) for kind, own in self._own.items()}

    def size(self, upload: Any, images: int) -> Size:
        """The size of ``upload``, which has the tensors of the server's value."""
        got = flatten(upload)[0]
        moved = {}
        for kind, names in self._names.items():
            tensors = [got[name].float() for name in names]
            moved[kind] = (
                _norm(list(torch._foreach_sub(tensors, self._own[kind]))) if names else 0.0
            )
        return Size(images, moved, self._whole)


def _norm(tensors: list[torch.Tensor]) -> float:
    """The length of all of them together, in float64."""
    if not tensors:
        return 0.0
    return float(torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).norm())


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
