"""Figures from plain data: curves, bars, boxes, maps; drawn without pyplot's global state.

Colours are Okabe and Ito's, told apart by colour-blind readers. ``svg`` is for a page (it follows
the page's light or dark theme), ``save`` for a file (white ground). matplotlib takes long to
import, so only what draws imports it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from furlong.errors import FurlongError
from furlong.words import percent, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#808080"
SKY, AMBER = "#56b4e9", "#e69f00"
_NAMES = {BLUE: "blue", ORANGE: "orange", GREEN: "green", PURPLE: "purple", GREY: "grey"}
_NAMES |= {SKY: "sky", AMBER: "amber"}
_SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
_FORMATS: dict[str, Any] = {
    "%": lambda value, _: f"{100 * value:g} %",
    "B": lambda value, _: size(value),
    ",": lambda value, _: f"{value:,.0f}",
}
_WHOLE: dict[str, Any] = {"integer": True, "steps": [1, 2, 5, 10]}  # ticks at whole numbers
_LEVEL = (0, (5, 3))  # how a level across a figure is dashed
_MARKS = "osD^vP*Xdhp<>"
# Tol's "muted", for more classes than _SERIES has colours; lighter where it would be lost on black
_CLASSES = ("#4f46b0", "#88ccee", "#44aa99", "#2c8f4e", "#999933",
            "#ddcc77", "#cc6677", "#a8326a", "#aa4499", "#9a9a9a")  # fmt: skip
_SMALL = 3.2  # inches, of one of many
_WIDTH = 4.8  # inches: on a phone the text stays as large as the page's small print
_SHADE = (0.0, 0.443, 0.698)  # near BLUE, but no variable; text on 80 % of it is readable always
_MOST_LINES = 20  # more clients than this are shown as a band
_MOST_NUMBERS = 300  # more cells than this have no number
_MOST_NAMES = 40  # more clients or classes than this are counted, not named


class Drawing(NamedTuple):
    """A figure, the sentence below it, and a name for a file."""

    figure: Figure
    caption: str
    name: str

    @property
    def svg(self) -> Markup:
        """For a page."""
        return Markup(svg(self.figure))  # matplotlib has escaped its texts


def curves(
    means: Mapping[str, Points],
    ylabel: str,
    *,
    each: Sequence[Points] = (),
    levels: Mapping[str, float] | None = None,
    unit: str = "",
    from_zero: bool = False,
) -> Figure:
    """Bold lines over rounds; ``each`` client thin behind them; ``levels`` dashed.

    ``unit``: "" for plain numbers, "%" for fractions shown as percentages, "B" for bytes.
    """
    figure, axes = _axes(2.7, x="round", y=ylabel, grid="y", unit=unit)
    _clients(axes, each)
    for number, (name, points) in enumerate(means.items()):
        # the second may cover the first
        style: dict[str, Any] = {"linestyle": (0, (4, 2.5))} if number else _marked(points)
        axes.plot(
            *zip(*points, strict=True), color=_SERIES[number % 4], linewidth=2, label=name, **style
        )
    for name, level in (levels or {}).items():
        axes.axhline(level, color=ORANGE, linewidth=1.4, linestyle=_LEVEL, label=name)
    axes.locator_params("y", nbins=6)
    axes.locator_params("x", nbins=7, **_WHOLE)
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8.5)
    return figure


def panel(mean: Points, title: str, each: Sequence[Points] = ()) -> Figure:
    """One of many small figures: a number over rounds, bold, and ``each`` client's thin behind."""
    figure, axes = _axes(1.7, title, x="round", grid="y", width=_SMALL)
    _clients(axes, each)
    axes.plot(*zip(*mean, strict=True), color=BLUE, linewidth=2, **_marked(mean))
    axes.locator_params("y", nbins=4)
    axes.locator_params("x", nbins=5, **_WHOLE)
    return figure


def _marked(points: Points) -> dict[str, Any]:
    """The style of a line whose points can be told apart, if there are few."""
    return {"marker": "o", "markersize": 3.5} if len(points) <= 30 else {}


def _clients(axes: Any, each: Sequence[Points]) -> None:
    """A thin line per client, or a band if they are many."""
    if len(each) > _MOST_LINES:
        found = _gathered(each)
        low, high = ([np.quantile(ys, q) for ys in found.values()] for q in (0.1, 0.9))
        axes.fill_between(list(found), low, high, color=GREY, alpha=0.3, linewidth=0,
                          label="middle 80 % of the clients")  # fmt: skip
    else:
        for number, points in enumerate(each):
            label = None if number else "one client"
            mark = "." if len(points) == 1 else ""
            axes.plot(
                *zip(*points, strict=True),
                color=GREY,
                alpha=0.6,
                linewidth=0.8,
                marker=mark,
                label=label,
            )


