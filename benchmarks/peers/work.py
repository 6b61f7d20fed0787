"""The work that all sides do, with torch and NumPy alone: every environment can import this file.

A side is a script that takes a job (JSON on its command line), trains, and hands in the time of
every round and the final weights. The networks below are what `furlong run --encoder work.py:NAME`
takes: everything up to the classifier, a linear layer that :func:`network` adds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 10
MARK = "FURLONG_PEERS_JOB"  # names the job in the environment of all its processes


class Clock:
    """Wall time, and processor time of all processes of the job, at the end of every round."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        self._job = f"{MARK}={os.environ[MARK]}".encode()

    def mark(self) -> None:
        """Before the first round and after each."""
        self._marks.append((time.perf_counter(), self._processors()))

    def rounds(self) -> list[tuple[float, float]]:
        """Seconds and processor seconds between the marks."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]

    def _processors(self) -> float:
        """Seconds, with those of children that have ended."""
        ticks = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if self._job in (process / "environ").read_bytes():
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                    ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Unit:
    """What is trained. Plain SGD without momentum; the learning rate is constant."""

    name: str
    clients: int
    images: int  # of a client
    cohort: int  # clients in a round
    batch: int
    epochs: int
    partition: str  # as Furlong names it
    encoder: str  # a function of this file
    lr: float = 0.1

    @property
    def steps(self) -> int:
        """Optimiser steps of a client in a round."""
        return self.epochs * (self.images // self.batch)


@dataclass(frozen=True)
class Job:
    """One training of a unit."""

    unit: Unit
    data: str  # folder that run.py has filled
    out: str  # folder for what is handed in
    workers: int
    seed: int
    rounds: int

    @staticmethod
    def given() -> Job:
        """The job on the command line."""
        fields = json.loads(sys.argv[1])
        return Job(**{**fields, "unit": Unit(**fields["unit"])})

    def text(self) -> str:
        """What :meth:`given` reads."""
        return json.dumps(asdict(self))

    def client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels uint8 n×3×32×32 and labels int64 n of a client."""
        pixels, labels, rows = _opened(self.data, self.seed)
        return pixels[rows[number]], labels[rows[number]]

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Images float n×3×32×32 from 0 to 1, and labels int64 n, of a client."""
        pixels, labels = self.client(number)
        return torch.from_numpy(pixels).float().div_(255), torch.from_numpy(labels)

    def hand_in(self, clock: Clock, weights: dict[str, Tensor], **versions: str) -> None:
        """The time of every round, the final weights, and versions of packages."""
        arrays = {k: v.detach().contiguous().numpy() for k, v in weights.items()}
        np.savez(Path(self.out) / "weights.npz", **arrays)
        told = {"rounds": clock.rounds(), "versions": {"torch": torch.__version__, **versions}}
        (Path(self.out) / "told.json").write_text(json.dumps(told))


@cache
def _opened(folder: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, mapped and not read; labels; and each client's rows."""
    pixels = np.load(f"{folder}/pixels.npy", mmap_mode="r")
    return pixels, np.load(f"{folder}/labels.npy"), np.load(f"{folder}/rows-{seed}.npy")


# --------------------------------------------------------------------------- networks


def two_convolutions() -> nn.Module:
    """The CNN of pfl's CIFAR-10 benchmark: B×3×32×32 to B×128."""
    made = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
    )
    made.out_dim = 128
    return made


def tutorial() -> nn.Module:
    """The CNN of blazefl's benchmark, which is that of PyTorch's tutorial: B×3×32×32 to B×84."""
    made = nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    made.out_dim = 84
    return made


def pixels() -> nn.Module:
    """The pixels themselves, B×3072: with the classifier this is softmax regression."""
    made = nn.Flatten()
    made.out_dim = 3 * 32 * 32
    return made


def network(unit: Unit) -> nn.Module:
    """Encoder and classifier under the names that they have in Furlong: B×3×32×32 to B×10."""
    encoder = {"two_convolutions": two_convolutions, "tutorial": tutorial, "pixels": pixels}
    backbone = encoder[unit.encoder]()
    classifier = nn.Linear(backbone.out_dim, CLASSES)
    return nn.Sequential(OrderedDict(backbone=backbone, classifier=classifier))
