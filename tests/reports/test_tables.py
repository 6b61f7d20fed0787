"""Runs become tables: means over seeds, settings apart, significance, the papers' numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_runs import make

from furlong.errors import FurlongError
from furlong.reports import formats, printed, tables
from furlong.reports.significance import holm, paired
from furlong.runs.config import all_facts, from_tree
from furlong.runs.folder import RunFolder
from furlong.runs.grid import GRID
from furlong.settings import Fact


def group_of(path: Path, baseline: str | None = None) -> tables.Group:
    finished, unfinished = tables.find([path])
    groups = tables.tables(finished, baseline, unfinished)
    assert len(groups) == 1
    return groups[0]


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    for seed, (ours, theirs) in enumerate([(0.50, 0.61), (0.52, 0.62), (0.51, 0.63)]):
        make(tmp_path / f"grid/fedsimclr/{seed}", "fedsimclr", seed, ours)
        make(tmp_path / f"grid/fedu/{seed}", "fedu", seed, theirs)
    return tmp_path / "grid"


# ---------------------------------------------------------------- significance


def test_paired_t_test_by_hand() -> None:
    found = paired([3.0, 5.0, 7.0], [1.0, 4.0, 4.0])  # differences 2, 1, 3: t = 2 / (1/√3)
    assert found.mean == pytest.approx(2.0)
    # with two degrees of freedom p = 1 - t / √(2 + t²)
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert paired([1.0, 2.0], [0.0, 0.0]).p is None  # too few
    assert paired([1.0] * 3, [1.0] * 3).p == 1.0
    assert paired([2.0] * 3, [1.0] * 3).p is None  # no spread to compare with


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


# ---------------------------------------------------------------- grouping


def test_mean_and_deviation_over_seeds(grid: Path) -> None:
    group = group_of(grid)
    assert [row.label for row in group.rows] == ["random encoder", "fedsimclr", "fedu"]
    cell = group.rows[2].cells["linear", 1.0]
    assert cell.mean == pytest.approx(0.62)
    assert cell.std == pytest.approx(statistics.stdev([0.61, 0.62, 0.63]))
    assert group.rows[0].cells["linear", 1.0].mean == 0.25
    assert group.rows[1].sent == (200_000, 800_000)
    assert group.best(("linear", 1.0)) is group.rows[2]


def test_significance_is_paired_over_seeds(grid: Path) -> None:
    group = group_of(grid)
    fedu = group.rows[2]
    assert group.baseline == "fedsimclr"
    difference = fedu.differences["linear", 1.0]
    assert difference.n == 3
    assert difference.mean == pytest.approx(0.11)
    # two tests: kNN, which is equal, and the linear probe
    assert difference.corrected == pytest.approx(2 * (difference.p or 0))
    words = " ".join([*formats.notes(group), *formats.verdicts(group)])
    assert "fedu (linear probe, +11.0 points)" in words
    assert "n = 3" in words
    assert "more than chance" in words


def test_other_baseline(grid: Path) -> None:
    group = group_of(grid, "fedu")
    assert group.rows[1].differences["linear", 1.0].mean == pytest.approx(-0.11)
    with pytest.raises(FurlongError, match=r"no run of the baseline 'fedx'.*fedu"):
        group_of(grid, "fedx")


def test_two_seeds_say_nothing(tmp_path: Path) -> None:
    for seed in range(2):
        make(tmp_path / f"a{seed}", "fedsimclr", seed)
        make(tmp_path / f"b{seed}", "fedu", seed, 0.9)
    group = group_of(tmp_path)
    assert "nothing can be said about significance" in " ".join(formats.notes(group))
    assert group.tests() == []
    assert formats.verdicts(group) == []


def test_settings_apart(grid: Path) -> None:
    make(grid / "longer", "fedu", 0, rounds=4)
    make(grid / "other split", "fedu", 0, partition="iid")
    groups = tables.tables(tables.find([grid])[0])
    assert len(groups) == 3
    assert sorted(len(group.own) for group in groups) == [1, 1, 2]
    assert "4 rounds of 1 epoch" in " ".join(group.title for group in groups)


def another(fact: Fact) -> Any:
    """A value that is not the default."""
    if fact.choices:
        return fact.choices[-1]
    number = isinstance(fact.default, int | float)
    return fact.default + 1 if number and fact.kind is not bool else "true"


@pytest.mark.parametrize(
    "name", [name for name, fact in all_facts().items() if fact.role != "result"]
)
def test_seeds_computed_elsewhere_or_watched_otherwise_share_a_row(
    tmp_path: Path, name: str
) -> None:
    """A seed on Flower and a seed in process are two seeds of one method."""
    make(tmp_path / "a", "fedu", 0, 0.5)
    given = {"run.engine": "flower", name: another(all_facts()[name])}
    make(tmp_path / "b", "fedu", 1, 0.6, **given)
    assert [row.label for row in group_of(tmp_path).own] == ["fedu"]


@pytest.mark.parametrize("name", ["flower.encoding", "train.server_threads", "optimiser.lr"])
def test_what_changes_bits_names_a_row(tmp_path: Path, name: str) -> None:
    make(tmp_path / "a", "fedu", 0, 0.5)
    make(tmp_path / "b", "fedu", 0, 0.6, **{name: another(all_facts()[name])})
    key = name.partition(".")[2]
    assert all(key in row.label for row in group_of(tmp_path).own)
    assert len(group_of(tmp_path).own) == 2


def test_fields_that_differ_name_the_rows(tmp_path: Path) -> None:
    for number, value in enumerate((0.2, 0.4)):
        make(tmp_path / str(number), "fedu", 0, **{"method.threshold": value})
    make(tmp_path / "other", "fedsimclr", 0, **{"optimiser.lr": 0.1})
    group = group_of(tmp_path)
    labels = [row.label for row in group.own]
    assert labels == ["fedu, threshold=0.2", "fedu, threshold=0.4", "fedsimclr"]
    assert "Not the same in all rows: optimiser.lr is 0.1 (fedsimclr); 0.001 (the others)." in (
        group.notes
    )


def test_the_rule_of_the_server_is_a_setting(tmp_path: Path) -> None:
    for seed in range(2):
        make(tmp_path / f"mean{seed}", "fedsimclr", seed, 0.5)
        make(tmp_path / f"median{seed}", "fedsimclr", seed, 0.6, **{"server.rule": "median"})
    make(tmp_path / "other", "fedu", 0, 0.6, **{"server.rule": "median"})
    group = group_of(tmp_path)
    accuracy = {row.label: row.cells["linear", 1.0].mean for row in group.own}
    assert accuracy == {
        "fedsimclr, server.rule=mean": 0.5,
        "fedsimclr, server.rule=median": 0.6,
        "fedu": 0.6,
    }
    assert [len(row.seeds) for row in group.own] == [2, 2, 1]
    assert not any("left out" in note for note in group.notes)
    assert any("Not the same in all rows: server.rule is mean" in note for note in group.notes)


def test_where_a_run_was_computed_is_no_setting(tmp_path: Path) -> None:
    make(tmp_path / "a", "fedu", 0, **{"run.workers": 1, "data.root": "x"})
    make(tmp_path / "b", "fedu", 1, **{"run.workers": 2, "evaluate.knn_every": 3})
    assert [(row.label, row.seeds) for row in group_of(tmp_path).own] == [("fedu", [0, 1])]


def test_pairs_have_the_same_seed(tmp_path: Path) -> None:
    """Found in another order, and one seed missing: 1, 2 and 4 are in both."""
    ours, theirs = {4: 0.9, 1: 0.6, 2: 0.7, 7: 0.1}, {1: 0.5, 2: 0.5, 3: 0.9, 4: 0.5}
    for place, (seed, value) in enumerate(ours.items()):
        make(tmp_path / f"b{place}", "fedu", seed, value)
    for place, (seed, value) in enumerate(theirs.items()):
        make(tmp_path / f"a{place}", "fedsimclr", seed, value)
    group = group_of(tmp_path)
    found = group.own[1].differences["linear", 1.0]
    by_hand = paired([0.6, 0.7, 0.9], [0.5, 0.5, 0.5])
    assert (found.n, found.mean) == (3, pytest.approx(by_hand.mean))
    assert found.p == pytest.approx(by_hand.p)


def test_bounds_and_repetitions(tmp_path: Path) -> None:
    make(tmp_path / "a", "fedu", 0)
    make(tmp_path / "b", "fedu", 0, bound="pooled")
    make(tmp_path / "c", "fedu", 0)
    make(tmp_path / "d", "fedu", 1, finished=False)
    group = group_of(tmp_path)
    assert [row.label for row in group.own] == ["fedu", "fedu@pooled"]
    assert group.own[1].sent is None
    notes = " ".join(group.notes)
    assert "repeats seed 0 of fedu and is left out: it has the settings of" in notes
    assert "1 run(s) have not finished" in notes


def test_later_evaluations_are_columns(tmp_path: Path) -> None:
    path = make(tmp_path / "run", "fedu")
    semi = {"who": "federated", "labels": 0.1, "accuracy": 0.6, "std": 0.01}
    rows: list[dict[str, Any]] = [
        {**semi, "protocol": "semi-10"},
        {**semi, "protocol": "semi-10 on cifar100", "accuracy": 0.1, "data": "cifar100"},
        {**semi, "protocol": "semi-10:epochs=5 on folder:/a:b", "accuracy": 0.2},
        {"who": "federated", "protocol": "federated-10", "labels": 0.1, "accuracy": 0.5},
        {"who": "federated", "protocol": "quality", "labels": 0.0, "uniformity": -2.0},
        {"who": "random", "protocol": "transfer:mnist", "labels": 1.0, "accuracy": 0.3},
    ]
    (path / "evaluations.json").write_text(json.dumps(rows))
    group, federated = tables.tables(tables.find([path])[0])
    assert list(map(formats.column_title, group.columns)) == [
        "kNN", "linear probe", "tuned in one place, 10 % of the labels",
        "tuned in one place on cifar100, 10 % of the labels",
        "tuned in one place on folder:a:b, epochs=5, 10 % of the labels", "transfer to mnist",
    ]  # fmt: skip
    assert group.own[0].cells["semi-10", 0.1].mean == 0.6
    # what stays on the clients is never in one table with what is put in one place
    assert federated.columns == [("federated-10", 0.1)]
    assert federated.title.startswith(group.title)
    assert "fine-tuned by the clients" in federated.title
    text = formats.markdown([group, federated])
    assert text.count("|---|") == 2


def test_only_federated_tuning_is_one_table(tmp_path: Path) -> None:
    for method in ("fedu", "fedsimclr"):
        folder = RunFolder(make(tmp_path / method, method))
        folder.write("summary.json", {**folder.record.read("summary.json"), "results": []})
    row = {"who": "federated", "protocol": "federated-1", "labels": 0.01, "accuracy": 0.5}
    (tmp_path / "fedu" / "evaluations.json").write_text(json.dumps([row]))
    group = group_of(tmp_path)
    assert (group.more, [r.label for r in group.own]) == (False, ["fedu"])


@pytest.mark.parametrize(
    ("protocol", "given", "name"),
    [
        ("knn", {"k": 200, "temperature": 0.1, "seed": 0}, "knn"),
        ("knn", {"k": 1, "temperature": 0.1, "seed": 0, "evaluate.k": 1}, "knn:k=1"),
        ("knn:k=1", {"k": 1, "temperature": 0.1, "seed": 0}, "knn:k=1"),
        ("knn", {"k": 200, "temperature": 0.1, "seed": 7}, "knn:seed=7"),
        ("knn", {"seed": 0, "data.test_images": 10}, "knn:data.test_images=10"),
        ("knn", {"seed": 0, "changed": {"data.test_images": 10, "data.root": "/x"}},
         "knn:data.test_images=10"),
        ("linear", {"recipe": "default", "seed": 0}, "linear"),
        ("linear", {"recipe": "moco", "epochs": 7, "evaluate.probe": "moco"}, "linear:recipe=moco"),
        ("federated-10", {"partition": "classes:2", "clients": 5}, "federated-10"),
        ("federated-10", {"partition": "iid", "clients": 5}, "federated-10:partition=iid"),
        ("semi-10", {"data.partition": "classes:1"}, "semi-10:data.partition=classes 1"),
    ],
)  # fmt: skip
def test_other_settings_do_not_replace_a_result(
    tmp_path: Path, protocol: str, given: dict[str, Any], name: str
) -> None:
    path = make(tmp_path / "run", "fedu")
    row = {"who": "federated", "protocol": protocol, "accuracy": 0.99, "data": "shapes"}
    (path / "evaluations.json").write_text(json.dumps([{**row, "settings": given}]))
    run = tables.MeasuredRun(path)
    assert run.scores["federated", (name, 1.0)] == 0.99
    assert run.scores["federated", ("knn", 1.0)] == (0.99 if name == "knn" else 0.4)


# ---------------------------------------------------------------- formats


def test_markdown(grid: Path) -> None:
    text = formats.markdown([group_of(grid)])
    size = "1\N{NO-BREAK SPACE}MB"
    assert f"| fedu | 3 | 40.0 ± 0.0 | 62.0 ± 1.0 | 30.0 ± 0.0 | {size} | 1 min 30 s |" in text
    assert "| random encoder | 3 | 20.3 ± 0.0 | 25.0 ± 0.0 | 40.0 ± 0.0 | – | – |" in text
    assert "| effective rank | sent per client |" in text
    assert "Effective rank: in how many directions" in text
    assert "mean ± standard deviation over 3 seeds" in text


def test_names_in_markdown_are_only_text(tmp_path: Path) -> None:
    make(tmp_path / "a", "fedu", 0, data="folder:a|b<img>", **{"method.threshold": 0.1})
    make(tmp_path / "b", "fedu", 0, data="folder:a|b<img>", **{"method.threshold": 0.2})
    text = formats.markdown([group_of(tmp_path)])
    assert "folder:a\\|b\\<img\\>" in text
    assert "<img" not in text.replace("\\<", "")


def test_csv_has_a_line_per_number(grid: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(formats.comma_separated([group_of(grid)]))))
    assert len(rows) == 6
    last = rows[-1]
    assert (last["method"], last["protocol"], last["n"]) == ("fedu", "linear", "3")
    assert float(last["accuracy"]) == pytest.approx(0.62)
    assert float(last["difference"]) == pytest.approx(0.11)
    assert float(last["p_holm"]) == pytest.approx(2 * float(last["p"]))
    assert [row["effective_rank"] for row in rows] == ["40.0"] * 2 + ["30.0"] * 4


def test_runs_from_before_the_rank_was_measured_have_no_column(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    kept = json.loads((path / "summary.json").read_text())
    del kept["quality"]
    RunFolder(path).write("summary.json", kept)
    assert "ffective rank" not in formats.markdown([group_of(tmp_path)])
    make(tmp_path / "new", "fedsimclr")
    text = formats.markdown([group_of(tmp_path)])
    assert "| 40.0 | 63.4 | – | " in text
    assert "| 40.0 | 63.4 | 30.0 | " in text


@pytest.mark.parametrize(
    ("to", "text"),
    [("terminal", "62.0 ± 1.0"), ("markdown", "| fedu | 3 |"), ("csv", "setting,kind"),
     ("html", "<table class")],
)  # fmt: skip
def test_command(furlong_: Any, grid: Path, to: str, text: str) -> None:
    result = furlong_("table", grid, "--to", to)
    assert result.code == 0
    assert text in result.out


def test_many_columns_are_numbered(furlong_: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "run", "fedu")
    row = {"who": "federated", "labels": 0.1, "accuracy": 0.6}
    kept = [{**row, "protocol": f"semi-10:epochs={n}:finetune=head_bn"} for n in range(3, 8)]
    (path / "evaluations.json").write_text(json.dumps(kept))
    shown = furlong_("table", path).out
    assert "(7) tuned in one place, epochs=7, finetune=head_bn, 10 % of the labels Test" in (
        " ".join(shown.split())
    )
    assert "┃ (7) ┃" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("summary.json", '{"results": []}', "who is missing"),
        ("summary.json", "[]", "it is damaged"),
        ("summary.json", "{", "cannot read"),
        ("evaluations.json", '[{"accuracy": 0.5}]', "who is missing"),
        ("evaluations.json", '[{"who": 1, "protocol": "knn", "accuracy": 1}]', "who is not what"),
        ("config.toml", "a = 1", "method.name is missing"),
    ],
)
def test_damaged_runs(
    furlong_: Any,
    grid: Path,
    file: str,
    text: str,
    said: str,
) -> None:
    (grid / "fedu/0" / file).write_text(text)
    for command in ("table", "report"):
        result = furlong_(command, grid)
        assert result.code == 2
        assert said in " ".join(result.err.split())
        assert file in result.err.replace("\n", "")


def test_a_damaged_grid_file_only_loses_the_order(furlong_: Any, grid: Path) -> None:
    for text in ('{"command": "furlong com', "[]", "7"):
        (grid / GRID).write_text(text)
        assert furlong_("table", grid).code == 0
        assert furlong_("report", grid).code == 0


def test_wrong_input(furlong_: Any, grid: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "half", finished=False)
    for words, said in (
        ([tmp_path / "empty"], "no finished run in"),
        ([tmp_path / "none"], "is not a run folder"),
        ([tmp_path / "half"], "1 unfinished"),
        ([], "give run folders"),
        ([grid, "--baseline", "fedx"], "no run of the baseline"),
        ([grid, "--to", "pdf"], "Invalid value"),
    ):
        result = furlong_("table", *words)
        assert result.code != 0
        assert said in result.err + result.out


# ---------------------------------------------------------------- the papers' numbers


def count(**wanted: Any) -> int:
    return sum(all(getattr(row, k) == v for k, v in wanted.items()) for row in printed.printed())


def test_counts_of_printed_numbers() -> None:
    """988 printed numbers: 766 accuracies, 174 deviations; the rest are β values and bits."""
    rows = printed.printed()
    assert len(rows) == 766
    assert sum(row.std is not None for row in rows) == 174
    assert 988 == 766 + 174 + 36 + 12
    assert [count(paper=p) for p in ("FCL", "FedU", "FedCA", "MFCL")] == [240, 126, 226, 174]
    assert count(protocol="semi_federated", paper="FedCA") == 120
    assert count(protocol="semi_central", paper="FedCA") == 0  # spec 4.3
    assert count(protocol="semi_central", paper="FCL") == 84 + 3
    assert count(protocol="semi_federated", paper="FCL") == 84
    assert count(paper="FedU", table="Table 4") == 12
    assert all(0 < row.accuracy < 1 for row in rows)


@pytest.mark.parametrize(
    ("wanted", "accuracy"),
    [
        ({"paper": "FedCA", "encoder": "resnet50", "data": "cifar10", "partition": "iid",
          "method": "fedsimclr", "protocol": "semi_federated", "labels": 0.1}, 0.6067),
        ({"paper": "FedCA", "encoder": "resnet50", "data": "cifar10", "partition": "classes:2",
          "method": "fedsimclr", "protocol": "semi_federated", "labels": 0.1}, 0.3383),
        ({"paper": "FCL", "method": "fcl", "data": "cifar10", "protocol": "semi_central",
          "partition": "fcl_noniid1_standin", "labels": 0.1}, 0.8401),
        ({"paper": "FCL", "method": "fcl", "data": "cifar10", "protocol": "semi_federated",
          "partition": "fcl_noniid1_standin", "labels": 0.1}, 0.6580),
        ({"paper": "MFCL", "table": "Table 7", "method": "fedsimclr", "partition": "mfcl:2",
          "fields": "model.early_norm=pn"}, 0.75),
        ({"paper": "MFCL", "table": "Table 2", "method": "mfcl", "partition": "mfcl:2",
          "fields": "norm=bn;drop=0"}, 0.17),
    ],
)  # fmt: skip
def test_values_that_the_specification_quotes(wanted: dict[str, Any], accuracy: float) -> None:
    found = [
        row.accuracy
        for row in printed.printed()
        if all(getattr(row, k) == v for k, v in wanted.items())
    ]
    assert found == [accuracy]


def test_known_misprints_have_a_note() -> None:
    swapped = [row for row in printed.printed() if "swapped" in row.note]
    assert sorted(row.accuracy for row in swapped) == [0.0537, 0.1447]
    assert {row.method for row in swapped} == {"random"}  # tuned from random weights
    random = [row for row in printed.printed() if "93.05" in row.note]
    assert [(row.paper, row.method, row.accuracy) for row in random] == [("FedU", "random", 0.9379)]


def settings(**options: Any) -> dict[str, Any]:
    given = {"data": "cifar10", "partition": "classes:2", "clients": 5, **options}
    made = from_tree({}, given, "test")
    sections = ("data", "model", "train", "server", "run")
    return {"method": made.method, **{s: vars(getattr(made, s)) for s in sections}}


def test_what_corresponds() -> None:
    ours = settings(method="fedu", encoder="resnet18", rounds=10, epochs=5, **{"data.images": 5000})
    [row] = printed.beside(ours, "linear")
    assert row.source == "FedU, Table 1"
    assert (
        printed.budget(row, ours)
        == "our run had 10 instead of 100 rounds, 5,000 instead of 50,000 images"
    )
    assert [r.protocol for r in printed.beside(ours, "semi-10", 0.1)] == ["semi_central"]
    assert printed.beside(ours, "federated-10", 0.1) == []
    for other in ({"encoder": "small"}, {"clients": 10}, {"method.predictor": "local"}):
        given = {"method": "fedu", "encoder": "resnet18", **other}
        assert printed.beside(settings(**given), "linear") == []
    assert printed.beside(ours, "knn") == []
    longer = settings(method="fedu", encoder="resnet18", rounds=200, epochs=5)
    assert printed.budget(row, longer) == "our run had 200 instead of 100 rounds"


@pytest.mark.parametrize(
    "other",
    [{"server.rule": "median"}, {"fraction": 0.4}, {"model.early_norm": "gn"}],
    ids=str,
)
def test_what_no_paper_did_has_no_printed_number(other: dict[str, Any]) -> None:
    mfcl = {"method": "fedsimclr", "encoder": "resnet18", "partition": "mfcl:2", "clients": 10}
    assert {r.table for r in printed.beside(settings(**mfcl), "linear")} == {"Table 2", "Table 7"}
    found = printed.beside(settings(**mfcl, **other), "linear")
    assert [r.fields for r in found] == ["model.early_norm=gn"] * ("gn" in other.values())


@pytest.mark.parametrize(
    "protocol",
    ["linear on cifar100", "linear-crops on cifar100", "linear:epochs=1", "linear:k=1"],
)
def test_other_images_or_options_have_no_printed_number(protocol: str) -> None:
    ours = settings(method="fedu", encoder="resnet18")
    assert printed.beside(ours, "linear")
    assert printed.beside(ours, protocol) == []
    assert printed.beside(ours, "semi-10", 0.1)
    for more in (" on cifar100", ":epochs=1:finetune=head_bn", " on folder:/a:b"):
        assert printed.beside(ours, f"semi-10{more}", 0.1) == []


def test_few_labels_from_scratch_is_the_random_encoder_tuned(tmp_path: Path) -> None:
    ours = settings(method="fedavg", encoder="resnet50")
    assert printed.beside(ours, "federated-10", 0.1) == []  # ours was trained with all labels
    path = make(tmp_path / "run", "fedu", 0, data="cifar10", encoder="resnet50")
    tuned = {"protocol": "federated-10", "labels": 0.1, "accuracy": 0.5}
    kept = [{"who": who, **tuned} for who in ("random", "federated")]
    (path / "evaluations.json").write_text(json.dumps(kept))
    _, federated = tables.tables(tables.find([path])[0])
    random, fedu = federated.rows
    assert [beside.source for beside in random.printed] == ["FedCA, Table 3 (arXiv: 2)"]
    assert "from random weights" in random.printed[0].note
    assert "rounds" not in random.printed[0].note
    assert fedu.printed == []


def test_quoted_numbers_are_shown_once() -> None:
    """FedU repeats FedCA's numbers: beside a run they stand as FedCA's, by FedCA's protocol."""
    ours = settings(method="fedsimclr", encoder="resnet50")
    assert {r.paper for r in printed.beside(ours, "linear")} == {"FedCA"}
    assert printed.beside(ours, "semi-10", 0.1) == []
    assert [r.paper for r in printed.beside(ours, "federated-10", 0.1)] == ["FedCA"]


