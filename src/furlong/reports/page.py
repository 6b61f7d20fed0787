"""A run folder becomes report.html: one page that opens anywhere, without a network.

Only the folder's files are read, so the page of a run that is still going, or was interrupted, can
be made too.
"""

from __future__ import annotations

import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.reports import figures, tables
from furlong.reports.tables import Key
from furlong.runs.folder import RunFolder, require
from furlong.words import duration, size

KINDS = ("params", "buffers", "features", "scalars")
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
LOGGED = {  # in every line of metrics.jsonl
    "round": int, "up": dict, "down": dict, "bytes_up": float, "bytes_down": float, "clients": dict,
}  # fmt: skip
SPLIT = {"partition": str, "sizes": list}
MAP = {"points": list, "clients": list, "classes": list}
FROZEN = ("knn", "linear", "linear-crops")
TUNED = ("semi", "federated", "transfer")
MOST_FAILURES = 50  # rows of the table

Line = dict[str, Any]


class Drawing(NamedTuple):
    """A figure, the sentence below it, and a name for a file."""

    figure: Figure
    caption: str
    name: str

    @property
    def svg(self) -> Markup:
        """For the page."""
        return Markup(figures.svg(self.figure))  # matplotlib has escaped its texts


def build(run: Path, drawings: Path | None = None) -> Path:
    """Write ``run``/report.html; the same files give the same bytes.

    ``drawings``: a folder for the figures as .svg and .png files.
    """
    folder = RunFolder.open(run)
    contents = _contents(folder)
    folder.write("report.html", render("report.html.jinja", contents))
    if drawings is not None:
        save([*contents["curves"], *contents["split"]], drawings)
    return run / "report.html"


def render(template: str, contents: Mapping[str, Any]) -> str:
    """A page; a path or a name that is not Unicode must not stop it."""
    page = environment().get_template(template).render(contents)
    return page.encode("utf-8", "replace").decode()


def environment() -> Environment:
    """Templates of the package; everything is escaped."""
    made = Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"size": size, "percent": percent, "duration": duration}
    made.filters |= {"column_title": tables.column_title, "words": _words}
    made.filters["word"] = tables.word
    made.globals["verdict"] = tables.verdict
    return made


def _template(name: str) -> str:
    return (
        resources.files("furlong.reports").joinpath(f"templates/{name}").read_text(encoding="utf-8")
    )


def _words(about: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in about.items())


