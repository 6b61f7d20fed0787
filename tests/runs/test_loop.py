"""A whole run: what it writes, what it counts, and what it does with data of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import pinned, tiny
from PIL import Image
from torch import nn

import furlong
from furlong.core.context import Exchange
from furlong.core.exchange import ExchangeResult
from furlong.core.payload import Traffic, parts, traffic
from furlong.core.weights import snapshot
from furlong.errors import FurlongError
from furlong.evaluation.quality import QUALITY
from furlong.runs import config, evaluate, loop, observers
from furlong.runs.cost import flows
from furlong.runs.datasets import load_data, load_public
from furlong.runs.encoders import who
from furlong.runs.folder import RunFolder
from furlong.runs.loop import Run
from furlong.runs.observers import Monitor, Status, usual_spacing
from furlong.runs.prepare import prepare
from furlong.runs.saved_encoder import load_encoder
from furlong.runs.split import describe_partition

SCALARS = 8 * 5  # of a report: client, exchange, examples, and two metrics (loss, images)


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Status], list[str]]:
    """One tiny run that several tests look at."""
    out = tmp_path_factory.mktemp("runs") / "first"
    shown: list[Status] = []
    said: list[str] = []
    settings = tiny(out=str(out), **{"evaluate.knn_every": 2})
    return furlong.run_config(settings, shown.append, said.append), shown, said


# ---------------------------------------------------------------- clients that hang

HANGS = """
import time
from dataclasses import dataclass
from pathlib import Path
from furlong.methods.fedema import FedEMA

@dataclass(frozen=True)
class Hangs(FedEMA):
    def local_update(self, state, down, ctx):
        if ctx.client == 1 and ctx.exchange.index == 1 and Path("hang").exists():
            time.sleep(600)
        return super().local_update(state, down, ctx)
