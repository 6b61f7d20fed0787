"""Finished runs become tables: mean ± standard deviation over seeds, one table per setting.

Runs share a table if data, partition, clients, encoder, rounds, epochs and the way of measuring are
the same. A row is a method with its bound (``fedu@single``) and, where runs of one method differ in
any other setting, those settings. The papers' numbers stand below the row that they correspond to.
Fine-tuning by the clients has a table of its own: it does not compare with tuning in one place.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError, nearest
from furlong.reports import printed
from furlong.reports.columns import PROTOCOLS, Key, kind_of, measured_by, word
from furlong.reports.significance import FEWEST, Difference, holm, paired
from furlong.runs.config import RANDOM, Config, all_facts, short
from furlong.runs.grid import GRID
from furlong.runs.record import UNTRAINED, Result, RunRecord
from furlong.words import plural

ROW = ("method.name", "run.bound", "run.seed")  # told by a row's name and its seeds


class MeasuredRun(RunRecord):
    """A run's record, with its results named as the columns of a table."""

    @cached_property
    def measured(self) -> list[Result]:
        """The results, each protocol named with what was set otherwise than in the run."""
        return [replace(r, protocol=measured_by(r, self.settings)) for r in self.results]

    @cached_property
    def scores(self) -> dict[tuple[str, Key], float]:
        """Whose encoder, protocol and share of the labels -> accuracy."""
        return {(r.who, (r.protocol, r.labels)): r.accuracy for r in self.measured}

    def others(self) -> dict[str, Any]:
        """Settings by which rows of one table may differ: dotted name -> value."""
        found: dict[str, Any] = {}
        for section, usual in {"method": {}, **_defaults()}.items():
            values = {**usual, **self.settings.get(section, {})}
            found |= {f"{section}.{key}": value for key, value in values.items()}
        apart = {name for name, fact in all_facts().items() if fact.table or fact.role != "result"}
        return {name: value for name, value in found.items() if name not in {*apart, *ROW}}


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """The sections of a configuration: what a file leaves out is as here."""
    whole = {name: part for name, part in asdict(Config()).items() if name != "method"}
    return {name: json.loads(json.dumps(part)) for name, part in whole.items()}


@dataclass(frozen=True)
class Spread:
    """One number per seed."""

    values: dict[int, float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values.values())

    @property
    def std(self) -> float | None:
        """Over the seeds (n - 1); of one seed there is none."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Beside:
    """A paper's numbers for the setting of a row."""

    source: str
    cells: dict[Key, printed.Printed]
    note: str


@dataclass
class TableRow:
    """One method, or the random encoder, over its seeds."""

    label: str
    runs: list[MeasuredRun]
    cells: dict[Key, Spread] = field(default_factory=dict)
    differences: dict[Key, Difference] = field(default_factory=dict)
    printed: list[Beside] = field(default_factory=list)
    rank: Spread | None = None  # the effective rank; None: it was not measured
    reference: bool = False  # the random encoder

    @property
    def federated(self) -> bool:
        """Whether it is neither the random encoder nor a bound."""
        return not self.reference and self.runs[0].bound == "none"

    @property
    def seeds(self) -> list[int]:
        """Whose runs are there."""
        return sorted({run.seed for run in self.runs})

    @property
    def sent(self) -> tuple[float, float] | None:
        """Bytes per client, up and down, on average over the seeds; alone and pooled: none."""
        if self.reference or not self.runs[0].sends:
            return None
        each = [run.finished for run in self.runs]
        up = statistics.fmean(summary.bytes_up / summary.clients for summary in each)
        return up, statistics.fmean(summary.bytes_down / summary.clients for summary in each)

    @property
    def seconds(self) -> float | None:
        """Training time on average over the seeds."""
        if self.reference:
            return None
        return statistics.fmean(run.finished.seconds for run in self.runs)


