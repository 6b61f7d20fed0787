"""Commands for several runs, and their pages: compare, table, report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import app, console, dotted, err
from furlong.cli.training import watching
from furlong.errors import FurlongError
from furlong.reports import formats, tables
from furlong.runs import grid as grids


@app.command
def compare(
    *config_files: Annotated[Path, Parameter(name="CONFIG")],
    out: Path,
    methods: str | None = None,
    seeds: int = 1,
    baseline: str | None = None,
    data: str | None = None,
    partition: str | None = None,
    clients: int | None = None,
    fraction: float | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    encoder: str | None = None,
    public: str | None = None,
    workers: int | None = None,
    device: str | None = None,
) -> None:
    """Run configurations × methods × seeds, then print the table and build the report.

    The same command goes on with a grid that was interrupted. Any key of a configuration file is an
    option too (``--optimiser.lr 0.1``) and holds for all runs; ``[methods.NAME]`` tables of a file
    hold for one method. The runs lie in OUT/<configuration>/<method>/<seed>.

    Parameters
    ----------
    config_files
        TOML files; without any, the defaults and the options.
    out
        Folder of the grid.
    methods
        Names, separated by commas; fedu@single and fedu@pooled are the bounds. Default: those that
        a file names.
    seeds
        Number of seeds.
    baseline
        The method that the others are tested against (default: the first).
    data
        As for ``run``.
    partition
        As for ``run``.
    clients
        Number of clients.
    fraction
        Share of the clients that takes part in a round.
    rounds
        Rounds of communication.
    epochs
        Local epochs per round.
    batch_size
        Local batch size.
    encoder
        As for ``run``.
    public
        A data set that the server may see, for methods that need one.
    workers
        Worker processes; the result does not depend on it.
    device
        auto, cpu, cuda, mps.
    """
    own = ("config_files", "out", "methods", "seeds", "baseline")
    given = {k: v for k, v in locals().items() if k not in ("own", *own) and v is not None}
    options: dict[str, Any] = given | dotted
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    cells = grids.grid(config_files, names, seeds, out, options)
    labels = {cell.row for cell in cells}
    if baseline is not None and baseline not in labels:
        raise FurlongError(f"--baseline {baseline} is not one of {', '.join(sorted(labels))}.")
    grids.try_data(cells)
    grids.keep(out, _command(config_files, out, names, seeds, baseline, options), cells)
    heard: set[str] = set()

    def tell(text: str) -> None:
        err.print(text, markup=False, soft_wrap=True)

    try:
        with watching() as (show, say):

            def once(text: str) -> None:
                if text not in heard:
                    heard.add(text)
                    say(text)

            outcomes = grids.run(cells, show, once, tell)
    except KeyboardInterrupt:
        tell("interrupted. The same command goes on where it stopped.")
        sys.exit(130)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    states = [outcome.state for outcome in outcomes]
    tell(f"{states.count('done')} runs done, {states.count('was there')} were there before.")
    for outcome in failed:
        tell(f"failed: {outcome.cell}: {outcome.reason}")
    if len(failed) < len(outcomes):
        _print_tables([o.cell.folder for o in outcomes if o.state != "failed"], baseline)
        from furlong.reports import comparison

        console.print(f"report: {comparison.build([out], baseline=baseline)}", soft_wrap=True)
    if failed:
        sys.exit(1)


def _command(
    files: tuple[Path, ...],
    out: Path,
    names: list[str],
    seeds: int,
    baseline: str | None,
    options: dict[str, Any],
) -> str:
    """What was typed, to be typed again."""
    words = ["furlong", "compare", *map(str, files)]
    words += ["--methods", ",".join(names)] if names else []
    words += ["--seeds", str(seeds)]
    words += ["--baseline", baseline] if baseline else []
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--out", str(out)])


@app.command
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
        _print_tables(list(runs), baseline)
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


def _print_tables(folders: list[Path], baseline: str | None) -> None:
    for group in _groups(folders, baseline):
        heading, rows = formats.cells(group)
        heading, names = _numbered(heading, rows)
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
        console.print(shown, markup=False, width=max(console.width, least), crop=False)
        for text in [*names, *formats.notes(group), *formats.verdicts(group)]:
            console.print(text, markup=False)
        console.print()


def _numbered(heading: list[str], rows: list[tuple[str, list[str]]]) -> tuple[list[str], list[str]]:
    """Numbers instead of many long headings that do not fit, and what they stand for."""
    first, last = 2, len(heading) - 2  # the protocols
    cells = [max(len(row[i]) for _, row in rows) for i in range(len(heading))]
    whole = sum(3 + max(pair) for pair in zip(map(len, heading), cells, strict=True))
    if last - first <= 3 or whole < console.width:
        return heading, []
    numbers = [f"({number + 1})" for number in range(last - first)]
    titles = [title.removesuffix(" %") for title in heading[first:last]]
    names = [f"{n} {title}" for n, title in zip(numbers, titles, strict=True)]
    return [*heading[:first], *numbers, *heading[last:]], names


@app.command
def report(
    *runs: Annotated[Path, Parameter(name="RUNS")],
    out: Path | None = None,
    baseline: str | None = None,
    figures: Path | None = None,
    tsne: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Make the page of a run again, or one page that compares several.

    Parameters
    ----------
    runs
        A run folder, or several, or folders that contain runs.
    out
        The page of a comparison (default: report.html in the folder, or comparison.html here).
    baseline
        Comparison: the row that the others are tested against (default: the first).
    figures
        Also draw every figure to this folder, as .svg and .png.
    tsne
        One run: also map its representations to the plane by t-SNE (reads the images again).
    """
    from furlong.reports import comparison
    from furlong.reports import page as pages
    from furlong.reports import tsne as mapping

    if not runs:
        raise FurlongError("give run folders, or folders that contain them.")
    single = len(runs) == 1 and (runs[0] / "config.toml").exists()
    if single and (out or baseline):
        raise FurlongError(f"{runs[0]} is one run: its page is {runs[0] / 'report.html'}.")
    if tsne and not single:
        raise FurlongError("--tsne is for one run; what it makes stays in the run's folder.")
    if tsne:
        mapping.make(runs[0])
    if single:
        made = pages.build(runs[0], figures)
    else:
        made = comparison.build(list(runs), out, baseline, figures)
    console.print(f"report: {made}", markup=False, soft_wrap=True)
    if figures is not None:
        console.print(f"figures: {figures}", markup=False, soft_wrap=True)
