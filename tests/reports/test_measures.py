"""What tables and pages show beside accuracy: measures, sites, few labels, k."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import make

from furlong.reports import comparison, formats, measures, page, tables


def with_measures(path: Path, more: float, **changes: Any) -> Path:
    """A fake run whose results have every measure, two sites, and two shares of the labels."""
    summary = json.loads((path / "summary.json").read_text())
    for row in summary["results"]:
        row |= {
            "balanced_accuracy": 0.5 + more,
            "auroc": 0.75 + more,
            "average_precision": 0.625,
            "intervals": {"accuracy": [0.6, 0.7], "auroc": [0.7, 0.8125]},
            "resampled": {"what": "patients", "units": 31, "resamples": 1000},
            "sites": {
                "DU <b>": {"images": 40, "accuracy": 0.5 + more, "auroc": 0.8},
                "EZ": {"images": 2, "accuracy": 1.0},
            },
            **changes,
        }
    summary["results"] += [
        {**row, "protocol": f"linear-{share}", "labels": share / 100, "accuracy": 0.01 * share}
        for row in summary["results"]
        if row["protocol"] == "linear"
        for share in (5, 10)
    ]
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    for seed in range(2):
        with_measures(make(tmp_path / f"grid/fedu/{seed}", "fedu", seed), seed / 10)
    make(tmp_path / "grid/fedsimclr/0", "fedsimclr", 0)  # an older run, which has none
    return tmp_path / "grid"


def test_the_page_of_a_run_has_intervals_and_sites(tmp_path: Path) -> None:
    text = page.build(with_measures(make(tmp_path / "run"), 0.0)).read_text()
    for words in (
        "63.4 [60.0–70.0]",
        "0.750 [0.70–0.81]",
        "test set&#39;s 31 patients (1,000 resamples)",
        "DU &lt;b&gt;, 40 images",
        "50.0 (0.800)",
        "EZ, 2 images",
        "the k = 200 nearest training images vote",
        "Test accuracy of the linear probe when only a share",
    ):
        assert words in text, words
    assert "independent" not in text
    assert "linear probe, 5 % of the labels</td>" in text
    assert "too narrow" not in text
    other = {"what": "images", "units": 31, "resamples": 200}
    text = page.build(with_measures(make(tmp_path / "other"), 0.0, resampled=other)).read_text()
    assert "too narrow" in text
    some = {"what": "patients and single images", "units": 31, "resamples": 200}
    text = page.build(with_measures(make(tmp_path / "some"), 0.0, resampled=some)).read_text()
    assert "Nothing tells which of the single images are of one patient" in text
    lone = {"what": "patients", "units": 1, "resamples": 0}
    told = with_measures(make(tmp_path / "lone"), 0.0, resampled=lone, intervals={})
    assert "of one patient (or group): there is no interval" in page.build(told).read_text()


def test_what_was_measured_again_is_one_row(tmp_path: Path) -> None:
    """As after ``furlong evaluate``, which repeats what the run has measured."""
    run = with_measures(make(tmp_path / "run"), 0.0)
    rows = json.loads((run / "summary.json").read_text())["results"]
    again = [{**row, "auroc": 0.9375, "intervals": {}} for row in rows]
    (run / "evaluations.json").write_text(json.dumps(again))
    before, after = (
        measures.of_run(results)[0].rows
        for results in (tables.MeasuredRun.open(run).finished.results,
                        tables.MeasuredRun.open(run).measured)
    )  # fmt: skip
    assert [row[:2] for row in after] == [row[:2] for row in before]
    by_site = measures.of_run(tables.MeasuredRun.open(run).measured, ["EZ", "FG", "HT"])[1]
    assert by_site.notes[-1] == "Without test images: FG, HT."
    assert {row[4] for row in after} == {"0.938"}


def test_tables_have_means_over_seeds(grid: Path) -> None:
    (group,) = tables.tables(tables.find([grid])[0])
    beside, sites = measures.of_group(group)
    rows = {row[0]: row[1:] for row in beside.rows}
    assert rows["fedu"] == ["63.4 ± 0.0", "55.0 ± 7.1", "0.800 ± 0.071", "0.625 ± 0.000"]
    assert "fedsimclr" not in rows
    assert ["fedu", "55.0 ± 7.1 (0.800)", "100.0 ± 0.0"] in sites.rows
    text = formats.markdown([group])
    assert "| fedu | 63.4 ± 0.0 | 55.0 ± 7.1 | 0.800 ± 0.071 | 0.625 ± 0.000 |" in text
    found = list(csv.DictReader(io.StringIO(formats.comma_separated([group]))))
    numbers = {(row["method"], row["protocol"]): row["auroc"] for row in found}
    assert float(numbers["fedu", "linear"]) == pytest.approx(0.8)
    assert numbers["fedsimclr", "linear"] == ""


def test_the_comparison_and_the_terminal_show_them(grid: Path, furlong_: Any) -> None:
    text = comparison.build([grid]).read_text()
    assert "Beside accuracy: linear probe" in text
    assert "By site: linear probe" in text
    assert "when only a share" in text
    printed = furlong_("table", grid).out
    assert "0.800 ± 0.071" in printed
    assert "the k = 200 nearest" in printed


def test_runs_without_measures_show_nothing_of_them(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    assert measures.of_run(tables.MeasuredRun.open(run).measured) == []
    assert measures.of_group(tables.tables(tables.find([run])[0])[0]) == []
    assert "Beside accuracy" not in page.build(run).read_text()
