"""Look at images before anything is trained on them: ``furlong check``.

Every file is read once and decoded small. What is kept of an image is its name, its size, a digest
of its bytes and a thumbnail of 9×8 grey pixels: about half a gigabyte for a million images.
"""

from __future__ import annotations

import hashlib
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from furlong.data.cache import AUTO_CACHE_BYTES
from furlong.data.decode import (
    MAX_FILE_BYTES,
    ByteArray,
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
WINDOW = 16  # how many neighbours in the order of the hashes are compared
MOST_BITS = 3  # in which the hashes of near duplicates differ
MOST_LEVELS = 5.0  # by which their thumbnails differ on average, of 255
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


# --------------------------------------------------------------------------- reading


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


# --------------------------------------------------------------------------- duplicates


def duplicates(parts: list[Part]) -> list[list[tuple[int, int]]]:
    """Groups of (part, image) with the same bytes, the largest first."""
    groups: dict[bytes, list[tuple[int, int]]] = {}
    for p, part in enumerate(parts):
        for i, seen in enumerate(part.seen):
            groups.setdefault(seen.digest, []).append((p, i))
    return sorted((g for g in groups.values() if len(g) > 1), key=len, reverse=True)


def near_duplicates(parts: list[Part]) -> list[list[tuple[int, int]]]:
    """Groups of (part, image) that look the same small, but have other bytes: at least these.

    A difference hash finds candidates: images that agree in one of four quarters of it are near
    each other in an order by that quarter. Thumbnails decide, as flat images have the same hash.
    """
    where, thumbs, known = [], [], set()
    for p, part in enumerate(parts):
        for i, seen in enumerate(part.seen):
            if seen.digest not in known:  # one of those with the same bytes is enough
                known.add(seen.digest)
                where.append((p, i))
                thumbs.append(seen.thumb)
    if len(where) < 2:
        return []
    small = np.frombuffer(b"".join(thumbs), np.uint8).reshape(-1, *THUMB)
    leader = np.arange(len(where))
    for one, other in _candidates(_hashes(small)):
        apart = np.abs(small[one].astype(np.int16) - small[other]).mean((1, 2))
        for a, b in np.stack([one, other], 1)[apart <= MOST_LEVELS].tolist():
            a, b = sorted((_root(leader, a), _root(leader, b)))
            leader[b] = a
    groups: dict[int, list[tuple[int, int]]] = {}
    for n, place in enumerate(where):
        groups.setdefault(_root(leader, n), []).append(place)
    return sorted((g for g in groups.values() if len(g) > 1), key=len, reverse=True)


def _hashes(thumbs: ByteArray) -> NDArray[np.uint64]:
    """N×8×9 grey to N hashes of 64 bits: whether a pixel is brighter than its neighbour."""
    bits = (thumbs[:, :, 1:] > thumbs[:, :, :-1]).reshape(len(thumbs), 64)
    return np.packbits(bits, axis=1).view(">u8").astype(np.uint64).ravel()


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1)  # in a byte


