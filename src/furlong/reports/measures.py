"""What stands beside accuracy: balanced accuracy, AUROC, average precision, and every site's own.

One run has intervals of its numbers; several runs have means and deviations over their seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from furlong.evaluation.metrics import MEASURES
from furlong.reports.columns import Key, column_title
from furlong.reports.tables import Group, TableRow
from furlong.runs.record import Result
from furlong.words import plural, points

TITLES = {
    "accuracy": "accuracy %",
    "balanced_accuracy": "balanced accuracy %",
    "auroc": "AUROC",
    "average_precision": "average precision",
}
SHARES = ("accuracy", "balanced_accuracy")
MEANING = (
    "Balanced accuracy: the share of a class's images that are found, mean over the classes; "
    "always naming the largest class gives 1 / classes. AUROC and average precision: how well a "
    "class's images are ranked before the others, mean over the classes, from 0.5 (AUROC) or the "
    "class's share (average precision), by chance, to 1."
)
MOST_SITES = 12  # columns of a table


@dataclass(frozen=True)
class Sheet:
    """A small table of words, below another one."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    notes: list[str]


def of_run(results: Sequence[Result], sites: Iterable[str] = ()) -> list[Sheet]:
    """Of one run's results: every protocol's measures with intervals, then every site's.

    ``sites``: the names of all, of which some may have no test images.
    Of what was measured twice the last counts. Clients that each trained alone, who may be many,
    are left out.
    """
    last = {(row.who, row.protocol, row.labels): row for row in results}.values()
    rows = [row for row in last if not row.who.endswith(" alone")]
    shown = [row for row in rows if row.balanced_accuracy is not None]
    if not shown:
        return []
    cells = [
        [row.who, column_title((row.protocol, row.labels)), *(cell(row, m) for m in MEASURES)]
        for row in shown
    ]
    sheet = Sheet(
        "Beside accuracy",
        ["encoder", "measured by", *TITLES.values()],
        cells,
        [MEANING, *_intervals(shown)],
    )
    return [sheet, *_sites_of_run(shown, sites)]


def cell(row: Result, name: str) -> str:
    """A measure with its interval."""
    value: float | None = getattr(row, name)
    if value is None:
        return "–"
    ends = row.intervals.get(name)
    if not ends:
        return number(name, value, row.std if name == "accuracy" else None)
    low, high = (points(x) if name in SHARES else f"{x:.2f}" for x in ends)
    return f"{number(name, value)} [{low}–{high}]"


def number(name: str, value: float, std: float | None = None) -> str:
    """A measure as tables show it: percentage points for shares of images, else three digits."""
    if name in SHARES:
        return points(value, std)
    return f"{value:.3f}" + ("" if std is None else f" ± {std:.3f}")


def _intervals(rows: Sequence[Result]) -> Iterator[str]:
    """What the brackets mean."""
    drawn: dict[str, set[tuple[int, int]]] = {}
    for about in (row.resampled for row in rows if row.intervals):
        pair = int(about.get("units", 0)), int(about.get("resamples", 0))
        drawn.setdefault(str(about.get("what")), set()).add(pair)
    lone = [row.resampled for row in rows if row.resampled.get("units") == 1]
    if any(about.get("what") == "patients" for about in lone):
        yield (
            "All test images are of one patient (or group): there is no interval, and others may "
            "give quite other numbers."
        )
    for what, counts in drawn.items():
        units = " or ".join(f"{n:,}" for n in sorted({n for n, _ in counts}, reverse=True))
        yield (
            f"[–]: 95 % interval of a number, by bootstrap over the test set's {units} {what} "
            f"({max(n for _, n in counts):,} resamples)."
        )
        if what != "patients":
            some = "which images" if what == "images" else "which of the single images"
            yield (
                f"Nothing tells {some} are of one patient. If some are, the intervals are too "
                "narrow."
            )


