"""furlong partition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from furlong.cli.common import console, err
from furlong.cli.options import in_sections, with_settings
from furlong.runs import config
from furlong.runs.datasets import load_data
from furlong.runs.split import describe_partition, split_data


@with_settings(in_sections("data", "run.seed"))
def partition(
    *,
    figure: Path | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    settings: dict[str, Any],
) -> None:
    """Show who would get which images: class counts, β-CIB, β-hetero, heat map.

    Parameters
    ----------
    figure
        Also draw the heat map to this .svg or .png file.
    as_json
        Print JSON.
    """
    resolved = config.load(None, settings)
    train, _, notes = load_data(resolved)
    about = describe_partition(train, split_data(resolved, train))
    for note in notes:
        err.print(note)
    if figure is not None:
        from furlong.reports import figures
        from furlong.reports.parts import betas

        title = f"{train.name}, {about['partition']}"
        drawn = (
            figures.heat_map(
                about["class_counts"],
                about["classes"],
                title,
                betas(about["beta_cib"], about["beta_hetero_m2"]),
            )
            if "class_counts" in about
            else figures.sizes(about["sizes"], title)
        )
        figures.save(drawn, figure)
    if as_json:
        print(json.dumps(about))
        return
    console.print(_partition_table(about))
    if "beta_cib" in about:
        console.print(
            f"β-CIB {about['beta_cib']:.4f} bits · β-hetero {about['beta_hetero_m2']:.4f} (M²) or "
            f"{about['beta_hetero_mm1']:.4f} (M(M-1))"
        )
        shares = about["false_negatives"]
        console.print(
            f"false negatives (same class) among contrasted images: {100 * shares['local']:.1f} % "
            f"of a client's own, {100 * shares['union']:.1f} % of all clients', "
            f"{100 * shares['remote']:.1f} % of the others'"
        )
    if figure is not None:
        console.print(f"heat map: {figure}")


def _partition_table(about: dict[str, Any]) -> Table:
    """Counts with a shade of blue behind them: the heat map of a terminal."""
    counts = about.get("class_counts") or [[] for _ in about["sizes"]]
    narrow = len(counts[0]) <= 20
    columns = about.get("classes", []) if narrow else []
    table = Table(
        "client",
        "images",
        *columns,
        *([] if narrow else ["classes held"]),
        box=None,
        padding=(0, 1, 0, 0),
    )
    peak = max((n for row in counts for n in row), default=1) or 1
    for client, row in enumerate(counts):
        cells = [
            Text(str(n), f"on rgb(0,0,{40 + 160 * n // peak})") if n else Text("·") for n in row
        ]
        if not narrow:
            cells = [Text(str(sum(n > 0 for n in row)))]
        table.add_row(str(client), f"{about['sizes'][client]:,}", *cells)
    for column in table.columns:
        column.justify = "right"
    return table
