"""Time the linear probe on cached features, and kNN, at CIFAR's size.

    python benchmarks/evaluate.py [--json] [--smoke] [--threads 2] [--width 2048] [--k 200]

50,000 training features and a fifth as many for testing (random numbers: the time does not depend
on them), ten classes, the default recipe of the probe and the default k. kNN is run in a child
process first, so that its peak memory can be told beside that of the features alone.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from argparse import SUPPRESS

import torch
from measuring import parse, parser

from furlong.evaluation.knn import knn
from furlong.evaluation.linear import RECIPES, linear_probe


def drawn(count: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator)
    return rows, torch.randint(0, 10, (count,), generator=generator)


def measure(what: str, images: int, width: int, k: int, threads: int) -> dict[str, float]:
    """Seconds on the clock and of the processor, and how far memory grew above the features."""
    torch.set_num_threads(threads)
    data = (*drawn(images, width, 0), *drawn(images // 5, width, 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock, processor = time.perf_counter(), time.process_time()
    if what == "knn":
        knn(*data, k=k)
    else:
        linear_probe(*data, recipe=what)
    return {
        "seconds": round(time.perf_counter() - clock, 1),
        "processor": round(time.process_time() - processor, 1),
        "more_memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10,
    }


def main() -> None:
    """Measure each in a process of its own and print a table."""
    words = parser(__doc__)
    words.add_argument("--threads", type=int, default=2)
    words.add_argument("--images", type=int, default=50_000)
    words.add_argument("--width", type=int, default=2048)
    words.add_argument("--k", type=int, default=200)
    words.add_argument("--what", nargs="*", default=["knn", "default"], help=f"{sorted(RECIPES)}")
    words.add_argument("--json", action="store_true", help="print JSON instead of a table")
    words.add_argument("--one", help=SUPPRESS)
    given = parse(words, images=100, width=16, k=5, threads=1)
    if given.one:
        sizes = given.images, given.width, given.k, given.threads
        print(json.dumps(measure(given.one, *sizes)))
        return
    found = {}
    for what in given.what:
        command = [sys.executable, __file__, "--one", what, "--width", str(given.width)]
        command += ["--k", str(given.k), "--threads", str(given.threads)]
        command += ["--images", str(given.images)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[what] = json.loads(done.stdout)
    if given.json:
        print(json.dumps(found))
        return
    print(f"{given.images:,} × {given.width} training features, {given.threads} thread(s)")
    for what, row in found.items():
        name = f"kNN, k = {given.k}" if what == "knn" else f"linear probe, recipe {what}"
        print(
            f"{name:32} {row['seconds']:6.1f} s on the clock, {row['processor']:6.1f} s of the "
            f"processor, {row['more_memory_mb']:,.0f} MB beyond the features"
        )


if __name__ == "__main__":
    main()
