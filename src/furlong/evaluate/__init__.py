"""Encoder in, numbers out: features, kNN and linear probe of any module, federated or not."""

from furlong.evaluate.features import features
from furlong.evaluate.knn import knn, knn_predict
from furlong.evaluate.linear import RECIPES, LinearResult, Recipe, linear_probe

__all__ = [
    "RECIPES",
    "LinearResult",
    "Recipe",
    "features",
    "knn",
    "knn_predict",
    "linear_probe",
]
