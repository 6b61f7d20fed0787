"""Look at every image before anything is trained on them: the reading of ``furlong check``.

Every file is read once and decoded small. What is kept of an image is its name, its size, a digest
of its bytes and a thumbnail of 9×8 grey pixels: about half a gigabyte for a million images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from furlong.data.decode import (
    MAX_FILE_BYTES,
    Item,
    Skipped,
    Unusable,
    decode,
    many,
    opened,
    upright,
)
from furlong.data.images import own_images
from furlong.data.sources import PREFIXES, NoSplit, Source
from furlong.errors import FurlongError

THUMB = (8, 9)  # height and width: 8 × 8 differences between neighbours
MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey with alpha",
    "I;16": "grey",
    "I;16B": "grey",
    "I;16L": "grey",
    "I": "grey",
    "P": "palette",
    "PA": "palette with alpha",
    "RGB": "RGB",
    "RGBA": "RGB with alpha",
    "CMYK": "CMYK",
}


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
    skipped: list[Skipped] = field(default_factory=list)


def locate(data: str) -> tuple[str, Path]:
    """``folder`` or ``parquet``, and where; ``data`` may also be a plain path."""
    kind, colon, rest = data.partition(":")
    if colon and kind in ("folder", "parquet") and rest:
        return kind, Path(rest).expanduser()
    path = Path(data).expanduser()
    if path.is_file() and path.suffix == ".parquet":
        return "parquet", path
    if path.is_dir():
        tables = any(path.glob("*.parquet")) or any(path.glob("*/*.parquet"))
        return ("parquet" if tables else "folder"), path
    raise FurlongError(
        f"check {data}: there is no such folder. Give folder:PATH, parquet:PATH, or a path."
    )


def survey(
    data: str, group_by: str | None = None, show: Callable[[int, int], None] | None = None
) -> list[Part]:
    """Read everything in ``data`` once; ``show(done, total)`` is called on the way."""
    kind, path = locate(data)
    owner = "folder" if kind == "folder" else group_by
    sources = []
    for split in PREFIXES:
        try:
            sources.append(own_images(f"{kind}:{path}", path, split, owner))
        except NoSplit:
            continue
    total, done, found = sum(len(source.rows) for source in sources), 0, []
    with many(_examine) as examine:
        for source in sources:
            part = Part(source.split, skipped=list(source.skipped))
            for count in _read(source, part, examine):
                done += count
                if show is not None:
                    show(done, total)
            part.skipped.sort(key=lambda each: each.name)
            found.append(part)
    if not any(part.seen or part.skipped for part in found):
        raise FurlongError(f"{kind}:{path}: there is no file in it.")
    return found


def _read(
    source: Source, part: Part, examine: Callable[[list[Item]], list[Seen | Skipped]]
) -> Iterator[int]:
    """Fill ``part`` block by block; yields how many images a block had."""
    for rows, block in source.blocks(source.rows):
        assert isinstance(block, list)  # folders and tables are still encoded
        for row, item, result in zip(rows.tolist(), block, examine(block), strict=True):
            if isinstance(result, Skipped):
                part.skipped.append(result)
                continue
            part.names.append(item[0])
            part.seen.append(result)
            part.sites.append(
                "" if source.groups is None else source.group_names[source.groups[row]]
            )
            part.classes.append("" if source.labels is None else source.classes[source.labels[row]])
        yield len(rows)


def _examine(place: bytes | Path) -> Seen:
    try:
        data = place.read_bytes() if isinstance(place, Path) else place
    except OSError as error:
        raise Unusable(f"unreadable: {error.strerror or error}") from None
    if not data:
        raise Unusable("empty file")
    if len(data) > MAX_FILE_BYTES:
        raise Unusable(f"file of {len(data) / 1e6:.0f} MB; the limit is 200 MB")
    with opened(data) as image:
        width, height = upright(image)
        facts = (image.format or "", MODES.get(image.mode, image.mode), _bits(image, data))
        frames = int(getattr(image, "n_frames", 1))
    pixels = decode(data, THUMB).astype(np.int16)
    colourless = bool((pixels.max(0) - pixels.min(0) <= 4).all())
    grey = np.rint(np.tensordot([0.299, 0.587, 0.114], pixels, 1)).astype(np.uint8)
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return Seen(*facts, width, height, frames, colourless, len(data), digest, grey.tobytes())


def _bits(image: Image.Image, data: bytes) -> int:
    """Bits per channel as stored; Pillow's mode does not tell for PNG in colour."""
    if image.format == "PNG":
        return data[24]
    if image.format == "TIFF":
        stored = getattr(image, "tag_v2", {}).get(258, 8)
        return int(stored[0] if isinstance(stored, tuple) else stored)
    return {"1": 1, "I": 32}.get(image.mode, 16 if image.mode.startswith("I;16") else 8)
