"""A manifest: a CSV or parquet table with the paths of images, and what is known of each.

Columns: ``path``, and any of ``label``, ``site``, ``patient``, ``split``, ``weight``, ``frame``;
others may be named by ``group_by`` and ``holdout_by`` and are passed over otherwise. Paths are
relative to one of the roots: those that the user named, else the manifest's own folder. A path that
leads out of all roots is skipped, be it absolute, with "..", or a symbolic link: a table that came
from elsewhere must not make us open what its reader did not mean to give.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from furlong.data.folders import Found, images_in, source_of
from furlong.data.reading import Frame, Reading, Skipped, Unusable, printable
from furlong.data.sources import (
    IntArray,
    NoSplit,
    Source,
    kinship,
    numbered,
    patient_column,
    require_column,
)
from furlong.errors import FurlongError, nearest

MAX_BYTES = 1 << 30  # of the table
MAX_WEIGHT = 1000
SPLITS = {
    "": "train", "train": "train", "training": "train", "test": "test", "testing": "test",
    "validation": "validation", "valid": "validation", "val": "validation",
    "unlabelled": "unlabelled", "unlabeled": "unlabelled",
}  # fmt: skip


def manifest(
    name: str,
    path: Path,
    split: str,
    group_by: str | None,
    holdout_by: str,
    how: Reading,
    root: str | Path | None = None,
) -> Source:
    """The images that the table ``path`` names for ``split``; without such a column all train."""
    table = _read(name, path)
    roots = _roots(name, path, root)
    splits = _splits(table)
    if split == "test" and "test" not in splits:
        splits = ["test" if each == "validation" else each for each in splits]
    if split not in splits:
        have = ", ".join(dict.fromkeys(splits))
        raise NoSplit(f"{name} has no split {split!r}: its column 'split' has {have or 'no row'}.")
    mine = _found(table, roots, how, [row for row, each in enumerate(splits) if each == split])
    others = [row for row, each in enumerate(splits) if each != split]
    source = _source(table, split, group_by, how, mine, others)
    source.patients = _patients(table, holdout_by, roots, how, mine, others, source.notes)
    return source


def every_image(
    path: Path, root: str | Path | None, how: Reading
) -> tuple[list[Found], list[Skipped]]:
    """The images of all splits, in the table's order, and what is not there."""
    table = _read(f"manifest:{path}", path)
    images = _found(table, _roots(table.name, path, root), how, list(range(len(table))))
    return images.found, images.skipped


@dataclass(frozen=True)
class _Table:
    """A table in memory: text by column, "" where there is nothing."""

    name: str
    path: Path
    columns: dict[str, list[str]]
    lines: list[int]  # where every row ends, as a person counts: the names of columns are line 1

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(frozen=True)
class _Images:
    """Images that were found, the rows of the table that name them, and what was not found."""

    found: list[Found]
    rows: list[int]
    skipped: list[Skipped]


def _source(
    table: _Table,
    split: str,
    group_by: str | None,
    how: Reading,
    mine: _Images,
    others: list[int],
) -> Source:
    """``others``: the rows of other splits, which share the names of classes and sites."""
    count = len(mine.found)
    source = source_of(table.name, split, table.path, mine.found, mine.skipped, how)
    source.files.append(table.path)

    def values(column: str) -> list[str]:
        known = table.columns[column]
        return [known[row] for row in mine.rows] + [known[row] for row in others if known[row]]

    if "label" in table.columns and count:
        missing = sum(not table.columns["label"][row] for row in mine.rows)
        if not missing:
            source.labels, source.classes = _numbered(values("label"), count)
        elif missing < count:
            source.notes.append(
                f"{missing:,} of {count:,} images have no label, so no labels were taken. A "
                "manifest of the labelled ones can be given to 'furlong evaluate' as --data."
            )
    site = group_by or ("site" if "site" in table.columns else None)
    if site is not None:
        _require_filled(table, site, mine.rows)
        source.groups, source.group_names = _numbered(values(site), count)
    if "weight" in table.columns and split == "train":
        source.weights = _weights(table, mine.rows)
    return source


