"""Features of a folder or manifest in a parquet file, and the images nearest to another one.

The file has a row per image (path, folder, width, height, feature) and says in its metadata by
which encoder the features were made, so that those of another one are not compared with them.
pyarrow takes long to import, so only what reads or writes the file imports it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.data.decode import IN_PARTS, decode, facts, many
from furlong.data.folders import Found as FoundImage
from furlong.data.folders import place_of, scan
from furlong.data.manifest import every_image
from furlong.data.reading import ByteArray, Place, Reading, Skipped, Unusable, printable
from furlong.errors import FurlongError
from furlong.evaluation.features import features
from furlong.files import replacing
from furlong.runs.saved_encoder import load_encoder, read_encoder

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK = 512  # images at a time, and rows of a row group
BATCH = 128
KEY = b"furlong"

Show = Callable[[int, int], None]


class Embedder:
    """Image files to features, by the encoder of a run folder or of an exported file."""

    def __init__(self, run: Path) -> None:
        about, weights = read_encoder(run)
        self._encoder = load_encoder(run)
        self.size = int(about["image_size"])
        self.width = int(about["width"])
        window, slices = str(about.get("window", "auto")), str(about.get("slices", "axial"))
        self.how = Reading(int(about["channels"]), window, slices)
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
        self.about = {key: str(value) for key, value in about.items()}
        self.about["weights_sha256"] = digest.hexdigest()

    def __call__(self, pixels: list[ByteArray]) -> Tensor:
        """Images C×S×S, B of them, to features B×d."""
        transform: Callable[[Tensor], Tensor] = self._encoder.transform  # type: ignore[assignment]
        return features(self._encoder, torch.from_numpy(np.stack(pixels)), transform, BATCH)

    def read(self, data: Place) -> _Read:
        """An image file as the encoder takes it, and its own width and height.

        Of a file that holds several images, such as the slices of a volume, one must be named.
        """
        seen = facts(data, self.how)
        if isinstance(data, Path) and seen.frames > 1 and seen.format in IN_PARTS:
            raise Unusable(
                f"it holds {seen.frames:,} images. Name one of them, such as "
                f"{printable(data.name)}#{seen.frames // 2}; 'furlong embed' takes all"
            )
        pixels = decode(data, (self.size, self.size), how=self.how)
        return _Read(seen.width, seen.height, pixels)

    def one(self, path: Path) -> Tensor:
        """The feature d of one file, or of the slice or frame k of a file: ``PATH#k``."""
        try:
            return self([self.read(place_of(Path(), str(path))).pixels])[0]
        except Unusable as why:
            raise FurlongError(f"{path} cannot be read: {why}.") from None


@dataclass(frozen=True)
class _Read:
    width: int
    height: int
    pixels: ByteArray


@dataclass(frozen=True)
class Block:
    """Some images of a folder: relative paths, widths, heights (B each), features B×d."""

    paths: list[str]
    widths: list[int]
    heights: list[int]
    features: Tensor


def images_of(
    place: Path, root: str | None, how: Reading
) -> tuple[list[FoundImage], list[Skipped]]:
    """All images of a folder or of a manifest, whose files are in ``root``; and what is not one."""
    if place.is_dir():
        return scan(place, how)
    if place.is_file() and place.suffix in (".csv", ".tsv", ".parquet"):
        return every_image(place, root, how)
    raise FurlongError(f"there is no folder {place}, and no manifest (.csv, .tsv, .parquet).")


def folder_rows(
    embedder: Embedder,
    place: Path,
    skipped: list[Skipped],
    show: Show | None = None,
    root: str | None = None,
) -> Iterator[Block]:
    """All images of ``place`` in blocks, by path; what is unusable goes to ``skipped``."""
    found, refused = images_of(place, root, embedder.how)
    skipped += refused
    with many(embedder.read) as read_all:
        for start in range(0, len(found), BLOCK):
            part = found[start : start + BLOCK]
            read = read_all([(printable(each.name), each.place) for each in part])
            bad = [each for each in read if isinstance(each, Skipped)]
            skipped += [each for each in bad if not each.is_empty]
            good = [(f.name, r) for f, r in zip(part, read, strict=True) if isinstance(r, _Read)]
            if good:
                yield Block(
                    [text(name) for name, _ in good],
                    [each.width for _, each in good],
                    [each.height for _, each in good],
                    embedder([each.pixels for _, each in good]),
                )
            if show is not None:
                show(start + len(part), len(found))


