"""furlong table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import console, print_sheets
from furlong.errors import FurlongError
from furlong.reports import formats, measures, tables


def table(
    *runs: Annotated[Path, Parameter(name="RUNS")],
    to: Literal["terminal", "markdown", "csv", "html"] = "terminal",
    baseline: str | None = None,
) -> None:
    """Mean ± standard deviation over seeds, a table per setting, the papers' numbers beside ours.

    Parameters
    ----------
    runs
        Run folders, or folders that contain them.
    to
        What to print: terminal, markdown, csv or html.
    baseline
        The row that the others are tested against, paired over seeds (default: the first).
    """
    if to == "terminal":
        print_tables(list(runs), baseline)
        return
    groups = _groups(list(runs), baseline)
    if to == "html":
        from furlong.reports import comparison

        print(comparison.fragment(groups))
    else:
        print((formats.markdown if to == "markdown" else formats.comma_separated)(groups), end="")


def _groups(folders: list[Path], baseline: str | None) -> list[tables.Group]:
    if not folders:
        raise FurlongError("give run folders, or folders that contain them.")
    finished, unfinished = tables.find(folders)
    return tables.tables(finished, baseline, unfinished)


def print_tables(folders: list[Path], baseline: str | None) -> None:
    """The tables of runs, for a terminal."""
    for group in _groups(folders, baseline):
        heading, rows = formats.cells(group)
        heading, names = _numbered(heading, rows, len(group.columns))
        shown = Table(*heading, title=group.title, title_justify="left")
        for number, column in enumerate(shown.columns):
            column.justify = "right" if number else "left"
            longest = max(len(row[number]) for _, row in rows)
            column.min_width = longest if number else min(30, longest)
        least = sum((column.min_width or 0) + 3 for column in shown.columns) + 1
        for kind, row in rows:
            style = {"paper": "dim italic", "random": "dim"}.get(kind)
            shown.add_row(*row, style=style)
        # what does not fit is for the terminal to break: half a number would be a wrong one
        console.print(shown, width=max(console.width, least), crop=False)
        for text in [*names, *formats.notes(group), *formats.verdicts(group)]:
            console.print(text)
        console.print()
        print_sheets(measures.of_group(group))


def _numbered(
    heading: list[str], rows: list[tuple[str, list[str]]], protocols: int
) -> tuple[list[str], list[str]]:
    """Numbers instead of many long headings that do not fit, and what they stand for."""
    first, last = 2, 2 + protocols
    cells = [max(len(row[i]) for _, row in rows) for i in range(len(heading))]
    whole = sum(3 + max(pair) for pair in zip(map(len, heading), cells, strict=True))
    if last - first <= 3 or whole < console.width:
        return heading, []
    numbers = [f"({number + 1})" for number in range(last - first)]
    titles = [title.removesuffix(" %") for title in heading[first:last]]
    names = [f"{n} {title}" for n, title in zip(numbers, titles, strict=True)]
    return [*heading[:first], *numbers, *heading[last:]], names
