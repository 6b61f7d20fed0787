"""Images per second of whole federated rounds, divided by the bare PyTorch loop's.

The bare loop is the fastest we can make: pre-augmented tensors, the same networks and loss, the
same number of one-thread processes, channels_last, fused optimiser, freed memory kept. It has the
same schedule: with five clients on two workers one process does three clients' steps and the other
two, so that waiting for the slower one counts on neither side. The round adds reading and
augmenting images, loading and packing weights, sending, checking and averaging them. Both are run
in turn, several times; medians count.

    python benchmarks/throughput.py [--json] [--smoke] [--repeats 3] [--encoders cnn5,resnet18] …
    python benchmarks/throughput.py --encoders resnet18,vit_tiny,vit_small --methods fedsimclr
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from measuring import medians, parse, parser, show

from furlong.core.context import ClientContext, Exchange, Networks
from furlong.core.weights import ema_, snapshot
from furlong.engines.inprocess import InProcess
from furlong.engines.pool import keep_freed_memory
from furlong.nn.losses import byol, nt_xent
from furlong.runs.config import from_tree
from furlong.runs.prepare import Prepared, prepare
from furlong.seeding import seeded, threads

LIMIT = 600.0  # seconds for the bare loop of a process
LEAST = 0.95  # of the bare loop


def setup(
    method: str, encoder: str, clients: int, workers: int, steps: int, batch: int
) -> Prepared:
    """Clients of equal size, ``steps`` batches each: both sides then do equal work."""
    options = {
        "method": method,
        "encoder": encoder,
        "data.images": batch * steps * clients,
        "data.test_images": 100,
        "partition": "iid",
        "clients": clients,
        "rounds": 1000,
        "batch_size": batch,
        "workers": workers,
        "data.augment": "fedu",
    }
    return prepare(from_tree({}, options, "benchmark"))


def trainer(p: Prepared, method: str, start: Any) -> Callable[[torch.Tensor], None]:
    """What takes one optimiser step on views (2B×C×H×W): networks and loss, nothing else."""
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

    def step(views: torch.Tensor) -> None:
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

    return step


def bare_loop(p: Prepared, method: str, steps: int, start: Any, views: torch.Tensor) -> float:
    """Seconds for ``steps`` optimiser steps on pre-augmented views (2B×C×H×W)."""
    step = trainer(p, method, start)
    step(views)
    began = time.perf_counter()
    for _ in range(steps):
        step(views)
    return time.perf_counter() - began


def bare(p: Prepared, method: str, workers: int, steps: int) -> float:
    """Images/s of ``workers`` processes that do nothing but train, ``steps`` for each client.

    They are forked after OpenMP was used, so they may only compute with one thread (see
    furlong/engines/pool.py). What takes more, the server's first state, is made before.
    """
    batch, clients = p.setup.batch_size, len(p.federation.clients)
    with threads(), seeded(p.setup.device, 0):
        views = torch.cat(p.setup.augment.views(p.train.pixels[:batch]))
    start = p.server.init()
    context = get_context("fork")
    barrier, seconds = context.Barrier(workers), context.Array("d", workers)

    def work(number: int) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        barrier.wait(LIMIT)
        share = len(range(number, clients, workers))
        seconds[number] = bare_loop(p, method, share * steps, start, views)

    processes = [context.Process(target=work, args=(k,), daemon=True) for k in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        if process.exitcode != 0:
            raise SystemExit(f"a bare loop ended with {process.exitcode} (None: not in time)")
    return clients * steps * batch / max(seconds)


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


def measured(encoder: str, method: str, clients: int, options: Namespace) -> dict[str, Any]:
    """One row: both sides in turn."""
    p = setup(method, encoder, clients, options.workers, options.steps, options.batch)
    rounds = Rounds(p, options.workers)
    bares, fulls = [], []
    for _ in range(options.repeats):
        bares.append(bare(p, method, options.workers, options.steps))
        fulls.append(rounds.run())
    rounds.transport.close()
    ratio = statistics.median(f / b for f, b in zip(fulls, bares, strict=True))
    return {
        "encoder": encoder,
        "method": method,
        "clients": clients,
        "workers": options.workers,
        "batch": options.batch,
        "steps": options.steps,
        "bare_images_per_second": round(statistics.median(bares), 1),
        "round_images_per_second": round(statistics.median(fulls), 1),
        "ratio_under_the_same_schedule": round(ratio, 3),
        "passed": ratio >= LEAST,
        **{k: round(v, 1) for k, v in where_it_goes(p).items()},
    }


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--json", action="store_true")
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--batch", type=int, default=128)
    words.add_argument("--steps", type=int, default=2, help="batches per client and round")
    words.add_argument("--clients", default="5,4")
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument("--encoders", default="cnn5,resnet18")
    words.add_argument("--methods", default="fedsimclr,fedbyol")
    options = parse(words, repeats=1, batch=8, steps=1, clients="3", workers=2, encoders="small")
    keep_freed_memory()
    kinds = (options.encoders.split(","), options.methods.split(","), options.clients.split(","))
    for encoder, method, clients in product(*kinds):
        show(measured(encoder, method, int(clients), options), options.json)


if __name__ == "__main__":
    main()
