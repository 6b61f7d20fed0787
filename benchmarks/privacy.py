"""Accuracy against ε, on CIFAR-10 and on five hospitals (docs/privacy.md).

    python benchmarks/privacy.py                         # run what is missing, then print
    python benchmarks/privacy.py --part hospitals --only "ε = 8" --seeds 0,1
    python benchmarks/privacy.py --show                  # print what is there
    python benchmarks/privacy.py --part choose           # by which the settings were chosen
    python benchmarks/privacy.py --smoke                 # two tiny runs on figures

Every row is one ``furlong run`` with one worker and one thread. Of a finished run a few numbers are
kept in ``benchmarks/privacy/PART.json``; a run that was stopped goes on where it was. The rows of a
part differ in the budget only: the one without is the same network, with group norms. Rows at level
client are not trained where the command refuses them; what it says of them is in the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measuring import parse, parser
from series import fill, interval, spread

KEPT = Path(__file__).parent / "privacy"
Options = dict[str, Any]
ALL: Options = {
    "method": "fedrot",  # its loss is a sum over images
    "method.mode": "all4",  # of four turns the gradients have more in common than of one
    "model.early-norm": "all_gn",
    "privacy.noise-from": "seed",  # so that the table can be made again
    "privacy.max-ratio": "inf",
    "evaluate.knn-every": 1000,
    "workers": 1,
    "rounds": 3,
    "epochs": 1,
}
PARTS: dict[str, Options] = {
    "cifar10": {
        "data": "cifar10",
        "data.images": 15000,
        "partition": "iid",
        "clients": 5,
        "batch-size": 250,
    },
    "choose": {
        "data": "cifar10",
        "data.images": 42000,
        "data.test-images": 2000,
        "data.validation": "true",
        "partition": "iid",
        "clients": 5,
        "batch-size": 400,
    },
    "hospitals": {
        "data": "parquet:{root}/lgg",
        "data.image-size": 32,
        "partition": "natural",
        "data.group-by": "site",
        "batch-size": 128,
        "rounds": 5,
    },
    "smoke": {
        "data": "shapes",
        "data.images": 48,
        "data.test-images": 20,
        "data.image-size": 16,
        "partition": "iid",
        "clients": 2,
        "batch-size": 12,
        "rounds": 1,
        "epochs": 1,
        "evaluate.probe": "none",
    },
}
ROWS: dict[str, Options] = {
    "no privacy": {},
    "record, ε = 8": {"privacy.level": "record", "privacy.epsilon": 8},
    "record, ε = 2": {"privacy.level": "record", "privacy.epsilon": 2},
    "record, ε = 1": {"privacy.level": "record", "privacy.epsilon": 1},
}
CLIENT: Options = {"privacy.level": "client", "privacy.epsilon": 8}
MEASURES = {
    "kNN": ("knn", "accuracy"),
    "linear": ("linear", "accuracy"),
    "AUROC": ("linear", "auroc"),
}
OTHER: dict[str, dict[str, Options]] = {  # rows of parts that have their own
    "choose": {
        "one random turn, no privacy": {
            "method.mode": "random",
            "data.images": 22000,
            "batch-size": 500,
            "rounds": 5,
            "epochs": 2,
        },
        "no privacy": {},
        "record, ε = 1": ROWS["record, ε = 1"],
    },
}


def rows(part: str) -> dict[str, Options]:
    """What is run, and how a row differs from the part."""
    return OTHER.get(part, ROWS)


def seeds(part: str, given: Any) -> list[str]:
    """For choosing, one that no other table has."""
    return ["100"] if part == "choose" else given.seeds.split(",")


def words(options: Options, root: str) -> list[str]:
    """As options of the command."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", str(value).replace("{root}", root))
    ]


def kept(part: str) -> dict[str, dict[str, Any]]:
    """Row -> seed -> numbers of the runs that have finished."""
    path = KEPT / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(part: str, row: str, seed: str, found: dict[str, Any]) -> None:
    """Add a run, in a file that is never half written."""
    rows = kept(part)
    rows.setdefault(row, {})[seed] = found
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{part}.json"
    path.with_suffix(".new").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".new").replace(path)


