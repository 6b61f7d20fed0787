"""A run on a machine whose cores have other work: what does waiting for a thread cost?

    python benchmarks/busy.py [--repeats 3] [--json] [--smoke]

``furlong run`` on 500 figures, two rounds, on idle cores and beside one busy loop per core, with
the rest that ``import furlong`` gives to threads that wait (GOMP_SPINCOUNT 1,000) and with GNU
OpenMP's own (300,000). Works take turns; medians of seconds on the clock. Half of the cores is what
is left to a run beside so many loops, so twice the idle time is what nobody can avoid.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measuring import parse, parser, show

RUN = "run --method fedsimclr --data shapes --clients 5 --rounds 2"
SIZES = "--data.images {n} --data.test-images {n}"
SPINS = {"furlong's": "1000", "GNU OpenMP's own": "300000"}


@contextmanager
def loops(count: int) -> Iterator[None]:
    """So many processes that do nothing, as fast as they can."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def seconds(spin: str, images: int) -> float:
    """Of one run, on the clock."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [*RUN.split(), *SIZES.format(n=images).split(), "--out", str(Path(scratch) / "run")]
        env = {
            k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
        }
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "furlong.cli", *words],
            env=env | {"GOMP_SPINCOUNT": spin},
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--images", type=int, default=500)
    words.add_argument("--json", action="store_true")
    given = parse(words, repeats=1, images=40)
    cores = len(os.sched_getaffinity(0))
    for count in (0, cores):
        found: dict[str, list[float]] = {name: [] for name in SPINS}
        with loops(count):
            for _ in range(given.repeats):
                for name, spin in SPINS.items():
                    found[name].append(seconds(spin, given.images))
        median = {name: round(statistics.median(times), 2) for name, times in found.items()}
        ours, theirs = median.values()
        ratio = round(theirs / ours, 2)
        show({"busy loops": count, "cores": cores, **median, "ratio": ratio}, given.json)


if __name__ == "__main__":
    main()
