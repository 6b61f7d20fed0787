"""Transfer: does what was learnt on one set of images help on another? (FedU, FedCA)"""

from __future__ import annotations

from torch import nn

from furlong.data.augment import Recipe
from furlong.data.images import ImageSet
from furlong.evaluation.tuning import Progress, Tuning, TuningResult, fine_tune, tuning


def transfer(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    *,
    random: nn.Module,
    plan: Tuning | None = None,
    augment: Recipe | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, TuningResult]:
    """Fine-tune on all of another set's ``train``: the results of ``encoder`` and of ``random``.

    ``random`` is the same architecture before any training: what the target set teaches by itself.
    Both see the same batches and start with the same head. ``augment`` resizes to the encoder's
    size. By default FedU's recipe; FedCA's is ``tuning("fedca")``.
    """
    plan = tuning("fedu") if plan is None else plan
    return {
        name: fine_tune(each, train, test, plan, augment=augment, seed=seed, progress=progress)
        for name, each in (("encoder", encoder), ("random", random))
    }