def test_ablations_correspond_to_their_own_rows() -> None:
    ablated = settings(
        method="fedu", encoder="resnet50", **{"method.update": "both", "method.predictor": "local"}
    )
    assert [r.table for r in printed.beside(ablated, "linear")] == ["Table 4"]
    single = settings(method="fedbyol", encoder="resnet50", bound="single")
    assert [r.source for r in printed.beside(single, "linear")] == ["FedU, Table 1"]


def test_printed_rows_stand_below_ours(tmp_path: Path) -> None:
    setting = {"data": "cifar10", "encoder": "resnet18"}
    make(tmp_path / "run", "fedu", 0, **setting)
    group = group_of(tmp_path)
    _, rows = formats.cells(group)
    kinds = [kind for kind, _ in rows]
    assert kinds == ["random", "run", "paper"]
    assert rows[2][1][0].strip() == "printed in FedU, Table 1"
    assert "our run had 3 instead of 100 rounds" in " ".join(formats.paper_notes(group))
    assert "printed in FedU, Table 1" in formats.comma_separated([group])


def test_a_number_of_fewer_seeds_says_so(tmp_path: Path) -> None:
    make(tmp_path / "0", "fedu", 0, 0.5)
    make(tmp_path / "1", "fedu", 1, 0.6)
    path = make(tmp_path / "2", "fedu", 2, None)
    _, rows = formats.cells(group_of(tmp_path))
    assert rows[-1][1][3] == "55.0 ± 7.1 (n = 2)"
    assert formats.cells(group_of(path))[1][-1][1][3] == "–"
