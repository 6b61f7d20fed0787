"""The demonstration without its runs: settings, order of the processes, averages, words."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from furlong.errors import FurlongError
from furlong.runs import config, demo

ACCURACY = {"random": 0.3, "alone": 0.5, "federated": 0.6, "pooled": 0.7}


def rows(**changes: float) -> list[dict[str, Any]]:
    return [
        {"who": who, "protocol": protocol, "labels": 1.0, "accuracy": (ACCURACY | changes)[who]}
        for who in demo.WHO
        for protocol in ("knn", "linear")
    ]


def test_settings_are_a_valid_configuration() -> None:
    found = config.from_tree({}, demo.SETTINGS, "demo")
    usual = config.from_tree({}, {"method": "fedsimclr"}, "usual")
    assert found.method == usual.method
    assert found.optimiser == replace(usual.optimiser, schedule="constant")
    assert found.train.batch_size == usual.train.batch_size
    assert (found.data.clients, found.train.rounds, found.server.rule) == (5, 24, "mean")
    federated = config.from_tree({}, {**demo.SETTINGS, **demo.FEDERATED}, "demo")
    assert (federated.server.rule, federated.server.momentum) == ("momentum", 0.6)


def test_average_of_one_seed_is_that_seed() -> None:
    assert demo.average([rows()]) == rows()


def test_average_over_seeds() -> None:
    found = demo.average([rows(federated=0.5), rows(federated=0.6), rows(federated=0.7)])
    assert [(r["who"], r["protocol"]) for r in found] == [(r["who"], r["protocol"]) for r in rows()]
    (row,) = [r for r in found if (r["who"], r["protocol"]) == ("federated", "linear")]
    assert row["accuracy"] == pytest.approx(0.6)
    assert row["std"] == pytest.approx(0.1)
    assert found[0]["std"] == pytest.approx(0)


def test_average_replaces_the_spread_over_clients() -> None:
    first, second = rows(), rows(alone=0.6)
    for each in (first, second):
        for row in each:
            if row["who"] == "alone":
                row["std"] = 9.0
    found = {(r["who"], r["protocol"]): r for r in demo.average([first, second])}
    assert found["alone", "linear"]["std"] == pytest.approx(0.0707, abs=1e-4)


def test_runs_of_unequal_length_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        demo.average([rows(), rows()[:-1]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["gains 30.0 points", "10.0 points ahead of a client", "10.0 points short of pool"]),
        ({"alone": 0.65}, ["5.0 points behind a client alone"]),
        ({"pooled": 0.55}, ["5.0 points ahead of pooling"]),
        ({"federated": 0.7}, ["0.0 points short of pooling"]),
    ],
)
def test_verdict(changes: dict[str, float], words: list[str]) -> None:
    text = demo.verdict(rows(**changes))
    assert "-" not in text
    for word in words:
        assert word in text


class FakeProcess:
    """Stands for ``furlong run``: notes its options, writes a summary, ends at once."""

    started: list[dict[str, str]]
    fails = ""

    def __init__(self, command: list[str], **_: Any) -> None:
        words = command[command.index("run") :]
        options = {word[2:]: value for word, value in pairwise(words) if word.startswith("--")}
        settings = config.from_tree({}, options, "demo")
        knn, rule = str(settings.evaluate.knn_every), settings.server.rule
        self.started.append({"bound": settings.run.bound, "knn": knn, "rule": rule})
        out = Path(str(settings.run.out))
        out.mkdir(parents=True)
        who = {"none": "federated", "single": "alone", "pooled": "pooled"}[settings.run.bound]
        self.code = int(settings.run.bound == self.fails)
        if self.code:
            out.with_suffix(".log").write_text("error: out of luck\n")
            return
        results = [r for r in rows() if r["who"] in ("random", who)]
        (out / "summary.json").write_text(json.dumps({"results": results}))
        (out / "metrics.jsonl").write_text("{}\n" * 16)

    def poll(self) -> int:
        return self.code

    def kill(self) -> None:
        raise AssertionError("it has ended")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    FakeProcess.started, FakeProcess.fails = [], ""
    monkeypatch.setattr(demo.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(demo.time, "sleep", lambda _: None)
    return FakeProcess


@pytest.mark.parametrize("cores", [1, 2])
def test_one_seed_is_three_runs(
    fake: type[FakeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    shown: dict[str, int] = {}
    found = demo.run_seed(tmp_path / "0", 0, lambda name, done: shown.update({name: done}))
    assert found == rows()
    assert shown == {"federated": 24, "pooled": 24, "alone": 24}
    assert [each["bound"] for each in fake.started] == ["none", "pooled", "single"]
    assert [each["rule"] for each in fake.started] == ["momentum", "mean", "mean"]
    assert [each["knn"] for each in fake.started] == ["4", "4", "24"]


def test_a_run_that_fails_is_an_error_with_its_last_words(
    fake: type[FakeProcess], tmp_path: Path
) -> None:
    fake.fails = "pooled"
    with pytest.raises(FurlongError, match=r"pooled run of the demo failed.*out of luck"):
        demo.run_seed(tmp_path / "0", 0, lambda *_: None)
