"""A run folder becomes report.html: one page that opens anywhere, without a network.

Only the folder's files are read, so the page of a run that is still going, or was interrupted, can
be made too.
"""

from __future__ import annotations

import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from furlong import figures
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.runfolder import RunFolder
from furlong.words import duration, size

KINDS = ("params", "buffers", "features", "scalars")
PROTOCOLS = {"knn": "kNN", "linear": "linear probe"}
ENCODERS = {
    "random": "random encoder (reference)",
    "federated": "federated",
    "pooled": "pooled: all images in one place",
    "alone": "alone: every client by itself, mean ± std",
}
BOUNDS = {
    "single": "every client trained alone",
    "pooled": "all images were put in one place",
}
NEEDED = (
    ("method", "name"),
    ("data", "name"),
    ("data", "partition"),
    ("model", "encoder"),
    ("train", "rounds"),
    ("run", "seed"),
)
MOST_FAILURES = 50  # rows of the table

Line = dict[str, Any]


class Drawing(NamedTuple):
    """A figure and the sentence below it."""

    svg: Markup
    caption: str


def build(run: Path) -> Path:
    """Write ``run``/report.html; the same files give the same bytes."""
    folder = RunFolder.open(run)
    page = _environment().from_string(_template()).render(_contents(folder))
    # a path or a name that is not Unicode must not stop the page
    folder.write("report.html", page.encode("utf-8", "replace").decode())
    return run / "report.html"


def _template() -> str:
    return resources.files("furlong").joinpath("report.html.jinja").read_text(encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"size": size, "percent": percent, "duration": duration}
    return environment


def _contents(folder: RunFolder) -> dict[str, Any]:
    text, settings = _settings(folder.path / "config.toml")
    lines, summary = folder.lines(), folder.read("summary.json")
    split = folder.read("partition.json") or {}
    results = (summary or {}).get("results", [])
    bound = settings["run"].get("bound", "none")
    return {
        "run": str(folder.path),
        "quoted": shlex.quote(str(folder.path)),
        "quoted_config": shlex.quote(str(folder.path / "config.toml")),
        "config": settings,
        "toml": text,
        "summary": summary,
        "rounds": settings["train"]["rounds"],
        "done": lines[-1]["round"] + 1 if lines else 0,
        "clients": split.get("clients", settings["data"].get("clients")),
        "images": sum(split.get("sizes", [])),
        "labelled": "class_counts" in split,
        "bound": BOUNDS.get(bound),
        "results": _results(results),
        "headline": _headline(results, (summary or {}).get("who")),
        "curves": list(_curves(lines, results, bound)),
        "split": _split(split) if split else None,
        "kinds": KINDS,
        "method": _method(settings["method"]["name"]),
        "traffic": _traffic(lines) if bound == "none" else None,
        "failures": _failures(lines),
        "most_failures": MOST_FAILURES,
    }


def _settings(path: Path) -> tuple[str, dict[str, Any]]:
    """The TOML, plainly: the page of a run with an own method must not need its code."""
    try:
        text = path.read_text(encoding="utf-8")
        settings = tomllib.loads(text)
        for section, key in NEEDED:
            settings[section][key]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FurlongError(f"cannot read {path}: {error}") from None
    except (KeyError, TypeError) as error:
        raise FurlongError(f"{path} is not the configuration of a run: no {error}.") from None
    return text, settings


# ---------------------------------------------------------------- numbers


def _results(rows: list[Line]) -> dict[str, Any]:
    """The table: a column per protocol, a row per encoder, clients by themselves apart."""
    columns = list(dict.fromkeys(_column(row) for row in rows))
    table: dict[str, dict[str, Line]] = {}
    for row in rows:
        table.setdefault(row["who"], {})[_column(row)] = row
    one = [who for who in table if who.endswith(" alone")]
    many = [(ENCODERS.get(who, who), who, cells) for who, cells in table.items() if who not in one]
    return {"columns": columns, "rows": many, "alone": [(who, table[who]) for who in one]}


def _column(row: Line) -> str:
    name = PROTOCOLS.get(row["protocol"], str(row["protocol"]))
    share = row.get("labels", 1.0)
    return name if share == 1 else f"{name}, {100 * share:g} % of the labels"


def _headline(rows: list[Line], who: str | None) -> list[dict[str, Any]]:
    """What the run reached, beside the random encoder, per protocol; the linear probe first."""
    random = {_column(row): row["accuracy"] for row in rows if row["who"] == "random"}
    reached = [
        {"name": _column(row), "value": row["accuracy"], "random": random.get(_column(row))}
        for row in rows
        if row["who"] == who
    ]
    return sorted(reached, key=lambda tile: tile["name"] != PROTOCOLS["linear"])[:2]


def _traffic(lines: list[Line]) -> list[dict[str, Any]]:
    """Up and down: bytes by kind, per round and in total."""
    rounds = len({line["round"] for line in lines})
    rows = []
    for way, label in (("up", "from the clients"), ("down", "to the clients")):
        total = {kind: sum(line[way].get(kind, 0) for line in lines) for kind in KINDS}
        mean = {kind: count / max(1, rounds) for kind, count in total.items()}
        rows.append({"way": label, "total": total, "mean": mean})
    return rows


def _method(name: str) -> dict[str, str] | None:
    """What one of the library's methods says about itself."""
    row = METHODS.get(name)
    if row is None:
        return None
    return {"keeps": row.cls.keeps, "leaves": row.cls.leaves, "caution": row.cls.caution}


