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

import io
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import parse, parser

KEPT = Path(__file__).parent / "learning"
METHODS = (
    *("furlong", "fedsimclr", "ldawa", "fedmoco", "fcl", "fedca", "fedx", "fedsc", "ssd"),
    *("fedbyol", "fedsimsiam", "fedbarlow", "fedvicreg", "fedu", "fedema", "fedu2"),
    *("fedswav", "feddc", "orchestra", "fedrot", "fedae", "fedmae", "mfcl"),
)
SUPERVISED = ("fedavg", "fedprox", "moon")
HELD = "held-out"  # public images: CIFAR-10 training images that no client of any seed holds
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
    more: Callable[[Path], dict[str, Any]] = lambda _: {}  # further numbers of a finished run


CIFAR: Options = {"data": "cifar10", "data.images": 5000, "data.test-images": 5000}
TABLE: Options = {**CIFAR, "data.images": 10000, "data.test-images": 10000}
QUIET: Options = {"evaluate.knn-every": 10, "run.save-every": 5}
SHORT: dict[str, dict[str, Options]] = {
    "fedbarlow": {
        "rate 0.001, batch 32, 60 rounds": {
            "optimiser.lr": 0.001,
            "batch-size": 32,
            "rounds": 60,
        },
        "60 rounds": {"rounds": 60},
        "off-diagonal 0.02": {"method.off-diagonal": 0.02},
        "head 512-512": {"method.projection-head": "mlp:512:512"},
    },
    "fedsimsiam": {
        "batch 16": {"batch-size": 16},
        "batch 16, 40 rounds, rate 0.001": {
            "batch-size": 16,
            "rounds": 40,
            "optimiser.lr": 0.001,
        },
        "constant rate": {"optimiser.schedule": "constant"},
    },
    "orchestra": {
        "80 rounds": {"rounds": 80},
        "rate 0.001": {"optimiser.lr": 0.001},
        "batch 16": {"batch-size": 16},
    },
    "fedmae": {
        f"patches of 4, rate {rate}, {rounds} rounds": {
            "encoder": "vit_mini_patch4",
            "optimiser.lr": rate,
            "rounds": rounds,
        }
        for rate, rounds in ((0.001, 20), (0.002, 20), (0.002, 40))
    },
}
CHOOSE: Options = {"data.validation": "true", "data.images": 7000, "data.test-images": 2000}


def usual(**options: Any) -> Options:
    """A row of each self-supervised method with nothing but its usual settings."""
    return {name: {"method": name, **options} for name in METHODS}


