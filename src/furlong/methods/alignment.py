"""FedCA's alignment model: SimCLR on public images, near whose representations clients stay.

Clients run the public images without augmentation and on BatchNorm's running statistics: so equal
models have distance zero, and public images leave no trace in a client's statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from furlong.core.context import ClientContext, ServerContext, Shard
from furlong.core.payload import Weights, payload
from furlong.core.weights import snapshot
from furlong.devices import moved
from furlong.errors import FurlongError
from furlong.methods.fedsimclr import FedSimCLR
from furlong.nn.encoders import evaluating
from furlong.nn.losses import alignment_loss


@payload("furlong.methods.fedca.Alignment")
class Alignment:
    """The alignment model and its images, uint8 n×C×S×S; constant, sent once to each client."""

    weights: Weights
    pixels: Tensor


def train_alignment(simclr: FedSimCLR, count: int, epochs: int, ctx: ServerContext) -> Alignment:
    """SimCLR on ``count`` images drawn from the public ones."""
    if ctx.public is None:
        raise FurlongError(
            "fedca needs public images for its alignment model: give --public NAME, e.g. stl10 "
            "or folder:PATH, or set method.alignment = 0."
        )
    chosen = torch.randperm(len(ctx.public))[:count]
    data = Shard(ctx.public.images, ctx.public.rows[chosen])
    net = ctx.network("net", lambda: simclr.network(ctx), snapshot(simclr.network(ctx)))
    optimiser = ctx.optimiser(net)
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in ctx.batches_of(data, epochs=1):
            loss = simclr.loss(net, batch)
            optimiser.step(loss)
            losses.append(loss.detach())
        if 10 * epoch // epochs > 10 * (epoch - 1) // epochs:
            loss = torch.stack(losses).mean()
            ctx.tell(f"alignment model: epoch {epoch}/{epochs}, loss {loss:.3f}")
    return Alignment(snapshot(net), data.pixels(torch.arange(len(data))))


def outline(weights: Weights, count: int, ctx: ServerContext) -> Alignment:
    """What :func:`train_alignment` gives, in size only; public images need not be there."""
    images = count if ctx.public is None else min(count, len(ctx.public))
    side = ctx.setup.image_size
    pixels = torch.zeros(images, ctx.setup.channels, side, side, dtype=torch.uint8)
    return Alignment(weights, pixels)


def targets(net: nn.Module, pixels: Tensor, ctx: ClientContext) -> tuple[Tensor, Tensor]:
    """The h n×d_h and z n×d_z that the alignment model ``net`` makes of the images."""
    size = ctx.setup.batch_size
    plain = map(ctx.setup.augment.plain, torch.split(pixels, size))
    h = outputs(net.get_submodule("backbone"), plain, ctx)
    return h, outputs(net.get_submodule("projector"), torch.split(h, size), ctx)


def distance(
    net: nn.Module,
    pixels: Tensor,
    goal: tuple[Tensor, Tensor],
    reduction: Literal["mean", "sum"],
    ctx: ClientContext,
) -> Tensor:
    """The alignment loss of ``net`` on a random mini-batch of the images with targets ``goal``."""
    chosen, device = torch.randperm(len(pixels))[: ctx.setup.batch_size], ctx.setup.device
    net.eval()  # gradients flow all the same
    h = net.get_submodule("backbone")(ctx.setup.augment.plain(moved(pixels[chosen], device)))
    z = net.get_submodule("projector")(h)
    net.train()
    goal_h, goal_z = (moved(target[chosen], device) for target in goal)
    return alignment_loss(h, z, goal_h, goal_z, reduction)


def outputs(net: nn.Module, inputs: Iterable[Tensor], ctx: ClientContext) -> Tensor:
    """What ``net`` makes of ``inputs`` in eval mode, one below the other on the CPU."""
    with evaluating(net):
        return torch.cat([net(x.to(ctx.setup.device)).cpu() for x in inputs])
