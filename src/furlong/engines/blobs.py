"""Packed bytes that processes hand to each other.

A blob is a piece of anonymous memory behind a file descriptor: another process that gets the
descriptor maps the same memory, and the memory is free when the last process has closed it.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from furlong.core.payload import pack

SPARE = 64 << 20  # bytes of free sheets beyond which only two are kept


@dataclass(eq=False)
class Blob:
    """Packed bytes behind a file descriptor (in memory), or in a file."""

    size: int
    fd: int | None = None
    path: Path | None = None
    memory: mmap.mmap | None = None  # a sheet that is mapped already, see :class:`Sheets`
    sheet: int | None = None  # its number
    unread: Callable[[], None] | None = None  # called when nobody can read the bytes any more

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

    def map(self) -> Any:
        """The bytes; who writes to them changes no file, and nothing that another process reads."""
        if self.memory is not None:
            memory: Any = memoryview(self.memory)[: self.size]
        else:
            memory = self._mapped(mmap.ACCESS_COPY)
        if self.unread is not None:  # tensors that are views of the memory keep it alive
            weakref.finalize(memory, self.unread).atexit = False
            self.unread = None
        return memory

    def read(self) -> bytearray:
        """A copy of the bytes: for a few megabytes faster than to map them."""
        data = bytearray(self.size)
        with os.fdopen(self.open(), "rb") as file:
            file.seek(0)  # descriptors that were sent share their place in the file
            if file.readinto(data) != self.size:
                raise OSError(errno.EIO, "a file is shorter than it was")
        return data

    def shared(self) -> mmap.mmap:
        """The memory itself: what one process writes there, the other one reads."""
        memory = self._mapped(mmap.ACCESS_WRITE)
        _SHARED.add(memory)
        return memory

    def _mapped(self, access: int) -> mmap.mmap:
        fd = self.open()
        try:
            return mmap.mmap(fd, self.size, access=access)
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
        if self.unread is not None:
            self.unread()
            self.unread = None


_BLOBS: WeakSet[Blob] = WeakSet()
_SHARED: WeakSet[mmap.mmap] = WeakSet()


def close_inherited() -> None:
    """Close what a fork has copied: a worker must not hold the parent's states and sheets."""
    for blob in _BLOBS:
        if blob.fd is not None:
            os.close(blob.fd)
    for memory in _SHARED:
        with suppress(BufferError):  # the parent was just reading it
            memory.close()


class Sheets:
    """Memory that a process writes its reports to, the same again and again.

    A sheet can be written on as soon as nobody can read what is on it. New memory is slow: the
    kernel clears it and hands it out page by page, 0.7 ms for a megabyte. Whoever reads the reports
    maps a sheet once, for the same reason.
    """

    def __init__(self) -> None:
        self._sheets: dict[int, tuple[Blob, mmap.mmap]] = {}
        self._free: list[int] = []
        self._made = 0
        self._told: set[int] = set()  # those that the reader knows

    def write(self, value: Any) -> Blob:
        """Pack ``value`` on a sheet; the blob is the caller's."""
        chosen: list[tuple[int, int]] = []

        def allocate(size: int) -> memoryview:
            number = self._fitting(size)
            chosen.append((number, size))
            return memoryview(self._sheets[number][1])[:size]

        pack(value, allocate)
        [(number, size)] = chosen
        self._free.remove(number)
        unread = partial(self.back, [number])
        return Blob(size, memory=self._sheets[number][1], sheet=number, unread=unread)

    def news(self) -> tuple[dict[int, Blob], list[int]]:
        """For the reader, since the last time: new sheets, and the numbers of dropped ones."""
        new = {n: blob for n, (blob, _) in self._sheets.items() if n not in self._told}
        dropped = [number for number in self._told if number not in self._sheets]
        self._told = set(self._sheets)
        return new, dropped

    def back(self, numbers: Iterable[int]) -> None:
        """Nobody can read these sheets any more; of large ones no more than two are kept."""
        for number in numbers:
            self._free.append(number)
            if len(self._free) > 2 and sum(map(self._size, self._free)) > SPARE:
                self._drop(self._free[0])

    def forget(self) -> None:
        """After a fork: what there is belongs to the parent."""
        self._sheets.clear()
        self._free.clear()

    def _fitting(self, size: int) -> int:
        """The smallest free sheet that has room, or a new one in place of one that has not.

        Of equal ones the last that was read: it may still be in the processor's cache.
        """
        fit = [number for number in reversed(self._free) if self._size(number) >= size]
        if fit:
            return min(fit, key=self._size)
        if self._free:
            self._drop(self._free[0])
        self._made += 1
        blob = Blob(0)
        self._sheets[self._made] = blob, blob._allocate(size)
        self._free.append(self._made)
        return self._made

    def _size(self, number: int) -> int:
        return self._sheets[number][0].size

    def _drop(self, number: int) -> None:
        self._free.remove(number)
        self._sheets.pop(number)[0].close()
