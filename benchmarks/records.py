"""What a step of single images' gradients costs (privacy.level = record), beside a plain one.

Milliseconds of the processor per image, one thread, encoder ``small`` with group norms and FedRot's
head, images of 32 pixels: a plain step on a batch; the same gradients one image after the other,
cut and added up, which is what a run does; and by torch.func.vmap, not cut. With one turn of every
image, or all four.

    python benchmarks/records.py [--json] [--smoke] [--images 64] [--repeats 9]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measuring import medians, parse, parser, show
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from furlong.data.augment import rotated
from furlong.methods.wrappers.private_records import clipped_sum
from furlong.nn.encoders import build_encoder, out_dim


def works(images: int, turns: int) -> dict[str, Callable[[], Any]]:
    """The three ways, on the same images."""
    encoder = build_encoder("small+all_gn", 3, 32)
    net = nn.Sequential(encoder, nn.Linear(out_dim(encoder, 3, 32), 4))
    net = net.to(memory_format=torch.channels_last).train()
    parameters = list(net.parameters())
    pixels = torch.randn(images, 3, 32, 32).to(memory_format=torch.channels_last)
    which = torch.arange(turns)

    def loss(made: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        turned = which.repeat_interleave(len(rows))
        return F.cross_entropy(made(rotated(rows.repeat(turns, 1, 1, 1), turned)), turned)

    def one(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        views = torch.stack([torch.rot90(image, int(turn), (1, 2)) for turn in which])
        return F.cross_entropy(functional_call(net, weights, (views,)), which)

    weights = {name: p.detach() for name, p in net.named_parameters()}
    every = vmap(partial(grad(one), weights))
    units: Any = pixels.split(1)
    return {
        "plain step": lambda: torch.autograd.grad(loss(net, pixels), parameters),
        "one by one": lambda: clipped_sum(lambda unit: loss(net, unit), units, parameters, 1.0),  # type: ignore[arg-type]
        "vmap": lambda: every(pixels),
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--images", type=int, default=64)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--json", action="store_true")
    given = parse(options, images=2, repeats=1)
    torch.set_num_threads(1)
    for turns in (1, 4):
        found = medians(works(given.images, turns), given.repeats)
        row = {name: round(value / given.images, 3) for name, value in found.items()}
        show({"turns of an image": turns, **row}, given.json)


if __name__ == "__main__":
    main()
