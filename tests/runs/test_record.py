"""The record of a run folder: typed, checked, and read when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_runs import line, make

from furlong.errors import FurlongError
from furlong.runs import loop
from furlong.runs.folder import RunFolder
from furlong.runs.record import RunRecord


def test_finished_run(tmp_path: Path) -> None:
    run = RunRecord.open(make(tmp_path / "run", "fedu", 3, 0.5, bound="pooled"))
    assert (run.name, run.method, run.bound, run.seed) == ("fedu@pooled", "fedu", "pooled", 3)
    assert run.finished.who == "pooled"
    assert [(r.who, r.protocol, r.accuracy) for r in run.results][-1] == ("pooled", "linear", 0.5)
    assert run.split is not None
    assert run.split.clients == len(run.split.sizes) == 5
    assert [each.round for each in run.lines()] == [0, 1, 2]
    assert run.lines()[1].up.params == 1_500_000
    assert run.lines()[2].metrics["loss"] == 4.75
    assert run.config().train.rounds == 3
    assert run.encoder["encoder"] == run.settings["model"]["encoder"]


def test_unfinished_run_has_a_record(tmp_path: Path) -> None:
    run = RunRecord.open(make(tmp_path / "run", finished=False, done=0))
    assert (run.summary, run.results, run.lines(), run.encoder) == (None, [], [], {})
    assert (run.federation, run.plane) == (None, None)
    with pytest.raises(FurlongError, match="has not finished: 'furlong resume"):
        _ = run.finished


def test_a_file_that_nobody_asks_for_may_be_damaged(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    for name in ("metrics.jsonl", "evaluations.json", "tsne.json", "federation.json"):
        (path / name).write_text("{")
    assert RunRecord.open(path).finished.images == 100


def test_later_evaluations_follow_the_run_s_own(tmp_path: Path) -> None:
    folder = RunFolder(make(tmp_path / "run"))
    rows = [
        {"who": "federated", "protocol": "quality", "uniformity": -2.0},
        {"who": "federated", "protocol": "semi-10", "labels": 0.1, "accuracy": 1, "std": 0.5},
    ]
    folder.write("evaluations.json", rows)
    assert folder.record.evaluations == rows
    last = folder.record.results[-1]
    assert (last.protocol, last.labels, last.accuracy, last.std) == ("semi-10", 0.1, 1, 0.5)


def test_a_line_that_was_cut_off_ends_the_log(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"exchange": 3, "rou')
    assert len(RunRecord(path).lines()) == 3
    RunFolder(path).keep_lines(2)
    RunFolder(path).append(line(2, 5))
    assert [each.exchange for each in RunRecord(path).lines()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("file", "text", "part", "said"),
    [
        ("summary.json", "[]", "summary", r"summary\.json .*it is damaged"),
        ("summary.json", '{"who": 1}', "summary", "who is not what it should be"),
        ("partition.json", '{"partition": "iid"}', "split", r"partition\.json .*sizes is missing"),
        ("encoder.json", "7", "encoder", r"encoder\.json .*it is damaged"),
        ("evaluations.json", "[1]", "evaluations", r"evaluations\.json .*move it away"),
        ("evaluations.json", '[{"accuracy": 1}]', "results", "who is missing"),
        ("federation.json", '{"run": "x"}', "federation", "sites is missing"),
        ("tsne.json", '{"points": 1}', "plane", "points is not what it should be"),
        ("config.toml", "[method]\nname = 'fedu'", "settings", r"data\.name is missing"),
        ("config.toml", "method = 3", "settings", r"method\.name is missing"),
        ("config.toml", "\xff", "settings", "cannot read"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, text: str, part: str, said: str) -> None:
    path = make(tmp_path / "run")
    (path / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(FurlongError, match=said):
        getattr(RunRecord.open(path), part)


def test_damaged_results_and_lines_are_named(tmp_path: Path) -> None:
    folder = RunFolder(make(tmp_path / "run"))
    summary = folder.record.read("summary.json")
    del summary["results"][0]["accuracy"]
    folder.write("summary.json", summary)
    with pytest.raises(FurlongError, match=r"summary\.json, results .*accuracy is missing"):
        _ = folder.record.summary
    folder.append({"exchange": 3, "round": 3, "up": 1})
    assert [each.exchange for each in folder.record.lines()] == [0, 1, 2]
    assert folder.record.damaged_lines.endswith("metrics.jsonl: damaged lines are left out: 4")


def test_a_damaged_line_costs_no_other(tmp_path: Path) -> None:
    lines = [b'{"exchange": 0}', b'{"exch\xff', b"[" * 10**5, b'{"exchange": 3}', b'{"exchange": 4']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    record = RunRecord(tmp_path)
    assert [line["exchange"] for line in record.raw_lines()] == [0, 3]
    (tmp_path / "metrics.jsonl").write_bytes(
        b"\n".join([json.dumps(line(0, 5)).encode(), *lines[1:3]])
    )
    assert [each.exchange for each in record.lines()] == [0]
    assert record.damaged_lines.endswith("left out: 2, 3")


@pytest.mark.parametrize("name", ["config.toml", "encoder.json", "random.safetensors"])
def test_a_file_that_was_changed_is_refused(tmp_path: Path, name: str) -> None:
    """One bit is enough; what is missing, or was never sealed, is for others to notice."""
    folder = RunFolder(make(tmp_path / "run"))
    folder.save_weights("random", {"w": torch.zeros(3)})
    for each in ("config.toml", "encoder.json", "random.safetensors", "no.safetensors"):
        folder.record.verify(each)
    path = folder.path / name
    whole = bytearray(path.read_bytes())
    whole[-2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(FurlongError, match=rf"{name} was changed or is damaged"):
        folder.record.verify(name)
    (folder.path / "digests.json").unlink()  # as in a run of an older furlong
    folder.record.verify(name)


def test_an_edited_configuration_is_not_gone_on_with(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False) / "config.toml"
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 4"))
    with pytest.raises(FurlongError, match=r"config\.toml was changed.* --out OTHER"):
        loop.resume(tmp_path / "run")
