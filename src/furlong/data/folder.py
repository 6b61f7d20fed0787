"""Decode image files of unknown origin, and list the folders that hold them.

Nothing here trusts a file: its kind is sniffed from the content, its pixel count is read from the
header before anything is decoded, and whatever cannot be used is reported with a reason.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

ByteArray = NDArray[np.uint8]
T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
MAX_PIXELS = 50_000_000
MAX_FILE_BYTES = 200_000_000
_MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"BM",
    b"GIF8",
    b"II*\0",
    b"MM\0*",
    *(b"P%d" % kind for kind in range(1, 7)),
)
# Below this a PNG is decoded faster than a thread can be handed it: Pillow holds the GIL for most
# of the work on a small image (10,000 CIFAR images: 1.5 s in a plain loop, 1.8 s with two threads).
_THREAD_BYTES = 16_384


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str


class Unusable(Exception):
    """One image cannot be used; the message is the reason given to the person."""


class OtherSize(Exception):
    """An image was not of the size that all were assumed to have."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__(f"{size[0]}×{size[1]}")


def printable(text: str) -> str:
    """``text`` with control characters and undecodable bytes escaped, safe to print or store."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def opened(data: bytes | Path) -> Iterator[Image.Image]:
    """
    An image whose header has been read; its pixels may be decoded inside.

    Raises:
        Unusable: with a reason, for anything that is not an acceptable image.
    """
    try:
        with (
            open(data, "rb") if isinstance(data, Path) else io.BytesIO(data) as file,
            Image.open(file, formats=FORMATS) as image,
        ):
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Unusable(f"{width}×{height} pixels; the limit is 50 megapixels")
            yield image
    except Unusable:
        raise
    except Image.DecompressionBombError:
        raise Unusable("decompression bomb; the limit is 50 megapixels") from None
    except PermissionError:
        raise Unusable("unreadable: permission denied") from None
    except UnidentifiedImageError:
        raise Unusable(f"not an image in an accepted format ({', '.join(FORMATS)})") from None
    except Exception as error:  # Pillow's decoders raise almost every type on hostile input
        detail = printable(str(error).partition("\n")[0])[:120] or type(error).__name__
        raise Unusable(f"corrupt or truncated: {detail}") from None


def upright(image: Image.Image) -> tuple[int, int]:
    """(width, height) as a viewer shows it: cameras store some photographs lying on a side."""
    width, height = image.size
    return (height, width) if image.getexif().get(0x0112, 1) >= 5 else (width, height)


def decode(data: bytes | Path, size: tuple[int, int] | None, *, exact: bool = False) -> ByteArray:
    """
    One encoded image as uint8 3×H×W.

    Args:
        data: the encoded bytes, or the file that holds them.
        size: (H, W) to fill: the shorter side is resized and the centre is kept; None leaves it.
        exact: raise `OtherSize` instead of resizing.

    Raises:
        Unusable: with a reason, for anything that is not an acceptable image.
    """
    with opened(data) as image:
        if size is not None and not exact:
            # Lets libjpeg decode a large photograph at a fraction of its resolution.
            image.draft(None, (2 * size[1], 2 * size[0]))
        rgb = _to_rgb(ImageOps.exif_transpose(image))
    if size is not None and (rgb.height, rgb.width) != size:
        if exact:
            raise OtherSize((rgb.height, rgb.width))
        rgb = ImageOps.fit(rgb, (size[1], size[0]), method=Image.Resampling.BILINEAR)
    return np.asarray(rgb).transpose(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise Unusable("floating-point pixels, whose range is unknown")
    if image.mode.startswith("I"):  # 16-bit grayscale, which convert("RGB") would clip at 255
        wide = np.asarray(image).astype(np.float32) / 257
        return Image.fromarray(wide.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        if image.mode in ("RGBa", "La"):  # premultiplied: Pillow only converts to the plain form
            image = image.convert(image.mode[:-1] + "A")
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


Item = tuple[str, bytes | Path]
Decoded = ByteArray | Skipped


@contextmanager
def decoder(
    size: tuple[int, int] | None, *, exact: bool = False
) -> Iterator[Callable[[list[Item]], list[Decoded]]]:
    """A function that decodes many images, in order, each to an array 3×H×W or a `Skipped`."""

    def one(item: Item) -> Decoded:
        try:
            return decode(item[1], size, exact=exact)
        except Unusable as why:
            return Skipped(item[0], str(why))

    with threads(one) as many:
        yield many


@contextmanager
def threads(one: Callable[[Item], T]) -> Iterator[Callable[[list[Item]], list[T]]]:
    """``one`` as a function of many items, in order and in parallel where that is faster."""

    def many(items: list[Item]) -> list[T]:
        sample = [len(data) if isinstance(data, bytes) else _THREAD_BYTES for _, data in items]
        slow = sum(sample) >= _THREAD_BYTES * len(items)
        return list(pool.map(one, items)) if slow else [one(item) for item in items]

    Image.init()  # registers the plug-ins now: doing it lazily from several threads races
    # Pillow's warnings (bombs, odd metadata) are either covered by a reason above or harmless.
    # The filter is process-wide, so it is set here, outside the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        yield many


def scan(root: Path) -> tuple[list[str], list[Skipped]]:
    """
    The images below ``root`` and everything else that is there.

    Returns:
        Relative POSIX paths of the files that start like an image, sorted; and the rest, sorted,
        with reasons. Hidden folders and links to folders count as one entry and are not entered.
    """
    found: list[str] = []
    skipped: list[Skipped] = []

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(root).as_posix()
        skipped.append(Skipped(printable(where), "unreadable folder"))

    inside = root.resolve()
    for top, folders, files in os.walk(root, onerror=unreadable, followlinks=False):
        here = Path(top).relative_to(root)
        for folder in list(folders):
            link = os.path.islink(os.path.join(top, folder))
            if link or folder.startswith("."):
                folders.remove(folder)
                reason = "symbolic link to a folder" if link else "hidden folder"
                skipped.append(Skipped(printable((here / folder).as_posix()), reason))
        for file in files:
            name = (here / file).as_posix()
            refusal = _refusal(Path(top, file), inside)
            if refusal is None:
                found.append(name)
            else:
                skipped.append(Skipped(printable(name), refusal))
    return sorted(found), sorted(skipped, key=lambda each: each.name)


def _refusal(path: Path, inside: Path) -> str | None:
    """Why ``path`` is not even worth decoding; None if it looks like an image."""
    if path.name.startswith("."):
        return "not an image (hidden file)"
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(inside):
            return "symbolic link out of the folder"
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            return "not a regular file"
        if info.st_size == 0:
            return "empty file"
        if info.st_size > MAX_FILE_BYTES:
            return f"file of {info.st_size / 1e6:.0f} MB; the limit is 200 MB"
        with open(path, "rb") as file:
            head = file.read(16)
    except PermissionError:
        return "unreadable: permission denied"
    except (OSError, RuntimeError) as error:  # RuntimeError: a symbolic link that loops
        return f"unreadable: {getattr(error, 'strerror', None) or 'symbolic link loop'}"
    webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    return None if webp or head.startswith(_MAGIC) else "not an image"
