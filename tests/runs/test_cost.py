"""Predicted traffic equals counted traffic, for every method; MFCL's Table 8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import Call

from furlong.core.exchange import Server
from furlong.core.payload import Traffic
from furlong.engines.inprocess import InProcess
from furlong.methods import METHODS
from furlong.runs.config import load
from furlong.runs.cost import Channel, predict, without_data


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
    code, images = 64 * 32 * 32, 5000
    fedsimclr = Channel(rounds=800, parameters=11_000_000, values=0, clients=10)
    assert fedsimclr.bits_of_a_round == want["fedsimclr_bits_round_client_two_way"]
    assert fedsimclr.bits_of_models == want["fedsimclr_total_client_800"]
    assert fedsimclr.bits == want["fedsimclr_total_10_clients"]
    one = Channel(rounds=15, parameters=100_000, values=images * code, clients=10)
    assert one.bits_of_a_round == want["mfcl_ph1_bits_round_client_two_way"]
    assert one.bits_of_models == want["mfcl_ph1_total_client_15"]
    assert one.values == want["rep_floats_client_one_view"]
    assert one.bits_of_representations == want["rep_bits_client_one_view"]
    assert 10 * one.bits_of_representations == want["rep_bits_10_clients_one_view"]
    assert 64 * code == want["batch64_tensor_floats"]
    assert one.bits == want["total_10_clients_one_view"]
    two = replace(one, values=2 * one.values)
    assert two.bits_of_representations == want["rep_bits_client_two_views"]
    assert two.bits == want["total_10_clients_two_views"]
    refreshes = (fedsimclr.bits - 10 * two.bits_of_models) / (10 * two.bits_of_representations)
    assert refreshes == pytest.approx(want["refreshes_equal_fedsimclr"])


def test_table_8_of_the_papers_rows(furlong_: Call) -> None:
    """The same with what the methods send, 11.76 M and 77,853 parameters; the command says it."""
    found = {}
    for row in ("fedsimclr", "pn"):
        settings = load(
            f"paper:mfcl/table2/cifar10/sc2/{row}",
            {"method.server_epochs": 1} if row == "pn" else {},
        )
        costs = list(predict(without_data(settings, dict.fromkeys(range(10), 5000))))
        found[row] = Channel.of(costs, 10)
    assert found["fedsimclr"] == Channel(800, 11_168_832 + 592_128, 0, 10)
    assert found["pn"] == Channel(15, 77_853, 2 * 327_680_000, 10)
    assert found["fedsimclr"].bits / found["pn"].bits == pytest.approx(28.6, abs=0.05)
    said = furlong_("cost", "paper:mfcl/table2/cifar10/sc2/pn", "--sizes", "5000x10")
    for words in ("77,853 parameters", "1.49e+07 bits per round", "2.24e+08 bits in all (phase 1)"):
        assert words in " ".join(said.out.split())
    for words in ("655,360,000 values", "6.29e+10 bits (phase 2)", "All clients: 6.31e+11 bits"):
        assert words in " ".join(said.out.split())


def test_a_client_that_takes_part_now_and_then(prepared: Any) -> None:
    """Means over all clients, though two of three take part in each of three rounds."""
    server = prepared("fedsimclr", rounds=3, fraction=0.7).server
    costs = list(predict(server))
    sent = Channel.of(costs, 3)
    assert sent.rounds == 2
    assert sent.bits == sum(c.up.params for c in costs) * 8 * 3 * 2