def _sites_of_run(rows: Sequence[Result], sites: Iterable[str]) -> Iterator[Sheet]:
    main = _main([(row.protocol, row.labels) for row in rows if row.sites])
    own = [row for row in rows if (row.protocol, row.labels) == main and row.sites]
    if main is None or not own:
        return
    counts = {name: int(one["images"]) for name, one in own[0].sites.items()}
    cells = {row.who: {n: _both(one, {}) for n, one in row.sites.items()} for row in own}
    sheet = _site_sheet(main, counts, cells, "encoder")
    if absent := [name for name in sites if name not in counts]:
        sheet.notes.append(f"Without test images: {', '.join(absent)}.")
    yield sheet


def _main(columns: Iterable[Key]) -> Key | None:
    """The linear probe with all labels, else what comes first."""
    found = list(columns)
    return next((c for c in found if c == ("linear", 1.0)), next(iter(found), None))


def _both(one: Mapping[str, float], std: Mapping[str, float]) -> str:
    """Accuracy and, where the site has more than one class, AUROC."""
    auroc = f" ({number('auroc', one['auroc'])})" if "auroc" in one else ""
    return number("accuracy", one["accuracy"], std.get("accuracy")) + auroc


def _site_sheet(
    main: Key, counts: Mapping[str, int], cells: Mapping[str, Mapping[str, str]], first: str
) -> Sheet:
    names = list(counts)[:MOST_SITES]
    more = f" The first {MOST_SITES} of {len(counts)} sites." if len(counts) > MOST_SITES else ""
    return Sheet(
        f"By site: {column_title(main)}",
        [first, *(f"{name}, {plural(counts[name], 'image')}" for name in names)],
        [[label, *(own.get(name, "–") for name in names)] for label, own in cells.items()],
        [f"Accuracy in percent (AUROC) on the test images of each site.{more}"],
    )


# ---------------------------------------------------------------- several runs


def of_group(group: Group) -> list[Sheet]:
    """Of a table of runs: the main protocol's measures, then every site's, mean over the seeds."""
    main = _main(group.columns)
    if main is None:
        return []
    found = {row.label: _rows(row, main) for row in group.rows}
    measured = {k: rows for k, rows in found.items() if any(r.balanced_accuracy for r in rows)}
    if not measured:
        return []
    cells = [[label, *(_over(rows, name) for name in MEASURES)] for label, rows in measured.items()]
    titles = ["method", *TITLES.values()]
    sheets = [Sheet(f"Beside accuracy: {column_title(main)}", titles, cells, [MEANING])]
    counts: dict[str, int] = {}
    for row in (row for rows in measured.values() for row in rows):
        counts |= {name: int(one["images"]) for name, one in row.sites.items()}
    if counts:
        sites = {label: _by_site(rows, counts) for label, rows in measured.items()}
        sheets.append(_site_sheet(main, counts, sites, "method"))
    return sheets


def _rows(row: TableRow, column: Key) -> list[Result]:
    """The results of a row's runs in one column: of what they trained, or of the random encoder."""
    found = []
    for run in row.runs:
        who = "random" if row.reference else run.finished.who
        same = [r for r in run.measured if (r.who, (r.protocol, r.labels)) == (who, column)]
        found += same[-1:]
    return found


def mean_of(row: TableRow, column: Key, name: str) -> float | None:
    """A measure in one cell of a table, mean over the seeds."""
    values = _values(_rows(row, column), name)
    return statistics.fmean(values) if values else None


def _values(rows: Iterable[Result], name: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, name)) is not None]


def _over(rows: Sequence[Result], name: str) -> str:
    values = _values(rows, name)
    return number(name, *_mean(values)) if values else "–"


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _by_site(rows: Sequence[Result], names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        own = [row.sites[name] for row in rows if name in row.sites]
        spread = {
            key: _mean([one[key] for one in own if key in one])
            for key in ("accuracy", "auroc")
            if any(key in one for one in own)
        }
        if spread:
            stds = {key: std for key, (_, std) in spread.items() if std is not None}
            found[name] = _both({key: mean for key, (mean, _) in spread.items()}, stds)
    return found
