"""The settings behind the papers' tables: each row of a table has an address.

``mfcl/table2/cifar10/sc4/pn`` is a paper, one of its tables, and a point on each axis of that
table. A paper is one file, ``furlong/papers/NAME.toml``:

- ``[settings]`` holds for every row.
- ``[axes.AXIS.POINT]`` is what a point sets. ``like`` names the point of the same axis from which
  it starts, ``when.OTHER`` holds only for rows that are also at the point OTHER, and ``note`` tells
  a reader what the row is.
- ``[tables.NAME]`` has a title and ``[[tables.NAME.rows]]``: all combinations of the points that
  are named for each axis. Lists are parts of the address, single words hold for all of its rows.
  What the table itself sets (``settings``) comes last.

A comment behind a value says where it is from and is kept with it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError

PREFIX = "paper:"  # of an address where a file could stand
WORDS = ("like", "when", "note")  # of a point: no settings
Layer = tuple[str, Mapping[str, Any]]  # where it stands in the file, and its sections


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: the paper's file, the table, and the point on each axis."""

    paper: Mapping[str, Any]
    table: str
    points: dict[str, str]


@cache
def papers() -> dict[str, dict[str, Any]]:
    """Name -> content of its file, and as ``comments`` what stands behind the dotted keys."""
    files = (resources.files("furlong") / "papers").iterdir()
    texts = {f.name: f.read_text(encoding="utf-8") for f in files if f.name.endswith(".toml")}
    return {
        name.removesuffix(".toml"): {**tomllib.loads(text), "comments": _comments(text)}
        for name, text in sorted(texts.items())
    }


def _comments(text: str) -> dict[str, str]:
    """TOML readers drop comments."""
    found, header = {}, ""
    for line in text.splitlines():
        if opened := re.match(r"\[([^\[\]]+)\]", line):
            header = opened[1].replace('"', "")
        elif entry := re.match(r"([\w.-]+) = .*? # (.*)", line):
            found[f"{header}.{entry[1]}"] = entry[2]
    return found


@cache
def rows() -> dict[str, Row]:
    """Address -> row, in the order of the files."""
    found = {}
    for name, paper in papers().items():
        for table, about in paper["tables"].items():
            for block in about["rows"]:
                lists = [[p] if isinstance(p, str) else p for p in block.values()]
                for choice in product(*lists):
                    points = dict(zip(block, choice, strict=True))
                    shown = [points[axis] for axis in block if isinstance(block[axis], list)]
                    found["/".join((name, table, *shown))] = Row(paper, table, points)
    return found


def addresses(pattern: str = "*") -> list[str]:
    """All addresses that fit a pattern; ``*`` stands for any text, also for several parts."""
    return [address for address in rows() if fnmatchcase(address, pattern)]


def expand(sources: Iterable[str | Path]) -> list[Path]:
    """Files as they are; ``paper:`` with a pattern becomes one source per address."""
    found: list[Path] = []
    for source in sources:
        place = str(source)
        fitting = addresses(place.removeprefix(PREFIX)) if place.startswith(PREFIX) else []
        found += [Path(PREFIX + address) for address in fitting] or [Path(source)]
    return found


def tree(address: str) -> dict[str, dict[str, Any]]:
    """The tables of a configuration file with the settings of a row."""
    return {
        section: {key: value for key, (value, _) in keys.items()}
        for section, keys in settings(address).items()
    }


def settings(address: str) -> dict[str, dict[str, tuple[Any, str]]]:
    """Section -> key -> value and the comment on its origin."""
    row = find(address)
    found: dict[str, dict[str, tuple[Any, str]]] = {"method": {}, "data": {}, "model": {}}
    for place, layer in _layers(row):  # a later one replaces what an earlier one set
        for section, keys in layer.items():
            for key, value in keys.items():
                comment = row.paper["comments"].get(f"{place}.{section}.{key}", "")
                found.setdefault(section, {})[key] = value, comment
    return found


def find(address: str) -> Row:
    """The row at an address; the error names the nearest one."""
    if address in rows():
        return rows()[address]
    close = difflib.get_close_matches(address, rows(), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise FurlongError(
        f"no paper has the address {address!r}. {hint}'furlong papers' lists the papers and their "
        "tables, 'furlong papers PAPER/TABLE' the addresses of a table."
    )


def _layers(row: Row) -> Iterator[Layer]:
    yield "settings", row.paper["settings"]
    for axis, point in row.points.items():
        yield from _point(row, axis, point)
    yield f"tables.{row.table}.settings", row.paper["tables"][row.table].get("settings", {})


def _point(row: Row, axis: str, name: str) -> Iterator[Layer]:
    place, point = f"axes.{axis}.{name}", row.paper["axes"][axis][name]
    if "like" in point:
        yield from _point(row, axis, point["like"])
    yield place, {section: keys for section, keys in point.items() if section not in WORDS}
    for other, more in point.get("when", {}).items():
        if other in row.points.values():
            yield f"{place}.when.{other}", more
