"""Lossy transport: error bounds, error feedback, sizes, determinism, hostile bytes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from furlong.core.context import Exchange
from furlong.core.layout import PayloadError
from furlong.core.payload import (
    Weights,
    flatten,
    is_buffer,
    pack,
    pack_tensors,
    payload,
    unpack,
    unpack_tensors,
)
from furlong.core.weights import first_nonfinite, snapshot
from furlong.engines.codec import SMALLEST, decode, encode
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder

LOSSY = ("float16", "int8")


@payload
class Sent:
    weights: Weights
    features: Tensor
    name: str
    count: int


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def example(seed: int = 0) -> Sent:
    weights = {
        "conv.weight": randn(32, 3, 3, 3, seed=seed),
        "bn.running_mean": randn(512, seed=seed + 1),
        "bn.running_var": randn(512, seed=seed + 2).square(),
        "bn.num_batches_tracked": torch.tensor(7),
        "bn.weight": randn(300, seed=seed + 3),
        "bias": randn(SMALLEST - 1, seed=seed + 4),
        "double": randn(400, seed=seed + 5).double(),
    }
    return Sent(weights, torch.nn.functional.normalize(randn(40, 16, seed=seed + 6)), "é", 2**40)


def resnet18() -> Weights:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return snapshot(build_encoder("resnet18", 3, 32))


def moved(weights: Weights, by: float = 1e-3) -> Weights:
    return {
        name: t + by * randn(*t.shape, seed=len(name)) if t.is_floating_point() else t + 1
        for name, t in weights.items()
    }


# ---------------------------------------------------------------- what arrives


def test_exact_is_what_pack_gives() -> None:
    value = example()
    packed, residual = encode(value, "exact", base=example(1))
    assert packed == pack(value)
    assert residual == {}
    back = decode(packed)
    assert pack(back) == pack(value)
    back.weights["bias"][0] = 99.0
    assert unpack(packed).weights["bias"][0] == 99.0  # a view of the buffer, not a copy


@pytest.mark.parametrize("base", [None, example(50)])
@pytest.mark.parametrize("how", LOSSY)
def test_only_large_float32_tensors_are_rounded(how: Any, base: Sent | None) -> None:
    value = example()
    packed, residual = encode(value, how, base)
    for buffer in (packed, bytes(packed)):
        back = decode(buffer, base)
        assert (type(back), back.name, back.count) == (Sent, "é", 2**40)
        ours, theirs = flatten(value)[0], flatten(back)[0]
        assert list(ours) == list(theirs)
        for path, tensor in ours.items():
            got = theirs[path]
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
            rounded = path in ("weights/conv.weight", "weights/bn.weight", "features")
            assert torch.equal(got, tensor) != rounded, path
    assert residual.keys() == {"weights/conv.weight", "weights/bn.weight"}
    for path, lost in residual.items():
        assert torch.equal(lost, ours[path] - theirs[path])


def test_features_are_never_differences_and_never_int8() -> None:
    """They are of other images every time: nothing would make up for their errors later."""
    value = example()
    alone = encode(value, "int8")[0]
    beside, residual = encode(value, "int8", base=value)
    again = encode(value, "int8", base=value, residual=residual | {"features": value.features})[0]
    stored = [unpack_tensors(b)[0]["features"] for b in (alone, beside, again)]
    assert stored[0].dtype == torch.float16
    assert torch.equal(stored[0], stored[1])
    assert torch.equal(stored[0], stored[2])
    assert torch.equal(decode(beside, value).features, value.features.half().float())


shapes = st.sampled_from([(256,), (700,), (2, 128), (128, 2), (40, 9), (8, 4, 3, 3), (300, 1)])
scales = st.sampled_from([1e-30, 1e-6, 1.0, 1e3, 1e30])


@settings(max_examples=80, deadline=None)
@given(shapes, scales, st.integers(0, 1000), st.booleans())
def test_int8_is_within_half_a_step_of_the_row(
    shape: tuple[int, ...], size: float, seed: int, zeros: bool
) -> None:
    value = size * randn(*shape, seed=seed)
    if zeros:
        value[0] = 0.0
    buffer = encode({"w": value}, "int8")[0]
    back = decode(buffer)["w"]
    long = len(shape) > 1 and math.prod(shape[1:]) >= 8
    rows = value.view(shape[0] if long else 1, -1)
    step = rows.abs().amax(dim=1, keepdim=True) / 127
    error = (back.view_as(rows) - rows).abs()
    assert bool((error <= step / 2 * (1 + 1e-4)).all())
    assert unpack_tensors(buffer)[0]["scales"].shape == (len(rows),)
    if zeros:
        assert not back[0].any()


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([1e-9, 1e-4, 1.0, 1e4]), st.integers(0, 1000))
def test_float16_is_within_its_precision(shape: tuple[int, ...], size: float, seed: int) -> None:
    value = size * randn(*shape, seed=seed)
    back = decode(encode({"w": value}, "float16")[0])["w"]
    error = (back - value).abs()
    assert bool((error <= torch.clamp(value.abs() * 2**-11, min=2**-25)).all())


def test_float16_never_becomes_infinite_and_sends_the_rest_later() -> None:
    value = torch.full((256,), 1e5)
    packed, residual = encode({"w": value}, "float16")
    first = decode(packed)["w"]
    assert torch.equal(first, torch.full((256,), 65504.0))
    packed, residual = encode({"w": torch.zeros(256)}, "float16", residual=residual)
    assert torch.equal(first + decode(packed)["w"], value)
    assert not residual["w"].any()


@pytest.mark.parametrize("how", LOSSY)
def test_rows_near_zero_are_sent_as_zero_and_kept(how: Any) -> None:
    value = torch.full((4, 128), 1e-37)
    packed, residual = encode({"w": value}, how)
    assert not decode(packed)["w"].any()
    assert torch.equal(residual["w"], value)


@pytest.mark.parametrize("how", LOSSY)
def test_a_difference_is_more_exact_than_a_value(how: Any) -> None:
    base = {"w": randn(64, 64)}
    value = {"w": base["w"] + 1e-3 * randn(64, 64, seed=1)}

    def error(base: Any) -> float:
        return float((decode(encode(value, how, base)[0], base)["w"] - value["w"]).abs().max())

    assert error(base) < error(None) / 50
    other = {"w": randn(64, 65)}  # of another shape or type: the value itself is sent
    for unlike in (other, {"w": base["w"].double()}, {"v": base["w"]}):
        assert encode(value, how, unlike)[0] == encode(value, how)[0]


def test_layout_plays_no_part() -> None:
    value, base = randn(16, 8, 3, 3), randn(16, 8, 3, 3, seed=1)
    lost = {"w": randn(16, 8, 3, 3, seed=2)}
    usual = encode({"w": value}, "int8", {"w": base}, lost)
    last = torch.channels_last
    turned = {"w": lost["w"].to(memory_format=last)}
    for v, b in ((value.to(memory_format=last), base), (value, base.to(memory_format=last))):
        found = encode({"w": v.requires_grad_()}, "int8", {"w": b}, turned)
        assert found[0] == usual[0]
        assert torch.equal(found[1]["w"], usual[1]["w"])
        assert not found[1]["w"].requires_grad


# ---------------------------------------------------------------- error feedback


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LOSSY), st.integers(0, 1000), st.integers(1, 30), st.booleans())
def test_nothing_is_lost_for_good(how: Any, seed: int, rounds: int, constant: bool) -> None:
    """The sum of what arrives and the residual are the sum of what was sent."""
    residual: Weights = {}
    wanted, arrived = (torch.zeros(8, 64, dtype=torch.float64) for _ in range(2))
    largest = 0.0
    for number in range(rounds):
        value = randn(8, 64, seed=seed if constant else seed + number)
        packed, residual = encode({"w": value}, how, residual=residual)
        wanted += value
        arrived += decode(packed)["w"]
        largest = max(largest, float(value.abs().max()))
        assert torch.isfinite(residual["w"]).all()
        assert residual["w"].dtype == torch.float32
        assert float(residual["w"].abs().max()) <= 1.01 * largest / (254 if how == "int8" else 512)
    assert torch.allclose(arrived + residual["w"], wanted, rtol=0, atol=1e-5 * rounds)


@pytest.mark.parametrize("how", LOSSY)
def test_a_constant_converges_and_without_feedback_it_does_not(how: Any) -> None:
    value = {"w": randn(8, 64)}
    sums = {True: torch.zeros(8, 64), False: torch.zeros(8, 64)}
    for feedback in sums:
        residual: Weights | None = None
        for _ in range(200):
            packed, lost = encode(value, how, residual=residual)
            sums[feedback] += decode(packed)["w"]
            residual = lost if feedback else None
    with_it, without = (float((s / 200 - value["w"]).abs().max()) for s in sums.values())
    assert with_it < without / 20


def test_small_steps_get_through() -> None:
    """Below half a step of int8 nothing moves without the residual."""
    base, step = torch.zeros(2, 128), torch.zeros(2, 128)
    step[:, 0], step[:, 1] = 1.0, 0.003  # 1/127 = 0.0079
    here, residual = {"w": base}, {}
    total = torch.zeros(2, 128)
    for _ in range(100):
        value = {"w": here["w"] + step}
        packed, residual = encode(value, "int8", here, residual)
        total += decode(packed, here)["w"] - here["w"]
    assert torch.allclose(total[:, 1], torch.full((2,), 0.3), atol=0.01)


def test_residuals_wait_for_their_tensor() -> None:
    """Exchanges of other kinds come between; what no longer fits is forgotten."""
    first = {"w": randn(8, 64), "v": randn(8, 64, seed=1)}
    residual = encode(first, "int8")[1]
    assert residual.keys() == {"w", "v"}
    _, after = encode({"w": first["w"], "u": randn(8, 64)}, "int8", residual=residual)
    assert after.keys() == {"w", "v", "u"}
    assert torch.equal(after["v"], residual["v"])
    assert not torch.equal(after["w"], residual["w"])
    larger = {"w": randn(9, 64)}
    packed, after = encode(larger, "int8", residual=residual)
    assert packed == encode(larger, "int8")[0]
    assert after["w"].shape == (9, 64)


def test_inputs_are_not_changed() -> None:
    value, base = example(), example(9)
    residual = encode(value, "int8")[1]
    before = [pack(v) for v in (value, base, residual)]
    packed, after = encode(value, "int8", base, residual)
    copy = bytes(packed)
    decode(packed, base)
    assert [pack(v) for v in (value, base, residual)] == before
    assert bytes(packed) == copy
    assert not torch.equal(after["weights/conv.weight"], residual["weights/conv.weight"])


@pytest.mark.parametrize("how", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["value", "base", "residual", "features"])
def test_what_is_not_finite_is_not_sent(how: Any, bad: float, where: str) -> None:
    value, base = example(), example(9)
    residual = {"weights/conv.weight": torch.zeros(32, 3, 3, 3)}
    tensor = {
        "value": value.weights["conv.weight"],
        "base": base.weights["conv.weight"],
        "residual": residual["weights/conv.weight"],
        "features": value.features,
    }[where]
    tensor[3, 2] = bad
    path = "features" if where == "features" else "conv.weight"
    with pytest.raises(FurlongError, match=rf"{path} holds NaN.*cannot be sent as {how}"):
        encode(value, how, base, residual)


@pytest.mark.parametrize("how", LOSSY)
def test_differences_that_overflow_are_refused(how: Any) -> None:
    with pytest.raises(FurlongError, match="near it"):
        encode({"w": torch.full((256,), 3e38)}, how, {"w": torch.full((256,), -3e38)})


def test_an_unknown_encoding_is_named() -> None:
    wrong: Any = "int4"
    with pytest.raises(FurlongError, match=r"unknown encoding 'int4'.*int8"):
        encode(example(), wrong)


# ---------------------------------------------------------------- size, speed, bits


@pytest.mark.parametrize(("how", "part"), [("float16", 0.5), ("int8", 0.25)])
def test_sizes(how: Any, part: float) -> None:
    value = resnet18()
    base = moved(value)
    exact = len(pack(value))
    for size in (len(encode(value, how)[0]), len(encode(value, how, base)[0])):
        assert part < size / exact < part + 0.02


@pytest.mark.parametrize("how", LOSSY)
def test_a_resnet18_takes_a_moment(how: Any) -> None:
    """45 MB; 0.1 s here. A loop over elements would take minutes."""
    value = resnet18()
    base = moved(value)
    began = time.process_time()
    packed, _ = encode(value, how, base, {})
    back = decode(packed, base)
    assert time.process_time() - began < 3
    assert all(torch.equal(back[n], t) for n, t in value.items() if is_buffer(n))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_everywhere(threads: int) -> None:
    """Single operations of IEEE arithmetic, as NumPy does them, with any number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, base, lost = randn(700, 75), randn(700, 75, seed=1), 0.01 * randn(700, 75, seed=2)
        found = {
            how: encode({"w": x}, how, {"w": base}, {"w": lost}) for how in ("float16", "int8")
        }
        back = {how: decode(packed, {"w": base})["w"] for how, (packed, _) in found.items()}
    finally:
        torch.set_num_threads(before)
    wanted = (x.numpy() - base.numpy()) + lost.numpy()
    scale = np.abs(wanted).max(axis=1) / np.float32(127)
    steps = np.rint(wanted / scale[:, None]).astype(np.int8)
    half = wanted.astype(np.float16)
    stored = {how: unpack_tensors(packed)[0] for how, (packed, _) in found.items()}
    assert np.array_equal(stored["int8"]["w"].numpy(), steps)
    assert np.array_equal(stored["int8"]["scales"].numpy(), scale)
    assert np.array_equal(stored["float16"]["w"].numpy(), half)
    sums = {
        "int8": steps.astype(np.float32) * scale[:, None] + base.numpy(),
        "float16": half.astype(np.float32) + base.numpy(),
    }
    for how, expected in sums.items():
        assert np.array_equal(back[how].numpy(), expected)
        assert np.array_equal(found[how][1]["w"].numpy(), (x.numpy() - expected) + lost.numpy())


