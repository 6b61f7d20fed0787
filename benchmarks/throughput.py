"""Images per second of a whole federated round, divided by the bare PyTorch loop's.

The bare loop is the fastest we can make: pre-augmented tensors, the same networks and loss, the
same number of one-thread processes, channels_last, fused optimiser, freed memory kept. The round
adds reading and augmenting images, loading and packing weights, sending, checking and averaging
them. Both are run in turn, several times; medians count.

    python benchmarks/throughput.py [--json] [--smoke] [--repeats 5] [--encoders cnn5,resnet18]
    python benchmarks/throughput.py --encoders resnet18,vit_tiny,vit_small --methods fedsimclr
"""

from __future__ import annotations

import json
import os
import statistics
import time
from multiprocessing import get_context
from typing import Any

import torch
from measuring import medians, parse, parser

from furlong.core.context import ClientContext, Exchange, Networks
from furlong.core.weights import ema_, snapshot
from furlong.engines.inprocess import InProcess
from furlong.engines.pool import keep_freed_memory
from furlong.nn.losses import byol, nt_xent
from furlong.runs.config import from_tree
from furlong.runs.prepare import Prepared, prepare
from furlong.seeding import seeded, threads

LIMIT = 600.0  # seconds for the bare loop of a process


def setup(method: str, encoder: str, workers: int, steps: int, batch: int) -> Prepared:
    """One client per worker, ``steps`` batches each: both sides then do equal work."""
    options = {
        "method": method,
        "encoder": encoder,
        "data.images": batch * steps * workers,
        "data.test_images": 100,
        "partition": "iid",
        "clients": workers,
        "rounds": 1000,
        "batch_size": batch,
        "workers": workers,
        "data.augment": "fedu",
    }
    return prepare(from_tree({}, options, "benchmark"))


def bare_loop(p: Prepared, method: str, steps: int, start: Any, views: torch.Tensor) -> float:
    """Seconds for ``steps`` optimiser steps on pre-augmented views (2B×C×H×W)."""
    ctx = ClientContext(p.setup, Exchange(0), Networks(), client=0, data=p.federation.shard(0))
    if method == "fedsimclr":
        net = ctx.network("net", lambda: p.method.network(ctx), start.weights)
        optimiser = ctx.optimiser(net).torch
    else:
        net = ctx.network("online", lambda: p.method.network(ctx), start.encoder)
        target = ctx.network("target", lambda: p.method.network(ctx), start.encoder)
        head = ctx.network("predictor", lambda: p.method.new_predictor(ctx), start.predictor)
        target.requires_grad_(False)
        optimiser = ctx.optimiser(net, head).torch

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        if method == "fedsimclr":
            loss = nt_xent(*net(views).chunk(2), p.method.temperature)
        else:
            v1, v2 = views.chunk(2)
            with torch.no_grad():
                t1, t2 = target(v1), target(v2)
            loss = byol(head(net(v1)), t2) + byol(head(net(v2)), t1)
        loss.backward()
        optimiser.step()
        if method != "fedsimclr":
            ema_(target, net, 0.99)

    step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


def bare(p: Prepared, method: str, workers: int, steps: int) -> float:
    """Images/s of ``workers`` processes that do nothing but train.

    They are forked after OpenMP was used, so they may only compute with one thread (see
    furlong/engines/pool.py). What takes more, the server's first state, is made before.
    """
    batch = p.setup.batch_size
    with threads(), seeded(p.setup.device, 0):
        views = torch.cat(p.setup.augment.views(p.train.pixels[:batch]))
    start = p.server.init()
    context = get_context("fork")
    barrier, seconds = context.Barrier(workers), context.Array("d", workers)

    def work(number: int) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        barrier.wait(LIMIT)
        seconds[number] = bare_loop(p, method, steps, start, views)

    processes = [context.Process(target=work, args=(k,), daemon=True) for k in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        if process.exitcode != 0:
            raise SystemExit(f"a bare loop ended with {process.exitcode} (None: not in time)")
    return workers * steps * batch / max(seconds)


class Rounds:
    """A federation that goes on from round to round, so that only rounds are timed."""

    def __init__(self, p: Prepared, workers: int) -> None:
        self.p = p
        self.transport = InProcess(p.method, p.federation, p.setup, workers)
        self.state, self.exchanges = p.server.init(), iter(p.server.exchanges())
        self.run()  # workers build their networks once

    def run(self) -> float:
        """Images/s of one round, from the server's state to the server's state."""
        result = self.p.server.step(self.transport, self.state, next(self.exchanges))
        self.state = result.server
        assert not result.failures
        return sum(m["images"] for m in result.metrics.values()) / result.seconds


def where_it_goes(p: Prepared) -> dict[str, float]:
    """Seconds of the parts that the bare loop does not have, one thread, one client's share."""
    pixels = p.train.pixels[: p.setup.batch_size]
    net = p.method.encoder(p.server.init(), p.server.context(Exchange(0)))
    works = {
        "augment_ms_per_batch": lambda: p.setup.augment.views(pixels),
        "snapshot_ms": lambda: snapshot(net),
    }
    with threads():
        return medians(works, 10, clock=time.perf_counter)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--json", action="store_true")
    words.add_argument("--repeats", type=int, default=5)
    words.add_argument("--batch", type=int, default=128)
    words.add_argument("--steps", type=int, default=4, help="batches per client and round")
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument("--encoders", default="cnn5,resnet18")
    words.add_argument("--methods", default="fedsimclr,fedbyol")
    options = parse(words, repeats=1, batch=8, steps=1, workers=2, encoders="small")
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for encoder in options.encoders.split(","):
        for method in options.methods.split(","):
            p = setup(method, encoder, options.workers, options.steps, options.batch)
            rounds = Rounds(p, options.workers)
            bares, fulls = [], []
            for _ in range(options.repeats):
                bares.append(bare(p, method, options.workers, options.steps))
                fulls.append(rounds.run())
            rounds.transport.close()
            row = {
                "encoder": encoder,
                "method": method,
                "workers": options.workers,
                "batch": options.batch,
                "steps": options.steps,
                "bare_images_per_second": round(statistics.median(bares), 1),
                "round_images_per_second": round(statistics.median(fulls), 1),
                "ratio": round(
                    statistics.median(f / b for f, b in zip(fulls, bares, strict=True)), 3
                ),
                **{k: round(v, 1) for k, v in where_it_goes(p).items()},
            }
            rows.append(row)
            if not options.json:
                print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
