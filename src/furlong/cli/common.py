"""What all commands share: the application, the two consoles, the table of results."""

from __future__ import annotations

from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table

import furlong
from furlong.reports.formats import column_title
from furlong.reports.tables import by_encoder
from furlong.runs.record import Result, parse
from furlong.words import points

app = App(
    name="furlong",
    version=furlong.__version__,
    suppress_keyboard_interrupt=False,  # main says how to go on
    help="Learn one image encoder from many parties that cannot share their images.",
)
# no emoji: "dirichlet:A:MIN" is not one, nor is a path with colons
console = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
dotted: dict[str, Any] = {}  # --section.key options of this call, taken out before cyclopts


def results_table(rows: list[dict[str, Any]]) -> Table:
    """Who against protocol, in percent."""
    columns, encoders = by_encoder(parse(Result, row, "a row") for row in rows)
    table = Table("encoder", *[f"{column_title(column)} %" for column in columns])
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in encoders.items():
        found = [cells.get(column) for column in columns]
        words = [points(row.accuracy, row.std) if row else "–" for row in found]
        table.add_row(name, *words)
    return table
