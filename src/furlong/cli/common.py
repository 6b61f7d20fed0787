"""What commands share: the two consoles, progress bars, the table of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from furlong.words import duration, plural, points, size

if TYPE_CHECKING:
    from furlong.data.reading import Skipped
    from furlong.reports.measures import Sheet
    from furlong.runs.loop import Run
    from furlong.runs.observers import Status

# no emoji: "dirichlet:A:MIN" is not one, nor is a path with colons; no markup: a folder may be
# called "[/b]"
console = Console(highlight=False, emoji=False, markup=False)
err = Console(stderr=True, highlight=False, emoji=False, markup=False)
LOG_EVERY = 20.0  # seconds between lines of progress in a log
MOST = 10  # files or groups that are listed


def say(text: str) -> None:
    """A line of text that is not wrapped."""
    console.print(text, soft_wrap=True)


def warn(text: str) -> None:
    """A warning on standard error."""
    err.print(f"warning: {text}", style="bold red", soft_wrap=True)


def results_table(rows: list[dict[str, Any]], quality: Sequence[Mapping[str, Any]] = ()) -> Table:
    """Who against protocol, in percent; and the effective rank, if it was measured."""
    from furlong.reports.columns import column_title
    from furlong.reports.tables import by_encoder
    from furlong.runs.record import Result, parse

    columns, encoders = by_encoder(parse(Result, row, "a row") for row in rows)
    ranks = {row["who"]: f"{row['effective_rank']:.1f}" for row in quality}
    last = ["effective rank"] if ranks else []
    lines = [["encoder", *[f"{column_title(column)} %" for column in columns], *last]]
    for name in dict.fromkeys([*encoders, *ranks]):
        found = [encoders.get(name, {}).get(column) for column in columns]
        words = [points(row.accuracy, row.std) if row else "–" for row in found]
        lines.append([name, *words, *([ranks.get(name, "–")] if ranks else [])])
    if len(columns) > 4 and len(lines) <= len(columns):  # more than fit side by side
        lines = [list(row) for row in zip(*lines, strict=True)]
    heading, *body = lines
    table = Table(*heading)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in body:
        table.add_row(*row)
    return table


def print_sheets(sheets: Iterable[Sheet]) -> None:
    """Small tables with a title above and notes below."""
    for sheet in sheets:
        table = Table(*sheet.heading, title=sheet.title, title_justify="left")
        lines = [[cell.replace(" [", "\n[") for cell in row] for row in sheet.rows]
        for number, (column, name) in enumerate(zip(table.columns, sheet.heading, strict=True)):
            column.overflow = "fold"
            if name not in ("encoder", "method", "measured by"):
                column.justify = "right"  # and whole: half a number would be a wrong one
                parts = [part for row in lines for part in row[number].split("\n")]
                column.min_width = max(map(len, parts))
        for row in lines:
            table.add_row(*map(Text, row))
        least = Measurement.get(console, console.options, table).minimum
        console.print(table, width=max(console.width, least), crop=False)
        for text in sheet.notes:
            console.print(text)
        console.print()


@contextmanager
def watching() -> Iterator[tuple[Any, Any]]:
    """Live progress on a terminal; elsewhere, in a log, a line now and then."""
    from furlong.engines.pool import keep_freed_memory

    keep_freed_memory()
    columns = (
        SpinnerColumn(),
        TextColumn("round {task.fields[round]}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None, round="–", text="preparing")

        def show(status: Status) -> None:
            loss = "–" if status.loss is None else f"{status.loss:.3f}"
            if status.knn is not None:
                seen["knn"] = f"{100 * status.knn:.1f} %"
            spent = "" if status.epsilon is None else f"ε {status.epsilon:.3g} · "
            text = (
                f"{spent}loss {loss} · kNN {seen['knn']} · {status.images_per_second:,.0f} images/s"
                f" · up {size(status.bytes_up)} down {size(status.bytes_down)}"
                f" · {duration(status.seconds_left)} left"
            )
            now = status.round + 1
            progress.update(task, completed=status.done, total=status.total, round=now, text=text)
            if not err.is_terminal and time.monotonic() - said[0] >= LOG_EVERY:
                said[0] = time.monotonic()
                err.print(f"exchange {status.done} of {status.total} · {text}", soft_wrap=True)
            for failure in status.failures:
                err.print(f"round {status.round + 1}: {failure}")

        seen, said = {"knn": "–"}, [time.monotonic()]
        yield show, lambda text: err.print(text)


def print_run(finished: Run) -> None:
    """Results, effort and places of a run."""
    from furlong.reports import measures
    from furlong.reports.formats import RANK, voters
    from furlong.reports.parts import budget, initial, trouble
    from furlong.runs.record import RunRecord

    summary, record = finished.summary, RunRecord(finished.folder)
    quality = summary.get("quality", [])  # older runs have none
    if summary["results"] or quality:
        console.print(results_table(summary["results"], quality))
    if any(row["protocol"] == "knn" for row in summary["results"]):
        console.print(voters(record.settings["evaluate"]["k"]))
    if quality:
        console.print(RANK)
    sites = (record.split.names if record.split else None) or []
    print_sheets(measures.of_run(record.finished.results, sites))
    if said := trouble(summary["method"], record.lines()):
        warn(said)
    console.print(
        f"{plural(summary['rounds'], 'round')}, {plural(summary['clients'], 'client')}, "
        f"{plural(summary['images'], 'image')} in {duration(summary['seconds'])} "
        f"({summary['images_per_second']:,.0f} images/s), "
        f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down"
        + (f", {plural(summary['failures'], 'failed answer')}" if summary["failures"] else "")
    )
    if summary.get("privacy"):
        for sentence in budget(summary["privacy"], record.secured, initial(record.settings)):
            console.print(sentence, markup=False)
    paths = f"run folder: {finished.folder}    report: {finished.folder / 'report.html'}"
    console.print(paths, soft_wrap=True)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of what is done of all."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_skipped(skipped: list[Skipped]) -> None:
    """Files that could not be read, a line for each."""
    from furlong.data.reading import by_file

    files = by_file(skipped)
    for each in files[:MOST]:
        err.print(f"skipped {each.name}: {each.reason}", soft_wrap=True)
    if len(files) > MOST:
        err.print(f"… and {len(files) - MOST:,} more")
