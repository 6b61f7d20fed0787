"""Who holds which images: the splits of a training set among clients, named by short strings.

| spec | rule |
|---|---|
| ``iid``, ``iid:stratified`` | shuffle and cut; stratified: every class dealt out evenly |
| ``classes:K`` | K classes per client in turn (FedCA, FedU; EasyFL's general rule) |
| ``shards:K`` | K shards of different classes per client, drawn at random (McMahan) |
| ``mfcl:S``, ``mfcl:S:sequential`` | S consecutive classes per client (the MFCL scenarios) |
| ``dirichlet:A``, ``dirichlet:A:MIN`` | class shares ~ Dir(A), at least MIN (10) images each |
| ``dirichlet_balanced:A`` | the same with clients of (nearly) equal size (Orchestra) |
| ``quantity:w1,w2,…`` | IID labels, sizes proportional to the weights |
| ``quantity:lognormal:S``, ``quantity:powerlaw:P`` | weights e^(S·z), z normal; or rank^(−P) |
| ``natural`` | one client per group (hospital, device, …) of the data |
| ``fcl_noniid1_standin``, ``fcl_noniid2_standin`` | 5 clients, own classes; 10, shared |

All are disjoint, never leave a client empty and depend on nothing but their arguments and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from furlong.errors import FurlongError, nearest

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

MFCL_SHIFTED = frozenset({(10, 2), (10, 4), (100, 2)})
_REDRAWS = 1000


@dataclass(frozen=True)
class Partition:
    """Sorted int64 index tensors, one per client, over a set of ``n`` images."""

    indices: tuple[Tensor, ...]
    name: str
    n: int
    seed: int = 0

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.indices)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Images per client."""
        return tuple(len(i) for i in self.indices)

    @property
    def unused(self) -> int:
        """Images that no client holds: leftovers of the rules that cut classes into equal parts."""
        return self.n - sum(self.sizes)

    def class_counts(self, labels: Tensor, n_classes: int) -> Tensor:
        """Images per client and class, M×n_classes (int64), from the ``labels`` (N) of the set."""
        return torch.stack([torch.bincount(labels[i], minlength=n_classes) for i in self.indices])


def class_windows(clients: int, per_client: int, n_classes: int) -> list[list[int]]:
    """The classes of each client by EasyFL's rule: always the least-used, then the smallest one."""
    used = [0] * n_classes
    windows = []
    for _ in range(clients):
        mine = []
        for _ in range(per_client):
            c = used.index(min(used))
            used[c] += 1
            mine.append(c)
        windows.append(mine)
    return windows


def mfcl_window(
    m: int, s: int, n: int, mode: Literal["table", "sequential"] = "table"
) -> list[int]:
    """The ``s`` consecutive classes out of ``n`` of client ``m``, all counted from 0.

    ``table`` reproduces the printed scenarios, three of which move on by one class whenever the
    walk around the classes closes (no single rule explains them all); ``sequential`` never does.
    """
    shift = m * math.gcd(s, n) // n if mode == "table" and (n, s) in MFCL_SHIFTED else 0
    return [(m * s + shift + i) % n for i in range(s)]


def proportional_sizes(total: int, weights: list[float]) -> list[int]:
    """Cut ``total`` in proportion to ``weights``: floors, the remainder one by one from client 0.

    >>> proportional_sizes(10, [1, 1, 1])
    [4, 3, 3]
    """
    # Dividing by the largest weight first keeps the sum finite whatever the scale.
    top = max(weights)
    share = [w / top for w in weights]
    scale = total / math.fsum(share)
    sizes = [math.floor(w * scale) for w in share]
    # Rounding may lift an exact product by one ulp over the total, hence max.
    for k in range(max(0, total - sum(sizes))):
        sizes[k % len(sizes)] += 1
    return sizes


