"""Finished runs become tables: mean ± standard deviation over seeds, one table per setting.

Runs share a table if data, partition, clients, encoder, rounds, epochs and the way of measuring are
the same. A row is a method with its bound (``fedu@single``) and, where runs of one method differ in
any other setting, those settings. The papers' numbers stand below the row that they correspond to.
Fine-tuning by the clients has a table of its own: it does not compare with tuning in one place.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError, nearest
from furlong.evaluation.linear import RECIPES
from furlong.reports import printed
from furlong.reports.significance import FEWEST, LEVEL, Difference, holm, paired
from furlong.runs.config import Config, all_facts, is_place
from furlong.runs.folder import RESULT, RunFolder, require
from furlong.runs.grid import GRID
from furlong.words import duration, size

SECTIONS = ("method", "data", "model", "train", "evaluate", "run")  # that every run's file has
ROW = ("method.name", "run.bound", "run.seed")  # told by a row's name and its seeds
PROTOCOLS = {
    "knn": "kNN",
    "linear": "linear probe",
    "linear-crops": "linear probe on crops",
    "classifier": "own classifier",
    "semi": "tuned in one place",
    "federated": "tuned by the clients",
    "transfer": "transfer to",
}
Key = tuple[str, float]  # protocol and share of the labels
Result = Mapping[str, Any]  # of summary.json and evaluations.json: who, protocol, accuracy, …


@dataclass(frozen=True)
class Finished:
    """One run, as far as a table needs it."""

    path: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    scores: dict[tuple[str, str, float], float]  # (who, protocol, labels) -> accuracy
    architecture: str

    @property
    def name(self) -> str:
        """The method, with its bound if it is one: ``fedu@pooled``."""
        bound = self.settings["run"].get("bound", "none")
        return str(self.settings["method"]["name"]) + ("" if bound == "none" else f"@{bound}")

    @property
    def seed(self) -> int:
        """Runs of one seed can be paired."""
        return int(self.settings["run"].get("seed", 0))

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
class Row:
    """One method, or the random encoder, over its seeds."""

    label: str
    runs: list[Finished]
    cells: dict[Key, Spread]
    differences: dict[Key, Difference] = field(default_factory=dict)
    corrected: dict[Key, float] = field(default_factory=dict)
    printed: list[Beside] = field(default_factory=list)
    reference: bool = False  # the random encoder

    @property
    def seeds(self) -> list[int]:
        """Whose runs are there."""
        return sorted({run.seed for run in self.runs})

    @property
    def sent(self) -> tuple[float, float] | None:
        """Bytes per client, up and down, on average over the seeds; a bound sends nothing."""
        if self.reference or "@" in self.runs[0].name:
            return None
        each = [(run.summary, run.summary["clients"]) for run in self.runs]
        up = statistics.fmean(summary["bytes_up"] / clients for summary, clients in each)
        return up, statistics.fmean(summary["bytes_down"] / clients for summary, clients in each)

    @property
    def seconds(self) -> float | None:
        """Training time on average over the seeds."""
        if self.reference:
            return None
        return statistics.fmean(run.summary["seconds"] for run in self.runs)


@dataclass
class Group:
    """One table: runs of one setting."""

    title: str
    setting: dict[str, Any]
    columns: list[Key]
    rows: list[Row]
    baseline: str
    notes: list[str]
    more: bool = False  # the group before it has the same runs

    @property
    def own(self) -> list[Row]:
        """The rows of trained encoders."""
        return [row for row in self.rows if not row.reference]

    def best(self, column: Key) -> str | None:
        """The label of the row with the highest mean; bounds and the reference do not compete."""
        rows = [row for row in self.own if "@" not in row.label and column in row.cells]
        return max(rows, key=lambda row: row.cells[column].mean).label if len(rows) > 1 else None

    def is_best(self, row: Row, column: Key) -> bool:
        """Whether a row has the highest mean, alone or with others."""
        best = next((r for r in self.own if r.label == self.best(column)), None)
        if best is None or row.reference or "@" in row.label or column not in row.cells:
            return False
        return row.cells[column].mean >= best.cells[column].mean

    def notes_below(self) -> list[str]:
        """What to know for reading the table."""
        return [*_explain(self), *paper_notes(self)]

    def tests(self) -> list[tuple[Row, Key, Difference]]:
        """Every comparison with the baseline, if there are seeds enough for any test."""
        found = [(row, c, d) for row in self.own for c, d in row.differences.items()]
        return found if any(d.n >= FEWEST for *_, d in found) else []

    @property
    def comparisons(self) -> int:
        """Tests in this table, for which Holm's correction is made."""
        return sum(len(row.corrected) for row in self.rows)


