"""The codec: round trips, compatibility with the safetensors library, hostile bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.core.layout import PayloadError, packed_order
from furlong.core.payload import (
    Weights,
    joined,
    joined_alike,
    pack,
    pack_tensors,
    payload,
    replace_tensors,
    room_for,
    split_weights,
    traffic,
    unpack,
    unpack_tensors,
    write,
)


@payload
class Inner:
    value: float
    rows: torch.Tensor


@payload
class Everything:
    weights: Weights
    inner: Inner | None
    by_client: dict[int, Inner]
    parts: tuple[Weights, ...]
    name: str
    count: int
    flag: bool


def example() -> Everything:
    inner = Inner(math.inf, torch.arange(6.0).view(2, 3))
    return Everything(
        {"a.weight": torch.randn(3, 2), "n": torch.tensor(7), "half": torch.ones(3).half()},
        inner,
        {3: inner, 10: Inner(-0.5, torch.empty(0, 4))},
        ({"x": torch.ones(1)}, {}),
        "näme",
        2**40,
        True,
    )


def same(a: Any, b: Any) -> bool:
    return bytes(pack(a)) == bytes(pack(b))


def test_round_trip() -> None:
    value = example()
    back = unpack(pack(value))
    assert isinstance(back, Everything)
    assert same(value, back)
    assert back.by_client[3].value == math.inf
    assert back.by_client[10].rows.shape == (0, 4)
    assert back.weights["n"].dtype == torch.int64


def test_read_only_bytes_and_no_copy() -> None:
    buffer = pack(example())
    assert same(unpack(bytes(buffer)), example_from(buffer))
    view = unpack(buffer)
    view.inner.rows[0, 0] = 99.0
    assert unpack(buffer).inner.rows[0, 0] == 99.0  # a view of the buffer, not a copy


def example_from(buffer: bytearray) -> Any:
    return unpack(bytearray(buffer))


def test_non_contiguous_and_shared_tensors() -> None:
    base = torch.arange(12.0).view(3, 4)
    value = {"t": base.t(), "again": base.t(), "last": base.to(memory_format=torch.preserve_format)}
    back = unpack(pack(value))
    assert torch.equal(back["t"], base.t())
    assert torch.equal(back["again"], back["t"])


def test_is_a_safetensors_file() -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.arange(5), "c": torch.tensor([True, False])}
    ours = pack_tensors(tensors, {"k": "v"})
    theirs = safetensors.torch.load(bytes(ours))
    assert all(torch.equal(theirs[n], t) for n, t in tensors.items())
    back, metadata = unpack_tensors(safetensors.torch.save(tensors, {"k": "v"}))
    assert metadata == {"k": "v"}
    assert all(torch.equal(back[n], t) for n, t in tensors.items())


def test_header_is_strict_json_and_tensors_are_aligned() -> None:
    def strange(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for length in range(8):
        packed = bytes(pack({"x" * length: torch.ones(2), "value": (math.nan, math.inf)}))
        size = int.from_bytes(packed[:8], "little")
        assert size % 8 == 0
        header = json.loads(packed[8 : 8 + size], parse_constant=strange)
        json.loads(header["__metadata__"]["furlong"], parse_constant=strange)


def test_unregistered_classes_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot hold"):
        pack({"x": object()})
    evil = pack_tensors({}, {"furlong": json.dumps({"payload": "os.system", "fields": {}})})
    with pytest.raises(PayloadError, match="unknown kind"):
        unpack(evil)


def test_lying_headers() -> None:
    def forge(entry: dict[str, Any], data: bytes = b"\0" * 8) -> bytearray:
        text = json.dumps({"t": entry}).encode()
        return bytearray(len(text).to_bytes(8, "little") + text + data)

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert unpack_tensors(forge(good))[0]["t"].shape == (2,)
    lies: list[dict[str, Any]] = [
        {**good, "shape": [10**13]},
        {**good, "data_offsets": [0, 4 * 10**13], "shape": [10**13]},
        {**good, "shape": [-2]},
        {**good, "dtype": "PICKLE"},
        {**good, "shape": [1.5]},
        {**good, "data_offsets": [4, 12]},
        {**good, "shape": [2**61, 2**61]},
        {"dtype": "F32"},
        {**good, "shape": [1], "data_offsets": [0, 4]},
    ]
    for lie in lies:
        with pytest.raises(PayloadError):
            unpack_tensors(forge(lie))
    twice = json.dumps({"a": good, "b": good}).encode()  # two tensors in one place
    with pytest.raises(PayloadError):
        unpack_tensors(bytearray(len(twice).to_bytes(8, "little") + twice + b"\0" * 8))
    for cut in (b"", b"\1", (1 << 62).to_bytes(8, "little") + b"{}"):
        with pytest.raises(PayloadError):
            unpack_tensors(cut)


WHOLE = bytes(pack(example()))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.integers(0, len(WHOLE)))
def test_mutated_bytes_never_crash(at: int, byte: int, cut: int) -> None:
    broken = bytearray(WHOLE)
    broken[at] = byte
    for attempt in (broken, broken[:cut]):
        try:
            unpack(attempt)
        except PayloadError:
            continue


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=5)
    | st.floats(allow_nan=False)
    | st.lists(st.integers(0, 4), max_size=3).map(lambda s: torch.ones(s)),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="ascii"), max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_value_survives(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_traffic_by_kind() -> None:
    weights = {
        "bn.weight": torch.ones(4),
        "bn.running_mean": torch.ones(4),
        "bn.num_batches_tracked": torch.tensor(1),
    }
    cost = traffic(Inner(1.0, torch.ones(5))) + traffic({"w": weights})
    assert (cost.params, cost.buffers, cost.features, cost.scalars) == (16, 24, 20, 8)
    assert cost.total == 68


def test_replace_and_split() -> None:
    value = example()
    changed = replace_tensors(value, {"weights/n": torch.tensor(8)})
    assert changed.weights["n"] == 8
    assert value.weights["n"] == 7
    kept, removed = split_weights(value, lambda name: name == "n")
    assert list(kept.weights) == ["a.weight", "half"]
    assert removed.keys() == {"weights/n"}


def test_colliding_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="two tensors"):
        pack({1: (torch.zeros(1),), "1": (torch.ones(1),)})
    numbered = {1: torch.zeros(1), 2: torch.ones(1)}
    assert same(unpack(pack(numbered)), numbered)


def some() -> Weights:
    shapes = {"b": (3,), "a": (2, 5), "empty": (0, 4), "c": (1,)}
    return {
        **{name: torch.randn(shape) for name, shape in shapes.items()},
        "half": torch.randn(3).half(),
        "count": torch.tensor([7]),
        "last": torch.randn(4, 4).T,
    }


def test_what_is_packed_is_one_piece_for_each_type() -> None:
    found = unpack_tensors(pack_tensors(some(), {}))[0]
    pieces = joined(found[name] for name in packed_order(found))
    assert [(p.dtype, p.numel()) for p in pieces] == [
        (torch.int64, 1),
        (torch.float32, 10 + 3 + 1 + 16),
        (torch.float16, 3),
    ]
    rows = [found[name].flatten() for name in ("a", "b", "c", "last")]
    torch.testing.assert_close(pieces[1], torch.cat(rows), rtol=0, atol=0)
    pieces[1].zero_()  # the same memory
    assert not found["last"].any()


def test_room_has_the_layout_of_what_is_packed() -> None:
    tensors = some()
    room = room_for(tensors)
    assert list(room) == list(tensors)
    for name, tensor in room.items():
        assert (tensor.shape, tensor.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert tensor.is_contiguous()
        tensor.copy_(tensors[name])
    assert len(joined(room[name] for name in packed_order(room))) == 3
    assert pack(room) == pack(tensors)


def test_what_is_not_one_piece_is_not_joined() -> None:
    row = torch.arange(12.0)
    apart = [row[:4], row[5:8], row[8:9].clone()]
    assert [piece.tolist() for piece in joined(apart)] == [each.tolist() for each in apart]
    backwards = [row[4:8], row[:4]]
    assert [piece.tolist() for piece in joined(backwards)] == [b.tolist() for b in backwards]
    turned = [row[:4].view(2, 2).T, row[4:8]]
    assert [piece.shape for piece in joined(turned)] == [(2, 2), (4,)]
    assert [piece.shape for piece in joined([*turned[1:], row[8:].view(2, 2).T])] == [(4,), (2, 2)]
    other = [row[:4], row[4:6].view(torch.int32)]
    assert len(joined(other)) == 2
    memory = bytearray(32)  # neighbours, and yet two storages
    halves = [torch.frombuffer(memory, dtype=torch.float32, count=4, offset=o) for o in (0, 16)]
    assert len(joined(halves)) == 2
    assert joined([]) == []


def test_pieces_of_two_sides_are_the_same_or_none() -> None:
    row, other = torch.arange(8.0), torch.arange(8.0)
    left, right = joined_alike([row[:4], row[4:]], [other[:4], other[4:]])
    assert [len(left), len(right)] == [1, 1]
    apart = [other[:4], other[4:].clone()]
    left, right = joined_alike([row[:4], row[4:]], apart)
    assert [t.shape for t in left] == [t.shape for t in right] == [(4,), (4,)]


def test_a_payload_is_written_as_it_is_packed(tmp_path: Path) -> None:
    turned = {"t": torch.arange(6.0).view(2, 3).T, "none": torch.empty(0, 3), "n": torch.tensor(7)}
    half = {"b": torch.tensor([True, False]), "h": torch.ones(3, dtype=torch.bfloat16)}
    for value in (example(), turned, half, {}, 7):
        with open(tmp_path / "file", "wb") as file:
            write(value, file)
        assert (tmp_path / "file").read_bytes() == bytes(pack(value))


def test_a_header_is_read_like_any_json() -> None:
    """The metadata apart from the rest, which is remembered: that must make no difference."""
    entry = '"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    for text in (
        '{"__metadata__":{"a":"b"},' + entry + "}",
        '{"__metadata__":{"a":"b"},' + entry + "}   ",
        '{ "__metadata__" : {"a":"b"}, ' + entry + "}",
        "{" + entry + ',"__metadata__":{"a":"b"}}',
    ):
        head = len(text).to_bytes(8, "little") + text.encode()
        tensors, metadata = unpack_tensors(bytearray(head + bytes(8)))
        assert metadata == {"a": "b"}
        assert tensors["t"].tolist() == [0, 0]
    for text in (
        '{"__metadata__":{"a":"b"}' + entry + "}",
        '{"__metadata__":{"a":"b"},' + entry,
        '{"__metadata__":{"a":"b"},' + entry + ',"__metadata__":{}}',
        '{"__metadata__":{"a":"b"},}',
        '{"__metadata__":{"a":"b"}',
        '{"__metadata__":7}',
        '{"__metadata__":',
    ):
        for data in (bytes(8), b""):
            with pytest.raises(PayloadError):
                unpack_tensors(bytearray(len(text).to_bytes(8, "little") + text.encode() + data))