@dataclass(frozen=True)
class _Request:
    """A parsed request; rules read it and return one index array per client."""

    spec: str
    args: tuple[str, ...]
    n: int
    clients: int
    n_classes: int
    labels: _Ints
    groups: _Ints
    rng: np.random.Generator

    def refuse(self, reason: str) -> FurlongError:
        return FurlongError(f"Partition {self.spec!r}: {reason}")

    def integer(self, i: int, name: str, low: int = 1, high: int | None = None) -> int:
        try:
            value = int(self.args[i])
        except ValueError:
            raise self.refuse(f"{name} must be a whole number, not {self.args[i]!r}.") from None
        if value < low:
            raise self.refuse(f"{name} = {value} is too small; use at least {low}.")
        if high is not None and value > high:
            raise self.refuse(f"{name} = {value}, but there are only {high} classes.")
        return value

    def number(self, text: str, name: str, *, zero: bool = False) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.refuse(f"{name} must be a number, not {text!r}.") from None
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            wanted = "0 or more" if zero else "above 0"
            raise self.refuse(f"{name} = {text} must be finite and {wanted}.")
        return value

    def cover(self, per_client: int) -> None:
        """Refuse when a class would be held by nobody."""
        held = self.clients * per_client
        if held < self.n_classes:
            raise self.refuse(
                f"{self.clients} clients × {per_client} classes cover only {held} of the "
                f"{self.n_classes} classes; use at least {-(-self.n_classes // self.clients)} "
                f"classes per client or {-(-self.n_classes // per_client)} clients."
            )

    def shuffled(self, c: int) -> _Ints:
        """The images of class ``c`` in random order."""
        return self.rng.permutation(np.flatnonzero(self.labels == c))

    def deal(self, windows: list[list[int]], parts: int | None = None) -> list[_Ints]:
        """Cut each class into equal shards, the r-th for the r-th client that holds the class.

        ``parts`` shards per class, or as many as it has holders.
        """
        hands: list[list[_Ints]] = [[] for _ in windows]
        ahead = [0.0] * len(windows)  # images beyond the exact shares of the classes so far
        for c in range(self.n_classes):
            images = self.shuffled(c)
            holders = [k for k, window in enumerate(windows) if c in window]
            each, extra = divmod(len(images), parts or len(holders))
            # Shards differ by one image; the larger ones go to those who are behind, else the
            # first clients would gather the remainders of all classes.
            larger = set(sorted(holders, key=ahead.__getitem__)[:extra])
            start = 0
            for k in holders:
                stop = start + each + (k in larger)
                hands[k].append(images[start:stop])
                ahead[k] += (k in larger) - extra / (parts or len(holders))
                start = stop
        return [np.concatenate(hand) for hand in hands]

    def cut_counts(self, counts: _Ints) -> list[_Ints]:
        """Give client k ``counts[k, c]`` images of class c (M×n_classes)."""
        hands: list[list[_Ints]] = [[] for _ in range(self.clients)]
        for c in range(self.n_classes):
            for hand, part in zip(
                hands, np.split(self.shuffled(c), counts[:, c].cumsum()), strict=False
            ):
                hand.append(part)  # the piece behind the last cut is left over
        return [np.concatenate(hand) for hand in hands]


def _iid(r: _Request) -> list[_Ints]:
    if not r.args:
        return np.array_split(r.rng.permutation(r.n), r.clients)
    if r.args[0] != "stratified":
        raise r.refuse(f"unknown option {r.args[0]!r}. {nearest(r.args[0], ['stratified'])}")
    if not r.n_classes:
        raise r.refuse(_NO_LABELS)
    # Dealing the classes one after the other like cards keeps classes and sizes even within one.
    deck = np.concatenate([r.shuffled(c) for c in range(r.n_classes)])
    return [deck[k :: r.clients] for k in range(r.clients)]