# ---------------------------------------------------------------- reading


def find(paths: Iterable[Path]) -> tuple[list[Finished], list[Path]]:
    """Finished runs in or below the folders, and the folders of runs that have not finished."""
    finished: dict[Path, Finished] = {}
    unfinished: list[Path] = []
    paths = list(paths)
    for path in paths:
        for folder in folders(path):
            if folder.resolve() in finished:
                continue
            run = read(folder)
            if run is None:
                unfinished.append(folder)
            else:
                finished[folder.resolve()] = run
    if not finished:
        names = ", ".join(map(str, paths)) or "nothing"
        more = f"; {len(unfinished)} unfinished" if unfinished else ""
        raise FurlongError(
            f"no finished run in {names}{more}. Give run folders or folders of runs."
        )
    return list(finished.values()), unfinished


def folders(path: Path) -> Iterator[Path]:
    """``path`` if it is a run, else the runs below it, by name."""
    if not path.is_dir():
        raise FurlongError(f"{path} is not a run folder, nor a folder of runs.")
    if (path / "config.toml").exists():
        yield path
        return
    below = [p.parent for p in sorted(path.rglob("config.toml"))]
    order = {name: i for i, name in enumerate(_order(path))}
    below.sort(key=lambda folder: order.get(folder.relative_to(path).as_posix(), len(order)))
    yield from (folder for folder in below if (folder / "partition.json").exists())


