"""Several runs become one page: a table per setting, figures, what left the clients, settings."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from furlong.methods import METHODS
from furlong.reports import figures, parts, tables
from furlong.reports.columns import Key, column_title
from furlong.reports.figures import Drawing
from furlong.reports.rendering import render
from furlong.reports.tables import Group, TableRow
from furlong.runs.config import short
from furlong.runs.folder import write_file
from furlong.runs.record import Line
from furlong.words import duration, percent, plural, size

Logs = dict[str, list[list[Line]]]  # label of a row -> the lines of each of its runs
COURSES = {  # metric -> name of the axis, caption
    "knn": ("test accuracy", "kNN accuracy during training, on a sample of the images."),
    "loss": (
        "training loss, 0 to 1",
        "Training loss, each method's between its lowest (0) and its highest value (1): losses of "
        "different methods have different scales, so only their courses compare.",
    ),
    "effective_rank": (
        "effective rank",
        "In how many directions the representations differ, measured without labels. Far below "
        "the untrained encoder's a run is heading for collapse.",
    ),
    "angles": (
        "median angle in degrees",
        "The median angle between two clients' features of the same image, before averaging; 0° "
        "means that the clients' encoders agree.",
    ),
}


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
    sections = [_section(group) for group in groups]
    federated = [row for group in groups for row in group.own if row.federated]
    methods = {row.runs[0].method: METHODS.get(row.runs[0].method) for row in federated}
    contents = {
        "sections": sections,
        "runs": finished,
        "methods": {name: about for name, about in methods.items() if about is not None},
        "headline": _headline(groups),
        "command": tables.grid_file(folders[0]).get("command") if len(folders) == 1 else None,
        "again": shlex.join(["furlong", "report", *map(str, folders)]),
    }
    write_file(page, render("comparison.html.jinja", contents).encode())
    if drawings is not None:
        for number, section in enumerate(sections, 1):
            place = drawings if len(sections) == 1 else drawings / str(number)
            figures.save_all([*section["figures"], *section["split"]], place)
    return page


def fragment(groups: Sequence[Group]) -> str:
    """The tables alone, as HTML for another page."""
    return render("tables.html.jinja", {"groups": groups}).strip()


def _headline(groups: Sequence[Group]) -> dict[str, Any]:
    rows = [row for group in groups for row in group.own]
    names = {row.runs[0].name: row.federated for row in rows}
    methods = sum(names.values())
    counts = {"method": methods, "bound": len(names) - methods}
    return {
        "title": " and ".join(plural(n, word) for word, n in counts.items() if n),
        "methods": list(names),
        "data": list(dict.fromkeys(short(str(group.setting["data.name"])) for group in groups)),
        "runs": len({run.path for row in rows for run in row.runs}),
        "settings": sum(not group.more for group in groups),
        "tiles": list(_tiles(groups[0])),
    }


def _tiles(group: Group) -> Iterator[tuple[str, str, str]]:
    """The first setting in a few large numbers: what, how much, and a remark."""
    random = next((row.cells for row in group.rows if row.reference), {})
    for column in group.columns[:2]:
        if best := group.best(column):
            remark = best.label
            if column in random:
                remark += f", random encoder {percent(random[column].mean)}"
            title = f"highest federated {column_title(column)}"
            yield title, percent(best.cells[column].mean), remark
    sent = [(sum(row.sent), row.label) for row in group.own if row.sent is not None]
    if len(sent) > 1:
        low, high = min(sent), max(sent)
        yield "least sent per client", size(low[0]), f"{low[1]}; most: {size(high[0])}"
    seconds = sum(run.finished.seconds for row in group.own for run in row.runs)
    seeds = len({seed for row in group.own for seed in row.seeds})
    yield "trained for", duration(seconds), plural(seeds, "seed")


def _section(group: Group) -> dict[str, Any]:
    """What the page shows of one setting."""
    logs = {row.label: [run.lines() for run in row.runs] for row in group.own}
    others = {row.label: row.runs[0].others() for row in group.own}
    first = group.own[0].runs[0]
    differing = tables.differing([row.runs[0] for row in group.own])
    common = {k for k in first.others() if k not in differing and not k.startswith("method.")}
    again = group.more  # the section before it has shown the same runs
    return {
        "group": group,
        "figures": list(_drawings(group, logs)),
        "split": [] if again else list(parts.split_drawings(first.split)),
        "traffic": [] if again else list(_traffic(group, logs)),
        "failures": [] if again else list(_failures(group, logs)),
        "common": {**group.setting, **{k: v for k, v in first.others().items() if k in common}},
        "own": {
            label: {k: v for k, v in own.items() if k not in common}
            for label, own in others.items()
        },
    }


def _traffic(group: Group, logs: Logs) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Per row, bytes per client by way and kind, mean over the seeds."""
    for row in group.own:
        if row.sent is None:
            continue
        each = [
            (parts.traffic(lines), run.finished.clients)
            for run, lines in zip(row.runs, logs[row.label], strict=True)
        ]
        yield (
            row.label,
            {
                way: {
                    kind: statistics.fmean(sent[way][kind] / n for sent, n in each)
                    for kind in kinds
                }
                for way, kinds in each[0][0].items()
            },
        )