def compared(
    series: Mapping[str, Sequence[Points]],
    ylabel: str,
    *,
    levels: Mapping[str, float] | None = None,
    slots: Mapping[str, int] | None = None,
    unit: str = "",
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A line per name over rounds, the mean of its runs, with a band of one standard deviation.

    Names stand at the lines' ends. ``levels``: dashed lines across. ``slots``: which colour a name
    has, to be the same in several figures. ``unit``: as for ``curves``. ``limits``: what values can
    be; a band ends there.
    """
    figure, axes = _axes(3.1, x="round", y=ylabel, grid="y", unit=unit)
    ends: list[tuple[float, str, str, Any]] = []
    for number, (name, runs) in enumerate(series.items()):
        found = _gathered(runs)
        x = list(found)
        mean = np.array([np.mean(ys) for ys in found.values()])
        std = np.array([np.std(ys, ddof=1) if len(ys) > 1 else 0.0 for ys in found.values()])
        slot = (slots or {}).get(name, number)
        color, dash = _SERIES[slot % 6], _DASHES[slot // 6 % 4]
        mark = {"marker": "o", "markersize": 3} if len(x) <= 12 else {}
        axes.plot(x, mean, color=color, linestyle=dash, linewidth=1.8, **mark)
        if len(runs) > 1:
            low, high = (np.clip(mean + d, *(limits or (None, None))) for d in (-std, std))
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
        ends.append((float(mean[-1]), name, color, dash))
    axes.locator_params("x", nbins=6, **_WHOLE)
    _name_ends(axes, [*ends, *_levels(axes, levels)])
    return figure


def shares(
    series: Mapping[str, Sequence[Points]],
    slots: Mapping[str, int] | None = None,
    ylabel: str = "test accuracy",
    unit: str = "%",
) -> Figure:
    """A measure over the share of the labels on a log scale: as :func:`compared`, not by round."""
    figure = compared(series, ylabel, slots=slots, unit=unit)
    axes = figure.axes[0]
    axes.set_xlabel("labels used")
    axes.set_xscale("log")
    ticks = sorted({x for runs in series.values() for points in runs for x, _ in points})
    axes.set_xticks(ticks)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(_FORMATS["%"])
    return figure


def versus(
    points: Sequence[tuple[str, float, float, float | None]],
    xlabel: str,
    ylabel: str,
    *,
    levels: Mapping[str, float] | None = None,
    slots: Mapping[str, int] | None = None,
) -> Figure:
    """Accuracy (a fraction, with its deviation) against bytes on a log scale; named points.

    ``levels``, ``slots``: as for ``compared``.
    """
    from matplotlib.ticker import FixedLocator

    figure, axes = _axes(3.1, x=xlabel, y=ylabel, grid="both", unit="%")
    places = [(slots or {}).get(name, number) for number, (name, *_) in enumerate(points)]
    for place, (_, x, y, std) in zip(places, points, strict=True):
        color, mark = _SERIES[place % 6], _MARKS[place % len(_MARKS)]
        axes.errorbar(x, y, yerr=std, color=color, marker=mark, markersize=6.5, capsize=2.5,
                      linewidth=1, linestyle="none")  # fmt: skip
    named = _levels(axes, levels)
    axes.set_xscale("log")
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    axes.set_xlim(low / 1.3, high * 1.6 * (high / low) ** 0.35)
    axes.xaxis.set_major_locator(FixedLocator(_round_numbers(low / 1.5, high * 2)))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(_FORMATS["B"])
    bottom, top = axes.get_ylim()
    for group in _near([point[1] for point in points], 0.12 * (np.log10(high / low) + 0.5)):
        heights = _apart([points[i][2] for i in group], 0.06 * (top - bottom), bottom, top)
        column = max(points[i][1] for i in group) * (high / low * 3) ** 0.06
        for i, height in zip(group, heights, strict=True):
            name, x, y, _ = points[i]
            _tied(axes, name, (x, y), (column, height), _SERIES[places[i] % 6], "solid")
    axes.set_ylim(bottom, top)
    _name_ends(axes, named)
    return figure


def _near(values: Sequence[float], reach: float) -> list[list[int]]:
    """Numbers of values that lie within ``reach`` (of their decimal logarithms) of the next one."""
    groups: list[list[int]] = []
    for i in sorted(range(len(values)), key=values.__getitem__):
        if groups and np.log10(values[i] / values[groups[-1][-1]]) < reach:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def sweep(rows: Sequence[tuple[float, float, float | None]], xlabel: str, ylabel: str) -> Figure:
    """Accuracy (a fraction, with its deviation) over the values of one setting."""
    figure, axes = _axes(2.7, y=ylabel, grid="y", unit="%")
    x, y, std = zip(*sorted(rows), strict=True)
    error = [value or 0.0 for value in std]
    axes.errorbar(x, y, yerr=error if any(error) else None, color=BLUE, marker="o", markersize=5,
                  capsize=3, linewidth=1.8)  # fmt: skip
    axes.set_xlabel(_short(xlabel, 40), parse_math=False)
    axes.locator_params("x", nbins=7, steps=None)
    if len(x) <= 8:
        axes.set_xticks(x)
    return figure


def plane(
    points: Sequence[Sequence[float]],
    labels: Sequence[int] | None,
    clients: Sequence[int],
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Figure:
    """Points N×2 in the unit square, coloured by class and marked by client.

    Without labels clients give the colours. Colours and marks repeat beyond ten classes and
    thirteen clients, and then have no legend.
    """
    figure, axes = _axes(4.6)
    where = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    client = np.asarray(clients, dtype=np.int64)
    group = client if labels is None else np.asarray(labels, dtype=np.int64)
    marks = {k: _MARKS[i % len(_MARKS)] for i, k in enumerate(np.unique(client).tolist())}
    for label in np.unique(group).tolist():
        for k, mark in marks.items():
            chosen = where[(group == label) & (client == k)]
            color = _CLASSES[label % len(_CLASSES)]
            if len(chosen):
                axes.scatter(*chosen.T, s=14, marker=mark, color=color, alpha=0.8, linewidths=0)
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    if 1 < len(marks) <= len(_MARKS):
        coloured = labels is None
        owners = {
            _short(names[k]) if k < len(names) else f"client {k}": (
                mark,
                _CLASSES[k % len(_CLASSES)] if coloured else GREY,
            )
            for k, mark in marks.items()
        }
        _key(figure, owners, "outside upper left")
    if labels is not None and len(classes) <= len(_CLASSES):
        kinds = {_short(name): ("o", _CLASSES[k]) for k, name in enumerate(classes)}
        _key(figure, kinds, "outside lower left")
    return figure


def _key(figure: Figure, names: Mapping[str, tuple[str, str]], place: str) -> None:
    """What marks and colours stand for."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, marker=mark, linestyle="none", markersize=5, label=name)
        for name, (mark, color) in names.items()
    ]
    legend: Any = figure.legend(handles=handles, loc=place, ncols=5, frameon=False, fontsize=8.5,
                                handletextpad=0.1, columnspacing=1.2)  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def heat_map(
    class_counts: Sequence[Sequence[int]],
    classes: Sequence[str],
    title: str = "",
    below: str = "",
    owners: Sequence[str] | None = None,
) -> Figure:
    """Who holds how many images of which class: clients × classes; ``below`` is a line of text.

    ``owners``: the clients' names; else they are numbered.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    counts = np.asarray(class_counts, dtype=np.int64).reshape(len(class_counts), -1)
    clients, n = counts.shape
    peak = max(1, int(counts.max(initial=0)))
    names = [_short(name) for name in classes]
    tilted = n <= _MOST_NAMES and sum(len(name) + 2 for name in names) > 50
    height = min(5.0, max(1.2, 0.21 * clients + 0.5)) + (0.5 if tilted else 0.1)
    figure, axes = _axes(height + (0.2 if below else 0.0), title, y="" if owners else "client")
    shades = LinearSegmentedColormap.from_list("shades", [(*_SHADE, 0.0), (*_SHADE, 0.8)])
    axes.imshow(counts, cmap=shades, norm=Normalize(0, peak), aspect="auto", interpolation="none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if n <= _MOST_NAMES:
        style: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(n), names, parse_math=False, **(style if tilted else {}))
    else:
        axes.locator_params("x", nbins=8, **_WHOLE)
        below = f"class (number)\n{below}" if below else "class (number)"
    if clients <= _MOST_NAMES:
        shown = [_short(owners[k]) if owners else str(k) for k in range(clients)]
        axes.set_yticks(range(clients), shown, parse_math=False)
    else:
        axes.locator_params("y", nbins=8, **_WHOLE)
    axes.set_xlabel(below, parse_math=False)
    if counts.size <= 4 * _MOST_NUMBERS:  # hairlines, or a sea of them
        axes.set_xticks(np.arange(n + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(clients + 1) - 0.5, minor=True)
        axes.tick_params(which="minor", length=0)
        axes.grid(which="minor", color=GREY, alpha=0.3, linewidth=0.5)
    if counts.size <= _MOST_NUMBERS and n * len(f"{peak:,}") <= 64:
        for (client, label), count in np.ndenumerate(counts):
            text, alpha = (f"{count:,}", 1.0) if count else ("·", 0.5)
            axes.text(label, client, text, ha="center", va="center", fontsize=8, alpha=alpha)
    else:
        _scale(figure, axes, Normalize(0, peak), shades.resampled(9))
    return figure


def _scale(figure: Figure, axes: Any, norm: Any, shades: Any) -> None:
    """What the shades of a heat map without numbers stand for."""
    from matplotlib.cm import ScalarMappable

    bar: Any = figure.colorbar(
        ScalarMappable(norm, shades), ax=axes, label="images", aspect=30, pad=0.02, drawedges=False
    )
    bar.solids.set_antialiased(False)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8.5, length=0)
    bar.ax.yaxis.label.set_fontsize(9)


def sizes(counts: Sequence[int], title: str = "") -> Figure:
    """How many images every client holds."""
    figure, axes = _axes(2.4, title, x="client", y="images", grid="y", unit=",")
    if len(counts) <= 100:
        axes.bar(range(len(counts)), counts, width=0.8, color=BLUE)
    else:  # one shape instead of a thousand
        axes.stairs(counts, np.arange(len(counts) + 1) - 0.5, fill=True, color=BLUE)
    axes.locator_params("x", nbins=10, **_WHOLE)
    axes.locator_params("y", nbins=5, integer=True, steps=None)
    axes.set_axisbelow(True)
    return figure


def bars(
    rows: Sequence[tuple[str, float, float | None]], title: str = "", highlight: str = "federated"
) -> Figure:
    """Accuracies (fractions) with their standard deviations, one named bar each, as percentages."""
    figure, axes = _axes(0.36 * len(rows) + 0.35, title)
    names = [_short(row[0], 40) for row in rows]
    ends = [value + (std or 0.0) for _, value, std in rows]
    for place, (label, value, std) in enumerate(rows):
        chosen = label == highlight
        color, weight = (BLUE, "bold") if chosen else (GREY, "normal")
        axes.barh(place, value, height=0.66, color=color, alpha=1 if chosen else 0.7)
        if std:
            axes.errorbar(value, place, xerr=std, color="black", capsize=3, linewidth=1)
        axes.annotate(percent(value, std or None), (ends[place], place), (5, 0), va="center",
                      textcoords="offset points", fontweight=weight)  # fmt: skip
    axes.set_yticks(range(len(rows)), names, parse_math=False)
    axes.invert_yaxis()
    room = 1.25 + 0.012 * max(map(len, names), default=0)
    room += 0.08 if any(std for *_, std in rows) else 0
    axes.set_xlim(0, room * max(ends, default=1.0) or 1.0)
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[["bottom"]].set_visible(False)
    return figure


def boxes(rows: Mapping[int, Sequence[float]], ylabel: str) -> Figure:
    """A box per round from its percentiles 5, 25, 50, 75 and 95."""
    figure, axes = _axes(2.7, x="round", y=ylabel, grid="y")
    keys = ("whislo", "q1", "med", "q3", "whishi")
    drawn = [dict(zip(keys, row, strict=True)) for row in rows.values()]
    line = {"color": BLUE, "linewidth": 1.2}
    axes.bxp(
        drawn, positions=list(rows), widths=0.6, showfliers=False, manage_ticks=False,
        boxprops=line, whiskerprops=line, capprops=line,
        medianprops={"color": ORANGE, "linewidth": 2},
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.locator_params("x", nbins=7, **_WHOLE)
    return figure


def svg(figure: Figure) -> str:
    """An <svg> for a page: transparent, text and axes in the page's colour, no outside reference.

    Colours are CSS variables (``--blue``, …) with the figure's own as fallback.
    """
    with _style({"svg.fonttype": "none"}):
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", drawn, flags=re.S)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # repeated from figure to figure
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    drawn = drawn.replace("#000000", "currentColor")
    for color, name in _NAMES.items():
        drawn = drawn.replace(f": {color}", f": var(--{name}, {color})")
    drawn = re.sub(r"\n\s*", "\n", drawn)
    return drawn.replace("<svg ", '<svg fill="currentColor" ', 1).strip()


def save(figure: Figure, path: Path) -> None:
    """Write a .svg or .png file; the same figure gives the same bytes."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise FurlongError(f"cannot draw to {path}: the name must end in .svg or .png.")
    metadata = {"Date": None} if kind == ".svg" else {"Software": None}
    try:
        with _style({"svg.fonttype": "path"}):
            figure.savefig(path, format=kind[1:], dpi=200, facecolor="white", metadata=metadata)
    except OSError as error:
        raise FurlongError(f"cannot write {path}: {error.strerror}") from None


