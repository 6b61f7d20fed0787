"""Low-rank adapters (LoRA, Hu et al., ICLR 2022): W + s·B·A, of which only A and B are trained.

A layer with weights of ``out`` rows and ``into`` columns (a convolution: into·kh·kw) gets A of
rank×into and B of out×rank, with the names, shapes and start of the library PEFT: A is random,
B zero, s = alpha/rank. As there by default, biases and norms are not trained; here the statistics
of a BatchNorm stay as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from furlong.errors import FurlongError
from furlong.seeding import seed_of

A, B = "lora_A.weight", "lora_B.weight"  # how names of adapters' tensors end


@dataclass(frozen=True)
class Rank:
    """``lora:RANK`` or ``lora:RANK:ALPHA``; alpha is the rank where it is not given."""

    rank: int
    alpha: float

    @classmethod
    def parse(cls, text: str) -> Rank | None:
        """What ``model.adapter`` says; ``None`` for none."""
        if text == "none":
            return None
        kind, *numbers = text.split(":")
        try:
            rank = int(numbers[0])
            alpha = float(numbers[1]) if len(numbers) == 2 else float(rank)
            good = kind == "lora" and len(numbers) < 3 and rank > 0 and 0 < alpha < math.inf
        except (ValueError, IndexError):
            good = False
        if not good:
            raise FurlongError(
                f"model.adapter is {text!r}; it must be none, lora:RANK or lora:RANK:ALPHA, e.g. "
                "lora:8."
            )
        return cls(rank, alpha)


class _Factor(nn.Module):
    """Holds the weights A or B, as a layer would."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Adapted(nn.Module):
    """A linear layer or a convolution with an adapter beside it."""

    def __init__(self, base: nn.Linear | nn.Conv2d, shape: Rank, seed: int) -> None:
        super().__init__()
        self.base_layer, self.scale = base, shape.alpha / shape.rank
        out, *into = base.weight.shape
        # from a generator of its own: all parties draw the same, in whatever order they build
        draw = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(math.prod(into))
        start = torch.empty(shape.rank, *into).uniform_(-bound, bound, generator=draw)
        self.lora_A = _Factor(start)
        self.lora_B = _Factor(torch.zeros(out, shape.rank, *(1 for _ in into[1:])))

    def forward(self, x: Tensor) -> Tensor:
        """As the layer, with W + s·B·A; A goes the way of W, so any kind of padding is the same."""
        low: dict[str, Tensor] = {"weight": self.lora_A.weight}
        if self.base_layer.bias is not None:
            low["bias"] = x.new_zeros(len(self.lora_A.weight))
        inner = functional_call(self.base_layer, low, (x,))
        above = F.linear if isinstance(self.base_layer, nn.Linear) else F.conv2d
        out: Tensor = self.base_layer(x) + above(inner, self.scale * self.lora_B.weight)
        return out

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The layer alone, with W + s·B·A as its weights."""
        weight = self.base_layer.weight
        weight.add_(product(self.lora_A.weight, self.lora_B.weight).view_as(weight) * self.scale)
        return self.base_layer


def adapters(encoder: nn.Module, shape: Rank, names: set[str]) -> list[str]:
    """The layers of ``encoder`` that get an adapter, if their weights are among ``names``.

    Not those whose factors would have no fewer numbers than the weights, and no convolutions in
    groups: they have a few weights per channel.
    """
    found = []
    for name, part in encoder.named_modules():
        owner = encoder.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.MultiheadAttention) or f"{name}.weight" not in names:
            continue  # torch's attention reads the weights of its layer and does not call it
        if isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.groups == 1):
            rows = len(part.weight)
            if shape.rank * (rows + part.weight[0].numel()) < part.weight.numel():
                found.append(name)
    return found


def adapt(encoder: nn.Module, layers: list[str], shape: Rank, seed: int) -> list[str]:
    """Give ``layers`` adapters; the names of all A."""
    for name in layers:
        owner, _, own = name.rpartition(".")
        parent, base = encoder.get_submodule(owner), encoder.get_submodule(name)
        assert isinstance(base, nn.Linear | nn.Conv2d)
        setattr(parent, own, Adapted(base, shape, seed_of(seed, "adapter", name)))
    return [f"{name}.{A}" for name in layers]


def merged(module: nn.Module) -> nn.Module:
    """``module`` itself with every adapter added to its layer."""
    for name, part in list(module.named_modules()):
        if isinstance(part, Adapted):
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, part.merged())
    return module


def product(a: Tensor, b: Tensor) -> Tensor:
    """B·A, out×into, of A rank×… and B out×rank×…."""
    return b.flatten(1) @ a.flatten(1)


def factored(wanted: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """New A and B (out×rank) with a product as near to ``wanted`` (out×into) as their rank allows.

    It is the truncated singular value decomposition of ``wanted``, so exact where that has no
    higher rank. Of all factors with this product, A has orthogonal rows that lie near those of the
    old one ``a`` (rank×…) and are as long (longer if B would otherwise be far larger than A): what
    clients keep from earlier rounds still fits, and steps stay as large. All in float64.
    """
    if not wanted.any():  # nothing to factor: B is zero, and A may stay
        return a.double(), wanted.new_zeros(len(wanted), len(a))
    old, root = a.double().flatten(1), math.sqrt(len(a))
    # rows of the old A break the tie where ``wanted`` has a lower rank than there is room for
    rows = torch.cat([wanted, old * (1e-6 * wanted.norm() / old.norm().clamp(min=1e-30))])
    wide = torch.linalg.eigh(rows @ rows.T)[1][:, -len(a) :]  # of the small side: few rows
    space = torch.linalg.qr((wide.T @ rows).T)[0].T  # rank×into, orthonormal rows
    left, _, right = torch.linalg.svd(old @ space.T)
    length = max(float(old.norm()) / root, math.sqrt(float(wanted.norm()) / root))
    new = length * (left @ right @ space)
    return new.view(a.shape), wanted @ new.T / length**2