def _classes(r: _Request) -> list[_Ints]:
    k = r.integer(0, "K", high=r.n_classes)
    r.cover(k)
    parts = -(-k * r.clients // r.n_classes)
    return r.deal(class_windows(r.clients, k, r.n_classes), parts)


def _shards(r: _Request) -> list[_Ints]:
    k = r.integer(0, "K", high=r.n_classes)
    r.cover(k)
    each, extra = divmod(k * r.clients, r.n_classes)
    left = np.full(r.n_classes, each)
    left[r.rng.permutation(r.n_classes)[:extra]] += 1
    windows = []
    for _ in range(r.clients):
        # Taking the K classes with most shards left, ties at random, can never run into a dead end.
        mine = np.lexsort((r.rng.random(r.n_classes), -left))[:k]
        left[mine] -= 1
        windows.append([int(c) for c in mine])
    return r.deal([windows[k] for k in r.rng.permutation(r.clients)])


def _mfcl(r: _Request) -> list[_Ints]:
    s = r.integer(0, "S", high=r.n_classes)
    text = r.args[1] if len(r.args) > 1 else "table"
    if text not in ("table", "sequential"):
        raise r.refuse(f"unknown mode {text!r}. {nearest(text, ['table', 'sequential'])}")
    mode: Literal["table", "sequential"] = "table" if text == "table" else "sequential"
    r.cover(s)
    return r.deal([mfcl_window(m, s, r.n_classes, mode) for m in range(r.clients)])


def _dirichlet(r: _Request) -> list[_Ints]:
    alpha = r.number(r.args[0], "A")
    least = r.integer(1, "MIN", low=1) if len(r.args) > 1 else 10
    if least * r.clients > r.n:
        raise r.refuse(
            f"{r.clients} clients with at least {least} images each need {least * r.clients} "
            f"images, there are {r.n}; use fewer clients or dirichlet:{r.args[0]}:MIN with MIN up "
            f"to {r.n // r.clients}."
        )
    totals = np.bincount(r.labels, minlength=r.n_classes)
    for _ in range(_REDRAWS):
        counts = np.zeros((r.clients, r.n_classes), dtype=np.int64)
        for c in np.flatnonzero(totals):
            # A Dirichlet draw restricted to some clients and renormalised is a Dirichlet draw among
            # these: drawing it so gives the same law and cannot divide by a vanished sum.
            room = np.flatnonzero(counts.sum(1) < r.n / r.clients)
            share = _dirichlet_draw(r.rng, alpha, len(room))
            cuts = np.floor(share.cumsum()[:-1] * totals[c]).astype(np.int64)
            counts[room, c] = np.diff(cuts, prepend=0, append=totals[c])
        if counts.sum(1).min() >= least:
            return r.cut_counts(counts)
    raise r.refuse(
        f"{_REDRAWS} draws gave every client no {least} images ({r.n} images, {r.clients} "
        f"clients); use a larger A, a smaller MIN (dirichlet:A:MIN) or fewer clients."
    )


def _dirichlet_draw(rng: np.random.Generator, alpha: float, k: int) -> _Floats:
    """Dir(α·1_k), also for an α so small or large that the gamma variates under- or overflow."""
    if alpha >= 1e-3:
        return rng.dirichlet(np.full(k, min(alpha, 1e12)))
    share = np.zeros(k)  # all mass on one entry, as float64 sees it
    share[rng.integers(k)] = 1
    return share


def _dirichlet_balanced(r: _Request) -> list[_Ints]:
    # Below 0.01 the draw is all but one class per client, and 100 sweeps no longer even out sizes.
    alpha = max(r.number(r.args[0], "A"), 0.01)
    totals = np.bincount(r.labels, minlength=r.n_classes)
    live = np.flatnonzero(totals)
    # Gamma(α) variates are Gamma(α + 1) · U^(1/α); as logarithms they cannot vanish, and only a
    # positive matrix can be balanced. The columns become Dirichlet draws with the first sweeps.
    shape = (r.clients, len(live))
    logs = np.log(r.rng.standard_gamma(min(alpha, 1e12) + 1, shape))
    logs -= r.rng.standard_exponential(shape) / alpha
    rows, columns = math.log(r.n / r.clients), np.log(totals[live])
    for _ in range(100):
        logs += rows - np.logaddexp.reduce(logs, axis=1, keepdims=True)
        logs += columns - np.logaddexp.reduce(logs, axis=0)
    counts = np.zeros((r.clients, r.n_classes), dtype=np.int64)
    # Columns came last, so the floors never ask for more of a class than there is; the nudge keeps
    # whole numbers whole.
    counts[:, live] = np.floor(np.exp(logs) + 1e-6)
    return r.cut_counts(counts)


def _quantity(r: _Request) -> list[_Ints]:
    kind = r.args[0]
    if kind == "lognormal" and len(r.args) == 2:
        spread = r.number(r.args[1], "S", zero=True)
        z = r.rng.standard_normal(r.clients)
        weights = [float(w) for w in np.exp(spread * (z - z.max()))]
    elif kind == "powerlaw" and len(r.args) == 2:
        power = r.number(r.args[1], "P", zero=True)
        weights = [(k + 1) ** -power for k in range(r.clients)]
    elif len(r.args) == 1 and kind not in ("lognormal", "powerlaw"):
        weights = [r.number(w.strip(), "a weight") for w in kind.split(",")]
        if len(weights) != r.clients:
            raise r.refuse(
                f"{len(weights)} weights for {r.clients} clients; give one weight per client."
            )
    else:
        raise r.refuse(f"write it as {_RULES['quantity'].usage}.")
    cuts = np.cumsum(proportional_sizes(r.n, weights))[:-1]
    return np.split(r.rng.permutation(r.n), cuts)


def _natural(r: _Request) -> list[_Ints]:
    return [np.flatnonzero(r.groups == g) for g in np.unique(r.groups)]


def _standin(
    rule: Callable[[_Request], list[_Ints]], clients: int
) -> Callable[[_Request], list[_Ints]]:
    """A stand-in for a split that FCL defines in its missing appendix: n/5 classes each."""

    def standin(r: _Request) -> list[_Ints]:
        if r.clients != clients or r.n_classes % 5:
            raise r.refuse(
                f"is defined for {clients} clients and a multiple of 5 classes, not {r.clients} "
                f"clients and {r.n_classes} classes; use classes:K or shards:K instead."
            )
        return rule(replace(r, args=(str(r.n_classes // 5),)))

    return standin


@dataclass(frozen=True)
class _Rule:
    cut: Callable[[_Request], list[_Ints]]
    usage: str
    args: tuple[int, int] = (1, 1)  # how few and how many
    labels: bool = True
    clients: int | None = None  # the number of clients when the caller names none


_RULES = {
    "iid": _Rule(_iid, "iid or iid:stratified", (0, 1), labels=False),
    "classes": _Rule(_classes, "classes:K"),
    "shards": _Rule(_shards, "shards:K"),
    "mfcl": _Rule(_mfcl, "mfcl:S or mfcl:S:sequential", (1, 2)),
    "dirichlet": _Rule(_dirichlet, "dirichlet:A or dirichlet:A:MIN", (1, 2)),
    "dirichlet_balanced": _Rule(_dirichlet_balanced, "dirichlet_balanced:A"),
    "quantity": _Rule(
        _quantity,
        "quantity:w1,w2,…, quantity:lognormal:S or quantity:powerlaw:P",
        (1, 2),
        labels=False,
    ),
    "natural": _Rule(_natural, "natural", (0, 0), labels=False),
    "fcl_noniid1_standin": _Rule(_standin(_classes, 5), "fcl_noniid1_standin", (0, 0), clients=5),
    "fcl_noniid2_standin": _Rule(_standin(_shards, 10), "fcl_noniid2_standin", (0, 0), clients=10),
}
RULES: tuple[str, ...] = tuple(_RULES)
_NO_LABELS = "needs labels and the images have none; use iid, quantity:… or natural."


def partition(
    spec: str,
    labels: Tensor | None,
    clients: int | None,
    *,
    n: int | None = None,
    n_classes: int | None = None,
    seed: int = 0,
    groups: Tensor | None = None,
) -> Partition:
    """Split images among ``clients`` by the rule ``spec`` (see the head of this module).

    ``labels`` and ``groups`` are int64 tensors N; ``n`` is N where there are no labels. ``clients``
    may be 0 or None where the rule itself fixes the number.
    """
    name, *args = spec.strip().split(":")
    rule = _RULES.get(name)
    if rule is None:
        raise FurlongError(f"Unknown partition {spec!r}. {nearest(name, _RULES)}")

    def refuse(reason: str) -> FurlongError:
        return FurlongError(f"Partition {spec!r}: {reason}")

    if not rule.args[0] <= len(args) <= rule.args[1] or "" in args:
        raise refuse(f"write it as {rule.usage}.")
    if seed < 0:
        raise refuse(f"seed = {seed} is negative; use 0 or more.")
    if rule.labels and labels is None:
        raise refuse(_NO_LABELS)
    if name == "natural" and groups is None:
        raise refuse("needs the group of every image and the data has none; use another rule.")
    sizes = {len(t) for t in (labels, groups) if t is not None} | ({n} if n is not None else set())
    if len(sizes) != 1:
        raise refuse(
            f"labels, groups and n disagree on the number of images: {sorted(sizes)}."
            if sizes
            else "the number of images is unknown; give labels, groups or n."
        )
    total = sizes.pop()
    y, count = np.zeros(0, dtype=np.int64), 0
    if labels is not None:
        y = labels.numpy().astype(np.int64)
        count = n_classes or (int(y.max()) + 1 if total else 0)
        if (
            total
            and (rule.labels or args == ["stratified"])
            and not 0 <= y.min() <= y.max() < count
        ):
            raise refuse(
                f"labels run from {y.min()} to {y.max()}, outside the {count} classes 0 to "
                f"{count - 1}; leave out unlabelled images or correct the number of classes."
            )
    g = groups.numpy().astype(np.int64) if groups is not None else np.zeros(0, dtype=np.int64)
    if name == "natural":
        found = len(np.unique(g))
        if clients and clients != found:
            raise refuse(f"the data has {found} groups, not {clients}; set clients to {found}.")
        clients = found
    clients = clients or rule.clients or 0
    if clients < 1:
        raise refuse(f"clients = {clients} leaves nobody to hold images; use at least 1.")
    if clients > total:
        raise refuse(f"{clients} clients cannot share {total} images; use at most {total} clients.")
    request = _Request(spec, tuple(args), total, clients, count, y, g, np.random.default_rng(seed))
    hands = rule.cut(request)
    empty = [k for k, hand in enumerate(hands) if not len(hand)]
    if empty:
        raise refuse(
            f"client {empty[0]} would get no image ({len(empty)} of {clients} clients empty, "
            f"{total} images); use fewer clients, more images or a less skewed rule."
        )
    return Partition(
        tuple(torch.from_numpy(np.sort(hand).astype(np.int64)) for hand in hands), spec, total, seed
    )
