"""Slices of NIfTI volumes (.nii, .nii.gz), by nibabel, which the extra ``medical`` installs.

A volume is turned so that its axes point to the patient's right, front and head. A slice is seen
with the head or the front at its top. One window holds for the whole volume, so that
slices can be compared. Voxels count as squares, whatever their extent.
"""

from __future__ import annotations

import gzip
import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.data.reading import (
    EMPTY,
    ByteArray,
    Facts,
    Frame,
    Place,
    Reading,
    Unusable,
    bounds,
    refusing,
    require_pixels,
    span,
    windowed,
)

NAME = "NIfTI"
MAX_VOLUME = 1 << 30  # bytes of voxels, as stored
MAX_SLICES = 20_000  # of one file
_MAX_OFFSET = 1 << 26
# A slice is empty if hardly any pixel is brighter than the air around a patient.
_DARK, _SHARE = 10, 0.01
_lock = threading.Lock()


def is_one(head: bytes, name: str) -> bool:
    """Whether a file that begins with ``head`` is one; a packed one is known by its name."""
    if head.startswith(b"\x1f\x8b"):
        return name.lower().endswith(".nii.gz")
    return head[344:348] == b"n+1\0" or head[4:8] == b"n+2\0"


@dataclass(frozen=True)
class _Volume:
    """Voxels X×Y×Z×C towards right, front, head, as stored; and how to make bytes of them."""

    voxels: NDArray[Any]
    slope: float
    intercept: float
    windows: tuple[tuple[float, float], ...] | None  # of every channel; None: bytes as they are

    def plane(self, axis: int, index: int) -> list[ByteArray]:
        found = []
        for channel in range(self.voxels.shape[3]):
            cut = np.take(self.voxels[..., channel], index, axis=axis)
            if self.windows is None:
                seen = np.asarray(cut)
            else:
                values = cut.astype(np.float32) * self.slope + self.intercept
                seen = windowed(values, *self.windows[channel])
            found.append(np.ascontiguousarray(seen.T[::-1]))
        return found


def slices(path: Path, how: Reading) -> range:
    """The numbers of the slices to be taken, by the file's header alone."""
    with refusing(NAME):
        shape = _header(path, how)[1]
    axis, step = how.cut
    if shape[axis] > MAX_SLICES:
        raise Unusable(f"{shape[axis]:,} slices; the limit is {MAX_SLICES:,}")
    return range(0, shape[axis], step)


