"""Random numbers that depend on names only, so that any number of workers gives the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def seed_of(*parts: object) -> int:
    """A 63-bit number that depends on all of ``parts``."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def with_seed(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside, torch's random numbers depend on ``seed`` only; outside they go on as before."""
    with torch.random.fork_rng(devices=[device] if device and device.type == "cuda" else []):
        if device is None or device.type == "cpu":
            # not torch.manual_seed, which writes a stack trace for accelerators that are not in
            # use, 0.1 ms each time, and keeps it for ever
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def seeded(device: torch.device, *parts: object) -> AbstractContextManager[None]:
    """Inside, torch's random numbers depend on ``parts`` only; outside they go on as before."""
    return with_seed(seed_of(*parts), device)


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Floating point sums depend on the number of threads: methods always compute with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def made_with_one_thread(items: Iterable[T]) -> Iterator[T]:
    """``items``, each made with one thread; whoever takes one goes on with as many as before."""
    iterator = iter(items)
    while True:
        with threads():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def shuffled(n: int, *parts: object) -> Tensor:
    """A permutation of n that depends on ``parts`` only."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(*parts)))
