"""Where the time of whole runs goes: what of it is training, and what is not.

    python benchmarks/outside.py [--json] [--smoke] [--runs demo,fedsimclr,default] [--rounds 20]
        [--data cifar10] [--images 5000] [--root ../shared/data] [--keep DIR]

``demo`` is ``furlong demo``; ``fedsimclr`` and ``default`` (no method named) are ``furlong run``
with images of CIFAR-10. Every run is the command itself in a new process, in which the
functions that a phase begins and ends with are wrapped in a clock. ``seconds`` are on the clock;
``processor`` is the time of all processes of a run, workers included, which other programs on the
machine change less.

start      From the start of the process to the first optimiser step of a client, less torch's
           import: Python, our modules, images, initial weights, worker processes.
outside    The share of monitoring, checkpoints, logs and the report in the whole command.
evaluated  The same with the evaluation at the end, which is what a run is for.
beside_rounds   The share of everything but rounds.

Of the demo, whose three runs share the machine, the shares are of what it waits for: the longer one
of the first two runs, the third, and the command's own.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import patch

from measuring import parse, parser

PLACES = {  # phase -> the functions that do it
    "preparation": ("furlong.runs.loop:prepare", "furlong.core.exchange:Server.init"),
    "workers": ("furlong.runs.prepare:Prepared.engine",),
    "rounds": ("furlong.core.exchange:Server.step",),
    "monitoring": ("furlong.runs.observers:Monitor.__call__",),
    "checkpoints": ("furlong.runs.checkpoint:save",),
    "logs": ("furlong.runs.trackers:Boards.__call__", "furlong.runs.folder:RunFolder.append"),
    "evaluation": ("furlong.runs.loop:_measured", "furlong.runs.loop:_draw_map"),
    "report": ("furlong:_with_page",),
}
BESIDE = ("monitoring", "checkpoints", "logs", "report")  # may take MOST of the time
MOST, START = 0.1, 1.0  # a share; seconds beyond torch's import
TINY = {"data.images": "40", "data.test-images": "20", "data.image-size": "16", "batch-size": "8"}
KINDS = ("seconds", "processor")
Times = dict[str, dict[str, float]]  # phase -> seconds, processor


# --------------------------------------------------------------------------- in the run's process


def processor() -> float:
    """Seconds of the processor that this process and its workers have had."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = 0
    for child in active_children():
        for task in Path(f"/proc/{child.pid}/task").glob("*/schedstat"):
            living += int(task.read_text().split()[0])
    return time.process_time() + ended.ru_utime + ended.ru_stime + living / 1e9