def call(*arguments: str) -> str:
    """What ``furlong ARGUMENTS`` prints, with one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "furlong.cli", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"furlong {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def train(part: str, row: str, seed: str, given: Any) -> dict[str, Any]:
    """The numbers of one run."""
    out = given.out / part / f"{row.replace(' ', '')}-{seed}"
    options = {**ALL, **PARTS[part], **rows(part)[row], "seed": seed, "out": out}
    options["data.root"] = given.root
    if part == "hospitals":
        del options["data.root"]
    load = os.getloadavg()[0]
    if (out / "config.toml").exists():
        call("resume", str(out))
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        call("run", *words(options, given.root))
    summary = json.loads((out / "summary.json").read_text())
    found = {
        f"{r['who']} {r['protocol']}": {k: r[k] for k in ("accuracy", "auroc") if r.get(k)}
        for r in summary["results"]
    }
    spent = summary.get("privacy") or {}
    shown = {name: spent[name] for name in ("epsilon", "delta", "noise", "ratio") if name in spent}
    shutil.rmtree(out)
    return {"results": found, "seconds": summary["seconds"], "load": round(load, 1), **shown}


def plan(part: str, given: Any) -> dict[str, Any]:
    """What the command predicts for level client, which it refuses to train."""
    options = {**ALL, **PARTS[part], **CLIENT, "data.root": given.root}
    if part == "hospitals":
        del options["data.root"]
    last = json.loads(call("privacy", "--json", *words(options, given.root)))[-1]
    return {name: last[name] for name in ("epsilon", "delta", "noise", "ratio")}


def table(part: str) -> str:
    """Markdown: means ± standard deviations over the seeds that have finished."""
    there = kept(part)
    lines = [
        f"**{part}**",
        "",
        "| row | ε | noise σ | noise to signal | kNN % | linear % | AUROC | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in [*rows(part), *([] if part in OTHER else ["client, ε = 8"])]:
        runs = list(there.get(row, {}).values())
        if not runs:
            lines.append(f"| {row} | not run | | | | | | 0 |")
            continue
        first = runs[0]
        low, high = first.get("noise", (0, 0))
        budget = [
            f"{first['epsilon']:.2f}" if "epsilon" in first else "∞",
            f"{low:.2f}" if high - low < 0.01 else f"{low:.2f} to {high:.2f}",
            f"{first.get('ratio', 0):,.1f}",
        ]
        scores = ["refused", "", "", "0"]
        if "results" in first:
            scores = [spread(numbers(runs, "federated", name)) for name in MEASURES]
            scores.append(str(len(runs)))
        lines.append(f"| {' | '.join([row, *budget, *scores])} |")
    # the same in all rows of a seed
    every = [*{k: n for runs in there.values() for k, n in runs.items() if "results" in n}.values()]
    if every:
        random = [spread(numbers(every, "random", name)) for name in MEASURES]
        lines.append(f"| *untrained encoder* | | | | {' | '.join(random)} | |")
    return "\n".join([*lines, *differences(part)])


def differences(part: str) -> list[str]:
    """What each row gains, and what its budget costs: paired over seeds, with 95 % intervals."""
    there, lines = kept(part), [""]
    plain = there.get("no privacy", {})
    for row in rows(part):
        runs = there.get(row, {})
        both = sorted(runs.keys() & plain.keys())
        gains, costs = [], []
        for name in MEASURES:
            ours = numbers(runs.values(), "federated", name)
            gains.append(_gap(name, ours, numbers(runs.values(), "random", name)))
            ours = numbers([runs[seed] for seed in both], "federated", name)
            theirs = numbers([plain[seed] for seed in both], "federated", name)
            costs.append(_gap(name, ours, theirs))
        if runs:
            lines.append(f"- {row} − untrained encoder: {', '.join(gains)}")
        if both and row != "no privacy":
            lines.append(f"- {row} − no privacy: {', '.join(costs)}")
    return lines


def numbers(runs: Iterable[dict[str, Any]], who: str, measure: str) -> list[float]:
    """A measure of every run, in per cent, as far as it is there."""
    protocol, what = MEASURES[measure]
    found = [run["results"].get(f"{who} {protocol}", {}).get(what) for run in runs]
    return [100 * value for value in found if value is not None]


def _gap(name: str, ours: list[float], theirs: list[float]) -> str:
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    return f"{name} {interval(gaps) if gaps else '–'}"


def work(part: str, given: Any) -> None:
    """The runs that are missing."""
    if part not in OTHER and "0" not in kept(part).get("client, ε = 8", {}):
        keep(part, "client, ε = 8", "0", plan(part, given))
    for seed in seeds(part, given):
        for row in rows(part):
            if given.only in row and seed not in kept(part).get(row, {}):
                began = time.time()
                keep(part, row, seed, train(part, row, seed, given))
                print(f"{part}: {row}, seed {seed}: {time.time() - began:.0f} s", flush=True)


def main() -> None:
    """Run and print."""
    global KEPT
    options = parser(__doc__)
    options.add_argument("--part", default="cifar10,hospitals")
    options.add_argument("--only", default="", help="rows with this in their name")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--root", default=os.environ.get("FURLONG_DATA", "../shared/data"))
    options.add_argument("--out", type=Path, default=Path("runs/privacy"))
    options.add_argument("--show", action="store_true", help="only print what there is")
    options.add_argument("--into", type=Path, help="a page that has a place for the tables")
    given = parse(options, part="smoke", seeds="0", only="8")
    with tempfile.TemporaryDirectory() as scratch:
        if given.smoke:
            given.out = KEPT = Path(scratch)
        for part in given.part.split(","):
            if not given.show:
                work(part, given)
            print(table(part), end="\n\n")
            if given.into is not None:
                fill(given.into, part, table(part))


if __name__ == "__main__":
    main()
