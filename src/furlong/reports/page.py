"""A run folder becomes report.html: one page that opens anywhere, without a network.

Only the folder's files are read, so the page of a run that is still going, or was interrupted, can
be made too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tomli_w

from furlong.methods import METHODS
from furlong.reports import figures, measures, parts, tables
from furlong.reports.columns import Key, column_title, kind_of
from furlong.reports.figures import Drawing
from furlong.reports.formats import RANK, voters
from furlong.reports.rendering import render
from furlong.reports.tables import MeasuredRun
from furlong.runs.config import WITHOUT, short
from furlong.runs.folder import write_file
from furlong.runs.record import UNTRAINED, Line, damaged
from furlong.words import percent, size

ENCODERS = {
    "random": "random encoder (reference)",
    "initial": "initial weights, before training (reference)",
    "federated": "federated",
    "pooled": "pooled: all images in one place",
    "alone": "alone: every client by itself, mean ± std",
}
BOUNDS = {
    "single": "every client trained alone",
    "pooled": "all images were put in one place",
}
BOLD = "The bold line is the clients' mean, weighted by their numbers of images."
PLANES = {  # file -> how the map was made, and how to read it
    "tsne.json": (
        "by t-SNE (perplexity 30, from the PCA).",
        "Near points are alike to the encoder; sizes of groups and distances between them mean "
        "little.",
    ),
    "map.json": (
        "by their two principal components.",
        "Far points are unlike to the encoder; near ones may differ in what the plane does not "
        "show. furlong report --tsne makes a map in which near points are alike.",
    ),
}
FROZEN = ("knn", "linear", "linear-crops")
TUNED = ("semi", "federated", "transfer")


def build(
    run: Path, drawings: Path | None = None, pictures: Mapping[str, Any] | None = None
) -> Path:
    """Write ``run``/report.html; the same files give the same bytes.

    ``drawings``: a folder for the figures as .svg and .png files; ``pictures``: what
    :func:`furlong.reports.pictures.pictures` gives, only for whoever asked for it.
    """
    record = MeasuredRun.open(run)
    lines = record.lines()
    place, settings = Path(short(str(run))), _shown(record.settings)
    spent = record.summary.privacy if record.summary else None
    contents: dict[str, Any] = {
        "run": record,
        "config": settings,
        "toml": tomli_w.dumps(settings),
        "summary": record.summary,
        "place": str(place),
        "quoted": shlex.quote(str(place)),
        "quoted_config": shlex.quote(str(place / "config.toml")),
        "done": lines[-1].round + 1 if lines else 0,
        "rounds_seen": len({line.round for line in lines}),
        "bound": _bound(record.bound),
        "results": list(_results(record)),
        "beside": measures.of_run(record.measured, _sites(record)),
        "few_labels": list(_few_labels(record)),
        "headline": _headline(record),
        "printed": list(_printed(record)),
        "curves": [*_curves(record, lines), *_plane(record)],
        "reasons": list(_reasons(record, lines)),
        "bold": BOLD,
        "trouble": parts.trouble(record.method, lines),
        "split": list(parts.split_drawings(record.split)),
        "method": METHODS.get(record.method),
        "traffic": parts.traffic(lines) if record.sends else None,
        "failures": parts.failures(lines),
        "budget": parts.budget(spent, record.secured, parts.initial(record.settings))
        if spent
        else None,
        "under_budget": parts.leaves(spent) if spent else None,
        "pictures": pictures,
    }
    write_file(run / "report.html", render("report.html.jinja", contents).encode())
    if drawings is not None:
        drawn = (contents[name] for name in ("few_labels", "curves", "reasons", "split"))
        figures.save_all(chain.from_iterable(drawn), drawings)
    return run / "report.html"


def _shown(value: Any) -> Any:
    """Settings without the folders of this machine: a page without images can be shown."""
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return short(value) if isinstance(value, str) else value


def _bound(bound: str) -> str | None:
    """What was bounded, in words; ``None`` for a federation."""
    if bound.startswith(WITHOUT):
        return f"the federation of all but the site {bound.removeprefix(WITHOUT)}"
    return BOUNDS.get(bound)


# ---------------------------------------------------------------- numbers


def _results(run: MeasuredRun) -> Iterator[dict[str, Any]]:
    """Tables: a column per protocol, a row per encoder, clients by themselves apart.

    What the clients tuned themselves is a table of its own.
    """
    for federated in (False, True):
        kinds = [(kind_of(row.protocol) == "federated", row) for row in run.measured]
        columns, table = tables.by_encoder(row for tuned, row in kinds if tuned == federated)
        ranks = {} if federated else run.ranks
        people = dict.fromkeys([*table, *ranks])
        named = [(ENCODERS.get(who, who), who, table.get(who, {})) for who in people]
        if people:
            yield {
                "federated": federated,
                "columns": columns,
                "ranks": ranks,
                "rows": [row for row in named if not row[1].endswith(" alone")],
                "alone": [row for row in named if row[1].endswith(" alone")],
                "notes": [*_how(columns, table, run), *([RANK] if ranks else [])],
            }


def _how(columns: Sequence[Key], people: Iterable[str], run: MeasuredRun) -> Iterator[str]:
    """What was done to the encoder for the columns of a table."""
    every = [(kind_of(column[0]), column_title(column)) for column in columns]
    for kinds, words in (
        (FROZEN, "the encoder is frozen, a classifier works on what it gives."),
        (TUNED, "the encoder itself is trained further, with labels."),
    ):
        if names := "; ".join(title for kind, title in every if kind in kinds):
            capital = names if names.startswith("kNN") else names[:1].upper() + names[1:]
            yield f"{capital}: {words}"
    if ("knn", 1.0) in columns:
        yield voters(run.settings["evaluate"]["k"])
    if left := [column_title(column) for column in columns if " on site " in column[0]]:
        yield (
            f"{'; '.join(left)}: on the test images of the site that took no part; the labels of "
            "the others, without that site's."
        )
    if any(kind == "classifier" for kind, _ in every):
        yield "own classifier: of the method, which learnt from labels during the run."
    if any(", exchange " in who for who in people):
        yield "A row that names an exchange is of a checkpoint, before the run ended."


def _printed(run: MeasuredRun) -> Iterator[str]:
    """What the papers print for this setting, and how their runs differ from this one."""
    groups = tables.tables([run]) if run.summary else []
    for beside in (beside for group in groups for row in group.own for beside in row.printed):
        numbers = [f"{column_title(key)} {percent(p.accuracy)}" for key, p in beside.cells.items()]
        note = f" ({beside.note})" if beside.note else ""
        yield f"Printed in {beside.source}: {', '.join(numbers)}{note}."


def _headline(run: MeasuredRun) -> list[tuple[str, float, str]]:
    """What the run reached, and the encoder before training, per protocol; the probe first."""
    columns, _ = tables.by_encoder(run.measured)
    who = run.summary.who if run.summary else ""
    found = [column for column in columns if (who, column) in run.scores]
    return [
        (column_title(column), run.scores[who, column], _before(run, column))
        for column in sorted(found, key=lambda column: column != ("linear", 1.0))[:2]
    ]


def _before(run: MeasuredRun, column: Key) -> str:
    """What was measured of the encoder before training, in words."""
    names = {"random": "random encoder", "initial": "initial weights"}
    found = [(names[who], run.scores.get((who, column))) for who in UNTRAINED]
    return next((f"{name} {percent(score)}" for name, score in found if score is not None), "")


# ---------------------------------------------------------------- figures


def _few_labels(run: MeasuredRun) -> Iterator[Drawing]:
    """The linear probe over the share of the labels, if it was measured with few."""
    named = {who: ENCODERS.get(who, who).split(":")[0].split(" (")[0] for who in _people(run)}
    lines = {
        name: [sorted(parts.over_labels(run.measured, who).items())] for who, name in named.items()
    }
    lines = {name: points for name, points in lines.items() if len(points[0]) > 1}
    if lines:
        yield parts.few_labels(lines)


def _people(run: MeasuredRun) -> list[str]:
    """Whose encoders a figure shows: the random one, and what the run trained."""
    return ["random", *([run.summary.who] if run.summary else [])]


def _curves(run: MeasuredRun, lines: Sequence[Line]) -> Iterator[Drawing]:
    yield from _losses(lines)
    untrained = parts.untrained(lines)
    whose = ", mean of the clients' encoders" if run.bound == "single" else ""
    if score := _points(lines, "knn"):
        level, dashed = _level(untrained.get("knn"))
        yield Drawing(
            figures.curves({"kNN": score}, "test accuracy", levels=level, unit="%"),
            f"kNN accuracy during training{whose}, on a sample of the images.{dashed} Last: "
            f"{percent(score[-1][1])}.",
            "knn",
        )
    if rank := _points(lines, "effective_rank"):
        level, dashed = _level(untrained.get("effective_rank"))
        yield Drawing(
            figures.curves({"rank": rank}, "effective rank", levels=level, from_zero=True),
            f"In how many directions the representations differ{whose}, measured without labels. "
            "Far below the untrained encoder's a run is heading for collapse; near 1 all images "
            f"look the same to the encoder.{dashed} Last: {rank[-1][1]:.1f}.",
            "effective_rank",
        )
    if angles := dict(_points(lines, "angles")):
        first, *_, last = [*angles.values()] * 2
        yield Drawing(
            figures.boxes(angles, "angle in degrees"),
            "The angle between two clients' features of the same image, before averaging: median, "
            "quartiles, and 5 and 95 %. 0° means that the clients' encoders agree. Median at "
            f"first {first[2]:.1f}°, at last {last[2]:.1f}°.",
            "angles",
        )
    if spent := _points(lines, "epsilon"):
        yield Drawing(
            figures.curves({"ε": spent}, "ε spent", from_zero=True),
            f"The privacy budget spent so far, by whom most was released of. Last: "
            f"{spent[-1][1]:.3g}.",
            "epsilon",
        )
    if run.sends and lines:
        sent = {way: _sum_up(lines, f"bytes_{way}") for way in ("up", "down")}
        sums = ", ".join(f"{size(points[-1][1])} {way}" for way, points in sent.items())
        yield Drawing(
            figures.curves(sent, "sent so far", unit="B", from_zero=True),
            f"Bytes sent since the start, all clients together: {sums}.",
            "bytes",
        )


def _level(value: float | None) -> tuple[dict[str, float], str]:
    """The untrained encoder's number across a figure, and words for the caption."""
    if value is None:
        return {}, ""
    return {"untrained": value}, " Dashed: the encoder before any training."


