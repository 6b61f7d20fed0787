"""Several runs become one page: a table per setting, figures, what left the clients, settings."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError
from furlong.reports import figures, tables
from furlong.reports.page import (
    KINDS,
    SPLIT,
    Drawing,
    about_method,
    environment,
    failures,
    log,
    percent,
    render,
    save,
    split_drawings,
)
from furlong.reports.tables import Group, Key, Row
from furlong.runs.checkpoint import write_atomically
from furlong.runs.folder import RunFolder
from furlong.runs.grid import GRID
from furlong.words import duration, size

Line = dict[str, Any]


def build(
    folders: Sequence[Path],
    out: Path | None = None,
    baseline: str | None = None,
    drawings: Path | None = None,
) -> Path:
    """Write the page that compares the runs in or below ``folders``; the path of the page."""
    finished, unfinished = tables.find(folders)
    groups = tables.tables(finished, baseline, unfinished)
    page = out or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    parts = [_part(group) for group in groups]
    contents = {
        "parts": parts,
        "kinds": KINDS,
        "runs": finished,
        "methods": _methods(groups),
        "headline": _headline(groups),
        "command": _command(folders),
        "again": shlex.join(["furlong", "report", *map(str, folders)]),
    }
    try:
        write_atomically(page, render("comparison.html.jinja", contents).encode())
    except OSError as error:
        raise FurlongError(f"cannot write {page}: {error.strerror}") from None
    if drawings is not None:
        for number, part in enumerate(parts):
            place = drawings if len(parts) == 1 else drawings / str(number + 1)
            save([*part["figures"], *part["split"]], place)
    return page


def fragment(groups: Sequence[Group]) -> str:
    """The tables alone, as HTML for another page."""
    text = (
        '{% from "parts.html.jinja" import group_table %}{% for group in groups %}\n'
        "<h2>{{ group.title }}</h2>\n{{ group_table(group) }}{% endfor %}"
    )
    return environment().from_string(text).render(groups=groups).strip()


def _command(folders: Sequence[Path]) -> str | None:
    """How the grid was made, if ``furlong compare`` made it."""
    path = folders[0] / GRID
    if len(folders) != 1 or not path.exists():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged: the page only lacks the command


def _headline(groups: Sequence[Group]) -> dict[str, Any]:
    names = list(dict.fromkeys(row.runs[0].name for g in groups for row in g.own))
    data = list(dict.fromkeys(str(g.setting["data.name"]) for g in groups))
    runs = len({run.path for g in groups for row in g.own for run in row.runs})
    bounds = [name for name in names if "@" in name]
    counts = {"method": len(names) - len(bounds), "bound": len(bounds)}
    title = " and ".join(f"{n} {w}{'' if n == 1 else 's'}" for w, n in counts.items() if n)
    return {
        "title": title,
        "methods": names,
        "data": data,
        "runs": runs,
        "settings": sum(not group.more for group in groups),
        "tiles": _tiles(groups[0]),
    }


def _tiles(group: Group) -> list[tuple[str, str, str]]:
    """The first setting in a few large numbers: what, how much, and a remark."""
    found = []
    for column in group.columns[:2]:
        best = group.best(column)
        if best is not None:
            row = next(row for row in group.own if row.label == best)
            random = next((r.cells.get(column) for r in group.rows if r.reference), None)
            remark = "" if random is None else f", random encoder {percent(random.mean)}"
            value = percent(row.cells[column].mean)
            found.append(
                (f"highest federated {tables.column_title(column)}", value, f"{best}{remark}")
            )
    sent = [(sum(row.sent), row.label) for row in group.own if row.sent is not None]
    if len(sent) > 1:
        low, high = min(sent), max(sent)
        found.append(("least sent per client", size(low[0]), f"{low[1]}; most: {size(high[0])}"))
    seconds = sum(run.summary["seconds"] for row in group.own for run in row.runs)
    seeds = len({seed for row in group.own for seed in row.seeds})
    found.append(("trained for", duration(seconds), f"{seeds} seed{'' if seeds == 1 else 's'}"))
    return found


def _methods(groups: Sequence[Group]) -> dict[str, dict[str, str]]:
    """What the library's methods say about themselves."""
    names = dict.fromkeys(
        str(row.runs[0].settings["method"]["name"])
        for group in groups
        for row in group.own
        if "@" not in row.runs[0].name
    )
    found = {name: about_method(name) for name in names}
    return {name: about for name, about in found.items() if about is not None}


