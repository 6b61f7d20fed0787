"""Predicted traffic equals counted traffic, for every method; MFCL's Table 8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from furlong.core.exchange import Server
from furlong.core.payload import Traffic
from furlong.engines.inprocess import InProcess
from furlong.methods import METHODS
from furlong.runs.config import from_tree
from furlong.runs.cost import predict, without_data


def coded_bits(
    values: int, *, ways: int = 1, bits: int = 32, code_rate: tuple[int, int] = (1, 3)
) -> int:
    """Bits on the channel as in MFCL's Table 8: ``values`` of 32 bits, a code of rate 1/3.

    ``ways``: 2 for a model, which goes down and up; 1 for representations.
    """
    carried, sent = code_rate
    return values * bits * ways * sent // carried


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("options", [{}, {"method.bn_stats": "local"}, {"fraction": 0.7}], ids=str)
def test_prediction_agrees_with_a_run(prepared: Any, name: str, options: dict[str, Any]) -> None:
    p = prepared(name, rounds=3, **options)
    server = Server(p.method, p.setup, p.server.public, p.config.train.fraction)
    costs = list(predict(server))
    with InProcess(p.method, p.federation, p.setup) as transport:
        results = list(server.run(transport, server.init()))
    assert len(costs) == len(results)
    for cost, result in zip(costs, results, strict=True):
        assert cost.exchange == result.exchange
        assert cost.cohort == result.cohort
        assert cost.down == result.down
        assert replace(result.up, scalars=0) == replace(cost.up, scalars=0)
        # what a report says besides the upload: who, which, how many, and the metrics
        assert 0 <= result.up.scalars - cost.up.scalars <= len(cost.cohort) * 20 * 8


def test_without_data_is_the_same(prepared: Any) -> None:
    p = prepared("fedu")
    sizes = dict.fromkeys(range(3), 24)
    server = without_data(p.config, sizes, 3, 16)
    assert list(predict(server)) == list(predict(p.server))


def test_one_client_of_all(prepared: Any) -> None:
    server = prepared("fedu").server
    for whole, *each in zip(predict(server), *(predict(server, k) for k in range(3)), strict=True):
        assert [one.cohort for one in each] == [[0], [1], [2]]
        assert sum((one.down for one in each), Traffic()) == whole.down
        assert sum((one.up for one in each), Traffic()) == whole.up


def test_table_8(golden: dict[str, Any]) -> None:
    """The computed column of spec 4.8: 32 bits, rate 1/3, models both ways."""
    want = golden["table8"]
    model, sensor, code, images = (
        11_000_000,
        100_000,
        64 * 32 * 32,
        5000,
    )  # the table's round values
    per_round = coded_bits(model, ways=2)
    assert per_round == want["fedsimclr_bits_round_client_two_way"]
    assert 800 * per_round == want["fedsimclr_total_client_800"]
    assert 10 * 800 * per_round == want["fedsimclr_total_10_clients"]
    phase_1 = coded_bits(sensor, ways=2)
    assert phase_1 == want["mfcl_ph1_bits_round_client_two_way"]
    assert 15 * phase_1 == want["mfcl_ph1_total_client_15"]
    assert images * code == want["rep_floats_client_one_view"]
    one = coded_bits(images * code)
    assert one == want["rep_bits_client_one_view"]
    assert 2 * one == want["rep_bits_client_two_views"]
    assert 10 * one == want["rep_bits_10_clients_one_view"]
    assert 64 * code == want["batch64_tensor_floats"]
    assert 10 * (15 * phase_1 + one) == want["total_10_clients_one_view"]
    assert 10 * (15 * phase_1 + 2 * one) == want["total_10_clients_two_views"]
    refreshes = (10 * 800 * per_round - 10 * 15 * phase_1) / (10 * 2 * one)
    assert refreshes == pytest.approx(want["refreshes_equal_fedsimclr"])


def test_table_8_from_the_methods_themselves() -> None:
    """The same with what our methods send: 11.76 M and 77,853 parameters, two views."""
    sizes = dict.fromkeys(range(10), 5000)

    def total(method: str, rounds: int, **options: Any) -> Traffic:
        given = {"method": method, "encoder": "resnet18", "rounds": rounds, **options}
        server = without_data(from_tree({}, given, "test"), sizes)
        costs = list(predict(server))
        return sum((c.up + c.down for c in costs), Traffic())

    fedsimclr = total("fedsimclr", 2, **{"method.projection_head": "mfcl_proj"})
    assert fedsimclr.params == 2 * 2 * 10 * 4 * (11_168_832 + 592_128)
    mfcl = total("mfcl", 15, **{"method.server_epochs": 1})
    assert mfcl.features == 10 * 2 * 327_680_000 * 4
    ratio = 400 * coded_bits(fedsimclr.params // 4) / coded_bits(mfcl.total // 4)
    assert ratio == pytest.approx(28.6, abs=0.05)  # 26.7 with the table's round values
