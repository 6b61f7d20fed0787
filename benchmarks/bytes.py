"""Accuracy against bytes: the recipe with fewer bytes per round, and with fewer rounds.

    python benchmarks/bytes.py --root ../shared/data [--seeds 0,1,2] [--only int8] [--show]
    python benchmarks/bytes.py --show --figure docs/recipe-bytes.svg

``--method furlong`` on 5,000 images of CIFAR-10, five clients with two classes each, the same
number of steps in every row (rounds × epochs = 20), over a wire inside this process. Bytes are
those of the packed messages, down and up, of one client in the whole run. Of a finished run the
numbers are kept in ``benchmarks/recipe/bytes.json``: another machine goes on with the rest.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from flower import direct
from measuring import parse, parser

KEPT = Path(__file__).parent / "recipe" / "bytes.json"
CLIENTS = 5
BUDGETS = ((20, 1), (10, 2), (5, 4))  # rounds, epochs
ROWS = {
    f"{how}, {rounds} rounds": (how, rounds, epochs)
    for rounds, epochs in BUDGETS
    for how in ("exact", "float16", "int8")
}


def measured(row: str, seed: int, given: Any) -> dict[str, float]:
    """One run: accuracies in percent, and megabytes of one client."""
    how, rounds, epochs = ROWS[row]
    options = {
        "method": "furlong",
        "data": given.data,
        "data.images": given.images,
        "seed": seed,
        "data.test_images": given.images,
        "rounds": rounds,
        "epochs": epochs,
        "clients": CLIENTS,
        "evaluate.knn_every": 1000,
        "run.save_every": 1000,
        "flower.wait": 60,
    }
    os.environ["FURLONG_DATA"] = given.root  # nodes are told no paths
    wire, run = direct(options, how)
    return {
        "linear": round(100 * run.accuracy(), 2),
        "knn": round(100 * run.accuracy("knn"), 2),
        "megabytes": round((sum(wire.down) + sum(wire.up)) / CLIENTS / 1e6, 2),
    }


def kept() -> dict[str, dict[str, dict[str, float]]]:
    """Row -> seed -> numbers."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def table() -> None:
    """Markdown: means over the seeds that there are."""
    print("| encoding, rounds | MB of a client | linear % | kNN % | seeds |\n|---|---|---|---|---|")
    for row, runs in ((row, list(kept().get(row, {}).values())) for row in ROWS):
        if runs:
            words = [f"{mean(runs, key):.1f}" for key in ("megabytes", "linear", "knn")]
            print(f"| {row} | {' | '.join(words)} | {len(runs)} |")


def mean(runs: list[dict[str, float]], key: str) -> float:
    """Over the seeds."""
    return statistics.mean(run[key] for run in runs)


def figure(path: Path) -> None:
    """The table as points."""
    from furlong.reports import figures

    there = {row: list(runs.values()) for row, runs in kept().items()}
    points = [
        (
            row,
            1e6 * mean(runs, "megabytes"),
            mean(runs, "linear") / 100,
            statistics.stdev(run["linear"] / 100 for run in runs) if len(runs) > 1 else None,
        )
        for row, runs in ((row, there[row]) for row in ROWS if row in there)
    ]
    figures.save(figures.versus(points, "bytes of one client, down and up", "linear probe"), path)


def main() -> None:
    """Run what is missing, then print."""
    words = parser(__doc__)
    words.add_argument("--root", default="../shared/data")
    words.add_argument("--data", default="cifar10")
    words.add_argument("--images", type=int, default=5000)
    words.add_argument("--seeds", default="0,1,2")
    words.add_argument("--only", default="", help="rows with this word")
    words.add_argument("--show", action="store_true", help="only print what there is")
    words.add_argument("--figure", type=Path)
    given = parse(words, data="shapes", images=40, seeds="0", only="int8, 5")
    for seed in given.seeds.split(",") if not given.show else ():
        for row in (row for row in ROWS if given.only in row):
            if given.smoke:
                print(row, measured(row, int(seed), given))
            elif seed not in kept().get(row, {}):
                found = measured(row, int(seed), given)
                rows = kept()  # another process may have added to it meanwhile
                rows.setdefault(row, {})[seed] = found
                KEPT.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
                print(row, seed, found, file=sys.stderr, flush=True)
    if not given.smoke:
        table()
    if given.figure:
        figure(given.figure)


if __name__ == "__main__":
    main()