@dataclass
class Group:
    """One table: runs of one setting."""

    title: str
    setting: dict[str, Any]
    columns: list[Key]
    rows: list[TableRow]
    baseline: str
    notes: list[str]
    more: bool = False  # the group before it has the same runs

    @property
    def own(self) -> list[TableRow]:
        """The rows of trained encoders."""
        return [row for row in self.rows if not row.reference]

    @property
    def ranked(self) -> bool:
        """Whether the effective rank was measured."""
        return any(row.rank is not None for row in self.rows)

    def best(self, column: Key) -> TableRow | None:
        """The row with the highest mean; bounds and the random encoder do not compete."""
        rows = [row for row in self.rows if row.federated and column in row.cells]
        return max(rows, key=lambda row: row.cells[column].mean) if len(rows) > 1 else None

    def is_best(self, row: TableRow, column: Key) -> bool:
        """Whether a row has the highest mean, alone or with others."""
        best = self.best(column)
        if best is None or not row.federated or column not in row.cells:
            return False
        return row.cells[column].mean >= best.cells[column].mean

    def tests(self) -> list[tuple[TableRow, Key, Difference]]:
        """Every comparison with the baseline, if there are seeds enough for any test."""
        found = [(row, c, d) for row in self.own for c, d in row.differences.items()]
        return found if any(d.n >= FEWEST for *_, d in found) else []


# ---------------------------------------------------------------- reading


def find(paths: Iterable[Path]) -> tuple[list[MeasuredRun], list[Path]]:
    """Finished runs in or below the folders, and the folders of runs that have not finished."""
    paths = list(paths)
    runs: dict[Path, MeasuredRun] = {}
    for folder in (folder for path in paths for folder in folders(path)):
        runs.setdefault(folder.resolve(), MeasuredRun.open(folder))
    finished = [run for run in runs.values() if run.summary is not None]
    unfinished = [run.path for run in runs.values() if run.summary is None]
    if not finished:
        names = ", ".join(map(str, paths)) or "nothing"
        more = f"; {len(unfinished)} unfinished" if unfinished else ""
        raise FurlongError(
            f"no finished run in {names}{more}. Give run folders or folders of runs."
        )
    return finished, unfinished


def folders(path: Path) -> Iterator[Path]:
    """``path`` if it is a run, else the runs below it, by name."""
    if not path.is_dir():
        raise FurlongError(f"{path} is not a run folder, nor a folder of runs.")
    if (path / "config.toml").exists():
        yield path
        return
    below = [p.parent for p in sorted(path.rglob("config.toml"))]
    order = {name: place for place, name in enumerate(grid_file(path).get("cells", ()))}
    below.sort(key=lambda folder: order.get(folder.relative_to(path).as_posix(), len(order)))
    yield from (folder for folder in below if (folder / "partition.json").exists())


def grid_file(path: Path) -> dict[str, Any]:
    """The command and the cells of a grid; empty if damaged, since no number depends on them."""
    try:
        kept = json.loads((path / GRID).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) and isinstance(kept.get("cells"), list) else {}


def by_encoder(rows: Iterable[Result]) -> tuple[list[Key], dict[str, dict[Key, Result]]]:
    """Results as a table: the columns, and whose encoder -> column -> result."""
    table: dict[str, dict[Key, Result]] = {}
    for row in rows:
        table.setdefault(row.who, {})[row.protocol, row.labels] = row
    return list(dict.fromkeys(key for cells in table.values() for key in cells)), table


# ---------------------------------------------------------------- grouping


def tables(
    runs: Sequence[MeasuredRun], baseline: str | None = None, unfinished: Sequence[Path] = ()
) -> list[Group]:
    """One group per setting, in the order in which settings first appear."""
    apart: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        apart.setdefault(json.dumps(_setting(run), sort_keys=True), []).append(run)
    groups = [group for same in apart.values() for group in _groups(same, baseline)]
    rows = [row for group in groups for row in group.own]
    labels = {name for row in rows for name in (row.label, row.runs[0].name)}
    if baseline is not None and baseline not in labels:
        raise FurlongError(f"no run of the baseline {baseline!r}. {nearest(baseline, labels)}")
    if unfinished:
        names = ", ".join(str(path) for path in unfinished[:5])
        more = ", …" if len(unfinished) > 5 else ""
        groups[-1].notes.append(f"{len(unfinished)} run(s) have not finished: {names}{more}.")
    return groups