def _candidates(
    hashes: NDArray[np.uint64],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs whose hashes differ in at most `MOST_BITS`."""
    for turn in (0, 16, 32, 48):
        turned = (hashes << np.uint64(turn)) | (hashes >> np.uint64((64 - turn) % 64))
        order = np.argsort(turned, kind="stable")
        for step in range(1, min(WINDOW, len(order) - 1) + 1):
            one, other = order[:-step], order[step:]
            differ = (hashes[one] ^ hashes[other]).view(np.uint8).reshape(-1, 8)
            close = _ONES[differ].sum(1) <= MOST_BITS
            yield one[close], other[close]


def _root(leader: NDArray[np.int64], n: int) -> int:
    while leader[n] != n:
        leader[n] = leader[leader[n]]
        n = int(leader[n])
    return n


# --------------------------------------------------------------------------- what it means


SIZES = (32, 48, 64, 96, 128)


def summarise(data: str, group_by: str | None, parts: list[Part]) -> dict[str, Any]:
    """All that `survey` found, as plain values for printing or JSON."""
    seen = [each for part in parts for each in part.seen]
    kind, path = locate(data)
    sites = Counter(site for part in parts for site in part.sites if site)
    classes = Counter(name for part in parts for name in part.classes if name)
    if set(sites) <= {"."}:  # no subfolders
        sites.clear()
    found: dict[str, Any] = {
        "data": f"{kind}:{path}",
        "images": len(seen),
        "splits": {part.split: len(part.seen) for part in parts},
        "sites": dict(sorted(sites.items())),
        "classes": dict(sorted(classes.items())),
        "skipped": [
            {"name": each.name, "reason": each.reason} for part in parts for each in part.skipped
        ],
    }
    for how, groups in (("same", duplicates(parts)), ("alike", near_duplicates(parts))):
        sets = [g for g in groups if len({p for p, _ in g}) > 1]
        owners = [g for g in groups if len({parts[p].sites[i] for p, i in g}) > 1]
        found[how] = {
            "groups": _named(parts, groups),
            "at_several_sites": _named(parts, owners if sites else []),
            "in_several_splits": _named(parts, sets),
        }
    if seen:
        found |= _measured(seen)
        found["suggested"] = _suggested(found)
        found["next"] = _commands(found, group_by)
    return found


def _named(parts: list[Part], groups: list[list[tuple[int, int]]]) -> list[list[str]]:
    several = len(parts) > 1
    return [
        [f"{parts[p].split}/{parts[p].names[i]}" if several else parts[p].names[i] for p, i in g]
        for g in groups
    ]


def _measured(seen: list[Seen]) -> dict[str, Any]:
    """Numbers over all images."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    short = sorted(min(each.width, each.height) for each in seen)
    return {
        "bytes": sum(each.stored for each in seen),
        "width": spread([each.width for each in seen]),
        "height": spread([each.height for each in seen]),
        "aspect": spread([each.width / each.height for each in seen]),
        "shorter_side": {"min": short[0], "tenth": short[len(short) // 10], "max": short[-1]},
        "one_size": len({(each.width, each.height) for each in seen}) == 1,
        "formats": dict(Counter(each.format for each in seen).most_common()),
        "channels": dict(Counter(each.channels for each in seen).most_common()),
        "bits": {str(k): v for k, v in Counter(each.bits for each in seen).most_common()},
        "animated": sum(each.frames > 1 for each in seen),
        "colourless": sum(each.colourless for each in seen),
    }


def _suggested(found: dict[str, Any]) -> dict[str, Any]:
    """Image size, encoder, augmentation and batch size, each with its reason."""
    size, size_why = _size(found)
    encoder, encoder_why = _encoder(found["images"])
    augment, augment_why = _augment(found)
    clients = _clients(found["images"])
    least = min(found["sites"].values(), default=found["images"] // clients)
    heap = "one client" if clients == 1 else f"each of {clients} clients"
    whose = "the smallest site" if found["sites"] else heap
    batch = max(8, min(128, 1 << max(0, (least // 4).bit_length() - 1)))
    pixels = found["images"] * 3 * size * size
    return {
        "image_size": {"value": size, "reason": size_why},
        "encoder": {"value": encoder, "reason": encoder_why},
        "augment": {"value": augment, "reason": augment_why},
        "batch_size": {
            "value": batch,
            "reason": f"{whose} ({least:,} images) then takes at least four steps a round"
            if least >= 4 * batch
            else f"{whose} has {least:,} image{'' if least == 1 else 's'} only",
        },
        "decoded": {
            "bytes": pixels,
            "where": "in memory" if pixels <= AUTO_CACHE_BYTES else "in a cache file on disk",
        },
    }


def _size(found: dict[str, Any]) -> tuple[int, str]:
    short, width, height = found["shorter_side"], found["width"], found["height"]
    if found["one_size"] and width["max"] == height["max"] <= 96:
        return int(width["max"]), "all images have this size; nothing is resized"
    fit = [size for size in SIZES if size <= short["tenth"]]
    if not fit:
        return SIZES[0], "the smallest that is sensible; smaller images are enlarged"
    if fit[-1] == SIZES[-1]:
        return fit[-1], "a compromise: 224 would show finer details and take three times as long"
    return fit[-1], f"nine images in ten have at least {short['tenth']} pixels on the shorter side"


def _encoder(images: int) -> tuple[str, str]:
    if images < 2_000:
        return "small", f"too few images ({images:,}) for a larger network; this one is quick"
    if images < 200_000:
        return "resnet18", "the papers' choice for tens of thousands of images"
    return "resnet50", "enough images for a larger network; resnet18 is faster"


def _augment(found: dict[str, Any]) -> tuple[str, str]:
    if found["colourless"] > 0.9 * found["images"]:
        return "mfcl", (
            "the images are grey, so changes of hue do nothing and strong ones of brightness take "
            "much away. All recipes flip: mind that where left and right matter"
        )
    return "fedu", (
        "colour images: crops, flips, strong changes of colour. Where colour is what counts "
        "(stains, plants), try mfcl (weaker) or flip_crop (no change of colour)"
    )


def _clients(images: int) -> int:
    """How many clients a heap is dealt out to: five, if each gets the two that training needs."""
    return max(1, min(5, images // 2))


def _commands(found: dict[str, Any], group_by: str | None) -> list[str]:
    """The commands that come next."""
    if found["images"] < 2:
        return ["(add images first: a client needs at least two to train)"]
    heap = f"--partition iid --clients {_clients(found['images'])}"
    split = "--partition natural" if found["sites"] else heap
    if found["sites"] and group_by:
        split += f" --data.group-by {shlex.quote(group_by)}"
    data = f"--data {shlex.quote(found['data'])} {split}"
    options = " ".join(
        f"--{flag} {found['suggested'][key]['value']}"
        for key, flag in (
            ("image_size", "data.image-size"),
            ("encoder", "encoder"),
            ("augment", "data.augment"),
            ("batch_size", "batch-size"),
        )
    )
    size = f"--data.image-size {found['suggested']['image_size']['value']}"
    return [
        f"furlong partition {data} {size}",
        f"furlong run --method fedu {data} {options} --out runs/mine",
    ]
