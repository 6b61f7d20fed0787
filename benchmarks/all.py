"""All benchmarks of speed and scale, one after another, and one table of what they found.

    python benchmarks/all.py [--only tiny,states] [--root ../shared/data] [--out benchmarks/results]
    python benchmarks/all.py --show         # the table of what is there, in Markdown
    python benchmarks/all.py --smoke        # one of them at tiny sizes; nothing is kept

Under an hour on two idle cores. Each benchmark is called by its command line and becomes a file
NAME.json in the folder: command, machine, date, versions, how busy the cores were just before it
began, and its rows. One that fails does not keep the others from being run. Times of a busy machine
are not worth much: the table says so, and ratios of works that take turns suffer least.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from measuring import parse, parser

HERE = Path(__file__).resolve().parent
IDLE = 0.1  # share of the cores that others use, up to which a machine counts as idle
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One of the table: what was measured, and whether that is what we want; ``None``: no goal."""

    what: str
    measured: str
    goal: str = "–"
    met: bool | None = None


Lines = Callable[[list[Row]], Iterator[Line]]


# --------------------------------------------------------------------------- from rows to lines


def rounds(rows: list[Row]) -> Iterator[Line]:
    """Of throughput.py."""
    for row in rows:
        what = f"{row['method']}, {row['encoder']}, {row['clients']} clients on {row['workers']}"
        ratio = row["ratio_under_the_same_schedule"]
        yield Line(
            f"speed of a round, {what} workers, beside a bare loop with the same schedule",
            f"{ratio:.3f}",
            "0.95",
            row["passed"],
        )


def tiny(rows: list[Row]) -> Iterator[Line]:
    """Of tiny.py."""
    for row in rows:
        yield Line(
            "processor time of a client-round beyond its training, "
            f"{row['method']}, {row['clients']:,} clients of ten images",
            f"{row['overhead_ms']:.1f} ms",
            "2 ms",
            row["passed"],
        )


def checkpoints(rows: list[Row]) -> Iterator[Line]:
    """Of states.py: bytes must not grow with the clients that did not take part."""
    least = rows[0]["bytes"]
    for row in rows:
        every = ""
        if "all_bytes" in row:
            every = f"; all states: {row['all_bytes'] / 1e6:,.0f} MB in {row['all_seconds']:.1f} s"
        yield Line(
            f"a checkpoint of {row['held']:,} stateful clients ({row['encoder']}), of which "
            f"{row['cohort']} took part",
            f"{row['bytes'] / 1e6:.1f} MB in {row['seconds']:.2f} s{every}",
            f"at most 1.1 times the bytes with {rows[0]['held']}",
            row["bytes"] <= 1.1 * least,
        )


def memory(rows: list[Row]) -> Iterator[Line]:
    """Of states.py with a large encoder: what is held, and by its slope what all would hold."""
    for row in rows:
        yield Line(
            f"memory of a round of {row['cohort']} of {row['clients']:,} clients "
            f"({row['encoder']}), {row['held']:,} with a state of {row['state_mb']:.0f} MB",
            f"{row['resident_mb']:,} MB, {row['own_mb']:,} of them not pages of files",
            "4,000 MB",
            row["resident_mb"] <= 4000,
        )
    first, last = rows[0], rows[-1]
    if last["held"] > first["held"]:
        slope = (last["own_mb"] - first["own_mb"]) / (last["held"] - first["held"])
        whole = last["own_mb"] + max(0.0, slope) * (last["clients"] - last["held"])
        yield Line(
            f"the same with all {last['clients']:,} states, by the slope, without pages of files",
            f"{whole:,.0f} MB ({slope:+.2f} MB per state)",
            "4,000 MB",
            whole <= 4000,
        )


def outside(rows: list[Row]) -> Iterator[Line]:
    """Of outside.py."""
    names = {"demo": "furlong demo", "default": "a run that names no method"}
    for row in rows:
        name = names.get(row["run"], f"a run of {row['run']}")
        if "start" in row:
            yield Line(
                f"{name}: from the start to the first step, beyond torch's import",
                f"{row['start']['seconds_beyond_torch']:.1f} s",
                "1 s",
                row["start_passed"],
            )
        yield Line(
            f"{name}: share of monitoring, checkpoints, logs and report",
            f"{100 * row['outside']:.1f} %; with the evaluation {100 * row['evaluated']:.1f} %",
            "10 %",
            row["passed"],
        )


