"""Tensors in files, mapped into memory: for what is too large to be held."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from furlong.errors import FurlongError


def require_space(folder: Path, needed: int) -> None:
    """An error now instead of a full disk later."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FurlongError(
            f"{folder} has {free / 1e9:.1f} GB free; {needed / 1e9:.1f} GB are needed there."
        )


def write(path: Path, tensor: Tensor) -> None:
    """Store ``tensor`` (float32) so that the file is either whole or absent."""
    draft = path.with_suffix(".draft")
    try:
        # not by writing to mapped memory: on a full disk that kills the process
        with draft.open("wb") as file:
            tensor.contiguous().numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise FurlongError(
            f"cannot store {tensor.nbytes / 1e6:.1f} MB in {path}: {error.strerror or error}. "
            "Make room there, then resume the run."
        ) from None


def mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The stored tensor as a view of the file: rows come from disk when they are used."""
    size = math.prod(shape)
    if not path.exists() or path.stat().st_size != 4 * size:
        raise FurlongError(f"{path} is missing or damaged; the run cannot go on without it.")
    if not size:
        return torch.empty(shape)
    return torch.from_file(str(path), shared=False, size=size).view(shape)
