"""The papers' ablations at one small, equal budget: CIFAR-10, five clients with two classes each.

    python benchmarks/ablations.py --root DIR --out runs/ablations     # run (or go on), then print
    python benchmarks/ablations.py --out runs/ablations --table        # print what is there
    python benchmarks/ablations.py --smoke                             # one tiny run on figures

Runs are independent, so two of them run side by side with one worker each. A run that was
interrupted goes on where it stopped; one that has finished is not repeated.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import parse, parser

BUDGET = {
    "data": "cifar10",
    "data.images": 5000,
    "data.test-images": 5000,
    "data.augment": "moco_cifar",
    "partition": "classes:2",
    "clients": 5,
    "encoder": "small",
    "rounds": 20,
    "epochs": 1,
    "batch-size": 64,
    "optimiser.name": "adam",
    "optimiser.lr": 0.002,
    "optimiser.weight-decay": 5e-4,
    "train.server-threads": 1,
    "evaluate.knn-every": 1000,
    "run.save-every": 5,
}
SMOKE = {  # instead
    "data": "shapes",
    "data.images": 40,
    "data.test-images": 20,
    "data.image-size": 16,
    "clients": 2,
    "rounds": 1,
    "batch-size": 8,
    "evaluate.probe": "none",
    "partition": "iid",
}
PUBLIC = 3200  # CIFAR-10 training images that no client of any seed holds, in place of STL-10

Row = tuple[str, str, dict[str, Any]]  # table, name, options


def rows() -> list[Row]:
    """Every row of every table; temperatures as in the demo, the rest are the methods' defaults."""
    contrast = {"method.temperature": 0.2}
    fedca = {"method": "fedca", "method.align-epochs": 20, **contrast}
    fcl = {"method": "fcl", "method.bank": 1024, **contrast}
    mfcl = {
        "method": "mfcl",
        "rounds": 5,
        "method.server-epochs": 20,
        "method.representation": "rep16",
        "method.warmup": 0.1,
        "optimiser.lr": 0.001,
        "data.augment": "mfcl",
        "run.save-every": 1,
    }
    found: list[Row] = [
        ("FedSimCLR, early_norm (MFCL Table 7)", "bn", {"method": "fedsimclr", **contrast}),
        *(
            (
                "FedSimCLR, early_norm (MFCL Table 7)",
                norm,
                {"method": "fedsimclr", "model.early-norm": norm, **contrast},
            )
            for norm in ("gn", "pn")
        ),
        *(
            ("FedCA (Figure 5)", name, {**fedca, **options})
            for name, options in {  # (i) is FedSimCLR, the first row of all
                "one-sided contrast": {"method.dictionary": 0, "method.alignment": 0},
                "(ii) + alignment": {"method.dictionary": 0},
                "(iii) + dictionary": {"method.ensembling": 0, "method.alignment": 0},
                "(iv) + dictionary, ensembling": {"method.alignment": 0},
                "(v) all": {},
                "(iv) with K = 64, the batch size": {
                    "method.dictionary": 64,
                    "method.alignment": 0,
                },
            }.items()
        ),
        *(
            ("FCL (Figure 5)", name, {**fcl, **options})
            for name, options in {
                "CL": {"method.fusion": "false", "method.matching": 0},
                "CL+FF": {"method.matching": 0},
                "CL+FF+NM": {},
                "CL+FF+NM, remote only": {"method.negatives": "remote_only"},
            }.items()
        ),
        ("FedU (Table 4 and DAPU)", "online, online, dapu (FedU)", {"method": "fedu"}),
        *(
            (
                "FedU (Table 4 and DAPU)",
                f"{source}, {update}, {predictor}",
                {
                    "method": "fedu",
                    "method.aggregate-from": source,
                    "method.update": update,
                    "method.predictor": predictor,
                },
            )
            for source, update, predictor in itertools.product(
                ("online", "target"), ("online", "target", "both"), ("global", "local")
            )
        ),
        *(
            (
                "MFCL (Table 2's norms)",
                f"{norm}, bn_stats {stats}" if norm == "bn" else norm,
                {**mfcl, "method.norm": norm, "method.bn-stats": stats},
            )
            for norm, stats in (
                *(("pn", "average"), ("gn", "average"), ("bn", "average")),
                *(("bn", "local"), ("none", "average")),
            )
        ),
        (
            "MFCL (Table 2's norms)",
            "pn, views encoded together (pair_codes = true)",
            {**mfcl, "method.norm": "pn", "method.pair-codes": "true"},
        ),
    ]
    return found


def folder(out: Path, row: Row, seed: int) -> Path:
    """Where a run lies."""
    table, name, _ = row
    words = re.findall(r"\w+", f"{table.split(' ')[0]} {name}".lower())
    return out / f"{'-'.join(words)}-seed{seed}"


