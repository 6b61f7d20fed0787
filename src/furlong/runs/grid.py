"""A grid of runs: configurations × methods × seeds, each cell an ordinary run folder.

``FOLDER/<configuration>/<method>/<seed>``. A finished cell is not repeated, an interrupted one goes
on (same bits), one that fails is reported while the others go on. A cell that is there with other
settings is an error before anything runs.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError
from furlong.runs import config, loop, papers
from furlong.runs.config import Config
from furlong.runs.datasets import load_data
from furlong.runs.folder import write_file
from furlong.runs.prepare import resolved
from furlong.runs.record import RunRecord
from furlong.runs.split import client_count, split_data
from furlong.words import duration

PER_CELL = ("method.name", "run.out", "run.bound")  # settings that a grid chooses
ERROR = "error.txt"
GRID = "compare.json"  # in a grid's folder: its command and its cells


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str  # of the configuration
    method: str  # as in --methods
    seed: int
    folder: Path
    settings: Config

    @property
    def row(self) -> str:
        """The method and bound that it trains: its row in a table."""
        bound = self.settings.run.bound
        return str(self.settings.method["name"]) + ("" if bound == "none" else f"@{bound}")

    def __str__(self) -> str:
        return f"{self.name} · {self.method} · seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: ``done``, ``was there`` or ``failed``, and why."""

    cell: Cell
    state: str
    reason: str = ""


# ---------------------------------------------------------------- the grid


def grid(
    files: Sequence[str | Path],
    methods: Sequence[str],
    seeds: int,
    out: Path,
    options: Mapping[str, Any],
) -> list[Cell]:
    """Every cell, seeds outermost, so that an interrupted grid has whole comparisons.

    ``methods`` replaces those that the files name (``[methods.NAME]``, else ``[method]``); options
    hold for all cells.
    """
    if seeds < 1:
        raise FurlongError(f"--seeds is {seeds}; it must be at least 1")
    for option in options:
        if config.full_name(option) in PER_CELL:
            raise FurlongError(f"--{option} cannot be given to compare: it differs between cells.")
    cells = []
    for name, (tree, tables) in _read(files).items():
        where = name if files else "options"
        for label in methods or list(tables) or [_own(tree)]:
            for number in range(seeds):
                settings = _settings(tree, tables, label, options, where)
                seed = settings.run.seed + number
                folder = out / name / _folder(label) / str(seed)
                run = replace(settings.run, seed=seed, out=str(folder))
                cells.append(Cell(name, label, seed, folder, replace(settings, run=run)))
    twice = {c.folder for c in cells if sum(c.folder == other.folder for other in cells) > 1}
    if twice:
        raise FurlongError(f"--methods names {sorted(twice)[0].parent.name} twice.")
    for cell in cells:
        _check(cell)
    return sorted(cells, key=lambda cell: cell.seed)


def _own(tree: Mapping[str, Any]) -> str:
    """The file's own method, with its bound."""
    bound = tree.get("run", {}).get("bound", "none")
    name = str(tree.get("method", {}).get("name", config.MethodSettings.name))
    return name if bound == "none" else f"{name}@{bound}"


def _read(files: Sequence[str | Path]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> the file's tables, and its [methods.NAME] apart."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    sources = papers.expand(files)
    stems = [path.stem for path in sources]
    for path in sources:
        name = path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}-{path.stem}"
        if str(path).startswith(papers.PREFIX):
            name = str(path).removeprefix(papers.PREFIX).replace("/", "-")
        if name in found:
            raise FurlongError(f"two configurations are called {name}: rename {path}.")
        tree = config.read(path)
        tables = tree.pop("methods", {})
        if not isinstance(tables, Mapping) or not all(
            isinstance(t, Mapping) for t in tables.values()
        ):
            raise FurlongError(f"{path}: methods must be tables: write [methods.NAME].")
        found[name] = (tree, dict(tables))
    return found or {"defaults": ({}, {})}


def _settings(
    tree: Mapping[str, Any],
    tables: Mapping[str, Any],
    label: str,
    options: Mapping[str, Any],
    where: str,
) -> Config:
    """The file, then the method's own table, then the options."""
    name, at, bound = label.rpartition("@")
    name, bound = (name, bound) if at else (label, "")
    if at:
        config.check_bound(bound, f"--methods {label}")
    own = {**tables.get(name, {}), **(tables.get(label, {}) if at else {})}
    name = str(own.pop("name", name))
    given: dict[str, Any] = {"method": name, "bound": bound or "none"}
    for key, value in own.items():
        if isinstance(value, Mapping):  # data.augment = "mfcl"
            given |= {f"{key}.{inner}": word for inner, word in value.items()}
        else:
            given[f"method.{key}"] = value
    return config.from_tree(tree, {**given, **options}, where)


def _folder(label: str) -> str:
    return re.sub(r"[^\w@.+=-]+", "-", label).strip("-.") or "method"


