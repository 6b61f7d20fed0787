"""Accuracy that does not flatter: balanced, by rank, with intervals, and of every site by itself.

Images of one patient are nearly the same image: an interval that counts them as independent is too
narrow. So the bootstrap draws patients (``ImageSet.patients``) where they are known, else images.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.seeding import seed_of

MEASURES = ("accuracy", "balanced_accuracy", "auroc", "average_precision")
LEVEL = 0.95  # of the intervals
RESAMPLES, FEWEST = 1000, 200
BUDGET = 20_000_000  # resamples × images × classes, down to FEWEST resamples


def top1(scores: Tensor, labels: Tensor) -> float:
    """Accuracy: the share of images whose highest score (M×C) is that of their label (M)."""
    return (scores.argmax(dim=1) == labels).float().mean().item()


def grade(
    scores: Tensor, test: ImageSet, rows: Tensor | None = None, seed: int = 0
) -> dict[str, Any]:
    """What class scores M×C say beside accuracy, of the test images ``rows`` (M; all if ``None``).

    ``balanced_accuracy``, ``auroc`` and ``average_precision`` in [0, 1], the last two if there is
    more than one class; ``intervals``: measure -> 95 % bootstrap interval, ``resampled``: what was
    drawn and how often (0 times where all images are of one patient); ``sites``: of every natural
    owner of test images, if these are known. A row of ``scores`` must be a distribution over the
    classes: ranks compare images by it.
    """
    if test.labels is None:
        raise FurlongError(f"{test.name} has no labels.")
    rows = torch.arange(len(test)) if rows is None else rows
    scores, labels = scores.double().cpu(), test.labels[rows]
    whole = _plain(scores, labels)
    found: dict[str, Any] = {name: whole[name] for name in MEASURES[1:] if name in whole}
    units, what = rows, "images"
    if test.patients is not None:
        units = test.patients[rows]
        known = units >= 0
        what = "patients" if known.all() else "patients and single images" if known.any() else what
    units = torch.unique(units, return_inverse=True)[1]
    count = int(units.max()) + 1
    found["resampled"] = {"what": what, "units": count, "resamples": 0}
    if count > 1:
        weights = _resamples(units, count, scores.shape[1], seed)
        found["intervals"] = _intervals(measure(scores, labels, weights), whole)
        found["resampled"]["resamples"] = weights.shape[1]
    if test.groups is not None and len(test.group_names) > 1:
        found["sites"] = _by_site(scores, labels, test.groups[rows], test.group_names)
    return found


def _plain(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """The measures that can be told, of all images once."""
    found = measure(scores, labels, torch.ones(len(labels), 1))
    return {name: float(value) for name, value in found.items() if not value.isnan().any()}


def _by_site(
    scores: Tensor, labels: Tensor, sites: Tensor, names: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    found = {}
    for site in torch.unique(sites).tolist():
        own = sites == site
        found[names[site]] = {"images": int(own.sum()), **_plain(scores[own], labels[own])}
    return found


def _resamples(units: Tensor, count: int, classes: int, seed: int) -> Tensor:
    """How often each image is drawn, M×B float32: units with replacement, as many as there are."""
    number = max(FEWEST, min(RESAMPLES, BUDGET // (len(units) * classes)))
    generator = torch.Generator().manual_seed(seed_of(seed, "bootstrap") % 2**63)
    drawn = torch.randint(count, (count, number), generator=generator)
    times = torch.zeros(count, number).scatter_add_(0, drawn, torch.ones(count, number))
    return times[units]


def _intervals(found: dict[str, Tensor], whole: dict[str, float]) -> dict[str, list[float]]:
    """The middle 95 % of the resamples, moved so that their median is the number itself.

    Without that, average precision of a rare class lies below its interval: an image that is drawn
    twice is found twice. A resample of one class has no ranks and does not count.
    """
    points = torch.tensor([(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], dtype=torch.float64)
    intervals = {}
    for name, values in found.items():
        known = values[~values.isnan()]
        if name in whole and 2 * len(known) > len(values):  # most resamples must have one
            low, middle, high = known.quantile(points).tolist()
            moved = (whole[name] + end - middle for end in (low, high))
            intervals[name] = [min(max(end, 0.0), 1.0) for end in moved]
    return intervals


@torch.no_grad()
def measure(scores: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The four measures B (float64) of scores M×C and labels M, for every column of weights M×B.

    Accuracy is the weighted share of images whose highest score is their class's; balanced accuracy
    its mean over the classes. AUROC and average precision are means over the classes, each against
    the rest; images of equal score count as one threshold. A class without any weight does not
    count; NaN where none is left.
    """
    right = (scores.argmax(dim=1) == labels).float()
    recalls, areas, precisions = [], [], []
    for each in torch.unique(labels).tolist():
        own = labels == each
        recalls.append((right[own] @ weights[own]).double() / weights[own].sum(dim=0).double())
        if not own.all():
            area, precision = _ranked(scores[:, each], own, weights)
            areas.append(area)
            precisions.append(precision)
    nothing = torch.full_like(recalls[0], torch.nan)
    return {
        "accuracy": (right @ weights).double() / weights.sum(dim=0).double(),
        "balanced_accuracy": torch.stack(recalls).nanmean(dim=0),
        "auroc": torch.stack(areas).nanmean(dim=0) if areas else nothing,
        "average_precision": torch.stack(precisions).nanmean(dim=0) if areas else nothing,
    }


def _ranked(score: Tensor, own: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """AUROC and average precision B of one class: score M, whether it is of the class M, M×B.

    Sums of whole numbers below 2²⁴ are exact in float32; fractions are added up in float64.
    """
    score, order = score.sort()
    own, weights = own[order], weights[order]
    where = own.nonzero()[:, 0]
    values = score[where].contiguous()
    first = torch.searchsorted(score, values)  # of the images with this one's score
    after = torch.searchsorted(score, values, right=True)
    mine = weights[where]
    ours = F.pad(mine.cumsum(dim=0), (0, 0, 1, 0))  # in front of each image of the class
    place = torch.searchsorted(where, first)
    others = F.pad((weights * ~own[:, None]).cumsum(dim=0), (0, 0, 1, 0))
    positive, negative = ours[-1].double(), others[-1].double()
    before = others[first]
    below = (before + others[after]).double() / (2 * negative)
    above = ours[-1] - ours[place]  # of the class, with at least this score
    precise = above.double() / (above + others[-1] - before).clamp(min=1).double()
    area = (mine * below).sum(dim=0) / positive
    precision = (mine * precise).sum(dim=0) / positive
    return area, torch.where(negative > 0, precision, torch.nan)
