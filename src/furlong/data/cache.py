"""Decode a `Source`, into memory or into a cache on disk.

The cache is a memory-mapped file of pixels and a JSON file that vouches for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from furlong.data.decode import OtherSize, decode, many
from furlong.data.reading import ByteArray, Skipped
from furlong.data.sources import IntArray, Source
from furlong.errors import FurlongError

# Pixels uint8 N×C×H×W, and by row number the images that were left out of them.
Pixels = tuple[ByteArray, dict[int, Skipped]]
AUTO_CACHE_BYTES = 1 << 30
_VERSION = 2


class Plan(NamedTuple):
    """How images get one size: decode to ``size``, pad, resize to ``out``; (H, W) each."""

    size: tuple[int, int]
    out: tuple[int, int]
    exact: bool = False
    pad: int = 0


def first_size(source: Source, rows: IntArray) -> tuple[int, int]:
    """(H, W) of the first usable image; 64×64 if there is none."""
    with many(partial(decode, size=None, how=source.how)) as images:
        for _, block in source.blocks(rows):
            for item in block:
                image = images([item])[0] if isinstance(item, tuple) else item
                if not isinstance(image, Skipped):
                    return image.shape[-2], image.shape[-1]
    return 64, 64


def decoded(source: Source, rows: IntArray, plan: Plan, directory: Path | None) -> Pixels:
    """Decode as planned, through a memory-mapped file if one is wanted or the set is large."""
    bad: dict[int, Skipped] = {}
    blocks = _blocks(source, rows, plan, bad)
    shape = (len(rows), source.how.channels, *plan.out)
    if directory is None and np.prod(shape, dtype=np.int64) <= AUTO_CACHE_BYTES:
        pixels, done = np.empty(shape, dtype=np.uint8), 0
        for block in blocks:
            pixels[done : done + len(block)] = block
            done += len(block)
        return pixels[:done], bad
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = directory or Path(home, "furlong")
    chosen = "all" if len(rows) == len(source.rows) else _digest(rows.tobytes())
    identity = [source.name, source.where, source.split, str(plan), str(source.how), chosen]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", source.name)[-40:].strip("-")
    stem = str(directory / f"{slug}-{_digest(json.dumps(identity).encode())}")
    # The sources may be a million files, so what is kept of their names, sizes and times is a
    # digest. It is not part of the file's name: a stale cache is then replaced, not left behind.
    stats = [(str(file), file.stat()) for file in source.files]
    sources = json.dumps([[path, info.st_size, info.st_mtime_ns] for path, info in stats])
    key = {"version": _VERSION, "identity": identity, "sources": _digest(sources.encode())}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return _read(stem, key) or _write(stem, key, blocks, bad)
    except OSError as error:
        raise FurlongError(
            f"Cannot keep the decoded pixels of {source.name} in {directory}: {error.strerror}. "
            "Choose another directory with --data.cache DIR or the variable XDG_CACHE_HOME."
        ) from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _blocks(
    source: Source, rows: IntArray, plan: Plan, bad: dict[int, Skipped]
) -> Iterator[ByteArray]:
    """Blocks of pixels B×C×H×W, in order; unusable rows are added to ``bad``."""
    read = partial(decode, size=plan.size, exact=plan.exact, how=source.how)
    with many(read) as decode_all:
        for part, block in source.blocks(rows):
            if isinstance(block, list):
                images = decode_all(block)
                pairs = zip(part.tolist(), images, strict=True)
                bad.update({row: image for row, image in pairs if isinstance(image, Skipped)})
                good = [image for image in images if not isinstance(image, Skipped)]
                if not good:
                    continue
                block = np.stack(good)
            elif block.shape[2:] != plan.size:
                raise OtherSize((block.shape[2], block.shape[3]))
            yield _finish(block, plan, source)


def _finish(block: ByteArray, plan: Plan, source: Source) -> ByteArray:
    """B×C×H×W with the channels that were asked for, padded and resized as planned."""
    channels = source.how.channels
    if (block.shape[1], channels) == (1, 3):
        block = block.repeat(3, axis=1)
    if block.shape[1] != channels:
        raise FurlongError(
            f"{source.name} has images of {block.shape[1]} channel(s), and data.channels is "
            f"{channels}: leave it out."
        )
    if plan.pad:
        block = np.pad(block, ((0, 0), (0, 0), (plan.pad, plan.pad), (plan.pad, plan.pad)))
    if block.shape[2:] == plan.out:
        return block
    wide = torch.from_numpy(np.ascontiguousarray(block)).float()
    small = F.interpolate(wide, plan.out, mode="bilinear", antialias=True)
    result: ByteArray = small.round_().clamp_(0, 255).to(torch.uint8).numpy()
    return result


def _map(stem: str, shape: list[int]) -> ByteArray:
    # Mode "c" (copy on write) because torch warns about arrays that cannot be written to.
    return np.memmap(stem + ".u8", np.uint8, "c", shape=tuple(shape))


def _read(stem: str, key: dict[str, Any]) -> Pixels | None:
    """The pixels kept earlier; None if absent, of other sources, or damaged."""
    try:
        meta = json.loads(Path(stem + ".json").read_text())
        if meta["key"] != key:
            return None
        pixels = _map(stem, meta["shape"])
        bad = {int(row): Skipped(name, reason) for row, name, reason in meta["skipped"]}
        return (pixels, bad) if zlib.crc32(pixels.data) == meta["crc32"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(
    stem: str, key: dict[str, Any], blocks: Iterable[ByteArray], bad: dict[int, Skipped]
) -> Pixels:
    """
    Write pixels, then the JSON that vouches for them, each moved into place when complete.

    As a stream: writing through a memory map would kill the process when the disk is full.
    """
    shape, crc = [0, 0, 0, 0], 0
    with tempfile.TemporaryDirectory(dir=Path(stem).parent, prefix=".tmp-") as tmp:
        with open(Path(tmp, "pixels"), "wb") as file:
            for block in blocks:
                data = block.tobytes()
                file.write(data)
                crc = zlib.crc32(data, crc)
                shape = [shape[0] + len(block), *block.shape[1:]]
        if not shape[0]:  # an empty file cannot be mapped
            return np.empty(shape, dtype=np.uint8), bad
        skipped = [[row, each.name, each.reason] for row, each in bad.items()]
        meta = {"key": key, "shape": shape, "crc32": crc, "skipped": skipped}
        Path(tmp, "meta").write_text(json.dumps(meta))
        os.replace(Path(tmp, "pixels"), stem + ".u8")
        os.replace(Path(tmp, "meta"), stem + ".json")
    return _map(stem, shape), bad
