"""Images that a reader has found, with all that is known of them before they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.data.decode import Item
from furlong.data.reading import PLAIN, ByteArray, Reading, Skipped, printable
from furlong.errors import FurlongError, nearest

IntArray = NDArray[np.int64]
Block = ByteArray | list[Item]  # pixels B×C×H×W, or images still encoded
Blocks = Callable[[IntArray], Iterator[tuple[IntArray, Block]]]

BATCH = 512
PREFIXES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("test", "validation", "val"),
    "unlabelled": ("unlabeled", "unlabelled"),
}


class NoSplit(FurlongError):
    """The set exists but has no such split; callers may then hold images out themselves."""


@dataclass
class Source:
    """Images that have been found but not decoded, with all that is known beforehand."""

    name: str
    split: str
    where: str
    files: list[Path]
    rows: IntArray  # the row numbers that belong to the split, sorted
    blocks: Blocks  # takes sorted row numbers
    labels: IntArray | None = None
    classes: tuple[str, ...] = ()
    groups: IntArray | None = None
    group_names: tuple[str, ...] = ()
    patients: IntArray | None = None  # whose image each is, as in `ImageSet`
    weights: IntArray | None = None  # how often each counts in training; None: once
    how: Reading = PLAIN
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    size: int | None = None  # pixels square, unless asked otherwise; None: see the images
    exact: bool = False  # every image has that size already, or else something is wrong
    pad: int = 0  # pixels of black around each image


def in_blocks(read: Callable[[IntArray], Block]) -> Blocks:
    """The blocks of a source whose rows can be read in any order."""

    def blocks(rows: IntArray) -> Iterator[tuple[IntArray, Block]]:
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            yield part, read(part)

    return blocks


def numbered(values: Sequence[Any], count: int) -> tuple[IntArray, tuple[str, ...]]:
    """The first ``count`` of ``values`` as numbers, and the names that all of them stand for."""
    names = sorted(set(values))
    where = {each: index for index, each in enumerate(names)}
    numbers = np.array([where[each] for each in values[:count]], dtype=np.int64)
    return numbers, tuple(printable(str(each)) for each in names)


def kinship(kin: Sequence[str], keys: Sequence[str], count: int) -> IntArray | None:
    """The first ``count`` of ``kin`` as numbers; None if all are "".

    Images of which nothing is known ("") have a negative number each: nobody may take them for
    patients. Numbers follow the least of ``keys`` (which are all different) of those that belong
    together, so that they are the same for every split and in every process; the digests of DICOM
    files are not.
    """
    if not any(kin):
        return None
    own = [each or f"\0{key}" for each, key in zip(kin, keys, strict=True)]
    least: dict[str, str] = {}
    for each, key in zip(own, keys, strict=True):
        least[each] = min(key, least.get(each, key))
    number = {each: place for place, each in enumerate(sorted(least, key=least.__getitem__))}
    number |= {each: -1 - place for each, place in number.items() if each.startswith("\0")}
    return np.array([number[each] for each in own[:count]], dtype=np.int64)


def require_column(name: str, column: str, columns: Sequence[str]) -> None:
    """Refuse a column that is not there."""
    if column not in columns:
        raise FurlongError(f"{name} has no column {column!r}. {nearest(column, columns)}")


PATIENT = ("patient", "patient_id")


def patient_column(
    name: str, holdout_by: str, columns: Sequence[str], notes: list[str]
) -> str | None:
    """The column that says whose image is whose, if there is one; ``notes``: one that may."""
    if holdout_by in ("auto", "image"):  # by image, too: a leak is worth a warning
        found = next((c for c in PATIENT if c in columns), None)
        alike = [c for c in columns if c.strip().lower().replace(" ", "_") in PATIENT]
        if found is None and alike:
            notes.append(
                f"column {printable(alike[0])!r} is passed over: if it tells whose images are "
                f"whose, call it {PATIENT[0]!r}, or give --data.holdout-by {printable(alike[0])!r}."
            )
        return found
    require_column(name, holdout_by, columns)
    return holdout_by


def places(labels: IntArray) -> tuple[IntArray, IntArray]:
    """For each label (int N): its occurrence number within its class, and the class's size."""
    order = np.argsort(labels, kind="stable")
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    place = np.empty_like(labels)
    place[order] = np.arange(len(labels))
    return place - (np.cumsum(counts) - counts)[index], counts[index]


def parquet_files(where: Path, prefixes: Sequence[str]) -> list[Path]:
    """The parquet files of the first of ``prefixes`` that has any, in ``where`` or just below."""
    for inside in ("", "data", "plain_text", "default"):
        for prefix in prefixes:
            for pattern in (f"{prefix}-*.parquet", f"{prefix}.parquet", f"{prefix}/*.parquet"):
                if files := sorted((where / inside).glob(pattern)):
                    return files
    return []
