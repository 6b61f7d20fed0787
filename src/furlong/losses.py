"""Loss functions of embeddings: tensors in, scalar out.

Embeddings need not be normalised: every function looks at directions only, so scaling a row by a
positive number changes nothing, and gradients are orthogonal to the rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (Chen et al. 2020): each view picks its partner among the 2B−1 others.

    ``z1``, ``z2``: B×d, the two views of the same images in the same order. Mean over 2B anchors.
    """
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(logits, partner)


def info_nce(query: Tensor, key: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """MoCo's loss (He et al. 2020): each query picks its own key among that key and K negatives.

    ``query``, ``key``: B×d; ``negatives``: K×d, shared by all queries; K = 0 gives 0. Nothing is
    detached here: whether keys and negatives carry gradients is the method's choice.
    """
    query, key, negatives = (F.normalize(rows, dim=1) for rows in (query, key, negatives))
    positive = (query * key).sum(dim=1, keepdim=True)
    logits = torch.cat([positive, query @ negatives.T], dim=1) / temperature
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))


def cosine_simsiam(prediction: Tensor, target: Tensor) -> Tensor:
    """SimSiam's loss (Chen & He 2021) in one direction: batch mean of −cos, in [−1, 1].

    ``prediction``, ``target``: B×d; no gradient reaches ``target``. The caller averages the two
    directions.
    """
    return -F.cosine_similarity(prediction, target.detach(), dim=1).mean()


def byol(prediction: Tensor, target: Tensor) -> Tensor:
    """BYOL's loss (Grill et al. 2020) in one direction: batch mean of 2 − 2·cos, in [0, 4].

    ``prediction``, ``target``: B×d; no gradient reaches ``target``. The caller adds the two
    directions.
    """
    return 2 + 2 * cosine_simsiam(prediction, target)
