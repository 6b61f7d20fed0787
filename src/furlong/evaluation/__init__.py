"""Encoder in, numbers out: the evaluation protocols for any module, federated or not.

=====================  =============================================================================
``knn``                is an image near others of its class? No training.
``linear_probe``       can a linear classifier on frozen features tell the classes apart?
``semi_supervised``    how far do 1 % or 10 % of the labels go, all in one place?
``transfer``           does it help on another data set, compared with a random start?
``quality``            alignment, uniformity, effective rank: without any label
=====================  =============================================================================

What is trained takes an ``nn.Module``, image sets and a ``seed``, and leaves the module as it was.
"""

from furlong.evaluation.features import features
from furlong.evaluation.knn import knn, knn_predict
from furlong.evaluation.linear import (
    RECIPES,
    LinearResult,
    Recipe,
    linear_probe,
    linear_probe_crops,
)
from furlong.evaluation.quality import (
    Quality,
    alignment,
    effective_rank,
    quality,
    spread,
    uniformity,
)
from furlong.evaluation.semi import semi_supervised
from furlong.evaluation.subset import stratified
from furlong.evaluation.transfer import transfer
from furlong.evaluation.tuning import TUNINGS, Tuning, TuningResult, fine_tune, tuning

__all__ = [
    "RECIPES",
    "TUNINGS",
    "LinearResult",
    "Quality",
    "Recipe",
    "Tuning",
    "TuningResult",
    "alignment",
    "effective_rank",
    "features",
    "fine_tune",
    "knn",
    "knn_predict",
    "linear_probe",
    "linear_probe_crops",
    "quality",
    "semi_supervised",
    "spread",
    "stratified",
    "transfer",
    "tuning",
    "uniformity",
]
