"""The page that compares runs, and its figures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runs import make
from test_page import Tags, assert_self_contained

from furlong.errors import FurlongError
from furlong.reports import comparison, figures, tables, tsne
from furlong.reports import page as pages
from furlong.reports.pictures import neighbours_of
from furlong.runs import plane
from furlong.runs.datasets import load_data
from furlong.runs.folder import RunFolder
from furlong.seeding import threads


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    for seed in range(3):
        make(tmp_path / f"grid/fedsimclr/{seed}", "fedsimclr", seed, 0.5 + seed / 100)
        make(tmp_path / f"grid/fedu/{seed}", "fedu", seed, 0.6 + seed / 70)
        pooled = tmp_path / f"grid/fedu@pooled/{seed}"
        make(pooled, "fedu", seed, 0.7, bound="pooled")
    return tmp_path / "grid"


def page_of(path: Path, **options: Any) -> str:
    page = comparison.build([path], **options).read_text(encoding="utf-8")
    assert_self_contained(page)
    return page.replace("\N{NO-BREAK SPACE}", " ")


def test_page(grid: Path) -> None:
    page = page_of(grid)
    for text in (
        "2 methods and 1 bound", "fedu@pooled", "61.4 %", "± 1.4", "paired t-test over seeds",
        "highest federated linear probe", "Leaves a client:", "the 9 run folders", "9 runs",
        "β-CIB 1.2500", "False negatives", "furlong report", "the 4 comparisons with fedsimclr",
    ):  # fmt: skip
        assert text in page, text
    # accuracy, bytes, kNN, loss, effective rank, divergence, partition, false negatives
    assert page.count("<svg") == 8
    assert "encoder away from where it began" in page  # the method explains it
    assert '<th class="num">effective rank</th>' in page
    assert page.count('<table class="sortable') == 4
    first = comparison.build([grid]).read_bytes()
    assert comparison.build([grid]).read_bytes() == first


def test_settings_have_their_own_sections(grid: Path) -> None:
    make(grid / "iid", "fedu", 0, partition="iid")
    page = page_of(grid)
    assert "Results, table 2" in page
    assert "in 2 settings" in page


def test_tuning_by_the_clients_has_its_own_table(grid: Path) -> None:
    path = grid / "fedu/0"
    row = {"who": "federated", "labels": 0.1, "accuracy": 0.6}
    kept = [{**row, "protocol": f"{kind}-10"} for kind in ("semi", "federated")]
    RunFolder(path).write("evaluations.json", kept)
    page = page_of(grid)
    first, second = page.split("Results, table 2")
    assert "tuned in one place" in first
    assert "tuned by the clients" not in first
    assert "fine-tuned by the clients, whose labels stay with them" in second
    assert "9 runs</p>" in first
    assert "settings</p>" not in first  # two tables, one setting
    assert page.count("<svg") == 9  # one more, the accuracies
    page = pages.build(path).read_text()
    first, second = page.split("Fine-tuned by the clients, whose labels stay with them")
    assert "tuned by the clients" not in first[first.index("<h2>Results") :]
    assert "tuned in one place" not in second


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    path = tmp_path / "<img src=x onerror=alert(2)>" / "grid"
    make(path / "0", "fedu", 0)
    make(path / "1", "fedsimclr", 0)
    page = comparison.build([path]).read_text(encoding="utf-8")
    assert "img" not in [tag for tag, _ in Tags(page).found]
    assert "&lt;img src=x" in page


def test_ablations_are_drawn(tmp_path: Path) -> None:
    for drop in (0.0, 0.2, 0.4):
        make(tmp_path / f"grid/{drop}", "mfcl", 0, 0.6 - drop / 4, **{"method.drop": drop})
    for update in ("online", "both"):
        make(tmp_path / f"grid/{update}", "fedu", 0, **{"method.update": update})
    page = page_of(tmp_path / "grid", drawings=tmp_path / "figures")
    assert "mfcl: test accuracy by the linear probe over drop." in page
    assert "fedu: test accuracy by the linear probe over update." in page
    made = {file.name for file in (tmp_path / "figures").iterdir()}
    assert {"ablation-mfcl-drop.svg", "ablation-mfcl-drop.png", "accuracy-bytes.png"} <= made


def test_report_command(furlong_: Any, grid: Path, tmp_path: Path) -> None:
    run = grid / "fedu" / "0"
    assert furlong_("report", run).out.strip().endswith(str(run / "report.html"))
    assert furlong_("report", grid, "--figures", tmp_path / "f").code == 0
    assert (tmp_path / "f" / "accuracy.svg").exists()
    result = furlong_("report", run, grid / "fedsimclr", "--out", tmp_path / "page.html")
    assert result.code == 0
    assert "2 methods" in (tmp_path / "page.html").read_text()
    for words, said in (
        ([], "give run folders"),
        ([tmp_path / "f"], "no finished run"),
        ([grid, "--tsne"], "--tsne is for one run"),
        ([run, "--baseline", "fedu"], "is one run"),
        ([grid, "--out", tmp_path / "none" / "page.html"], "cannot write"),
    ):
        result = furlong_("report", *words)
        assert result.code == 2
        assert said in result.err


def test_runs_without_accuracy(tmp_path: Path) -> None:
    for method in ("fedu", "fedsimclr"):
        folder = RunFolder(make(tmp_path / method, method))
        folder.write("summary.json", {**folder.record.read("summary.json"), "results": []})
    page = page_of(tmp_path)
    assert "No accuracy was measured in these runs." in page
    assert "significance" not in page


def test_papers_on_the_page_of_one_run(furlong_: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "run", "fedu", 0, data="cifar10", encoder="resnet18")
    furlong_("report", path)
    page = (path / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "Printed in FedU, Table 1: linear probe" in page
    assert "our run had 3 instead of 100 rounds" in page


# ---------------------------------------------------------------- figures

SERIES = {f"method {k}": [[(1, k / 9), (2, k / 8)], [(1, k / 9), (2, k / 7)]] for k in range(8)}


def test_lines_are_named_at_their_ends() -> None:
    drawn = figures.svg(figures.compared(SERIES, "accuracy", levels={"random": 0.1}, unit="%"))
    for name in [*SERIES, "random"]:
        assert f">{name}<" in drawn
    axes: Any = figures.compared(SERIES, "accuracy").axes[0]
    places = sorted(float(text.xy[1]) for text in axes.texts)
    bottom, top = axes.get_ylim()
    assert min(b - a for a, b in itertools.pairwise(places)) > 0.06 * (top - bottom)


def test_a_name_keeps_its_colour() -> None:
    one = figures.compared({"b": SERIES["method 1"]}, "y", slots={"a": 0, "b": 1})
    assert one.axes[0].lines[0].get_color() == figures.ORANGE


def test_band_is_the_deviation_over_runs() -> None:
    figure = figures.compared({"a": [[(1, 1.0)], [(1, 3.0)]]}, "y")
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))


def test_band_ends_where_values_end() -> None:
    figure = figures.compared({"a": [[(1, 0.0)], [(1, 1.0)]]}, "y", limits=(0.0, 1.0))
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (0, 1)


def test_names_of_levels_stand_apart_beside_the_axes() -> None:
    points = [("a", 5e6, 0.40, None), ("b", 9e6, 0.41, None)]
    levels = {"x": 0.2, "y": 0.201, "z": 0.202}
    axes: Any = figures.versus(points, "sent", "accuracy", levels=levels).axes[0]
    named = {text.get_text(): text for text in axes.texts}
    places = [float(named[name].xyann[1]) for name in levels]
    bottom, top = axes.get_ylim()
    assert min(b - a for a, b in itertools.pairwise(places)) > 0.06 * (top - bottom)
    assert all(named[name].xyann[0] > 1 for name in levels)  # in fractions of the axes


def test_accuracy_against_bytes() -> None:
    points = [("a", 5e6, 0.4, 0.01), ("b", 5e6, 0.4, None), ("c", 9e9, 0.5, None)]
    drawn = figures.svg(figures.versus(points, "sent", "accuracy", levels={"random": 0.2}))
    assert all(f">{text}<" in drawn for text in ("a", "b", "c", "random"))
    assert "GB" in drawn


def test_plane_and_sweep(tmp_path: Path) -> None:
    points = torch.rand(40, 2, generator=torch.Generator().manual_seed(0)).tolist()
    labels, clients = [k % 4 for k in range(40)], [k % 2 for k in range(40)]
    classes = ["<b>", "$x^", "c", "d"]
    figure = figures.plane(points, labels, clients, classes)
    assert len(figure.axes[0].collections) == 4  # a class of one client each
    drawn = figures.svg(figure)
    assert "client 1" in drawn
    assert "&lt;b&gt;" in drawn
    assert "client 1" in figures.svg(figures.plane(points, None, clients))
    for kind in ("svg", "png"):
        figures.save(figures.sweep([(0.5, 0.4, 0.1), (0, 0.5, None)], "drop", "y"),
                     tmp_path / f"a.{kind}")  # fmt: skip


def test_heat_map_with_betas() -> None:
    drawn = figures.svg(figures.heat_map([[1, 2]], ["a", "b"], below="β-CIB 2.32"))
    assert "β-CIB 2.32" in drawn


# ---------------------------------------------------------------- t-SNE


def test_tsne_separates_what_is_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 2
    rows = torch.randn(60, 8, generator=generator) + 20 * labels[:, None]
    points = tsne.coordinates(rows, seed=3)
    assert points.shape == (60, 2)
    assert (points.min(), points.max()) == (0.0, 1.0)
    with threads(3):
        assert (points == tsne.coordinates(rows, seed=3)).all()
    middle = [points[labels.numpy() == k].mean(0) for k in (0, 1)]
    spread = max(points[labels.numpy() == k].std(0).max() for k in (0, 1))
    assert abs(middle[0] - middle[1]).max() > 3 * spread
    with pytest.raises(FurlongError, match="give 5 to 2,000"):
        tsne.coordinates(rows[:3])


def test_principal_components_are_a_map() -> None:
    """The widest direction is the first; a turn of the features turns nothing in the plane."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 6, generator=generator) * torch.tensor([0.1, 9, 0.1, 3, 0.1, 0.1])
    found = plane.principal(rows)
    assert found.min() == 0
    assert found[:, 0].max() == 1
    assert 0.1 < found[:, 1].max() < 0.9  # one scale for both
    assert abs(float(torch.corrcoef(torch.stack([found[:, 0], rows[:, 1].double()]))[0, 1])) > 0.99
    turned = plane.principal(rows @ torch.linalg.qr(torch.randn(6, 6, generator=generator))[0])
    distances = [torch.pdist(each) for each in (found, turned)]
    assert torch.allclose(*distances, atol=1e-4)
    assert plane.principal(torch.zeros(5, 3)).isfinite().all()  # collapsed