def deployment(rows: list[Row]) -> Iterator[Line]:
    """Of flower.py, whose tables are read: its own node beside Flower's ways."""
    timed = [row for row in rows if "way" in row and "model" in row]
    for model, group in groupby(sorted(timed, key=lambda r: r["model"]), lambda r: r["model"]):
        found = {row["way"]: float(row["s per round"].split()[0]) for row in group}
        if "furlong" not in found:
            continue
        ours = found["furlong"]
        beside = [
            f"{way} {found[way]:.2f}" for way in ("inprocess", "plain", "bare") if way in found
        ]
        large = model.startswith("resnet18")  # 18.8 s before
        yield Line(
            f"seconds per round over Flower, {model}",
            f"{ours:.2f} ({', '.join(beside)})",
            "9.4" if large else "less than plain",
            ours <= 9.4 if large else ours < found.get("plain", 0.0),
        )
    for row in rows:
        if "encoding" in row:
            up = row["packed up"]
            yield Line(
                f"bytes of an answer, {row['encoding']}", f"{up}, packed, per node and round"
            )


def peers(rows: list[Row]) -> Iterator[Line]:
    """Of peers.py: times, memory, and whether the accuracies allow to compare them."""
    for unit, group in groupby(rows, lambda row: row["unit"]):
        sides = {row["side"]: row for row in group}
        ours = sides.pop("furlong")
        sides.pop("bare")
        for name, row in sides.items():
            least = 10.0 if (unit, name) == ("trivial", "flower") else 1.0
            ratio = row["ratio"]
            yield Line(
                f"seconds per round of {name} divided by ours, unit {unit}",
                f"{ratio} (processor time: {row['processor_ratio']})",
                f"{least:g}",
                ratio is not None and ratio >= least,
            )
            if "memory_mb" in row:
                yield Line(
                    f"our memory beside {name}'s, unit {unit}",
                    f"{ours['memory_mb']:,} and {row['memory_mb']:,} MB",
                    "less",
                    ours["memory_mb"] < row["memory_mb"],
                )
                yield Line(
                    f"our accuracy beside {name}'s, unit {unit}",
                    f"{ours['accuracy']} and {row['accuracy']} %",
                    "within 3 points, or nothing above counts",
                    abs(ours["accuracy"] - row["accuracy"]) <= 3,
                )
        same = [value for key, value in ours.items() if key.startswith("same_bits")]
        if same:
            words = "the same" if all(same) else "others"
            yield Line(f"our bits with 1 and 2 workers, unit {unit}", words, "the same", all(same))


# --------------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Part:
    """A benchmark by its command line; ``lines`` turn its rows into those of the table."""

    words: str
    lines: Lines


PARTS = {
    "rounds": Part("throughput.py --encoders cnn5 --steps 3 --repeats 3", rounds),
    "rounds-resnet18": Part(
        "throughput.py --encoders resnet18 --batch 32 --steps 3 --repeats 3", rounds
    ),
    "tiny": Part("tiny.py --clients 10,100,1000 --repeats 3", tiny),
    "tiny-many": Part("tiny.py --clients 10000 --methods fedsimclr --repeats 1", tiny),
    "states": Part("states.py --clients 10 100 1000 --rounds 3", checkpoints),
    "states-resnet18": Part(
        "states.py --encoder resnet18 --clients 1000 --held 20 60 --cohort 20 --rounds 2", memory
    ),
    "outside": Part("outside.py", outside),
    "flower": Part(
        "flower.py --parts overhead --rounds 4 --ways inprocess,furlong,plain,bare", deployment
    ),
    "wire": Part("flower.py --parts wire --rounds 3 --encoders resnet18", deployment),
    "peers": Part(
        "peers.py --make --units cohort,trivial --rounds 3 --repeats 3 --check-rounds 10 --seeds 1",
        peers,
    ),
}
WITHOUT_JSON = ("flower.py",)  # prints tables


def words_of(name: str, root: Path) -> list[str]:
    """The command line of a part; where CIFAR-10 is not at hand, the built-in figures take part."""
    words = PARTS[name].words.split()
    if name == "outside":
        words += ["--root", str(root)] if (root / "cifar10").is_dir() else ["--data", "shapes"]
    return words


