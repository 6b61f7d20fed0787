"""Whether bytes look like random ones: for what a server receives of masked numbers."""

from __future__ import annotations

import math
import zlib

import numpy as np


def looks_random(data: bytes) -> str | None:
    """Why these bytes are not like random ones, if they are not; a false alarm once in 10^8."""
    got = np.frombuffer(data, dtype=np.uint8)
    n = len(got)
    counts = np.bincount(got, minlength=256)
    chi = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    if not 255 - 6 * 22.6 < chi < 255 + 6 * 22.6:
        return f"bytes are not uniform (χ² of {chi:.0f})"
    ones = int(np.unpackbits(got).sum())
    if abs(ones - 4 * n) > 6 * math.sqrt(2 * n):
        return f"{ones} of {8 * n} bits are set"
    for lag in (1, 8, 16):  # of bytes, of numbers
        if len(got) > lag:
            a, b = got[:-lag] - 127.5, got[lag:] - 127.5
            if abs(float((a * b).mean())) > 6 * 5461 / math.sqrt(n):
                return f"bytes {lag} apart go together"
    for byte in range(8) if n % 8 == 0 else ():  # each byte of the numbers by itself
        part = np.bincount(got[byte::8], minlength=256)
        chi = float(((part - n / 2048) ** 2 / (n / 2048)).sum())
        if chi > 255 + 6 * 22.6:
            return f"byte {byte} of the numbers is not uniform"
    if len(zlib.compress(data)) < n:
        return "it can be compressed"
    return None
