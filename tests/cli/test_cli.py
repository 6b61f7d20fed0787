"""The command in process: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call

import furlong
from furlong import cli
from furlong.cli import COMMANDS, main
from furlong.methods import METHODS
from furlong.runs import loop
from furlong.runs.config import Config, all_facts

TINY = [
    "--method=fedsimclr", "--data=shapes", "--data.images=72", "--data.test-images=40",
    "--data.image-size=16", "--partition=iid", "--clients=3", "--rounds=1", "--batch-size=8",
    "--workers=1", "--evaluate.probe=none",
]  # fmt: skip


# ---------------------------------------------------------------- general


def test_version_and_help(furlong_: Call) -> None:
    assert furlong_("--version").out.splitlines()[0] == furlong.__version__
    text = furlong_("--help")
    assert text.code == 0
    said = " ".join(text.out.replace("│", " ").split())
    for command in COMMANDS:
        about = furlong_(command, "--help")
        assert (about.code, about.err) == (0, "")
        first = about.out.split("\n\n")[1].split()  # below the line with the usage
        assert f" {command} {' '.join(first[:3])}" in said
    for option in ("--method", "--batch-size", "--bound", "--out"):
        assert option in furlong_("run", "--help").out


@pytest.mark.parametrize("name", all_facts())
def test_help_shows_every_setting(run_help: str, name: str) -> None:
    assert f"--{name.replace('_', '-')} " in run_help


@pytest.fixture(scope="module")
def run_help() -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(cli.common.console, "width", 200)
        with suppress(SystemExit):
            main(["run", "--help"])
    return out.getvalue()


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("--train.rounds 3 --epochs 4", {"train.rounds": 3, "train.epochs": 4}),
        ("x.toml --train.rounds=3", {"train.rounds": 3, "train.epochs": 2}),
        ("--train.rounds=3 x.toml", {"train.rounds": 3, "train.epochs": 2}),
        ("--strict x.toml", {"data.strict": True, "train.epochs": 2}),
        ("--data.strict --rounds 3", {"data.strict": True, "train.rounds": 3}),
        ("--data.strict", {"data.strict": True}),
        ("--data.strict false", {"data.strict": False}),
        ("--data.strict=no", {"data.strict": False}),
        ("--data.root x=y", {"data.root": "x=y"}),
        ("--data.root=x=y", {"data.root": "x=y"}),
        ("--data.root=", {"data.root": ""}),
        ("--data.root none", {"data.root": None}),
        ("--optimiser.lr 1e-3 --optimiser.weight_decay 0", {"optimiser.weight_decay": 0.0}),
        ("--train.rounds 3 --train.rounds 4", {"train.rounds": 4}),
        ("--rounds 3 --train.rounds 4", {"train.rounds": 4}),
        ("--method fedu --method.threshold 0.2", {"method.name": "fedu", "method.threshold": 0.2}),
        (
            "--method fedu --method.symmetric --method.decay 0.5",
            {"method.symmetric": True, "method.decay": 0.5},
        ),
        ("--method fedu --method.symmetric false", {"method.symmetric": False}),
        ("--method fedbyol --method.bn-stats local", {"method.bn_stats": "local"}),
    ],
)
def test_settings_are_options(furlong_: Call, words: str, taken: Any, monkeypatch: Any) -> None:
    found = []

    def note(settings: Config, *_: Any) -> None:
        found.append(settings)
        raise KeyboardInterrupt

    Path("x.toml").write_text("[train]\nepochs = 2\n")
    monkeypatch.setattr(loop, "run", note)
    assert furlong_("run", *words.split()).code == 130
    tree = asdict(found[0])
    assert {name: tree[name.split(".")[0]][name.split(".")[1]] for name in taken} == taken


# ---------------------------------------------------------------- methods


def test_methods_lists_all(furlong_: Call) -> None:
    table = furlong_("methods")
    listed = furlong_("methods", "--json").json
    assert list(listed) == list(METHODS)
    for name in METHODS:
        assert name in table.out
        assert listed[name]["paper"]


def test_fedu_for_a_resnet18(furlong_: Call) -> None:
    found = furlong_("methods", "fedu", "--json").json
    assert found["name"] == "fedu"
    assert "ICCV 2021" in found["paper"]
    assert found["fields"]["threshold"] == 0.75
    assert found["fields"]["projection_head"] == "easyfl_proj"
    assert "predictor" in found["keeps"]
    assert list(found["bytes"]) == ["train"]
    up = found["bytes"]["train"]["up"]
    assert up == found["bytes"]["train"]["down"]
    assert set(up) == {f"{f}/{k}" for f in ("encoder", "predictor") for k in ("params", "buffers")}
    numbers = sum(up[f"{f}/params"][0] for f in ("encoder", "predictor"))
    assert numbers == 38_460_480
    assert sum(up[f"{f}/params"][1] for f in ("encoder", "predictor")) == 4 * numbers
    # running mean and variance, and a 64-bit counter for each BatchNorm
    layers = 20 + 2  # 20 in a ResNet-18, one in either head
    elements = sum(up[f"{f}/buffers"][0] for f in ("encoder", "predictor"))
    bytes_ = sum(up[f"{f}/buffers"][1] for f in ("encoder", "predictor"))
    assert bytes_ == 4 * (elements - layers) + 8 * layers


@pytest.mark.parametrize("name", METHODS)
def test_one_method_in_words(furlong_: Call, name: str) -> None:
    encoder = METHODS[name].cls.usual.get("model.encoder", "small")
    text = furlong_("methods", name, "--encoder", encoder).out
    for word in (
        "paper:",
        "usually run with:",
        "stays on the client:",
        "leaves the client:",
        "params",
    ):
        assert word in text
    found = furlong_("methods", name, "--encoder", encoder, "--json").json
    assert found["fields"].get("projection_head", "mlp:").startswith(("mlp:", "orchestra_proj"))
    assert found["usual"]["optimiser.name"] in text
    sent = [sum(count for _, count in ways["up"].values()) for ways in found["bytes"].values()]
    assert min(sent) > 8_000
    assert max(sent) > 300_000


def test_criticism_is_stated(furlong_: Call) -> None:
    """Spec §6."""
    for name, word in (("fcl", "broke"), ("fedca", "FedU's authors"), ("mfcl", "invertible")):
        assert word in furlong_("methods", name, "--encoder", "small", "--json").json["caution"]


# ---------------------------------------------------------------- cost


def test_cost(furlong_: Call) -> None:
    command = ("cost", "--method", "mfcl", "--sizes", "100x2,50", "--rounds", "2")
    options = ("--method.server-epochs", "3", "--data.image-size", "16")
    options += ("--method.representation", "rep32", "--method.refresh", "once")
    found = furlong_(*command, *options, "--json").json
    assert [line["kind"] for line in found] == ["sensor"] * 2 + ["encode"] + ["discriminate"] * 3
    assert found[2]["up"]["features"] == 250 * 2 * 64 * 16 * 16 * 4
    assert found[0]["up"]["params"] == 3 * 77_853 * 4
    text = furlong_(*command, *options).out
    for word in ("sensor", "encode", "features", "3 clients", "per client"):
        assert word in text


def test_cost_reads_the_data_for_sizes(furlong_: Call) -> None:
    found = furlong_(
        "cost", "--data.images", "60", "--method", "fedsimclr", "--rounds", "1", "--json"
    )
    (line,) = found.json
    assert line["clients"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sizes", "100,abc"), "is not like 1000"),
        (("--sizes", "1"), "at least 2"),
        (("--run.bound", "pooled"), "nothing is sent"),
    ],
)
def test_cost_errors(furlong_: Call, options: tuple[str, ...], message: str) -> None:
    result = furlong_("cost", *options)
    assert result.code == 2
    assert message in result.err


# ---------------------------------------------------------------- privacy


def test_privacy_plans_without_training(furlong_: Call) -> None:
    """More clients, less noise on the mean; fewer rounds, less noise at all."""
    options = ("--method", "fedrot", "--model.early-norm", "all_gn", "--rounds", "8")
    client = (*options, "--privacy.level", "client", "--epsilon", "8", "--json")
    few, many = (furlong_("privacy", *client, "--sizes", f"50x{n}").json for n in (10, 1000))
    assert [row["rounds"] for row in few] == [1, 2, 4, 8]
    assert all(7.9 < row["epsilon"] <= 8 for row in few)
    assert few[0]["noise"][0] < few[-1]["noise"][0]
    assert few[-1]["ratio"] / many[-1]["ratio"] == pytest.approx(100)
    last = few[-1]
    assert last["ratio"] == pytest.approx(last["noise"][0] * last["parameters"] ** 0.5 / 10)
    text = furlong_("privacy", *client[:-1], "--sizes", "50x10").out
    for word in (
        "noise to signal",
        "With 10 clients ε says little",
        "refuses this with 1, 2, 4, 8",
    ):
        assert word in " ".join(text.split())


# ---------------------------------------------------------------- partition

FEW = ("--data.images=500", "--data.test-images=20")
MFCL = ("partition", "--data", "shapes", "--partition", "mfcl:2", "--clients", "10", *FEW)


def test_partition_json(furlong_: Call) -> None:
    result = furlong_(*MFCL, "--json")
    about = result.json
    assert result.err == ""
    assert about["clients"] == 10
    assert len(about["classes"]) == 10
    counts = torch.tensor(about["class_counts"])
    assert counts.shape == (10, 10)
    assert counts.sum(1).tolist() == about["sizes"]
    assert ((counts > 0).sum(1) == 2).all()
    assert about["beta_cib"] == pytest.approx(2.3218, abs=1e-3)
    assert about["beta_hetero_m2"] == pytest.approx(15.1452, abs=1e-3)
    assert about["beta_hetero_mm1"] == pytest.approx(16.8280, abs=1e-3)


def test_partition_table_and_figure(furlong_: Call) -> None:
    result = furlong_(*MFCL, "--figure", "x.svg")
    assert result.code == 0
    assert "β-CIB 2.3218 bits" in result.out
    assert "heat map: x.svg" in result.out
    lines = [line.split() for line in result.out.splitlines()]
    assert [line[:2] for line in lines[1:11]] == [[str(k), "50"] for k in range(10)]
    assert Path("x.svg").read_text().count("<svg") == 1


def test_partition_depends_on_the_seed(furlong_: Call) -> None:
    words = ("partition", "--partition", "dirichlet:0.5", "--clients", "4", *FEW, "--json")
    one = furlong_(*words).json
    assert furlong_(*words, "--seed", "0").json == one
    assert furlong_(*words, "--run.seed=1").json["sizes"] != one["sizes"]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("methods fedemma", "unknown method 'fedemma'. Did you mean 'fedema'?"),
        ("methods fedu --encoder resnet19", "resnet18"),
        ("methods fedu --method.threshold 1", "Unknown option: --method.threshold"),
        ("run --method fedemma", "unknown method 'fedemma'. Did you mean 'fedema'?"),
        ("run --clinets 3", "--clients"),
        ("run --rounds many", "train.rounds is 'many'; it must be a whole number"),
        ("run --rounds 0", "train.rounds is 0; it must be at least 1"),
        ("run --method fedu --method.treshold 0.2", "Did you mean 'threshold'?"),
        ("run --optimizer.lr 0.2", "Did you mean --optimiser.lr?"),
        ("run --optimiser.lr fast", "optimiser.lr is 'fast'; it must be a number"),
        ("run --bound singel", "Did you mean 'single'?"),
        ("run --engine flowers", "Valid: flower, inprocess"),
        ("run --data shape", "Did you mean 'shapes'?"),
        ("run --data folder:nowhere", "there is no folder nowhere"),
        ("run --data.augment fedo --data.images 50", "fedu"),
        ("run --encoder smal --data.images 50", "small"),
        ("run no.toml", "cannot read no.toml"),
        ("run bad.toml", "bad.toml is not a TOML file"),
        ("run odd.toml", "unknown section [trian]. Did you mean 'train'?"),
        ("run --partition classes:20 --data.images 50", "only 10 classes"),
        ("run --partition clases:2 --data.images 50", "Did you mean 'classes"),
        ("run --partition natural --data.images 50", "group"),
        ("run --clients 40 --partition iid --data.images 50", "fewer clients"),
        ("run --data.images 50 --out file.txt", "is a file"),
        ("run --data.images 50 --out file.txt/below", "cannot make the run folder"),
        ("partition --partition classes:20 --data.images 50", "only 10 classes"),
        ("partition --partition classes:x --data.images 50", "classes:x"),
        ("partition --data.images 100 --figure x.gif", ".svg or .png"),
        ("partition --data.images 100 --figure no/x.svg", "cannot write no/x.svg"),
        ("partition --data folder:nowhere", "there is no folder nowhere"),
        ("resume nowhere", "nowhere is not a run folder"),
        ("resume .", "not a run folder"),
        ("report nowhere", "nowhere is not a run folder"),
        ("evaluate nowhere", "nowhere"),
        ("demo --seeds 0", "seeds"),
        ("rnu", "run"),
    ],
)
def test_mistakes(furlong_: Call, words: str, expected: str) -> None:
    Path("bad.toml").write_text("[train\n")
    Path("odd.toml").write_text("[trian]\n")
    Path("file.txt").write_text("")
    few = ("--data.test-images", "20") if "--data.images" in words else ()
    result = furlong_(*words.split(), *few)
    assert result.code not in (0, None)
    assert expected in result.err
    assert "Traceback" not in result.err + result.out
    assert result.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu"])
def test_a_device_that_is_not_there(furlong_: Call, device: str) -> None:
    result = furlong_("run", *TINY, "--device", device)
    assert result.code == 2
    assert f"--device {device} cannot be used" in result.err
    assert "auto" in result.err


def test_long_messages_are_not_broken(furlong_: Call, tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 30)
    assert f"there is no folder {folder}." in furlong_("run", "--data", f"folder:{folder}").err


# ---------------------------------------------------------------- runs


def test_run_evaluate_report_resume(furlong_: Call, tmp_path: Path) -> None:
    out = tmp_path / ("a-long-name-" * 8) / "mine"
    result = furlong_("run", *TINY, "--out", out)
    assert (result.code, result.err) == (0, "")
    assert f"run folder: {out} " in result.out  # also if it is longer than the line
    assert "federated" in result.out
    assert "1 round, 3 clients, 72 images" in result.out
    assert "effective rank" in result.out.splitlines()[1]  # a column
    assert "Effective rank: in how many directions" in result.out
    summary = json.loads((out / "summary.json").read_text())

    again = furlong_("run", *TINY, "--out", out)
    assert again.code == 2
    assert "already holds a run" in again.err
    assert f"furlong resume {out}" in again.err

    rows = furlong_("evaluate", out, "--json").json
    (own,) = (r for r in summary["results"] if r["who"] == "federated")
    assert [{key: row[key] for key in own} for row in rows] == [own]
    assert json.loads((out / "evaluations.json").read_text()) == rows
    assert "federated" in furlong_("evaluate", out).out
    other = furlong_("evaluate", out, "--data.image-size=20")
    assert other.code == 2
    assert "--data.image-size 16" in other.err

    (out / "report.html").unlink()
    assert furlong_("report", out).code == 0
    assert (out / "report.html").exists()

    done = furlong_("resume", out)
    assert done.code == 0
    assert "has finished; nothing to do" in done.err


def test_an_unfinished_run_can_be_evaluated_and_resumed(
    furlong_: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_summary", interrupt)
        result = furlong_("run", *TINY, "--out", out)
    assert result.code == 130
    assert "furlong resume" in result.err
    result = furlong_("evaluate", out)
    assert result.code == 0
    assert "after exchange 1 of 1" in result.err
    assert "federated, exchange 1 of 1" in result.out
    result = furlong_("resume", out, "--workers", "1")
    assert result.code == 0
    assert "going on after exchange 1" in result.err
    shutil.rmtree(out)
    furlong_("run", *TINY, "--out", out)
    results = json.loads((out / "summary.json").read_text())["results"]
    [knn] = [r["accuracy"] for r in results if (r["who"], r["protocol"]) == ("federated", "knn")]
    assert f"{knn * 100:.1f}" in result.out


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("evaluate", "run", "--rounds", "3"), "--rounds"),
        (("evaluate", "run", "--method.threshold", "0.1"), "--method.threshold"),
        (("partition", "--optimiser.lr", "0.1"), "--optimiser.lr"),
    ],
)
def test_a_setting_without_effect_is_refused(
    furlong_: Call, words: tuple[str, ...], option: str
) -> None:
    result = furlong_(*words)
    assert result.code == 2
    assert f"{option} cannot be given" in result.err
