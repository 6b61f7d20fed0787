"""NumPy's .npy files: H×W, H×W×C or C×H×W numbers of any kind but objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.data.reading import (
    ByteArray,
    Facts,
    Frame,
    Place,
    Reading,
    Unusable,
    refusing,
    require_pixels,
    shallow,
)

NAME = "NPY"


def is_one(head: bytes, name: str) -> bool:  # noqa: ARG001
    """Whether a file that begins with ``head`` is one."""
    return head.startswith(b"\x93NUMPY")


def facts(data: Place, how: Reading) -> Facts:
    """The size and type of an array."""
    values = _opened(data, how)
    channels, height, width = values.shape
    words = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    return Facts(NAME, words, 8 * values.dtype.itemsize, width, height, 1)


def planes(data: Place, how: Reading) -> list[ByteArray]:
    """One H×W plane for each channel."""
    with refusing(NAME):
        return [shallow(np.array(each), how.limits) for each in _opened(data, how)]


def _opened(data: Place, how: Reading) -> NDArray[Any]:
    """C×H×W, not read into memory yet."""
    if isinstance(data, bytes):
        raise Unusable("an array in a column of images; give files")
    path: Path = data.path if isinstance(data, Frame) else data
    with refusing(NAME):  # an object array would need pickle, and is refused by numpy
        values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if values.ndim == 2:
        values = values[None]
    # the channels come last, as in most files, unless only the first length can be theirs
    elif values.ndim == 3 and _fits(values.shape[2], how) >= _fits(values.shape[0], how):
        values = values.transpose(2, 0, 1)
    if values.ndim != 3 or not _fits(values.shape[0], how):
        shape = "×".join(map(str, values.shape))
        raise Unusable(f"an array of {shape}, where data.channels is {how.channels}")
    require_pixels(values.shape[1], values.shape[2], values.shape[0])
    return values


def _fits(length: int, how: Reading) -> int:
    """How well an axis of this length can be the channels: 2 as asked, 1 as grey, 0 not at all."""
    return 2 if length == how.channels else int({length, how.channels} == {1, 3})
