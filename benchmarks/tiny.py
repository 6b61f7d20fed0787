"""What a client-round costs beyond its training, with many clients of ten images each.

Processor time of all processes, parent and workers together, for a round, divided by its clients;
less the processor time of the same training in a bare loop: views, networks, loss, backward pass,
optimiser step, with a network and an optimiser that are made once. FedSimCLR's clients keep
nothing; FedU's keep a target network and a predictor. The round and the bare loop are run in turn;
medians count. The number of clients must make no difference.

    python benchmarks/tiny.py [--json] [--smoke] [--clients 10,1000] [--methods fedsimclr,fedu] …
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import parse, parser, show
from throughput import Rounds, trainer

from furlong.engines.pool import keep_freed_memory
from furlong.runs.config import from_tree
from furlong.runs.prepare import Prepared, prepare
from furlong.seeding import threads

IMAGES = 10  # of a client
ALLOWED = 2.0  # milliseconds


def setup(method: str, clients: int, workers: int, encoder: str, size: int) -> Prepared:
    """Clients of ten images, which are one batch."""
    options = {
        "method": method,
        "encoder": encoder,
        "data.images": IMAGES * clients,
        "data.test_images": 20,
        "data.image_size": size,
        "partition": "iid",
        "clients": clients,
        "rounds": 100_000,
        "batch_size": IMAGES,
        "workers": workers,
    }
    return prepare(from_tree({}, options, "benchmark"))


def processor_time(rounds: Rounds) -> float:
    """Seconds of the processor that this process and its workers have had."""
    pool = rounds.transport.pool
    pids = [os.getpid(), *(process.pid for process in pool.processes)] if pool else [os.getpid()]
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measured(rounds: Rounds, clients: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of the processor, and of the clock, for a client-round."""
    before, began = processor_time(rounds), time.perf_counter()
    for _ in range(repeats):
        rounds.run()
    spent, passed = processor_time(rounds) - before, time.perf_counter() - began
    return 1e3 * spent / clients / repeats, 1e3 * passed / clients / repeats


def bare(p: Prepared, method: str) -> Callable[[int], float]:
    """What gives the milliseconds of the processor that a client's training takes."""
    step, pixels = trainer(p, method, p.server.init()), p.train.pixels[:IMAGES]

    def run(clients: int) -> float:
        with threads():
            began = time.process_time()
            for _ in range(clients):
                step(torch.cat(p.setup.augment.views(pixels)))
            return 1e3 * (time.process_time() - began) / clients

    return run


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--json", action="store_true")
    words.add_argument("--methods", default="fedsimclr,fedu")
    words.add_argument("--clients", default="10,100,1000")
    words.add_argument("--encoder", default="small")
    words.add_argument("--size", type=int, default=16)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument("--least", type=int, default=500, help="client-rounds of a measurement")
    words.add_argument("--repeats", type=int, default=3)
    options = parse(words, clients="4", least=4, repeats=1, workers=2)
    keep_freed_memory()
    for method in options.methods.split(","):
        for clients in map(int, options.clients.split(",")):
            p = setup(method, clients, options.workers, options.encoder, options.size)
            rounds, alone = Rounds(p, options.workers), bare(p, method)
            alone(10)
            found: list[dict[str, float]] = []
            for _ in range(options.repeats):
                spent, passed = measured(rounds, clients, max(1, options.least // clients))
                training = alone(max(clients, 100) if not options.smoke else 4)
                found.append({"round": spent, "clock": passed, "training": training})
            rounds.transport.close()
            middle = {k: median(each[k] for each in found) for k in found[0]}
            overhead = median(each["round"] - each["training"] for each in found)
            row: dict[str, Any] = {
                "method": method,
                "clients": clients,
                "workers": options.workers,
                "encoder": options.encoder,
                "round_ms": round(middle["round"], 2),
                "training_ms": round(middle["training"], 2),
                "overhead_ms": round(overhead, 2),
                "clock_ms": round(middle["clock"], 2),
                "passed": overhead <= ALLOWED,
            }
            show(row, options.json)


if __name__ == "__main__":
    main()