def _setting(run: MeasuredRun) -> dict[str, Any]:
    shared = [name.split(".") for name, fact in all_facts().items() if fact.table]
    return {f"{section}.{key}": run.settings[section].get(key) for section, key in shared}


def _groups(runs: list[MeasuredRun], baseline: str | None) -> Iterator[Group]:
    """The table of a setting, and one of what the clients tuned themselves."""
    columns = _columns(runs)
    tuned = [column for column in columns if kind_of(column[0]) == "federated"]
    others = [column for column in columns if column not in tuned]
    labels = _labels(runs)
    if others or not tuned:
        yield _group(runs, labels, others, baseline)
    if tuned:
        some = [run for run in runs if any(key in tuned for _, key in run.scores)]
        group = _group(some, labels, tuned, baseline)
        group.title += " · fine-tuned by the clients, whose labels stay with them"
        group.more = bool(others)
        yield group


def _columns(runs: Sequence[MeasuredRun]) -> list[Key]:
    """What was measured of trained or random encoders, in the order of ``PROTOCOLS``."""
    order = {kind: place for place, kind in enumerate(PROTOCOLS)}
    columns = dict.fromkeys(
        key for run in runs for who, key in run.scores if who in (*UNTRAINED, run.finished.who)
    )
    return sorted(columns, key=lambda column: order.get(kind_of(column[0]), len(order)))


def _group(
    runs: list[MeasuredRun], labels: Mapping[Path, str], columns: list[Key], baseline: str | None
) -> Group:
    setting, notes = _setting(runs[0]), []
    rows: dict[str, TableRow] = {}
    for run in runs:
        row = rows.setdefault(labels[run.path], TableRow(labels[run.path], []))
        same = next((other for other in row.runs if other.seed == run.seed), None)
        if same is None:
            row.runs.append(run)
        else:  # rows of one name have the same settings
            notes.append(
                f"{run.path} repeats seed {run.seed} of {row.label} and is left out: it has the "
                f"settings of {same.path}."
            )
    for row in rows.values():
        row.cells, row.rank = _spreads(row.runs, columns), _rank(row.runs)
        row.printed = _beside(row.runs[0].settings, columns)
    named = [label for label, row in rows.items() if baseline in (label, row.runs[0].name)]
    chosen = (named or list(rows))[0]
    ordered = [*_random(runs, columns), *rows.values()]
    group = Group(_title(setting, runs), setting, columns, ordered, chosen, notes)
    if baseline is not None and not named:
        notes.append(f"{baseline} was not run in this setting; compared with {chosen} instead.")
    notes += _unequal(group.own)
    _test(group, rows[chosen])
    return group


def _labels(runs: Sequence[MeasuredRun]) -> dict[Path, str]:
    """A run's row: its name, and what differs between runs of that name."""
    found: dict[Path, str] = {}
    for name in dict.fromkeys(run.name for run in runs):
        same = [run for run in runs if run.name == name]
        fields = differing(same)
        for run in same:
            own = run.others()
            words = [f"{key.removeprefix('method.')}={word(own.get(key))}" for key in fields]
            found[run.path] = ", ".join([name, *words])
    return found


def differing(runs: Sequence[MeasuredRun]) -> list[str]:
    """The settings in which runs of one table differ."""
    every = [run.others() for run in runs]
    names = dict.fromkeys(key for own in every for key in own)
    return [key for key in names if len({repr(own.get(key)) for own in every}) > 1]


def _spreads(
    runs: Sequence[MeasuredRun], columns: Sequence[Key], who: str | None = None
) -> dict[Key, Spread]:
    """The columns of ``who``, by default of what the runs trained; a seed's runs are averaged."""
    found = {}
    for column in columns:
        values: dict[int, list[float]] = {}
        for run in runs:
            score = run.scores.get((who or run.finished.who, column))
            if score is not None:
                values.setdefault(run.seed, []).append(score)
        if (spread := _spread(values)) is not None:
            found[column] = spread
    return found