def facts(data: Place, how: Reading) -> Facts:
    """The size of a slice and the type of its voxels."""
    path = _path(data)
    with refusing(NAME):
        header, shape = _header(path, how)
        bits = 8 * header.get_data_dtype().itemsize
    axis, _ = how.cut
    width, height = (shape[each] for each in range(3) if each != axis)
    words = {1: "grey", 3: "RGB"}.get(shape[3], f"{shape[3]} channels")
    return Facts(NAME, words, bits // (3 if bits == 24 else 1), width, height, shape[axis])


def planes(data: Place, how: Reading) -> list[ByteArray]:
    """One plane for each channel of a slice; of a whole file, of the one in the middle."""
    path = _path(data)
    with refusing(NAME):
        info = path.stat()
        with _lock:  # one thread reads the volume, the others wait for it
            volume = _volume(path, how, info.st_mtime_ns, info.st_size)
        axis, _ = how.cut
        index = data.index if isinstance(data, Frame) else volume.voxels.shape[axis] // 2
        found = volume.plane(axis, index)
    if all((each > _DARK).mean() < _SHARE for each in found):
        raise Unusable(EMPTY)
    return found


def forget() -> None:
    """Give back the memory of the volumes that were read last."""
    _volume.cache_clear()


def _path(data: Place) -> Path:
    if isinstance(data, bytes):
        raise Unusable("a volume in a column of images; give files")
    return data.path if isinstance(data, Frame) else data


def _library() -> Any:
    try:
        import nibabel
    except ImportError:
        raise Unusable("a NIfTI volume; to read it: pip install nibabel") from None
    return nibabel


def _open(path: Path) -> Any:
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else open(path, "rb")


def _header(path: Path, how: Reading) -> tuple[Any, tuple[int, int, int, int]]:
    """The header, and the lengths of the axes to the right, front and head, and of channels."""
    nib = _library()
    with _open(path) as file:
        head = file.read(540)
    kind, size = (nib.Nifti2Header, 540) if head[4:7] == b"n+2" else (nib.Nifti1Header, 348)
    header = kind(head[:size])
    dtype, shape = header.get_data_dtype(), [int(n) for n in header.get_data_shape()]
    while len(shape) > 3 and shape[-1] == 1:
        shape.pop()
    shape += [1] * (3 - len(shape))
    colour = dtype.names == ("R", "G", "B")
    if len(shape) > 4 - colour or not (colour or dtype.kind in "uif"):
        raise Unusable(f"voxels of {'×'.join(map(str, shape))} and type {dtype}")
    channels = 3 if colour else [*shape, 1][3]
    if channels not in (1, how.channels) and (channels, how.channels) != (3, 1):
        raise Unusable(
            f"{channels} volumes in one file; --data.channels {channels} would take them as "
            "channels"
        )
    total = math.prod(shape) * dtype.itemsize
    if min(shape) < 1 or total > MAX_VOLUME:
        raise Unusable(f"a volume of {total / 1e9:,.1f} GB; the limit is 1 GB")
    order = _orientation(header)
    lengths = [0, 0, 0]
    for axis in range(3):
        lengths[int(order[axis, 0])] = int(shape[axis])
    across = [lengths[axis] for axis in range(3) if axis != how.cut[0]]
    require_pixels(across[0], across[1], channels)
    return header, (lengths[0], lengths[1], lengths[2], channels)


def _orientation(header: Any) -> NDArray[Any]:
    """3×2: where every stored axis goes, and whether it is turned round."""
    nib = _library()
    order: NDArray[Any] = nib.io_orientation(header.get_best_affine())
    if np.isnan(order).any():  # the header says nothing that makes sense
        order = np.array([[0, 1], [1, 1], [2, 1]], dtype=np.float64)
    return order


@lru_cache(maxsize=2)
def _volume(path: Path, how: Reading, modified: int, size: int) -> _Volume:  # noqa: ARG001
    """A volume whose window is known; ``modified`` and ``size`` tell it from what was there."""
    nib = _library()
    header, (*_, channels) = _header(path, how)
    dtype, offset = header.get_data_dtype(), int(header.get_data_offset())
    shape = tuple(int(n) for n in header.get_data_shape())
    count = math.prod(shape)
    if not 0 <= offset <= _MAX_OFFSET:
        raise Unusable(f"voxels that begin at byte {offset:,}")
    with _open(path) as file:
        file.seek(offset)
        data = file.read(count * dtype.itemsize)  # at most MAX_VOLUME, however much is packed
    if len(data) < count * dtype.itemsize:
        raise Unusable(f"truncated: {len(data):,} of {count * dtype.itemsize:,} bytes of voxels")
    voxels = np.frombuffer(data, dtype=dtype).reshape(shape, order="F")
    if dtype.names:
        voxels = np.stack([voxels[name] for name in dtype.names], axis=-1)
    voxels = voxels.reshape((*(*shape, 1, 1)[:3], channels), order="F")
    voxels = nib.orientations.apply_orientation(voxels, _orientation(header))
    slope, intercept = header.get_slope_inter()
    slope, intercept = 1.0 if slope is None else slope, intercept or 0.0
    if voxels.dtype == np.uint8 and (slope, intercept) == (1.0, 0.0):
        return _Volume(voxels, slope, intercept, None)
    return _Volume(voxels, slope, intercept, _windows(voxels, slope, intercept, how))


def _windows(
    voxels: NDArray[Any], slope: float, intercept: float, how: Reading
) -> tuple[tuple[float, float], ...]:
    """The window of every channel, from at most about a million voxels of the whole volume."""
    step = max(1, round((voxels[..., 0].size / (1 << 20)) ** (1 / 3)))
    found = []
    for channel in range(voxels.shape[3]):
        some = voxels[::step, ::step, ::step, channel]
        low, high = sorted(edge * slope + intercept for edge in span(some))
        found.append(bounds(some * slope + intercept, how.limits, (low, high)))
    return tuple(found)
