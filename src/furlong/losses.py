"""Loss functions of embeddings: tensors in, scalar out.

Embeddings need not be normalised: most functions look at directions only, so that scaling a row by
a positive number changes nothing and gradients are orthogonal to the rows. The others
(``alignment_loss``, ``barlow_twins``, ``vicreg``) say what they look at.
"""

from __future__ import annotations

from typing import Literal

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


def neighbourhood_matching(
    query: Tensor, bank: Tensor, neighbours: int, temperature: float
) -> Tensor:
    """FCL's second loss: how undecided a query is between one of its neighbours and the rest.

    ``query``: B×d; ``bank``: K×d. The N nearest rows are a query's neighbours. For each of them
    alone, next to the K−N other rows: the entropy of the query's softmax over these K−N+1; mean
    over B queries and N neighbours. No gradient reaches ``bank``.
    """
    if not 1 <= neighbours < len(bank):
        raise ValueError(
            f"{neighbours} neighbours out of {len(bank)} rows: there must be at least one "
            "neighbour and one other row"
        )
    logits = F.normalize(query, dim=1) @ F.normalize(bank.detach(), dim=1).T / temperature
    return _matching_entropy(logits, neighbours)


def _matching_entropy(logits: Tensor, neighbours: int) -> Tensor:
    """The mean of H_j = h(σ_j) + (1−σ_j)·H_R over the ``neighbours`` largest logits t_j of a row.

    The chain rule of entropy: σ_j = sigmoid(t_j − LSE_R) is the neighbour's probability, h the
    entropy of this one choice, H_R that of the other rows, which all neighbours share. So B×K
    values are enough where the definition has B×N×(K−N+1).
    """
    top, places = logits.topk(neighbours)
    others = torch.ones_like(logits, dtype=torch.bool).scatter(1, places, False)
    # gathered, not masked by −∞: there 0·log 0 would make the gradients NaN
    rest = logits.masked_select(others).view(len(logits), -1)
    total = rest.logsumexp(dim=1, keepdim=True)
    log_share = rest - total
    rest_entropy = -(log_share.exp() * log_share).sum(dim=1, keepdim=True)
    margin = top - total
    near, far = margin.sigmoid(), (-margin).sigmoid()
    choice = -(near * F.logsigmoid(margin) + far * F.logsigmoid(-margin))
    return (choice + far * rest_entropy).mean()


def dictionary_nce(
    z1: Tensor, z2: Tensor, dictionary: Tensor, temperature: float, symmetric: bool = False
) -> Tensor:
    """FedCA's contrastive loss (Zhang et al. 2020): logits N×(N+K), the label of row i is i.

    ``z1``, ``z2``: N×d, two views of the same images; each row of ``z1`` picks its partner among
    all of ``z2`` and ``dictionary`` (K×d, a constant; K may be 0). ``symmetric`` takes the mean of
    both directions.
    """
    if symmetric:
        there = dictionary_nce(z1, z2, dictionary, temperature)
        return (there + dictionary_nce(z2, z1, dictionary, temperature)) / 2
    candidates = F.normalize(torch.cat([z2, dictionary.detach()]), dim=1)
    logits = F.normalize(z1, dim=1) @ candidates.T / temperature
    return F.cross_entropy(logits, torch.arange(len(z1), device=z1.device))


def alignment_loss(
    h: Tensor, z: Tensor, target_h: Tensor, target_z: Tensor, reduction: Literal["mean", "sum"]
) -> Tensor:
    """FedCA's alignment: squared distances of h (N×d_h) and z (N×d_z) from constant targets.

    Summed over dimensions; ``reduction`` is over the N images.
    """
    distance = (h - target_h.detach()).square().sum() + (z - target_z.detach()).square().sum()
    return distance / len(h) if reduction == "mean" else distance


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


def barlow_twins(z1: Tensor, z2: Tensor, off_diagonal: float) -> Tensor:
    """Barlow Twins (Zbontar et al. 2021): Σ_i (1 − C_ii)² + λ Σ_{i≠j} C_ij².

    ``z1``, ``z2``: B×d; C = d×d correlations over the batch between the columns of the one and the
    other, so shifting or scaling a column changes nothing. ``off_diagonal`` is λ.
    """
    z1, z2 = ((z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt() for z in (z1, z2))
    squares = (z1.T @ z2 / len(z1) - torch.eye(z1.shape[1], device=z1.device)).square()
    return off_diagonal * squares.sum() + (1 - off_diagonal) * squares.trace()


def vicreg(z1: Tensor, z2: Tensor, invariance: float, variance: float, covariance: float) -> Tensor:
    """VICReg (Bardes, Ponce, LeCun 2022): λ·s(Z, Z') + μ·[v(Z) + v(Z')]/2 + ν·[c(Z) + c(Z')].

    ``z1``, ``z2``: B×d. s is the mean squared difference, v the mean over columns of
    max(0, 1 − std), c the sum of the squared covariances of different columns over d. The halves of
    v are those of the authors' code; the paper prints μ·[v(Z) + v(Z')].
    """
    spread, mixing = z1.new_zeros(()), z1.new_zeros(())
    for z in (z1, z2):
        spread = spread + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() / 2
        squares = z.T.cov().square()
        mixing = mixing + (squares.sum() - squares.trace()) / z.shape[1]
    return invariance * F.mse_loss(z1, z2) + variance * spread + covariance * mixing


def relational(
    z1: Tensor, z2: Tensor, anchors: Tensor, temperature: float, target_temperature: float
) -> Tensor:
    """FedX's relational loss (Han et al. 2022): two views relate to other images in the same way.

    ``z1``, ``z2``: B×d; ``anchors``: A×d. A view's relation is its softmax over its cosines with
    the anchors; the loss is the mean divergence KL(m‖r) of both views' relations r from their
    mean m. With equal temperatures it is the Jensen-Shannon divergence. Gradients flow through m
    too, as in the authors' code.
    """
    anchors = F.normalize(anchors, dim=1)
    cosines = [F.normalize(z, dim=1) @ anchors.T for z in (z1, z2)]
    mean = torch.stack([(c / target_temperature).softmax(dim=1) for c in cosines]).mean(0)
    parts = [
        F.kl_div((c / temperature).log_softmax(dim=1), mean, reduction="batchmean") for c in cosines
    ]
    return (parts[0] + parts[1]) / 2


def moon_contrast(z: Tensor, received: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """MOON's loss (Li, He, Song 2021): nearer to the received model than to one's own last one.

    ``z``, ``received``, ``previous``: B×d, projections of the same images by the network in
    training, the global and the client's previous one; no gradient reaches the latter two.
    """
    near = F.cosine_similarity(z, received.detach(), dim=1)
    far = F.cosine_similarity(z, previous.detach(), dim=1)
    return F.softplus((far - near) / temperature).mean()