def public(out: Path, root: str, seeds: int) -> Path:
    """A parquet file of training images that are in no seed's sample."""
    path = out / "public.parquet"
    if not path.exists():
        import pyarrow as pa
        import pyarrow.parquet as pq
        import torch
        from PIL import Image

        from furlong.data.images import load

        used = set()
        for seed in range(seeds):
            sample = load("cifar10", "train", root=root, limit=BUDGET["data.images"], seed=seed)
            used |= {image.numpy().tobytes() for image in sample.pixels}
        whole = load("cifar10", "train", root=root)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1)).tolist()
        free = [i for i in order if whole.pixels[i].numpy().tobytes() not in used][:PUBLIC]
        images = []
        for i in free:
            buffer = io.BytesIO()
            Image.fromarray(whole.pixels[i].permute(1, 2, 0).numpy()).save(buffer, "PNG")
            images.append({"bytes": buffer.getvalue(), "path": None})
        pq.write_table(pa.table({"image": images}), path)
    return path


def start(out: Path, row: Row, seed: int, root: str) -> subprocess.Popen[bytes]:
    """One run, or the rest of one."""
    place = folder(out, row, seed)
    if (place / "checkpoints").exists():
        command = ["resume", str(place), "--workers", "1"]
    else:
        if place.exists():
            subprocess.run(["rm", "-r", str(place)], check=True)
        options = {**BUDGET, "seed": seed, "workers": 1, "out": place, **row[2]}
        if options["data"] != "shapes":
            options["data.root"] = root
        if row[2]["method"] == "fedca" and row[2].get("method.alignment") != 0:
            options["public"] = f"parquet:{out / 'public.parquet'}"
        command = ["run", *(str(word) for k, v in options.items() for word in (f"--{k}", v))]
    log = (out / f"{place.name}.log").open("ab")
    return subprocess.Popen([sys.executable, "-m", "furlong.cli", *command], stdout=log, stderr=log)


def run(out: Path, root: str, seeds: int, only: str) -> None:
    """The runs that are missing, two at a time, the first seed first."""
    out.mkdir(parents=True, exist_ok=True)
    todo = [
        (row, seed)
        for seed in range(seeds)
        for row in rows()
        if only in f"{row[0]}: {row[1]}" and not (folder(out, row, seed) / "summary.json").exists()
    ]
    if any(row[2]["method"] == "fedca" for row, _ in todo):
        public(out, root, seeds)
    total, began, failed, going = len(todo), time.time(), 0, {}
    while todo or going:
        while todo and len(going) < (os.cpu_count() or 1):
            row, seed = todo.pop(0)
            going[start(out, row, seed, root)] = (row, seed)
        time.sleep(1)
        for process in [p for p in going if p.poll() is not None]:
            row, seed = going.pop(process)
            failed += process.returncode != 0
            state = "done" if process.returncode == 0 else f"FAILED ({process.returncode})"
            minutes = (time.time() - began) / 60
            left = len(todo) + len(going)
            print(
                f"{minutes:6.1f} min  {state}  {row[0]}: {row[1]}, seed {seed}  ({left} of {total} "
                "left)"
            )
            sys.stdout.flush()
    if failed:
        raise SystemExit(f"{failed} of {total} runs failed; their logs are in {out}")


def table(out: Path, seeds: int) -> str:
    """Markdown: mean ± standard deviation over the seeds that have finished."""
    lines: list[str] = []
    for name, group in itertools.groupby(rows(), key=lambda row: row[0]):
        lines += [
            "",
            f"**{name}**",
            "",
            "| setting | kNN % | linear % | random kNN / linear % | sent per client | seeds |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for row in group:
            found = []
            for seed in range(seeds):
                path = folder(out, row, seed) / "summary.json"
                if path.exists():
                    found.append(json.loads(path.read_text()))
            if not found:
                lines.append(f"| {row[1]} | not run | | | | 0 |")
                continue
            cells = {
                (who, protocol): [
                    100 * r["accuracy"]
                    for s in found
                    for r in s["results"]
                    if r["who"] == who and r["protocol"] == protocol
                ]
                for who in ("random", "federated")
                for protocol in ("knn", "linear")
            }
            knn, linear = (_spread(cells["federated", p]) for p in ("knn", "linear"))
            random = " / ".join(_mean(cells["random", p]) for p in ("knn", "linear"))
            sent = statistics.mean((s["bytes_up"] + s["bytes_down"]) / s["clients"] for s in found)
            lines.append(
                f"| {row[1]} | {knn} | {linear} | {random} | {sent / 1e6:.1f} MB | {len(found)} |"
            )
    return "\n".join(lines[1:])


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" if values else "–"


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{_mean(values)}{deviation}"


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--root", default=os.environ.get("FURLONG_DATA", "../shared/data/cifar10"))
    words.add_argument("--out", type=Path, default=Path("runs/ablations"))
    words.add_argument("--seeds", type=int, default=2)
    words.add_argument("--only", default="", help="rows whose 'table: name' has this text")
    words.add_argument("--table", action="store_true", help="only print what there is")
    given = parse(words, seeds=1, only="Table 7): bn")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        if given.smoke:
            BUDGET.update(SMOKE)
            given.out = Path(scratch)
        if not given.table:
            run(given.out, given.root, given.seeds, given.only)
        print(table(given.out, given.seeds))


if __name__ == "__main__":
    main()
