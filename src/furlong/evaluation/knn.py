"""Weighted nearest neighbours on features: the cheap monitor of representation quality.

Wu et al., "Unsupervised feature learning via non-parametric instance discrimination", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.evaluation.features import check_labelled, check_split
from furlong.evaluation.protocol import Encoded, Progress, Protocol, silent
from furlong.settings import setting


def knn(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    n_classes: int | None = None,
    block: int = 1 << 25,
) -> float:
    """Share of test images, in [0, 1], whose ``knn_predict`` class is right.

    Features N×d and M×d, integer labels N and M.
    """
    classes = check_split(train_features, train_labels, test_features, test_labels, n_classes)
    predicted = knn_predict(
        train_features, train_labels, test_features, k, temperature, classes, block
    )
    return (predicted == test_labels).float().mean().item()


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    n_classes: int | None = None,
    block: int = 1 << 25,
) -> Tensor:
    """Classes M of test features M×d: a vote of the ``k`` train rows (of N) most alike by cosine.

    A neighbour's vote weighs exp(cosine / temperature). ``k`` beyond N means all N. At most
    ``block`` similarities are in memory at a time.
    """
    check_labelled(train_features, train_labels, n_classes, "train")
    labels = train_labels.long()
    classes = n_classes or 1 + int(labels.max())
    bank = F.normalize(train_features.float(), dim=1)
    k = max(1, min(k, len(bank)))
    predicted = []
    queries = F.normalize(test_features.float(), dim=1)
    for rows in torch.split(queries, max(1, block // len(bank))):
        similarity, neighbour = (rows @ bank.T).topk(k, dim=1)
        # Relative to the nearest neighbour: the same winner, and no overflow at low temperatures.
        vote = ((similarity - similarity[:, :1]) / temperature).exp()
        scores = vote.new_zeros(len(rows), classes).scatter_add_(1, labels[neighbour], vote)
        predicted.append(scores.argmax(dim=1))
    return torch.cat(predicted)


@dataclass(frozen=True)
class KNN(Protocol):
    """The share of test images whose nearest training images are of their class."""

    kind: ClassVar[str] = "knn"

    k: int = setting(200, "How many neighbours vote.", above=0)
    temperature: float = setting(0.1, "By which similarities are divided.", above=0)

    def measure(self, encoded: Encoded, _: Progress = silent) -> dict[str, Any]:
        """The accuracy."""
        options = self.settings(encoded.images)
        return {"accuracy": knn(*encoded.features, **options, n_classes=encoded.images.classes)}
