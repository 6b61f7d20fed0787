"""What the methods learn, and which claims of their papers hold (docs/results.md).

    python benchmarks/learning.py --part usual-shapes      # run what is missing, then print
    python benchmarks/learning.py --part fedca --only K=256 --seeds 0,1
    python benchmarks/learning.py --part table --show      # print what is there
    python benchmarks/learning.py --smoke                  # one tiny run on figures

A part is a list of rows, which are options of ``furlong run``. Two runs go side by side, with one
worker each. Of a finished run a few numbers are kept in ``benchmarks/learning/PART.json``, which is
committed: another machine goes on with the rest. A run that was stopped goes on where it was.
Parts whose name begins with ``choose`` are for choosing settings: seeds from 100 on, and tested on
images held out of the training images. All others have seeds 0 to 2 and the test images.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import parse, parser

KEPT = Path(__file__).parent / "learning"
METHODS = (
    *("fedsimclr", "ldawa", "fedmoco", "fcl", "fedca", "fedx"),
    *("fedbyol", "fedsimsiam", "fedbarlow", "fedvicreg", "fedu", "fedema"),
    *("fedswav", "feddc", "orchestra", "fedrot", "fedae", "mfcl"),
)
SUPERVISED = ("fedavg", "fedprox", "moon")
Options = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Runs that belong together: options that all of them have, and those of each row."""

    about: str
    all: Options
    rows: dict[str, Options]
    against: str = ""  # the row that the others' differences are taken from
    seeds: tuple[int, ...] = (0, 1, 2)
    pairs: tuple[tuple[str, str], ...] = field(default=())  # further differences: left minus right


CIFAR: Options = {"data": "cifar10", "data.images": 5000, "data.test-images": 5000}
TABLE: Options = {**CIFAR, "data.images": 10000, "data.test-images": 10000}
QUIET: Options = {"evaluate.knn-every": 10, "run.save-every": 5}
CHOOSE: Options = {"data.validation": "true", "data.images": 7000, "data.test-images": 2000}


def usual(**options: Any) -> Options:
    """A row of each self-supervised method with nothing but its usual settings."""
    return {name: {"method": name, **options} for name in METHODS}


def parts() -> dict[str, Part]:
    """Every experiment by its name."""
    return {
        "usual-shapes": Part(
            "`furlong run --method M`, nothing else", {"run.save-every": 100}, usual()
        ),
        "usual-cifar10": Part(
            "the same with `--data cifar10` and 5,000 images", {**CIFAR, **QUIET}, usual()
        ),
        "table": Part(
            "10,000 images of CIFAR-10, five clients with two classes each, 40 rounds",
            {**TABLE, **QUIET, "rounds": 40, "evaluate.few-labels": 0.01},
            {
                **usual(),
                **{name: {"method": name} for name in SUPERVISED},
                **{
                    f"{name}@{bound}": {"method": name, "bound": bound}
                    for name in ("fedsimclr", "fedbyol", "fedavg")
                    for bound in ("single", "pooled")
                },
            },
            against="fedsimclr",
        ),
        **claims(),
    }


def claims() -> dict[str, Part]:
    """The papers' claims, each in conditions in which it can show."""
    return {}


# ---------------------------------------------------------------- running


def name_of(row: str, seed: int) -> str:
    """The folder of a run."""
    return "-".join([*re.findall(r"[\w.@=]+", row.lower()), f"seed{seed}"])


def command(place: Path, options: Options, seed: int, root: str) -> list[str]:
    """One run, or the rest of one."""
    if (place / "checkpoints").exists():
        return ["resume", str(place), "--workers", "1"]
    if place.exists():
        shutil.rmtree(place)
    given = {**options, "seed": seed, "workers": 1, "train.server-threads": 1, "out": place}
    if given.get("data", "shapes") != "shapes":
        given["data.root"] = root
    return ["run", *(str(word) for key, value in given.items() for word in (f"--{key}", value))]


