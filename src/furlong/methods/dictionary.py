"""FedCA's dictionary of unit rows: who sends how many, what is drawn, and when it does harm."""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor, nn

from furlong.core.context import ClientContext, Setup
from furlong.methods.alignment import outputs

ENOUGH = 100  # steps of a round: measured, 15 are too few, and 70 hardly enough


def share(total: int, client: int, setup: Setup) -> int:
    """How many of the dictionary's ``total`` rows are ``client``'s: ⌈total·n_k/Σn⌉ of its n_k."""
    own, everybody = setup.sizes[client], sum(setup.sizes.values())
    return min(own, -(-total * own // everybody))


def projections(net: nn.Module, ctx: ClientContext) -> Tensor:
    """The z (n_k×d_z, not normalised) of all images of the client, without augmentation."""
    # not ctx.batches, which counts images trained on
    pieces = torch.split(torch.arange(len(ctx.data)), ctx.setup.batch_size)
    return outputs(net, (ctx.setup.augment.plain(ctx.data.pixels(rows)) for rows in pieces), ctx)


def drawn(rows: Tensor, count: int) -> Tensor:
    """``count`` of the rows, without replacement."""
    return rows[torch.randperm(len(rows))[:count]]


def joined(shares: list[Tensor], total: int) -> Tensor:
    """At most ``total`` rows, the shares one below the other.

    Every share was rounded up, so there may be a row too many for each of some clients.
    """
    keep = len(shares) - max(0, sum(map(len, shares)) - total)
    return torch.cat([*shares[:keep], *(rows[:-1] for rows in shares[keep:])])[:total]


def short_rounds(total: int, setup: Setup) -> list[str]:
    """A warning of a collapse, for a dictionary of ``total`` rows without alignment.

    Rows are constants and never positives, so at first it pays to move all projections away from
    them together: beside N images the mean gradient of an anchor is about total/(N + total)·(mean
    of the rows - mean of the batch)/τ. Later in a round projections spread again, but the next
    dictionary of a short round is made before that, and the one after it is worse.
    """
    steps, batch = int(median(map(setup.steps, setup.sizes))), setup.batch_size
    if total <= batch or steps >= ENOUGH:
        return []
    return [
        f"the representation may collapse: the dictionary has {total} rows beside a batch of "
        f"{batch}, there is no alignment, and a client takes {steps} step(s) in a round. In the "
        "first steps clients move all projections away from the dictionary together; they spread "
        f"again only later. Give more --epochs (for {ENOUGH} steps or more), a --method.alignment "
        "above 0 (with --public), or a --method.dictionary no larger than the batch. In a collapse "
        "dictionary_cosine in metrics.jsonl goes to 1."
    ]
