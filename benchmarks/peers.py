"""Furlong beside other simulators of federated learning, at their own units of work.

    python benchmarks/peers.py --make                 # their environments, once
    python benchmarks/peers.py [--json] [--smoke] [--units cohort,trivial,classes]
        [--parts time,check] [--rounds 4] [--repeats 3] [--folder build/peers]

Each peer has a virtual environment with the versions in benchmarks/peers/NAME.txt, and a script in
the same folder that does a unit as the peer's own examples do. All sides train the same network on
the same images of the same clients with the same batches, rate and rounds: supervised FedAvg. The
images are the built-in figures, or with --data cifar10 --root DIR those of CIFAR-10.

cohort   pfl's: 1,000 users of 50 images, 50 of them in a round, batches of 10, two convolutions
trivial  100 clients of 10 images, one step each, softmax regression: all there is is overhead
classes  blazefl's: 100 clients of 500 images of two classes, batches of 50, five epochs

time     Seconds per round without the first, two workers of one thread: the median of the repeats.
         All sides take turns. ``ratio`` is a side's seconds divided by Furlong's, the median over
         the turns. Processor seconds are of all processes of a side: other programs count less.
         ``overhead`` is the processor time of a client beyond a bare loop's, which does nothing but
         the training steps.
check    The most memory that all processes had together (PSS: shared pages count once), whether one
         and two workers end with the same bits, and the accuracy after --check-rounds with three
         seeds. None of this depends on how busy the machine is.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from measuring import parse, parser

import furlong
from furlong.runs.prepare import prepare

HERE = Path(__file__).resolve().parent / "peers"
sys.path.append(str(HERE))  # the scripts of the sides are no package: each runs on its own

from with_furlong import settings  # noqa: E402
from work import MARK, Job, Unit, network  # noqa: E402

LIMIT = 900.0  # seconds for a job
UNITS = {
    "cohort": Unit("cohort", 1000, 50, 50, 10, 1, "iid", "two_convolutions"),
    "trivial": Unit("trivial", 100, 10, 100, 10, 1, "iid", "pixels"),
    "classes": Unit("classes", 100, 500, 100, 50, 5, "classes:2", "tutorial"),
}
PEERS = {
    "cohort": ("pfl", "flower"),
    "trivial": ("flower", "pfl", "blazefl"),
    "classes": ("blazefl",),
}
TINY = {"clients": 10, "images": 10, "cohort": 4, "batch": 5, "epochs": 1}
CHECK = {"cohort": 20, "trivial": 20, "classes": 5}  # rounds
TEST = 5000  # images for the accuracy


# --------------------------------------------------------------------------- environments


def python_of(side: str, folder: Path) -> Path:
    """The interpreter that runs a side."""
    own = side in ("furlong", "bare")
    return Path(sys.executable) if own else folder / "venvs" / side / "bin" / "python"


def made(side: str, folder: Path) -> Path:
    """A file that is there when the environment of a peer is whole."""
    return folder / "venvs" / side / "installed"


def make(side: str, folder: Path) -> None:
    """The environment of a peer: torch first, so that no other build of it is fetched."""
    python = python_of(side, folder)
    if made(side, folder).exists():
        return
    constraints = HERE.parent.parent / "constraints.txt"
    listed = ["--no-deps", "--ignore-requires-python", "-r", str(HERE / f"{side}.txt")]
    install = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
    subprocess.run([*install, "-c", str(constraints), "torch"], check=True)
    subprocess.run([*install, *listed], check=True)
    made(side, folder).touch()


# --------------------------------------------------------------------------- images


def fill(folder: Path, unit: Unit, name: str, root: str | None, seeds: Iterable[int]) -> None:
    """The unit's images for Furlong, in CIFAR-10's binary form, and for the peers, as arrays.

    Which client has which images is Furlong's partition, a file for every seed.
    """
    if not (folder / "labels.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", unit.clients * unit.images), ("test", TEST)):
            images = furlong.load(name, split, limit=count, root=root)
            assert images.labels is not None
            pixels, labels = images.pixels.numpy(), images.labels.numpy()
            records = np.concatenate(
                [labels[:, None].astype(np.uint8), pixels.reshape(len(pixels), -1)], axis=1
            )
            files = [f"data_batch_{n}" for n in range(1, 6)] if split == "train" else ["test_batch"]
            for file, part in zip(files, np.array_split(records, len(files)), strict=True):
                part.tofile(folder / f"{file}.bin")
            if split == "train":
                np.save(folder / "pixels.npy", pixels)
                np.save(folder / "labels.npy", labels)
    for seed in seeds:
        rows = folder / f"rows-{seed}.npy"
        if not rows.exists():
            split = prepare(settings(Job(unit, str(folder), "", 1, seed, 1))).split
            np.save(rows, np.stack([index.numpy() for index in split.indices]))


# --------------------------------------------------------------------------- one job


@dataclass
class Done:
    """What a side has handed in."""

    rounds: list[tuple[float, float]]  # seconds and processor seconds of each
    versions: dict[str, str]
    weights: dict[str, np.ndarray]
    memory: float = 0.0  # MB, if it was watched

    @property
    def seconds(self) -> float:
        """The median of the rounds without the first."""
        return statistics.median(seconds for seconds, _ in self.rounds[1:])

    @property
    def processors(self) -> float:
        """Processor seconds, the mean of the same rounds: the system counts hundredths."""
        return statistics.mean(processors for _, processors in self.rounds[1:])

    @property
    def digest(self) -> str:
        """Of all weights' bits."""
        found = hashlib.sha256()
        for array in self.weights.values():
            found.update(array.tobytes())
        return found.hexdigest()

    def accuracy(self, unit: Unit, data: Path) -> float:
        """Percent of the test images."""
        net = network(unit).eval()
        net.load_state_dict({name: torch.from_numpy(w) for name, w in self.weights.items()})
        records = np.fromfile(data / "test_batch.bin", np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        labels = torch.from_numpy(records[:, 0].astype(np.int64))
        images = torch.from_numpy(records[:, 1:].copy()).view(-1, 3, 32, 32)
        with torch.no_grad():
            right = sum(
                int((net(x.float() / 255).argmax(1) == y).sum())
                for x, y in zip(images.split(500), labels.split(500), strict=True)
            )
        return 100 * right / len(labels)


class Memory(threading.Thread):
    """Watches what all processes of a job hold together, ten times a second."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self._mark, self._known = f"{MARK}={mark}".encode(), dict[str, bool]()
        self._stop_now = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._stop_now.wait(0.1):
            self.peak = max(
                self.peak, sum(map(self._held, filter(str.isdigit, os.listdir("/proc"))))
            )

    def stop(self) -> float:
        """The peak in MB."""
        self._stop_now.set()
        self.join()
        return self.peak / 1024

    def _held(self, pid: str) -> int:
        """KB, of a process of the job."""
        try:
            if pid not in self._known:
                self._known[pid] = self._mark in Path(f"/proc/{pid}/environ").read_bytes()
            if not self._known[pid]:
                return 0
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # it has just ended
            return 0


def command(side: str, job: Job, folder: Path) -> list[str]:
    """How a side is started."""
    script = "bare.py" if side == "bare" else f"with_{side}.py"
    start = [str(python_of(side, folder))]
    if side == "pfl" and job.workers > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job.workers}"]
    return [*start, str(HERE / script), job.text()]


def do(side: str, job: Job, folder: Path, *, watch: bool = False) -> Done:
    """Start a side in processes of its own and wait for what it hands in."""
    mark = uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    environment |= {"RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    if side not in ("furlong", "bare"):
        environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="furlong-peers-") as out:
        job = replace(job, out=out)
        memory = Memory(mark)
        if watch:
            memory.start()
        done = subprocess.run(
            command(side, job, folder),
            env=environment,
            cwd=out,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        peak = memory.stop() if watch else 0.0
        if done.returncode != 0 or not (Path(out) / "told.json").exists():
            raise SystemExit(f"{side}, {job.unit.name}: {done.stderr[-3000:]}")
        told = json.loads((Path(out) / "told.json").read_text())
        with np.load(Path(out) / "weights.npz") as arrays:
            weights = {name: arrays[name] for name in arrays.files}
    return Done(told["rounds"], told["versions"], weights, peak)


# --------------------------------------------------------------------------- what is measured


def timed(unit: Unit, sides: list[str], o: Namespace, data: Path) -> dict[str, dict[str, Any]]:
    """Seconds per round, all sides in turn."""
    found: dict[str, list[Done]] = {side: [] for side in sides}
    for turn in range(o.repeats):
        for side in sides:
            job = Job(unit, str(data), "", o.workers, turn % o.seeds, o.rounds)
            found[side].append(do(side, job, o.folder))
            now = found[side][-1]
            print(
                f"{unit.name} {side}: {now.seconds:.3f} s, processors {now.processors:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    wall = {side: [done.seconds for done in dones] for side, dones in found.items()}
    processors = {side: [done.processors for done in dones] for side, dones in found.items()}
    bare = statistics.median(processors["bare"])
    rows = {}
    for side, dones in found.items():
        more = statistics.median(processors[side]) - bare
        rows[side] = {
            "seconds_per_round": round(statistics.median(wall[side]), 4),
            "fastest_and_slowest": [round(min(wall[side]), 4), round(max(wall[side]), 4)],
            "ratio": ratio(wall[side], wall["furlong"]),
            "processor_seconds_per_round": round(statistics.median(processors[side]), 3),
            "processor_ratio": ratio(processors[side], processors["furlong"]),
            "overhead_ms_per_client": round(1e3 * more / unit.cohort, 2),
            "versions": dones[0].versions,
        }
    return rows


def ratio(theirs: list[float], ours: list[float]) -> float | None:
    """The median over the turns; none if a work is too short to be measured."""
    if not all(ours):
        return None
    return round(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)), 2)


def checked(unit: Unit, sides: list[str], o: Namespace, data: Path) -> dict[str, dict[str, Any]]:
    """Memory, bits and accuracy."""
    rows = {}
    for side in sides:
        if side == "bare":
            continue
        job = Job(unit, str(data), "", o.workers, 0, o.check_rounds or CHECK[unit.name])
        many = [do(side, replace(job, seed=seed), o.folder, watch=True) for seed in range(o.seeds)]
        alone = do(side, replace(job, workers=1), o.folder)
        accuracies = [done.accuracy(unit, data) for done in many]
        rows[side] = {
            "memory_mb": round(max(done.memory for done in many)),
            f"same_bits_with_1_and_{o.workers}_workers": alone.digest == many[0].digest,
            "accuracy": round(statistics.mean(accuracies), 1),
            "accuracy_deviation": round(statistics.stdev(accuracies), 1) if o.seeds > 1 else 0.0,
        }
        print(f"{unit.name} {side}: {rows[side]}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--json", action="store_true")
    words.add_argument("--make", action="store_true", help="make the peers' environments first")
    words.add_argument("--units", default=",".join(UNITS))
    words.add_argument("--peers", default="pfl,flower,blazefl")
    words.add_argument("--parts", default="time,check")
    words.add_argument("--rounds", type=int, default=4, help="of time; the first does not count")
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--check-rounds", type=int, help=f"of check; else {CHECK}")
    words.add_argument("--seeds", type=int, default=3, help="of the accuracy")
    words.add_argument("--workers", type=int, default=2)
    words.add_argument("--data", default="shapes", help="shapes, or cifar10 with --root")
    words.add_argument("--root", help="where the data set lies")
    words.add_argument("--folder", type=Path, default=Path("build/peers"))
    o = parse(words, rounds=2, repeats=1, check_rounds=2, seeds=1)
    o.folder = o.folder.resolve()
    rows = []
    for name in o.units.split(","):
        unit = replace(UNITS[name], **TINY) if o.smoke else UNITS[name]
        sides = ["bare", "furlong"]
        for peer in (peer for peer in PEERS[name] if peer in o.peers.split(",")):
            if o.make:
                make(peer, o.folder)
            if made(peer, o.folder).exists():
                sides.append(peer)
            else:
                print(f"{peer}: no environment; --make makes it", file=sys.stderr)
        data = o.folder / "data" / f"{o.data}-{name}{'-smoke' if o.smoke else ''}"
        fill(data, unit, o.data, o.root, range(o.seeds))
        parts = {"time": timed, "check": checked}
        found = [parts[part](unit, sides, o, data) for part in o.parts.split(",")]
        for side in sides:
            row = {"unit": name, "side": side}
            for part in found:
                row |= part.get(side, {})
            rows.append(row)
    show(rows, o.json)


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """One line for each unit and side: JSON, or a table in Markdown."""
    if as_json:
        print("\n".join(map(json.dumps, rows)))
        return
    columns = [
        name for name in dict.fromkeys(key for row in rows for key in row) if name != "versions"
    ]
    print(" | ".join(["", *columns, ""]).strip())
    print("|".join(["", *("---" for _ in columns), ""]))
    for row in rows:
        print(" | ".join(["", *(str(row.get(column, "–")) for column in columns), ""]).strip())


if __name__ == "__main__":
    main()
