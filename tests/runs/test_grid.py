"""A grid of runs: its cells, going on with it, and what happens when one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.runs import config, grid, loop
from furlong.runs.folder import RunFolder
from furlong.runs.prepare import prepare

ROOT = Path(__file__).parents[2]
TINY = {
    "data.images": 60, "data.test_images": 30, "data.image_size": 16, "partition": "iid",
    "clients": 2, "rounds": 2, "batch_size": 8, "workers": 1, "evaluate.probe": "none",
}  # fmt: skip
WORDS = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def cells(out: Path, methods: str = "fedsimclr,fedbyol", seeds: int = 1, **more: Any) -> list[Any]:
    return grid.grid([], methods.split(","), seeds, out, {**TINY, **more})


# ---------------------------------------------------------------- the grid


def test_cells_and_their_folders(tmp_path: Path) -> None:
    found = cells(tmp_path, "fedu,fedu@single,fedsimclr@pooled", 2)
    names = [str(cell.folder.relative_to(tmp_path)) for cell in found]
    assert names == [
        f"defaults/{method}/{seed}"
        for seed in (0, 1)
        for method in ("fedu", "fedu@single", "fedsimclr@pooled")
    ]
    assert [cell.settings.run.bound for cell in found[:3]] == ["none", "single", "pooled"]
    assert [cell.row for cell in found[:3]] == ["fedu", "fedu@single", "fedsimclr@pooled"]
    assert [cell.settings.run.seed for cell in found] == [0, 0, 0, 1, 1, 1]


def test_tables_of_methods(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        '[methods.fedu]\nthreshold = 0.3\ndata.augment = "fedca"\n[methods.fedsimclr]\n'
        '[methods."fedu@pooled"]\noptimiser.lr = 0.5\n'
        '[methods."fedca bare"]\nname = "fedca"\ndictionary = 0\n'
        "[train]\nrounds = 7\n"
    )
    found = {cell.method: cell for cell in grid.grid([file], [], 1, tmp_path, {})}
    assert list(found) == ["fedu", "fedsimclr", "fedu@pooled", "fedca bare"]
    fedu, pooled = found["fedu"].settings, found["fedu@pooled"].settings
    assert (fedu.method["threshold"], fedu.data.augment, fedu.optimiser.lr) == (0.3, "fedca", 0.001)
    assert (pooled.method["threshold"], pooled.optimiser.lr) == (0.3, 0.5)  # its own on top
    assert found["fedsimclr"].settings.data.augment == "auto"
    assert found["fedca bare"].settings.method["dictionary"] == 0
    assert found["fedca bare"].folder == tmp_path / "grid" / "fedca-bare" / "0"
    assert all(cell.settings.train.rounds == 7 for cell in found.values())
    [chosen] = grid.grid([file], ["fedema"], 1, tmp_path, {"train.rounds": 2})
    assert (chosen.settings.method["name"], chosen.settings.train.rounds) == ("fedema", 2)


def test_files_have_their_own_methods(tmp_path: Path) -> None:
    for folder, method in (("a", "fedu"), ("b", "fedsimclr")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.toml").write_text(f'[method]\nname = "{method}"\n')
    files = [tmp_path / "a/same.toml", tmp_path / "b/same.toml"]
    found = grid.grid(files, [], 1, tmp_path, {})
    assert [(cell.name, cell.method) for cell in found] == [
        ("a-same", "fedu"),
        ("b-same", "fedsimclr"),
    ]


@pytest.mark.parametrize(
    ("methods", "seeds", "more", "said"),
    [
        ("fedsimclr,fedfoo", 1, {}, "unknown method 'fedfoo'"),
        ("fedu@alone", 1, {}, "unknown bound 'alone'"),
        ("fedu,fedu", 1, {}, "names fedu twice"),
        ("fedu", 0, {}, "--seeds is 0"),
        ("fedu", 1, {"bound": "single"}, "--bound cannot be given"),
        ("fedu", 1, {"method.temperature": 1}, "unknown key method.temperature"),
    ],
)
def test_mistakes_show_before_anything_runs(
    tmp_path: Path, methods: str, seeds: int, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(FurlongError, match=said):
        cells(tmp_path / "out", methods, seeds, **more)
    assert not (tmp_path / "out").exists()


def test_the_comparison_of_all_methods_leaves_none_out() -> None:
    """Nothing but the method differs from row to row: each has its usual settings."""
    file = ROOT / "configs/comparisons/all-methods.toml"
    found = grid.grid([file], [], 1, Path("runs/x"), {"data.root": "DIR"})
    named = {cell.settings.method["name"] for cell in found}
    assert named == {name for name, row in METHODS.items() if not row.cls.needs_labels}
    assert found[0].method == "furlong"  # the others are tested against the first
    for cell in found:
        s = cell.settings
        alone = config.from_tree({}, {"method": s.method["name"], "data.name": "cifar10"}, "test")
        assert s.optimiser == alone.optimiser
        assert s.method == alone.method
        assert (s.data.images, s.train.rounds, s.data.clients) == (10_000, 40, 5)


# ---------------------------------------------------------------- running


def test_a_grid_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: Any) -> None:
    whole = [cell.folder for cell in cells(tmp_path / "whole", "fedsimclr")]
    assert [o.state for o in grid.run(cells(tmp_path / "whole", "fedsimclr"))] == ["done"]

    def stop(status: loop.Status) -> None:
        if status.done == 1:
            raise KeyboardInterrupt

    halves = cells(tmp_path / "half", "fedsimclr")
    with pytest.raises(KeyboardInterrupt):
        list(grid.run(halves, stop))
    assert RunFolder(halves[0].folder).record.read("summary.json") is None
    heard: list[str] = []
    assert [o.state for o in grid.run(halves, tell=heard.append)] == ["done"]
    assert heard == ["[1/1] defaults · fedsimclr · seed 0, 1 to do"]
    sums = [RunFolder(path).record.finished.weights_sha256 for path in (whole[0], halves[0].folder)]
    assert sums[0] == sums[1]  # the same bits
    monkeypatch.setattr(loop, "run", None)  # nothing is repeated
    monkeypatch.setattr(loop, "resume", None)
    assert [o.state for o in grid.run(cells(tmp_path / "half", "fedsimclr"))] == ["was there"]
    # what it began with: resolved settings count as the same, others do not
    with pytest.raises(FurlongError, match=r"optimiser\.lr = 0\.002, not 0\.5"):
        cells(tmp_path / "half", "fedsimclr", **{"optimiser.lr": 0.5})
    assert cells(tmp_path / "half", "fedsimclr", **{"run.workers": 2, "data.root": "elsewhere"})


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"data.augment": "mfcl"}, {}, r"data\.augment = mfcl, not shapes"),
        ({}, {"clients": None}, r"data\.clients = 2, not 5"),
        ({"method.temperature": 0.3}, {}, r"method\.temperature = 0\.3, not"),
    ],
)
def test_other_settings_are_not_taken_for_the_same(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], said: str
) -> None:
    [cell] = cells(tmp_path, "fedsimclr", **first)
    folder = RunFolder.create(cell.folder)
    folder.write("config.toml", prepare(cell.settings).config.toml())
    assert cells(tmp_path, "fedsimclr", **first)
    with pytest.raises(FurlongError, match=said):
        cells(tmp_path, "fedsimclr", **then)


@pytest.mark.parametrize("method", ["fedsimclr", "fedae", "fedrot", "orchestra", "fedu@single"])
@pytest.mark.parametrize("partition", ["iid", "fcl_noniid1_standin"])
def test_settings_are_resolved_as_a_run_does(tmp_path: Path, method: str, partition: str) -> None:
    given = {"clients": None, "partition": partition, "data.images": 200, "data.test_images": 10}
    [cell] = cells(tmp_path, method, **given)
    RunFolder.create(cell.folder).write("config.toml", prepare(cell.settings).config.toml())
    assert cells(tmp_path, method, **given)


def test_impossible_data_show_once_before_anything_runs(
    tmp_path: Path,
    furlong_: Any,
) -> None:
    words = [*WORDS, "--data.partition", "classes:99", "--seeds", "3", "--out", tmp_path / "g"]
    result = furlong_("compare", "--methods", "fedsimclr,fedu,fedbyol", *words)
    assert result.code == 2
    assert result.err.count("classes:99") == 1
    assert not (tmp_path / "g").exists()


def test_what_is_missing_is_made_again(tmp_path: Path) -> None:
    [cell] = cells(tmp_path, "fedsimclr")
    assert [o.state for o in grid.run([cell])] == ["done"]
    before = RunFolder(cell.folder).record.finished.weights_sha256
    assert [o.state for o in grid.run([cell])] == ["was there"]
    for name in ("encoder.safetensors", "encoder.json"):
        (cell.folder / name).unlink()
        assert [o.state for o in grid.run([cell])] == ["done"]
        assert (cell.folder / name).exists()
    assert RunFolder(cell.folder).record.finished.weights_sha256 == before
    assert not list(cell.folder.glob("*.before"))


def test_a_failure_keeps_the_summary(tmp_path: Path, monkeypatch: Any) -> None:
    [cell] = cells(tmp_path, "fedsimclr")
    list(grid.run([cell]))
    (cell.folder / "encoder.safetensors").unlink()

    def broken(*_: Any) -> None:
        raise FurlongError("the images are gone")

    monkeypatch.setattr(loop, "resume", broken)
    assert [o.reason for o in grid.run([cell])] == ["the images are gone"]
    assert RunFolder(cell.folder).record.summary is not None


def test_rules_of_the_server_are_methods_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        '[methods.fedsimclr]\n[methods."fedsimclr median"]\nname = "fedsimclr"\n'
        'server.rule = "median"\n'
    )
    rules = [c.settings.server.rule for c in grid.grid([file], [], 1, tmp_path, {})]
    assert rules == ["mean", "median"]


def test_a_failing_cell_does_not_stop_the_others(tmp_path: Path, furlong_: Any) -> None:
    out = tmp_path / "grid"
    peers = ("--model.early-norm", "pn")  # which only some methods can have
    result = furlong_("compare", "--methods", "fedbyol,fedsimclr", *WORDS, *peers, "--out", out)
    assert result.code == 1
    assert "[1/2] defaults · fedbyol · seed 0 FAILED: model.early_norm = pn needs" in result.err
    assert "1 runs done, 0 were there before" in result.err
    assert "fedsimclr" in result.out
    page = (out / "report.html").read_text()
    assert "furlong compare --methods fedbyol,fedsimclr --seeds 1" in page
    again = json.loads((out / "compare.json").read_text())
    assert again["cells"] == ["defaults/fedbyol/0", "defaults/fedsimclr/0"]
    of_the_run = out / "defaults" / "fedsimclr" / "0" / "report.html"
    of_the_run.unlink()  # it can be made again
    result = furlong_("compare", "--methods", "fedsimclr", *WORDS, *peers, "--out", out)
    assert result.code == 0
    assert "0 runs done, 1 were there before" in result.err
    assert of_the_run.exists()


def test_unexpected_errors_keep_their_traceback(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("in a method")

    monkeypatch.setattr(loop, "run", broken)
    [outcome] = grid.run(cells(tmp_path, "fedsimclr"))
    assert outcome.state == "failed"
    assert "ZeroDivisionError: in a method" in outcome.reason
    assert "Traceback" in (outcome.cell.folder / grid.ERROR).read_text()


def test_a_comparison_is_no_run(furlong_: Any) -> None:
    result = furlong_("run", ROOT / "configs/comparisons/all-methods.toml")
    assert result.code == 2
    assert "[methods.…] is for 'furlong compare'" in result.err


def test_wrong_commands(furlong_: Any, tmp_path: Path) -> None:
    for words, said in (
        (["--methods", "nosuch", "--out", tmp_path / "g"], "unknown method 'nosuch'"),
        (["none.toml", "--out", tmp_path / "g"], "cannot read none.toml"),
        (["--methods", "fedu", "--baseline", "fcl", "--out", tmp_path / "g"], "is not one of fedu"),
        (["--methods", "fedu"], "out"),
    ):
        result = furlong_("compare", *words)
        assert result.code != 0
        assert said in result.err + result.out
    assert not (tmp_path / "g").exists()