def _losses(lines: Sequence[Line]) -> Iterator[Drawing]:
    """The training loss, of every kind of exchange apart."""
    for kind, during, some in _by_kind(lines):
        if mean := _points(some, "loss"):
            each = _each(some, "loss")
            bold = f" {BOLD}" if len(each) > 1 else ""
            yield Drawing(
                figures.curves({"mean": mean}, "training loss", each=each),
                f"Training loss{during} in every round.{bold} {_ends(mean)}",
                f"loss{kind}",
            )


def _reasons(run: MeasuredRun, lines: Sequence[Line]) -> Iterator[Drawing]:
    """Whatever else the method logs: a small figure for each number."""
    for kind, during, some in _by_kind(lines):
        for name in dict.fromkeys(name for line in some for name in line.reasons):
            mean, title = _points(some, name), name.replace("_", " ") + during
            yield Drawing(
                figures.panel(mean, title, _each(some, name)),
                f"{parts.explained([run.method], name)} {_ends(mean)}",
                f"{name}{kind}",
            )


def _by_kind(lines: Sequence[Line]) -> Iterator[tuple[str, str, list[Line]]]:
    """The lines of every kind of exchange: an ending for names, words for captions, the lines."""
    kinds = list(dict.fromkeys(line.kind for line in lines))
    for kind in kinds:
        ending, during = (f"-{kind}", f" in the exchanges “{kind}”") if len(kinds) > 1 else ("", "")
        yield ending, during, [line for line in lines if line.kind == kind]