def _rank(runs: Sequence[MeasuredRun], who: str | None = None) -> Spread | None:
    """The effective rank of ``who``'s features, by default of what the runs trained."""
    values: dict[int, list[float]] = {}
    for run in runs:
        if (rank := run.ranks.get(who or run.finished.who)) is not None:
            values.setdefault(run.seed, []).append(rank)
    return _spread(values)


def _spread(values: Mapping[int, Sequence[float]]) -> Spread | None:
    """A seed's values are averaged."""
    found = {seed: statistics.fmean(several) for seed, several in values.items()}
    return Spread(found) if found else None


def _random(runs: Sequence[MeasuredRun], columns: Sequence[Key]) -> Iterator[TableRow]:
    """The encoder before training; a method with an architecture of its own has its own."""
    apart: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in runs:
        who = "random" if run.settings["model"].get("init") in (None, RANDOM) else "initial"
        apart.setdefault((who, str(run.encoder.get("encoder", ""))), []).append(run)
    for (who, architecture), same in apart.items():
        alike = sum(other == who for other, _ in apart) == 1
        label = f"{who} {'encoder' if who == 'random' else 'weights'}"
        label = label if alike else f"{who} ({architecture})"
        cells, rank = _spreads(same, columns, who), _rank(same, who)
        if cells or rank is not None:
            settings = same[0].settings
            untrained = {"method": {"name": "random"}, "run": settings["run"] | {"bound": "none"}}
            beside = _beside(settings | untrained, columns)
            yield TableRow(label, list(same), cells, printed=beside, rank=rank, reference=True)


def _beside(settings: Mapping[str, Any], columns: Sequence[Key]) -> list[Beside]:
    """Per paper and table, what is printed for these columns."""
    found: dict[str, dict[Key, printed.Printed]] = {}
    for column in columns:
        for row in printed.beside(settings, *column):
            found.setdefault(row.source, {})[column] = row
    beside = []
    for source, cells in found.items():
        remarks = [text for p in cells.values() for text in (printed.budget(p, settings), p.note)]
        beside.append(Beside(source, cells, "; ".join(dict.fromkeys(filter(None, remarks)))))
    return beside


def _unequal(rows: Sequence[TableRow]) -> Iterator[str]:
    """Settings outside of the method by which rows differ."""
    for key in differing([row.runs[0] for row in rows]):
        if key.startswith("method."):
            continue
        values: dict[str, list[str]] = {}
        for row in rows:
            values.setdefault(word(row.runs[0].others().get(key)), []).append(row.label)
        *few, (common, _) = sorted(values.items(), key=lambda item: len(item[1]))
        words = [f"{value} ({', '.join(labels)})" for value, labels in few]
        yield f"Not the same in all rows: {key} is {'; '.join(words)}; {common} (the others)."
    versions = sorted({run.finished.furlong for row in rows for run in row.runs})
    if len(versions) > 1:
        yield f"The runs were made by several versions of furlong: {', '.join(versions)}."


def _title(setting: Mapping[str, Any], runs: Sequence[MeasuredRun]) -> str:
    images = setting["data.images"] or max(run.finished.images for run in runs)
    share = setting["train.fraction"]
    return (
        f"{short(setting['data.name'])}, {images:,} images · "
        f"partition {setting['data.partition']}, "
        f"{setting['data.clients']} clients · encoder {setting['model.encoder']} · "
        f"{plural(setting['train.rounds'], 'round')} of {plural(setting['train.epochs'], 'epoch')}"
        + ("" if share == 1 else f" · {100 * share:g} % of the clients per round")
    )


def _test(group: Group, baseline: TableRow) -> None:
    """Every other row against the baseline, in every column."""
    tested: list[tuple[TableRow, Key, float]] = []
    for row in group.own:
        for column in group.columns if row is not baseline else ():
            ours, theirs = (r.cells.get(column, Spread({})).values for r in (row, baseline))
            common = sorted(ours.keys() & theirs.keys())
            if common:
                found = paired([ours[s] for s in common], [theirs[s] for s in common])
                row.differences[column] = found
                if found.p is not None:
                    tested.append((row, column, found.p))
    for (row, column, _), p in zip(tested, holm([p for *_, p in tested]), strict=True):
        row.differences[column] = replace(row.differences[column], corrected=p)
