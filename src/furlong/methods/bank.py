"""A bank of feature vectors: K unit rows, the oldest of which give way (MoCo's queue)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.errors import fitting

KeysOf = Callable[[Tensor], Sequence[Tensor]]


def new_bank(size: int, width: int) -> Tensor:
    """Random unit rows ``size``×``width``: negatives that repel from nowhere in particular."""
    return F.normalize(blank_bank(size, width).normal_(), dim=1)


def blank_bank(size: int, width: int) -> Tensor:
    """No rows yet, ``size``×``width`` of NaN: whoever uses one before it is written will notice."""
    with fitting(f"a table of {size:,} rows of {width} numbers"):
        return torch.full((size, width), torch.nan)


def enqueue(bank: Tensor, position: int, rows: Tensor) -> int:
    """Write ``rows`` over the oldest rows of ``bank``, in place; where the oldest row is then.

    Any number of rows will do: writing goes on at the top, and of more rows than there are places
    the newest stay.
    """
    end = position + len(rows)
    rows = rows[-len(bank) :]
    places = torch.arange(end - len(rows), end, device=bank.device) % len(bank)
    bank.index_copy_(0, places, rows)
    return end % len(bank)


def enqueue_each(banks: Sequence[Tensor], position: int, rows: Sequence[Tensor]) -> int:
    """The same for banks of one size, each with as many rows of its own."""
    ends = [enqueue(bank, position, own) for bank, own in zip(banks, rows, strict=True)]
    return ends[0]


def fill(banks: Sequence[Tensor], keys_of: KeysOf, batches: Iterator[Batch]) -> int:
    """Write every row of ``banks``: the keys of a view of one batch after the other.

    Where the oldest row is then. ``keys_of`` makes rows B×d for each bank of a view B×C×S×S.
    """
    position, blank = 0, len(banks[0])
    while blank > 0:
        (view,) = next(batches).views(1)
        position = enqueue_each(banks, position, keys_of(view))
        blank -= len(view)
    return position


def shares(query: Tensor, rows: Tensor, first: int, temperature: float, nearest: int) -> Tensor:
    """What the ``first`` of ``rows`` K×d are to queries B×d: two means over the queries.

    Their part of the softmax over all rows, and their part of the ``nearest`` rows of a query.
    """
    if not first:
        return query.new_zeros(2)
    logits = F.normalize(query, dim=1) @ rows.T / temperature
    mass = logits.softmax(dim=1)[:, :first].sum(dim=1).mean()
    found = logits.topk(min(nearest, len(rows))).indices
    return torch.stack([mass, (found < first).to(mass).mean()])


def purities(
    query: nn.Module, keys_of: KeysOf, batch: Batch, size: int, nearest: int
) -> list[float]:
    """For each bank: the part of a query's ``nearest`` keys that are of its class.

    Queries and keys are those of two views of all images of ``batch``, made ``size`` or a few more
    at a time; the key of a query's own image does not count.
    """
    assert batch.labels is not None
    parts = batch.pixels.tensor_split(max(1, len(batch.pixels) // size))
    views = (batch.augment.views(part, 2) for part in parts)
    made = [[query(view), *keys_of(other)] for view, other in views]
    q, *banks = (F.normalize(torch.cat(rows), dim=1) for rows in zip(*made, strict=True))
    cosines = [(q @ rows.T).fill_diagonal_(-torch.inf) for rows in banks]
    found = [each.topk(min(nearest, len(q) - 1)).indices for each in cosines]
    return [float((batch.labels[rows] == batch.labels[:, None]).double().mean()) for rows in found]
