"""Loss functions of embeddings: tensors in, scalar out.

Embeddings need not be normalised: most functions look at directions only, so that scaling a row by
a positive number changes nothing and gradients are orthogonal to the rows. The others
(``alignment_loss``, ``barlow_twins``, ``vicreg``, ``spectral_contrast``, ``decorrelation``) say
what they look at.
``swapped_prediction`` gets similarities instead of embeddings.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.devices import moved


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (Chen et al. 2020): each view picks its partner among the 2B−1 others.

    ``z1``, ``z2``: B×d, the two views of the same images in the same order. Mean over 2B anchors.
    """
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(logits, partner)


def nt_xent_views(z: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss for V views: each picks each of its V-1 partners among views of other images.

    ``z``: V×B×d, the images in the same order in every view. Mean over the VB anchors and their
    partners, each alone beside the V(B-1) views of other images; with two views it is ``nt_xent``.
    """
    views, images, _ = z.shape
    rows = F.normalize(z.flatten(0, 1), dim=1)
    logits = rows @ rows.T / temperature
    if images == 1:  # nothing to tell it from
        return 0 * logits.sum()
    image = torch.arange(images).repeat(views)  # on the CPU, where their number is known
    same = image[:, None] == image
    partner = (same & ~torch.eye(len(rows), dtype=torch.bool)).flatten().nonzero()[:, 0]
    same = moved(same, z.device)
    others = logits.masked_fill(same, -torch.inf).logsumexp(dim=1, keepdim=True)
    return F.softplus(others - logits).flatten()[moved(partner, z.device)].mean()


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
    # gathered, not masked by −∞: there 0·log 0 would make the gradients NaN; and by places that
    # are counted, not by masked_select: how many there are is known, and nothing has to wait
    count = logits.shape[1] - neighbours
    place = torch.where(others, others.cumsum(1) - 1, count)
    column = torch.arange(logits.shape[1], device=logits.device).expand_as(place)
    kept = place.new_empty(len(place), count + 1).scatter_(1, place, column)[:, :count]
    rest = logits.gather(1, kept)
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
    logits = _dictionary_logits(z1, z2, dictionary, temperature)
    return F.cross_entropy(logits, torch.arange(len(z1), device=z1.device))


@torch.no_grad()
def dictionary_mass(z1: Tensor, z2: Tensor, dictionary: Tensor, temperature: float) -> Tensor:
    """P_D, for the log: the mean share of the softmax of :func:`dictionary_nce` on ``dictionary``.

    In the direction from ``z1`` to ``z2``. Near 0 the dictionary plays no part in training.
    """
    logits = _dictionary_logits(z1, z2, dictionary, temperature)
    return logits.softmax(dim=1)[:, len(z2) :].sum(dim=1).mean()


def _dictionary_logits(z1: Tensor, z2: Tensor, dictionary: Tensor, temperature: float) -> Tensor:
    """N×(N+K): each row of ``z1`` with all of ``z2`` and of ``dictionary``."""
    candidates = F.normalize(torch.cat([z2, dictionary.detach()]), dim=1)
    return F.normalize(z1, dim=1) @ candidates.T / temperature


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
        columns = z.T
        columns = columns - columns.mean(1, keepdim=True)
        squares = (columns @ columns.T / (len(z) - 1)).square()  # torch.cov waits for the device
        mixing = mixing + (squares.sum() - squares.trace()) / z.shape[1]
    return invariance * F.mse_loss(z1, z2) + variance * spread + covariance * mixing


def align_and_spread(z1: Tensor, z2: Tensor, spread: float, sharpness: float = 2.0) -> Tensor:
    """Alignment and uniformity (Wang & Isola 2020): E‖z₁ − z₂‖² + β·log E exp(−t‖z − z'‖²).

    ``z1``, ``z2``: B×d, of unit length here; the second mean is over pairs of different images in
    one view, and over both views. ``spread`` is β, ``sharpness`` t.
    """
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    near = (z1 - z2).square().sum(dim=1).mean()
    if len(z1) < 2:  # there is nobody to keep away from
        return near
    far = [(-sharpness * torch.pdist(z).square()).logsumexp(dim=0) for z in (z1, z2)]
    pairs = len(z1) * (len(z1) - 1) / 2
    return near + spread * (torch.stack(far).mean() - math.log(pairs))


def spectral_contrast(
    z1: Tensor, z2: Tensor, others: Tensor | None = None, own: float = 1.0
) -> Tensor:
    """FedSC's loss (Jing et al. 2024): −2·E[z₁·z₂] + α·‖R‖² + 2(1 − α)·tr(R·R₋).

    ``z1``, ``z2``: B×d, lengths count. R = E[zzᵀ] over both views, d×d; ``others`` is R₋, the mean
    of the other clients' (``None``: α = 1, the spectral contrastive loss). ``own`` is α.
    """
    z = torch.cat([z1, z2])
    moment = z.T @ z / len(z)
    near = -2 * (z1 * z2).sum(dim=1).mean()
    if others is None:
        return near + moment.square().sum()
    return near + own * moment.square().sum() + 2 * (1 - own) * (moment * others).sum()


def decorrelation(h: Tensor) -> Tensor:
    """FedDecorr's term (Shi et al., ICLR 2023): ‖C‖²/d², C the d×d correlations of the columns.

    ``h``: B×d; shifting or scaling a column changes nothing. A batch of one image gives 0.
    """
    if len(h) < 2:
        return h.new_zeros(())
    h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
    return (h.T @ h / len(h)).square().mean()


def distance_from_uniform(z: Tensor, planes: Tensor) -> Tensor:
    """How far directions are from covering the sphere evenly (Bonet et al., ICLR 2023).

    ``z``: B×d; ``planes``: P×d×2, each with two orthogonal columns. The mean over planes of the
    squared Wasserstein distance between the angles of the projected rows and all angles; a turn
    is 1. For sorted angles a: E[a²] − E[a]² + Σ_i (B + 1 − 2i)·a_i/B² + 1/12.
    """
    x, y = (F.normalize(z, dim=1) @ planes).unbind(dim=2)  # P×B each
    angles = (torch.atan2(y, x) / (2 * math.pi) + 0.5).sort(dim=1)[0]
    count = angles.shape[1]
    order = torch.arange(count - 1, -count, -2, device=z.device, dtype=z.dtype) / count**2
    apart = angles.square().mean(dim=1) - angles.mean(dim=1).square() + angles @ order + 1 / 12
    return apart.mean()


def relational(
    z1: Tensor,
    z2: Tensor,
    anchors: Tensor,
    temperature: float,
    target_temperature: float,
    reverse: bool = False,
) -> Tensor:
    """FedX's relational loss (Han et al. 2022): two views relate to other images in the same way.

    ``z1``, ``z2``: B×d; ``anchors``: A×d. A view's relation r is its softmax over its cosines with
    the anchors, m the mean of both views' relations at ``target_temperature``. The loss is the mean
    of KL(r‖m), which is the Jensen-Shannon divergence if the temperatures are equal, or of KL(m‖r)
    if ``reverse``. Gradients flow through m too.
    """
    anchors = F.normalize(anchors, dim=1)
    cosines = torch.stack([F.normalize(z, dim=1) @ anchors.T for z in (z1, z2)])
    relations = (cosines / temperature).log_softmax(dim=2)
    mean = (cosines / target_temperature).log_softmax(dim=2).logsumexp(dim=0) - math.log(2)
    first, second = (mean.expand_as(relations), relations) if reverse else (relations, mean)
    return (first.exp() * (first - second)).sum(dim=2).mean()


def moon_contrast(z: Tensor, received: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """MOON's loss (Li, He, Song 2021): nearer to the received model than to one's own last one.

    ``z``, ``received``, ``previous``: B×d, projections of the same images by the network in
    training, the global and the client's previous one; no gradient reaches the latter two.
    """
    near = F.cosine_similarity(z, received.detach(), dim=1)
    far = F.cosine_similarity(z, previous.detach(), dim=1)
    return F.softplus((far - near) / temperature).mean()


def swapped_prediction(scores: Tensor, codes: Tensor, temperature: float) -> Tensor:
    """SwAV's loss (Caron et al. 2020): each view predicts the code of the other.

    ``scores``: 2×B×P similarities of two views to P prototypes; ``codes``: 2×B×P, rows that sum to
    1, constants. Mean over views and images of the cross entropy.
    """
    predicted = (scores / temperature).log_softmax(2)
    return -(codes.detach().flip(0) * predicted).sum(2).mean()


IGNORED = -100
"""The cluster of an image that was not clustered."""


def cluster_cross_entropy(
    z: Tensor, prototypes: Tensor, assigned: Tensor, temperature: float
) -> Tensor:
    """DeepCluster-v2's loss (Caron et al. 2020): each row picks its cluster's prototype.

    ``z``: B×d; ``prototypes``: P×d, constants; ``assigned``: int64 B, 0 … P−1 or IGNORED. Mean over
    the rows that have a cluster, 0 if none has.
    """
    logits = F.normalize(z, dim=1) @ F.normalize(prototypes.detach(), dim=1).T / temperature
    total = F.cross_entropy(logits, assigned, ignore_index=IGNORED, reduction="sum")
    return total / (assigned != IGNORED).sum().clamp(min=1)


def cluster_agreement(
    online: Tensor, target: Tensor, centroids: Tensor, temperature: float
) -> Tensor:
    """Orchestra's loss (Lubana et al. 2022): the online network predicts the target's clusters.

    ``online``, ``target``: B×d, two views; ``centroids``: G×d. The batch mean of −Σ t·log s with
    t, s = softmax of the similarities to the centroids. Only ``online`` gets a gradient.
    """
    centroids = F.normalize(centroids.detach(), dim=1)
    wanted = (F.normalize(target.detach(), dim=1) @ centroids.T / temperature).softmax(1)
    found = (F.normalize(online, dim=1) @ centroids.T / temperature).log_softmax(1)
    return -(wanted * found).sum(1).mean()
