"""How files become pixels of 8 bits: channels, the window of deep images, slices of volumes.

A deep image has more than 8 bits per channel, or floating-point numbers. Its window is the range of
values that becomes 0 to 255; what is below is black, what is above is white.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from furlong.errors import FurlongError, nearest

ByteArray = NDArray[np.uint8]
MAX_PIXELS = 50_000_000
MAX_FILE_BYTES = 200_000_000
EMPTY = "an empty slice"
PLANES = ("sagittal", "coronal", "axial")  # across a volume's axes to the right, the front, the top
_SAMPLE = 1 << 20  # values that percentiles are taken of


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str

    @property
    def is_empty(self) -> bool:
        """A slice of a volume that shows nothing: nothing is wrong with the file."""
        return self.reason == EMPTY


def by_file(skipped: Iterable[Skipped]) -> list[Skipped]:
    """Sorted by name; images of one file (``NAME#k``) with the same reason count as one."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in skipped:
        file, mark, index = each.name.rpartition("#")
        of_file = bool(mark) and index.isascii() and index.isdigit()
        found.setdefault((file if of_file else each.name, each.reason), []).append(each.name)
    lines = [
        Skipped(names[0], reason)
        if len(names) == 1
        else Skipped(file, f"{reason}, {len(names):,} images of it")
        for (file, reason), names in found.items()
    ]
    return sorted(lines, key=lambda each: each.name)


class Unusable(Exception):
    """One image cannot be used; the message is the reason given to the person."""


@dataclass(frozen=True)
class Frame:
    """One of several images in a file: a frame of a DICOM file, a slice of a volume."""

    path: Path
    index: int


Place = bytes | Path | Frame
"""Where one image is: its encoded bytes, a file, or a part of a file."""


class Facts(NamedTuple):
    """What a file's header says of one image in it; ``frames``: how many images the file holds."""

    format: str
    channels: str
    bits: int
    width: int
    height: int
    frames: int


class Window(NamedTuple):
    """A parsed window; ``low`` and ``high`` are percentiles, or values of a ``fixed`` one."""

    kind: str  # auto, percentile, full or fixed
    low: float
    high: float


@dataclass(frozen=True)
class Reading:
    """How image files are read; a run's ``data.channels``, ``data.window`` and ``data.slices``."""

    channels: int = 3
    window: str = "auto"
    slices: str = "axial"

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, before any file is read."""
        _ = self.limits, self.cut

    @cached_property
    def limits(self) -> Window:
        """The window: ``auto``, ``percentile[:LOW:HIGH]``, ``full`` or ``LOW:HIGH``."""
        word, *numbers = self.window.split(":")
        if word in ("auto", "full", "percentile") and not numbers:
            return Window(word, 1.0, 99.0)
        if percentile := word == "percentile":
            word, numbers = numbers[0], numbers[1:]
        try:
            low, high = float(word), float(":".join(numbers))
        except ValueError:
            low = high = math.nan
        inside = 0 <= low < high <= 100 if percentile else math.isfinite(low) and low < high
        if not inside or not math.isfinite(high):
            raise FurlongError(
                f"data.window is {self.window!r}; it must be auto, percentile, "
                "percentile:LOW:HIGH (of 100), full, or LOW:HIGH with LOW below HIGH."
            )
        return Window("percentile" if percentile else "fixed", low, high)

    @cached_property
    def cut(self) -> tuple[int, int]:
        """The axis that slices of a volume lie across, and the step from one to the next."""
        word, colon, step = self.slices.partition(":")
        if word not in PLANES or (colon and not (step.isascii() and step.isdigit() and int(step))):
            hint = nearest(word, PLANES) if word not in PLANES else "The step is a whole number."
            raise FurlongError(
                f"data.slices is {self.slices!r}; write axial, or axial:3 for every third. {hint}"
            )
        return PLANES.index(word), int(step or 1)


PLAIN = Reading()


def printable(text: str) -> str:
    """``text`` with control characters and undecodable bytes escaped, safe to print or store."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Whatever a library raises on a hostile file becomes a reason.

    Its own words are left out: those of a DICOM library may quote what the file says of a patient.
    """
    try:
        yield
    except Unusable:
        raise
    except PermissionError:
        raise Unusable("unreadable: permission denied") from None
    except Exception as error:
        raise Unusable(f"corrupt or truncated {kind} file ({type(error).__name__})") from None


def require_pixels(height: int, width: int, planes: int = 1) -> None:
    """Refuse an image of no size, or of too large a one, before memory is taken for it."""
    if height < 1 or width < 1:
        raise Unusable(f"{width}×{height} pixels")
    if height * width > MAX_PIXELS or height * width * planes > 4 * MAX_PIXELS:
        raise Unusable(f"{width}×{height} pixels in {planes} plane(s); the limit is 50 megapixels")


def bounds(values: NDArray[Any], window: Window, full: tuple[float, float]) -> tuple[float, float]:
    """The lowest and highest value that stay apart; ``full``: what values of this type can be."""
    if window.kind == "fixed":
        return window.low, window.high
    if window.kind == "full":
        return full
    flat = values.reshape(-1)
    flat = flat[:: max(1, flat.size // _SAMPLE)]
    known = flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat
    if not known.size:
        raise Unusable("no pixel has a finite value")
    low, high = np.percentile(known, (window.low, window.high))
    if low == high:  # a few bright spots on a dark ground
        low, high = known.min(), known.max()
    return float(low), float(high)


def span(values: NDArray[Any]) -> tuple[float, float]:
    """What values of the array's type can be; of floats, those that are there."""
    if values.dtype.kind == "b":
        return 0.0, 1.0
    if values.dtype.kind in "ui":
        info = np.iinfo(values.dtype)
        return float(info.min), float(info.max)
    known = values[np.isfinite(values)]
    if not known.size:
        raise Unusable("no pixel has a finite value")
    return float(known.min()), float(known.max())


def windowed(values: NDArray[Any], low: float, high: float) -> ByteArray:
    """Values of any shape as bytes: ``low`` and less is 0, ``high`` and more is 255."""
    scaled = (values.astype(np.float32) - np.float32(low)) * np.float32(
        255 / max(high - low, 1e-30)
    )
    result: ByteArray = np.nan_to_num(scaled, nan=0.0).clip(0, 255).round().astype(np.uint8)
    return result


def shallow(values: NDArray[Any], window: Window) -> ByteArray:
    """H×W of any number type as bytes: 8-bit values as they are, others by the window."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "buif":
        raise Unusable(f"pixels of type {values.dtype}")
    if values.dtype.kind == "b":
        return values.astype(np.uint8) * np.uint8(255)
    return windowed(values, *bounds(values, window, span(values)))