def _numbered(values: list[str], count: int) -> tuple[IntArray, tuple[str, ...]]:
    """As `numbered`, but whole numbers are in their own order: 2 before 10."""
    if not all(each.isascii() and each.isdigit() for each in values):
        return numbered(values, count)
    ordered = [(int(each), each) for each in values]
    return numbered(ordered, count)[0], tuple(each for _, each in sorted(set(ordered)))


def _patients(
    table: _Table,
    holdout_by: str,
    roots: list[Path],
    how: Reading,
    mine: _Images,
    others: list[int],
    notes: list[str],
) -> IntArray | None:
    """Whose image each is: by the column that was named or is called so, else by the files."""
    column = patient_column(table.name, holdout_by, [*table.columns], notes)
    if column is not None:
        empty = _empty(table, column, mine.rows)
        if column == holdout_by:
            _require_filled(table, column, mine.rows)
        elif empty and len(empty) < len(set(mine.rows)):
            notes.append(
                f"warning: column {column!r} is empty in {len(empty):,} of "
                f"{len(set(mine.rows)):,} rows, the first in line {table.lines[empty[0]]}: nothing "
                "tells whose these images are. Fill it in, or leave these rows out."
            )
        rows = [*mine.rows, *others]
        kin = [table.columns[column][row] for row in rows]
    else:
        rest = _found(table, roots, how, others)
        every, rows = [*mine.found, *rest.found], [*mine.rows, *rest.rows]
        files = [str(each.file) for each in every]
        times = Counter(files)  # several slices, or a file that is named twice
        kin = [
            each.kin or (file if times[file] > 1 else "")
            for each, file in zip(every, files, strict=True)
        ]
    return kinship(kin, [f"{row:012d}" for row in rows], len(mine.found))


def _empty(table: _Table, column: str, rows: Sequence[int]) -> list[int]:
    """Those of ``rows`` that say nothing there, each once; slices of a volume have the same row."""
    return [row for row in dict.fromkeys(rows) if not table.columns[column][row]]


def _require_filled(table: _Table, column: str, rows: Sequence[int]) -> None:
    require_column(table.name, column, [*table.columns])
    empty = _empty(table, column, rows)
    if empty:
        raise FurlongError(
            f"{table.name}: column {column!r} is empty in {len(empty):,} row(s), the first in "
            f"line {table.lines[empty[0]]}. Fill it in, or leave these rows out."
        )


def _weights(table: _Table, rows: Sequence[int]) -> IntArray:
    """How often each image counts; nothing counts as once."""
    found = []
    for row in rows:
        text = table.columns["weight"][row] or "1"
        number = float(text) if text.replace(".", "", 1).isdigit() and text.isascii() else -1.0
        if number != int(number) or not 0 <= number <= MAX_WEIGHT:
            raise FurlongError(
                f"{table.name}: weight {text[:20]!r} in line {table.lines[row]}. A weight says how "
                f"often an image counts in an epoch: a whole number from 0 to {MAX_WEIGHT:,}."
            )
        found.append(int(number))
    return np.array(found, dtype=np.int64)


# ---------------------------------------------------------------- the table


