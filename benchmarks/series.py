"""Series of runs: rows of options × seeds, kept as a few numbers each, and printed as tables.

``learning.py``, ``recipe.py`` and ``hospitals.py`` have the rows. Two runs go side by side, with
one worker each. Of a finished run a few numbers are kept in a file PART.json, which is committed:
another machine goes on with the rest. A run that was stopped goes on where it was.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from measuring import parse, parser
from scipy.stats import t

HELD = "held-out"  # public images: CIFAR-10 training images that no client of any seed holds
Options = dict[str, Any]
Kept = dict[str, dict[str, dict[str, Any]]]  # row -> seed -> numbers of a run that has finished


@dataclass(frozen=True)
class Part:
    """Runs that belong together: options that all of them have, and those of each row."""

    about: str
    all: Options
    rows: dict[str, Options]
    against: str = ""  # the row that the others' differences are taken from
    seeds: tuple[int, ...] = (0, 1, 2)
    pairs: tuple[tuple[str, str], ...] = field(default=())  # further differences: left minus right
    gains: bool = False  # before → after training, for rows that differ before training, too
    more: Callable[[Path], dict[str, Any]] = lambda _: {}  # further numbers of a finished run


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
        given["data.cache"] = place.parent.parent / "decoded"  # once for all runs
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
    for name in AVERAGED:
        if found := [line[name] for line in lines[1:] if name in line]:
            last[name] = statistics.mean(found)
    if angles := [line["angles"] for line in lines if line.get("angles")]:
        last["angle"] = angles[-1][2]  # the median
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


def kept(path: Path) -> Kept:
    """What a file has of the runs that have finished."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, row: str, seed: int, found: dict[str, Any]) -> None:
    """Add a run's numbers to a file."""
    rows = kept(path)
    rows.setdefault(row, {})[str(seed)] = found
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    path.with_suffix(".new").replace(path)


def ended(process: subprocess.Popen[bytes]) -> float | None:
    """Processor seconds of a process and its children, if it has ended."""
    which, status, used = os.wait4(process.pid, os.WNOHANG)
    if not which:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return round(used.ru_utime + used.ru_stime, 1)


class Run(NamedTuple):
    """A run that is to be made: where its numbers go, and what it is of."""

    path: Path
    part: Part
    row: str
    seed: int


def missing(parts: Mapping[Path, Part], given: Any) -> list[Run]:
    """The runs that the files do not have: the first seed of all parts first."""
    asked = re.split(r",(?! )", given.only)
    todo = []
    for path, part in parts.items():
        there = kept(path)
        seeds = part.seeds if given.seeds is None else tuple(map(int, given.seeds.split(",")))
        todo += [
            Run(path, part, row, seed)
            for seed in seeds
            for row in part.rows
            if any(row == word[1:] if word.startswith("=") else word in row for word in asked)
            and str(seed) not in there.get(row, {})
        ]
    return sorted(todo, key=lambda run: run.seed)


def run(parts: Mapping[Path, Part], given: Any) -> None:
    """Make the runs that are missing in the files."""
    todo = missing(parts, given)
    total, began, failed = len(todo), time.time(), 0
    going: dict[subprocess.Popen[bytes], tuple[Run, Path, bool]] = {}
    while todo or going:
        while todo and len(going) < given.jobs:
            path, part, row, seed = each = todo.pop(0)
            place = given.out / path.stem / name_of(row, seed)
            place.parent.mkdir(parents=True, exist_ok=True)
            whole = not (place / "checkpoints").exists()
            words = command(place, {**part.all, **part.rows[row]}, seed, given.root)
            log = place.with_name(f"{place.name}.log").open("ab")
            process = subprocess.Popen(
                [sys.executable, "-m", "furlong.cli", *words], stdout=log, stderr=log
            )
            going[process] = each, place, whole
        time.sleep(1)
        for process, processor in [(p, s) for p in going if (s := ended(p)) is not None]:
            (path, part, row, seed), place, whole = going.pop(process)
            if process.returncode == 0:
                found = {**numbers(place), **part.more(place)}
                if whole:  # else it has the time of the run's last part only
                    found["processor"] = processor
                keep(path, row, seed, found)
                shutil.rmtree(place)
            failed += process.returncode != 0
            state = "done" if process.returncode == 0 else f"FAILED, see {place}.log"
            minutes = (time.time() - began) / 60
            left = f"{len(todo) + len(going)} of {total} left"
            print(
                f"{minutes:6.1f} min  {path.stem}: {row}, seed {seed}: {state} ({left})", flush=True
            )
    if failed:
        raise SystemExit(f"{failed} of {total} runs failed; their logs are in {given.out}")


# ---------------------------------------------------------------- printing