def text(name: str) -> str:
    """A path as it is, unless it is not Unicode."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return printable(name)
    return name


def _schema(width: int) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("path", pa.string(), nullable=False),
            pa.field("folder", pa.string()),
            pa.field("width", pa.int32(), nullable=False),
            pa.field("height", pa.int32(), nullable=False),
            pa.field("feature", pa.list_(pa.float32(), width), nullable=False),
        ]
    )


def _kind(field: pa.Field | None) -> str:
    if field is None:
        return "absent"
    return f"{field.type}{'' if field.nullable else ' without gaps'}"


def embed(
    embedder: Embedder,
    place: Path,
    out: Path,
    *,
    root: str | None = None,
    force: bool = False,
    show: Show | None = None,
) -> tuple[int, list[Skipped]]:
    """Write the features of all images of ``place``; how many, and what was skipped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = json.dumps({**embedder.about, "root": str(place.resolve())})
    schema = _schema(embedder.width).with_metadata({KEY: about})
    count, skipped = 0, list[Skipped]()
    with replacing(out, force) as draft:
        with pq.ParquetWriter(draft, schema) as writer:
            for rows in folder_rows(embedder, place, skipped, show, root):
                flat = pa.array(rows.features.numpy().ravel())
                folders = [str(Path(path).parent.as_posix()) for path in rows.paths]
                columns = [
                    pa.array(rows.paths),
                    pa.array([None if each == "." else each for each in folders], pa.string()),
                    pa.array(rows.widths, pa.int32()),
                    pa.array(rows.heights, pa.int32()),
                    pa.FixedSizeListArray.from_arrays(flat, embedder.width),
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                count += len(rows.paths)
        if not count:
            raise FurlongError(f"there is no readable image in {place}.")
    return count, skipped


def stored_rows(embedder: Embedder, path: Path) -> tuple[Path, Iterator[Block]]:
    """The folder whose features ``path`` holds, and the images, a row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        about = json.loads((file.schema_arrow.metadata or {})[KEY])
        root = Path(about["root"])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        raise FurlongError(f"{path} is not a file of 'furlong embed'.") from None
    if about.get("weights_sha256") != embedder.about["weights_sha256"]:
        raise FurlongError(
            f"{path} holds features of another encoder ({about.get('method')}, "
            f"{about.get('encoder')}): make it again with 'furlong embed'."
        )
    for wanted in _schema(embedder.width):
        index = file.schema_arrow.get_field_index(wanted.name)
        found = file.schema_arrow.field(index) if index >= 0 else None
        if found is None or not found.equals(wanted):
            raise FurlongError(
                f"{path} is not as 'furlong embed' wrote it: the column {wanted.name} is "
                f"{_kind(found)}, not {_kind(wanted)}. Make it again."
            )

    def rows() -> Iterator[Block]:
        for index in range(file.num_row_groups):
            table = file.read_row_group(index)
            flat = table["feature"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            yield Block(
                table["path"].to_pylist(),
                table["width"].to_pylist(),
                table["height"].to_pylist(),
                torch.from_numpy(flat.reshape(table.num_rows, -1).copy()),
            )

    return root, rows()


# ---------------------------------------------------------------- neighbours


@dataclass(frozen=True)
class Neighbour:
    """An image and its cosine similarity to the query."""

    path: str
    width: int
    height: int
    similarity: float


@dataclass(frozen=True)
class Found:
    """The nearest images, best first; of how many; and how alike the median one of all is."""

    nearest: list[Neighbour]
    count: int
    median: float


def nearest_images(
    query: Tensor, rows: Iterator[Block], k: int, without: str | None = None
) -> Found:
    """The ``k`` rows most alike to ``query`` (d) by cosine; none below the folder ``without``."""
    best: list[Neighbour] = []
    every: list[Tensor] = []
    direction = F.normalize(query.double(), dim=0)
    for block in rows:
        alike = F.normalize(block.features.double(), dim=1) @ direction
        every.append(alike)
        own = [without is not None and path.startswith(f"{without}/") for path in block.paths]
        alike = alike.masked_fill(torch.tensor(own), -torch.inf)
        values, where = alike.topk(min(k, len(alike) - sum(own)))
        best += [
            Neighbour(block.paths[i], block.widths[i], block.heights[i], value)
            for value, i in zip(values.tolist(), where.tolist(), strict=True)
        ]
        # a path breaks ties, so that the order does not depend on the blocks
        best = sorted(best, key=lambda each: (-each.similarity, each.path))[:k]
    if not every:
        raise FurlongError("there is no readable image to compare with.")
    whole = torch.cat(every)
    if not best:
        raise FurlongError(f"all images are in {without}: there are no others to compare with.")
    return Found(best, len(whole), float(whole.median()))