def _part(group: Group) -> dict[str, Any]:
    """What the page shows of one setting."""
    logs = {row.label: [log(RunFolder(run.path)) for run in row.runs] for row in group.own}
    every = [row.runs[0] for row in group.own]
    differing = tables.differing(every)
    common = {k: v for k, v in every[0].others().items() if k not in differing}
    shared = {k: v for k, v in common.items() if not k.startswith("method.")}
    part: dict[str, Any] = {
        "group": group,
        "figures": list(_drawings(group, logs)),
        "split": [],
        "traffic": [],
        "failures": [],
        "common": {**group.setting, **shared},
        "own": [
            (row.label, {k: v for k, v in row.runs[0].others().items() if k not in shared})
            for row in group.own
        ],
    }
    if group.more:  # the part before it has shown the same runs
        return part
    split = RunFolder(every[0].path).read("partition.json", SPLIT)
    return part | {
        "split": list(split_drawings(split)) if split else [],
        "traffic": [
            (row.label, _bytes(row, logs[row.label])) for row in group.own if row.sent is not None
        ],
        "failures": _failures(group, logs),
    }


def _bytes(row: Row, logs: list[list[Line]]) -> dict[str, dict[str, float]]:
    """Bytes per client by way and kind, mean over the seeds."""
    return {
        way: {
            kind: statistics.fmean(
                sum(line[way].get(kind, 0) for line in lines) / run.summary["clients"]
                for run, lines in zip(row.runs, logs, strict=True)
            )
            for kind in KINDS
        }
        for way in ("up", "down")
    }


def _failures(group: Group, logs: dict[str, list[list[Line]]]) -> list[tuple[str, int, Any]]:
    found = []
    for row in group.own:
        for run, lines in zip(row.runs, logs[row.label], strict=True):
            about = failures(lines)
            if about["total"]:
                found.append((row.label, run.seed, about))
    return found


# ---------------------------------------------------------------- figures


def _drawings(group: Group, logs: dict[str, list[list[Line]]]) -> Iterator[Drawing]:
    main = next((c for c in group.columns if c[0] == "linear"), next(iter(group.columns), None))
    if main is not None:
        yield from _accuracy(group, main)
    if group.more:
        return
    if main is not None:
        yield from _price(group, main)
    yield from _courses(group, logs)
    if main is not None:
        yield from _ablations(group, main)


def _accuracy(group: Group, main: Key) -> Iterator[Drawing]:
    title, best = tables.column_title(main), group.best(main)
    rows = [row for row in group.rows if main in row.cells]
    rows.sort(key=lambda row: (not row.reference, row.cells[main].mean))
    bars = [(row.label, row.cells[main].mean, row.cells[main].std) for row in rows]
    spread = " Lines: one standard deviation over the seeds." if any(b[2] for b in bars) else ""
    top = f" Highest of the federated: {best}." if best else ""
    yield Drawing(
        figures.bars(bars, highlight=best or ""),
        f"Test accuracy by the {title}, mean over the seeds.{spread}{top}",
        "accuracy",
    )


def _price(group: Group, main: Key) -> Iterator[Drawing]:
    points = [
        (row.label, sum(row.sent), row.cells[main].mean, row.cells[main].std)
        for row in group.own
        if row.sent is not None and any(row.sent) and main in row.cells
    ]
    if len(points) < 2:
        return
    levels = {
        row.label: row.cells[main].mean
        for row in group.rows
        if main in row.cells and (row is group.rows[0] or "@" in row.label)
    }
    words = ("sent per client, both ways", "test accuracy")
    drawn = figures.versus(points, *words, levels=levels, slots=_slots(group))
    cheapest, dearest = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    yield Drawing(
        drawn,
        f"Accuracy by the {tables.column_title(main)} against what a client receives and sends in "
        f"the whole run: from {size(cheapest[1])} ({cheapest[0]}) to {size(dearest[1])} "
        f"({dearest[0]}). Dashed: encoders that send nothing.",
        "accuracy-bytes",
    )