def _ends(points: Sequence[tuple[int, float]]) -> str:
    return f"First: {points[0][1]:.4g}, last: {points[-1][1]:.4g}."


def _plane(run: MeasuredRun) -> Iterator[Drawing]:
    """The representations in the plane: as the run left them, or by ``furlong report --tsne``."""
    kept = run.plane
    if kept is None:
        return
    try:
        figure = figures.plane(kept.points, kept.labels, kept.clients, kept.classes, _sites(run))
    except (TypeError, ValueError, IndexError):
        raise damaged(run.path / kept.file, "move it away, or make a map with --tsne") from None
    coloured = "client" if kept.labels is None else "class, marks tell the client that holds it"
    whose = " (the first client's encoder)" if run.bound == "single" else ""
    how = PLANES[kept.file]
    yield Drawing(
        figure,
        f"Representations of {len(kept.points):,} training images{whose} in the plane, {how[0]} "
        f"Colours tell the {coloured}. {how[1]}",
        Path(kept.file).stem,
    )


def _sites(run: MeasuredRun) -> list[str]:
    """The names of the clients, if they have any."""
    return (run.split.names if run.split else None) or []


def _points(lines: Sequence[Line], name: str) -> list[tuple[int, Any]]:
    """A metric over rounds, where it was measured."""
    found = [(line.round + 1, line.metrics.get(name)) for line in lines]
    return [point for point in found if point[1] is not None]


def _each(lines: Sequence[Line], name: str) -> list[list[tuple[float, float]]]:
    """The points of every client."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for client, metrics in line.clients.items():
            if name in metrics:
                found.setdefault(client, []).append((line.round + 1, metrics[name]))
    return list(found.values())


def _sum_up(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    """Running totals by round, from zero."""
    total, totals = 0.0, {0.0: 0.0}
    for line in lines:
        total += getattr(line, name)
        totals[line.round + 1] = total
    return list(totals.items())
