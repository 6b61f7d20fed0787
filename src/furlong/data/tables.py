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
import pyarrow.dataset as ds

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
            for batch in data.to_batches([image], batch_size=BATCH, fragment_readahead=1):
                end = start + len(batch)
                part = rows[slice(*np.searchsorted(rows, [start, end]))]
                yield part, _encoded(batch.column(0), part, start)
                start = end

    with _explained(name, where):
        data = ds.dataset(list(map(str, files)) if arrow is None else arrow)
        image = _image_column(name, where, data.schema)
        rows = np.arange(data.count_rows())
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
    data = images.take(pa.array(rows - start)).to_pylist()
    return [(f"row {row:08d}", each or b"") for row, each in zip(rows, data, strict=True)]


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The class names that Hugging Face keeps in a table's metadata, if any."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])["info"]
        return tuple(printable(str(each)) for each in info["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _categories(
    name: str, which: str, data: Any, others: Sequence[Path], known: tuple[str, ...] | None = None
) -> tuple[IntArray | None, tuple[str, ...]]:
    """
    A column as indices (int64 N) and names.

    Whole numbers are kept unless ``known`` is None; all else is numbered in order over all splits.
    """
    import pyarrow.dataset as ds

    values = data.to_table([which])[which]
    if values.null_count:
        raise FurlongError(f"{name}: column {which!r} has {values.null_count} empty value(s).")
    if pa.types.is_nested(values.type) or pa.types.is_floating(values.type):
        raise FurlongError(f"{name}: column {which!r} holds {values.type}, not categories.")
    if known is not None and pa.types.is_integer(values.type):
        numbers = values.to_numpy().astype(np.int64)
        if (numbers == -1).all():  # how several sets on the Hub mark "unknown"
            return None, ()
        return numbers, known or tuple(map(str, range(numbers.max() + 1)))
    rest = [ds.dataset(str(file)).to_table([which])[which].to_pylist() for file in others]
    return numbered(sum(rest, values.to_pylist()), len(values))
