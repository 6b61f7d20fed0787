"""What neighbourhood matching costs: FCL's local step with it and without it.

    PYTHONPATH=src python benchmarks/fcl_step.py [--json] [--encoder resnet18] [--batch 128] ...

One thread, as clients compute. Each step is one client's whole ``local_update`` of a single batch
without fixed costs (networks are built, banks are full): views, query, key, encoded key, losses,
backward, optimiser, moving average, banks. Both variants are run in turn; medians of processor
time count. The requirement is that matching adds less than 35 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from furlong.assemble import prepare
from furlong.config import from_tree
from furlong.context import ClientContext, Exchange, Networks
from furlong.engines.inprocess import keep_freed_memory
from furlong.losses import info_nce, neighbourhood_matching
from furlong.methods.bank import new_bank
from furlong.methods.fcl import FCL
from furlong.rounds import seeded

LIMIT = 1.35


def milliseconds(work: Any) -> float:
    """Processor time of ``work()``: one thread, and other programs do not count."""
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def steps(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a step, without and with matching."""
    settings = {
        "method": "fcl",
        "method.bank": options.bank,
        "method.neighbours": options.neighbours,
        "method.projection_head": "proj_128",
        "encoder": options.encoder,
        "data.images": options.batch,
        "data.test_images": 100,
        "data.image_size": options.size,
        "data.augment": "moco_cifar",
        "partition": "iid",
        "clients": 1,
        "batch_size": options.batch,
    }
    p = prepare(from_tree({}, settings, "benchmark"))
    ctx = ClientContext(p.setup, Exchange(0), Networks(), client=0, data=p.federation.shard(0))
    method: FCL = p.method  # type: ignore[assignment]
    down = method.download(p.server.init(), 0, p.server.context(Exchange(0)))
    remote = new_bank((options.clients - 1) * options.bank, down.remote.shape[1])
    down, state = replace(down, remote=remote), method.init_client(ctx)
    both = {"without": replace(method, matching=0.0), "with": method}
    times: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(options.repeats + 1):
        for name, variant in both.items():

            def work(variant: FCL = variant) -> None:
                with seeded(p.setup.device, 0):
                    variant.local_update(state, down, ctx)

            times[name].append(milliseconds(work))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def losses(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of the losses alone, forward and backward to the query."""
    torch.manual_seed(0)
    query = torch.randn(options.batch, 128, requires_grad=True)
    key = F.normalize(torch.randn(options.batch, 128), dim=1)
    union = new_bank(options.clients * options.bank, 128)

    def matching() -> None:
        sample = union[torch.randperm(len(union))[: options.bank]]
        loss = neighbourhood_matching(query, sample, options.neighbours, 0.1)
        torch.autograd.grad(loss, query)

    def contrast() -> None:
        torch.autograd.grad(info_nce(query, key, union, 0.1), query)

    works = {"matching": matching, "contrast": contrast}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(21):
        for name, work in works.items():
            times[name].append(milliseconds(work))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def kept_megabytes(options: argparse.Namespace) -> float:
    """What matching keeps for its backward pass, storages counted once."""
    query = torch.randn(options.batch, 128, requires_grad=True)
    bank = new_bank(options.bank, 128)
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = neighbourhood_matching(query, bank, options.neighbours, 0.1)
    del loss
    return sum(sizes.values()) / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--bank", type=int, default=4096)
    parser.add_argument("--neighbours", type=int, default=10)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    step, alone = steps(options), losses(options)
    direct = options.batch * options.neighbours * (options.bank - options.neighbours + 1) * 4
    row = {
        "encoder": options.encoder,
        "batch": options.batch,
        "bank": options.bank,
        "neighbours": options.neighbours,
        "clients": options.clients,
        "step_without_ms": round(step["without"], 1),
        "step_with_ms": round(step["with"], 1),
        "ratio": round(step["with"] / step["without"], 3),
        "matching_ms": round(alone["matching"], 2),
        "contrast_ms": round(alone["contrast"], 2),
        "matching_share_of_step": round(alone["matching"] / step["without"], 4),
        "matching_kept_mb": round(kept_megabytes(options), 1),
        "one_direct_tensor_mb": round(direct / 2**20, 1),
        "passed": step["with"] / step["without"] < LIMIT,
    }
    if options.json:
        print(json.dumps(row))
    else:
        print("\n".join(f"{name:24} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