def parts() -> dict[str, Part]:
    """Every experiment by its name."""
    return {
        "choose-shapes": Part(
            "usual settings on figures that no reported run has",
            {**CHOOSE, **QUIET},
            usual(),
            seeds=(101,),
        ),
        "choose-cifar10": Part(
            "the same on CIFAR-10", {**CIFAR, **CHOOSE, **QUIET}, usual(), seeds=(101,)
        ),
        "choose-short": Part(
            "methods whose usual settings gain too little on CIFAR-10, with others",
            {**CIFAR, **CHOOSE, **QUIET},
            {
                f"{method}, {name}": {"method": method, **options}
                for method, tries in SHORT.items()
                for name, options in tries.items()
            },
            seeds=(101,),
        ),
        "choose-demo": Part(
            "what the demo could show: who trained, with which method and how many rounds",
            {**CHOOSE, **QUIET},
            {
                f"{method}@{bound}, {clients} clients": {
                    "method": method,
                    "rounds": rounds,
                    "bound": bound,
                    "clients": clients,
                }
                for clients in (5, 20)
                for method, rounds in (("furlong", 12), ("fedsimclr", 24))
                for bound in ("none", "single", "pooled")
            }
            | {
                f"furlong, {name}": {"method": "furlong", "rounds": 12, **options}
                for name, options in {
                    "momentum 0.8": {"server.momentum": 0.8},
                    "momentum 0.9": {"server.momentum": 0.9},
                    "batches of 16": {"batch-size": 16},
                    "rate 0.004": {"optimiser.lr": 0.004},
                    "24 rounds of two views": {"method.views": 2, "rounds": 24},
                }.items()
            }
            | {
                f"fedsimclr, {name}": {"method": "fedsimclr", "rounds": 24, **options}
                for name, options in {
                    "merged as in L-DAWA": {"server.rule": "ldawa"},
                    "momentum 0.6": {"server.rule": "momentum", "server.momentum": 0.6},
                    "momentum 0.75": {"server.rule": "momentum", "server.momentum": 0.75},
                    "momentum 0.85": {"server.rule": "momentum", "server.momentum": 0.85},
                    "batches of 16": {"batch-size": 16},
                    "batches of 16, alone": {"batch-size": 16, "bound": "single"},
                }.items()
            },
            seeds=(100,),
        ),
        "usual-shapes": Part(
            "`furlong run --method M`, nothing else", {"run.save-every": 100}, usual()
        ),
        "usual-cifar10": Part(
            "the same with `--data cifar10` and 5,000 images", {**CIFAR, **QUIET}, usual()
        ),
        "table": Part(
            "10,000 images of CIFAR-10, five clients with two classes each, 40 rounds",
            {**TABLE, **QUIET, "rounds": 40, "evaluate.also": "semi-1"},
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
    """The papers' claims, in conditions in which they can show (155 steps per round)."""
    long = {**TABLE, **QUIET, "rounds": 6, "epochs": 5, "batch-size": 64, "run.save-every": 1}
    fedca = {"method": "fedca", "public": HELD}
    adam = {"optimiser.name": "adam", "optimiser.lr": 0.001, "optimiser.weight-decay": 1e-6}
    half = {"method.temperature": 0.5, "method.projection-head": "mlp:256:128"}
    intervals = {f"{r} × {e}": {"rounds": r, "epochs": e} for r, e in ((20, 1), (4, 5), (2, 10))}
    fcl = {"method": "fcl", "method.bank": 1024, "method.temperature": 0.1}
    cl = {**fcl, "method.fusion": "false", "method.matching": 0}
    table4 = {
        "FedU, μ 0.4": {"method.threshold-kind": "absolute", "method.threshold": 0.4},
        "FedU, μ 0.75 of the first": {},
        "online, online, global (FedBYOL)": {"method.predictor": "global"},
        "online, online, local": {"method.predictor": "local"},
        "online, both, global": {"method.predictor": "global", "method.update": "both"},
        "online, target, global": {"method.predictor": "global", "method.update": "target"},
        "target, target, global": {
            "method.predictor": "global",
            "method.update": "target",
            "method.aggregate-from": "target",
        },
        "target, both, global": {
            "method.predictor": "global",
            "method.update": "both",
            "method.aggregate-from": "target",
        },
    }
    mfcl = {**CIFAR, **QUIET, "method": "mfcl"}
    untrained = {"method.train-sensor": "false"}
    simclr = {"method": "fedsimclr"}
    return {
        "fedca": Part(
            "Figure 5, 155 steps per round, six rounds; τ 0.5, Adam 1e-3, decay 1e-6",
            {**long, **adam, **half},
            {
                "(i) FedSimCLR": simclr,
                "(i) one-sided": {"method": "fedca", "method.dictionary": 0, "method.alignment": 0},
                "(ii) alignment": {**fedca, "method.dictionary": 0},
                "(iii) dictionary": {
                    "method": "fedca",
                    "method.ensembling": 0,
                    "method.alignment": 0,
                },
                "(iv) dictionary, ensembling": {"method": "fedca", "method.alignment": 0},
                "(v) all": fedca,
                "(v) K=256": {**fedca, "method.dictionary": 256},
                "(v) without own rows": {**fedca, "method.exclude-own": "true"},
            },
            against="(i) FedSimCLR",
            pairs=(
                ("(v) all", "(ii) alignment"),
                ("(v) K=256", "(ii) alignment"),
                ("(v) without own rows", "(ii) alignment"),
                ("(ii) alignment", "(i) one-sided"),
                ("(iv) dictionary, ensembling", "(iii) dictionary"),
            ),
        ),
        "fedca-refresh": Part(
            "how often the dictionary is made anew, at equal steps (rounds × epochs)",
            {**long, **adam, **half},
            {
                **{f"FedCA {name}": {**fedca, **how} for name, how in intervals.items()},
                **{f"FedSimCLR {name}": {**simclr, **how} for name, how in intervals.items()},
            },
            pairs=tuple((f"FedCA {name}", f"FedSimCLR {name}") for name in intervals),
        ),
        "fcl": Part(
            "Figure 5, 155 steps per round, six rounds; τ 0.1, bank 1,024, matching from round 2",
            long,
            {
                "CL, iid": {**cl, "partition": "iid"},
                "CL, one class per client": {**cl, "partition": "classes:1", "clients": 10},
                "CL": cl,
                **{
                    f"CL+FF{'+NM' if matching else ''}, {encoding}": {
                        **fcl,
                        "method.encoding": encoding,
                        **({"method.matching-from": 1} if matching else {"method.matching": 0}),
                    }
                    for encoding in ("none", "inside")
                    for matching in (False, True)
                },
            },
            against="CL",
        ),
        "fedu": Part(
            "Table 4 (aggregated, overwritten, predictor) and DAPU; one local epoch, as there",
            {**CIFAR, **QUIET, "rounds": 40, "method": "fedu"},
            table4,
            against="online, online, global (FedBYOL)",
            pairs=(("FedU, μ 0.75 of the first", "online, online, local"),),
        ),
        "mfcl": Part(
            "Table 2's norms, with a trained and with an untrained sensor",
            mfcl,
            {
                "pn": {},
                "gn": {"method.norm": "gn"},
                "bn": {"method.norm": "bn"},
                "none": {"method.norm": "none"},
                "pn, untrained": untrained,
                "gn, untrained": {**untrained, "method.norm": "gn"},
                "none, untrained": {**untrained, "method.norm": "none"},
                "pn, views encoded together": {"method.pair-codes": "true"},
            },
            against="gn",
            pairs=(("pn", "pn, untrained"), ("none", "none, untrained")),
        ),
        "mfcl-table7": Part(
            "norms after the first two convolutions of FedSimCLR's encoder",
            {**CIFAR, **QUIET, **simclr},
            {norm: {"model.early-norm": norm} for norm in ("bn", "gn", "pn")},
            against="gn",
        ),
    }


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
    if given.get("public") == HELD:
        given["public"] = f"parquet:{public(place.parent.parent, given['data.images'], root)}"
    return ["run", *(str(word) for key, value in given.items() for word in (f"--{key}", value))]


def public(out: Path, images: int, root: str, count: int = 3200) -> Path:
    """A parquet file of training images that are in no seed's sample, in place of STL-10."""
    path = out / f"public-{images}.parquet"
    if not path.exists():
        import pyarrow as pa
        import pyarrow.parquet as pq
        import torch
        from PIL import Image

        from furlong.data.images import load

        used = set()
        for seed in range(3):
            sample = load("cifar10", "train", root=root, limit=images, seed=seed)
            used |= {image.numpy().tobytes() for image in sample.pixels}
        whole = load("cifar10", "train", root=root)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1)).tolist()
        free = [i for i in order if whole.pixels[i].numpy().tobytes() not in used][:count]
        encoded = []
        for i in free:
            buffer = io.BytesIO()
            Image.fromarray(whole.pixels[i].permute(1, 2, 0).numpy()).save(buffer, "PNG")
            encoded.append({"bytes": buffer.getvalue(), "path": None})
        pq.write_table(pa.table({"image": encoded}), path)
    return path