def _read(name: str, path: Path) -> _Table:
    """Every column as text."""
    if not path.is_file():
        raise FurlongError(f"{name}: there is no file {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise FurlongError(f"{name}: a table of more than 1 GB. Cut it into several.")
    columns, lines = _parquet(name, path) if path.suffix == ".parquet" else _csv(name, path)
    if "path" not in columns:
        have = ", ".join(printable(each) for each in columns)[:200]
        raise FurlongError(f"{name}: there is no column 'path' in {path}; it has: {have}.")
    return _Table(name, path, columns, lines)


def _csv(name: str, path: Path) -> tuple[dict[str, list[str]], list[int]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            # Excel writes semicolons where a comma is the decimal point.
            comma = max(",;\t", key=first.count)
            file.seek(0)
            rows = csv.reader(file, delimiter=comma, strict=True)
            names = [each.strip() for each in next(rows, [])]
            if len(set(names)) < len(names):
                raise FurlongError(f"{name}: two columns of {path} have the same name.")
            return _columns(name, names, rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FurlongError(f"{name}: {path} is not a CSV file in UTF-8: {error}") from None
    except OSError as error:
        raise FurlongError(f"{name}: cannot read {path}: {error.strerror}") from None


def _columns(name: str, names: list[str], rows: Any) -> tuple[dict[str, list[str]], list[int]]:
    """``rows`` is a reader of the module csv."""
    columns: dict[str, list[str]] = {each: [] for each in names}
    lines: list[int] = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(names):
            raise FurlongError(
                f"{name}: line {rows.line_num} has {len(row)} values, the first line {len(names)}."
            )
        for column, value in zip(names, row, strict=True):
            columns[column].append(value.strip())
        lines.append(rows.line_num)
    return columns, lines


def _parquet(name: str, path: Path) -> tuple[dict[str, list[str]], list[int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def text(value: Any) -> str:
        whole = isinstance(value, float) and value.is_integer()  # pandas makes floats of gaps
        return (
            "" if value is None or value != value else str(int(value) if whole else value).strip()
        )

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        said = printable(str(error).partition("\n")[0])
        raise FurlongError(f"{name}: cannot read {path}: {said}") from None
    flat = [
        each.name
        for each in table.schema
        if not pa.types.is_nested(each.type) and not pa.types.is_binary(each.type)
    ]
    columns = {each: [text(value) for value in table[each].to_pylist()] for each in flat}
    return columns, list(range(2, len(table) + 2))


def _splits(table: _Table) -> list[str]:
    """The split of every row."""
    given = table.columns.get("split")
    if given is None:
        return ["train"] * len(table)
    for row, word in enumerate(given):
        if word.lower() not in SPLITS:
            raise FurlongError(
                f"{table.name}: split {printable(word)[:40]!r} in line {table.lines[row]}. "
                f"{nearest(word.lower(), [each for each in SPLITS if each])}"
            )
    return [SPLITS[word.lower()] for word in given]


# ---------------------------------------------------------------- the files


def _roots(name: str, path: Path, root: str | Path | None) -> list[Path]:
    """The folders in which files may lie, resolved."""
    given = [path.parent] if root is None else [Path(each) for each in str(root).split(os.pathsep)]
    for each in given:
        if not each.expanduser().is_dir():
            raise FurlongError(f"{name}: data.root names {each}, which is no folder.")
    return [each.expanduser().resolve() for each in given]


def _found(table: _Table, roots: list[Path], how: Reading, rows: list[int]) -> _Images:
    """The images that these rows name."""
    images = _Images([], [], [])
    frames = table.columns.get("frame")
    for row in rows:
        name = table.columns["path"][row]
        try:
            inside = images_in(name, _locate(name, roots), roots, how)
            if frames is not None and frames[row]:
                inside = _one(inside, frames[row])
        except Unusable as why:
            shown = printable(name) or f"line {table.lines[row]}"
            images.skipped.append(Skipped(shown, str(why)))
            continue
        images.found.extend(inside)
        images.rows.extend([row] * len(inside))
    return images


def _one(inside: list[Found], frame: str) -> list[Found]:
    """The frame that a row names, of those in its file."""
    for each in inside:
        if isinstance(each.place, Frame) and str(each.place.index) == frame:
            return [each]
    if len(inside) == 1 and frame == "0":
        return inside
    raise Unusable(f"frame {printable(frame)[:20]} is not among its {len(inside):,}")


def _locate(name: str, roots: list[Path]) -> Path:
    """The file ``name`` in the first root that has it; never one outside of all roots."""
    if not name or "\0" in name:
        raise Unusable("no path")
    absent = True
    for root in roots:
        path = root / name  # an absolute name stays as it is
        try:
            inside = any(path.resolve().is_relative_to(each) for each in roots)
            there = os.path.lexists(path)
        except (OSError, RuntimeError):
            raise Unusable("unreadable path") from None
        if there and inside:
            return path
        absent = absent and inside
    if absent:
        raise Unusable("there is no such file")
    raise Unusable("outside of the manifest's folder, or of the roots in --data.root")
