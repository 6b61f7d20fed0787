"""How uneven a split of the data is: skew between and inside clients, and false negatives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from furlong.errors import FurlongError

_FLOOR = 1e-6  # ς: what MFCL puts in place of a zero probability, without renormalising


def _class_shares(counts: Tensor) -> Tensor:
    """P^m(v) in float64, M×n, zeros replaced by ς."""
    if counts.ndim != 2 or counts.numel() == 0:
        raise FurlongError(
            f"Class counts of shape {tuple(counts.shape)}: clients × classes is needed."
        )
    counts = counts.to(torch.float64)
    totals = counts.sum(1, keepdim=True)
    empty = (totals[:, 0] <= 0).nonzero()
    if len(empty):
        raise FurlongError(
            f"Client {int(empty[0, 0])} holds no image, so its class distribution is undefined; "
            f"leave it out."
        )
    shares = counts / totals
    return shares.masked_fill(shares == 0, _FLOOR)


def beta_cib(counts: Tensor) -> float:
    """β^CIB, the class imbalance inside clients: mean of KL(P^m ‖ uniform) in bits.

    ``counts``: images per client and class, M×n.
    """
    shares = _class_shares(counts)
    return float((shares * (shares * shares.shape[1]).log2()).sum(1).mean())


def beta_hetero(counts: Tensor, denominator: Literal["M2", "MM1"] = "M2") -> float:
    """β^hetero, the heterogeneity between clients: average of KL(P^m ‖ P^z) in bits.

    ``counts``: images per client and class, M×n. MFCL's text divides the sum over pairs by M(M−1)
    (``MM1``), its printed tables only come out with M² (``M2``). One client has none: 0.
    """
    shares = _class_shares(counts)
    clients = len(shares)
    if denominator not in ("M2", "MM1"):
        raise FurlongError(f"Unknown denominator {denominator!r}. Valid: M2, MM1.")
    if clients == 1:
        return 0.0
    logs = shares.log2()
    pairs = (shares * logs).sum(1, keepdim=True) - shares @ logs.T
    pairs.fill_diagonal_(0)  # zero by definition; the two products round differently
    return float(pairs.sum() / (clients * (clients if denominator == "M2" else clients - 1)))


def false_negative_ratios(m: int, M: int, a: int) -> tuple[float, float, float]:
    """The share of false negatives among local, all, and other clients' features (FCL Eq. 4, 5).

    ``M`` clients with equal banks hold ``m`` classes each; ``a`` *other* clients hold the class of
    the query.
    """
    if m < 1 or M < 1 or not 0 <= a < M:
        raise FurlongError(
            f"False negatives of m = {m}, M = {M}, a = {a}: m and M must be at least 1 and a "
            f"between 0 and M − 1."
        )
    remote = a / (m * (M - 1)) if M > 1 else 0.0
    return 1 / m, (1 + a) / (m * M), remote


def expected_false_negatives(counts: Tensor) -> tuple[float, float, float]:
    """The same three shares for any split: what a query meets in banks of equal size, on average.

    ``counts``: images per client and class, M×n. Every client weighs the same.
    """
    counts = counts.to(torch.float64)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    same = shares @ shares.T  # [k, j]: a query of client k and a row of client j agree in class
    local = same.diagonal()
    others = max(1, len(same) - 1)
    remote = (same.sum(1) - local) / others
    return float(local.mean()), float(same.mean()), float(remote.mean())


def count_false_negatives(query_labels: Tensor, bank_labels: Tensor) -> Tensor:
    """The share of the bank (labels K) with the class of each query (labels B): float64, B."""
    if bank_labels.numel() == 0:
        raise FurlongError("An empty bank has no negatives to count; fill it first.")
    hits = query_labels.reshape(-1, 1) == bank_labels.reshape(1, -1)
    return hits.to(torch.float64).mean(1)
