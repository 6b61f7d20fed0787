"""Lossy transport for those who ask for it: large float32 tensors as float16 or int8.

``encode`` makes the one buffer that is sent, ``decode`` reads it, whatever it was made by::

    packed, residual = encode(upload, "int8", base=down, residual=residual)  # at the client
    upload = decode(packed, base=down, limit=most)                           # at the server

Weights: x̂ = base + Q(x - base + r), r ← r + x - x̂. The difference to what the other side has is
small, and so is its rounding error; what rounding loses is kept as the residual r and sent next
time (error feedback: Seide et al. 2014, Karimireddy et al. 2019). Features, lone tensors of a
payload, belong to other images every time, so that nothing can make up for their errors later: they
go by themselves, and never coarser than float16.

Q is rounding to float16 (cut at ±65504), or to scale·{-127 … 127} with scale = max|row| / 127 for
each row of dimension 0. Small tensors and BatchNorm statistics travel exactly. All arithmetic is
elementwise or a maximum: the same bits on any machine, with any number of threads.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from furlong.core.layout import PayloadError
from furlong.core.payload import (
    Weights,
    flatten,
    is_buffer,
    pack,
    pack_tensors,
    parts,
    restored,
    unpack_tensors,
)
from furlong.core.weights import first_nonfinite
from furlong.errors import FurlongError, nearest

How = Literal["exact", "float16", "int8"]
SMALLEST = 256  # elements: less is not worth a rounding error
SHORTEST = 8  # elements of a row that has a scale of its own
_HALF = 65504.0  # the largest float16
_TINY = torch.finfo(torch.float32).tiny
_CODECS = {  # as the metadata names them: type on the wire, and whether it is added to the base
    "float16": (torch.float16, False),
    "float16 difference": (torch.float16, True),
    "int8": (torch.int8, False),
    "int8 difference": (torch.int8, True),
}


def encode(
    value: Any, how: How, base: Any = None, residual: Weights | None = None
) -> tuple[bytearray, Weights]:
    """The buffer to send, and what the receiver will still lack of the weights, by path.

    ``base`` is a payload that the receiver has too, bit for bit; weights of the same path and shape
    in it are sent as differences. ``residual`` is what the last call gave, for the same receiver.
    A base that is itself what the receiver decoded last of this payload needs no residual: the
    difference to it holds the error already.
    """
    lacking = dict(residual or {})
    if how == "exact":
        return pack(value), lacking
    if how not in get_args(How):
        raise FurlongError(f"unknown encoding {how!r}. {nearest(how, get_args(How))}")
    tensors, tree = flatten(value)
    there = {} if base is None else flatten(base)[0]
    weights = {path for path, kind, *_ in parts(value) if kind == "params"}
    codecs: dict[str, str] = {}
    scales: list[Tensor] = []
    sent = dict(tensors)
    for path in sorted(path for path, tensor in tensors.items() if _rounded(path, tensor)):
        exact = tensors[path].detach().contiguous()
        start = _at(there, path, exact.shape) if path in weights else None
        lost = _at(lacking, path, exact.shape) if path in weights else None
        wanted = exact if start is None else exact - start
        wanted = wanted if lost is None else wanted + lost
        coarse = how == "int8" and path in weights
        sent[path], scale = _int8(wanted) if coarse else _float16(wanted)
        scales += [] if scale is None else [scale]
        still = exact - _decoded(sent[path], scale, start)
        still = still if lost is None else still.add_(lost)
        if not torch.isfinite(still.sum(dtype=torch.float64)):
            raise FurlongError(
                f"{path} holds NaN, infinity or numbers near it: it cannot be sent as {how}."
            )
        if path in weights:
            lacking[path] = still
        name = str(sent[path].dtype).removeprefix("torch.")
        codecs[path] = name if start is None else f"{name} difference"
    metadata = {"furlong": json.dumps(tree), "codecs": json.dumps(codecs)}
    if scales:
        metadata["scales"] = "scales"
        while metadata["scales"] in tensors:
            metadata["scales"] += "_"
        sent[metadata["scales"]] = torch.cat(scales)
    return pack_tensors(sent, metadata), lacking


def decode(buffer: Any, base: Any = None, limit: int | None = None) -> Any:
    """The payload in a buffer of :func:`encode` or of ``pack``. Raises :class:`PayloadError`.

    ``base`` as it was given to ``encode``; ``limit`` is the most bytes that the tensors may take.
    """
    tensors, metadata = unpack_tensors(buffer)
    how: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    if "codecs" in metadata:
        tensors, how = _read(tensors, metadata, base)
    size = sum(t.numel() * (4 if path in how else t.itemsize) for path, t in tensors.items())
    if limit is not None and size > limit:
        raise PayloadError(f"a payload of {size} bytes is refused (limit {limit})")
    decoded = {path: _decoded(tensors[path], *rest) for path, rest in how.items()}
    bad = first_nonfinite(decoded)
    if bad is not None:
        raise PayloadError(f"tensor {bad!r} holds NaN or infinity")
    return restored(tensors | decoded, metadata)


# ---------------------------------------------------------------- one tensor


def _rounded(path: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a tensor, which travels as ``dtype``, is one of those that are rounded."""
    fits = tensor.dtype == dtype and tensor.numel() >= SMALLEST and tensor.dim() <= 8
    return fits and not is_buffer(path)


