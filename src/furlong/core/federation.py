"""Who holds which data. ``only``, ``pooled`` and ``without`` are the bounds of a federated run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from furlong.core.context import Shard
from furlong.data.images import ImageSet
from furlong.data.partition import Partition
from furlong.errors import FurlongError


@dataclass(frozen=True)
class Federation:
    """The clients' images: one set, and the rows of it that each client owns."""

    images: ImageSet
    rows: dict[int, Tensor]  # client -> int64 n_k

    @classmethod
    def of(cls, images: ImageSet, partition: Partition) -> Federation:
        """One client for each part."""
        small = [k for k, rows in enumerate(partition.indices) if len(rows) < 2]
        if small:
            raise FurlongError(
                f"client {small[0]} gets {len(partition.indices[small[0]])} image(s); contrasting "
                "needs at least 2. Use fewer clients, more images or another --partition."
            )
        return cls(images, dict(enumerate(partition.indices)))

    @property
    def clients(self) -> list[int]:
        """The clients' numbers, ascending."""
        return sorted(self.rows)

    @property
    def sizes(self) -> dict[int, int]:
        """Images per client."""
        return {client: len(self.rows[client]) for client in self.clients}

    def shard(self, client: int, *, labels: bool = False) -> Shard:
        """A client's data, without labels unless they are asked for."""
        return Shard(self.images if labels else self._unlabelled, self.rows[client])

    @cached_property
    def _unlabelled(self) -> ImageSet:
        """Made once: an image set looks at all that is known of its images."""
        return replace(self.images, labels=None, classes=())

    def only(self, client: int) -> Federation:
        """The federation in which ``client`` is alone; it keeps its number."""
        return replace(self, rows={client: self.rows[client]})

    def without(self, client: int) -> Federation:
        """The federation of the others, who keep their numbers and so their random numbers."""
        others = {k: rows for k, rows in self.rows.items() if k != client}
        if not others:
            raise FurlongError(f"without client {client} nobody is left.")
        return replace(self, rows=others)

    def pooled(self) -> Federation:
        """One client, number 0, that holds everything."""
        return replace(self, rows={0: torch.cat([self.rows[k] for k in self.clients]).sort()[0]})