def _failures(group: Group, logs: Logs) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for row in group.own:
        for run, lines in zip(row.runs, logs[row.label], strict=True):
            about = parts.failures(lines)
            if about["total"]:
                yield row.label, run.seed, about


# ---------------------------------------------------------------- figures


def _drawings(group: Group, logs: Logs) -> Iterator[Drawing]:
    main = next((c for c in group.columns if c[0] == "linear"), next(iter(group.columns), None))
    if main is not None:
        yield _accuracy(group, main)
    if group.more:
        return
    if main is not None:
        yield from _price(group, main)
    yield from _courses(group, logs)
    yield from _few_labels(group)
    if main is not None:
        yield from _ablations(group, main)


def _bar(row: TableRow, column: Key, label: str | None = None) -> tuple[str, float, float | None]:
    return label or row.label, row.cells[column].mean, row.cells[column].std


def _accuracy(group: Group, main: Key) -> Drawing:
    best = group.best(main)
    rows = [row for row in group.rows if main in row.cells]
    rows.sort(key=lambda row: (not row.reference, row.cells[main].mean))
    bars = [_bar(row, main) for row in rows]
    spread = " Lines: one standard deviation over the seeds." if any(b[2] for b in bars) else ""
    top = f" Highest of the federated: {best.label}." if best else ""
    return Drawing(
        figures.bars(bars, highlight=best.label if best else ""),
        f"Test accuracy by the {column_title(main)}, mean over the seeds.{spread}{top}",
        "accuracy",
    )


def _few_labels(group: Group) -> Iterator[Drawing]:
    """A line per row over the share of the labels, if several shares were measured."""
    lines: dict[str, list[figures.Points]] = {}
    for row in group.rows:
        whose = ["random" if row.reference else run.finished.who for run in row.runs]
        found: list[figures.Points] = [
            sorted(parts.over_labels(run.measured, who).items())
            for run, who in zip(row.runs, whose, strict=True)
        ]
        if runs := [points for points in found if len(points) > 1]:
            lines[row.label] = runs
    if lines:
        reference = {row.label: len(group.own) for row in group.rows if row.reference}
        yield parts.few_labels(lines, _slots(group) | reference)


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
        if main in row.cells and row.sent is None and (row is group.rows[0] or not row.reference)
    }
    words = ("sent per client, both ways", "test accuracy")
    cheapest, dearest = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    yield Drawing(
        figures.versus(points, *words, levels=levels, slots=_slots(group)),
        f"Accuracy by the {column_title(main)} against what a client receives and sends in "
        f"the whole run: from {size(cheapest[1])} ({cheapest[0]}) to {size(dearest[1])} "
        f"({dearest[0]}). Dashed: encoders that send nothing.",
        "accuracy-bytes",
    )