def save_all(drawings: Iterable[Drawing], folder: Path) -> None:
    """Every figure as an .svg and a .png file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FurlongError(f"cannot make the folder {folder}: {error.strerror}") from None
    for drawing in drawings:
        for kind in ("svg", "png"):
            name = re.sub(r"[^\w.+-]+", "-", drawing.name)  # of metrics in anybody's folder
            save(drawing.figure, folder / f"{name}.{kind}")


# ---------------------------------------------------------------- parts


def _axes(
    height: float, title: str = "", *, x: str = "", y: str = "", grid: str = "", unit: str = "",
    width: float = _WIDTH,
) -> tuple[Figure, Any]:  # fmt: skip
    """A figure with axes named ``x`` and ``y``; ``grid``: y or both; ``unit``: of the y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height + (0.25 if title else 0)), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines[:].set_linewidth(0.8)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8.5, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    if grid:
        axes.grid(axis=grid, color=GREY, alpha=0.25, linewidth=0.6)
    if unit:
        axes.yaxis.set_major_formatter(_FORMATS[unit])
    if title:
        axes.set_title(_short(title, 70), loc="left", fontsize=10, parse_math=False)
    return figure, axes


def _levels(axes: Any, levels: Mapping[str, float] | None) -> list[tuple[float, str, str, Any]]:
    """Dashed lines across, as ends that are still to be named."""
    for level in (levels or {}).values():
        axes.axhline(level, color=GREY, linewidth=1.2, linestyle=_LEVEL)
    return [(level, name, GREY, _LEVEL) for name, level in (levels or {}).items()]


