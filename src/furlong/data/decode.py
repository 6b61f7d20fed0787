"""Encoded images of unknown origin to pixels, one by one or many in parallel.

Nothing here trusts a file: its kind is sniffed from the content, its pixel count is read from the
header before anything is decoded, and whatever cannot be used is reported with a reason.
"""

from __future__ import annotations

import io
import os
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


@contextmanager
def many(
    one: Callable[[bytes | Path], T],
) -> Iterator[Callable[[list[Item]], list[T | Skipped]]]:
    """``one`` as a function of many named images, in order, in parallel where that is faster.

    An image that ``one`` finds unusable becomes a `Skipped`.
    """

    def tried(item: Item) -> T | Skipped:
        try:
            return one(item[1])
        except Unusable as why:
            return Skipped(item[0], str(why))

    def all_of(items: list[Item]) -> list[T | Skipped]:
        sample = [len(data) if isinstance(data, bytes) else _THREAD_BYTES for _, data in items]
        slow = sum(sample) >= _THREAD_BYTES * len(items)
        return list(pool.map(tried, items)) if slow else [tried(item) for item in items]

    Image.init()  # registers the plug-ins now: doing it lazily from several threads races
    # Pillow's warnings (bombs, odd metadata) are either covered by a reason above or harmless.
    # The filter is process-wide, so it is set here, outside the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        yield all_of