def _courses(group: Group, logs: Logs) -> Iterator[Drawing]:
    """Metrics over the rounds, a line per row."""
    slots = _slots(group)
    band = " Bands: one standard deviation over the seeds." if _several(group) else ""
    untrained = _untrained(group, logs)
    for name, (ylabel, caption) in {**COURSES, **_reasons(group, logs)}.items():
        series, options = _series(logs, name, apart=name == "loss"), dict[str, Any]()
        if name in untrained:
            options["levels"] = {"untrained": untrained[name]}
        if name == "knn":
            options["unit"] = "%"
        if name == "loss":
            series = {label: _unit(runs) for label, runs in series.items()}
            options = {"limits": (0.0, 1.0)}
        if series:
            # the lines of one row's kinds of exchanges have the row's colour
            places = {key: slots[key.rpartition(", ")[0]] for key in series if key not in slots}
            drawn = figures.compared(series, ylabel, slots=slots | places, **options)
            yield Drawing(drawn, f"{caption}{band}", name)


def _untrained(group: Group, logs: Logs) -> dict[str, float]:
    """What the encoder gave before training, mean over the runs that share the first one's."""
    every = [pair for row in group.own for pair in zip(row.runs, logs[row.label], strict=True)]
    kind = every[0][0].encoder.get("encoder")
    same = [parts.untrained(lines) for run, lines in every if run.encoder.get("encoder") == kind]
    measured = [found for found in same if found]
    names = measured[0] if measured else {}
    return {name: statistics.fmean(found[name] for found in measured) for name in names}


def _reasons(group: Group, logs: Logs) -> dict[str, tuple[str, str]]:
    """Whatever else several rows log, as ``COURSES`` has it."""
    found: dict[str, list[str]] = {}  # metric -> the methods that log it
    for row in group.own:
        lines = [line for run in logs[row.label] for line in run]
        for name in dict.fromkeys(name for line in lines for name in line.reasons):
            found.setdefault(name, []).append(row.runs[0].method)
    return {
        name: (name.replace("_", " "), parts.explained(methods, name))
        for name, methods in found.items()
        if len(methods) > 1
    }


def _slots(group: Group) -> dict[str, int]:
    """A row has one colour in all figures."""
    return {row.label: number for number, row in enumerate(group.own)}


def _several(group: Group) -> bool:
    return any(len(row.runs) > 1 for row in group.own)


def _series(logs: Logs, name: str, apart: bool = False) -> dict[str, list[figures.Points]]:
    """Label -> per run its points by round; the last exchange of a round counts.

    ``apart``: kinds of exchanges that have the metric are lines of their own.
    """
    found: dict[str, list[figures.Points]] = {}
    for label, lines in ((label, lines) for label, runs in logs.items() for lines in runs):
        kinds: dict[str, dict[float, float]] = {}
        for line in lines:
            value = line.metrics.get(name)
            if value is not None:
                points = kinds.setdefault(line.kind if apart else "", {})
                points[line.round + 1] = value[2] if name == "angles" else value
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
        values = [row.runs[0].others().get(fields[0]) for row in rows]
        bars = [_bar(row, main, ", ".join(row.label.split(", ")[1:])) for row in rows]
        if len(fields) == 1 and all(type(v) in (int, float) for v in values):
            points = [(float(str(v)), *bar[1:]) for v, bar in zip(values, bars, strict=True)]
            drawn = figures.sweep(points, words, "test accuracy")
        else:
            drawn = figures.bars(bars, highlight="")
        spread = " Lines: one standard deviation over the seeds." if _several(group) else ""
        best = max(rows, key=lambda row: row.cells[main].mean)
        yield Drawing(
            drawn,
            f"{name}: test accuracy by the {column_title(main)} over {words}.{spread} Highest: "
            f"{best.label}, {percent(best.cells[main].mean)}.",
            f"ablation-{name}-{'-'.join(f.rpartition('.')[2] for f in fields)}"[:80],
        )
