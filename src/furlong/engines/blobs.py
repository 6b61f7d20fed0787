"""Packed bytes that processes hand to each other.

A blob is a piece of anonymous memory behind a file descriptor: another process that gets the
descriptor maps the same memory, and the memory is free when the last process has closed it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from furlong.core.payload import pack


@dataclass(eq=False)
class Blob:
    """Packed bytes behind a file descriptor (in memory), or in a file."""

    size: int
    fd: int | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        _BLOBS.add(self)

    @classmethod
    def of(cls, value: Any) -> Blob:
        """Pack ``value`` into anonymous memory."""
        blob = cls(0)
        pack(value, blob._allocate)
        return blob

    def _allocate(self, size: int) -> mmap.mmap:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("furlong", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, size)
        self.size = size
        return mmap.mmap(self.fd, size)

    def map(self) -> mmap.mmap:
        """The bytes, as private memory: writing to it changes nothing here."""
        fd = self.open()
        try:
            return mmap.mmap(fd, self.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def open(self) -> int:
        """A descriptor that the caller closes."""
        return os.dup(self.fd) if self.fd is not None else os.open(self.path or "", os.O_RDONLY)

    def close(self) -> None:
        """Give the memory back; a file stays."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


_BLOBS: WeakSet[Blob] = WeakSet()


def close_inherited() -> None:
    """Close the descriptors that a fork has copied: a worker must not hold the parent's states."""
    for blob in _BLOBS:
        if blob.fd is not None:
            os.close(blob.fd)
