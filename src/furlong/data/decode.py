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
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from furlong.data import arrays, dicom, nifti
from furlong.data.reading import (
    MAX_PIXELS,
    PLAIN,
    ByteArray,
    Facts,
    Frame,
    Place,
    Reading,
    Skipped,
    Unusable,
    printable,
    require_pixels,
    shallow,
)

T = TypeVar("T")
Planes = list[Image.Image]

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
# Below this a PNG is decoded faster than a thread can be handed it: Pillow holds the GIL for most
# of the work on a small image (10,000 CIFAR images: 1.5 s in a plain loop, 1.8 s with two threads).
_THREAD_BYTES = 16_384


class OtherSize(Exception):
    """An image was not of the size that all were assumed to have."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__(f"{size[0]}×{size[1]}")


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
    except FileNotFoundError:
        raise Unusable("there is no such file") from None
    except UnidentifiedImageError:
        raise Unusable(f"not an image in an accepted format ({', '.join(FORMATS)})") from None
    except Exception as error:  # Pillow's decoders raise almost every type on hostile input
        detail = printable(str(error).partition("\n")[0])[:120] or type(error).__name__
        raise Unusable(f"corrupt or truncated: {detail}") from None


def upright(image: Image.Image) -> tuple[int, int]:
    """(width, height) as a viewer shows it: cameras store some photographs lying on a side."""
    width, height = image.size
    return (height, width) if image.getexif().get(0x0112, 1) >= 5 else (width, height)


_OTHERS = {reader.NAME: reader for reader in (dicom, nifti, arrays)}  # what Pillow does not read
IN_PARTS = (dicom.NAME, nifti.NAME)  # every frame or slice of which is an image of its own
HEAD = 352  # bytes of a file by which its kind is known


def sniff(head: bytes, name: str) -> str | None:
    """The kind of file that begins with ``head``: one of `_OTHERS`, or None for Pillow's."""
    return next((kind for kind, reader in _OTHERS.items() if reader.is_one(head, name)), None)


def _reader(data: Place) -> Any:
    """The module that reads ``data``; None: Pillow, or nobody."""
    if isinstance(data, bytes):
        return _OTHERS.get(sniff(data[:HEAD], "") or "")
    path = data.path if isinstance(data, Frame) else data
    try:
        with open(path, "rb") as file:
            return _OTHERS.get(sniff(file.read(HEAD), path.name) or "")
    except OSError:
        return None  # Pillow's way says why


def _whole(data: Place) -> bytes | Path:
    """What Pillow is given; of a part of a file only if that has become another file."""
    return data.path if isinstance(data, Frame) else data


def decode(
    data: Place, size: tuple[int, int] | None, *, exact: bool = False, how: Reading = PLAIN
) -> ByteArray:
    """
    One encoded image as uint8 C×H×W, C being ``how.channels``.

    Args:
        data: the encoded bytes, the file that holds them, or a part of a file.
        size: (H, W) to fill: the shorter side is resized and the centre is kept; None leaves it.
        exact: raise `OtherSize` instead of resizing.
        how: channels, window and slices.

    Raises:
        Unusable: with a reason, for anything that is not an acceptable image.
    """
    reader = _reader(data)
    if reader is not None:
        planes = [Image.fromarray(each) for each in reader.planes(data, how)]
    else:
        with opened(_whole(data)) as image:
            if size is not None and not exact:
                # Lets libjpeg decode a large photograph at a fraction of its resolution.
                image.draft(None, (2 * size[1], 2 * size[0]))
            planes = _planes(image, how)
    height, width = planes[0].height, planes[0].width
    if size is not None and (height, width) != size:
        if exact:
            raise OtherSize((height, width))
        fit = (size[1], size[0])
        planes = [ImageOps.fit(each, fit, method=Image.Resampling.BILINEAR) for each in planes]
    if len(planes) == 1 and planes[0].mode == "RGB":
        return _coloured(np.asarray(planes[0]).transpose(2, 0, 1), how.channels)
    stacked = np.stack([np.asarray(each) for each in planes])
    return _coloured(stacked, how.channels)


def _coloured(pixels: ByteArray, channels: int) -> ByteArray:
    """C×H×W with so many channels: grey is repeated for three, colours become grey for one."""
    found = len(pixels)
    if found == channels:
        return pixels
    if (found, channels) == (1, 3):
        return pixels.repeat(3, axis=0)
    if (found, channels) == (3, 1):
        grey = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).convert("L")
        return np.asarray(grey)[None]
    raise Unusable(f"{found} channel(s), where data.channels is {channels}")


def _planes(image: Image.Image, how: Reading) -> Planes:
    """The planes of an opened image: one in RGB, one grey, or one of every channel."""
    pages = int(getattr(image, "n_frames", 1)) if image.format == "TIFF" else 1
    if how.channels not in (1, 3):
        if pages == how.channels:  # a stack of pages, one for each channel
            return _pages(image, how)
        if image.mode in ("RGBA", "CMYK", "LA") and len(image.getbands()) == how.channels:
            ImageOps.exif_transpose(image, in_place=True)
            return list(image.split())
    ImageOps.exif_transpose(image, in_place=True)  # in place: most are upright, and a copy costs
    if image.mode == "F" or image.mode.startswith("I"):
        return [Image.fromarray(shallow(np.asarray(image), how.limits))]
    return [_to_rgb(image)]


def _pages(image: Image.Image, how: Reading) -> Planes:
    """Every page of a TIFF file as a grey plane."""
    planes: Planes = []
    for page in range(how.channels):
        image.seek(page)
        require_pixels(image.height, image.width, how.channels)
        if planes and image.size != planes[0].size:
            raise Unusable("pages of several sizes cannot be channels of one image")
        deep = image.mode == "F" or image.mode.startswith("I")
        pixels = np.asarray(image if deep else image.convert("L"))
        planes.append(Image.fromarray(shallow(pixels, how.limits)))
    return planes


MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey with alpha",
    "I;16": "grey",
    "I;16B": "grey",
    "I;16L": "grey",
    "I": "grey",
    "F": "grey",
    "P": "palette",
    "PA": "palette with alpha",
    "RGB": "RGB",
    "RGBA": "RGB with alpha",
    "CMYK": "CMYK",
}


def facts(data: Place, how: Reading = PLAIN) -> Facts:
    """What the header of an image says; raises `Unusable` as `decode` does."""
    reader = _reader(data)
    if reader is not None:
        found: Facts = reader.facts(data, how)
        return found
    whole = _whole(data)
    with opened(whole) as image:
        width, height = upright(image)
        frames = int(getattr(image, "n_frames", 1))
        channels = MODES.get(image.mode, image.mode)
        return Facts(image.format or "", channels, _bits(image, whole), width, height, frames)


def _bits(image: Image.Image, data: bytes | Path) -> int:
    """Bits per channel as stored; Pillow's mode does not tell for PNG in colour."""
    if image.format == "PNG":
        if isinstance(data, bytes):
            return data[24]
        with open(data, "rb") as file:
            return file.read(25)[24]
    if image.format == "TIFF":
        stored = getattr(image, "tag_v2", {}).get(258, 8)
        return int(stored[0] if isinstance(stored, tuple) else stored)
    return {"1": 1, "I": 32, "F": 32}.get(image.mode, 16 if image.mode.startswith("I;16") else 8)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        if image.mode in ("RGBa", "La"):  # premultiplied: Pillow only converts to the plain form
            image = image.convert(image.mode[:-1] + "A")
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


Item = tuple[str, Place]


@contextmanager
def many(
    one: Callable[[Place], T],
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
        try:
            yield all_of
        finally:
            nifti.forget()
