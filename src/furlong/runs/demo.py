"""The demonstration: what does federation buy? Federated against both bounds, at equal training.

Non-IID ``shapes``: five clients, two kinds of figures each. The three runs are ordinary
``furlong run`` processes; the pooled one, which is a single client, shares the machine with the
federated one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError
from furlong.runs.results import mean_and_spread

SETTINGS = {
    "method": "fedsimclr", "data": "shapes", "partition": "classes:2", "clients": "5",
    "rounds": "24", "optimiser.schedule": "constant",
    "evaluate.knn-every": "4", "evaluate.monitor-images": "1000",
}  # fmt: skip
FEDERATED = {"server.rule": "momentum", "server.momentum": "0.6"}  # there is a server to have it
WHO = ("random", "alone", "federated", "pooled")


@dataclass
class Job:
    """One of the three runs, as a process."""

    bound: str
    out: Path
    workers: int
    seed: int

    def start(self) -> None:
        """Start it; output is kept beside the run folder."""
        options = {
            **SETTINGS,
            "bound": self.bound,
            "workers": str(self.workers),
            "seed": str(self.seed),
            "out": str(self.out),
        }
        if self.bound == "none":
            options |= FEDERATED
        if self.bound == "single":  # five encoders to monitor: only at the end
            options["evaluate.knn-every"] = options["rounds"]
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.out.with_suffix(".log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "furlong.cli", "run", *words],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def progress(self) -> int:
        """Rounds done so far."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def running(self) -> bool:
        """Whether it goes on; a failure is an error."""
        code = self._process.poll()
        if code is None:
            return True
        self._log.close()
        if code:
            tail = self.out.with_suffix(".log").read_text().strip().splitlines()[-3:]
            raise FurlongError(f"the {self.bound} run of the demo failed: {' '.join(tail)}")
        return False

    def stop(self) -> None:
        """End it if it is still there."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def results(self) -> list[dict[str, Any]]:
        """The rows of its summary."""
        rows: list[dict[str, Any]] = json.loads((self.out / "summary.json").read_text())["results"]
        return rows


def run_seed(folder: Path, seed: int, show: Callable[[str, int], None]) -> list[dict[str, Any]]:
    """The three runs of one seed: rows for random, alone, federated and pooled."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    federated = Job("none", folder / "federated", max(1, cores - 1), seed)
    pooled = Job("pooled", folder / "pooled", 1, seed)
    alone = Job("single", folder / "alone", cores, seed)
    for group in ([federated, pooled], [alone]) if cores > 1 else ([federated], [pooled], [alone]):
        for job in group:
            job.start()
        try:
            going = list(group)
            while going:
                for job in group:
                    show(job.out.name, job.progress())
                time.sleep(0.2)
                going = [job for job in going if job.running()]
        finally:
            for job in group:
                job.stop()
        for job in group:
            show(job.out.name, int(SETTINGS["rounds"]))
    rows = {
        (r["who"], r["protocol"]): r for job in (federated, alone, pooled) for r in job.results()
    }
    return [rows[who, protocol] for who in WHO for protocol in ("knn", "linear")]


def average(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Mean over seeds, with the standard deviation over seeds if there are several."""
    if len(runs) == 1:
        return runs[0]
    return [mean_and_spread(same, same[0]["who"]) for same in zip(*runs, strict=True)]


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the table says, in a sentence."""
    linear = {r["who"]: 100 * r["accuracy"] for r in rows if r["protocol"] == "linear"}
    gain, lead = linear["federated"] - linear["random"], linear["federated"] - linear["alone"]
    gap = linear["pooled"] - linear["federated"]
    return (
        f"By the linear probe the federated encoder gains {gain:.1f} points over a random one, is "
        f"{abs(lead):.1f} points {'ahead of' if lead >= 0 else 'behind'} a client alone, and "
        f"{abs(gap):.1f} points {'short of' if gap >= 0 else 'ahead of'} pooling all images."
    )
