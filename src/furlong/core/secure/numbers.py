"""Tensors as whole numbers modulo 2^64: masks can be added to them, and fall out of the sum.

A client with n_k images sends for each of its numbers w the whole number nearest to n_k·w·2^f. The
sum over the clients of a round, divided by 2^f·Σn_k, is their weighted mean. With N the images of
all clients that sent keys and C the largest absolute value that is allowed, f is the largest whole
number with N·C·2^f ≤ 2^62: no sum can overflow. Rounding moves every number by at most ½, so with
K clients the mean is off by at most K/(2·2^f·Σn_k): with 50,000 images in 10 clients and C = 10^6,
where f = 26, by 1.5·10^-12. Nothing else is lost.

Whole numbers (BatchNorm's counters of batches) are multiplied by n_k alone. The vector begins with
n_k itself, then n_k and n_k·loss·2^f, or twice zero where a client has no loss to tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from furlong.errors import FurlongError

HEAD = 3  # n_k, n_k where there is a loss, n_k·loss


def fraction_bits(images: int, bound: float) -> int:
    """f, for ``images`` of all clients and values up to ``bound``."""
    bits = 62 - math.ceil(math.log2(images) + math.log2(bound))
    if bits < 8:
        raise FurlongError(
            f"secure.bound is {bound:g}: with {images:,} images in a round only {max(0, bits)} "
            "bits are left behind the point. Give a smaller --secure.bound."
        )
    return bits


@dataclass(frozen=True)
class Sum:
    """What is in a sum: images, the mean loss if there is one, and the means by name."""

    images: int
    loss: float | None
    means: dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each tensor is in the vector; ``like`` has the names, shapes and dtypes."""

    like: Mapping[str, Tensor]
    bits: int
    bound: float

    def __len__(self) -> int:
        return HEAD + sum(tensor.numel() for tensor in self.like.values())

    def encode(self, tensors: Mapping[str, Tensor], images: int, loss: float | None) -> np.ndarray:
        """The client's vector, uint64."""
        vector = np.empty(len(self), dtype=np.int64)
        told = loss is not None and abs(loss) <= self.bound
        vector[:HEAD] = images, images * told, self._scaled(loss, images) if told and loss else 0
        start = HEAD
        for name, like in self.like.items():
            tensor, stop = tensors[name].detach(), start + like.numel()
            self._require_fitting(name, tensor)
            place = torch.from_numpy(vector[start:stop])
            if like.is_floating_point():
                scaled = tensor.to(torch.float64).flatten() * (float(images) * 2.0**self.bits)
                place.copy_(scaled.round_())
            else:
                place.copy_(tensor.flatten() * images)
            start = stop
        return vector.view(np.uint64)

    def decode(self, total: np.ndarray) -> Sum:
        """The means in a sum of vectors, uint64: in float64, and of whole numbers rounded up."""
        signed = torch.from_numpy(total.view(np.int64))
        images, told, loss = signed[:HEAD].tolist()
        if images <= 0:
            raise FurlongError(f"a sum over {images} images")
        means: dict[str, Tensor] = {}
        start = HEAD
        for name, like in self.like.items():
            part = signed[start : start + like.numel()].view(like.shape)
            if like.is_floating_point():
                means[name] = part.to(torch.float64) / (float(images) * 2.0**self.bits)
            else:
                means[name] = -(-part).div(images, rounding_mode="floor")
            start += like.numel()
        mean_loss = loss / (told * 2.0**self.bits) if told > 0 else None
        return Sum(images, mean_loss, means)

    def error(self, clients: int, images: int) -> float:
        """The most by which rounding can move a mean of ``clients`` with ``images`` in all."""
        return clients / (2.0 ** (self.bits + 1) * images)

    def _scaled(self, value: float, images: int) -> int:
        return round(value * images * 2.0**self.bits)

    def _require_fitting(self, name: str, tensor: Tensor) -> None:
        """Refuse what would overflow: the server cannot look, so the client does."""
        if not tensor.numel():
            return
        low, high = (float(v) for v in torch.aminmax(tensor))
        most = self.bound if tensor.is_floating_point() else self.bound * 2.0**self.bits
        if not max(-low, high) <= most:  # NaN too
            raise FurlongError(
                f"{name} holds a value beyond ±{most:g} (from {low:g} to {high:g}), which does not "
                "fit into a masked sum. Give a larger --secure.bound, or a smaller learning rate."
            )
