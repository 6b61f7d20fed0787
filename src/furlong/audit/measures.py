"""How well an attack did, in numbers with intervals, and what they are compared with.

Two kinds of attack: one gives every image a score, the higher the more it takes the image for a
member (:func:`told_apart`); the other gives an image back, which is compared with the true one and
with others (:func:`recognised`). All resampling is stratified and depends on the seed only. Shares
have exact binomial intervals: where none of n is found, resampling would say that none can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation.metrics import LEVEL, measure
from furlong.seeding import seed_of, shuffled

RESAMPLES = 1000
VERDICT = 0.995  # of the interval by which it is said that something was found
FALSE_POSITIVES = 0.01  # at which the true positives are counted
FEWEST = 20  # members, and as many others, of an attack by scores


@dataclass(frozen=True)
class Number:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float
    least: float  # the lower end of a 99.5 % interval: ten attacks are tried, not one


Numbers = dict[str, Number]
"""By measure: ``auc``, ``tpr`` (at 1 % false positives), ``identified`` (share), ``psnr`` (dB)."""


@dataclass(frozen=True)
class Attack:
    """What is tried, on what, and how."""

    name: str
    family: str
    target: str
    how: str  # what the attacker has and does, in a sentence
    images: int  # members that it is tried on


@dataclass(frozen=True)
class Finding:
    """What came out of an attack."""

    attack: Attack
    run: Numbers
    untrained: Numbers  # the same attack where the networks have learnt nothing
    nothing: dict[str, float]  # by measure: what comes out where nothing is revealed
    found: bool  # whether the run reveals something by this attack
    why: str  # that in words
    pictures: Sequence[tuple[Tensor, Tensor]] = ()  # uint8 C×S×S before and after

    def asdict(self) -> dict[str, Any]:
        """As audit.json has it: without pictures, because images must not be left behind."""
        parts = asdict(replace(self, pictures=()))
        del parts["pictures"]
        return {**parts.pop("attack"), **parts}


# ---------------------------------------------------------------- scores


def told_apart(
    members: Tensor, others: Tensor, control: tuple[Tensor, Tensor], seed: int
) -> tuple[Numbers, Numbers, Number]:
    """AUC and true-positive rate of the scores n of members and m of others; those of a control.

    ``control``: scores of the same images that cannot tell what the attack tells. The last number
    is by how much the AUC is above the control's, on the same resamples.
    """
    if min(len(members), len(others)) < FEWEST:
        raise FurlongError(
            f"{len(members)} members and {len(others)} others are too few to tell them apart: an "
            f"attack needs {FEWEST} of each."
        )
    labels = torch.cat([torch.ones(len(members)), torch.zeros(len(others))]).long()
    weights = _resamples(len(members), len(others), seed)
    scores = torch.cat([members, others]), torch.cat(control)
    areas = [_areas(each, labels, weights) for each in scores]
    run, other = (
        {"auc": _number(area), "tpr": share(_named(each, labels), len(members))}
        for area, each in zip(areas, scores, strict=True)
    )
    return run, other, _number(areas[0] - areas[1])


def _resamples(members: int, others: int, seed: int) -> Tensor:
    """How often each image counts, M×(1 + B): all once, then drawn with replacement by side."""
    generator = torch.Generator().manual_seed(seed_of(seed, "audit bootstrap"))
    parts = []
    for count in (members, others):
        drawn = torch.randint(count, (count, RESAMPLES), generator=generator)
        times = torch.zeros(count, RESAMPLES).scatter_add_(0, drawn, torch.ones(count, RESAMPLES))
        parts.append(torch.cat([torch.ones(count, 1), times], dim=1))
    return torch.cat(parts)


def _areas(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """AUC 1 + B of scores M for every column of weights M×(1 + B)."""
    scores = scores.double()
    if not scores.isfinite().all():
        raise FurlongError("an attack's scores hold NaN or infinity: has the run diverged?")
    return measure(torch.stack([-scores, scores], dim=1), labels, weights)["auroc"]


def _named(scores: Tensor, labels: Tensor) -> int:
    """How many members of scores M are named where at most 1 % of the others are."""
    scores, order = scores.double().sort(descending=True)
    own = labels[order].bool()
    hits, alarms = own.cumsum(dim=0), (~own).cumsum(dim=0)
    ends = F.pad(scores[1:] != scores[:-1], (0, 1), value=True)  # equal scores together
    allowed = ends & (alarms <= FALSE_POSITIVES * alarms[-1] + 1e-6)
    return int(torch.where(allowed, hits, 0).amax())


def share(found: float, count: int) -> Number:
    """The share ``found`` of ``count`` with its exact binomial interval (Clopper and Pearson 1934).

    ``found`` may be a sum of parts of units: then the interval is wider than it need be.
    """

    def low(level: float) -> float:
        tail = (1 - level) / 2
        return float(betaincinv(found, count - found + 1, tail)) if found > 0 else 0.0

    def high(level: float) -> float:
        tail = (1 + level) / 2
        return float(betaincinv(found + 1, count - found, tail)) if found < count else 1.0

    return Number(found / count, low(LEVEL), high(LEVEL), low(VERDICT))


def _number(values: Tensor) -> Number:
    """The first of ``values`` 1 + B with the middle 95 % of the others."""
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2, (1 - VERDICT) / 2]
    low, high, least = values[1:].double().quantile(torch.tensor(ends).double()).tolist()
    return Number(float(values[0]), low, high, least)


def mean(values: Tensor, seed: int) -> Number:
    """The mean of ``values`` n with its interval."""
    generator = torch.Generator().manual_seed(seed_of(seed, "audit bootstrap"))
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    values = values.double()
    return _number(torch.cat([values.mean()[None], values[drawn].mean(dim=1)]))


# ---------------------------------------------------------------- images


def psnr(images: Tensor, truth: Tensor) -> Tensor:
    """Decibels B of images against the true ones, both B×C×S×S in [0, 1]; 60 at most."""
    error = (images - truth).square().flatten(1).mean(dim=1)
    return -10 * error.clamp(min=1e-6).log10()


def alike(images: Tensor, others: Tensor) -> Tensor:
    """Correlations A×B of the pixels of images A×C×S×S and B×C×S×S: blind to light and contrast."""
    flat = (x.flatten(1) - x.flatten(1).mean(dim=1, keepdim=True) for x in (images, others))
    a, b = (F.normalize(x, dim=1) for x in flat)
    return a @ b.T


def recognised(
    images: Tensor, truth: Tensor, decoys: Tensor, seed: int, together: int = 1
) -> Numbers:
    """How near images B×C×S×S are to the true ones, and how often nearer than to any decoy.

    ``decoys``: D×C×S×S, among which and the own true image each is looked for: by chance one in
    D + 1 is found. ``together``: so many in a row were found in one go and count as one.
    """
    right = (alike(images, truth).diagonal() > alike(images, decoys).amax(dim=1)).double()
    found, decibels = (
        each.view(-1, together).mean(dim=1) for each in (right, psnr(images, truth).double())
    )
    return {"identified": share(float(found.sum()), len(found)), "psnr": mean(decibels, seed)}


# ---------------------------------------------------------------- who is compared with whom


def matched(
    members: ImageSet, rows: Tensor, others: ImageSet, free: Tensor, most: int, seed: int
) -> tuple[Tensor, Tensor]:
    """As many of ``rows`` as of ``free``, at most ``most``, alike in classes and sites if known.

    Otherwise an attack on a client with few classes would find the classes and not the members.
    """
    kinds, own = _kinds(members, rows, others), _kinds(others, free, members)
    left, right = [], []
    for kind in sorted(set(kinds.tolist()) & set(own.tolist())):
        sides = [rows[kinds == kind], free[own == kind]]
        count = min(map(len, sides))
        pair = [side[shuffled(len(side), seed, "matched", kind)[:count]] for side in sides]
        left.append(pair[0])
        right.append(pair[1])
    if not left:
        return rows[:0], free[:0]
    order = shuffled(sum(map(len, left)), seed, "matched")[:most]
    return torch.cat(left)[order], torch.cat(right)[order]


def _kinds(images: ImageSet, rows: Tensor, beside: ImageSet) -> Tensor:
    """A number for the class and the site of every image of ``rows``, where both sets know them."""
    kinds = torch.zeros(len(rows), dtype=torch.int64)
    if images.labels is not None and beside.labels is not None:
        kinds = images.labels[rows]
    if images.groups is not None and images.group_names == beside.group_names:
        kinds = kinds * len(images.group_names) + images.groups[rows]
    return kinds


# ---------------------------------------------------------------- what it means


def by_scores(
    attack: Attack, run: Numbers, untrained: Numbers, gain: Number, control: str
) -> Finding:
    """Found if better than guessing, and by ``gain`` better than the ``control``, in words."""
    nothing = {"auc": 0.5, "tpr": FALSE_POSITIVES}
    if run["auc"].least <= 0.5:
        why = "the interval contains what guessing gives"
    elif gain.least <= 0:
        why = f"no better than {control}: the images themselves differ"
    else:
        return Finding(
            attack, run, untrained, nothing, True, f"better than guessing and than {control}"
        )
    return Finding(attack, run, untrained, nothing, False, why)


def by_images(
    attack: Attack,
    numbers: tuple[Numbers, Numbers],
    chance: float,
    blank: float,
    pictures: Sequence[tuple[Tensor, Tensor]],
) -> Finding:
    """Found if recognised more often than by ``chance``; ``blank``: decibels of a mean image."""
    run, untrained = numbers
    nothing = {"identified": chance, "psnr": blank}
    found = run["identified"].least > chance
    why = f"recognised {'more often than' if found else 'no more often than'} by guessing"
    return Finding(attack, run, untrained, nothing, found, why, pictures)
