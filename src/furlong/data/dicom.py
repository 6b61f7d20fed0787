"""DICOM files, by pydicom, which the extra ``medical`` installs.

A frame goes through the steps of the standard: stored values, rescale (or modality table), window
(or its table), and the photometric interpretation. Nothing that a file says of a patient is kept,
shown or written: whose images belong together is told by digests with a salt that no one knows.
"""

from __future__ import annotations

import hashlib
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from furlong.data.reading import (
    ByteArray,
    Facts,
    Frame,
    Place,
    Reading,
    Unusable,
    bounds,
    refusing,
    require_pixels,
    windowed,
)

NAME = "DICOM"
MAX_FRAMES = 20_000  # of one file
_DEFLATED = "1.2.840.10008.1.2.1.99"
_RLE = "1.2.840.10008.1.2.5"
_MAX_RLE = 32 << 20
_SALT = os.urandom(32)  # of this process: digests cannot be compared with those of another
_TAGS = [
    "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated",
    "BitsStored", "PixelRepresentation", "PlanarConfiguration", "NumberOfFrames", "RescaleSlope",
    "RescaleIntercept", "ModalityLUTSequence", "VOILUTSequence", "WindowCenter", "WindowWidth",
    "VOILUTFunction", "PixelPaddingValue", "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence", "PatientID", "StudyInstanceUID",
    *(f"{c}PaletteColorLookupTable{what}" for c in ("Red", "Green", "Blue")
      for what in ("Descriptor", "Data")),
    *(f"Segmented{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
]  # fmt: skip


def is_one(head: bytes, name: str) -> bool:  # noqa: ARG001
    """Whether a file that begins with ``head`` is one."""
    return head[128:132] == b"DICM"


class About(NamedTuple):
    """How many frames a file has; and digests that only tell whether two files have the same."""

    frames: int
    patient: str  # "" if the file does not say
    study: str


def about(path: Path) -> About:
    """What is to be known before pixels are read."""
    with refusing(NAME):
        header = _header(path)
        patient, study = (_digest(header.get(tag)) for tag in ("PatientID", "StudyInstanceUID"))
        return About(int(header.get("NumberOfFrames") or 1), patient, study)


def facts(data: Place, how: Reading) -> Facts:  # noqa: ARG001
    """Size, bits and number of frames."""
    with refusing(NAME):
        header = _kept(data)
        words = "RGB" if header.get("SamplesPerPixel") == 3 else "grey"
        if str(header.PhotometricInterpretation).startswith("PALETTE"):
            words = "palette"
        frames = int(header.get("NumberOfFrames") or 1)
        return Facts(NAME, words, int(header.BitsStored), header.Columns, header.Rows, frames)


def planes(data: Place, how: Reading) -> list[ByteArray]:
    """One H×W plane, or three of a coloured frame; of a whole file, the first frame."""
    with refusing(NAME):
        from pydicom.pixels import apply_color_lut, pixel_array

        header, index = _kept(data), data.index if isinstance(data, Frame) else 0
        path = _path(data)
        _require_decoder(path, header)
        stored = pixel_array(path, index=index)  # in colour: RGB
        if str(header.PhotometricInterpretation).startswith("PALETTE"):
            stored = apply_color_lut(stored, header)
            bits = 8 * stored.dtype.itemsize
        else:
            bits = int(header.BitsStored)
        if stored.ndim == 3:
            coloured = windowed(stored, 0, 2**bits - 1)
            return [np.ascontiguousarray(coloured[..., channel]) for channel in range(3)]
        return [_grey(stored, header, index, how)]


# ---------------------------------------------------------------- headers


def _path(data: Place) -> Path:
    if isinstance(data, bytes):
        raise Unusable("a DICOM file in a column of images; give files")
    return data.path if isinstance(data, Frame) else data


def _kept(data: Place) -> Any:
    """The header of a file, kept while its frames are read one after another."""
    path = _path(data)
    info = path.stat()
    return _last_headers(path, info.st_mtime_ns, info.st_size)


@lru_cache(maxsize=8)
def _last_headers(path: Path, modified: int, size: int) -> Any:  # noqa: ARG001
    return _header(path)


def _header(path: Path) -> Any:
    """The tags of an image, checked: sizes first, before anybody takes memory for pixels."""
    try:
        from pydicom import dcmread
        from pydicom.filereader import read_file_meta_info
    except ImportError:
        raise Unusable("a DICOM file; to read it: pip install pydicom") from None
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # it may quote values of a file
    syntax = str(read_file_meta_info(path).get("TransferSyntaxUID", ""))
    if syntax == _DEFLATED:
        raise Unusable("packed as a whole (deflated), so that its size cannot be known beforehand")
    header = dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
    if "Rows" not in header or "Columns" not in header:
        raise Unusable("a DICOM file without an image")
    samples, frames = int(header.get("SamplesPerPixel", 1)), int(header.get("NumberOfFrames") or 1)
    if samples not in (1, 3):
        raise Unusable(f"{samples} samples per pixel")
    require_pixels(int(header.Rows), int(header.Columns), samples)
    if not 1 <= frames <= MAX_FRAMES:
        raise Unusable(f"{frames:,} frames; the limit is {MAX_FRAMES:,}")
    if int(header.BitsAllocated) not in (1, 8, 16, 32):
        raise Unusable(f"{header.BitsAllocated} bits per pixel")
    return header


def _digest(value: Any) -> str:
    text = str(value or "").strip()
    return hashlib.blake2b(text.encode(), key=_SALT, digest_size=16).hexdigest() if text else ""


def _require_decoder(path: Path, header: Any) -> None:
    """Say which transfer syntax cannot be unpacked here, and refuse what would burst."""
    from pydicom.pixels import get_decoder

    syntax = header.file_meta.TransferSyntaxUID
    try:
        ready = get_decoder(syntax).is_available
    except NotImplementedError:
        ready = False
    if not ready:
        raise Unusable(
            f"compressed as {syntax.name}, for which no decoder is installed: pip install "
            "pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg"
        )
    if syntax == _RLE and path.stat().st_size > _MAX_RLE:
        raise Unusable("run lengths of more than 32 MB, which may unpack to 64 times as much")


# ---------------------------------------------------------------- values


def _of_frame(header: Any, index: int, sequence: str, tag: str) -> Any:
    """A value of the frame's own group, else of the shared one, else of the file."""
    for groups, number in (
        (header.get("PerFrameFunctionalGroupsSequence"), index),
        (header.get("SharedFunctionalGroupsSequence"), 0),
    ):
        inner = groups[number].get(sequence) if groups and number < len(groups) else None
        if inner and inner[0].get(tag) is not None:
            return inner[0].get(tag)
    return header.get(tag)


def _grey(stored: NDArray[Any], header: Any, index: int, how: Reading) -> ByteArray:
    """Stored values H×W of a grey frame as bytes, black being the least."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    transform = "PixelValueTransformationSequence"
    slope, intercept = (
        float(default if (value := _of_frame(header, index, transform, tag)) is None else value)
        for tag, default in (("RescaleSlope", 1), ("RescaleIntercept", 0))
    )
    bits, signed = int(header.BitsStored), bool(header.get("PixelRepresentation"))
    full = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    if header.get("ModalityLUTSequence"):
        values = apply_modality_lut(stored, header).astype(np.float32)
        full = (0.0, 2.0 ** int(header.ModalityLUTSequence[0].LUTDescriptor[2]) - 1)
    else:
        values = stored.astype(np.float32) * np.float32(slope) + np.float32(intercept)
        low, high = sorted(edge * slope + intercept for edge in full)
        full = (low, high)
    padding = header.get("PixelPaddingValue")
    outside = None if padding is None else stored == int(padding)
    window, own = how.limits, _own_window(header, index)
    if window.kind == "auto" and header.get("VOILUTSequence"):
        table = header.VOILUTSequence[0]
        looked_up = apply_voi(values.astype(stored.dtype), header)
        seen = windowed(looked_up, 0, 2.0 ** int(table.LUTDescriptor[2]) - 1)
    elif window.kind == "auto" and own is not None:
        seen = _seen_through(values, *own)
    else:
        deep = bits > 8 or (slope, intercept) != (1.0, 0.0)
        inside = values if outside is None or outside.all() else values[~outside]
        seen = windowed(values, *(bounds(inside, window, full) if deep else full))
    if header.PhotometricInterpretation == "MONOCHROME1":
        seen = 255 - seen
    if outside is not None:
        seen[outside] = 0  # what lies outside of the scanned circle
    return seen


def _own_window(header: Any, index: int) -> tuple[float, float, str] | None:
    """The file's first window: centre, width, and the name of its function."""
    found: list[Any] = []
    for tag in ("WindowCenter", "WindowWidth", "VOILUTFunction"):
        value = _of_frame(header, index, "FrameVOILUTSequence", tag)
        several = hasattr(value, "__len__") and not isinstance(value, str)
        found.append(value[0] if several and len(value) else value)
    centre, width, function = found
    if centre in (None, "") or width in (None, "") or not float(width) > 0:
        return None
    return float(centre), float(width), str(function or "LINEAR")


def _seen_through(values: NDArray[Any], centre: float, width: float, function: str) -> ByteArray:
    """The three functions of the standard (PS3.3 C.11.2.1)."""
    if function == "SIGMOID":
        curve = 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -60, 60)))
        return windowed(curve, 0, 1)
    if function == "LINEAR_EXACT":
        return windowed(values, centre - width / 2, centre + width / 2)
    half = (width - 1) / 2  # LINEAR counts whole values
    return windowed(values, centre - 0.5 - half, centre - 0.5 + half)