# ---------------------------------------------------------------- hostile bytes


BASE = example(5)
WHOLE = {how: bytes(encode(example(), how, BASE)[0]) for how in ("exact", *LOSSY)}


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(WHOLE)),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
    st.floats(0, 1),
    st.booleans(),
)
def test_mutated_bytes_never_crash(
    how: str, at: float, byte: int, cut: float, header: bool
) -> None:
    whole = WHOLE[how]
    room = 8 + int.from_bytes(whole[:8], "little") if header else len(whole)
    broken = bytearray(whole)
    broken[int(at * room)] = byte
    for attempt in (broken, broken[: int(cut * len(broken))]):
        for base in (BASE, None):
            try:
                decode(attempt, base)
            except PayloadError:
                continue


def forge(change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> bytearray:
    """A well-formed buffer that lies."""
    tensors, metadata = unpack_tensors(
        bytes(encode({"w": randn(8, 64), "v": randn(300)}, "int8")[0])
    )
    about = {"codecs": json.loads(metadata["codecs"]), "scales": metadata["scales"]}
    change(tensors, about)
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
    return pack_tensors(tensors, {"furlong": metadata["furlong"], **texts})


def test_an_honest_forgery_is_accepted() -> None:
    assert decode(forge(lambda *_: None)).keys() == {"w", "v"}


LIES: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], Any]] = {
    "unknown codec": lambda _, a: a["codecs"].update(w="int4"),
    "codec is a list": lambda _, a: a["codecs"].update(w=[]),
    "codec is null": lambda _, a: a["codecs"].update(w=None),
    "other codec": lambda _, a: a["codecs"].update(w="float16"),
    "unknown tensor": lambda _, a: a["codecs"].update(x="int8"),
    "codecs are a list": lambda _, a: a.update(codecs=["w"]),
    "codecs are a number": lambda _, a: a.update(codecs="7"),
    "codecs are no JSON": lambda _, a: a.update(codecs="{"),
    "codecs are deep": lambda _, a: a.update(codecs="[" * 100_000),
    "one codec is missing": lambda _, a: a["codecs"].pop("v"),
    "difference to nothing": lambda _, a: a["codecs"].update(w="int8 difference"),
    "no scales": lambda t, _: t.pop("scales"),
    "no name of scales": lambda _, a: a.pop("scales"),
    "scales elsewhere": lambda _, a: a.update(scales="w"),
    "too few scales": lambda t, _: t.update(scales=t["scales"][:-1]),
    "too many scales": lambda t, _: t.update(scales=torch.ones(512)),
    "scales in a table": lambda t, _: t.update(scales=t["scales"][:, None]),
    "half scales": lambda t, _: t.update(scales=t["scales"].half()),
    "NaN scale": lambda t, _: t["scales"].fill_(math.nan),
    "infinite scale": lambda t, _: t["scales"].fill_(math.inf),
    "negative scale": lambda t, _: t["scales"].fill_(-1.0),
    "huge scale": lambda t, _: (t["scales"].fill_(3e38), t["w"].fill_(127)),
    "other shape": lambda t, _: t.update(w=t["w"].view(16, 32)),
    "small tensor": lambda t, _: t.update(w=t["w"][:, :8].contiguous()),
    "float tensor": lambda t, _: t.update(w=t["w"].float()),
    "many dimensions": lambda t, _: t.update(w=t["w"].view([8] + [1] * 70 + [64])),
    "missing tensor": lambda t, _: t.pop("w"),
    "infinite half": lambda t, a: (
        t.update(v=torch.full((300,), math.inf, dtype=torch.float16)),
        a["codecs"].update(v="float16"),
        t.update(scales=t["scales"][1:].clone()),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie: str) -> None:
    try:
        back = decode(forge(LIES[lie]))
    except PayloadError:
        return
    assert lie == "one codec is missing"  # then it is a tensor of int8, which the guard refuses
    assert back["v"].dtype == torch.int8


def test_a_statistic_cannot_be_rounded_by_a_stranger() -> None:
    packed = encode({"w": randn(8, 64)}, "int8")[0]
    tensors, metadata = unpack_tensors(packed)
    name = "bn.running_var"
    text = {k: v.replace('"w"', f'"{name}"') for k, v in metadata.items()}
    with pytest.raises(PayloadError, match="not encoded as they say"):
        decode(pack_tensors({name: tensors["w"], "scales": tensors["scales"]}, text))


def test_the_base_must_be_there_and_alike() -> None:
    value, base = {"w": randn(8, 64)}, {"w": randn(8, 64, seed=1)}
    for how in LOSSY:
        packed = encode(value, how, base)[0]  # type: ignore[arg-type]
        for other in (None, {}, {"v": base["w"]}, {"w": randn(64, 8)}, {"w": base["w"].double()}):
            with pytest.raises(PayloadError, match="not here"):
                decode(packed, other)


@pytest.mark.parametrize("how", ["exact", *LOSSY])
def test_a_limit_on_what_it_grows_to(how: Any) -> None:
    value = {"w": randn(100, 100), "n": torch.arange(10)}
    packed, _ = encode(value, how)
    assert decode(packed, limit=40_080).keys() == value.keys()
    with pytest.raises(PayloadError, match="40080 bytes is refused"):
        decode(packed, limit=40_079)


def test_names_may_be_anything() -> None:
    value = {"scales": randn(8, 64), "scales_": randn(8, 64, seed=1), "": randn(8, 64, seed=2)}
    back = decode(encode(value, "int8")[0])
    for name, tensor in value.items():
        assert torch.allclose(back[name], tensor, atol=0.02)


# ---------------------------------------------------------------- in a run


@pytest.mark.parametrize("name", ["fedu", "fedca", "fcl", "mfcl", "orchestra", "fedswav"])
def test_methods_run_on_it(prepared: Any, name: str) -> None:
    """Uploads as differences to the download, residuals at the client; nothing is refused."""
    p = prepared(name)
    told: list[str] = []
    p.server = replace(p.server, tell=told.append)
    residuals: dict[int, Weights] = {}
    bytes_sent = {"exact": 0, "int8": 0}

    class Lossy(InProcess):
        def exchange(self, exchange: Exchange, downloads: Any) -> Any:
            for client, reply in super().exchange(exchange, downloads):
                down = downloads[client]
                packed, residuals[client] = encode(
                    reply.upload, "int8", down, residuals.get(client)
                )
                bytes_sent["int8"] += len(packed)
                bytes_sent["exact"] += len(pack(reply.upload))
                yield client, replace(reply, upload=decode(packed, down))

    with Lossy(p.method, p.federation, p.setup) as transport:
        results = list(p.server.run(transport, p.server.init()))
    assert not [failure for result in results for failure in result.failures]
    assert first_nonfinite(results[-1].server) is None
    assert not [text for text in told if "left out" in text]
    assert bytes_sent["int8"] < 0.6 * bytes_sent["exact"]
