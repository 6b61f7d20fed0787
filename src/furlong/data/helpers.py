"""Small images are decoded by processes: threads would wait for each other there.

A helper is forked, so that it has the encoded images already, and writes pixels to memory that it
shares with its parent. It calls nothing but the decoder, which needs none of the threads that a
fork leaves behind. Whatever goes wrong in a helper (it may meet an image that must stop everything)
happens again in the parent, which does its share anew.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from furlong.data.reading import ByteArray, Skipped

Item = TypeVar("Item")
Shape = tuple[int, ...]

WORTH = 1000  # images: below that, forking takes longer than it saves


def worth_helpers(count: int) -> bool:
    """Whether ``count`` small images are decoded faster, and just as safely, with helpers.

    No other thread of Python may run: it could hold a lock that nobody in a helper gives back.
    """
    alone = threading.active_count() == 1
    return count >= WORTH and hasattr(os, "sched_getaffinity") and _cores() > 1 and alone


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def with_helpers(
    one: Callable[[Item], ByteArray | Skipped], items: Sequence[Item], shape: Shape
) -> list[ByteArray | Skipped]:
    """``one`` of every item, in order: an array of ``shape``, or why there is none."""
    memory = mmap.mmap(-1, len(items) * math.prod(shape))
    room = np.frombuffer(memory, np.uint8).reshape(len(items), *shape)
    cores = _cores()
    bounds = [len(items) * share // cores for share in range(cores + 1)]
    helpers: list[_Helper[Item]] = []
    try:
        for begin, end in pairwise(bounds[1:]):
            helpers.append(_Helper(one, items[begin:end], room[begin:end]))
        found = [one(item) for item in items[: bounds[1]]]
        for helper in helpers:
            found += helper.results()
    finally:
        for helper in helpers:
            helper.end()
    return found


class _Helper(Generic[Item]):
    """A process that does one share of the items."""

    def __init__(
        self, one: Callable[[Item], ByteArray | Skipped], items: Sequence[Item], room: ByteArray
    ) -> None:
        self._one, self._items, self._room = one, items, room
        self._told, told = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any fork beside threads; see above
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid: int | None = os.fork()
        if self._pid == 0:
            self._work(told)
        os.close(told)

    def _work(self, told: int) -> None:
        """In the helper: it tells what was skipped, and ends with code 0 if all went well."""
        code = 1
        try:
            skipped: dict[int, tuple[str, str]] = {}
            for at, item in enumerate(self._items):
                image = self._one(item)
                if isinstance(image, Skipped):
                    skipped[at] = image.name, image.reason
                else:
                    self._room[at : at + 1] = image.reshape(1, *self._room.shape[1:])
            with os.fdopen(told, "w") as file:
                json.dump(skipped, file)
            code = 0
        finally:
            os._exit(code)

    def results(self) -> list[ByteArray | Skipped]:
        """What ``one`` made of the share."""
        with open(self._told, closefd=False) as file:
            text = file.read()  # until the helper has ended
        if self.end(done=True):
            return [self._one(item) for item in self._items]
        found: list[ByteArray | Skipped] = list(self._room)
        for at, (name, reason) in json.loads(text).items():
            found[int(at)] = Skipped(name, reason)
        return found

    def end(self, done: bool = False) -> int:
        """How the helper ended: 0 if it did all of its share; kill it if it is not ``done``."""
        if self._pid is None:
            return 0
        os.close(self._told)
        if not done:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._pid = None
        return status
