"""One client whose upload is valid and far too large: named, left out if that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from furlong.core import weights
from furlong.core.context import Exchange
from furlong.core.exchange import ExchangeResult, Failure
from furlong.core.guard import Expected
from furlong.core.method import Report
from furlong.core.outliers import Size, Start, suspects
from furlong.core.payload import flatten, pack, replace_tensors, unpack
from furlong.engines.inprocess import InProcess
from furlong.runs.prepare import prepare

Forge = Callable[[Report[Any], Any], Any]


def attacked(
    p: Any, forge: Forge, outlier: float | None = None, kind: str = "train"
) -> tuple[ExchangeResult[Any], list[str]]:
    """An exchange in which client 1 answers what ``forge`` makes of its answer, and what is told.

    ``forge`` gets the answer and the server's state before it.
    """

    class Hostile(InProcess):
        def exchange(self, exchange: Exchange, downloads: Any) -> Any:
            for client, reply in super().exchange(exchange, downloads):
                yield client, forge(reply, state) if client == 1 else reply

    told: list[str] = []
    guard = replace(p.server.guard, outlier=outlier)
    server = replace(p.server, guard=guard, tell=told.append, suspected=set())
    state = server.init()
    exchange = next(e for e in server.exchanges() if e.kind == kind)
    with Hostile(p.method, p.federation, p.setup) as transport:
        return server.step(transport, state, exchange), told


def stretched(factor: float, only: str = "") -> Forge:
    """The client's update, that many times as long."""

    def forge(report: Report[Any], state: Any) -> Report[Any]:
        before = flatten(state)[0]
        longer = {
            name: before[name] + factor * (tensor - before[name])
            for name, tensor in flatten(report.upload)[0].items()
            if tensor.is_floating_point() and "running_var" not in name and only in name
        }
        return replace(report, upload=replace_tensors(report.upload, longer))

    return forge


def lost(*_: Any) -> Failure:
    return Failure(1, "lost", "")


@pytest.mark.parametrize(
    "forge", [stretched(10), stretched(-10), stretched(1e9), stretched(1e4, "running_mean")]
)
def test_an_outlier_is_left_out_and_named(prepared: Any, forge: Forge) -> None:
    """The result is bit-equal to the round without that client."""
    p = prepared("fedsimclr", partition="iid")
    result, _ = attacked(p, forge, outlier=5.0)
    (failure,) = result.failures
    assert (failure.client, failure.kind) == (1, "refused")
    assert "times as large as the round's median" in failure.reason
    assert "server.outlier" in failure.reason
    assert sorted(result.metrics) == [0, 2]
    assert pack(result.server) == pack(attacked(p, lost)[0].server)


def test_an_honest_round_is_not_touched(prepared: Any) -> None:
    p = prepared("fedsimclr", partition="quantity:1,1,12")
    result, told = attacked(p, lambda reply, _: reply, outlier=5.0)
    assert not result.failures
    other, warned = attacked(p, lambda reply, _: reply, outlier=0.0)
    assert pack(result.server) == pack(other.server)
    assert not told
    assert not warned


def test_under_the_mean_it_is_told(prepared: Any) -> None:
    result, told = attacked(prepared("fedsimclr"), stretched(-10), outlier=0.0)
    assert sorted(result.metrics) == [0, 1, 2]
    (line,) = told
    assert line.startswith("warning: round 1, client 1: its update is")
    assert "--server.rule median" in line


def test_who_is_suspected() -> None:
    def sizes(*moved: float, images: int = 10) -> dict[int, Size]:
        return {
            k: Size(images if k == 0 else 10, {"params": m, "buffers": 0.0, "features": 0.0},
                    {"params": 3.0, "buffers": 0.0, "features": 0.0})
            for k, m in enumerate(moved)
        }  # fmt: skip

    assert set(suspects(sizes(6, 1, 1), 5)) == {0}
    assert not suspects(sizes(4, 1, 1), 5)
    assert not suspects(sizes(6, 1, 1, images=20), 5)  # twice the images, twice the steps
    assert not suspects(sizes(6, 1), 5)  # which of the two is the bad one?
    assert set(suspects(sizes(301, 1), 5)) == {0}  # but no honest update is like this
    assert not suspects({}, 5)


@pytest.mark.parametrize(
    ("options", "outlier"),
    [
        ({}, 0.0),
        ({"engine": "flower"}, 5.0),
        ({"engine": "flower", "server.outlier": 0}, 0.0),
        ({"server.outlier": 7}, 7.0),
        ({"server.rule": "median"}, None),
        ({"bound": "single"}, None),
    ],
)
def test_when_somebody_looks(
    tiny_config: Any, options: dict[str, Any], outlier: float | None
) -> None:
    assert prepare(tiny_config("fedsimclr", **options)).server.guard.outlier == outlier


@pytest.mark.parametrize(
    ("method", "field"), [("fcl", "features"), ("fedca", "rows"), ("orchestra", "centroids")]
)
def test_rows_that_are_no_unit_vectors_are_refused(prepared: Any, method: str, field: str) -> None:
    """They go to all other clients as they are: no mean, no robust rule is between."""
    p, honest = prepared(method), []

    def forge(report: Report[Any], _: Any) -> Report[Any]:
        honest.append(report)
        return changed(report, one_long)

    def changed(report: Report[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Report[Any]:
        rows = change(getattr(report.upload, field).clone())
        return replace(report, upload=replace(report.upload, **{field: rows}))

    def one_long(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:-1], 1.05 * rows[-1:]])

    result, _ = attacked(p, forge)
    refused = f"{field} holds rows that are no unit vectors"
    assert [f.reason for f in result.failures] == [refused]
    (report,) = honest

    def said(change: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        bad, unit = changed(report, change), p.method.unit_rows
        return p.server.guard.check(bad, Expected(report.upload), result.exchange, 1, unit)

    assert said(lambda rows: rows) is None
    assert said(lambda rows: rows * 9e9) == said(torch.zeros_like) == refused
    assert "has shape" in str(said(lambda rows: torch.cat([rows, rows])))  # the quota


@pytest.mark.parametrize("block", [weights.BLOCK, 13, 1])
def test_sizes_by_kind(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain formula, for what was unpacked and for tensors that lie anywhere."""
    monkeypatch.setattr(weights, "BLOCK", block)
    torch.manual_seed(0)
    model = {
        "b.weight": torch.randn(4, 3, 3, 3),
        "a.running_mean": torch.randn(7),
        "a.weight": torch.randn(7),
        "a.num_batches_tracked": torch.tensor(3),
    }
    before = {"weights": model, "features": torch.randn(5, 2)}
    after = {
        "weights": {n: t + 1 if n.endswith("tracked") else 2 * t for n, t in model.items()},
        "features": 3 * before["features"],
    }

    def length(*tensors: torch.Tensor) -> float:
        return float(torch.cat([t.flatten() for t in tensors]).norm())

    params, stats = length(model["b.weight"], model["a.weight"]), model["a.running_mean"]
    whole = {"params": params, "buffers": length(stats), "features": length(before["features"])}
    moved = {**whole, "features": 2 * whole["features"]}
    for start, upload in ((before, after), (unpack(pack(before)), unpack(pack(after)))):
        found = Start(start).size(upload, 10)
        assert found.moved == pytest.approx(moved, rel=1e-6)
        assert found.whole == pytest.approx(whole, rel=1e-6)