def _courses(group: Group, logs: dict[str, list[list[Line]]]) -> Iterator[Drawing]:
    slots = _slots(group)
    band = " Bands: one standard deviation over the seeds." if _several(group) else ""
    if score := _series(logs, "knn"):
        random = next((row.cells for row in group.rows if row.reference), {})
        level = {"random": random["knn", 1.0].mean} if ("knn", 1.0) in random else {}
        yield Drawing(
            figures.compared(score, "test accuracy", levels=level, unit="%", slots=slots),
            f"kNN accuracy during training, on a sample of the images.{band}",
            "knn",
        )
    if loss := _series(logs, "loss", apart=True):
        scaled = {label: _unit(runs) for label, runs in loss.items()}
        yield Drawing(
            figures.compared(
                scaled,
                "training loss, 0 to 1",
                slots=slots | _kinds(loss, slots),
                limits=(0.0, 1.0),
            ),
            "Training loss, each method's between its lowest (0) and its highest value (1): losses "
            f"of different methods have different scales, so only their courses compare.{band}",
            "loss",
        )
    if moved := _series(logs, "divergence"):
        yield Drawing(
            figures.compared(moved, "divergence", slots=slots),
            "How far local training moved a client's encoder away from the federation's, mean over "
            f"the clients.{band}",
            "divergence",
        )
    if angle := _series(logs, "angles"):
        yield Drawing(
            figures.compared(angle, "median angle in degrees", slots=slots),
            "The median angle between two clients' features of the same image, before averaging; "
            f"0° means that the clients' encoders agree.{band}",
            "angles",
        )


def _slots(group: Group) -> dict[str, int]:
    """A row has one colour in all figures."""
    return {row.label: number for number, row in enumerate(group.own)}


def _kinds(series: Iterable[str], slots: Mapping[str, int]) -> dict[str, int]:
    """The lines of one row's kinds of exchanges have the row's colour."""
    return {name: slots[name.rpartition(", ")[0]] for name in series if name not in slots}


def _several(group: Group) -> bool:
    return any(len(row.runs) > 1 for row in group.own)


def _series(
    logs: dict[str, list[list[Line]]], name: str, apart: bool = False
) -> dict[str, list[figures.Points]]:
    """Label -> per run its points by round; the last exchange of a round counts.

    ``apart``: kinds of exchanges that have the metric are lines of their own.
    """
    found: dict[str, list[figures.Points]] = {}
    for label, runs in logs.items():
        for lines in runs:
            kinds: dict[str, dict[float, float]] = {}
            for line in lines:
                value = line.get(name)
                if value is not None:
                    points = kinds.setdefault(line.get("kind", "train") if apart else "", {})
                    points[line["round"] + 1] = value[2] if name == "angles" else value
            for kind, points in kinds.items():
                title = f"{label}, {kind}" if len(kinds) > 1 else label
                if len(points) > 1:
                    found.setdefault(title, []).append(list(points.items()))
    return found


def _unit(runs: list[figures.Points]) -> list[figures.Points]:
    """Scaled so that all runs together span 0 to 1."""
    values = [y for points in runs for _, y in points]
    low, span = min(values), (max(values) - min(values)) or 1.0
    return [[(x, (y - low) / span) for x, y in points] for points in runs]


def _ablations(group: Group, main: Key) -> Iterator[Drawing]:
    """A figure per method whose runs differ in a field: over its values, or a bar each."""
    for name in dict.fromkeys(row.runs[0].name for row in group.own):
        rows = [row for row in group.own if row.runs[0].name == name and main in row.cells]
        if len(rows) < 2:
            continue
        fields = tables.differing([row.runs[0] for row in rows])
        words = ", ".join(field.removeprefix("method.") for field in fields)
        title = f"{name}: test accuracy by the {tables.column_title(main)} over {words}."
        spread = " Lines: one standard deviation over the seeds." if _several(group) else ""
        stem = f"ablation-{name}-{'-'.join(f.rpartition('.')[2] for f in fields)}"
        values = [row.runs[0].others().get(fields[0]) for row in rows]
        if len(fields) == 1 and all(type(v) in (int, float) for v in values):
            points = [
                (float(str(v)), row.cells[main].mean, row.cells[main].std)
                for v, row in zip(values, rows, strict=True)
            ]
            drawn = figures.sweep(points, words, "test accuracy")
        else:
            drawn = figures.bars(
                [
                    (
                        ", ".join(row.label.split(", ")[1:]),
                        row.cells[main].mean,
                        row.cells[main].std,
                    )
                    for row in rows
                ],
                highlight="",
            )
        best = max(rows, key=lambda row: row.cells[main].mean)
        top = f" Highest: {best.label}, {percent(best.cells[main].mean)}."
        yield Drawing(drawn, f"{title}{spread}{top}", stem[:80])
