"""MLflow and Weights & Biases beside TensorBoard: what they hear, also of a run that goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import tiny

from furlong.errors import FurlongError
from furlong.runs import loop
from furlong.runs.config import from_tree
from furlong.runs.trackers import described


class Told(list[Any]):
    """Everything that the stand-ins of both packages were told, in order."""

    def of(self, what: str) -> list[Any]:
        return [rest for name, *rest in self if name == what]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()

    def note(name: str, gives: Any = None) -> Any:
        def call(*words: Any, **options: Any) -> Any:
            found.append((name, *words, options))
            return gives

        return call

    mlflow: Any = ModuleType("mlflow")
    mlflow.start_run = note("start", SimpleNamespace(info=SimpleNamespace(run_id="m1")))
    for name in ("set_experiment", "log_params", "log_metrics", "end_run"):
        setattr(mlflow, name, note(name))
    run = SimpleNamespace(id="w1", log=note("log"), finish=note("finish"))
    run.summary = SimpleNamespace(update=note("summary"))
    wandb: Any = ModuleType("wandb")
    wandb.init = note("init", run)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return found


def test_a_run_tells_both(told: Told, tmp_path: Path) -> None:
    run = loop.run(tiny(out=str(tmp_path / "brains"), **{"run.track": "mlflow, wandb"}))
    assert told.of("start") == [[{"run_name": "brains"}]]
    ((options,),) = told.of("init")
    assert options["project"] == "furlong"
    assert options["config"]["train.rounds"] == 2
    lines = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("log_metrics", "log"):
        numbers = told.of(name)
        assert [rest[1]["step"] for rest in numbers[:2]] == [0, 1]
        assert [rest[0]["loss"] for rest in numbers[:2]] == [line["loss"] for line in lines]
        assert "clients/0/loss" in numbers[0][0]
    final = told.of("summary")[0][0]
    assert final == told.of("log_metrics")[2][0]
    assert final["results/federated/linear/accuracy"] == run.accuracy()
    assert told.of("end_run")[0][0] == "FINISHED"
    assert told.of("finish") == [[{"exit_code": 0}]]
    assert json.loads((run.folder / "track.json").read_text()) == {"mlflow": "m1", "wandb": "w1"}
    for names in (told.of("log_params")[0][0], options["config"]):
        assert str(tmp_path) not in json.dumps(names, default=str)


def test_a_run_that_goes_on_logs_to_the_same_entry(told: Told, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(status: Any) -> None:
        if status.done == 1:
            raise Stop

    settings = tiny(out=str(tmp_path / "run"), **{"run.track": "wandb,mlflow"})
    with pytest.raises(Stop):
        loop.run(settings, stop)
    assert told.of("end_run") == [["FAILED", {}]]
    assert told.of("finish") == [[{"exit_code": 1}]]
    told.clear()
    loop.resume(tmp_path / "run")
    assert told.of("start") == [[{"run_id": "m1"}]]
    assert told.of("log_params") == []
    assert told.of("init")[0][0]["id"] == "w1"
    assert [rest[1]["step"] for rest in told.of("log")] == [1]


def test_a_tracker_that_fails_does_not_end_a_run(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["mlflow"], "log_metrics", broken)
    said: list[str] = []
    settings = tiny(out=str(tmp_path / "run"), **{"run.track": "mlflow,wandb"})
    loop.run(settings, say=said.append)
    assert [text for text in said if "mlflow" in text] == [
        "mlflow failed, and the run goes on without it: no network"
    ]
    assert len(told.of("log")) == 2


@pytest.mark.parametrize(
    ("track", "said"),
    [("mlfow", "Did you mean 'mlflow'"), ("wandb", "not installed: pip install .furlong-fl.wandb")],
)
def test_mistakes_show_before_the_training(
    track: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(FurlongError, match=said):
        loop.run(tiny(out=str(tmp_path / "run"), **{"run.track": track}))
    assert not (tmp_path / "run").exists()


def test_no_path_leaves_the_machine() -> None:
    given = {"data": "folder:/home/anna/scans", "data.root": "/home/anna", "out": "/home/anna/run"}
    found = described(from_tree({}, given, "test"))
    assert found["data.name"] == "folder:scans"
    assert "anna" not in json.dumps(found)
