"""Where the tensors of a safetensors file are: its header, written and read.

The same payloads come again and again, so a layout is remembered: a client's answer has the header
of all other answers, but for the metadata, which are its first entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from furlong.errors import FurlongError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA = '{"__metadata__":'  # every header of ours begins so
_COMPACT = (",", ":")
_KEPT = 32  # layouts that are remembered …
_LONGEST = 1 << 20  # … if their text has no more characters

_Looks = tuple[tuple[str, torch.dtype, torch.Size], ...]
_Entry = tuple[torch.dtype, list[int], int, int]


class PayloadError(FurlongError):
    """Bytes that are not a payload, or not one that this program knows."""


@dataclass(frozen=True)
class Run:
    """Tensors of one type that follow each other in a buffer."""

    dtype: torch.dtype
    begin: int  # the byte of the first one
    names: tuple[str, ...]
    sizes: list[int]  # elements
    shapes: tuple[tuple[int, ...], ...]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors, as parts of ``flat``."""
        parts = torch.split(flat, self.sizes)
        each = zip(self.names, parts, self.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in each}


@dataclass(frozen=True)
class Layout:
    """Tensors in a buffer, wide types first, so that each is aligned."""

    runs: tuple[Run, ...]
    total: int  # bytes
    entries: str  # the header's text behind the metadata


def packed_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of their places: wide types first, so that every one is aligned."""
    return [name for run in layout(tensors).runs for name in run.names]


def layout(tensors: Mapping[str, Tensor]) -> Layout:
    """The places of ``tensors``."""
    return _layout(tuple((name, t.dtype, t.shape) for name, t in tensors.items()))


@lru_cache(_KEPT)
def _layout(looks: _Looks) -> Layout:
    entries, placed, offset = "", [], 0
    for name, dtype, shape in sorted(looks, key=lambda look: (-look[1].itemsize, look[0])):
        end = offset + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _CODES.get(dtype), "shape": list(shape), "data_offsets": [offset, end]}
        entries += f",{json.dumps(name)}:{json.dumps(entry, separators=_COMPACT)}"
        placed.append((name, (dtype, list(shape), offset, end)))
        offset = end
    return Layout(_runs(placed), offset, entries + "}")


def _runs(placed: Iterable[tuple[str, _Entry]]) -> tuple[Run, ...]:
    """Tensors in the order of their places, those of the same type together."""
    runs = []
    for dtype, together in groupby(placed, lambda entry: entry[1][0]):
        run = list(together)
        shapes = tuple(tuple(shape) for _, (_, shape, _, _) in run)
        sizes = [math.prod(shape) for shape in shapes]
        runs.append(Run(dtype, run[0][1][2], tuple(name for name, _ in run), sizes, shapes))
    return tuple(runs)


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with ``tensors``."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which has no wire format")
    about = json.dumps(dict(metadata), separators=_COMPACT)
    text = f"{_METADATA}{about}{layout(tensors).entries}".encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(text: bytes, room: int) -> tuple[dict[str, str], Layout]:
    """Metadata, and the layout of tensors that fill ``room`` bytes; else :class:`PayloadError`."""
    try:
        metadata, entries = _parted(text.decode(errors="surrogatepass"))
        found = {str(k): str(v) for k, v in metadata.items()}
        read = _read if len(entries) < _LONGEST else _read.__wrapped__
        places = read(entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PayloadError(f"a broken safetensors header: {str(error)[:200]}") from None
    if places.total != room:
        raise PayloadError(f"tensors of {places.total} bytes in a place of {room} bytes")
    return found, places


def _parted(text: str) -> tuple[Any, str]:
    """The metadata, and the header without them as JSON: by itself it is the same every time."""
    if not text.startswith(_METADATA):
        whole = json.loads(text)
        return whole.pop("__metadata__", {}), json.dumps(whole)
    metadata, end = json.JSONDecoder().raw_decode(text, len(_METADATA))
    if text.startswith(',"', end):
        return metadata, "{" + text[end + 1 :]
    if text[end:].strip() != "}":
        raise ValueError("the metadata have no end")
    return metadata, "{}"


@lru_cache(_KEPT)
def _read(entries: str) -> Layout:
    """What a header describes: tensors without gaps, none in the place of another."""
    found = {name: _entry(entry) for name, entry in json.loads(entries).items()}
    placed, covered = sorted(found.items(), key=lambda entry: entry[1][2:]), 0
    for name, (dtype, shape, begin, end) in placed:
        count = math.prod(shape)
        if begin != covered or end - begin != count * dtype.itemsize:
            raise ValueError(f"tensor {name!r} does not fit its place")
        covered = end
        if not count and max(shape) >= 2**31:
            raise ValueError(f"tensor {name!r} is empty and yet has shape {shape}")
    return Layout(_runs(placed), covered, entries)


def _entry(entry: dict[str, Any]) -> _Entry:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    whole = [*shape, begin, end]
    if not all(type(n) is int and 0 <= n < 2**62 for n in whole):
        raise ValueError(f"sizes {whole}")
    if math.prod(max(1, n) for n in shape) >= 2**62:
        raise ValueError(f"shape {shape}")
    return dtype, shape, begin, end
