"""The networks that methods are made of: the run's encoder, called ``backbone``, and heads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from furlong.core.context import Context
from furlong.core.payload import Weights
from furlong.core.weights import prefixed, restore
from furlong.errors import FurlongError
from furlong.nn.heads import head, head_dim
from furlong.settings import setting


def named_head(default: str) -> Any:
    """A hyper-parameter that names a head."""
    return setting(
        default,
        "The head by its name, or mlp:HIDDEN:OUT for one hidden layer; a BatchNorm ends it with "
        ":bn behind that, one without parameters with :centred.",
    )


class Projecting:
    """Part of a method whose network is the run's encoder with a projection head."""

    projection_head: str  # the method has it as a field

    def network(self, ctx: Context) -> nn.Module:
        """Backbone and projector: images B×C×H×W to projections B×d_z."""
        projection = ctx.normed(head(self.projection_head, ctx.width))
        return chained(backbone=ctx.encoder(), projector=projection)

    def width(self, ctx: Context) -> int:
        """The d_z of projections."""
        with torch.device("meta"):  # only its width is wanted
            return head_dim(head(self.projection_head, ctx.width))


class Predicting(Projecting):
    """Part of a method that predicts projections from projections."""

    prediction_head: str

    def new_predictor(self, ctx: Context) -> nn.Module:
        """Projections to predictions, both B×d_z."""
        width = self.width(ctx)
        prediction = head(self.prediction_head, width)
        if head_dim(prediction) != width:
            raise FurlongError(
                f"method.prediction_head = {self.prediction_head} gives {head_dim(prediction)} "
                f"numbers, method.projection_head = {self.projection_head} {width}: they must be "
                "as many."
            )
        return ctx.normed(prediction)


class WithPredictor(Predicting):
    """Part of a method whose network has the predictor at its end."""

    def network(self, ctx: Context) -> nn.Module:
        """Backbone, projector and predictor in a row."""
        net = super().network(ctx)  # first: the same start as other methods
        return extended(net, predictor=self.new_predictor(ctx))


def chained(**parts: nn.Module) -> nn.Module:
    """``parts`` in a row, under their names; the one called ``backbone`` is the encoder."""
    return nn.Sequential(OrderedDict(parts))


def extended(net: nn.Module, **parts: nn.Module) -> nn.Module:
    """The parts of ``net``, then ``parts``, in a row."""
    return chained(**dict(net.named_children()), **parts)


def backbone(weights: Weights, ctx: Context) -> nn.Module:
    """The encoder inside the weights of a network whose part ``backbone`` it is."""
    return filled(ctx.encoder(), prefixed(weights, "backbone"))


def filled(net: nn.Module, weights: Weights) -> nn.Module:
    """``net`` with ``weights``, in eval mode."""
    restore(net, weights)
    return net.eval()


def proximal(part: nn.Module, start: Weights) -> Tensor:
    """½‖w - start‖² over the parameters of ``part``; ``start`` has them by the same names."""
    moved = [(p - start[name]).square().sum() for name, p in part.named_parameters()]
    return torch.stack(moved).sum() / 2
