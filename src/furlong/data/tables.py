"""Tables in the Hugging Face image layout: parquet files, or Arrow tables in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from furlong.data.decode import Item
from furlong.data.reading import Reading, printable
from furlong.data.sources import (
    BATCH,
    PREFIXES,
    Block,
    IntArray,
    NoSplit,
    Source,
    numbered,
    parquet_files,
    patient_column,
    require_column,
)
from furlong.errors import FurlongError


def parquet(
    name: str,
    path: Path,
    split: str,
    group_by: str | None,
    holdout_by: str,
    how: Reading,
) -> Source:
    """A parquet file, or those in a folder; names that start with no split's are ``train``."""
    if path.is_file():
        found = {"train": [path]}
    elif path.is_dir():
        found = {s: files for s in PREFIXES if (files := parquet_files(path, PREFIXES[s]))}
        every = sorted(path.glob("*.parquet")) or sorted(path.glob("*/*.parquet"))
        if not found and not every:
            raise FurlongError(f"{name}: there is no *.parquet file in {path}.")
        found = found or {"train": every}
    else:
        raise FurlongError(f"{name}: there is no file or folder {path}.")
    if split not in found:
        raise NoSplit(f"{name} has no split {split!r}: {path} has {', '.join(found)}.")
    others = [file for each in found if each != split for file in found[each]]
    source = table(
        name, split, str(path), found[split], group_by, holdout_by=holdout_by, others=others
    )
    source.how = how
    return source


def table(
    name: str, split: str, where: str, files: list[Path], group_by: str | None, *,
    holdout_by: str = "auto", arrow: Any = None, others: Sequence[Path] = (),
    classes: tuple[str, ...] = (),
) -> Source:  # fmt: skip
    """
    Columns in the Hugging Face image layout, of ``arrow`` or else of the parquet ``files``.

    Text categories share their numbers with the parquet files ``others``; numbered classes that
    come without names get those in ``classes``.
    """

    def blocks(rows: IntArray) -> Iterator[tuple[IntArray, Block]]:
        start = 0
        with _explained(name, where):
            for images in data.batches(image):
                end = start + len(images)
                part = rows[slice(*np.searchsorted(rows, [start, end]))]
                yield part, _encoded(images, part, start)
                start = end

    with _explained(name, where):
        data = _Columns(files, arrow)
        image = _image_column(name, where, data.schema)
        rows = np.arange(data.rows)
        source = Source(name, split, where, files, rows, blocks)
        label = next((c for c in ("label", "fine_label", "labels") if c in data.schema.names), None)
        if label is not None:
            known = _class_names(data.schema, label) or classes
            source.labels, source.classes = _categories(name, label, data, others, known)
        columns = [c for c in data.schema.names if c != image]
        if group_by is not None:
            require_column(name, group_by, columns)
            source.groups, source.group_names = _categories(name, group_by, data, others)
        patient = patient_column(name, holdout_by, columns, source.notes)
        if patient is not None:
            source.patients, names = _categories(name, patient, data, others)
            if any(not each.strip() for each in names):
                raise FurlongError(
                    f"{name}: column {patient!r} is empty in some rows, so nothing tells whose "
                    "these images are. Fill it in, leave them out, or rename the column."
                )
    return source


class _Columns:
    """The columns of parquet files with one schema, or of an Arrow table.

    Neither ``pyarrow.dataset`` nor ``pyarrow.array`` is used, here or below: they import pandas
    where it is installed, which takes longer than to read thousands of images.
    """

    def __init__(self, files: Sequence[Path], arrow: Any = None) -> None:
        self._files, self._arrow = files, arrow
        self.schema: Any = pq.read_schema(files[0]) if arrow is None else arrow.schema
        here = [pq.read_metadata(file) for file in files] if arrow is None else [arrow]
        self.rows: int = sum(each.num_rows for each in here)

    def column(self, name: str) -> Any:
        """All values of a column."""
        if self._arrow is not None:
            return self._arrow[name]
        parts = [pq.ParquetFile(file).read([name]) for file in self._files]
        return pa.concat_tables(parts, promote_options="default")[name]  # none: empty values

    def batches(self, name: str) -> Iterator[Any]:
        """The values of a column, some at a time."""
        if self._arrow is not None:
            for batch in self._arrow.select([name]).to_batches(BATCH):
                yield batch.column(0)
            return
        for file in self._files:
            opened = pq.ParquetFile(file, pre_buffer=True)
            if name not in opened.schema_arrow.names:
                raise pa.ArrowInvalid(f"{file.name} has no column {name!r}")
            for batch in opened.iter_batches(BATCH, columns=[name]):
                yield batch.column(name)


@contextmanager
def _explained(name: str, where: str) -> Iterator[None]:

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        text = printable(str(error).partition("\n")[0])
        raise FurlongError(f"{name}: cannot read the parquet files in {where}: {text}") from None


def _image_column(name: str, where: str, schema: Any) -> str:

    for column in sorted(schema.names, key=lambda each: each not in ("img", "image")):
        kind = schema.field(column).type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return str(column)
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return str(column)
    raise FurlongError(
        f"{name}: no column of images in {where}. Expected 'img' or 'image', a struct with "
        f"'bytes'; found: {', '.join(schema.names)}."
    )


def _encoded(images: Any, rows: IntArray, start: int) -> list[Item]:
    """``rows`` of a column of images that begins at row ``start``."""
    # Only bytes: a path in a file from elsewhere must not make us open that path.
    if pa.types.is_struct(images.type):
        images = pc.struct_field(images, "bytes")
    where = pa.py_buffer(np.ascontiguousarray(rows - start, dtype=np.int64))
    data = images.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, where])).to_pylist()
    return [(f"row {row:08d}", each or b"") for row, each in zip(rows, data, strict=True)]


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The class names that Hugging Face keeps in a table's metadata, if any."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])["info"]
        return tuple(printable(str(each)) for each in info["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _categories(
    name: str,
    which: str,
    data: _Columns,
    others: Sequence[Path],
    known: tuple[str, ...] | None = None,
) -> tuple[IntArray | None, tuple[str, ...]]:
    """
    A column as indices (int64 N) and names.

    Whole numbers are kept unless ``known`` is None; all else is numbered in order over all splits.
    """
    values = data.column(which)
    if values.null_count:
        raise FurlongError(f"{name}: column {which!r} has {values.null_count} empty value(s).")
    if pa.types.is_nested(values.type) or pa.types.is_floating(values.type):
        raise FurlongError(f"{name}: column {which!r} holds {values.type}, not categories.")
    if known is not None and pa.types.is_integer(values.type):
        numbers: IntArray = np.array(np.from_dlpack(values.cast(pa.int64()).combine_chunks()))
        if (numbers == -1).all():  # how several sets on the Hub mark "unknown"
            return None, ()
        return numbers, known or tuple(map(str, range(numbers.max() + 1)))
    rest = [_Columns([file]).column(which).to_pylist() for file in others]
    return numbered(sum(rest, values.to_pylist()), len(values))
