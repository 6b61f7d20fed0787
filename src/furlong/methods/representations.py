"""MFCL's representations: of two views, and on the server's disk.

There they are a file for each client and part of its images.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.files import mapped, require_space, write
from furlong.nn.peernorm import peers


@torch.no_grad()
def views(encoder: nn.Module, batch: Batch, together: bool) -> Tensor:
    """Of two views of B images, 2B×64×S×S, all first views before all second ones.

    ``together``: the two views of an image share the statistics of peer normalization.
    """
    with peers(encoder) if together else nullcontext():
        codes: Tensor = encoder(torch.cat(batch.views()))
    return codes


@dataclass(frozen=True)
class Stored:
    """A client's pairs in the files of its parts, each n×2×C×S×S."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def take(self, rows: Tensor) -> Tensor:
        """The pairs ``rows`` (b), counted through all parts, in any order: b×2×C×S×S."""
        found, start = [], 0
        for part in self.parts:
            found.append(part[rows[(rows >= start) & (rows < start + len(part))] - start])
            start += len(part)
        return torch.cat(found)


@dataclass(frozen=True)
class Store:
    """The representations that clients sent for epoch ``epoch`` of the server's training."""

    workspace: Path
    epoch: int
    shape: tuple[int, ...]  # of a pair, 2×C×S×S

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.workspace / f"representations-{self.epoch:04d}"

    def prepare(self, images: int) -> None:
        """Make room for pairs of so many images; checkpoints do not need those of other epochs."""
        self.folder.mkdir(exist_ok=True)
        for old in self.workspace.glob("representations-*"):
            if old != self.folder:
                shutil.rmtree(old, ignore_errors=True)
        require_space(self.folder, images * prod(self.shape) * 4)

    def put(self, client: int, part: int, pairs: Tensor) -> None:
        """Write what ``client`` sent."""
        write(self._file(client, part), pairs)

    def get(self, client: int, counts: Mapping[int, int]) -> Stored:
        """The client's pairs, ``counts[part]`` in each part; they are read when they are used."""
        return Stored([mapped(self._file(client, p), (n, *self.shape)) for p, n in counts.items()])

    def _file(self, client: int, part: int) -> Path:
        return self.folder / f"client-{client:05d}-part-{part:04d}.bin"


def mini_batches(
    clients: Sequence[Stored], size: int, fewest: int
) -> Iterator[list[tuple[Stored, Tensor]]]:
    """For every step of an epoch, the rows of ``size`` random pairs of each client.

    A client takes part while it has as many left (one that never has so many gives all of them,
    once), and the epoch ends where fewer than ``fewest`` clients do: what they have left is drawn
    in other epochs.
    """
    queues = []
    for codes in clients:
        whole = min(size, len(codes))
        order = torch.split(torch.randperm(len(codes)), whole)
        queues.append([(codes, rows) for rows in order if len(rows) == whole > 0])
    for step in range(max(map(len, queues), default=0)):
        now = [queue[step] for queue in queues if step < len(queue)]
        if len(now) >= fewest:
            yield now


def stacked(mini_batches: Sequence[Tensor]) -> Tensor:
    """Pairs b×2×C×H×W of each client to one batch 2P×C×H×W: the peer of row r is row r + P.

    One random permutation for the first and the second views.
    """
    pairs = torch.cat(list(mini_batches))
    return pairs[torch.randperm(len(pairs))].transpose(0, 1).flatten(0, 1)