def rows_in(printed: str) -> list[dict[str, Any]]:
    """Lines of JSON, and the rows of Markdown tables by their headings."""
    found, heading = [], None
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("{"):
            found.append(json.loads(line))
        elif not line.startswith("|"):
            heading = None
        elif heading is None:
            heading = cells
        elif set(line) - set("|-"):
            found.append(dict(zip(heading, cells, strict=True)))
    return found


def share_used(seconds: float = 2.0) -> float:
    """The share of the cores' time that is used by whoever runs now, 0 to 1."""

    def passed() -> tuple[float, float]:
        cores = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        ticks = [int(word) for word in cores]
        return sum(ticks[:8]), ticks[3] + ticks[4]  # all; idle and waiting for a disk

    whole, idle = passed()
    time.sleep(seconds)
    more, rest = passed()
    return 1 - (rest - idle) / max(1, more - whole)


def about() -> dict[str, Any]:
    """Machine, date, versions and load, before anything is run."""
    info = Path("/proc/cpuinfo")
    names = [
        row.split(":")[1].strip() for row in info.read_text().splitlines() if "model name" in row
    ]
    used, cores = share_used(), len(os.sched_getaffinity(0))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": f"{cores} cores, {names[0] if names else platform.machine()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"Python": platform.python_version(), "torch": version("torch")},
        "commit": commit.stdout.strip(),
        "used": round(used, 2),
        "idle": used <= IDLE,
    }


def run(name: str, root: Path, out: Path, smoke: bool) -> bool:
    """Run a part and write its file; whether it worked."""
    script, *words = words_of(name, root)
    if smoke:
        words = ["--smoke"]
    found = {"command": f"python benchmarks/{' '.join([script, *words])}", **about()}
    if not found["idle"]:
        share = f"{100 * found['used']:.0f} % of the cores are used"
        print(f"warning: {share}: {name} meets a busy machine", file=sys.stderr)
    print(f"{name}: {found['command']}", file=sys.stderr, flush=True)
    began = time.monotonic()
    words += [] if script in WITHOUT_JSON else ["--json"]
    done = subprocess.run(
        [sys.executable, str(HERE / script), *words], stdout=subprocess.PIPE, text=True, check=False
    )
    found |= {"seconds": round(time.monotonic() - began), "rows": rows_in(done.stdout)}
    if done.returncode or not found["rows"]:
        print(f"{name} failed: it ended with {done.returncode}", file=sys.stderr)
        return False
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return True


# --------------------------------------------------------------------------- the table


def table(out: Path) -> str:
    """What is in the folder, in Markdown; the parts in the order in which they are run."""
    text = [
        "| what | command | measured | goal | |",
        "|---|---|---|---|---|",
    ]
    notes = []
    for name, part in PARTS.items():
        file = out / f"{name}.json"
        if not file.exists():
            notes.append(f"- `{name}`: not measured.")
            continue
        found = json.loads(file.read_text())
        command = found["command"].removeprefix("python benchmarks/")
        for line in part.lines(found["rows"]):
            met = {None: "", True: "met", False: "**missed**"}[line.met]
            text.append(f"| {line.what} | `{command}` | {line.measured} | {line.goal} | {met} |")
        busy = "" if found["idle"] else ", **a busy machine**"
        versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
        notes.append(
            f"- `{name}`: {found['date']}, {found['machine']}, {versions}, commit "
            f"{found['commit']}; {100 * found['used']:.0f} % of the cores were used before{busy}; "
            f"{found['seconds']} s."
        )
    return "\n".join([*text, "", *notes])


def main() -> None:
    """Run what is asked for, then print the table."""
    words = parser(__doc__)
    words.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    words.add_argument("--out", type=Path, default=HERE / "results")
    words.add_argument("--show", action="store_true", help="run nothing")
    words.add_argument(
        "--root", type=Path, default=os.environ.get("FURLONG_DATA", "../shared/data")
    )
    given = parse(words, only="tiny")
    names = given.only.split(",")
    for name in set(names) - set(PARTS):
        raise SystemExit(f"unknown part {name}: there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) if given.smoke else given.out
        asked = [] if given.show else names
        failed = [name for name in asked if not run(name, given.root, out, given.smoke)]
        print(table(out))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