def save(drawings: Sequence[Drawing], folder: Path) -> None:
    """Every figure as an .svg and a .png file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FurlongError(f"cannot make the folder {folder}: {error.strerror}") from None
    for drawing in drawings:
        for kind in ("svg", "png"):
            figures.save(drawing.figure, folder / f"{drawing.name}.{kind}")


def _contents(folder: RunFolder) -> dict[str, Any]:
    text, settings = _settings(folder.path / "config.toml")
    lines, summary = log(folder), folder.summary()
    split = folder.read("partition.json", SPLIT) or {}
    rows = [*(summary or {}).get("results", []), *folder.evaluations()]
    results = [
        {**row, "protocol": tables.measured_by(row, settings)}
        for row in rows
        if row.get("accuracy") is not None
    ]
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
        "results": list(_results(results)),
        "headline": _headline(results, (summary or {}).get("who")),
        "printed": _printed(folder.path) if summary else [],
        "curves": [*_curves(lines, results, bound), *_map(folder, bound)],
        "split": list(split_drawings(split)) if split else [],
        "kinds": KINDS,
        "method": about_method(settings["method"]["name"]),
        "traffic": _traffic(lines) if bound == "none" else None,
        "failures": failures(lines),
        "most_failures": MOST_FAILURES,
    }


def log(folder: RunFolder) -> list[Line]:
    """The lines of metrics.jsonl, checked."""
    lines = folder.lines()
    for number, line in enumerate(lines):
        require(line, LOGGED, f"{folder.path / 'metrics.jsonl'}, line {number + 1},")
    return lines


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


def _results(rows: list[Line]) -> Iterator[dict[str, Any]]:
    """Tables: a column per protocol, a row per encoder, clients by themselves apart.

    What the clients tuned themselves is a table of its own.
    """
    for federated in (False, True):
        some = [r for r in rows if (tables.kind_of(r["protocol"]) == "federated") == federated]
        columns, table = tables.by_encoder(some)
        one = [who for who in table if who.endswith(" alone")]
        many = [(ENCODERS.get(who, who), who, cells) for who, cells in table.items()]
        if table:
            yield {
                "federated": federated,
                "columns": columns,
                "rows": [row for row in many if row[1] not in one],
                "alone": [row for row in many if row[1] in one],
                "notes": list(_how(columns, table)),
            }


def _how(columns: Sequence[Key], people: Iterable[str]) -> Iterator[str]:
    """What was done to the encoder for the columns of a table."""
    every = [(tables.kind_of(name), tables.column_title((name, s))) for name, s in columns]
    named = {kinds: [t for kind, t in every if kind in kinds] for kinds in (FROZEN, TUNED)}
    if names := named[FROZEN]:
        yield f"{_joined(names)}: the encoder is frozen, a classifier works on what it gives."
    if names := named[TUNED]:
        yield f"{_joined(names)}: the encoder itself is trained further, with labels."
    if any(kind == "classifier" for kind, _ in every):
        yield "own classifier: of the method, which learnt from labels during the run."
    if any(", exchange " in who for who in people):
        yield "A row that names an exchange is of a checkpoint, before the run ended."


def _joined(names: Sequence[str]) -> str:
    text = "; ".join(names)
    return text if text.startswith("kNN") else text[:1].upper() + text[1:]


def _printed(path: Path) -> list[str]:
    """What the papers print for this setting, and how their runs differ from this one."""
    run = tables.read(path)
    if run is None:
        return []
    return [
        f"Printed in {beside.source}: "
        + ", ".join(
            f"{tables.column_title(key)} {percent(p.accuracy)}" for key, p in beside.cells.items()
        )
        + (f" ({beside.note})." if beside.note else ".")
        for group in tables.tables([run])
        for row in group.own
        for beside in row.printed
    ]


def _headline(rows: list[Line], who: str | None) -> list[dict[str, Any]]:
    """What the run reached, beside the random encoder, per protocol; the linear probe first."""
    columns, table = tables.by_encoder(rows)
    random, reached = table.get("random", {}), table.get(str(who), {})
    found = [column for column in columns if column in reached]
    return [
        {
            "name": tables.column_title(column),
            "value": reached[column]["accuracy"],
            "random": random[column]["accuracy"] if column in random else None,
        }
        for column in sorted(found, key=lambda column: column != ("linear", 1.0))[:2]
    ]


def _traffic(lines: list[Line]) -> list[dict[str, Any]]:
    """Up and down: bytes by kind, per round and in total."""
    rounds = len({line["round"] for line in lines})
    rows = []
    for way, label in (("up", "from the clients"), ("down", "to the clients")):
        total = {kind: sum(line[way].get(kind, 0) for line in lines) for kind in KINDS}
        mean = {kind: count / max(1, rounds) for kind, count in total.items()}
        rows.append({"way": label, "total": total, "mean": mean})
    return rows


def about_method(name: str) -> dict[str, str] | None:
    """What one of the library's methods says about itself."""
    row = METHODS.get(name)
    if row is None:
        return None
    return {"keeps": row.cls.keeps, "leaves": row.cls.leaves, "caution": row.cls.caution}