def table(name: str, part: Part, there: Kept) -> str:
    """Markdown: means ± standard deviations over the seeds that have finished, and differences."""
    found = [runs for row in part.rows for runs in there.get(row, {}).values()]
    if not found:
        return f"**{name}**: {part.about}\n\nNot run yet."
    titles = {t: k for t, k in COLUMNS.items() if any(f"{w} {k}" in n for n in found for w in WHO)}
    # what a single row has is no column
    rows = [next(iter(there[row].values()))["log"] for row in part.rows if there.get(row)]
    explained = ["effective_rank"] if part.gains else SHOWN
    logged = [key for key in explained if sum(key in log for log in rows) >= min(2, len(rows))]
    measured = before_and_after if part.gains else after
    more = ["gain"] if part.gains else []
    more += [f"linear − {part.against}"] if part.against else []
    header = [*titles, *more, *(SHOWN[key] for key in logged), "MB sent", "processor min", "seeds"]
    lines = [
        f"**{name}**: {part.about}",
        "",
        cells("row", *header),
        cells(*["---"] * (len(header) + 1)),
    ]
    if not part.gains:
        lines += untrained(part, there, titles, len(header) - len(titles))
    for row in part.rows:
        runs = list(there.get(row, {}).values())
        if not runs:
            continue
        rest = [interval(paired(there, row, part.against, "linear"))] if part.against else []
        rest = [cell.removesuffix(ONE) for cell in rest]  # there is a column of seeds
        rest += [spread([n["log"].get(key, NONE) for n in runs], 2) for key in logged]
        rest.append(spread([n["sent"] for n in runs]))
        rest.append(spread([n.get("processor", NONE) / 60 for n in runs]))
        lines.append(cells(row, *measured(runs, titles), *rest, str(len(runs))))
    behind = [
        difference(there, *pair, titles)
        for pair in part.pairs
        if paired(there, *pair, *list(titles.values())[:1])
    ]
    if missing := [row for row in part.rows if not there.get(row)]:
        behind.append(f"- Not run: {'; '.join(missing)}.")
    return "\n".join([*lines, *([""] if behind else []), *behind])


def after(runs: list[dict[str, Any]], titles: Options) -> list[str]:
    """A cell for each protocol: accuracy of the trained encoder."""
    return [spread([value(n, key) for n in runs]) for key in titles.values()]


def before_and_after(runs: list[dict[str, Any]], titles: Options) -> list[str]:
    """A cell for each protocol, before → after training, and what the linear probe gains."""
    found = []
    for key in titles.values():
        first = spread([before(n, key) for n in runs]).partition(" ")[0]
        found.append(f"{first} → {spread([value(n, key) for n in runs])}")
    gains = [value(n, "linear") - before(n, "linear") for n in runs]
    return [*found, "+" + spread(gains) if statistics.mean(gains) >= 0 else spread(gains)]


def before(found: dict[str, Any], key: str) -> float:
    """The accuracy of what training began with."""
    return float(found.get(f"initial {key}", found.get(f"random {key}", NONE)))


def untrained(part: Part, there: Kept, titles: Options, empty: int) -> list[str]:
    """Rows of the encoder before training, and of the weights that --init gave, if it did."""
    ordered = [there[row] for row in part.rows if row in there]
    groups = [("*untrained encoder*", "random", ordered)]
    starts: dict[str, list[str]] = {}  # what rows began with, as numbers of their first seed
    for row in (row for row in part.rows if row in there):
        first = there[row][min(there[row])]
        if begun := {
            key: first[key] for key in map("initial {}".format, titles.values()) if key in first
        }:
            starts.setdefault(json.dumps(begun), []).append(row)
    for rows in starts.values():
        whose = f' to "{rows[0]}"' if len(starts) > 1 else ""
        groups.append((f"*what --init gave{whose}*", "initial", [there[row] for row in rows]))
    lines = []
    for label, who, runs in groups:  # the first row wins
        found = [list(_once(runs[::-1], f"{who} {key}").values()) for key in titles.values()]
        if any(found):
            lines.append(cells(label, *map(spread, found), *[""] * empty))
    return lines


