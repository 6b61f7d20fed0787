"""Look at every image before anything is trained on them: the reading of ``furlong check``.

Every file is read once and decoded small. What is kept of an image is its name, its size, a digest
of its bytes and a thumbnail of 9×8 grey pixels: about half a gigabyte for a million images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from furlong.data.decode import Item, decode, facts, many
from furlong.data.images import OWN, own_images
from furlong.data.reading import (
    MAX_FILE_BYTES,
    PLAIN,
    Frame,
    Place,
    Reading,
    Skipped,
    Unusable,
    by_file,
)
from furlong.data.sources import PREFIXES, NoSplit, Source
from furlong.errors import FurlongError

THUMB = (8, 9)  # height and width: 8 × 8 differences between neighbours


@dataclass(frozen=True)
class Asked:
    """Which images are to be looked at, and how they are to be read."""

    data: str  # folder:PATH, parquet:PATH, manifest:PATH, or a plain path
    group_by: str | None = None
    holdout_by: str = "auto"
    root: str | None = None
    how: Reading = PLAIN

    @property
    def name(self) -> str:
        """``folder:PATH``, ``parquet:PATH`` or ``manifest:PATH``."""
        kind, path = locate(self.data)
        return f"{kind}:{path}"


class Seen(NamedTuple):
    """What is known of one image."""

    format: str
    channels: str
    bits: int
    width: int
    height: int
    frames: int
    colourless: bool
    stored: int  # bytes
    digest: bytes
    thumb: bytes  # 8×9 grey


@dataclass
class Part:
    """One split as it would be read, first-level folders taken for sites."""

    split: str
    names: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # "" where there is none
    patients: list[int] = field(default_factory=list)  # empty if nothing is known of them
    empty: int = 0  # slices of volumes that show nothing
    notes: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def locate(data: str) -> tuple[str, Path]:
    """``folder``, ``parquet`` or ``manifest``, and where; ``data`` may also be a plain path."""
    kind, colon, rest = data.partition(":")
    if colon and kind in OWN and rest:
        return kind, Path(rest).expanduser()
    path = Path(data).expanduser()
    if path.is_file() and path.suffix in (".csv", ".tsv"):
        return "manifest", path
    if path.is_file() and path.suffix == ".parquet":
        return ("manifest" if _has(path, "path", images=False) else "parquet"), path
    if path.is_dir():
        tables = any(path.glob("*.parquet")) or any(path.glob("*/*.parquet"))
        return ("parquet" if tables else "folder"), path
    raise FurlongError(
        f"check {data}: there is no such folder. Give folder:PATH, parquet:PATH, manifest:PATH, or "
        "a path."
    )


def _has(path: Path, column: str, *, images: bool) -> bool:
    """Whether a parquet file has a column; with ``images`` False: and none that holds images."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = path if path.is_file() else next(iter(sorted(path.glob("**/*.parquet"))), path)
    try:
        schema = pq.read_schema(file)
    except (pa.ArrowException, OSError):
        return False  # who reads it says why
    binary = any(pa.types.is_nested(f.type) or pa.types.is_binary(f.type) for f in schema)
    return column in schema.names and (images or not binary)


def survey(asked: Asked, show: Callable[[int, int], None] | None = None) -> list[Part]:
    """Read all images once; ``show(done, total)`` is called on the way."""
    kind, path = locate(asked.data)
    owner = asked.group_by
    if kind == "folder":
        owner = "folder"
    elif kind == "parquet" and owner is None and _has(path, "site", images=True):
        owner = "site"
    sources = []
    for split in PREFIXES:
        try:
            found_here = own_images(
                asked.name, split, owner, asked.holdout_by, asked.how, asked.root
            )
            sources.append(found_here)
        except NoSplit:
            continue
    total, done, found = sum(len(source.rows) for source in sources), 0, []
    with many(partial(_examine, how=asked.how)) as examine:
        for source in sources:
            part = Part(source.split, skipped=list(source.skipped), notes=source.notes)
            for count in _read(source, part, examine):
                done += count
                if show is not None:
                    show(done, total)
            part.skipped = by_file(part.skipped)
            found.append(part)
    if not any(part.seen or part.skipped for part in found):
        raise FurlongError(f"{asked.name}: there is no file in it.")
    return found


def _read(
    source: Source, part: Part, examine: Callable[[list[Item]], list[Seen | Skipped]]
) -> Iterator[int]:
    """Fill ``part`` block by block; yields how many images a block had."""
    for rows, block in source.blocks(source.rows):
        assert isinstance(block, list)  # folders and tables are still encoded
        for row, item, result in zip(rows.tolist(), block, examine(block), strict=True):
            if isinstance(result, Skipped):
                if result.is_empty:
                    part.empty += 1
                else:
                    part.skipped.append(result)
                continue
            if source.patients is not None:
                part.patients.append(int(source.patients[row]))
            part.names.append(item[0])
            part.seen.append(result)
            part.sites.append(
                "" if source.groups is None else source.group_names[source.groups[row]]
            )
            part.classes.append("" if source.labels is None else source.classes[source.labels[row]])
        yield len(rows)


def _examine(place: Place, how: Reading) -> Seen:
    digest, stored = _digest(place, how)
    known = facts(place, how)
    pixels = decode(place, THUMB, how=how).astype(np.int16)
    colourless = bool((pixels.max(0) - pixels.min(0) <= 4).all())
    share = [0.299, 0.587, 0.114] if len(pixels) == 3 else [1 / len(pixels)] * len(pixels)
    grey = np.rint(np.tensordot(share, pixels, 1)).astype(np.uint8)
    frames = known.frames if isinstance(place, Frame) else 1
    return Seen(*known, colourless, stored // frames, digest, grey.tobytes())


def _digest(place: Place, how: Reading) -> tuple[bytes, int]:
    """A digest of a file's bytes, or of the pixels of a part of it; and the file's size."""
    if isinstance(place, Frame):
        pixels = decode(place, None, how=how)
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        return digest, place.path.stat().st_size
    if isinstance(place, bytes):
        if not place:
            raise Unusable("empty file")
        if len(place) > MAX_FILE_BYTES:
            raise Unusable(f"file of {len(place) / 1e6:.0f} MB; the limit is 200 MB")
        return hashlib.blake2b(place, digest_size=16).digest(), len(place)
    try:
        with open(place, "rb") as file:
            whole = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            return whole.digest(), file.tell()
    except OSError as error:
        raise Unusable(f"unreadable: {error.strerror or error}") from None