def _order(path: Path) -> list[str]:
    """The cells of a grid as they were asked for."""
    try:
        kept = json.loads((path / GRID).read_text(encoding="utf-8"))
        return [str(name) for name in kept["cells"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # only the order of rows


def read(path: Path) -> Finished | None:
    """A run, or ``None`` if it has not finished."""
    folder = RunFolder.open(path)
    summary = folder.summary()
    if summary is None:
        return None
    try:
        settings = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FurlongError(f"cannot read the run {path}: {error}") from None
    require(settings, dict.fromkeys(SECTIONS, dict), path / "config.toml")
    require(settings["method"], {"name": str}, path / "config.toml")
    scores = {}
    for row in [*summary["results"], *folder.evaluations()]:
        if row.get("accuracy") is not None:
            require(row, RESULT, path / "evaluations.json")
            key = (row["who"], measured_by(row, settings), float(row.get("labels", 1.0)))
            scores[key] = float(row["accuracy"])
    about = folder.read("encoder.json") or {}
    return Finished(path, settings, summary, scores, str(about.get("encoder", "")))


def measured_by(row: Result, settings: Mapping[str, Any]) -> str:
    """The protocol of a result, named with what was set otherwise than in the run.

    ``knn`` with ``--evaluate.k 1`` is ``knn:k=1``; other images are named too.
    """
    protocol, target, options, elsewhere = printed.parts(str(row["protocol"]))
    given, usual = row.get("settings") or {}, _usual(protocol, settings)
    other = {k: v for k, v in given.items() if k in usual and v != usual[k]}
    if "recipe" in other:  # which says the rest
        other = {k: v for k, v in other.items() if k in ("recipe", "seed")}
    for key, value in given.items():  # what the row says was given anew: data.images = 10
        nested = value if isinstance(value, Mapping) else {key: value} if "." in key else {}
        other |= {k: v for k, v in nested.items() if not _said(k, usual)}
    asked = {option.partition("=")[0] for option in options}
    words = [f"{k}={word(v)}".replace(":", " ") for k, v in other.items() if k not in asked]
    own = settings["data"].get("name")
    if not elsewhere and protocol != "transfer" and row.get("data") not in (None, own):
        elsewhere = str(row["data"])
    whole = ":".join([protocol, *filter(None, [target]), *options, *words])
    return f"{whole} on {elsewhere}" if elsewhere else whole


def _usual(protocol: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a protocol takes from the run's settings, if nothing else is asked for."""
    evaluate = settings.get("evaluate", {})
    usual: dict[str, Any] = {"seed": settings["run"].get("seed", 0)}
    if protocol == "knn":
        usual |= {k: evaluate.get(k) for k in ("k", "temperature")}
    elif protocol == "linear":
        probe = evaluate.get("probe", "none")
        usual["recipe"] = "default" if probe == "none" else probe
        recipe = asdict(RECIPES[usual["recipe"]]) if usual["recipe"] in RECIPES else {}
        usual |= {k: v for k, v in recipe.items() if k in ("epochs", "lr", "batch_size")}
    elif protocol.startswith("federated"):
        usual |= {k: settings["data"].get(k) for k in ("partition", "clients")}
    return usual


def _said(name: str, usual: Mapping[str, Any]) -> bool:
    """Whether no result depends on a setting, or the protocol's name tells it anyway."""
    key = name.partition(".")[2]
    told = key in usual or name in ("data.name", "evaluate.probe")
    return told or is_place(name)


# ---------------------------------------------------------------- grouping


def tables(
    runs: Sequence[Finished], baseline: str | None = None, unfinished: Sequence[Path] = ()
) -> list[Group]:
    """One group per setting, in the order in which settings first appear."""
    apart: dict[str, list[Finished]] = {}
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


def _setting(run: Finished) -> dict[str, Any]:
    shared = [name.split(".") for name, fact in all_facts().items() if fact.table]
    return {f"{section}.{key}": run.settings[section].get(key) for section, key in shared}


def _groups(runs: list[Finished], baseline: str | None) -> Iterator[Group]:
    """The table of a setting, and one of what the clients tuned themselves."""
    columns = _columns(runs)
    tuned = [column for column in columns if kind_of(column[0]) == "federated"]
    others = [column for column in columns if column not in tuned]
    labels = _labels(runs)
    if others or not tuned:
        yield _group(runs, labels, others, baseline)
    if tuned:
        some = [r for r in runs if any(key[1:] in tuned for key in r.scores)]
        group = _group(some, labels, tuned, baseline)
        group.title += " · fine-tuned by the clients, whose labels stay with them"
        group.more = bool(others)
        yield group


def _columns(runs: Sequence[Finished]) -> list[Key]:
    columns = list(
        dict.fromkeys(
            (protocol, share)
            for run in runs
            for who, protocol, share in run.scores
            if who in ("random", run.summary["who"])
        )
    )
    order = list(PROTOCOLS)
    known = {c: kind_of(c[0]) for c in columns}
    return sorted(columns, key=lambda c: order.index(known[c]) if known[c] in order else len(order))


def kind_of(protocol: str) -> str:
    """``semi`` of ``semi-10:epochs=5``."""
    word = printed.parts(protocol)[0]
    return word if word in PROTOCOLS else word.partition("-")[0]


def _group(
    runs: list[Finished], labels: Mapping[Path, str], columns: list[Key], baseline: str | None
) -> Group:
    setting, notes = _setting(runs[0]), []
    rows: dict[str, Row] = {}
    for run in runs:
        row = rows.setdefault(labels[run.path], Row(labels[run.path], [], {}))
        same = next((other for other in row.runs if other.seed == run.seed), None)
        if same is None:
            row.runs.append(run)
        else:  # rows of one name have the same settings
            notes.append(
                f"{run.path} repeats seed {run.seed} of {row.label} and is left out: it has the "
                f"settings of {same.path}."
            )
    for row in rows.values():
        row.cells = _spreads(row.runs, columns, None)
        row.printed = _beside(row.runs[0].settings, columns)
    ordered = [*_random(runs, columns), *rows.values()]
    named = [label for label, row in rows.items() if baseline in (label, row.runs[0].name)]
    chosen = (named or list(rows))[0]
    group = Group(_title(setting, runs), setting, columns, ordered, chosen, notes)
    if baseline is not None and not named:
        notes.append(f"{baseline} was not run in this setting; compared with {chosen} instead.")
    notes += _unequal(group.own)
    _test(group, rows[chosen])
    return group


def _labels(runs: Sequence[Finished]) -> dict[Path, str]:
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


def differing(runs: Sequence[Finished]) -> list[str]:
    """The settings in which runs of one table differ."""
    every = [run.others() for run in runs]
    names = dict.fromkeys(key for own in every for key in own)
    return [key for key in names if len({repr(own.get(key)) for own in every}) > 1]


def word(value: Any) -> str:
    """A setting's value."""
    if isinstance(value, list | tuple):
        return ", ".join(map(word, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _spreads(
    runs: Sequence[Finished], columns: Sequence[Key], who: str | None
) -> dict[Key, Spread]:
    found = {}
    for column in columns:
        values: dict[int, list[float]] = {}
        for run in runs:
            score = run.scores.get((who or run.summary["who"], *column))
            if score is not None:
                values.setdefault(run.seed, []).append(score)
        if values:
            found[column] = Spread({seed: statistics.fmean(v) for seed, v in values.items()})
    return found


def _random(runs: Sequence[Finished], columns: Sequence[Key]) -> Iterator[Row]:
    """The encoder before training; a method with an architecture of its own has its own."""
    apart: dict[str, list[Finished]] = {}
    for run in runs:
        apart.setdefault(run.architecture, []).append(run)
    for architecture, same in apart.items():
        cells = _spreads(same, columns, "random")
        label = f"random ({architecture})" if len(apart) > 1 else "random encoder"
        if cells:
            settings = same[0].settings
            untrained = {
                **settings,
                "method": {"name": "random"},
                "run": {**settings["run"], "bound": "none"},
            }
            printed = _beside(untrained, columns)
            yield Row(label, list(same), cells, printed=printed, reference=True)


def _beside(settings: Mapping[str, Any], columns: Sequence[Key]) -> list[Beside]:
    """Per paper and table, what is printed for these columns."""
    found: dict[str, dict[Key, printed.Printed]] = {}
    for column in columns:
        for row in printed.beside(settings, *column):
            found.setdefault(row.source, {})[column] = row
    return [
        Beside(source, cells, "; ".join(dict.fromkeys(_remarks(cells.values(), settings))))
        for source, cells in found.items()
    ]


def _remarks(rows: Iterable[printed.Printed], settings: Mapping[str, Any]) -> Iterator[str]:
    for row in rows:
        yield from filter(None, (printed.budget(row, settings), row.note))


def _unequal(rows: Sequence[Row]) -> Iterator[str]:
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
    versions = sorted({str(run.summary.get("furlong")) for row in rows for run in row.runs})
    if len(versions) > 1:
        yield f"The runs were made by several versions of furlong: {', '.join(versions)}."


def _title(setting: Mapping[str, Any], runs: Sequence[Finished]) -> str:
    images = setting["data.images"] or max(int(run.summary["images"]) for run in runs)
    rounds, epochs = setting["train.rounds"], setting["train.epochs"]
    share = setting["train.fraction"]
    return (
        f"{setting['data.name']}, {images:,} images · partition {setting['data.partition']}, "
        f"{setting['data.clients']} clients · encoder {setting['model.encoder']} · {rounds} "
        f"round{'' if rounds == 1 else 's'} of {epochs} epoch{'' if epochs == 1 else 's'}"
        + ("" if share == 1 else f" · {100 * share:g} % of the clients per round")
    )


def _test(group: Group, baseline: Row) -> None:
    """Every other row against the baseline, in every column."""
    tested: list[tuple[Row, Key, float]] = []
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
        row.corrected[column] = p


# ---------------------------------------------------------------- words


def column_title(column: Key) -> str:
    """A protocol as a heading."""
    name, share = column
    word, target, options, elsewhere = printed.parts(name)
    title = PROTOCOLS.get(kind_of(name), word)
    title += f" {target}" if target else ""
    title += f" on {elsewhere}" if elsewhere else ""
    title += "".join(f", {option}" for option in options)
    return title if share == 1 else f"{title}, {100 * share:g} % of the labels"


def by_encoder(rows: Iterable[Result]) -> tuple[list[Key], dict[str, dict[Key, Result]]]:
    """Results as a table: the columns, and whose encoder -> column -> result."""
    table: dict[str, dict[Key, Result]] = {}
    for row in rows:
        key = (str(row["protocol"]), float(row.get("labels", 1.0)))
        table.setdefault(str(row["who"]), {})[key] = row
    return list(dict.fromkeys(key for cells in table.values() for key in cells)), table


def points(accuracy: float, std: float | None = None) -> str:
    """A fraction in percent, with its deviation."""
    return f"{100 * accuracy:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")


def _explain(group: Group) -> list[str]:
    """What ± and the tests mean in this table, and what they say."""
    if not group.columns:
        return ["No accuracy was measured in these runs.", *group.notes]
    counts = sorted({len(row.seeds) for row in group.own})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    plural = "" if counts == [1] else "s"
    lines = [
        f"Test accuracy in percent, mean{' ± standard deviation' if counts[-1] > 1 else ''} over "
        f"{seeds} seed{plural} (n)."
    ]
    if len(group.own) > 1:
        lines += _significance(group)
    return lines + group.notes


def _significance(group: Group) -> Iterator[str]:
    tests = group.tests()
    if not tests:
        yield (
            f"With fewer than {FEWEST} seeds in common with {group.baseline} nothing can be said "
            "about significance."
        )
        return
    sure = [
        f"{row.label} ({column_title(column)}, {100 * difference.mean:+.1f} points)"
        for row, column, difference in tests
        if row.corrected.get(column, 1.0) < LEVEL
    ]
    yield (
        f"Compared with {group.baseline} by a paired t-test over seeds, two-sided, p corrected by "
        f"Holm for the {group.comparisons} comparisons of this table. More than chance (corrected "
        f"p below {LEVEL:g}): {', '.join(sure) or 'none'}."
    )


def verdict(row: Row, column: Key, difference: Difference) -> str:
    """One comparison in words."""
    if difference.n < FEWEST:
        return "too few seeds"
    if difference.p is None:
        return "every seed has the same difference: no test"
    return "more than chance" if row.corrected[column] < LEVEL else "may be chance"


def verdicts(group: Group) -> list[str]:
    """A line per comparison."""
    lines = []
    for row, column, gap in group.tests():
        p = "" if gap.p is None else f", p = {gap.p:.2g}, corrected {row.corrected[column]:.2g}"
        words = f"{100 * gap.mean:+.1f} points, n = {gap.n}{p}: {verdict(row, column, gap)}."
        lines.append(f"{row.label}, {column_title(column)}: {words}")
    return lines


# ---------------------------------------------------------------- formats


def cells(group: Group) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heading and rows of a printed table; a row's kind is ``run``, ``random`` or ``paper``."""
    heading = ["method", "n", *(f"{column_title(c)} %" for c in group.columns)]
    heading += ["sent per client", "training time"]
    rows: list[tuple[str, list[str]]] = []
    for row in group.rows:
        found = [row.cells.get(column) for column in group.columns]
        rows.append(
            (
                "random" if row.reference else "run",
                [
                    row.label,
                    str(len(row.seeds)),
                    *(_cell(s, len(row.seeds)) for s in found),
                    "–" if row.sent is None else size(sum(row.sent)),
                    "–" if row.seconds is None else duration(row.seconds),
                ],
            )
        )
        for paper in row.printed:
            given = [paper.cells.get(column) for column in group.columns]
            said = ["" if p is None else points(p.accuracy, p.std) for p in given]
            rows.append(("paper", [f"  printed in {paper.source}", "", *said, "", ""]))
    return heading, rows


def _cell(spread: Spread | None, seeds: int) -> str:
    """A number; with its own n if it was not measured for all seeds of the row."""
    if spread is None:
        return "–"
    n = len(spread.values)
    return points(spread.mean, spread.std) + (f" (n = {n})" if n < seeds else "")


def paper_notes(group: Group) -> list[str]:
    """What to know when a paper's number is compared with ours."""
    said: dict[str, list[str]] = {}
    for row in group.rows:
        for beside in row.printed:
            said.setdefault(beside.note, []).append(f"{beside.source} for {row.label}")
    return [f"{'; '.join(where)}: {note}." for note, where in said.items() if note]


def markdown(groups: Sequence[Group]) -> str:
    """Tables and what is said about them."""
    lines: list[str] = []
    for group in groups:
        heading, rows = cells(group)
        lines += [f"**{_escaped(group.title)}**", "", _line(heading)]
        lines.append("|---|" + "---:|" * (len(heading) - 1))
        for kind, row in rows:
            mark = "*" if kind == "paper" else ""
            lines.append(_line(row, mark))
        notes = [*group.notes_below(), *verdicts(group)]
        lines += ["", *(f"- {_escaped(text)}" for text in notes), ""]
    return "\n".join(lines)


def _line(words: Sequence[str], mark: str = "") -> str:
    first, *others = (_escaped(word.strip()) for word in words)
    return "| " + " | ".join([f"{mark}{first}{mark}", *others]) + " |"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: a name is neither a cell's end nor a tag."""
    return re.sub(r"[\\`*|\[\]<>]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def comma_separated(groups: Sequence[Group]) -> str:
    """A line per number: for a spreadsheet or a program."""
    heading = ["setting", "kind", "method", "protocol", "labels", "n", "accuracy", "std"]
    heading += ["bytes_up_per_client", "bytes_down_per_client", "seconds"]
    heading += ["baseline", "difference", "p", "p_holm", "note"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    for group in groups:
        for row in group.rows:
            kind = "random" if row.reference else "run"
            cost = [*(row.sent or (None, None)), row.seconds]
            for (protocol, share), spread in row.cells.items():
                gap = row.differences.get((protocol, share))
                tested: list[Any] = [group.baseline, gap.mean, gap.p] if gap else [None] * 3
                tested.append(row.corrected.get((protocol, share)))
                about = [group.title, kind, row.label, protocol, share, len(spread.values)]
                writer.writerow([*about, spread.mean, spread.std, *cost, *tested, None])
            for beside in row.printed:
                for (protocol, share), p in beside.cells.items():
                    about = [group.title, f"printed in {p.source}", row.label, protocol, share]
                    writer.writerow([*about, None, p.accuracy, p.std, *[None] * 7, beside.note])
    return text.getvalue()
