"""Files that are whole or absent; tensors in files, mapped into memory."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.errors import FurlongError
from furlong.words import size


def require_space(folder: Path, needed: int) -> None:
    """An error now instead of a full disk later."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FurlongError(f"{folder} has {size(free)} free; {size(needed)} are needed there.")


def require_free(path: Path, force: bool) -> None:
    """Refuse to replace a file unasked, before the work that would fill it is done."""
    if path.is_dir():
        raise FurlongError(f"{path} is a folder: name a file in it with --out.")
    if path.exists() and not force:
        raise FurlongError(f"{path} is there already: --force replaces it, --out names another.")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _drafted(path: Path) -> Iterator[Path]:
    """The path of a draft beside ``path``, which takes its place once it has been written."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, force: bool = False) -> Iterator[Path]:
    """A draft to write, which becomes ``path``; an existing file only goes by ``force``."""
    require_free(path, force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _drafted(path) as draft:
            yield draft
    except OSError as error:
        raise FurlongError(f"cannot write {path}: {error.strerror or error}.") from None


def write_atomically(path: Path, data: Any) -> None:
    """Replace a file so that it is never half written."""
    with _drafted(path) as draft:
        draft.write_bytes(data)


def link(path: Path, other: Path) -> None:
    """Give a file a second name, or copy it where names cannot be added."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a second process in ``folder``; the lock ends with this one, however it ends."""
    with (folder / ".lock").open("w") as file:
        try:
            # a record lock, because workers must not inherit it and outlive their parent
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FurlongError(f"another process is working in {folder}.") from None
        yield


@contextmanager
def waiting(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process does what is done under this lock of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing is not enough: a process that was forked meanwhile has the file, too
            fcntl.flock(file, fcntl.LOCK_UN)


def write(path: Path, tensor: Tensor) -> None:
    """Store ``tensor`` (float32) so that the file is either whole or absent."""
    try:
        # not by writing to mapped memory: on a full disk that kills the process
        write_atomically(path, tensor.contiguous().numpy())
    except OSError as error:
        raise FurlongError(
            f"cannot store {tensor.nbytes / 1e6:.1f} MB in {path}: {error.strerror or error}. "
            "Make room there, then resume the run."
        ) from None


def mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The stored tensor as a view of the file: rows come from disk when they are used."""
    count = math.prod(shape)
    if not path.exists() or path.stat().st_size != 4 * count:
        raise FurlongError(f"{path} is missing or damaged; the run cannot go on without it.")
    if not count:
        return torch.empty(shape)
    return torch.from_file(str(path), shared=False, size=count).view(shape)
