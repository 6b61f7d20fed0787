"""Processes that decode small images: what comes out is what one process would have made."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from furlong.data import cache, decode, helpers, tables
from furlong.data.images import load
from furlong.data.reading import ByteArray, Skipped
from furlong.errors import FurlongError

SHAPE = (3, 8, 8)
helped = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no fork, or no cores")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "_cores", lambda: 4)


def png(pixels: ByteArray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def images(count: int) -> list[ByteArray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, SHAPE[1:] + SHAPE[:1], dtype=np.uint8) for _ in range(count)]


def number(item: int) -> ByteArray | Skipped:
    return Skipped(f"{item}", "odd") if item % 5 == 1 else np.full(SHAPE, item, np.uint8)


@helped
@pytest.mark.parametrize("count", [1, 4, 23])
def test_helpers_make_what_one_process_makes(count: int) -> None:
    found = helpers.with_helpers(number, range(count), SHAPE)
    for one, other in zip(found, map(number, range(count)), strict=True):
        assert type(one) is type(other)
        assert one == other if isinstance(one, Skipped) else np.array_equal(one, other)


@helped
def test_what_a_helper_cannot_do_its_parent_does() -> None:
    here = os.getpid()

    def dies(item: int) -> ByteArray | Skipped:
        if os.getpid() != here and item == 9:
            os._exit(9)
        return number(item)

    found = helpers.with_helpers(dies, range(12), SHAPE)
    assert [isinstance(each, Skipped) for each in found] == [n % 5 == 1 for n in range(12)]
    assert np.array_equal(found[10], number(10))


@helped
@pytest.mark.parametrize("where", [0, 11])
def test_an_error_is_raised_and_no_helper_is_left(where: int) -> None:
    def fails(item: int) -> ByteArray | Skipped:
        if item == where:
            raise ArithmeticError("here")
        return number(item)

    with pytest.raises(ArithmeticError, match="here"):
        helpers.with_helpers(fails, range(12), SHAPE)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@helped
def test_nobody_forks_beside_other_threads() -> None:
    assert helpers.worth_helpers(helpers.WORTH)
    assert not helpers.worth_helpers(helpers.WORTH - 1)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        assert not helpers.worth_helpers(helpers.WORTH)
    finally:
        stop.set()
        other.join()


def table(folder: Path, damaged: Callable[[int], bool] = lambda _: False) -> list[ByteArray]:
    pixels = images(60)
    data = [b"no image" if damaged(n) else png(each) for n, each in enumerate(pixels)]
    column = pa.array([{"bytes": each, "path": None} for each in data])
    pq.write_table(pa.table({"img": column}), folder / "x.parquet", row_group_size=7)
    return [each.transpose(2, 0, 1) for n, each in enumerate(pixels) if not damaged(n)]


@helped
def test_a_set_is_the_same_with_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = table(tmp_path, lambda n: n in (3, 40))
    calls: list[int] = []

    def counted(*args: object, **options: object) -> object:
        calls.append(1)
        return helpers.with_helpers(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(helpers, "WORTH", 10)
    monkeypatch.setattr(cache, "TOGETHER", 32)
    monkeypatch.setattr(tables, "BATCH", 20)  # so that two are decoded together, then one
    monkeypatch.setattr(cache, "with_helpers", counted)
    found = load(f"parquet:{tmp_path}")
    assert np.array_equal(found.pixels.numpy(), np.stack(expected))
    assert [each.name for each in found.skipped] == ["row 00000003", "row 00000040"]
    assert len(calls) == 2


@helped
def test_another_size_is_met_in_a_helper_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "WORTH", 2)
    read = partial(decode.decode, size=(8, 8), exact=True)
    items = [(f"{n}", png(each)) for n, each in enumerate(images(8))]
    items[7] = "7", png(np.zeros((4, 4, 3), np.uint8))
    with (
        decode.many(read, partial(helpers.with_helpers, shape=SHAPE)) as decode_all,
        pytest.raises(decode.OtherSize, match="4×4"),
    ):
        decode_all(items)


def test_pandas_is_not_imported_for_parquet(tmp_path: Path) -> None:
    table(tmp_path)
    program = (
        "import sys; from furlong.data.images import load; "
        f"load('parquet:{tmp_path}'); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("column", "why"), [("img", "y.parquet has no"), ("label", "3 empty")])
def test_a_column_that_one_file_lacks(tmp_path: Path, column: str, why: str) -> None:
    data = [png(each) for each in images(3)]
    whole = pa.table({"img": pa.array(data), "label": pa.array([0, 1, 0])})
    pq.write_table(whole, tmp_path / "x.parquet")
    pq.write_table(whole.drop_columns([column]), tmp_path / "y.parquet")
    with pytest.raises(FurlongError, match=why):
        load(f"parquet:{tmp_path}")
