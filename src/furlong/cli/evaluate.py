"""furlong evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from furlong.cli.common import console, err, print_sheets
from furlong.cli.options import in_sections, with_settings
from furlong.reports import measures
from furlong.runs import evaluate as evaluating
from furlong.runs.record import UNTRAINED, Result, parse


@with_settings(in_sections("data", "evaluate", "run"))
def evaluate(
    place: Path,
    /,
    *,
    protocols: str | None = None,
    random: bool = False,
    as_json: Annotated[bool, Parameter("--json")] = False,
    settings: dict[str, Any],
) -> None:
    """Measure an encoder: of a finished run, of a run's last checkpoint, or of an exported file.

    Protocols: knn, linear, linear-crops (new crops every epoch), semi-P (fine-tuning with P percent
    of the labels in one place), federated-P (with the labels staying on the clients),
    transfer:NAME (fine-tuning on another data set), quality (needs no labels). Options follow
    behind colons: semi-10:epochs=5:recipe=fcl. docs/evaluate.md says which answers what. Settings
    that are not given are the run's own; --data names another data set to measure on.

    Parameters
    ----------
    place
        The run's folder, or an encoder that 'furlong export --to safetensors' wrote.
    protocols
        Separated by commas (default: knn,linear).
    random
        Also measure the encoder before training (of an exported file: any random encoder of the
        same kind). Transfer and federated do so anyway.
    as_json
        Print JSON.
    """
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("measuring", total=None)

        def tell(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)

        rows = evaluating.evaluate(
            place,
            evaluating.settings_of(place, settings),
            protocols,
            random=random,
            tell=tell,
            say=lambda text: err.print(text),
        )
    if as_json:
        print(json.dumps(rows))
        return
    scored = [row for row in rows if "accuracy" in row]
    if scored:
        console.print(_accuracy_table(scored))
        print_sheets(measures.of_run([parse(Result, row, "a row") for row in scored]))
    if label_free := [row for row in rows if "accuracy" not in row]:
        console.print(_quality_table(label_free))


def _accuracy_table(rows: list[dict[str, Any]]) -> Table:
    """Protocol against encoder, in percent; protocols have long names and may be many.

    Of clients that each have an encoder there is the mean ± deviation only: they may be many, too.
    """
    if any("std" in row for row in rows):
        rows = [row for row in rows if "std" in row or row["who"] in UNTRAINED]
    people = sorted({row["who"] for row in rows}, key=lambda name: name not in UNTRAINED)
    table = Table("accuracy %", "labels", *people)
    for column in table.columns[1:]:
        column.justify = "right"
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        cells = {row["who"]: row for row in rows if row["protocol"] == protocol}
        labels = next(iter(cells.values())).get("labelled")
        table.add_row(
            protocol,
            "all" if labels is None else f"{labels:,}",
            *[_percent(cells[p]) if p in cells else "–" for p in people],
        )
    return table


def _percent(row: dict[str, Any]) -> str:
    spread = f" ± {100 * row['std']:.1f}" if "std" in row else ""
    return f"{100 * row['accuracy']:.1f}{spread}"


def _quality_table(rows: list[dict[str, Any]]) -> Table:
    """What can be said without labels."""
    table = Table("encoder", "alignment", "uniformity", "effective rank", "spread", "")
    for row in rows:
        numbers = [f"{row[k]:.3f}" for k in ("alignment", "uniformity")]
        numbers += [f"{row['effective_rank']:.1f}", f"{row['spread']:.3f}"]
        table.add_row(row["who"], *numbers, "collapsed" if row["collapsed"] else "")
    return table