def _check(cell: Cell) -> None:
    """Refuse a cell whose folder holds a run with other settings."""
    path = cell.folder / "config.toml"
    if not path.exists():
        return
    _ = RunRecord(cell.folder).summary  # a damaged one is told now
    there = _tree(path)
    clients = client_count(cell.settings)
    if clients is None:  # only the images tell how many a natural partition has
        clients = there.get("data", {}).get("clients")
    k = cell.settings.evaluate.k or there.get("evaluate", {}).get("k", 0)  # the images tell it, too
    settings = resolved(cell.settings, cell.settings.make_method(), clients, k)
    wanted = tomllib.loads(settings.toml())
    for section in sorted({*there, *wanted}):
        for key in sorted({*there.get(section, {}), *wanted.get(section, {})}):
            old, new = (tree.get(section, {}).get(key) for tree in (there, wanted))
            if old != new and not config.is_place(f"{section}.{key}"):
                raise FurlongError(
                    f"{cell.folder} holds a run with {section}.{key} = {old}, not {new}. Give the "
                    "settings that it began with, or another --out."
                )


def _tree(path: Path) -> dict[str, Any]:
    tree = config.read(path)
    if not all(isinstance(table, Mapping) for table in tree.values()):
        raise FurlongError(f"{path} is not the configuration of a run: move the folder away.")
    return tree


def try_data(cells: Sequence[Cell]) -> None:
    """Read and split the images once per configuration that is to run: mistakes show now."""
    tried = set()
    for cell in cells:
        data = replace(cell.settings.data, augment="auto", public=None)
        if data in tried or _finished(cell.folder):
            continue
        tried.add(data)
        try:
            split_data(cell.settings, load_data(cell.settings)[0])
        except FurlongError as error:
            raise FurlongError(f"{cell.name}: {error}") from None


# ---------------------------------------------------------------- running


def run(
    cells: Sequence[Cell],
    show: loop.Show | None = None,
    say: loop.Say = lambda _: None,
    tell: loop.Say = lambda _: None,
    engine: loop.Connect | None = None,
) -> Iterator[Outcome]:
    """Every cell in turn, unless it has finished; yields what became of it.

    ``tell`` hears where the grid is, ``say`` a run's notes.
    """
    took: dict[str, list[float]] = {}
    for number, cell in enumerate(cells):
        summary = RunRecord(cell.folder).summary
        if summary is not None and _finished(cell.folder):
            took.setdefault(cell.method, []).append(summary.seconds)
            yield Outcome(cell, "was there")
            continue
        tell(f"[{number + 1}/{len(cells)}] {cell}{_left(cells[number:], took)}")
        began = time.monotonic()
        outcome = _one(cell, show, say, engine)
        if outcome.state == "failed":
            tell(f"[{number + 1}/{len(cells)}] {cell} FAILED: {outcome.reason}")
        else:
            took.setdefault(cell.method, []).append(time.monotonic() - began)
        yield outcome


def _finished(folder: Path) -> bool:
    """Whether a run has everything that a finished one has; its page can be made again."""
    names = ("config.toml", "summary.json", "encoder.safetensors", "encoder.json")
    return all((folder / name).exists() for name in names)


def _one(cell: Cell, show: loop.Show | None, say: loop.Say, engine: loop.Connect | None) -> Outcome:
    note, summary = cell.folder / ERROR, cell.folder / "summary.json"
    aside = summary.with_suffix(".before")
    try:
        if summary.exists():  # but not all that belongs to it: the last checkpoint gives it again
            say(f"{cell.folder} lacks its encoder: making it again.")
            summary.replace(aside)
        if (cell.folder / "config.toml").exists():
            loop.resume(cell.folder, config.resumable(cell.settings), show, say, engine)
        else:
            loop.run(cell.settings, show, say, engine)
    except FurlongError as error:
        return Outcome(cell, "failed", str(error))
    except Exception as error:  # a method's own mistake must not end the other cells
        cell.folder.mkdir(parents=True, exist_ok=True)
        note.write_text(traceback.format_exc(), encoding="utf-8")
        return Outcome(cell, "failed", f"{type(error).__name__}: {error} (see {note})")
    finally:
        if aside.exists() and not summary.exists():
            aside.replace(summary)
    for left in (note, aside):
        left.unlink(missing_ok=True)
    return Outcome(cell, "done")


def _left(cells: Sequence[Cell], took: Mapping[str, Sequence[float]]) -> str:
    """How many cells are left and how long they may take, going by those that have finished."""
    todo = [c for c in cells if not _finished(c.folder)]
    if not took:
        return f", {len(todo)} to do"
    mean = statistics.fmean(s for times in took.values() for s in times)
    expected = sum(statistics.fmean(took.get(c.method, [mean])) for c in todo)
    return f", {len(todo)} to do, about {duration(expected)}"


def keep(out: Path, command: str, cells: Sequence[Cell]) -> None:
    """Write down by which command the grid can be made again, and its cells in their order."""
    names = [cell.folder.relative_to(out).as_posix() for cell in cells]
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"command": command, "cells": names}, indent=1) + "\n"
        write_file(out / GRID, text.encode())
    except OSError as error:
        raise FurlongError(f"cannot write to {out}: {error.strerror}") from None
