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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from furlong.core.layout import packed_order
from furlong.core.payload import Weights, flatten, joined, parts
from furlong.core.weights import blocks

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
        self._inside = _inside(self._names, tensors, kinds)
        self._whole = self._lengths(None)

    def size(self, upload: Any, images: int) -> Size:
        """The size of ``upload``, which has the tensors of the server's value."""
        return Size(images, self._lengths(self._all(flatten(upload)[0])), self._whole)

    def _all(self, tensors: Weights) -> torch.Tensor:
        """All numbers in a row, float32; a copy only where they do not lie so."""
        pieces = joined(tensors[name] for name in self._names)
        rows = [piece.detach().float().flatten() for piece in pieces] or [torch.empty(0)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _lengths(self, others: torch.Tensor | None) -> dict[str, float]:
        """By kind, how far ``others`` are from the own numbers, which are as far from nothing."""
        squares = dict.fromkeys(_KINDS, 0.0)  # the guard's limit keeps them finite
        rows = blocks(self._own) if others is None else blocks(self._own, others)
        for places, row in zip(self._inside, rows, strict=True):
            moved = row[0].clone() if others is None else row[1] - row[0]
            for kind, where in places.items():
                part = moved[where]
                squares[kind] += float(torch.dot(part, part))
                moved[where] = 0.0
            squares["params"] += float(torch.dot(moved, moved))
        return {kind: math.sqrt(total) for kind, total in squares.items()}


def _inside(
    names: list[str], tensors: Weights, kinds: Mapping[str, str]
) -> list[dict[str, torch.Tensor]]:
    """Where in each block the numbers lie that are no parameters (the first kind), by kind."""
    counts = [tensors[name].numel() for name in names]
    codes = torch.tensor([list(_KINDS).index(kinds[name]) for name in names], dtype=torch.uint8)
    every = codes.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    found = []
    for (block,) in blocks(every):
        where = {kind: (block == code).nonzero()[:, 0] for code, kind in enumerate(_KINDS) if code}
        found.append({kind: at for kind, at in where.items() if len(at)})
    return found


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