def numbers(place: Path) -> dict[str, Any]:
    """What is kept of a finished run: accuracies in percent, bytes, time, and what explains it."""
    summary = json.loads((place / "summary.json").read_text())
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    last = {k: v for line in lines for k, v in line.items() if isinstance(v, float)}
    return {
        **{
            f"{r['who']} {r['protocol']}": round(100 * r["accuracy"], 2)
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


def ended(process: subprocess.Popen[bytes]) -> float | None:
    """Processor seconds of a process and its children, if it has ended."""
    which, status, used = os.wait4(process.pid, os.WNOHANG)
    if not which:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return round(used.ru_utime + used.ru_stime, 1)


def run(name: str, part: Part, given: Any) -> None:
    """The runs that are missing, the first seed first."""
    there, out = kept(name), given.out / name
    seeds = part.seeds if given.seeds is None else tuple(map(int, given.seeds.split(",")))
    todo = [
        (row, seed)
        for seed in seeds
        for row in part.rows
        if any(row == w[1:] if w.startswith("=") else w in row for w in given.only.split(","))
        and str(seed) not in there.get(row, {})
    ]
    out.mkdir(parents=True, exist_ok=True)
    total, began, failed, going = len(todo), time.time(), 0, {}
    while todo or going:
        while todo and len(going) < given.jobs:
            row, seed = todo.pop(0)
            place = out / name_of(row, seed)
            whole = not (place / "checkpoints").exists()
            words = command(place, {**part.all, **part.rows[row]}, seed, given.root)
            log = place.with_name(f"{place.name}.log").open("ab")
            process = subprocess.Popen(
                [sys.executable, "-m", "furlong.cli", *words], stdout=log, stderr=log
            )
            going[process] = (row, seed, place, whole)
        time.sleep(1)
        for process, processor in [(p, s) for p in going if (s := ended(p)) is not None]:
            row, seed, place, whole = going.pop(process)
            if process.returncode == 0:
                found = {**numbers(place), **part.more(place)}
                if whole:  # else it has the time of the run's last part only
                    found["processor"] = processor
                keep(name, row, seed, found)
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
        "1 % of labels %": "semi-1",
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
        cells("row", *used, *(SHOWN[k] for k in extra), "MB sent", "processor min", "seeds"),
        cells(*["---"] * (len(used) + len(extra) + 4)),
    ]
    ordered = [there[row] for row in reversed(part.rows) if row in there]  # the first row wins
    for who, label in (("random", "untrained encoder"), ("initial", "what --init gave")):
        found = {key: list(_once(ordered, f"{who} {key}").values()) for key in used.values()}
        if any(found.values()):
            empty = [""] * (len(extra) + 3)
            lines.append(cells(f"*{label}*", *(spread(v) for v in found.values()), *empty))
    for row in part.rows:
        runs = list(there.get(row, {}).values())
        if not runs:
            lines.append(cells(row, "not run", *[""] * (len(used) + len(extra) + 2)))
            continue
        lines.append(
            cells(
                row,
                *(spread([value(n, key) for n in runs]) for key in used.values()),
                *(spread([n["log"][k] for n in runs if k in n["log"]], 2) for k in extra),
                spread([n["sent"] for n in runs]),
                spread([n.get("processor", float("nan")) / 60 for n in runs]),
                str(len(runs)),
            )
        )
    wanted = [(row, part.against) for row in part.rows if part.against and row != part.against]
    for left, right in (*wanted, *part.pairs):
        lines += [""] if (left, right) == (*wanted, *part.pairs)[0] else []
        lines.append(difference(there, left, right, used))
    return "\n".join(lines)


def _once(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Seed -> a number that all runs of a seed have in common, or that of the last row."""
    return {seed: n[name] for runs in rows for seed, n in runs.items() if name in n}


WHO = ("federated", "alone", "pooled", "random")
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


def cells(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def spread(values: list[float], digits: int = 1) -> str:
    """Mean ± standard deviation."""
    values = [value for value in values if value == value]  # NaN: a row has no such number
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def main(about: str | None, series: dict[str, Part], keep_in: Path, out: Path) -> None:
    """Run and print the parts of ``series``; numbers are kept in the folder ``keep_in``."""
    global KEPT
    KEPT = keep_in
    words = parser(about)
    words.add_argument("--part", default="", help=", ".join(series))
    words.add_argument(
        "--only", default="", help="rows with one of these words, comma between; =ROW: that row"
    )
    words.add_argument("--seeds", default=None, help="such as 0,1,2; default: those of the part")
    words.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    words.add_argument("--root", default=os.environ.get("FURLONG_DATA", "../shared/data"))
    words.add_argument("--out", type=Path, default=out)
    words.add_argument("--show", action="store_true", help="only print what there is")
    given = parse(words, seeds="0", jobs=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.smoke:
        smoke(given)
        return
    chosen = given.part.split(",") if given.part else list(series)
    for name in chosen:
        if not given.show:
            run(name, series[name], given)
        print(table(name, series[name]), end="\n\n")


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
    main(__doc__, parts(), KEPT, Path("runs/learning"))
