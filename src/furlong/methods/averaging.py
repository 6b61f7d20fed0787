"""FedAvg's server half (McMahan et al., AISTATS 2017): the only base class besides ``Method``.

θ ← Σ_k w_k θ_k with w_k = n_k / Σ_j n_j over those who took part in the round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from furlong.context import Context, ServerContext
from furlong.method import Method, Report
from furlong.nets import head, head_dim
from furlong.payload import Weights, flatten, payload, replace_tensors
from furlong.weights import BatchNormPolicy, Mean, prefixed, restore

C = TypeVar("C")
D = TypeVar("D")

WEIGHTS_REVEAL = (
    "Weights after local training can reveal training images (inversion, membership inference); "
    "there is no formal privacy guarantee."
)


@payload
class Model:
    """One network's weights."""

    weights: Weights


@dataclass(frozen=True)
class Averaging(Method[D, C, D, D]):
    """Everybody gets the same payload, the answers look like it and are averaged."""

    bn_stats: BatchNormPolicy = field(default="average", kw_only=True)

    def download(self, server: D, client: int, ctx: ServerContext) -> D:  # noqa: ARG002
        """The server's state itself."""
        return server

    def expected(self, server: D, client: int, ctx: ServerContext) -> D:  # noqa: ARG002
        """Uploads look like the server's state."""
        return server

    def aggregate(
        self,
        server: D,
        reports: Iterable[Report[D]],
        ctx: ServerContext,  # noqa: ARG002
    ) -> D:
        """Mean weighted by the number of examples of those who took part."""
        mean: Mean[D] = Mean(pooled=self.bn_stats == "pooled")
        for report in reports:
            mean.add(report.upload, report.examples)
        return updated(server, mean)

    def local_encoder(self, upload: D, ctx: ServerContext) -> nn.Module | None:
        """What would be the global encoder if this client were the only one."""
        return None if self.bn_stats == "local" else self.encoder(upload, ctx)


def updated(value: D, mean: Mean[D]) -> D:
    """``value`` with the tensors of ``mean``; what never travels (bn_stats="local") stays."""
    result = mean.result()
    return value if result is None else replace_tensors(value, flatten(result)[0])


def projecting(projection_head: str, ctx: Context) -> nn.Module:
    """The run's encoder as ``backbone`` and a head: images B×C×H×W to projections B×d_z."""
    projector = head(projection_head, ctx.width)
    return nn.Sequential(OrderedDict(backbone=ctx.encoder(), projector=projector))


def projected_width(projection_head: str, ctx: Context) -> int:
    """The d_z of :func:`projecting`."""
    with torch.device("meta"):  # only its width is wanted
        return head_dim(head(projection_head, ctx.width))


def backbone(weights: Weights, ctx: Context) -> nn.Module:
    """The encoder inside the weights of a network whose part ``backbone`` it is."""
    encoder = ctx.encoder()
    restore(encoder, prefixed(weights, "backbone"))
    return encoder.eval()
