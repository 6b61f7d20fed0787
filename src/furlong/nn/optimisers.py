"""Optimisers: torch's fused SGD and Adam, LARS, and a rate that warms up and then decays.

``Fused`` calls the kernels of ``torch.optim.SGD`` and ``torch.optim.Adam`` with ``fused=True`` and
so gives their bits. The classes of torch import its compiler with their first step, in every worker
anew: 802 modules, more than a second.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from furlong.errors import FurlongError


class Fused(ABC):
    """What SGD and Adam share; groups of parameters and states look as in torch.optim."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
        self._defaults = {"lr": lr, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """More parameters; ``group`` may have settings of its own."""
        self.param_groups.append({**self._defaults, **group, "params": list(group["params"])})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or (not ``set_to_none``) make them zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Move all parameters that have a gradient."""
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for parameter in moving:
                if parameter not in self.state:
                    self.state[parameter] = self._new(parameter)
            if moving:
                self._move(moving, [p.grad for p in moving], group)

    def _held(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in parameters]

    @abstractmethod
    def _new(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""

    @abstractmethod
    def _move(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """A step of one group."""


class SGD(Fused):
    """v ← momentum·v + (g + weight_decay·w), w ← w - lr·v, with v = 0 at first."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, lr, weight_decay)
        self._momentum = momentum

    def _new(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if self._momentum else {}

    def _move(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        torch._fused_sgd_(
            params,
            grads,
            self._held(params, "momentum_buffer") if self._momentum else [],
            weight_decay=group["weight_decay"],
            momentum=self._momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adam(Fused):
    """Adam with β = (0.9, 0.999), ε = 1e-8; ``decoupled``: AdamW, whose decay is not in g."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        super().__init__(groups, lr, weight_decay)
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def _new(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def _move(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        steps = self._held(params, "step")
        torch._foreach_add_(steps, 1)
        self._kernel(
            params,
            grads,
            self._held(params, "exp_avg"),
            self._held(params, "exp_avg_sq"),
            [],
            steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=0.9,
            beta2=0.999,
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


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