def _gathered(series: Iterable[Points]) -> dict[float, list[float]]:
    """The values of several lines by their place."""
    found: dict[float, list[float]] = {}
    for x, y in sorted((p for points in series for p in points), key=itemgetter(0)):
        found.setdefault(x, []).append(y)
    return found


def _name_ends(axes: Any, ends: Sequence[tuple[float, str, str, Any]]) -> None:
    """Names at the right border, tied to the ends of their lines, moved apart where they touch."""
    if not ends:
        return
    bottom, top = axes.get_ylim()
    places = _apart([end[0] for end in ends], 0.064 * (top - bottom), bottom, top)
    for place, (y, name, color, dash) in zip(places, ends, strict=True):
        _tied(axes, name, (1, y), (1.08, place), color, dash, ("axes fraction", "data"))
    axes.set_ylim(bottom, top)


def _apart(values: Sequence[float], gap: float, bottom: float, top: float) -> list[float]:
    """``values`` moved as little as needed to have ``gap`` between any two, inside the borders."""
    given, steps = np.asarray(values), gap * np.arange(len(values))
    order = given.argsort(kind="stable")
    free = np.maximum.accumulate(given[order] - steps)  # places without the gaps below them
    free += given.mean() - (free + steps).mean()
    places = np.empty(len(values))
    places[order] = np.maximum(np.minimum(free, top - steps[-1]), bottom) + steps
    return [float(place) for place in places]


def _tied(
    axes: Any, name: str, point: tuple[float, float], place: tuple[float, float], color: str,
    dash: Any, coords: Any = "data",
) -> None:  # fmt: skip
    """A name to the right of ``place``, with a line from ``point``."""
    axes.annotate(
        _short(name, 34), point, place, xycoords=coords, textcoords=coords, va="center",
        fontsize=8.5, color=color, parse_math=False, annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 1, "linestyle": dash,
                    "shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)},
    )  # fmt: skip


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, at most seven of them."""
    tens = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**t for t in tens for s in steps if low <= s * 10.0**t <= high]
        if len(found) <= 6:
            break
    return found


def _short(name: object, most: int = 16) -> str:
    """A name that can be drawn: one printable line of at most ``most`` characters."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    return text if len(text) <= most else text[: most - 1] + "…"


@contextmanager
def _style(settings: Mapping[str, Any]) -> Iterator[None]:
    """Reproducible output; a name in a script that the font lacks is not worth a warning."""
    import matplotlib

    fixed = {"svg.hashsalt": "furlong", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context({**fixed, **settings}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
