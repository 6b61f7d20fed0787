"""Features of images under a frozen encoder, and the checks every evaluation of them makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from furlong.errors import FurlongError
from furlong.nn.encoders import evaluating


def features(
    encoder: nn.Module,
    pixels: Tensor | Iterable[Tensor],
    transform: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 512,
    device: torch.device | str | None = None,
) -> Tensor:
    """Features N×d (float32, CPU) of all images, in their order.

    ``pixels``: N×C×H×W, cut into batches here, or an iterable of ready batches B×C×H×W.
    ``transform`` maps a batch, say uint8, to what the encoder eats, without augmentation.
    ``device``: where batches go; by default where the encoder's parameters are. The encoder itself
    is not moved, runs in eval mode, and comes back exactly as it was.
    """
    batches = torch.split(pixels, batch_size) if isinstance(pixels, Tensor) else pixels
    if device is None:
        device = device_of(encoder)
    rows = []
    with evaluating(encoder):
        for batch in batches:
            batch = batch.to(device)
            if transform is not None:
                batch = transform(batch)
            if batch.ndim == 4:
                batch = batch.contiguous(memory_format=torch.channels_last)
            rows.append(encoder(batch).float().cpu())
    if not rows or rows[0].ndim != 2:
        got = f"features of shape {list(rows[0].shape)}" if rows else "no images"
        raise FurlongError(f"Expected images and features N×d, got {got}.")
    return torch.cat(rows)


def device_of(encoder: nn.Module) -> torch.device:
    """Where the encoder computes."""
    return next((p.device for p in encoder.parameters()), torch.device("cpu"))


def check_labelled(rows: Tensor, labels: Tensor, n_classes: int | None, name: str) -> None:
    """Refuse features N×d and labels N that would give a meaningless number."""
    if rows.ndim != 2 or labels.shape != rows.shape[:1] or not len(rows):
        raise FurlongError(
            f"The {name} features must be N×d and the labels N, with N > 0; "
            f"got {list(rows.shape)} and {list(labels.shape)}."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise FurlongError(f"The {name} labels must be integers, got {labels.dtype}.")
    # A sum is finite only if all its terms are, and needs no mask the size of the features.
    if not torch.isfinite(rows.sum(dtype=torch.float64)):
        bad = (~torch.isfinite(rows)).any(dim=1).sum().item()
        raise FurlongError(
            f"{bad} of {len(rows)} {name} features contain NaN or infinity: the training diverged?"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (n_classes is not None and high >= n_classes):
        raise FurlongError(
            f"The {name} labels run from {low} to {high}; expected 0 to "
            f"{'the number of classes' if n_classes is None else n_classes} − 1."
        )


def check_split(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, n_classes: int | None
) -> int:
    """Check both sides of an evaluation; the number of classes, counted if it is not given."""
    check_labelled(train, train_labels, n_classes, "train")
    check_labelled(test, test_labels, n_classes, "test")
    if train.shape[1] != test.shape[1]:
        raise FurlongError(
            f"Train features have {train.shape[1]} numbers, test features {test.shape[1]}."
        )
    return n_classes or 1 + int(max(train_labels.max(), test_labels.max()))