def numbers(place: Path) -> dict[str, Any]:
    """What is kept of a finished run: accuracies in percent, bytes, time, and what explains it."""
    summary = json.loads((place / "summary.json").read_text())
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    last = {k: v for line in lines for k, v in line.items() if isinstance(v, float)}
    return {
        **{
            f"{r['who']} {r['protocol']}"
            + (f" {r['labels']:g}" if r["labels"] != 1 else ""): round(100 * r["accuracy"], 2)
            for r in summary["results"]
            if "accuracy" in r
        },
        "sent": round((summary["bytes_up"] + summary["bytes_down"]) / summary["clients"] / 1e6, 1),
        "seconds": round(summary["seconds"], 1),
        "log": {
            k: round(v, 4)
            for k, v in sorted(last.items())
            if k not in ("seconds", "images_per_second", "bytes_up", "bytes_down")
        },
    }


def kept(part: str) -> dict[str, dict[str, Any]]:
    """Row -> seed -> numbers, of the runs that have finished."""
    path = KEPT / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(part: str, row: str, seed: int, found: dict[str, Any]) -> None:
    """Add a run's numbers to the part's file."""
    rows = kept(part)
    rows.setdefault(row, {})[str(seed)] = found
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{part}.json"
    path.with_suffix(".new").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    path.with_suffix(".new").replace(path)


def run(name: str, part: Part, given: Any) -> None:
    """The runs that are missing, the first seed first."""
    there, out = kept(name), given.out / name
    seeds = part.seeds if given.seeds is None else tuple(map(int, given.seeds.split(",")))
    todo = [
        (row, seed)
        for seed in seeds
        for row in part.rows
        if any(word in row for word in given.only.split(","))
        and str(seed) not in there.get(row, {})
    ]
    out.mkdir(parents=True, exist_ok=True)
    total, began, failed, going = len(todo), time.time(), 0, {}
    while todo or going:
        while todo and len(going) < given.jobs:
            row, seed = todo.pop(0)
            place = out / name_of(row, seed)
            words = command(place, {**part.all, **part.rows[row]}, seed, given.root)
            log = place.with_suffix(".log").open("ab")
            process = subprocess.Popen(
                [sys.executable, "-m", "furlong.cli", *words], stdout=log, stderr=log
            )
            going[process] = (row, seed, place)
        time.sleep(1)
        for process in [p for p in going if p.poll() is not None]:
            row, seed, place = going.pop(process)
            if process.returncode == 0:
                keep(name, row, seed, numbers(place))
                shutil.rmtree(place)
            failed += process.returncode != 0
            state = "done" if process.returncode == 0 else f"FAILED, see {place}.log"
            minutes = (time.time() - began) / 60
            left = f"{len(todo) + len(going)} of {total} left"
            print(f"{minutes:6.1f} min  {name}: {row}, seed {seed}: {state} ({left})", flush=True)
    if failed:
        raise SystemExit(f"{failed} of {total} runs failed; their logs are in {out}")


# ---------------------------------------------------------------- printing


