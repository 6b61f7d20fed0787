"""Is a difference more than chance? Paired over seeds: a t-test, corrected for several of them.

Two methods with the same seed have the same images, the same split and, as most build their
encoder first, the same initial encoder: their difference is free of what a seed brings to both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 3  # seeds: below that nothing can be said
LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """Mean of (ours - baseline) over ``n`` common seeds; p two-sided, ``None`` if it cannot be."""

    mean: float
    n: int
    p: float | None
    corrected: float | None = None  # p, for all tests of a table


def paired(ours: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The paired t-test; both sequences in the order of the same seeds."""
    differences = [a - b for a, b in zip(ours, baseline, strict=True)]
    n, mean = len(differences), statistics.fmean(differences)
    if n < FEWEST:
        return Difference(mean, n, None)
    if statistics.stdev(differences) < 1e-12:  # no spread to compare the mean with
        return Difference(mean, n, 1.0 if abs(mean) < 1e-12 else None)
    from scipy import stats  # takes long to import

    return Difference(mean, n, float(stats.ttest_rel(ours, baseline).pvalue))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values, in the order given: the chance of any false alarm stays at p."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, worst = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = worst
    return corrected