def _failures(lines: list[Line]) -> dict[str, Any]:
    """Which clients gave no valid answer, how often and why; the most frequent first."""
    times: Counter[tuple[Any, ...]] = Counter()
    first: dict[tuple[Any, ...], int] = {}
    for line in lines:
        for failure in line.get("failures", []):
            key = (failure["client"], failure["kind"], failure["reason"])
            times[key] += 1
            first.setdefault(key, line["round"] + 1)
    rows = [(*key, count, first[key]) for key, count in times.most_common()]
    return {
        "rows": rows[:MOST_FAILURES],
        "kinds": len(rows),
        "total": times.total(),
        "refused": sum(count for key, count in times.items() if key[1] == "refused"),
        "clients": len({key[0] for key in times}),
    }


# ---------------------------------------------------------------- figures


def _curves(lines: list[Line], results: list[Line], bound: str) -> Iterator[Drawing]:
    moved = "How far local training moved a client's encoder away from the federation's."
    kinds = list(dict.fromkeys(line.get("kind", "train") for line in lines))
    for kind, name in [(k, n) for k in kinds for n in ("loss", "divergence")]:
        some = [line for line in lines if line.get("kind", "train") == kind]
        during = f" in the exchanges “{kind}”" if len(kinds) > 1 else ""
        ylabel = "training loss" if name == "loss" else name
        caption = f"Training loss{during} in every round." if name == "loss" else moved
        if mean := _points(some, name):
            each = _each(some, name)
            bold = " The bold line is the clients' mean, weighted by their numbers of images."
            figure = figures.curves({"mean": mean}, ylabel, each=each)
            yield _drawn(figure, caption + (bold if len(each) > 1 else "") + _last(mean))
    if score := _points(lines, "knn"):
        random = {row["protocol"]: row["accuracy"] for row in results if row["who"] == "random"}
        level = {"random encoder": random["knn"]} if "knn" in random else {}
        figure = figures.curves({"kNN": score}, "test accuracy", levels=level, unit="%")
        dashed = " Dashed: the encoder before any training, on all images." if level else ""
        whose = ", mean of the clients' encoders" if bound == "single" else ""
        last = f" Last: {percent(score[-1][1])}."
        caption = f"kNN accuracy during training{whose}, on a sample of the images.{dashed}{last}"
        yield _drawn(figure, caption)
    if boxes := {line["round"] + 1: line["angles"] for line in lines if line.get("angles")}:
        figure = figures.boxes(boxes, "angle in degrees")
        first, *_, last = [*boxes.values(), *boxes.values()]
        yield _drawn(
            figure,
            "The angle between two clients' features of the same image, before averaging: median, "
            "quartiles, and 5 and 95 %. 0° means that the clients' encoders agree. Median at "
            f"first {first[2]:.1f}°, at last {last[2]:.1f}°.",
        )
    if bound == "none" and lines:
        up, down = _sum_up(lines, "bytes_up"), _sum_up(lines, "bytes_down")
        figure = figures.curves({"up": up, "down": down}, "sent so far", unit="B")
        sums = f"{size(up[-1][1])} up, {size(down[-1][1])} down"
        yield _drawn(figure, f"Bytes sent since the start, all clients together: {sums}.")


def _split(split: Mapping[str, Any]) -> Drawing:
    """Who holds what."""
    counts, sizes = split.get("class_counts"), split["sizes"]
    spread = f"{min(sizes):,}" + (f" to {max(sizes):,}" if min(sizes) < max(sizes) else "")
    held = f"Partition {split['partition']}: {len(sizes):,} clients with {spread} images each."
    if counts is None:
        return _drawn(figures.sizes(sizes), f"{held} The images have no labels.")
    measured = (
        f" β-CIB {split['beta_cib']:.4f} bits; β-hetero {split['beta_hetero_m2']:.4f} bits"
        f" (divided by M²), {split['beta_hetero_mm1']:.4f} bits (by M(M−1))."
    )
    if shares := split.get("false_negatives"):
        measured += (
            f" Of the images that a client's image is contrasted with, {percent(shares['local'])}"
            f" of its own, {percent(shares['union'])} of all and {percent(shares['remote'])} of the"
            " others' have its class (false negatives)."
        )
    figure = figures.heat_map(counts, split["classes"])
    return _drawn(figure, f"{held} A cell is a client's number of images of a class.{measured}")


def _drawn(figure: Any, caption: str) -> Drawing:
    return Drawing(Markup(figures.svg(figure)), caption)  # matplotlib has escaped its texts


def _points(lines: list[Line], name: str) -> list[tuple[float, float]]:
    return [(line["round"] + 1, line[name]) for line in lines if line.get(name) is not None]


def _each(lines: list[Line], name: str) -> list[list[tuple[float, float]]]:
    """The points of every client."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for client, metrics in line["clients"].items():
            if name in metrics:
                found.setdefault(client, []).append((line["round"] + 1, metrics[name]))
    return list(found.values())


def _sum_up(lines: list[Line], name: str) -> list[tuple[float, float]]:
    """Running totals by round, from zero."""
    totals = {0: 0}
    for line in lines:
        totals[line["round"] + 1] = totals[max(totals)] + line[name]
    return list(totals.items())


def _last(points: list[tuple[float, float]]) -> str:
    return f" First: {points[0][1]:.4g}, last: {points[-1][1]:.4g}."


# ---------------------------------------------------------------- words for numbers


def percent(fraction: float | None) -> str:
    """A share as a percentage."""
    return (
        "–"
        if fraction is None or math.isnan(fraction)
        else f"{100 * fraction:.1f}\N{NO-BREAK SPACE}%"
    )