def table(name: str, part: Part) -> str:
    """Markdown: means ± standard deviations over the seeds that have finished, and differences."""
    there = kept(name)
    columns = {
        "kNN %": "knn",
        "linear %": "linear",
        "linear, 1 % of labels": "linear 0.01",
    }
    used = {
        title: key
        for title, key in columns.items()
        if any(f"{who} {key}" in n for r in there.values() for n in r.values() for who in WHO)
    }
    extra = sorted(
        {k for runs in there.values() for n in runs.values() for k in n["log"]} & set(SHOWN)
    )
    lines = [
        f"**{name}**: {part.about}",
        "",
        _cells("row", *used, *(SHOWN[k] for k in extra), "MB sent", "seconds", "seeds"),
        _cells(*["---"] * (len(used) + len(extra) + 4)),
    ]
    every = [n for runs in there.values() for n in runs.values()]
    if every:
        random = {
            key: [n[f"random {key}"] for n in every if f"random {key}" in n]
            for key in used.values()
        }
        lines.append(
            _cells(
                "*untrained encoder*",
                *(_spread(random[key]) for key in used.values()),
                *[""] * (len(extra) + 3),
            )
        )
    for row in part.rows:
        runs = list(there.get(row, {}).values())
        if not runs:
            lines.append(_cells(row, "not run", *[""] * (len(used) + len(extra) + 2)))
            continue
        lines.append(
            _cells(
                row,
                *(_spread([value(n, key) for n in runs]) for key in used.values()),
                *(_spread([n["log"][k] for n in runs if k in n["log"]], 2) for k in extra),
                _spread([n["sent"] for n in runs]),
                _spread([n["seconds"] for n in runs], 0),
                str(len(runs)),
            )
        )
    wanted = [(row, part.against) for row in part.rows if part.against and row != part.against]
    for left, right in (*wanted, *part.pairs):
        lines += [""] if (left, right) == (*wanted, *part.pairs)[0] else []
        lines.append(difference(there, left, right, used))
    return "\n".join(lines)


WHO = ("federated", "single", "pooled", "random")
SHOWN = {
    "effective_rank": "effective rank",
    "dictionary_mass": "P_D",
    "dictionary_cosine": "dictionary cosine",
    "neighbour_purity": "purity",
    "neighbour_purity_encoded": "purity, encoded",
    "took_global_predictor": "share of Ψ",
}


def value(found: dict[str, Any], key: str) -> float:
    """The accuracy of the trained encoder, whoever trained it."""
    return next(
        (found[f"{who} {key}"] for who in WHO[:-1] if f"{who} {key}" in found), float("nan")
    )


def difference(there: dict[str, dict[str, Any]], left: str, right: str, used: Options) -> str:
    """The mean of the paired differences over common seeds, with a 95 % t-interval."""
    seeds = sorted(set(there.get(left, {})) & set(there.get(right, {})))
    words = []
    for title, key in used.items():
        gaps = [value(there[left][s], key) - value(there[right][s], key) for s in seeds]
        if len(gaps) > 1:
            from scipy.stats import t

            half = t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
            words.append(f"{title.removesuffix(' %')} {statistics.mean(gaps):+.1f} ± {half:.1f}")
        elif gaps:
            words.append(f"{title.removesuffix(' %')} {gaps[0]:+.1f} (one seed)")
    return f"- {left} − {right}: {', '.join(words) or 'not run'}"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def main() -> None:
    """Run and print."""
    words = parser(__doc__)
    words.add_argument("--part", default="", help=", ".join(parts()))
    words.add_argument(
        "--only", default="", help="rows with one of these words, comma between them"
    )
    words.add_argument("--seeds", default=None, help="such as 0,1,2; default: those of the part")
    words.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    words.add_argument("--root", default=os.environ.get("FURLONG_DATA", "../shared/data"))
    words.add_argument("--out", type=Path, default=Path("runs/learning"))
    words.add_argument("--show", action="store_true", help="only print what there is")
    given = parse(words, seeds="0", jobs=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.smoke:
        smoke(given)
        return
    chosen = given.part.split(",") if given.part else list(parts())
    for name in chosen:
        if not given.show:
            run(name, parts()[name], given)
        print(table(name, parts()[name]), end="\n\n")


def smoke(given: Any) -> None:
    """One tiny run, kept in a temporary folder."""
    global KEPT
    tiny = {"data.images": 40, "data.test-images": 20, "data.image-size": 16, "clients": 2}
    tiny |= {"rounds": 1, "batch-size": 8, "evaluate.probe": "none", "partition": "iid"}
    part = Part("one tiny run", tiny, {"fedsimclr": {"method": "fedsimclr"}})
    with tempfile.TemporaryDirectory() as scratch:
        given.out = KEPT = Path(scratch)
        run("smoke", part, given)
        print(table("smoke", part))


if __name__ == "__main__":
    main()
