"""A bank of feature vectors: K unit rows, the oldest of which give way (MoCo's queue)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.errors import fitting


def new_bank(size: int, width: int) -> Tensor:
    """Random unit rows ``size``×``width``: negatives that repel from nowhere in particular."""
    with fitting(f"a table of {size:,} rows of {width} numbers"):
        return F.normalize(torch.randn(size, width), dim=1)


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