"""


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., config.Config]:
    """Three rounds of a method whose client 1 hangs in the second, while a file is there."""
    monkeypatch.chdir(tmp_path)
    Path("hangs.py").write_text(HANGS)
    Path("hang").touch()
    heads = {"method.projection_head": "small_proj", "method.prediction_head": "small_pred"}

    def make(out: str, **options: Any) -> config.Config:
        given = heads | {"rounds": 3, "evaluate.probe": "none", "workers": 2}
        given["data.images"] = 24  # one step a round: far from any deadline, on a busy machine too
        return tiny("hangs.py:Hangs", out=out, **given, **options)

    return make


def test_a_missed_deadline_is_told_logged_and_reported(
    hangs: Callable[..., config.Config],
) -> None:
    shown: list[Status] = []
    run = furlong.run_config(hangs("run", **{"run.deadline": 3.0}), shown.append)
    missed = {"client": 1, "kind": "lost", "reason": "no answer within 3 s"}
    assert [line["failures"] for line in lines(run)] == [[], [missed], []]
    assert ["1" in line["clients"] for line in lines(run)] == [True, False, True]
    assert shown[1].failures == ["client 1 lost: no answer within 3 s"]
    assert run.summary["failures"] == 1
    page = (run.folder / "report.html").read_text()
    assert "1 answer of 1 client did not count" in page
    assert "no answer within 3 s" in page


def test_a_run_that_stopped_for_want_of_clients_goes_on(
    hangs: Callable[..., config.Config],
) -> None:
    """With the bits of a run in which nobody was ever late."""
    with pytest.raises(FurlongError, match=r"2 of 3 clients answered in exchange 2 \(round 2\)"):
        loop.run(hangs("stopped", **{"run.deadline": 3.0, "train.min_clients": 3}))
    Path("hang").unlink()
    again = loop.resume("stopped", {"run.deadline": "60", "train.min-clients": "1"})
    assert again.summary["failures"] == 0
    whole = loop.run(hangs("whole"))
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    with pytest.raises(FurlongError, match=r"--train\.rounds cannot be given"):
        loop.resume("stopped", {"train.rounds": 4})


# ---------------------------------------------------------------- the folder


def test_every_file_is_written(finished: Any) -> None:
    folder = finished[0].folder
    assert {p.name for p in folder.iterdir()} - {".lock"} == {
        "config.toml",
        "partition.json",
        "random.safetensors",
        "digests.json",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        "summary.json",
        "encoder.safetensors",
        "encoder.json",
        "map.json",
        "report.html",
    }
    (events,) = (folder / "tensorboard").iterdir()
    assert "tfevents" in events.name
    assert events.stat().st_size > 200
    assert "<html" in (folder / "report.html").read_text()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["000001", "000002"]
    assert not finished[2]


def test_the_written_configuration_is_complete(finished: Any) -> None:
    path = finished[0].folder / "config.toml"
    found = config.load(path)
    assert found.toml() == path.read_text()
    assert found.data.augment == "shapes"  # not "auto"
    assert found.method["projection_head"] == "small_proj"
    assert found.run.out == str(finished[0].folder)
    assert "rounds = 2" in path.read_text()


def test_the_partition_is_written(finished: Any) -> None:
    run = finished[0]
    about = json.loads((run.folder / "partition.json").read_text())
    p = prepare(config.load(run.folder / "config.toml"))
    assert about == describe_partition(p.train, p.split)
    assert about["sizes"] == [24, 24, 24]


def test_metrics_have_a_line_per_exchange(finished: Any) -> None:
    found = lines(finished[0])
    assert [line["exchange"] for line in found] == [0, 1]
    assert [line["round"] for line in found] == [0, 1]
    for line in found:
        assert set(line) == {
            "exchange", "round", "kind", "loss", "knn", "seconds", "images_per_second", "bytes_up",
            "bytes_down", "up", "down", "clients", "failures", "alignment", "uniformity",
            "effective_rank", "spread", "untrained",
        }  # fmt: skip
        assert set(line["up"]) == {"params", "buffers", "features", "scalars"}
        assert line["bytes_up"] == sum(line["up"].values())
        assert line["bytes_down"] == sum(line["down"].values())
        assert list(line["clients"]) == ["0", "1", "2"]
        losses = [each["loss"] for each in line["clients"].values()]
        assert line["loss"] == pytest.approx(sum(losses) / 3)  # clients of equal size
        assert all(each["images"] == 24 for each in line["clients"].values())
        assert line["failures"] == []
    assert found[0]["knn"] is None  # every second round
    assert found[0]["untrained"] is None
    assert set(found[1]["untrained"]) == {"knn", *QUALITY}
    assert 0 <= found[1]["knn"] <= 1


def test_the_summary(finished: Any) -> None:
    run: Run = finished[0]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary == run.summary
    found = lines(run)
    assert summary["who"] == "federated"
    assert (summary["clients"], summary["rounds"], summary["images"]) == (3, 2, 72)
    assert summary["seconds"] == pytest.approx(sum(x["seconds"] for x in found), abs=1e-2)
    assert summary["images_per_second"] == pytest.approx(144 / summary["seconds"], rel=0.01)
    for way in ("bytes_up", "bytes_down"):
        assert summary[way] == sum(x[way] for x in found)
    rows = [(r["who"], r["protocol"]) for r in summary["results"]]
    assert rows == [(w, p) for w in ("random", "federated") for p in ("knn", "linear")]
    assert all(0 <= r["accuracy"] <= 1 and r["labels"] == 1 for r in summary["results"])
    assert run.accuracy() == summary["results"][3]["accuracy"]
    assert run.accuracy("knn", "random") == summary["results"][0]["accuracy"]
    with pytest.raises(FurlongError, match="no result"):
        run.accuracy("finetune")


def test_the_summary_has_what_needs_no_labels(finished: Any) -> None:
    run: Run = finished[0]
    rows = evaluate.evaluate(run.folder, evaluate.settings_of(run.folder), "quality", random=True)
    kept = {row["who"]: row for row in run.summary["quality"]}
    assert list(kept) == ["random", "federated"]
    for row in rows:
        assert all(kept[row["who"]][name] == row[name] for name in (*QUALITY, "collapsed"))
    assert RunFolder.open(run.folder).record.ranks == {
        who: row["effective_rank"] for who, row in kept.items()
    }
    (run.folder / "evaluations.json").unlink()


def test_more_protocols_at_the_end(tmp_path: Path) -> None:
    also = {"evaluate.also": "semi-50:epochs=1, knn:k=3", "evaluate.probe": "none", "rounds": 1}
    run = loop.run(tiny(out=str(tmp_path / "run"), **also))
    rows = [(r["who"], r["protocol"], r["labels"]) for r in run.summary["results"]]
    measured = [("knn", 1.0), ("semi-50:epochs=1", 0.5), ("knn:k=3", 1.0)]
    assert rows == [(who, *each) for who in ("random", "federated") for each in measured]
    found = evaluate.evaluate(run.folder, evaluate.settings_of(run.folder), "semi-50:epochs=1")
    assert found[0]["accuracy"] == run.accuracy("semi-50:epochs=1")
    for words, wrong in (
        ("transfer:mnist", "a run can end with knn, linear"),
        ("quality", "furlong evaluate RUN --protocols quality"),
        ("semi-0.1", "less than one for each"),
        ("simi-1", "semi-10"),
    ):
        with pytest.raises(FurlongError, match=wrong):
            loop.run(tiny(out=str(tmp_path / "wrong"), **{"evaluate.also": words}))
    assert not (tmp_path / "wrong").exists()  # nothing was trained


def test_a_mean_is_over_the_clients_that_have_the_metric() -> None:
    result: Any = ExchangeResult(
        exchange=Exchange(round=0), server=None, cohort=[0, 1, 2], failures=[],
        examples={0: 10, 1: 30, 2: 60},
        metrics={0: {"loss": 1.0, "own": 4.0}, 1: {"loss": 2.0, "own": 8.0}, 2: {"loss": 3.0}},
        up=Traffic(), down=Traffic(), seconds=1.0, own={},
    )  # fmt: skip
    line = observers.line_of(result)
    assert line["loss"] == pytest.approx(0.1 + 0.6 + 1.8)
    assert line["own"] == pytest.approx((10 * 4 + 30 * 8) / 40)


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert step == 4
            found[name] = value

    found: dict[str, float] = {}
    board = observers.TensorBoard(tmp_path)
    board._writer = Writer()
    line = {
        "exchange": 4, "round": 3, "kind": "train", "knn": None, "loss": 0.5, "own_number": 7,
        "untrained": {"effective_rank": 40.0}, "clients": {"2": {"loss": 0.25}}, "failures": [],
    }  # fmt: skip
    board(observers.Event(cast(Any, None), line, {}, 5, 9))
    assert found == {
        "loss": 0.5, "own_number": 7, "untrained/effective_rank": 40.0, "clients/2/loss": 0.25
    }  # fmt: skip


def test_bytes_are_those_of_the_payloads(finished: Any) -> None:
    run: Run = finished[0]
    sent = flows("fedsimclr", "small", 3, 16, **pinned("fedsimclr"))["train"]
    down, up = traffic(sent["down"]), traffic(sent["up"])
    assert down.total == sum(count for *_, count in parts(sent["down"]))
    visits = 3 * 2
    assert run.summary["bytes_down"] == visits * down.total
    assert run.summary["bytes_up"] == visits * (up.total + SCALARS)
    first = lines(run)[0]
    assert first["up"]["params"] == first["down"]["params"] == 3 * down.params
    assert first["up"]["scalars"] == 3 * SCALARS
    assert first["down"]["scalars"] == 0


def test_what_was_shown(finished: Any) -> None:
    run, shown, _ = finished
    assert [(s.done, s.total, s.round) for s in shown] == [(1, 2, 0), (2, 2, 1)]
    assert shown[0].knn is None
    assert shown[0].seconds_left > 0
    assert shown[1].seconds_left == 0
    assert shown[1].bytes_up == run.summary["bytes_up"]
    assert shown[1].loss == lines(run)[1]["loss"]


def test_the_encoder(finished: Any) -> None:
    run: Run = finished[0]
    encoder = run.encoder
    about = json.loads((run.folder / "encoder.json").read_text())
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert not encoder.training
    with torch.no_grad():
        once = encoder(encoder.transform(images))
        assert once.shape == (5, about["width"])
        assert torch.equal(encoder(encoder.transform(images)), once)
        again = load_encoder(str(run.folder))
        assert torch.equal(again(again.transform(images)), once)
        alone = encoder(encoder.transform(images[:1]))  # BatchNorm uses its statistics
        torch.testing.assert_close(alone, once[:1])


def evaluated(folder: Path, settings: config.Config) -> list[dict[str, Any]]:
    """The rows of ``evaluate.evaluate``, as far as a summary has them."""
    apart = ("data", "settings")  # a summary has none
    rows = evaluate.evaluate(folder, settings)
    return [{key: value for key, value in row.items() if key not in apart} for row in rows]


def test_evaluate_gives_the_numbers_of_the_summary(finished: Any) -> None:
    run: Run = finished[0]
    rows = evaluated(run.folder, config.load(run.folder / "config.toml"))
    assert rows == run.summary["results"][2:]


def test_the_monitor_leaves_the_encoder_as_it_is(finished: Any) -> None:
    run: Run = finished[0]
    encoder = run.encoder.train()
    before = snapshot(encoder)
    p = prepare(config.load(run.folder / "config.toml"))
    monitor = Monitor(p, nn.Flatten(), lambda _: None)
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    found = monitor.measure({"federated": encoder})
    assert 0 <= found["federated"]["knn"] <= 1
    assert monitor.measure({"federated": encoder}) == found
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert encoder.training
    assert all(torch.equal(t, before[n]) for n, t in snapshot(encoder).items())


@pytest.mark.parametrize(
    ("options", "spacing"),
    [
        ({"rounds": 2}, 1),
        ({"rounds": 20}, 10),  # 256 passes of images beside 432 in a round: dear, but twice
        ({"rounds": 20, "epochs": 5}, 3),
        ({"rounds": 20, "epochs": 20}, 1),
        ({"rounds": 20, "epochs": 20, "bound": "single"}, 3),  # three encoders
        ({"rounds": 400, "epochs": 20}, 20),
    ],
)
def test_a_run_is_measured_more_often_the_more_it_trains(
    prepared: Any, options: dict[str, Any], spacing: int
) -> None:
    assert usual_spacing(prepared(**options), options["rounds"]) == spacing


def test_damaged_and_missing_encoders_are_named(finished: Any, tmp_path: Path) -> None:
    run: Run = finished[0]
    with pytest.raises(FurlongError, match="no encoder yet"):
        load_encoder(tmp_path)
    for name in ("encoder.json", "encoder.safetensors"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    load_encoder(tmp_path)
    whole = (tmp_path / "encoder.safetensors").read_bytes()
    (tmp_path / "encoder.safetensors").write_bytes(whole[:-10])
    with pytest.raises(FurlongError, match="is damaged"):
        load_encoder(tmp_path)
    about = json.loads((tmp_path / "encoder.json").read_text())
    (tmp_path / "encoder.safetensors").write_bytes(whole)
    (tmp_path / "encoder.json").write_text(json.dumps(about | {"encoder": "cnn5"}))
    with pytest.raises(FurlongError, match="weights are of another network"):
        load_encoder(tmp_path)
    for wrong in ({"channels": -3}, {"channels": 10**9}, {"image_size": 10**6}):
        (tmp_path / "encoder.json").write_text(json.dumps(about | wrong))
        with pytest.raises(FurlongError, match="are possible"):
            load_encoder(tmp_path)
    (tmp_path / "encoder.json").write_bytes((run.folder / "encoder.json").read_bytes())
    (tmp_path / "digests.json").write_bytes((run.folder / "digests.json").read_bytes())
    flipped = bytearray(whole)
    flipped[-1] ^= 1  # a weight of the same size
    (tmp_path / "encoder.safetensors").write_bytes(flipped)
    with pytest.raises(FurlongError, match=r"encoder\.safetensors was changed or is damaged"):
        load_encoder(tmp_path)
    (tmp_path / "digests.json").unlink()
    (tmp_path / "encoder.json").write_text("{")
    with pytest.raises(FurlongError, match="cannot read"):
        load_encoder(tmp_path)


def test_a_folder_with_a_run_is_not_touched(finished: Any) -> None:
    folder = finished[0].folder
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(FurlongError, match="already holds a run"):
        loop.run(tiny(out=str(folder)))
    assert (folder / "summary.json").read_bytes() == before
    said: list[str] = []
    page = folder / "report.html"
    page.unlink()  # killed between summary.json and report.html
    assert furlong.resume(folder, say=said.append).summary == finished[0].summary
    assert "finished" in said[0]
    assert page.exists()


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(FurlongError, match="another process is working"),
            RunFolder(tmp_path).locked(),
        ):
            pass
        other.communicate(b"")
    with RunFolder(tmp_path).locked():
        pass


def test_from_python_with_a_part_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = furlong.run(
        {"evaluate": {"probe": "none"}, "optimiser": {"lr": 0.01}},
        method="fedsimclr",
        data="shapes",
        clients=4,
        partition="iid",
        fraction=0.5,
        rounds=3,
        batch_size=8,
        workers=1,
        **{"data.images": 64, "data.test_images": 40, "data.image_size": 16},
    )
    assert run.folder == Path("runs/fedsimclr-shapes-1")
    cohorts = [sorted(line["clients"]) for line in lines(run)]
    assert [len(c) for c in cohorts] == [2, 2, 2]
    assert len({tuple(c) for c in cohorts}) > 1
    per_client = traffic(flows("fedsimclr", "small", 3, 16)["train"]["down"]).total
    assert run.summary["bytes_down"] == 6 * per_client
    assert {r["protocol"] for r in run.summary["results"]} == {"knn"}
    with pytest.raises(FurlongError, match=r"furlong\.run: unknown section"):
        furlong.run({"trian": {}})
    with pytest.raises(FurlongError, match="unknown option"):
        furlong.run(clinets=3)


# ---------------------------------------------------------------- bounds


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "single"
    return loop.run(tiny(bound="single", rounds=1, out=str(out)))


def test_single(single: Run) -> None:
    run = single
    assert (run.summary["bytes_up"], run.summary["bytes_down"]) == (0, 0)
    assert run.summary["who"] == "alone"
    by = {(r["who"], r["protocol"]): r for r in run.summary["results"]}
    people = ["random", *(f"client {k} alone" for k in range(3)), "alone"]
    assert set(by) == {(w, p) for w in people for p in ("knn", "linear")}
    for protocol in ("knn", "linear"):
        each = np.array([by[f"client {k} alone", protocol]["accuracy"] for k in range(3)])
        assert by["alone", protocol]["accuracy"] == pytest.approx(each.mean())
        assert by["alone", protocol]["std"] == pytest.approx(each.std(ddof=1))
        assert run.accuracy(protocol) == by["alone", protocol]["accuracy"]


def test_a_bound_logs_no_bytes(single: Run) -> None:
    (line,) = lines(single)
    assert (line["bytes_up"], line["bytes_down"]) == (0, 0)  # as in the summary


def test_evaluate_measures_every_client_and_the_mean(single: Run) -> None:
    rows = evaluated(single.folder, config.load(single.folder / "config.toml"))
    wanted = [row for row in single.summary["results"] if row["who"] != "random"]
    order = lambda row: (row["who"], row["protocol"])  # noqa: E731
    assert sorted(rows, key=order) == sorted(wanted, key=order)


def test_pooled(tmp_path: Path) -> None:
    run = loop.run(tiny(bound="pooled", rounds=1, out=str(tmp_path / "run")))
    summary = run.summary
    assert (summary["bytes_up"], summary["bytes_down"]) == (0, 0)
    assert (summary["who"], summary["clients"], summary["images"]) == ("pooled", 1, 72)
    assert [r["who"] for r in summary["results"]] == ["random"] * 2 + ["pooled"] * 2
    assert lines(run)[0]["clients"]["0"]["images"] == 72
    assert config.load(run.folder / "config.toml").data.clients == 3
    rows = evaluated(run.folder, config.load(run.folder / "config.toml"))
    assert rows == summary["results"][2:]


def test_bounds_have_names() -> None:
    assert [who(tiny(bound=b)) for b in ("none", "single", "pooled")] == [
        "federated",
        "alone",
        "pooled",
    ]


# ---------------------------------------------------------------- folders of images


@pytest.fixture
def draw(tmp_path: Path) -> Callable[..., Path]:
    """Write ``n`` noisy PNGs below tmp_path/images."""
    chance = np.random.default_rng(0)

    def make(n: int, below: str = "", size: tuple[int, int] = (16, 16)) -> Path:
        folder = tmp_path / "images" / below
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(n):
            pixels = chance.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:03d}.png")
        return tmp_path / "images"

    return make


def folder_config(images: Path, **options: Any) -> config.Config:
    base = {
        "data": f"folder:{images}",
        "data.images": "none",
        "data.test_images": "none",
        "data.image_size": "none",
        "rounds": 1,
        "evaluate.probe": "none",
        "out": str(images.parent / "run"),
    }
    return tiny(**{**base, **options})


def test_unlabelled_images_some_of_them_broken(draw: Callable[..., Path]) -> None:
    images = draw(30)
    whole = (images / "000.png").read_bytes()
    (images / "cut.png").write_bytes(whole[: len(whole) // 2])
    (images / "empty.png").write_bytes(b"")
    (images / "text.png").write_text("not an image")
    said: list[str] = []
    run = furlong.run_config(folder_config(images), say=said.append)
    (skipped,) = [text for text in said if "skipped" in text]
    assert skipped.startswith("skipped 3 unreadable file(s)")
    for name in ("cut.png", "empty.png", "text.png"):
        assert name in skipped
    assert any("no labels" in text for text in said)
    assert run.summary["results"] == []
    assert run.summary["images"] == 30
    assert lines(run)[0]["knn"] is None
    about = json.loads((run.folder / "partition.json").read_text())
    assert len(about.pop("fingerprint")) == 64
    assert about == {"partition": "iid", "clients": 3, "sizes": [10, 10, 10]}
    assert (run.folder / "report.html").exists()
    with pytest.raises(FurlongError, match="no labels"):
        evaluated(run.folder, config.load(run.folder / "config.toml"))
    with pytest.raises(FurlongError, match=r"(?s)3 file\(s\) cannot be used.*cut\.png"):
        loop.run(folder_config(images, strict=True, out=str(images.parent / "strict")))
    with pytest.raises(FurlongError, match="needs labels"):
        loop.run(folder_config(images, partition="classes:2", out=str(images.parent / "third")))


def test_one_folder_is_one_client(draw: Callable[..., Path]) -> None:
    for site, n in (("berlin", 8), ("oslo", 12), ("rome", 16)):
        images = draw(n, site)
    settings = folder_config(
        images, partition="natural", clients=None, **{"data.group_by": "folder", "batch_size": 4}
    )
    run = loop.run(settings)
    assert json.loads((run.folder / "partition.json").read_text())["sizes"] == [8, 12, 16]
    found = config.load(run.folder / "config.toml")
    assert (found.data.clients, found.data.group_by) == (3, "folder")
    (line,) = lines(run)
    assert [c["images"] for c in line["clients"].values()] == [8, 12, 16]
    losses = [c["loss"] for c in line["clients"].values()]
    assert line["loss"] == pytest.approx(np.average(losses, weights=[8, 12, 16]))
    assert run.summary["results"] == []
    again = prepare(found)  # the number of clients that was found is one that is accepted
    assert again.federation.sizes == {0: 8, 1: 12, 2: 16}


def test_without_a_test_split_a_tenth_is_held_out(draw: Callable[..., Path]) -> None:
    draw(20, "cats")
    images = draw(20, "dogs")
    said: list[str] = []
    run = loop.run(folder_config(images), say=said.append)
    assert any("no test split: 4 random images are held out" in text for text in said)
    assert run.summary["images"] == 36
    assert {r["who"] for r in run.summary["results"]} == {"random", "federated"}
    settings = config.load(run.folder / "config.toml")
    train, test, _ = load_data(settings)
    assert test is not None
    assert test.classes == train.classes == ("cats", "dogs")
    every = {t.numpy().tobytes() for t in torch.cat([train.pixels, test.pixels])}
    assert len(every) == 40
    other = load_data(config.from_tree({}, {"seed": 1, "data": f"folder:{images}"}, "x"))[1]
    assert other is not None
    assert not torch.equal(other.pixels, test.pixels)
    assert evaluated(run.folder, settings) == run.summary["results"][1:]


def test_oblong_images_need_a_size(draw: Callable[..., Path]) -> None:
    images = draw(12, size=(16, 20))
    with pytest.raises(FurlongError, match=r"20×16; encoders take squares.*--data\.image-size"):
        prepare(folder_config(images))
    assert prepare(folder_config(images, **{"data.image_size": 16})).setup.image_size == 16


def test_a_run_that_cannot_start_leaves_no_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(FurlongError, match="only 10 classes"):
        loop.run(tiny(partition="classes:20", out=str(out)))
    assert not (out / "config.toml").exists()
    loop.run(tiny(rounds=1, out=str(out), **{"evaluate.probe": "none"}))  # so it can be used


def test_a_client_with_one_image_is_refused(draw: Callable[..., Path]) -> None:
    images = draw(5)
    with pytest.raises(FurlongError, match="at least 2"):
        prepare(folder_config(images, clients=4))


# ---------------------------------------------------------------- angles, the server's own work


@pytest.mark.slow
def test_angles_between_two_clients(tmp_path: Path) -> None:
    """FedCA's Figure 4: small where clients hardly move, larger where they do; and drawn."""
    medians = []
    for lr in (1e-9, 0.1):
        options = {"evaluate.angles": 20, "evaluate.probe": "none", "optimiser.lr": lr}
        settings = tiny(out=str(tmp_path / str(lr)), **options)
        run = furlong.run_config(settings)
        for line in lines(run):
            assert len(line["angles"]) == 5
            assert line["angles"] == sorted(line["angles"])
        medians.append(lines(run)[-1]["angles"][2])
    # BatchNorm statistics differ between clients even where weights do not
    assert 0 <= medians[0] < medians[1] <= 180
    assert "angle in degrees" in (run.folder / "report.html").read_text()


