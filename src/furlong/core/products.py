"""Adapters merged by their products (``model.adapter_average = "products"``).

The mean of factors is not the mean of what they stand for: mean(B)·mean(A) has cross terms between
clients. Here the run's rule merges the products B·A, tensor by tensor, and new factors are made of
the result. The mean of M products has a rank of up to M·rank; what goes beyond the rank is cut off,
at the least possible distance (see ``nn.lora.factored``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from furlong.core.aggregation import Combiner
from furlong.core.given import Given
from furlong.core.payload import Weights, flatten, replace_tensors
from furlong.core.weights import BatchNormPolicy
from furlong.nn.lora import A, B, factored, product

P = TypeVar("P")
Combining = Callable[[BatchNormPolicy], Combiner[Any]]
_BOTH = "lora"  # instead of both endings, the name of a product


def merging(rule: Combining, given: Given | None) -> Combining:
    """``rule``, or the same over products of adapters if the run asks for it."""
    if given is None or given.adapter == "none" or given.average != "products":
        return rule
    return lambda policy: Products(rule(policy))


class Products(Generic[P]):
    """A combiner whose rule sees B·A in float64 wherever a payload has A and B."""

    def __init__(self, rule: Combiner[Weights]) -> None:
        self._rule = rule

    def add(self, value: P, weight: float) -> None:
        """Take in an answer."""
        self._rule.add(_multiplied(flatten(value)[0]), weight)

    def onto(self, current: P) -> P:
        """What takes the place of ``current``, in factors again."""
        own = flatten(current)[0]
        before = _multiplied(own)
        after = self._rule.onto(before)
        if after is before:
            return current
        factors: Weights = {}
        for name in [name for name in own if name.endswith(A)]:
            a, b = name, name.removesuffix(A) + B
            first, second = factored(after.pop(name.removesuffix(A) + _BOTH), own[a])
            factors[a] = first.to(own[a].dtype)
            factors[b] = second.to(own[b].dtype).view_as(own[b])
        return replace_tensors(current, after | factors)


def _multiplied(tensors: Weights) -> Weights:
    """Tensors by path, with the product in place of the two factors."""
    found = {name: t for name, t in tensors.items() if not name.endswith((A, B))}
    for name in [name for name in tensors if name.endswith(A)]:
        a, b = tensors[name].double(), tensors[name.removesuffix(A) + B].double()
        found[name.removesuffix(A) + _BOTH] = product(a, b)
    return found
