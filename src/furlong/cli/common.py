"""What all commands share: the application, the two consoles, the table of results."""

from __future__ import annotations

from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table

import furlong
from furlong.tables import PROTOCOLS

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
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    table = Table("encoder", *[f"{PROTOCOLS.get(p, p)} %" for p in protocols])
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(row["who"] for row in rows):
        cells = {row["protocol"]: row for row in rows if row["who"] == name}
        table.add_row(
            name,
            *[
                f"{100 * cells[p]['accuracy']:.1f}"
                + (f" ± {100 * cells[p]['std']:.1f}" if "std" in cells[p] else "")
                if p in cells
                else "–"
                for p in protocols
            ],
        )
    return table
