"""What torch lacks of the optimisers: LARS, and a learning rate that warms up and then decays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from furlong.errors import FurlongError


class LARS(Optimizer):
    """SGD whose step is in proportion to the norm of each weight (You et al. 2017, as in SimCLR).

    With d = g + weight_decay·w, v ← momentum·v + lr·trust·‖w‖/‖d‖·d and w ← w − v; the ratio is 1
    where a norm is 0. Biases and the weights of norms (one dimension) take plain SGD without decay.
    The learning rate is inside v, so that a change of it does not rescale earlier steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise FurlongError(f"LARS: {name} is {value}; it must be at least 0.")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """One step; ``closure`` computes the loss and its gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        # one weight after the other and not torch._foreach, which is slower on a CPU:
        # it makes a copy of all gradients at once
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        speed: Tensor = state["momentum_buffer"].mul_(group["momentum"])
        if weight.ndim > 1:
            step = grad.add(weight, alpha=group["weight_decay"])
            speed.addcmul_(step, group["lr"] * _ratio(weight, step, group["trust"]))
        else:
            speed.add_(grad, alpha=group["lr"])
        weight.sub_(speed)


def _ratio(weight: Tensor, step: Tensor, trust: float) -> Tensor:
    """A number, left on its device so that nothing waits for it."""
    length, size = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(step)
    return torch.where((length > 0) & (size > 0), trust * length / size, 1.0)


def warmup_cosine(progress: float, warmup: float) -> float:
    """What to multiply the learning rate by after a share ``progress`` (0 to 1) of the training.

    From 0 to 1 linearly during the first ``warmup`` (a share as well), then to 0 along a cosine.
    """
    if not 0 <= warmup <= 1:
        raise FurlongError(f"the warm-up is {warmup}; it must be a share of training, 0 to 1.")
    if progress < warmup:
        return max(progress, 0.0) / warmup
    if warmup == 1:
        return 1.0
    return (1 + math.cos(math.pi * (min(progress, 1.0) - warmup) / (1 - warmup))) / 2