def _at(tensors: Weights, path: str, shape: torch.Size) -> Tensor | None:
    """The float32 tensor at ``path``, if there is one of this shape."""
    found = tensors.get(path)
    if found is None or found.shape != shape or found.dtype != torch.float32:
        return None
    return found.detach().contiguous()


def _rows(shape: torch.Size) -> int:
    """How many scales a tensor has: one per row of dimension 0, or one if rows are short."""
    return shape[0] if math.prod(shape[1:]) >= SHORTEST else 1


def _float16(wanted: Tensor) -> tuple[Tensor, None]:
    """float16 of the same shape, which needs no scale."""
    return wanted.clamp(-_HALF, _HALF).to(torch.float16), None


def _int8(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of the same shape, and the scale of each row."""
    rows = wanted.view(_rows(wanted.shape), -1)
    scale = torch.linalg.vector_norm(rows, math.inf, dim=1) / 127
    scale[scale < _TINY] = 0.0  # a row of zeros, or nearly
    steps = rows / torch.where(scale == 0, 1.0, scale)[:, None]
    return steps.round_().to(torch.int8).view(wanted.shape), scale


def _decoded(coded: Tensor, scale: Tensor | None, start: Tensor | None) -> Tensor:
    """What the receiver makes of it; rounded twice, never in a fused multiply-add."""
    value = coded.to(torch.float32)
    if scale is not None:
        value.view(len(scale), -1).mul_(scale[:, None])
    return value if start is None else value.add_(start)


# ---------------------------------------------------------------- a stranger's buffer


def _read(
    tensors: Weights, metadata: dict[str, str], base: Any
) -> tuple[Weights, dict[str, tuple[Tensor | None, Tensor | None]]]:
    """The payload's tensors; for the rounded ones their scales and what they are added to."""
    tensors = dict(tensors)
    try:
        codecs = {path: _CODECS[word] for path, word in json.loads(metadata["codecs"]).items()}
        wrong = [p for p, (dtype, _) in codecs.items() if not _rounded(p, tensors[p], dtype)]
        paths = sorted(path for path, (dtype, _) in codecs.items() if dtype == torch.int8)
        rows = [_rows(tensors[path].shape) for path in paths]
        scales = tensors.pop(metadata["scales"]) if paths else torch.empty(0)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PayloadError(f"tensors in an unknown encoding: {str(error)[:200]}") from None
    if wrong:
        raise PayloadError(f"tensors that are not encoded as they say: {wrong[:3]}")
    if scales.dtype != torch.float32 or scales.shape != (sum(rows),):
        raise PayloadError(f"scales {tuple(scales.shape)} of {scales.dtype} for {sum(rows)} rows")
    if not bool(((scales >= 0) & (scales < math.inf)).all()):
        raise PayloadError("a scale is negative, NaN or infinite")
    scale = dict(zip(paths, torch.split(scales, rows), strict=True))
    there = {} if base is None else flatten(base)[0]
    how: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for path, (_, differs) in codecs.items():
        start = _at(there, path, tensors[path].shape) if differs else None
        if differs and start is None:
            raise PayloadError(f"tensor {path!r} is a difference to one that is not here")
        how[path] = scale.get(path), start
    return tensors, how
