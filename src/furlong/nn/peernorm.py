"""Peer Normalization (MFCL): group norm whose statistics the two views of one image share.

A batch of 2K images holds all first views and then all second views, so rows i and i+K are peers.
Only the caller knows whether a batch is such a batch, and says so with :func:`peers`; everywhere
else an image is its own peer, which makes PN a group norm with the same affine parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from furlong.errors import FurlongError, nearest
from furlong.nn.backbones import ResNet

Statistics = Literal["pooled", "avg_moments", "eq3_literal"]
Kind = Literal["pn", "gn", "gn32", "bn", "none"]  # gn32: the groups of MFCL's public code

EARLY: dict[str, Kind] = {"gn": "gn", "pn": "pn"}  # as in ``resnet18+pn``
EVERYWHERE = "all_gn"  # as in ``resnet18+all_gn``: no batch norm is left, see ``group_normed``


def _groups(channels: int, groups: int) -> int:
    """``groups`` where they divide the channels, else one (an image has 3 channels, not 16)."""
    return groups if channels % groups == 0 else 1


class _Shared(torch.autograd.Function):
    """Group norm of 2K×C×H×W with one mean and variance per pair and group.

    Written out because autograd would keep and re-read several copies of the batch: this takes a
    third of the time of stacking the views and a group norm, and is as fast as a group norm alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pooled: bool
    ) -> Tensor:
        rows, channels, height, width = x.shape
        y, means, rstds = torch.native_group_norm(
            x, None, None, rows, channels, height * width, groups, eps
        )
        means, rstds = means.view(2, -1, groups, 1), rstds.view(2, -1, groups, 1)
        mean, variance = means.mean(0), rstds.pow(-2).mean(0)  # K×G×1, the variance with eps
        if pooled:
            variance = variance + ((means[0] - means[1]) / 2).square()
        rstd = variance.rsqrt()
        # what the variance's derivative is centred on: avg_moments takes each view's around its own
        centre = mean.expand_as(means) if pooled else means
        ctx.save_for_backward(x, weight, mean, centre, rstd)
        # y is normalised per view; moving it to the pair's statistics in place saves a third copy
        gain, offset = weight.view(groups, -1), bias.view(groups, -1)
        scale = (rstd / rstds * gain).view(rows, channels, 1, 1)
        shift = torch.addcmul(offset, (means - mean) * rstd, gain).view(rows, channels, 1, 1)
        return torch.addcmul(shift, y, scale, out=y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With x̂ = (x−μ)·r: dx = r·γ·dy − r/n·Σγ·dy − r²/n·(x−centre)·Σγ·dy·x̂, sums per pair."""
        x, weight, mean, centre, rstd = ctx.saved_tensors
        groups = mean.shape[1]
        shape = (2, len(mean), groups, x.shape[1] // groups)
        count = 2 * shape[3] * x.shape[2] * x.shape[3]
        product = grad * x
        d_bias = grad.sum((2, 3)).reshape(shape).sum(0)  # K×G×Λ, as is the next
        d_gain = (product.sum((2, 3)).reshape(shape).sum(0) - mean * d_bias) * rstd
        gain = weight.view(groups, -1)
        of_x = -rstd.square() / count * (d_gain * gain).sum(-1, keepdim=True)
        of_one = -rstd / count * (d_bias * gain).sum(-1, keepdim=True) - of_x * centre

        def rows(factor: Tensor) -> Tensor:
            return factor.expand(shape).reshape(*x.shape[:2], 1, 1)

        d_x = torch.addcmul(rows(of_one), x, rows(of_x), out=product)
        d_x.addcmul_(grad, rows(rstd * gain))
        return d_x, d_gain.sum(0).flatten(), d_bias.sum(0).flatten(), None, None, None


_shared: Callable[[Tensor, Tensor, Tensor, int, float, bool], Tensor] = _Shared.apply


def _literal(x: Tensor, views: int, groups: int, eps: float) -> Tensor:
    """MFCL's Eq. (3) to the letter, B×C×H×W to the same, without the affine part."""
    rows, channels, height, width = x.shape
    maps = x.view(views, rows // views, groups, channels // groups, height, width)
    centred = maps - maps.mean((0, 3), keepdim=True)
    variance = centred.square().mean((0, 3), keepdim=True).sum((4, 5), keepdim=True)
    return (centred * torch.rsqrt(variance + eps)).view_as(x)


class PeerNorm(nn.Module):
    """Normalises 2K×C×H×W by statistics per pair and group of Λ = C/G neighbouring channels.

    ``pooled``: mean and biased variance over 2 views × Λ channels × H×W. ``avg_moments`` (the
    author's code): the mean of the two views' means and of their variances, which leaves out the
    views' distance: var_pooled = var_avg + ((μ₁−μ₂)/2)². ``eq3_literal``: the paper's formula as
    printed, with a mean per pixel and a variance summed over the pixels. Its output has RMS
    1/√(HW), and both the paper's Figure 3 and its code contradict it; it is here to be tried only.

    Other images never enter, and there are no running statistics: training and eval are the same.
    """

    paired: bool

    def __init__(
        self,
        channels: int,
        groups: int = 16,
        eps: float = 1e-3,
        statistics: Statistics = "pooled",
    ) -> None:
        super().__init__()
        if statistics not in get_args(Statistics):
            hint = nearest(statistics, get_args(Statistics))
            raise FurlongError(f"Unknown statistics {statistics!r} of PN. {hint}")
        self.channels, self.groups, self.eps = channels, _groups(channels, groups), eps
        self.statistics: Statistics = statistics
        self.paired = False
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to the same; where ``paired``, B = 2K with peers i and i+K."""
        if self.paired and len(x) % 2:
            raise FurlongError(
                f"Peer Normalization got {len(x)} images; it needs all first views and then all "
                "second views of the same images."
            )
        if self.statistics == "eq3_literal":
            y = _literal(x, 1 + self.paired, self.groups, self.eps)
            return torch.addcmul(self.bias.view(-1, 1, 1), y, self.weight.view(-1, 1, 1))
        if not self.paired:
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        # the kernel wants dense maps, and knows channels_last on the CPU only
        if x.device.type != "cpu" or not x.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous()
        pooled = self.statistics == "pooled"
        return _shared(x, self.weight, self.bias, self.groups, self.eps, pooled)

    def extra_repr(self) -> str:
        return f"{self.channels}, groups={self.groups}, eps={self.eps}, {self.statistics}"


@contextmanager
def peers(module: nn.Module) -> Iterator[None]:
    """Inside, rows i and i+K of every 2K batch that ``module`` gets are views of one image."""
    norms = [(part, part.paired) for part in module.modules() if isinstance(part, PeerNorm)]
    try:
        for part, _ in norms:
            part.paired = True
        yield
    finally:
        for part, paired in norms:
            part.paired = paired


def given_away(maps: Tensor, groups: int = 16) -> float:
    """The share of rows of 2K×C×H×W whose peer has the most opposite means of channel groups.

    PN makes the means of two views opposite, so that they tell who belongs together: 0.4 to 0.9 of
    256 rows (after a ReLU) find their peer then, and almost none where every image is its own.
    """
    means = maps.mean((2, 3)).view(len(maps), groups, -1).mean(2)  # 2K×G
    means = F.normalize(means - means.mean(0))
    alike = (means @ means.T).fill_diagonal_(torch.inf)
    peer = torch.arange(len(maps), device=maps.device).roll(len(maps) // 2)
    return float((alike.argmin(1) == peer).float().mean())


def norm(
    kind: Kind,
    channels: int,
    groups: int = 16,
    eps: float = 1e-3,
    statistics: Statistics = "pooled",
) -> nn.Module:
    """A norm for B×C×H×W. PN and GN have the same groups, so that only the pairing differs."""
    if kind == "pn":
        return PeerNorm(channels, groups, eps, statistics)
    if kind in ("gn", "gn32"):
        groups = 32 if kind == "gn32" else groups
        return nn.GroupNorm(_groups(channels, groups), channels, eps)
    if kind == "bn":
        return nn.BatchNorm2d(channels, eps)
    if kind == "none":
        return nn.Identity()
    raise FurlongError(f"Unknown norm {kind!r}. {nearest(kind, get_args(Kind))}")


def with_early_norm(encoder: nn.Module, kind: str) -> nn.Module:
    """``encoder`` itself, with the batch norms after its first two convolutions replaced.

    In a user's own encoder these are the first two ``BatchNorm2d`` in the order of its modules.
    """
    if kind not in EARLY:
        raise FurlongError(f"Unknown early norm {kind!r}. {nearest(kind, EARLY)}")
    norms = {
        name: part.num_features
        for name, part in encoder.named_modules()
        if isinstance(part, nn.BatchNorm2d)
    }
    # not the order of the modules: a ResNet-50 has a shortcut before its second convolution
    early = ["bn1", "layer1.0.bn1"] if isinstance(encoder, ResNet) else list(norms)[:2]
    if len(early) < 2 or any(name not in norms for name in early):
        raise FurlongError(
            f"An early norm replaces the first two BatchNorm2d of an encoder; this "
            f"{type(encoder).__name__} does not have them. Leave --model.early-norm as it is, or "
            "choose another --encoder."
        )
    for name in early:
        parent, _, child = name.rpartition(".")
        setattr(encoder.get_submodule(parent), child, norm(EARLY[kind], norms[name]))
    return encoder


def group_normed(module: nn.Module, groups: int = 16) -> nn.Module:
    """``module`` with a group norm in the place of every batch norm, at any depth.

    Then what the network makes of an image does not depend on the other images of a batch. As many
    of the ``groups`` as divide the channels; of B×d, groups of features.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        channels = module.num_features
        return nn.GroupNorm(gcd(channels, groups), channels, affine=module.affine)
    for name, part in module.named_children():
        setattr(module, name, group_normed(part, groups))
    return module
