"""How many images a second an encoder trains on: vision transformers beside ResNet-18.

    python benchmarks/encoders.py [--size 32] [--batch 32] [--only vit_tiny,resnet18] [--smoke]

One thread, as clients compute. A step is one client's whole ``local_update`` of FedSimCLR on a
single batch: views, both passes, loss, backward, optimiser. The encoders take turns; medians of
processor time count, so other programs matter little.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from measuring import medians, parse, parser
from steps import client, step

from furlong.core.context import Exchange
from furlong.engines.pool import keep_freed_memory

ENCODERS = (
    *("small", "resnet18", "efficientnet_lite0"),
    *("vit_mini", "vit_tiny", "vit_small"),
)


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--only", default=",".join(ENCODERS), help="names, comma between them")
    words.add_argument("--size", type=int, default=32)
    words.add_argument("--batch", type=int, default=32)
    words.add_argument("--repeats", type=int, default=3)
    options = parse(words, only="small,vit_mini", size=16, batch=8, repeats=1)
    torch.set_num_threads(1)
    keep_freed_memory()
    works, sizes = {}, {}
    for name in options.only.split(","):
        p, ctx = client(Namespace(**{**vars(options), "encoder": name}), "fedsimclr")
        down = p.method.download(p.server.init(), 0, p.server.context(Exchange(0)))
        works[name] = step(p.method, p.method.init_client(ctx), down, ctx)
        sizes[name] = sum(value.numel() for value in ctx.encoder().parameters())
    found = medians(works, options.repeats)
    print(f"{options.size} pixels, batches of {options.batch}, one thread")
    print("| encoder | parameters | images per second | beside ResNet-18 |\n|---|---|---|---|")
    for name, milliseconds in found.items():
        beside = f"{found['resnet18'] / milliseconds:.2f}" if "resnet18" in found else "–"
        speed = 1e3 * options.batch / milliseconds
        print(f"| `{name}` | {sizes[name] / 1e6:.1f} M | {speed:,.0f} | {beside} |")


if __name__ == "__main__":
    main()
