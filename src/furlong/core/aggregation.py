"""How the server merges what clients send: the mean, server optimisers, robust rules, and others.

With w_k the clients' values, x the server's, n clients in the round and Δ_k = w_k - x:

    mean              x ← Σ n_k w_k / Σ n_k                          McMahan et al., AISTATS 2017
    momentum          Δ = mean - x;  m ← βm + Δ;  x ← x + ηm         Hsu et al., arXiv:1909.06335
    adam              m ← β₁m + (1 - β₁)Δ;  v ← β₂v + (1 - β₂)Δ²;  x ← x + ηm/(√v + τ)
                                                                     Reddi et al., ICLR 2021
    median            of every coordinate                            Yin et al., ICML 2018
    trimmed_mean      of every coordinate without its f largest and f smallest values, ibid.
    krum, multi_krum  the w_k, or the mean of the n - f, with the smallest sum of squared distances
                      to its n - f - 2 nearest                       Blanchard et al., NeurIPS 2017
    geometric_median  argmin_x Σ_k ‖w_k - x‖, smoothed Weiszfeld     Pillutla et al. 2022 (RFA)
    norm_bound        mean of x + Δ_k·min(1, C/‖Δ_k‖)                Sun et al., arXiv:1911.07963
    ldawa             1/n Σ_k δ_k w_k for every tensor, δ_k = cos(w_k, x)
                                                                     Rehman et al., ICCV 2023
    eua               Σ α_k w_k, α_k ∝ λ_k/‖Δ_k‖ with λ ≥ 0, Σ λ_k = 1 that makes
                      ‖Σ λ_k Δ_k/‖Δ_k‖‖ smallest                     Liao et al., CVPR 2024 (FedU²)

``mean``, ``momentum`` and ``adam`` stream. The other rules hold all answers of a round in memory.
``mean``, ``momentum``, ``adam`` and ``norm_bound`` weigh clients by their number of images. The
other rules count everybody the same: a number that a client claims is nothing to trust.
Integer tensors take the maximum, as in ``weights.Mean``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from furlong.core.payload import Weights, flatten, is_buffer, replace_tensors
from furlong.core.weights import BatchNormPolicy, Mean
from furlong.errors import FurlongError
from furlong.settings import check, setting

P = TypeVar("P")
Rule = Literal[
    "mean",
    "momentum",
    "adam",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "geometric_median",
    "norm_bound",
    "ldawa",
    "eua",
]
FAULTY = ("trimmed_mean", "krum", "multi_krum")  # rules that are told how many may be bad
ROBUST = ("median", "geometric_median", "norm_bound", *FAULTY)
SMOOTHING = 1e-6  # RFA's ν: no distance counts as less


@dataclass(frozen=True)
class ServerSettings:
    """How the server merges the clients' answers; a rule looks only at its own settings."""

    rule: Rule = setting("mean", "How the server merges the clients' answers.")
    lr: float | None = setting(
        None, "The step η of momentum (none: 1) and adam (none: 0.01).", above=0
    )
    momentum: float = setting(0.9, "The momentum β, or β₁ of adam.", at_least=0, below=1)
    beta2: float = setting(0.99, "The decay β₂ of adam's squares.", at_least=0, below=1)
    tau: float = setting(1e-3, "The constant τ in adam's denominator.", above=0)
    faulty: int = setting(
        1, "f of trimmed_mean, krum and multi_krum: how many clients may be bad.", at_least=0
    )
    max_norm: float = setting(
        0.0, "C of norm_bound, for parameters; 0: the median of the round's norms.", at_least=0
    )
    outlier: float | None = setting(
        None,
        "Leave out an update that is this many times as large as the round's median (times more "
        "for a client with more images than most); 0: only tell; none: 5 across machines, else 0.",
        agree=False,
        resume=True,
        at_least=0,
    )
    iterations: int = setting(100, "Most iterations of geometric_median.", at_least=1)
    tolerance: float = setting(
        1e-9,
        "geometric_median stops when the sum of distances falls by less than this share.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        check(self, "server")

    def withstands(self, clients: int) -> int:
        """The largest f up to ``faulty`` that the rule allows for ``clients`` (below 0: none)."""
        if self.rule in ROBUST and clients < 3:  # of two, who is to say which is the bad one?
            return -1
        if self.rule in ("krum", "multi_krum"):
            return min(self.faulty, (clients - 3) // 2)  # n > 2f + 2
        return min(self.faulty, (clients - 1) // 2) if self.rule == "trimmed_mean" else self.faulty

    @property
    def need(self) -> str:
        """What :meth:`withstands` asks for, in words."""
        more = 1 if self.rule == "trimmed_mean" else 3
        least = max(3, 2 * self.faulty + more) if self.rule in FAULTY else 3
        given = f" with server.faulty = {self.faulty}" if self.rule in FAULTY else ""
        return f"server.rule = {self.rule} needs at least {least} clients in a round{given}"

    def check_cohort(self, size: int) -> None:
        """Refuse a run whose rounds have ``size`` clients, if these are too few."""
        possible = self.withstands(size)
        if possible < self.faulty:
            other = "another --server.rule" if possible < 0 else "a smaller --server.faulty"
            raise FurlongError(
                f"{self.need}; a round has {size}. Use more clients, a larger --fraction, or "
                f"{other}."
            )

    def check_policy(self, policy: BatchNormPolicy) -> None:
        """Refuse what contradicts itself."""
        if policy == "pooled" and self.rule in ("median", "trimmed_mean"):
            raise FurlongError(
                f"method.bn_stats = pooled adds the spread between clients to variances, and "
                f"server.rule = {self.rule} merges every number by itself. Use bn_stats = average."
            )


class Combiner(Protocol[P]):
    """Takes a round's answers one by one, then gives the server's new value."""

    def add(self, value: P, weight: float) -> None:
        """Take in an answer of a client with ``weight`` images (≥ 0)."""

    def onto(self, current: P) -> P:
        """What takes the place of ``current``: tensors that never travel stay as they are."""


class Average(Generic[P]):
    """The weighted mean, streaming."""

    def __init__(self, policy: BatchNormPolicy) -> None:
        self._mean: Mean[P] = Mean(pooled=policy == "pooled")

    def add(self, value: P, weight: float) -> None:
        """Count ``value`` with ``weight``."""
        self._mean.add(value, weight)

    def onto(self, current: P) -> P:
        """The mean, or ``current`` if nobody answered."""
        result = self._mean.result()
        return current if result is None else replace_tensors(current, flatten(result)[0])


class Stepping(Average[P]):
    """A step of the server's optimiser towards the mean; BatchNorm statistics take the mean."""

    def __init__(self, policy: BatchNormPolicy, settings: ServerSettings, moments: Weights) -> None:
        super().__init__(policy)
        self._settings = settings
        self.moments = dict(moments)  # by path and kind, ``weights/…/first``; new after ``onto``

    def onto(self, current: P) -> P:
        """``current`` moved by the optimiser, in the memory of the mean, which nobody else has."""
        mean = self._mean.result()
        if mean is None:
            return current
        goal = flatten(mean)[0]
        stayed: Weights = {}  # what never travels is the current value's own: not to be written on
        for name, before in flatten(current)[0].items():
            if before.is_floating_point() and not is_buffer(name):
                delta = goal.get(name, before).double() - before.double()
                moved = before.double() + self._step(name, delta, before.dtype)
                if name in goal:
                    goal[name].copy_(moved)
                else:
                    stayed[name] = moved.to(before.dtype)
        return replace_tensors(current, goal | stayed)

    def _step(self, name: str, delta: Tensor, dtype: torch.dtype) -> Tensor:
        s = self._settings
        first = self._moment(f"{name}/first", delta, 0.0)
        if s.rule == "momentum":
            first = s.momentum * first + delta
            step = first * (1.0 if s.lr is None else s.lr)
        else:
            # v starts as τ², and neither moment is corrected for its start, as in Reddi et al.
            second = self._moment(f"{name}/second", delta, s.tau**2)
            first = s.momentum * first + (1 - s.momentum) * delta
            second = s.beta2 * second + (1 - s.beta2) * delta.square()
            step = first / (second.sqrt() + s.tau) * (0.01 if s.lr is None else s.lr)
            self.moments[f"{name}/second"] = second.to(dtype)
        self.moments[f"{name}/first"] = first.to(dtype)
        return step

    def _moment(self, key: str, like: Tensor, start: float) -> Tensor:
        return self.moments[key].double() if key in self.moments else torch.full_like(like, start)


# ---------------------------------------------------------------- rules that see all answers


@dataclass
class Collecting(Generic[P]):
    """Holds the answers of a round, tensors by path, and merges them by a rule."""

    policy: BatchNormPolicy
    settings: ServerSettings
    tell: Callable[[str], None]
    values: list[Weights] = field(default_factory=list)
    images: list[float] = field(default_factory=list)
    before: Weights = field(default_factory=dict)  # the server's tensors
    faulty: int = 0  # the f of this round

    def add(self, value: P, weight: float) -> None:
        """Keep a copy: views would hold the memory and a file descriptor of every message."""
        self.values.append({n: t.clone() for n, t in flatten(value)[0].items()})
        self.images.append(weight)

    def onto(self, current: P) -> P:
        """The rule's value.

        If too few answered for ``faulty``, those missing are taken for some of the bad ones:
        otherwise one client that is silent, or refused by the guard, could stop all learning.
        With fewer than three there is no telling who is good, and ``current`` stays.
        """
        settings, heard = self.settings, len(self.values)
        self.before, self.faulty = flatten(current)[0], settings.withstands(heard)
        if not heard:
            return current
        if self.faulty < settings.faulty:
            lost = self.faulty < 0
            so = "the weights stay as they were" if lost else f"now faulty = {self.faulty}"
            self.tell(f"{settings.need}; {heard} answered: {so}")
            if lost:
                return current
        return replace_tensors(current, COLLECTED[settings.rule](self))

    def mean(self, counted: Iterable[tuple[Weights, float]]) -> Weights:
        """The weighted mean of some answers, or of what was made of them."""
        mean: Mean[Weights] = Mean(pooled=self.policy == "pooled")
        for value, weight in counted:
            mean.add(value, weight)
        return mean.result() or {}

    def moves(self, name: str) -> Tensor:
        """Δ of the tensor ``name``, one row per client, n×d in float64."""
        rows = torch.stack([value[name].double().flatten() for value in self.values])
        return rows - self.before[name].double().flatten()

    def floating(self) -> list[str]:
        """The names of the floating tensors."""
        return [name for name, tensor in self.values[0].items() if tensor.is_floating_point()]

    def products(self, names: Iterable[str]) -> Tensor:
        """Δ_i·Δ_j over the tensors ``names``, n×n in float64."""
        n = len(self.values)
        products = torch.zeros(n, n, dtype=torch.float64)
        for name in names:
            moves = self.moves(name)  # not the values: differences of large numbers lose digits
            products += moves @ moves.T
        return products

    def squared_distances(self) -> Tensor:
        """Between any two answers over all floating tensors, n×n in float64."""
        products = self.products(self.floating())
        squares = products.diagonal()
        return (squares + squares[:, None] - 2 * products).clamp(min=0).fill_diagonal_(0)


def _by_coordinate(cohort: Collecting[Any], cut: int) -> Weights:
    """The mean of every coordinate without its ``cut`` largest and ``cut`` smallest values."""
    merged: Weights = {}
    for name, first in cohort.values[0].items():
        rows = torch.stack([value[name] for value in cohort.values])
        if first.is_floating_point():
            inner = rows.sort(dim=0)[0][cut : len(rows) - cut]
            merged[name] = inner.mean(dim=0, dtype=torch.float64).to(first.dtype)
        else:
            merged[name] = rows.amax(dim=0)
    return merged


def _nearest(cohort: Collecting[Any], count: int) -> Weights:
    """The mean of the ``count`` answers with the best scores of Krum."""
    near = len(cohort.values) - cohort.faulty - 2
    others = cohort.squared_distances().sort(dim=1)[0][:, 1:]  # without the distance to oneself
    scores = others[:, :near].sum(dim=1)
    chosen = scores.sort(stable=True)[1][:count].sort()[0].tolist()  # Mean adds in client order
    return cohort.mean((cohort.values[k], 1.0) for k in chosen)


def weiszfeld(squared: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Weights β (n, summing to 1) for which Σβ_k w_k is the geometric median.

    ``squared``: squared distances n×n. The median is in the hull of the w_k, so these suffice:
    ‖w_i - Σβ_k w_k‖² = (Dβ)_i - ½βᵀDβ.
    """
    beta = torch.full((len(squared),), 1 / len(squared), dtype=torch.float64)
    before = inf
    for _ in range(iterations):
        reach = squared @ beta
        distances = (reach - beta @ reach / 2).clamp(min=0).sqrt()
        now = float(distances.sum())
        if before - now <= tolerance * now:
            break
        before = now
        beta = 1 / distances.clamp(min=SMOOTHING)
        beta /= beta.sum()
    return beta


def _geometric_median(cohort: Collecting[Any]) -> Weights:
    s = cohort.settings
    beta = weiszfeld(cohort.squared_distances(), s.iterations, s.tolerance).tolist()
    return cohort.mean(zip(cohort.values, beta, strict=True))


def _norm_bound(cohort: Collecting[Any]) -> Weights:
    """Parameters are one vector and BatchNorm statistics another: neither hides the other.

    What comes out lies between the server's value and the client's, so variances stay positive.
    """
    squares = torch.zeros(2, len(cohort.values), dtype=torch.float64)
    for name in cohort.floating():
        squares[int(is_buffer(name))] += cohort.moves(name).square().sum(dim=1)
    norms = squares.sqrt()
    bounds = norms.quantile(0.5, dim=1, keepdim=True)
    if cohort.settings.max_norm:  # statistics have the scale of activations: no bound fits both
        bounds[0] = cohort.settings.max_norm
    scales = torch.where(norms > bounds, bounds / norms, 1.0).tolist()

    def bounded(k: int) -> Weights:
        return {
            name: _towards(cohort.before[name], value, scales[int(is_buffer(name))][k])
            for name, value in cohort.values[k].items()
        }

    return cohort.mean((bounded(k), images) for k, images in enumerate(cohort.images))


def _towards(start: Tensor, end: Tensor, share: float) -> Tensor:
    """That share of the way; integers go all of it."""
    if share >= 1 or not end.is_floating_point():
        return end
    return torch.lerp(start.double(), end.double(), share).to(end.dtype)


def _ldawa(cohort: Collecting[Any]) -> Weights:
    """Every δ is at most 1, so weights shrink from round to round as the clients' diverge.

    Scalars and BatchNorm statistics, which have no direction, are averaged. So is a tensor that is
    all zero at the server or the client (a new bias), where the authors' code divides by zero.
    """

    def aligned(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point() or is_buffer(name) or not value.dim():
            return value
        own, ours = value.double().flatten(), cohort.before[name].double().flatten()
        size = own.norm() * ours.norm()
        return value if size == 0 else (value.double() * (own @ ours / size)).to(value.dtype)

    return cohort.mean(
        ({name: aligned(name, v) for name, v in value.items()}, 1.0) for value in cohort.values
    )


def least_norm(products: Tensor, iterations: int = 200) -> Tensor:
    """λ (n, not negative, summing to 1) for which Σ λ_k v_k is shortest; ``products``: v_i·v_j.

    Frank & Wolfe's method with exact steps, as in multi-objective descent (Sener & Koltun 2018).
    """
    shares = torch.full((len(products),), 1 / len(products), dtype=torch.float64)
    for _ in range(iterations):
        slope = products @ shares
        best = int(slope.argmin())
        length, across = float(shares @ slope), float(slope[best])
        span = length - 2 * across + float(products[best, best])  # ‖v - v_best‖²
        if length - across <= 1e-12 * max(length, 1e-12) or span <= 0:
            break
        step = min(1.0, (length - across) / span)
        shares = shares * (1 - step)
        shares[best] += step
    return shares


def _eua(cohort: Collecting[Any]) -> Weights:
    """Parameters decide the shares, and BatchNorm statistics take the same ones.

    The authors' code goes a step of fixed length along the shortest combination of the clients'
    directions; here the shares add up to 1, so that the server's value stays among the clients'.
    """
    products = cohort.products(name for name in cohort.floating() if not is_buffer(name))
    norms = products.diagonal().sqrt().clamp(min=SMOOTHING)
    shares = least_norm(products / norms / norms[:, None]) / norms
    return cohort.mean(zip(cohort.values, (shares / shares.sum()).tolist(), strict=True))


COLLECTED: dict[str, Callable[[Collecting[Any]], Weights]] = {
    # one value of a coordinate is left, or two
    "median": lambda cohort: _by_coordinate(cohort, (len(cohort.values) - 1) // 2),
    "trimmed_mean": lambda cohort: _by_coordinate(cohort, cohort.faulty),
    "krum": lambda cohort: _nearest(cohort, 1),
    "multi_krum": lambda c: _nearest(c, max(1, len(c.values) - c.settings.faulty)),
    "geometric_median": _geometric_median,
    "norm_bound": _norm_bound,
    "ldawa": _ldawa,
    "eua": _eua,
}


class Ruling:
    """Makes the combiners of one exchange; server optimisers go on from their moments."""

    def __init__(
        self,
        settings: ServerSettings,
        moments: dict[str, Weights],
        kind: str,
        tell: Callable[[str], None],
    ) -> None:
        self._settings, self._moments, self._kind, self._tell = settings, moments, kind, tell
        self._stepping: dict[str, Stepping[Any]] = {}

    def __call__(self, policy: BatchNormPolicy) -> Combiner[Any]:
        """A combiner by the run's rule; the second of an exchange has moments of its own."""
        if self._settings.rule == "mean":
            return Average(policy)
        if self._settings.rule in COLLECTED:
            return Collecting(policy, self._settings, self._tell)
        key = f"{self._kind} {len(self._stepping)}"
        made: Stepping[Any] = Stepping(policy, self._settings, self._moments.get(key, {}))
        self._stepping[key] = made
        return made

    def moments(self) -> dict[str, Weights]:
        """For the next round."""
        new = {key: made.moments for key, made in self._stepping.items() if made.moments}
        return self._moments | new
