"""Central semi-supervised fine-tuning: few labels, all in one place (FCL, FedU).

With labels that stay on the clients it is another protocol, ``furlong.finetune``: FedCA's numbers
with few labels come from there and must not be put beside these.
"""

from __future__ import annotations

from torch import Tensor, nn

from furlong.data.augment import Recipe
from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation.subset import stratified
from furlong.evaluation.tuning import Progress, Tuning, TuningResult, fine_tune, tuning


def labelled_rows(train: ImageSet, share: float, seed: int) -> Tensor:
    """Rows of the images that are used with their labels, see ``stratified``."""
    if train.labels is None:
        raise FurlongError(f"{train.name} has no labels.")
    rows = stratified(train.labels, share, seed)
    if len(rows) > 2 * share * len(train):  # then it is no longer what it is called
        classes = len(train.labels.bincount().nonzero())
        raise FurlongError(
            f"{share:.1%} of the {len(train)} labels of {train.name} is less than one for each of "
            f"its {classes} classes. Take at least {len(rows) / len(train):.1%}, or more images."
        )
    return rows


def semi_supervised(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    share: float,
    *,
    plan: Tuning | None = None,
    augment: Recipe | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TuningResult:
    """Fine-tune with ⌈share·N_c⌉ labels per class, e.g. 0.01 or 0.1; by default FedU's recipe.

    ``seed`` fixes the labelled images, the head and the order of training; see ``fine_tune``.
    """
    rows = labelled_rows(train, share, seed)
    return fine_tune(
        encoder,
        train.subset(rows),
        test,
        tuning("fedu") if plan is None else plan,
        augment=augment,
        seed=seed,
        progress=progress,
    )