def _once(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Seed -> a number that all runs of a seed have in common, or that of the last row."""
    return {seed: n[name] for runs in rows for seed, n in runs.items() if name in n}


NONE = float("nan")
ONE = " (one seed)"
COLUMNS = {
    "kNN %": "knn",
    "linear %": "linear",
    "1 % of labels %": "semi-1",
    "classifier %": "classifier",
}
WHO = ("federated", "alone", "pooled", "random")
SHOWN = {
    "effective_rank": "effective rank",
    "dictionary_mass": "P_D",
    "dictionary_cosine": "dictionary cosine",
    "neighbour_purity": "purity",
    "neighbour_purity_encoded": "purity, encoded",
    "took_global_predictor": "share of Ψ",
    "angle": "angle °",
}
AVERAGED = ("took_global_predictor",)  # over all rounds but the first, in which all take it


def value(found: dict[str, Any], key: str) -> float:
    """The accuracy of the trained encoder, whoever trained it."""
    return next((found[f"{who} {key}"] for who in WHO[:-1] if f"{who} {key}" in found), NONE)


def difference(there: Kept, left: str, right: str, used: Options) -> str:
    """The mean of the paired differences over common seeds, with a 95 % t-interval."""
    words = []
    for title, key in used.items():
        if gaps := paired(there, left, right, key):
            words.append(f"{title.removesuffix(' %')} {interval(gaps)}")
    return f"- {left} − {right}: {', '.join(words)}"


def paired(there: Kept, left: str, right: str, key: str) -> list[float]:
    """Left minus right of one protocol for every seed that both have; a row has none to itself."""
    seeds = sorted(set(there.get(left, {})) & set(there.get(right, {}))) if left != right else ()
    gaps = [value(there[left][s], key) - value(there[right][s], key) for s in seeds]
    return [gap for gap in gaps if gap == gap]


def interval(gaps: list[float]) -> str:
    """The mean of differences over seeds, with a 95 % t-interval."""
    if not gaps:
        return ""
    if len(gaps) == 1:
        return f"{gaps[0]:+.1f}{ONE}"
    return f"{statistics.mean(gaps):+.1f} ± {half_width(gaps):.1f}"


def half_width(gaps: list[float]) -> float:
    """Half of a 95 % t-interval of their mean."""
    return float(t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5)


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


def fill(page: Path, name: str, text: str) -> None:
    """Put a table into a page, between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    first, last = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    before, found, rest = page.read_text().partition(first)
    _, also, behind = rest.partition(last)
    if not found or not also:
        raise SystemExit(f"{page} has no {first.strip()} … {last.strip()} to put the table between")
    page.write_text(before + first + text + last + behind)


def figure(part: Part, there: Kept, path: Path) -> None:
    """Bars of the linear probe, the best row first."""
    from furlong.reports import figures

    bars = []
    for row in (row for row in part.rows if there.get(row)):
        found = [value(runs, "linear") / 100 for runs in there[row].values()]
        if not all(each == each for each in found):  # NaN: measured otherwise
            continue
        spread = statistics.stdev(found) if len(found) > 1 else None
        bars.append((row, statistics.mean(found), spread))
    bars.sort(key=lambda bar: -bar[1])
    figures.save(figures.bars(bars, "Linear probe", highlight="furlong"), path)


def main(about: str | None, every: dict[str, Part], folder: Path, out: Path) -> None:
    """Run and print parts; numbers are kept in ``folder``."""
    words = parser(about)
    words.add_argument("--part", default="", help=", ".join(every))
    words.add_argument(
        "--only",
        default="",
        help="rows with one of these texts, comma without space between; =ROW: it",
    )
    words.add_argument("--seeds", default=None, help="such as 0,1,2; default: those of the part")
    words.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    words.add_argument("--root", default=os.environ.get("FURLONG_DATA", "../shared/data"))
    words.add_argument("--out", type=Path, default=out)
    words.add_argument("--show", action="store_true", help="only print what there is")
    words.add_argument("--into", type=Path, help="a page that has a place for the tables")
    words.add_argument("--figure", type=Path, help="draw the linear probe to this .svg or .png")
    given = parse(words, seeds="0", jobs=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.smoke:
        smoke(given)
        return
    names = given.part.split(",") if given.part else list(every)
    for name in set(names) - set(every):
        raise SystemExit(f"unknown part {name}: there are {', '.join(every)}")
    if given.figure and len(names) != 1:
        raise SystemExit("--figure draws one part: name it with --part.")
    if not given.show:
        run({folder / f"{name}.json": every[name] for name in names}, given)
    for name in names:
        path = folder / f"{name}.json"
        text = table(name, every[name], kept(path))
        if given.into:
            fill(given.into, name, text)
        if given.figure:
            figure(every[name], kept(path), given.figure)
        print(text, end="\n\n")


def smoke(given: Any) -> None:
    """One tiny run, kept in a temporary folder."""
    tiny = {"data.images": 40, "data.test-images": 20, "data.image-size": 16, "clients": 2}
    tiny |= {"rounds": 1, "batch-size": 8, "evaluate.probe": "none", "partition": "iid"}
    part = Part("one tiny run", tiny, {"fedsimclr": {"method": "fedsimclr"}})
    with tempfile.TemporaryDirectory() as scratch:
        given.out = Path(scratch)
        path = given.out / "smoke.json"
        run({path: part}, given)
        print(table("smoke", part, kept(path)))
