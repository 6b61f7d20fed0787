"""The gate: every kind of bad report in every field is refused by name, the round completes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.core.context import Exchange
from furlong.core.guard import Expected, Guard
from furlong.core.method import Report
from furlong.core.payload import flatten, pack, replace_tensors
from furlong.engines.inprocess import InProcess
from furlong.methods.base import Model
from furlong.methods.byol import Shared

EXPECTED = Model(
    {"a.weight": torch.zeros(8, 4), "n": torch.tensor(0), "bn.running_mean": torch.zeros(3)}
)
GOOD = Report(1, 5, 10, Model({k: v.clone() for k, v in EXPECTED.weights.items()}), {"loss": 1.0})
NOW = Exchange(round=5, index=5)


def check(report: Any) -> str | None:
    return Guard(max_examples=100).check(report, Expected(EXPECTED), NOW, 1)


def with_weight(name: str, value: torch.Tensor) -> Report[Model]:
    return replace(GOOD, upload=Model({**GOOD.upload.weights, name: value}))


BAD = {
    "nan": with_weight("a.weight", torch.full((8, 4), float("nan"))),
    "one inf": with_weight("a.weight", torch.zeros(8, 4).index_fill(0, torch.tensor(3), torch.inf)),
    "inf and -inf": with_weight("bn.running_mean", torch.tensor([torch.inf, -torch.inf, 0.0])),
    "transposed": with_weight("a.weight", torch.zeros(4, 8)),
    "broadcastable": with_weight("a.weight", torch.zeros(1, 1)),
    "float64": with_weight("a.weight", torch.zeros(8, 4, dtype=torch.float64)),
    "float counter": with_weight("n", torch.tensor(0.0)),
    "counter before its overflow": with_weight("n", torch.tensor(2**63 - 1)),
    "negative counter": with_weight("n", torch.tensor(-1)),
    "extra key": with_weight("evil", torch.zeros(1)),
    "missing key": replace(GOOD, upload=Model({"n": torch.tensor(0)})),
    "other payload": replace(GOOD, upload=Shared(GOOD.upload.weights, {})),
    "no payload": replace(GOOD, upload=None),
    "huge count": replace(GOOD, examples=10**12),
    "negative count": replace(GOOD, examples=-35),
    "float count": replace(GOOD, examples=1.5),
    "bool count": replace(GOOD, examples=True),
    "replayed": replace(GOOD, exchange=4),
    "from the future": replace(GOOD, exchange=6),
    "other client": replace(GOOD, client=2),
    "nan metric": replace(GOOD, metrics={"loss": float("nan")}),
    "text metric": replace(GOOD, metrics={"loss": "high"}),
    "huge metric": replace(GOOD, metrics={"loss": 10**400}),
    "metric with a strange name": replace(GOOD, metrics={"\ud800": 1.0}),
    "tensor as client": replace(GOOD, client=torch.tensor([1, 2])),
    "metric that spoils every mean": replace(GOOD, metrics={"loss": -1e300}),
    "negative number of images": replace(GOOD, metrics={"images": -5.0}),
    "more images than time": replace(GOOD, metrics={"images": 1e11}),
    "metric flood": replace(GOOD, metrics={str(i): 1.0 for i in range(1000)}),
    "no report": "hello",
}


def test_good_report_passes() -> None:
    assert check(GOOD) is None


@pytest.mark.parametrize("kind", BAD)
def test_bad_report_is_refused(kind: str) -> None:
    assert check(BAD[kind])


def test_large_finite_values() -> None:
    assert check(with_weight("n", torch.tensor(10**9))) is None
    assert check(with_weight("a.weight", torch.full((8, 4), 9e9))) is None
    for value in (3e38, -3e38, 1e12):
        assert "beyond" in (check(with_weight("a.weight", torch.full((8, 4), value))) or "")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 31), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_one_bad_number_anywhere(at: int, value: float) -> None:
    weight = torch.randn(32)
    weight[at] = value
    assert check(with_weight("a.weight", weight.view(8, 4)))


@pytest.mark.parametrize("kind", ["nan", "examples", "duplicate", "stale", "stranger"])
def test_round_goes_on_without_the_refused(prepared: Any, kind: str) -> None:
    """The result is bit-equal to the run in which that client did not answer."""
    p = prepared("fedu")
    exchange = p.server.exchanges()[0]

    def forge(report: Report[Any]) -> list[Any]:
        if kind == "nan":
            name, tensor = next(iter(flatten(report.upload)[0].items()))
            bad = replace_tensors(report.upload, {name: torch.full_like(tensor, torch.nan)})
            return [replace(report, upload=bad)]
        if kind == "examples":
            return [replace(report, examples=10**9)]
        if kind == "stale":
            return [replace(report, exchange=-1)]
        if kind == "stranger":
            return [replace(report, client=77)]
        return [report, report]

    class Hostile(InProcess):
        bad = True

        def exchange(self, exchange: Exchange, downloads: Any) -> Any:
            for client, reply in super().exchange(exchange, downloads):
                if client == 1:
                    yield from ((1, bad) for bad in forge(reply) if self.bad)
                else:
                    yield client, reply

    def one(bad: bool) -> Any:
        with Hostile(p.method, p.federation, p.setup) as transport:
            transport.bad = bad
            return p.server.step(transport, p.server.init(), exchange)

    attacked = one(True)
    if kind == "duplicate":
        assert sorted(attacked.metrics) == [0, 1, 2]
        assert [f.kind for f in attacked.failures] == ["refused"]
        return
    assert sorted(attacked.metrics) == [0, 2]
    assert [(f.client, f.kind) for f in attacked.failures] == [(1, "refused")]
    assert pack(attacked.server) == pack(one(False).server)


def test_negative_variance_is_refused() -> None:
    expected = Model({"bn.running_var": torch.ones(3)})
    bad = Report(1, 5, 10, Model({"bn.running_var": torch.tensor([1.0, -100.0, 1.0])}), {})
    assert "negative variance" in (Guard().check(bad, Expected(expected), NOW, 1) or "")


def test_replies_that_break_the_check_are_refused(prepared: Any) -> None:
    p = prepared("fedsimclr")
    deep: Any = 1
    for _ in range(5000):
        deep = (deep,)

    class Hostile(InProcess):
        def exchange(self, exchange: Exchange, downloads: Any) -> Any:
            for client, reply in super().exchange(exchange, downloads):
                yield client, replace(reply, upload=deep) if client == 1 else reply

    with Hostile(p.method, p.federation, p.setup) as transport:
        result = p.server.step(transport, p.server.init(), p.server.exchanges()[0])
    assert sorted(result.metrics) == [0, 2]
    assert result.failures[0].client == 1