class Clock:
    """Adds up what each phase takes; one inside another counts as the outer one."""

    def __init__(self) -> None:
        self.times: Times = {}
        self.before: dict[str, float] = {}  # processor time before a phase began first
        self._inside = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is part of ``name``."""
        if self._inside:
            yield
            return
        self._inside, began, spent = True, time.perf_counter(), processor()
        self.before.setdefault(name, spent)
        try:
            yield
        finally:
            self._inside = False
            found = self.times.setdefault(name, {"seconds": 0.0, "processor": 0.0})
            found["seconds"] += time.perf_counter() - began
            found["processor"] += processor() - spent

    def watch(self, name: str, place: str) -> None:
        """Let every call of the function at ``place`` be a part of the phase ``name``."""
        module, _, path = place.partition(":")
        *outer, last = path.split(".")
        owner: Any = import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        inner = getattr(owner, last)

        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                return inner(*args, **options)

        setattr(owner, last, timed)


class FirstStep:
    """When a client took its first optimiser step, told by memory that is shared with workers."""

    def __init__(self, clock: Clock) -> None:
        """Before workers are forked."""
        from furlong.core.context import Optimiser

        self._clock, self._told = clock, mmap.mmap(-1, 16)
        step, own = Optimiser.step, os.getpid()

        def first(*args: Any) -> None:
            here = os.getpid() == own
            if self._told[:16] == bytes(16) and not (here and "rounds" not in clock.before):
                spent = 0.0 if here else time.process_time()
                self._told[:16] = struct.pack("dd", time.perf_counter(), spent)
            step(*args)

        Optimiser.step = first  # type: ignore[method-assign]

    def since(self, began: float) -> dict[str, float]:
        """Seconds since ``began``; processor time before the first round, then of the worker."""
        now, worker = struct.unpack("dd", self._told[:16])
        return {"seconds": now - began, "processor": self._clock.before["rounds"] + worker}


def do(words: list[str]) -> None:
    """A command of furlong; one that fails ends this process."""
    from furlong.cli import main

    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise


def watched(words: list[str], began: float) -> dict[str, Any]:
    """Do a command of furlong in this process; what its phases took."""
    clock = Clock()
    with clock.phase("torch"):
        import_module("torch")
    with clock.phase("modules"):
        import_module("furlong.cli")
        for place in (place for places in PLACES.values() for place in places):
            import_module(place.partition(":")[0])
    first = FirstStep(clock)
    for phase, places in PLACES.items():
        for place in places:
            clock.watch(phase, place)
    do(words)
    whole = {"seconds": time.perf_counter() - began, "processor": processor()}
    return {"start": first.since(began), "whole": whole, "phases": clock.times}


def watched_demo(words: list[str], began: float, smoke: bool) -> dict[str, Any]:
    """The same with ``furlong demo``, whose runs are processes: each is watched, too."""
    from furlong.runs import demo

    if smoke:
        demo.SETTINGS |= {**TINY, "rounds": "2"}
    start, runs = subprocess.Popen, Path(words[-1])
    files: list[Path] = []

    def popen(started: list[str], **options: Any) -> subprocess.Popen[bytes]:
        files.append(runs.with_name(f"{runs.name}-{len(files)}.json"))
        return start(command(started[3:], files[-1]), **options)

    with patch.object(subprocess, "Popen", popen):
        do(words)
    whole = {"seconds": time.perf_counter() - began}
    own = time.process_time()
    return {"whole": whole, "own": own, "runs": [json.loads(file.read_text()) for file in files]}


# --------------------------------------------------------------------------- what is reported


def command(words: list[str], told: Path, smoke: bool = False) -> list[str]:
    """How a watched command of furlong is started; its times go to the file ``told``."""
    now = f"--began={time.perf_counter()}"  # the same clock in all processes
    start = [sys.executable, __file__, f"--told={told}", now, f"--words={json.dumps(words)}"]
    return [*start, *(["--smoke"] if smoke else [])]


def measured(run: str, given: Namespace, folder: Path) -> dict[str, Any]:
    """One row: a run in a process of its own."""
    told, out = folder / f"{run}.json", folder / run
    if run == "demo":
        words = ["demo", "--out", str(out)]
    else:
        options = {"data": given.data, "rounds": str(given.rounds)}
        options |= {"data.images": str(given.images)}
        options |= {} if given.data == "shapes" else {"data.root": given.root}
        options |= {} if run == "default" else {"method": run}
        options |= TINY if given.smoke else {}
        options["out"] = str(out)  # at the end, as the demo has it
        words = ["run", *(word for key, value in options.items() for word in (f"--{key}", value))]
    subprocess.run(command(words, told, given.smoke), check=True, stdout=sys.stderr)
    found = json.loads(told.read_text())
    about = {"run": run, "command": f"furlong {' '.join(words[:-2])}"}
    return about | (whole_demo if run == "demo" else whole_run)(found)


def whole_run(found: dict[str, Any]) -> dict[str, Any]:
    """Of what :func:`watched` wrote down: the rest, the shares, and whether goals are met."""
    phases, whole, start = found["phases"], found["whole"], found["start"]
    beyond = {kind: start[kind] - phases["torch"][kind] for kind in start}
    return {
        "start": {f"{kind}_beyond_torch": round(beyond[kind], 2) for kind in beyond},
        "start_passed": beyond["seconds"] <= START,
        **summed(with_rest(phases, whole), whole),
    }


def whole_demo(found: dict[str, Any]) -> dict[str, Any]:
    """Of what :func:`watched_demo` wrote down: the runs that it waits for, one after the other."""
    *first, last = found["runs"]
    waited = [max(first, key=lambda run: float(run["whole"]["seconds"])), last]
    phases: Times = {}
    for run in waited:
        for name, times in with_rest(run["phases"], run["whole"]).items():
            so_far = phases.setdefault(name, dict.fromkeys(KINDS, 0.0))
            phases[name] = {kind: so_far[kind] + times[kind] for kind in KINDS}
    own = found["whole"]["seconds"] - sum(run["whole"]["seconds"] for run in waited)
    phases["own"] = {"seconds": own, "processor": found["own"]}
    whole = {kind: sum(times[kind] for times in phases.values()) for kind in KINDS}
    return summed(phases, whole)


def with_rest(phases: Times, whole: Mapping[str, float]) -> Times:
    """The phases, and what none of them is."""
    known = {kind: sum(times[kind] for times in phases.values()) for kind in KINDS}
    return {**phases, "rest": {kind: whole[kind] - known[kind] for kind in KINDS}}


def summed(phases: Times, whole: Mapping[str, float]) -> dict[str, Any]:
    """Shares by the clock and by the processor, whether they are small enough, and all times."""
    found: dict[str, Any] = {}
    for kind, suffix in zip(KINDS, ("", "_processor"), strict=True):
        taken = {name: times[kind] / whole[kind] for name, times in phases.items()}
        outside = sum(taken[name] for name in BESIDE)
        found[f"outside{suffix}"] = round(outside, 3)
        found[f"evaluated{suffix}"] = round(outside + taken["evaluation"], 3)
        found[f"beside_rounds{suffix}"] = round(1 - taken["rounds"], 3)
    found["passed"] = found["outside"] <= MOST
    found["phases"] = {
        name: {kind: round(times[kind], 2) for kind in KINDS}
        for name, times in {**phases, "whole": dict(whole)}.items()
    }
    return found


def table(row: dict[str, Any]) -> str:
    """A row in words: the phases, then the numbers."""
    whole = row["phases"]["whole"]
    lines = [f"{row['run']:16} {'seconds':>10} {'%':>6} {'processor':>10} {'%':>6}"]
    for name, times in row["phases"].items():
        parts = [f"{times[kind]:10.2f} {100 * times[kind] / whole[kind]:6.1f}" for kind in KINDS]
        lines.append(f"{name:16} {' '.join(parts)}")
    rest = {name: value for name, value in row.items() if name not in ("run", "phases")}
    return "\n".join([*lines, *(f"{name:24} {value}" for name, value in rest.items()), ""])


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--json", action="store_true")
    words.add_argument("--runs", default="demo,fedsimclr,default")
    words.add_argument("--data", default="cifar10", help="of all but the demo")
    words.add_argument("--root", default=os.environ.get("FURLONG_DATA", "../shared/data"))
    words.add_argument("--images", type=int, default=5000)
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--keep", type=Path, help="a folder for the runs, which are else removed")
    for hidden in ("--told", "--words", "--began"):
        words.add_argument(hidden, help=SUPPRESS)
    given = parse(words, runs="default", data="shapes", images=40, rounds=2)
    if given.told:
        asked, began = json.loads(given.words), float(given.began)
        demo = asked[0] == "demo"
        found = watched_demo(asked, began, given.smoke) if demo else watched(asked, began)
        Path(given.told).write_text(json.dumps(found))
        return
    folder = given.keep or Path(tempfile.mkdtemp(prefix="outside-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for run in given.runs.split(","):
            row = measured(run, given, folder)
            print(json.dumps(row) if given.json else table(row), flush=True)
    finally:
        if not given.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
