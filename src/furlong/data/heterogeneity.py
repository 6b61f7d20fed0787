"""Numbers about a split of the data and about encoders: skew, false negatives, angles."""

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


def expected_false_negatives(counts: Tensor) -> tuple[float, float, float]:
    """The share of false negatives among local, all, and other clients' features (FCL Eq. 4, 5).

    ``counts``: images per client and class, M×n. This is what a query meets on average in banks of
    equal size; every client weighs the same.
    """
    counts = counts.to(torch.float64)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    same = shares @ shares.T  # [k, j]: a query of client k and a row of client j agree in class
    local = same.diagonal()
    others = max(1, len(same) - 1)
    remote = (same.sum(1) - local) / others
    return float(local.mean()), float(same.mean()), float(remote.mean())


def angles(features_a: Tensor, features_b: Tensor) -> Tensor:
    """The angle between corresponding rows of two N×d tensors in degrees: float64, N.

    A zero row has no direction; it counts as orthogonal to every other row.
    """
    if features_a.shape != features_b.shape or features_a.ndim != 2:
        raise FurlongError(
            f"Angles need two N×d tensors of one shape, not {tuple(features_a.shape)} and "
            f"{tuple(features_b.shape)}."
        )
    a, b = (
        torch.nn.functional.normalize(f.detach().to(torch.float64), dim=1, eps=1e-300)
        for f in (features_a, features_b)
    )
    # arccos loses half the digits near 0° and 180°; this form (Kahan) keeps them.
    half = torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1))
    return torch.rad2deg(2 * half)
