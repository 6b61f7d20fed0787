"""What the benchmarks share: a smoke mode, medians of works that take turns, JSON or a table."""

from __future__ import annotations

import json
import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from typing import Any


def parser(doc: str | None) -> ArgumentParser:
    """A parser that describes itself by the script's docstring."""
    return ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)


def parse(options: ArgumentParser, **smoke: Any) -> Namespace:
    """The options given; with ``--smoke`` the values of ``smoke`` are the defaults."""
    options.add_argument(
        "--smoke", action="store_true", help="tiny sizes, in seconds: shows that the script works"
    )
    if options.parse_known_args()[0].smoke:
        options.set_defaults(**smoke)
    return options.parse_args()


def medians(
    works: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median milliseconds of each work. They take turns, so that all meet the same machine.

    Processor time unless told otherwise: other programs do not count. The first ``warm`` turns do
    not count either.
    """
    times = turns(works, repeats, warm, clock)
    return {name: statistics.median(found) for name, found in times.items()}


def turns(
    works: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """All the milliseconds that :func:`medians` takes the median of."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm + repeats):
        for name, work in works.items():
            began = clock()
            work()
            if turn >= warm:
                times[name].append(1e3 * (clock() - began))
    return times


def show(row: Mapping[str, Any], as_json: bool) -> None:
    """One result, as a line of JSON or as lines of words."""
    if as_json:
        print(json.dumps(row), flush=True)
    else:
        print("\n".join(f"{name:34} {value}" for name, value in row.items()), "", sep="\n")