def test_angles_do_not_change_the_bits(tmp_path: Path) -> None:
    digests = [
        loop.run(tiny("fedca", out=str(tmp_path / str(n)), **{"evaluate.angles": n})).summary[
            "weights_sha256"
        ]
        for n in (0, 10)
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_the_servers_work_is_logged_and_its_files_are_removed(tmp_path: Path) -> None:
    said: list[str] = []
    settings = tiny("mfcl", out=str(tmp_path / "run"), **{"evaluate.angles": 5})
    run = furlong.run_config(settings, say=said.append)
    found = lines(run)
    assert [line["kind"] for line in found] == ["sensor"] * 2 + ["encode"] + ["discriminate"] * 2
    assert all(line["loss"] > 0 for line in found if line["kind"] != "encode")
    assert all(line["angles"] is None for line in found)  # no encoder in any upload
    assert not (run.folder / "server").exists()
    assert "discriminate" in (run.folder / "report.html").read_text()
    assert load_encoder(run.folder)(torch.rand(2, 3, 16, 16)).shape == (2, 192)


def test_alignment_is_trained_once_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    loop.run(tiny("fedca", out=str(tmp_path / "run")), say=said.append)
    assert [s for s in said if s.startswith("alignment model: epoch 1/1")]


def test_public_images_are_not_the_clients() -> None:
    """Also where both are drawn from the same set."""
    p = prepare(tiny("fedca", **{"data.public_images": 72}))
    own = {image.numpy().tobytes() for image in p.train.pixels}
    public = p.server.public
    assert public is not None
    assert len(public) == 72
    assert not own & {image.numpy().tobytes() for image in public.images.pixels}


def test_public_images_may_not_be_the_clients_folder() -> None:
    settings = tiny(
        "fedca", data="folder:some/place", **{"data.public": "folder:some/../some/place"}
    )
    train, _, _ = load_data(tiny())
    with pytest.raises(FurlongError, match="is the clients' own data"):
        load_public(settings, train)


def test_evaluation_needs_no_public_images(tmp_path: Path) -> None:
    run = loop.run(tiny("fedca", out=str(tmp_path / "run")))
    settings = config.load(run.folder / "config.toml", {"data.public": "folder:gone"})
    rows = evaluated(run.folder, settings)
    assert {row["protocol"] for row in rows} == {"knn", "linear"}


def test_known_criticism_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    loop.run(tiny("fcl", out=str(tmp_path / "run")), say=said.append)
    assert any("InstaHide" in s and "obfuscation" in s for s in said)


def test_public_images_must_have_the_clients_channels() -> None:
    settings = tiny("fedca")
    train, _, _ = load_data(settings)
    grey = replace(train, pixels=train.pixels[:, :1])
    with pytest.raises(FurlongError, match=r"have 3 channel\(s\), the clients' 1"):
        load_public(settings, grey)
