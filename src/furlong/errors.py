"""Errors that a person can act on: they name the thing, the value and the remedy."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class FurlongError(Exception):
    """A mistake in the input or the surroundings; the CLI prints it without a traceback."""


def nearest(word: str, options: Iterable[str]) -> str:
    """A sentence about the valid ``options``, the one most like ``word`` first."""
    names = sorted(options)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(names)}."


def require(holds: bool, name: str, value: object, rule: str, section: str = "method") -> None:
    """Refuse a setting that cannot work, e.g. ``require(t > 0, "temperature", t, "above 0")``."""
    if not holds:
        raise FurlongError(f"{section}.{name} is {value}; it must be {rule}")


_TOO_LARGE = (
    "can't allocate memory",
    "out of memory",
    "size calculation overflowed",
    "could not create a primitive",  # oneDNN, which cannot say more
    "std::bad_alloc",
    "can't start new thread",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small; torch has no type for this on a CPU."""
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in _TOO_LARGE)
    return isinstance(error, MemoryError)


def exhausted(error: BaseException) -> str:
    """What this machine has too little of, in words; empty if that is not the reason."""
    if out_of_memory(error):
        return "there is not enough memory"
    scarce = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in scarce:
        return os.strerror(error.errno).lower()
    return ""


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Name ``what`` is made inside if it does not fit in memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise FurlongError(f"{what} does not fit in memory: choose smaller settings") from None


def describe(error: BaseException) -> str:
    """One line that names the error and where it was raised, unless it is for a user."""
    if isinstance(error, FurlongError):
        return str(error)[:2000]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:2000]}{where}"
