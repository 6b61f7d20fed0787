"""Clustering of rows by direction: Sinkhorn codes, spherical k-means, Orchestra's prototypes.

Rows and centroids are unit vectors and similarity is their dot product. Random rows are drawn from
torch's global generator, which the caller has seeded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.devices import moved

BLOCK = 1 << 22
"""Similarities that are computed at a time (16 MB), however many rows and centroids there are."""


@torch.no_grad()
def sinkhorn(logits: Tensor, iterations: int, tolerance: float = 0.0) -> Tensor:
    """Soft assignments …×B×P of B rows to P clusters which all get about the same, B/P.

    ``logits``: …×B×P, similarity over temperature. Each iteration scales exp(logits) to equal
    clusters, then to rows that sum to 1; without any it is a softmax. With ``tolerance`` it stops
    at a tenth iteration that changes all rows together by less (as Orchestra's code does).
    """
    if iterations < 1:
        return logits.softmax(-1)
    # The first iteration is done on logarithms; after it every row has a share of at least 1/P,
    # so that nothing can overflow any more and no row can vanish.
    codes = logits.log_softmax(-2).softmax(-1)
    rows, clusters = codes.shape[-2:]
    for iteration in range(1, iterations):
        shares = codes.sum(-2, keepdim=True).mul_(clusters / rows)
        codes.div_(shares.clamp_(min=torch.finfo(codes.dtype).tiny))
        totals = codes.sum(-1, keepdim=True)
        codes.div_(totals)
        if tolerance and iteration % 10 == 0 and float((totals - 1).abs().sum()) < tolerance:
            break
    return codes


@torch.no_grad()
def unit_rows(rows: Tensor) -> Tensor:
    """n×d with rows of length 1; a row that has it up to rounding keeps its bits."""
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where((length - 1).abs() < 1e-6, rows, F.normalize(rows, dim=1))


def random_rows(rows: Tensor, count: int) -> Tensor:
    """``count`` different rows of n×d."""
    if not 1 <= count <= len(rows):
        raise ValueError(f"{count} of {len(rows)} rows: there must be at least one, and enough")
    return rows[moved(torch.randperm(len(rows))[:count], rows.device)]


@torch.no_grad()
def nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """int64 n: which of P×d centroids each of n×d rows is nearest to."""
    parts = torch.split(rows, max(1, BLOCK // len(centroids)))
    return torch.cat([(part @ centroids.T).argmax(1) for part in parts])


def _sums(rows: Tensor, assigned: Tensor, clusters: int) -> Tensor:
    """P×d: the sum of the rows of each cluster."""
    return rows.new_zeros(clusters, rows.shape[1]).index_add_(0, assigned, rows)


@torch.no_grad()
def spherical_kmeans(rows: Tensor, seeds: Tensor, iterations: int = 10) -> tuple[Tensor, Tensor]:
    """Centroids P×d and assignment int64 n of unit ``rows`` n×d, from the centroids ``seeds``.

    An empty cluster keeps its centroid, and so does one whose rows cancel out.
    """
    centroids = seeds
    for _ in range(iterations):
        sums = _sums(rows, nearest(rows, centroids), len(centroids))
        length = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centroids = torch.where(length > 1e-6, F.normalize(sums, dim=1), centroids)
    return centroids, nearest(rows, centroids)


def _equal_codes(similarity: Tensor, factor: float, iterations: int, tolerance: float) -> Tensor:
    """Orchestra's Sinkhorn, which starts from a softmax over the clusters."""
    return sinkhorn((factor * similarity).log_softmax(-1), iterations, tolerance)


@torch.no_grad()
def equalised_kmeans(
    rows: Tensor,
    clusters: int,
    iterations: int = 5,
    factor: float = 25.0,
    sinkhorn_iterations: int = 10,
) -> Tensor:
    """L×d centroids of unit ``rows`` n×d, in clusters of about the same size (Orchestra).

    Each row goes where its Sinkhorn code is largest; an empty cluster gets a random row.
    """
    centroids = random_rows(rows, clusters)
    for _ in range(iterations):
        codes = _equal_codes(rows @ centroids.T, factor, sinkhorn_iterations, 0.0)
        sums = _sums(rows, codes.argmax(1), clusters)
        spare = rows[moved(torch.randint(len(rows), (clusters,)), rows.device)]
        length = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centroids = torch.where(length > 1e-6, F.normalize(sums, dim=1), spare)
    return centroids


def fit_prototypes(
    prototypes: Tensor,
    rows: Tensor,
    temperature: float,
    steps: int = 500,
    lr: float = 0.01,
    factor: float = 25.0,
    sinkhorn_iterations: int = 100,
) -> Tensor:
    """Orchestra's server: G×d unit prototypes C moved towards equal clusters of ``rows`` n×d.

    SGD (momentum 0.9, weight decay 1e-4) on the mean of −cos(SK(z̃Cᵀ), softmax(z̃Cᵀ/T)) over the
    rows, SK being Sinkhorn codes without gradient; C is normalised after each step.
    """
    rows = F.normalize(rows, dim=1)
    weight = nn.Parameter(prototypes.clone())
    optimiser = torch.optim.SGD([weight], lr, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        similarity = rows @ weight.T
        codes = _equal_codes(similarity.detach(), factor, sinkhorn_iterations, 1e-2)
        loss = -F.cosine_similarity(codes, (similarity / temperature).softmax(1), dim=1).mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        with torch.no_grad():
            weight.copy_(F.normalize(weight, dim=1))
    return weight.detach()
