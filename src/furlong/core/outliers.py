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

from furlong.core.layout import packed_order
from furlong.core.payload import Weights, flatten, joined, parts

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
        tensors, kinds = flatten(before)[0], {name: kind for name, kind, _, _ in parts(before)}
        order = [name for name in packed_order(tensors) if tensors[name].is_floating_point()]
        self._names = [name for name in order if kinds[name] in _KINDS]
        self._own = self._all(tensors)
        places: dict[str, list[torch.Tensor]] = {kind: [] for kind in _KINDS}
        start = 0
        for name in self._names:
            end = start + tensors[name].numel()
            places[kinds[name]].append(torch.arange(start, end))
            start = end
        del places["params"]  # all the rest
        self._places = {kind: torch.cat(each) for kind, each in places.items() if each}
        self._moved = self._own.clone()  # room for the update of one client after the other
        self._whole = self._lengths(self._moved)

    def size(self, upload: Any, images: int) -> Size:
        """The size of ``upload``, which has the tensors of the server's value."""
        moved = torch.sub(self._all(flatten(upload)[0]), self._own, out=self._moved)
        return Size(images, self._lengths(moved), self._whole)

    def _all(self, tensors: Weights) -> torch.Tensor:
        """All numbers in a row, float32; a copy only where they do not lie so."""
        pieces = joined(tensors[name] for name in self._names)
        rows = [piece.detach().float().flatten() for piece in pieces] or [torch.empty(0)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _lengths(self, numbers: torch.Tensor) -> dict[str, float]:
        """The length of each kind's numbers, which are lost: the guard's limit keeps it finite."""
        lengths = dict.fromkeys(_KINDS, 0.0)
        for kind, places in self._places.items():
            lengths[kind] = float(torch.linalg.vector_norm(numbers[places]))
            numbers[places] = 0.0
        return lengths | {"params": float(torch.linalg.vector_norm(numbers))}


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