def test_every_run_has_a_map_and_no_pictures_unless_asked(
    furlong_: Any, tmp_path: Path, tiny_config: Any
) -> None:
    from furlong.runs import loop

    run = loop.run(tiny_config(rounds=1, out=str(tmp_path / "run")))
    page = run.folder / "report.html"
    assert furlong_("report", run.folder).code == 0
    plain = page.read_text()
    assert "principal components" in plain
    kept = tables.MeasuredRun.open(run.folder).plane
    assert kept is not None
    assert len(kept.points) == 72
    for words in ("<img", "--pictures"):
        assert words not in plain
    assert furlong_("report", run.folder, "--pictures").code == 0
    shown = page.read_text()
    assert_self_contained(shown)
    assert "This page holds images of the clients" in shown
    assert shown.count('<img src="data:image/png') == 3 * 8 + 6 * (
        1 + 2 * 5
    )  # sites, queries, neighbours
    assert furlong_("report", run.folder).code == 0
    assert page.read_text() == plain


def test_neighbours_are_never_of_the_same_patient(tmp_path: Path, tiny_config: Any) -> None:
    from furlong.runs import loop

    run = loop.run(tiny_config(rounds=1, out=str(tmp_path / "run")))
    train, test, _ = load_data(tiny_config())
    assert test is not None
    same = replace(test, pixels=train.pixels[:40], patients=torch.arange(40))
    train = replace(train, patients=torch.arange(72))
    folder, whose = RunFolder.open(run.folder), [""] * 72
    for patients, found in ((True, False), (False, True)):
        known = replace(train, patients=train.patients if patients else None)
        for query in neighbours_of(folder, known, same, whose, 0):
            near = [one["image"] for one in query["after"]]
            assert (query["image"] in near) == found


def test_tsne_of_a_run(furlong_: Any, tmp_path: Path, tiny_config: Any) -> None:
    from furlong.runs import loop

    run = loop.run(tiny_config(rounds=1, out=str(tmp_path / "run")))
    assert furlong_("report", run.folder, "--tsne").code == 0
    record = tables.MeasuredRun.open(run.folder)
    kept = record.plane
    assert kept is not None
    assert kept.labels is not None
    assert len(kept.points) == len(kept.labels) == len(kept.clients) == 72
    assert sorted(set(kept.clients)) == [0, 1, 2]
    assert "by t-SNE" in (run.folder / "report.html").read_text()
    assert record.summary is not None
