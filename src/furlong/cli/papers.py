"""furlong papers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated

import tomli_w
from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import console
from furlong.reports import printed
from furlong.runs import papers as library


def papers(
    name: Annotated[str | None, Parameter(name="ADDRESS")] = None,
    /,
    *,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """List the papers' tables, the addresses of a table's rows, or the settings of one row.

    ``paper:ADDRESS`` stands for a configuration file in ``run``, ``compare`` and ``cost``.

    Parameters
    ----------
    name
        A paper, a table (mfcl/table2), a pattern (mfcl/*/sc2/pn) or the address of a row.
    as_json
        Print JSON.
    """
    name = name and name.removeprefix(library.PREFIX)
    if name is None:
        _list_tables(as_json)
    elif library.addresses(f"{name}/*"):
        _list_addresses(f"{name}/*", as_json)
    elif "*" in name and library.addresses(name):
        _list_addresses(name, as_json)
    elif as_json:
        numbers = [vars(row) for row in printed.at(name)]
        print(json.dumps({"settings": library.tree(name), "printed": numbers}))
    else:
        print(_toml(name), end="")


def _list_tables(as_json: bool) -> None:
    tables = {
        f"{paper}/{table}": (about["title"], len(library.addresses(f"{paper}/{table}/*")))
        for paper, content in library.papers().items()
        for table, about in content["tables"].items()
    }
    if as_json:
        print(json.dumps({place: {"title": t, "rows": n} for place, (t, n) in tables.items()}))
        return
    for paper, content in library.papers().items():
        shown = Table(title=content["title"], title_justify="left", box=None, show_header=False)
        shown.add_column(style="bold", min_width=16)
        shown.add_column(justify="right", min_width=3)
        shown.add_column()
        for place, (title, rows) in tables.items():
            if place.startswith(f"{paper}/"):
                shown.add_row(place, str(rows), title)
        console.print(shown)
    console.print(
        "furlong papers mfcl/table2: its addresses; furlong papers ADDRESS: the settings of a row; "
        "furlong run paper:ADDRESS: run with them",
    )


def _list_addresses(pattern: str, as_json: bool) -> None:
    found = library.addresses(pattern)
    print(json.dumps(found) if as_json else "\n".join(found))


def _toml(address: str) -> str:
    """A configuration file that gives the row's run."""
    text = "".join(f"# {line}".rstrip() + "\n" for line in _head(address))
    for section, keys in library.settings(address).items():
        text += f"\n[{section}]\n"
        for key, (value, comment) in keys.items():
            line = tomli_w.dumps({key: value}).rstrip()
            text += f"{line:<28} # {comment}\n" if comment else f"{line}\n"
    return text


def _head(address: str) -> Iterator[str]:
    row = library.find(address)
    table = re.sub(r"(\d+)", r" \1", row.table).capitalize()
    yield row.paper["title"]
    yield f"{table}: {row.paper['tables'][row.table]['title']}."
    for axis, point in row.points.items():
        if note := row.paper["axes"][axis][point].get("note"):
            yield note
    for number in printed.at(address):
        share = "" if number.labels == 1 else f", {100 * number.labels:g} % of the labels"
        target = f" to {number.target}" if number.target else ""
        accuracy = f"{100 * number.accuracy:.4g} %"
        yield f"Printed in {number.source}: {accuracy} ({number.protocol}{target}{share})."
    yield "[P] stated in the paper, [C] from public code, [R] our choice: the paper is silent."
    yield f"  furlong run paper:{address} --data.root DIR"
