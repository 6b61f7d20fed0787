"""Everything that is sent, kept or saved: plain data in the safetensors format, never pickle.

A payload is a frozen dataclass made by :func:`payload`. Its fields are tensors, weights (tensors by
name), numbers, strings, ``None``, other payloads, or dicts and tuples of these. ``pack`` lays one
out in a single buffer (a safetensors file: JSON header, then raw little-endian tensors) and
``unpack`` reads it back without copying: the tensors are views of the buffer. Only classes that
were registered by ``@payload`` can come out of ``unpack``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import IO, Any, TypeVar, dataclass_transform, overload

import torch
from torch import Tensor

from furlong.core.layout import PayloadError, header, layout, packed_order, read_header

Weights = dict[str, Tensor]
"""A module's state by parameter and buffer name; values, never modules."""

T = TypeVar("T")
_REGISTRY: dict[str, type] = {}
_MAX_HEADER = 100_000_000


@overload
def payload(cls: type[T], /) -> type[T]: ...
@overload
def payload(name: str, /) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def payload(cls: Any, /) -> Any:
    """Make a class a frozen dataclass that can be packed and unpacked.

    Files and messages name the class: by module and class, or, as ``@payload("name")``, by a name
    that stays when the class moves to another module. Some of ours are the names of modules that
    are gone: files of earlier versions have them.
    """
    if isinstance(cls, str):
        return lambda named: _register(cls, named)
    return _register(f"{cls.__module__}.{cls.__qualname__}", cls)


def _register(name: str, cls: type[T]) -> type[T]:
    made = dataclass(frozen=True)(cls)
    made._payload = name  # type: ignore[attr-defined]
    _REGISTRY[name] = made
    return made


# ---------------------------------------------------------------- values <-> (tensors, JSON tree)


def flatten(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Split ``value`` into its tensors by path (``field/key``) and a JSON tree of the rest."""
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(value, "", tensors)


def join(path: str, name: object) -> str:
    """The path of what is called ``name`` below ``path``; the root has an empty path."""
    return f"{path}/{name}" if path else str(name)


def _name(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> None:
    if path in tensors:
        raise ValueError(f"two tensors would be called {path!r}")
    tensors[path] = tensor


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        _name(value, path, tensors)
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # JSON has no NaN and no infinity
        return value if math.isfinite(value) else {"float": repr(value)}
    if is_dataclass(value) and not isinstance(value, type):
        name = vars(type(value)).get("_payload")
        if name is None:
            raise TypeError(
                f"{type(value).__qualname__} is not a payload: decorate it with @payload"
            )
        items = {
            f.name: _encode(getattr(value, f.name), join(path, f.name), tensors)
            for f in fields(value)
        }
        return {"payload": name, "fields": items}
    if isinstance(value, dict):
        if value and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items()):
            for key, tensor in value.items():
                _name(tensor, join(path, key), tensors)
            return {"weights": path, "names": list(value)}
        return {"dict": [[k, _encode(v, join(path, k), tensors)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        return {"tuple": [_encode(v, join(path, i), tensors) for i, v in enumerate(value)]}
    raise TypeError(f"a payload cannot hold {type(value).__name__} at {path!r}")


def rebuild(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`flatten`."""
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"tensor": str(path)}:
            return tensors[path]
        case {"float": str(text)}:
            return float(text)
        case {"weights": str(path), "names": list(names)}:
            return {name: tensors[join(path, name)] for name in names}
        case {"dict": list(pairs)}:
            return {key: rebuild(item, tensors) for key, item in pairs}
        case {"tuple": list(items)}:
            return tuple(rebuild(item, tensors) for item in items)
        case {"payload": str(name), "fields": dict(items)} if name in _REGISTRY:
            return _REGISTRY[name](**{k: rebuild(v, tensors) for k, v in items.items()})
        case {"payload": name}:
            raise PayloadError(f"unknown kind of payload {name!r}")
    raise PayloadError(f"not a payload's structure: {str(tree)[:80]}")


