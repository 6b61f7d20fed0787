"""What the extra parts of FCL and FedCA cost, beside the same local step without them.

    python benchmarks/steps.py [fcl] [fedca] [--json] [--smoke] [--encoder resnet18] [--batch 128] …

One thread, as clients compute. Each step is one client's whole ``local_update`` of a single batch
without fixed costs (networks are built, banks are full): views, networks, losses, backward,
optimiser, banks. The variants are run in turn; medians of processor time count.

FCL: matching may add 35 %. FedCA: dictionary and alignment may add 30 % beyond the passes that the
method needs by definition: a forward and backward pass of B alignment images at every step
and a forward pass of all local images (here B) at the end of a round.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from measuring import medians, parse, parser, show

from furlong.core.context import ClientContext, Exchange, Networks
from furlong.engines.pool import keep_freed_memory
from furlong.methods.bank import new_bank
from furlong.nn.encoders import evaluating
from furlong.nn.losses import info_nce, neighbourhood_matching
from furlong.runs.config import from_tree
from furlong.runs.prepare import Prepared, prepare
from furlong.seeding import seeded

LIMITS = {"fcl": 1.35, "fedca": 1.30}


def client(options: Namespace, method: str, **more: Any) -> tuple[Prepared, ClientContext]:
    """A run with one client that holds one batch."""
    settings = {
        "method": method,
        "method.projection_head": "proj_128",
        "encoder": options.encoder,
        "data.images": options.batch,
        "data.test_images": 100,
        "data.image_size": options.size,
        "data.augment": "moco_cifar",
        "partition": "iid",
        "clients": 1,
        "batch_size": options.batch,
        **more,
    }
    p = prepare(from_tree({}, settings, "benchmark"))
    return p, ClientContext(p.setup, Exchange(0), Networks(), client=0, data=p.federation.shard(0))


def step(method: Any, state: Any, down: Any, ctx: ClientContext) -> Callable[[], None]:
    """One local update, with the same random numbers every time."""

    def work() -> None:
        with seeded(ctx.setup.device, 0):
            method.local_update(state, down, ctx)

    return work


def fcl(options: Namespace) -> dict[str, Any]:
    """With and without matching."""
    given = {"method.bank": options.bank, "method.neighbours": options.neighbours}
    p, ctx = client(options, "fcl", **given)
    method: Any = p.method
    down = method.download(p.server.init(), 0, p.server.context(Exchange(0)))
    remote = new_bank((options.clients - 1) * options.bank, down.remote.shape[1])
    down = replace(down, remote=remote)
    state = method.local_update(method.init_client(ctx), down, ctx).state  # banks are full
    without = step(replace(method, matching=0.0), state, down, ctx)
    found = medians({"without": without, "with": step(method, state, down, ctx)}, options.repeats)
    alone = losses(options)
    direct = options.batch * options.neighbours * (options.bank - options.neighbours + 1) * 4
    return {
        "step_without_ms": round(found["without"], 1),
        "step_with_ms": round(found["with"], 1),
        "ratio": round(found["with"] / found["without"], 3),
        "matching_ms": round(alone["matching"], 2),
        "contrast_ms": round(alone["contrast"], 2),
        "matching_kept_mb": round(kept_megabytes(options), 1),
        "one_direct_tensor_mb": round(direct / 2**20, 1),
    }


def fedca(options: Namespace) -> dict[str, Any]:
    """Without both parts, with them, and without them but with the passes that they need."""
    given = {"data.public": "shapes", "data.public_images": options.batch, "method.align_epochs": 1}
    p, ctx = client(options, "fedca", **given)
    method: Any = p.method
    down = method.download(p.server.init(), 0, p.server.context(Exchange(0)))
    down = replace(down, dictionary=new_bank(method.dictionary, down.dictionary.shape[1]))
    state = method.local_update(method.init_client(ctx), down, ctx).state
    down = replace(down, alignment=None)
    plain = step(replace(method, dictionary=0, alignment=0.0), state, down, ctx)
    net = method.network(ctx).to(memory_format=torch.channels_last)
    images = ctx.setup.augment.plain(ctx.data.pixels(torch.arange(len(ctx.data))))

    def passes() -> None:
        plain()
        net(images).sum().backward()
        with evaluating(net):
            net(images)

    works = {"without": plain, "passes": passes, "with": step(method, state, down, ctx)}
    found = medians(works, options.repeats)
    return {
        "step_without_ms": round(found["without"], 1),
        "step_without_but_with_passes_ms": round(found["passes"], 1),
        "step_with_ms": round(found["with"], 1),
        "ratio": round(found["with"] / found["passes"], 3),
    }


def losses(options: Namespace) -> dict[str, float]:
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

    return medians({"matching": matching, "contrast": contrast}, 1 if options.smoke else 20)


def kept_megabytes(options: Namespace) -> float:
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
    words = parser(__doc__)
    words.add_argument("methods", nargs="*", help="fcl, fedca; both if none is given")
    words.add_argument("--json", action="store_true")
    words.add_argument("--encoder", default="resnet18")
    words.add_argument("--size", type=int, default=32)
    words.add_argument("--batch", type=int, default=128)
    words.add_argument("--bank", type=int, default=4096)
    words.add_argument("--neighbours", type=int, default=10)
    words.add_argument("--clients", type=int, default=5)
    words.add_argument("--repeats", type=int, default=3)
    options = parse(words, encoder="small", size=16, batch=8, bank=64, neighbours=3, repeats=1)
    if not set(options.methods) <= LIMITS.keys():
        words.error(f"methods: {', '.join(LIMITS)}")
    torch.set_num_threads(1)
    keep_freed_memory()
    for method in options.methods or LIMITS:
        row = {"method": method, "encoder": options.encoder, "batch": options.batch}
        row |= {"fcl": fcl, "fedca": fedca}[method](options)
        row["passed"] = row["ratio"] < LIMITS[method]
        show(row, options.json)


if __name__ == "__main__":
    main()
