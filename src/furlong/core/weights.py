"""Arithmetic on weights and payloads: values by name, never modules, never by position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from furlong.core.layout import packed_order
from furlong.core.payload import (
    Weights,
    flatten,
    is_buffer,
    joined,
    joined_alike,
    rebuild,
    room_for,
)
from furlong.nn.fixed import keeps_statistics
from furlong.seeding import threads

P = TypeVar("P")
BatchNormPolicy = Literal["average", "local", "pooled", "recalibrate"]


def snapshot(module: nn.Module) -> Weights:
    """A copy of the module's parameters and buffers, in the default layout, on the CPU."""
    own = module.state_dict()
    copies = room_for(own)
    with torch.no_grad():
        for name, copy in copies.items():
            copy.copy_(own[name])
    return copies


def restore(module: nn.Module, weights: Weights) -> None:
    """Copy ``weights`` into the module's own storage; names and shapes must agree exactly."""
    own = module.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(f"weights differ in names: {sorted(own.keys() ^ weights.keys())[:6]}")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:  # copy_ would broadcast (1, 1) silently
                raise ValueError(
                    f"{name} has shape {tuple(weights[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(weights[name])


def prefixed(weights: Weights, prefix: str) -> Weights:
    """The weights whose name starts with ``prefix`` and a dot, under the rest of the name."""
    start = len(prefix) + 1
    return {name[start:]: t for name, t in weights.items() if name.startswith(f"{prefix}.")}


def lerp(start: Weights, end: Weights, amount: float) -> Weights:
    """(1 - amount)·start + amount·end over parameters; buffers come from ``end``."""
    return {
        name: end[name].clone() if is_buffer(name) else torch.lerp(tensor, end[name], amount)
        for name, tensor in start.items()
    }


@torch.no_grad()
def ema_(target: nn.Module, online: nn.Module, decay: float) -> None:
    """Target ← decay·target + (1 - decay)·online over parameters, in place; buffers stay."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1.0 - decay)


def mean_conv_l2(a: Weights, b: Weights) -> float:
    """Mean over the convolution weights of their L2 distance (EasyFL's divergence).

    Like EasyFL it takes the names that hold "conv" and "weight": 17 tensors of a ResNet-18. In a
    vision transformer the patches' projection and the matrices of the blocks do the work of
    convolutions: 49 tensors of a ViT-Tiny. Any other encoder without such names is measured by its
    four-dimensional weights.
    """
    names = [name for name in a if "conv" in name and "weight" in name]
    if not names and any(name.endswith("attn.qkv.weight") for name in a):
        parts = ("patch_embed.", "blocks.")
        names = [n for n in a if a[n].dim() >= 2 and any(part in n for part in parts)]
    if not names:  # an encoder with other names: its convolutions, or all its matrices
        names = [n for n in a if a[n].dim() == 4] or [n for n in a if a[n].dim() >= 2]
    return sum(float(torch.linalg.vector_norm(a[n] - b[n])) for n in names) / len(names)


def sq_l2(a: Weights, b: Weights) -> float:
    """Squared L2 distance over all parameters (the paper's divergence)."""
    return sum(float((a[n] - b[n]).square().sum()) for n in a if not is_buffer(n))


def first_nonfinite(value: Any) -> str | None:
    """The path of a tensor in ``value`` that holds NaN or infinity, or ``None``."""
    tensors = {path: t for path, t in flatten(value)[0].items() if t.is_floating_point()}
    if all(map(_finite, joined(tensors[path] for path in packed_order(tensors)))):
        return None
    return next((path for path, tensor in tensors.items() if not _finite(tensor)), None)


def _finite(tensor: Tensor) -> bool:
    """One pass, nothing allocated: NaN and infinity go through a sum.

    A sum of finite numbers may also overflow, but not that of float32 numbers in float64.
    """
    sums = (tensor.sum(dtype=dtype).item() for dtype in (tensor.dtype, torch.float64))
    return any(map(math.isfinite, sums))


DIVERGENCES = {"mean_conv_l2": mean_conv_l2, "sq_l2": sq_l2}

BLOCK = 1 << 19  # numbers


def blocks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equally many numbers, flat, a part of all of them at a time.

    What arithmetic makes on its way then stays in the processor's cache. Of a whole network it is
    hundreds of megabytes: torch copies what is added to sums of another type.
    """
    return zip(*(torch.split(row.reshape(-1), BLOCK) for row in rows), strict=True)


class Mean(Generic[P]):
    """Streaming weighted mean of payloads of one structure, in float64, in the order of ``add``.

    Floating tensors are averaged, integer ones take the maximum, the rest comes from the first.
    ``pooled`` gives BatchNorm variances their spread between clients:
    Σw(σ² + μ²) - (Σwμ)² instead of Σwσ².
    """

    def __init__(self, pooled: bool = False) -> None:
        self.pooled = pooled
        self.total = 0.0
        self._sums: dict[str, Tensor] = {}
        self._floating: list[str] = []  # the names of what is averaged, as they are packed
        self._counts: list[str] = []  # the names of the rest
        self._like: Weights = {}  # on no device: types and shapes
        self._tree: Any = None

    def add(self, value: P, weight: float) -> None:
        """Count ``value`` with ``weight`` (≥ 0)."""
        tensors, tree = flatten(value)
        if not self._sums:
            self._start(tensors, tree)
        self.total += weight
        averaged = [tensors[name] for name in self._floating]
        with threads():  # elementwise, so the same bits; the other cores have clients to train
            if self.pooled:
                averaged = [self._with_spread(name, tensors) for name in self._floating]
            sums = [self._sums[name] for name in self._floating]
            sums, averaged = joined_alike(sums, averaged)
            for pair in zip(sums, averaged, strict=True):
                for total, each in blocks(*pair):
                    total.add_(each, alpha=weight)
            for name in self._counts:
                torch.maximum(self._sums[name], tensors[name], out=self._sums[name])

    def _start(self, tensors: Weights, tree: Any) -> None:
        """Sums of nothing, of the structure that the first value has."""
        self._tree = tree
        self._like = {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}
        order = packed_order(tensors)
        self._floating = [name for name in order if tensors[name].is_floating_point()]
        self._counts = [name for name in order if not tensors[name].is_floating_point()]
        sizes = [tensors[name].numel() for name in self._floating]
        parts = torch.split(torch.zeros(sum(sizes), dtype=torch.float64), sizes)
        sums = {n: p.view(tensors[n].shape) for n, p in zip(self._floating, parts, strict=True)}
        self._sums = {n: sums[n] if n in sums else t.clone() for n, t in tensors.items()}

    @staticmethod
    def _with_spread(name: str, tensors: Weights) -> Tensor:
        """What is added up of a tensor: σ² + μ² of a variance, else the tensor itself."""
        if not name.endswith("running_var"):
            return tensors[name]
        mean = tensors[name.removesuffix("var") + "mean"].double()
        return tensors[name].double() + mean.square()

    def result(self) -> P | None:
        """The mean, or ``None`` when nothing was added."""
        if not self.total:
            return None
        with threads():
            done = room_for(self._like)
            sums = [self._sums[name] for name in self._floating]
            pieces = joined_alike([done[name] for name in self._floating], sums)
            for pair in zip(*pieces, strict=True):
                for mean, total in blocks(*pair):
                    mean.copy_(total / self.total)
            for name in self._floating if self.pooled else ():
                if name.endswith("running_var"):
                    mean = self._sums[name.removesuffix("var") + "mean"] / self.total
                    done[name].copy_(self._sums[name] / self.total - mean.square())
            for name in self._counts:
                done[name].copy_(self._sums[name])
        result: P = rebuild(self._tree, done)
        return result


@torch.no_grad()
def recalibrate(module: nn.Module, batches: Any) -> None:
    """Estimate the BatchNorm statistics anew from ``batches`` of inputs (cumulative average)."""
    every = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [m for m in every if not keeps_statistics(m)]
    flags = [(m, m.training) for m in module.modules()]
    momenta = [m.momentum for m in norms]
    module.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in batches:
        module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for part, training in flags:
        part.training = training
