"""Accuracy against ε, on CIFAR-10 and on five hospitals (docs/privacy.md).

    python benchmarks/privacy.py                         # run what is missing, then print
    python benchmarks/privacy.py --part hospitals --only "ε = 8" --seeds 0,1
    python benchmarks/privacy.py --show                  # print what is there
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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import parse, parser

KEPT = Path(__file__).parent / "privacy"
Options = dict[str, Any]
ALL: Options = {
    "method": "fedrot",  # its loss is a sum over images, and it needs one pass per image
    "method.mode": "random",
    "model.early-norm": "all_gn",
    "privacy.noise-from": "seed",  # so that the table can be made again
    "privacy.max-ratio": "inf",
    "evaluate.knn-every": 1000,
    "workers": 1,
    "rounds": 5,
    "epochs": 2,
}
PARTS: dict[str, Options] = {
    "cifar10": {
        "data": "cifar10",
        "data.images": 5000,
        "data.test-images": 2000,
        "partition": "iid",
        "clients": 5,
        "batch-size": 200,
    },
    "hospitals": {
        "data": "parquet:{root}/lgg",
        "data.image-size": 32,
        "partition": "natural",
        "data.group-by": "site",
        "batch-size": 128,
        "epochs": 1,
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
    options = {**ALL, **PARTS[part], **ROWS[row], "seed": seed, "out": out, "data.root": given.root}
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
    for row in [*ROWS, "client, ε = 8"]:
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
            pairs = (("knn", "accuracy"), ("linear", "accuracy"), ("linear", "auroc"))
            scores = [_spread(runs, "federated", *pair) for pair in pairs] + [str(len(runs))]
        lines.append(f"| {' | '.join([row, *budget, *scores])} |")
    # the same in all rows of a seed
    every = [*{k: n for runs in there.values() for k, n in runs.items() if "results" in n}.values()]
    if every:
        random = [
            _spread(every, "random", k, w)
            for k, w in (("knn", "accuracy"), ("linear", "accuracy"), ("linear", "auroc"))
        ]
        lines.append(f"| *untrained encoder* | | | | {' | '.join(random)} | |")
    return "\n".join(lines)


def _spread(runs: list[dict[str, Any]], who: str, protocol: str, what: str) -> str:
    found = [n["results"].get(f"{who} {protocol}", {}).get(what) for n in runs]
    values = [100 * value for value in found if value is not None]
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def work(part: str, given: Any) -> None:
    """The runs that are missing."""
    if "0" not in kept(part).get("client, ε = 8", {}):
        keep(part, "client, ε = 8", "0", plan(part, given))
    for seed in given.seeds.split(","):
        for row in ROWS:
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
    given = parse(options, part="smoke", seeds="0", only="8")
    with tempfile.TemporaryDirectory() as scratch:
        if given.smoke:
            given.out = KEPT = Path(scratch)
        for part in given.part.split(","):
            if not given.show:
                work(part, given)
            print(table(part), end="\n\n")


if __name__ == "__main__":
    main()