def replace_tensors(value: T, tensors: Mapping[str, Tensor]) -> T:
    """``value`` with the tensors at the given paths exchanged."""
    own, tree = flatten(value)
    result: T = rebuild(tree, own | dict(tensors))
    return result


def split_weights(value: T, leave_out: Callable[[str], bool]) -> tuple[T, dict[str, Tensor]]:
    """``value`` without the weights whose name satisfies ``leave_out``, and those by path."""
    tensors, tree = flatten(value)
    removed: dict[str, Tensor] = {}

    def prune(node: Any) -> Any:
        match node:
            case {"weights": str(path), "names": list(names)}:
                kept = [name for name in names if not leave_out(name)]
                gone = [join(path, name) for name in names if name not in kept]
                removed.update({name: tensors[name] for name in gone})
                return {"weights": path, "names": kept}
            case dict():
                return {key: prune(item) for key, item in node.items()}
            case list():
                return [prune(item) for item in node]
        return node

    result: T = rebuild(prune(tree), tensors)
    return result, removed


# ---------------------------------------------------------------- tensors in one piece of memory


def room_for(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors on the CPU of the same names, types and shapes, that :func:`joined` joins."""
    room: dict[str, Tensor] = {}
    for run in layout(tensors).runs:
        room |= run.views(torch.empty(sum(run.sizes), dtype=run.dtype))
    return {name: room[name] for name in tensors}


def joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same numbers in fewer tensors: those that follow each other in memory become a flat one.

    Empty ones are left out. What was unpacked is one piece of memory for each type, in the order of
    :func:`packed_order`: one pass over it takes a fraction of that over many small tensors.
    """
    pieces: list[Tensor] = []
    run: list[Tensor] = []
    end = -1
    for tensor in tensors:
        if not tensor.numel():
            continue
        start = tensor.data_ptr()
        if not (start == end and tensor.dtype == run[0].dtype and tensor.is_contiguous()):
            pieces += _flat(run)
            run = []
        run.append(tensor)
        end = start + tensor.nbytes if tensor.is_contiguous() else -1
    return pieces + _flat(run)


def joined_alike(left: list[Tensor], right: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both :func:`joined` where that gives the same pieces of both, for elementwise arithmetic."""
    both = joined(left), joined(right)
    same = [t.shape for t in both[0]] == [t.shape for t in both[1]]
    return both if same else (left, right)


def _flat(run: list[Tensor]) -> list[Tensor]:
    """One tensor of several that follow each other, if they have the same storage."""
    if len(run) < 2:
        return run
    first, count = run[0].detach(), sum(tensor.numel() for tensor in run)
    end = (first.storage_offset() + count) * first.element_size()
    if end > first.untyped_storage().nbytes():  # neighbours by chance
        return run
    return [first.as_strided((count,), (1,))]


# ---------------------------------------------------------------- (tensors, tree) <-> one buffer


def pack(value: Any, allocate: Callable[[int], Any] = bytearray) -> Any:
    """Lay ``value`` out in one buffer from ``allocate(size)`` (writable, e.g. bytearray, mmap)."""
    tensors, tree = flatten(value)
    return pack_tensors(tensors, {"furlong": json.dumps(tree)}, allocate)


def pack_tensors(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    allocate: Callable[[int], Any] = bytearray,
) -> Any:
    """A safetensors file in memory."""
    start, pieces = header(tensors, metadata), _in_order(tensors)
    buffer = allocate(len(start) + sum(piece.nbytes for piece in pieces))
    memoryview(buffer)[: len(start)] = start
    at = len(start)
    for piece in pieces:
        place = torch.frombuffer(buffer, dtype=piece.dtype, count=piece.numel(), offset=at)
        place.view(piece.shape).copy_(piece)
        at += piece.nbytes
    return buffer


def write(value: Any, file: IO[bytes]) -> None:
    """Write what :func:`pack` makes of ``value``, without making it in memory first."""
    tensors, tree = flatten(value)
    file.write(header(tensors, {"furlong": json.dumps(tree)}))
    for piece in _in_order(tensors):
        file.write(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _in_order(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What follows the header."""
    return [piece.detach() for piece in joined(tensors[name] for name in packed_order(tensors))]


def unpack(buffer: Any) -> Any:
    """The payload in ``buffer``; its tensors are views of it. Raises :class:`PayloadError`."""
    return restored(*unpack_tensors(buffer))


def restored(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Any:
    """The payload whose tree is in the metadata. Raises :class:`PayloadError`."""
    try:
        return rebuild(json.loads(metadata["furlong"]), tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"a payload with a broken structure: {error!r}") from None


def unpack_tensors(buffer: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors buffer, checked before anything is allocated."""
    view = memoryview(buffer)
    if len(view) < 8 or (length := int.from_bytes(view[:8], "little")) > len(view) - 8:
        raise PayloadError(f"not a safetensors buffer: {len(view)} bytes, header cut off")
    if length > _MAX_HEADER:
        raise PayloadError(f"a header of {length} bytes is refused (limit {_MAX_HEADER})")
    start, room = 8 + length, len(view) - 8 - length
    metadata, places = read_header(bytes(view[8:start]), room)
    if view.readonly:  # torch has no read-only tensors, and would warn
        buffer, start = bytearray(view[start:]), 0
    tensors: dict[str, Tensor] = {}
    for run in places.runs:
        count, flat = sum(run.sizes), torch.empty(0, dtype=run.dtype)
        if count:
            at = start + run.begin
            flat = torch.frombuffer(buffer, dtype=run.dtype, count=count, offset=at)
        tensors |= run.views(flat)
    return tensors, metadata


# ---------------------------------------------------------------- what it costs to send


@dataclass(frozen=True)
class Traffic:
    """Bytes by what they are; adds up with ``+``."""

    params: int = 0
    buffers: int = 0
    features: int = 0
    scalars: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.params + self.buffers + self.features + self.scalars

    def __add__(self, other: Traffic) -> Traffic:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Traffic(*(a + b for a, b in pairs))


BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_buffer(name: str) -> bool:
    """Whether a weight of this name is a BatchNorm statistic rather than a parameter."""
    return name.rsplit(".", 1)[-1].rsplit("/", 1)[-1] in BATCHNORM_BUFFERS


def parts(value: Any) -> Iterator[tuple[str, str, int, int]]:
    """(path, kind, elements, bytes) of everything in a payload; kinds as in :class:`Traffic`.

    Tensors inside a ``Weights`` dict are params or buffers, a lone tensor is features.
    """
    tensors, tree = flatten(value)
    yield from _parts(tree, "", tensors)


def _parts(tree: Any, path: str, tensors: dict[str, Tensor]) -> Iterator[tuple[str, str, int, int]]:
    below: Iterable[tuple[object, Any]] = ()
    match tree:
        case {"tensor": str(at)}:
            yield at, "features", tensors[at].numel(), tensors[at].nbytes
        case {"weights": str(at), "names": list(names)}:
            for name in names:
                tensor, kind = tensors[join(at, name)], "buffers" if is_buffer(name) else "params"
                yield join(at, name), kind, tensor.numel(), tensor.nbytes
        case {"payload": _, "fields": dict(items)}:
            below = items.items()
        case {"dict": list(pairs)}:
            below = pairs
        case {"tuple": list(items)}:
            below = enumerate(items)
        case None:
            return
        case str():
            yield path, "scalars", 1, len(tree.encode())
        case _:
            yield path, "scalars", 1, 1 if isinstance(tree, bool) else 8
    for name, item in below:
        yield from _parts(item, join(path, name), tensors)


def traffic(value: Any) -> Traffic:
    """What sending ``value`` costs, without the header."""
    counts = dict.fromkeys((f.name for f in fields(Traffic)), 0)
    for _, kind, _, size in parts(value):
        counts[kind] += size
    return Traffic(**counts)


def by_field(value: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """(field, kind) -> (elements, bytes) of a payload."""
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for path, kind, elements, size in parts(value):
        key = (path.split("/")[0], kind)
        before = groups.get(key, (0, 0))
        groups[key] = (before[0] + elements, before[1] + size)
    return groups