def failures(lines: list[Line]) -> dict[str, Any]:
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
            words = caption + (bold if len(each) > 1 else "") + _last(mean)
            yield Drawing(figure, words, name if len(kinds) == 1 else f"{name}-{kind}")
    if score := _points(lines, "knn"):
        random = {row["protocol"]: row["accuracy"] for row in results if row["who"] == "random"}
        level = {"random encoder": random["knn"]} if "knn" in random else {}
        figure = figures.curves({"kNN": score}, "test accuracy", levels=level, unit="%")
        dashed = " Dashed: the encoder before any training, on all images." if level else ""
        whose = ", mean of the clients' encoders" if bound == "single" else ""
        last = f" Last: {percent(score[-1][1])}."
        caption = f"kNN accuracy during training{whose}, on a sample of the images.{dashed}{last}"
        yield Drawing(figure, caption, "knn")
    if rank := _points(lines, "effective_rank"):
        yield Drawing(
            figures.curves({"rank": rank}, "effective rank"),
            "How many directions the representations use, measured without labels. Near 1 they "
            f"have collapsed: all images look the same to the encoder. Last: {rank[-1][1]:.1f}.",
            "effective_rank",
        )
    if boxes := {line["round"] + 1: line["angles"] for line in lines if line.get("angles")}:
        figure = figures.boxes(boxes, "angle in degrees")
        first, *_, last = [*boxes.values(), *boxes.values()]
        yield Drawing(
            figure,
            "The angle between two clients' features of the same image, before averaging: median, "
            "quartiles, and 5 and 95 %. 0° means that the clients' encoders agree. Median at "
            f"first {first[2]:.1f}°, at last {last[2]:.1f}°.",
            "angles",
        )
    if bound == "none" and lines:
        up, down = _sum_up(lines, "bytes_up"), _sum_up(lines, "bytes_down")
        figure = figures.curves({"up": up, "down": down}, "sent so far", unit="B")
        sums = f"{size(up[-1][1])} up, {size(down[-1][1])} down"
        words = f"Bytes sent since the start, all clients together: {sums}."
        yield Drawing(figure, words, "bytes")


def _map(folder: RunFolder, bound: str) -> Iterator[Drawing]:
    """The representations in the plane, if ``furlong report --tsne`` has made them."""
    kept = folder.read("tsne.json", MAP)
    if kept is None:
        return
    labels = kept.get("labels")
    try:
        figure = figures.plane(kept["points"], labels, kept["clients"], kept["classes"])
    except (TypeError, ValueError, IndexError):
        raise FurlongError(
            f"{folder.path / 'tsne.json'} does not hold what furlong wrote: move it away, or make "
            "it again with --tsne."
        ) from None
    coloured = "client" if labels is None else "class, marks tell the client that holds it"
    whose = " (the first client's encoder)" if bound == "single" else ""
    yield Drawing(
        figure,
        f"Representations of {len(kept['points']):,} training images{whose} in the plane, by t-SNE "
        f"(perplexity 30, from the PCA). Colours tell the {coloured}. Near points are alike to the "
        "encoder; sizes of groups and distances between them mean little.",
        "tsne",
    )


def split_drawings(split: Mapping[str, Any]) -> Iterator[Drawing]:
    """Who holds what, and how many false negatives that makes."""
    counts, sizes = split.get("class_counts"), split["sizes"]
    spread = f"{min(sizes):,}" + (f" to {max(sizes):,}" if min(sizes) < max(sizes) else "")
    held = f"Partition {split['partition']}: {len(sizes):,} clients with {spread} images each."
    if counts is None:
        names = split.get("names")
        more = "The images have no labels."
        if names:
            listed = ", ".join(f"{k}: {name}" for k, name in enumerate(names))
            more = f"The images are on the sites ({listed})."
        yield Drawing(figures.sizes(sizes), f"{held} {more}", "partition")
        return
    measured = (
        f" β-CIB {split['beta_cib']:.4f} bits; β-hetero {split['beta_hetero_m2']:.4f} bits"
        f" (divided by M²), {split['beta_hetero_mm1']:.4f} bits (by M(M−1)). 0 is an even split."
    )
    figure = figures.heat_map(counts, split["classes"], below=betas(split))
    words = f"{held} A cell is a client's number of images of a class.{measured}"
    yield Drawing(figure, words, "partition")
    if shares := split.get("false_negatives"):
        names = {"local": "its own images", "union": "all clients'", "remote": "the others'"}
        rows = [(names[key], shares[key], None) for key in names]
        yield Drawing(
            figures.bars(rows, highlight=""),
            "False negatives: of the images that a client's image is contrasted with, the share "
            "that has its class, if they are drawn from its own images, from all clients' or from "
            "the others'. Contrast pushes these apart though they belong together.",
            "false-negatives",
        )


def betas(split: Mapping[str, Any]) -> str:
    """The two measures of skew, for below a heat map."""
    return f"β-CIB {split['beta_cib']:.2f} · β-hetero {split['beta_hetero_m2']:.2f} bits (M²)"


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
