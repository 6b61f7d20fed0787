"""Heads: projectors and predictors, B×d to B×d', made from a name.

They draw their initial weights from torch's global generator, which the caller has seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import nn

from furlong.errors import FurlongError, nearest


def _mlp(
    *sizes: int, norm: bool = True, bias: bool = True, end: nn.Module | None = None
) -> nn.Sequential:
    """Linear layers between ``sizes``, batch norm and ReLU after all but the last, then ``end``."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes[:-1]):
        middle = [nn.BatchNorm1d(narrow)] if norm else []
        layers += [nn.Linear(wide, narrow, bias=bias), *middle, nn.ReLU()]
    layers.append(nn.Linear(sizes[-2], sizes[-1], bias=bias))
    return nn.Sequential(*layers, *([] if end is None else [end]))


def _centred(*sizes: int) -> nn.Sequential:
    """Without biases, with a batch norm that has no parameters at its end."""
    return _mlp(*sizes, bias=False, end=nn.BatchNorm1d(sizes[-1], affine=False))


HEADS: dict[str, Callable[[int], nn.Sequential]] = {
    "proj_128": lambda dim: _mlp(dim, dim, 128, norm=False),  # FCL, FedCA
    "easyfl_proj": lambda dim: _mlp(dim, 4096, 2048),  # FedU, FedEMA
    "easyfl_pred": lambda dim: _mlp(dim, 4096, 2048),
    "mfcl_proj": lambda dim: _mlp(dim, 512, 512, 128, bias=False, end=nn.BatchNorm1d(128)),
    "orchestra_proj": lambda dim: _centred(dim, 512, 512),
    "simsiam_proj": lambda dim: _centred(dim, 2048, 2048, 2048),
    "simsiam_pred": lambda dim: _mlp(dim, 512, dim),
    "fedx_proj": lambda dim: _mlp(dim, 256, 256, norm=False),
    "fedx_pred": lambda dim: _mlp(dim, 256, 256, norm=False),
    "moon_proj": lambda dim: _mlp(dim, dim, 256, norm=False),
    "expander": lambda dim: _mlp(dim, 2048, 2048, 2048),  # VICReg, Barlow Twins at CIFAR's size
    "small_proj": lambda dim: _mlp(dim, 256, 128),  # demos and tests
    "small_pred": lambda dim: _mlp(dim, 256, 128),
}


def head(name: str, in_dim: int) -> nn.Sequential:
    """A projector or predictor B×``in_dim`` to B×``head_dim``, with fresh weights.

    ``name`` is a key of ``HEADS``, or ``mlp:HIDDEN:…:OUT``: linear layers with BN and ReLU between
    them. With ``:bn`` behind it a BN is at the end, with ``:centred`` one without parameters, and
    the linear layers have no biases: then nothing in the head can move all projections together.
    """
    if name in HEADS:
        return HEADS[name](in_dim)
    kind, *words = name.split(":")
    ending = words.pop() if words[-1:] in (["bn"], ["centred"]) else ""
    if kind == "mlp" and len(words) >= 2 and all(s.isdecimal() and int(s) > 0 for s in words):
        sizes = [int(s) for s in words]
        if ending == "centred":
            return _centred(in_dim, *sizes)
        return _mlp(in_dim, *sizes, end=nn.BatchNorm1d(sizes[-1]) if ending else None)
    forms = [*HEADS, *(f"mlp:HIDDEN:OUT{ending}" for ending in ("", ":bn", ":centred"))]
    raise FurlongError(f"Unknown head {name!r}. {nearest(name, forms)}")


def head_dim(module: nn.Module) -> int:
    """Output length of a head: that of its last linear layer."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise FurlongError(f"A {type(module).__name__} without a linear layer is not a head.")
    return linear[-1].out_features
