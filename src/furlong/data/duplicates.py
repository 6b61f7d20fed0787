"""Images that a survey met twice: the same bytes, or the same look when they are small."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from furlong.data.reading import ByteArray
from furlong.data.survey import THUMB, Part

WINDOW = 16  # how many neighbours in the order of the hashes are compared
MOST_BITS = 3  # in which the hashes of near duplicates differ
MOST_LEVELS = 5.0  # by which their thumbnails differ on average, of 255

Group = list[tuple[int, int]]
"""(part, image) of images that belong together."""


def duplicates(parts: list[Part]) -> list[Group]:
    """Groups of (part, image) with the same bytes, the largest first."""
    groups: dict[bytes, Group] = {}
    for p, part in enumerate(parts):
        for i, seen in enumerate(part.seen):
            groups.setdefault(seen.digest, []).append((p, i))
    return sorted((g for g in groups.values() if len(g) > 1), key=len, reverse=True)


def near_duplicates(parts: list[Part]) -> list[Group]:
    """Groups of (part, image) that look the same small, but have other bytes: at least these.

    A difference hash finds candidates: images that agree in one of four quarters of it are near
    each other in an order by that quarter. Thumbnails decide, as flat images have the same hash.
    """
    where, thumbs, known = [], [], set()
    for p, part in enumerate(parts):
        for i, seen in enumerate(part.seen):
            if seen.digest not in known:  # one of those with the same bytes is enough
                known.add(seen.digest)
                where.append((p, i))
                thumbs.append(seen.thumb)
    if len(where) < 2:
        return []
    small = np.frombuffer(b"".join(thumbs), np.uint8).reshape(-1, *THUMB)
    leader = np.arange(len(where))
    for one, other in _candidates(_hashes(small)):
        apart = np.abs(small[one].astype(np.int16) - small[other]).mean((1, 2))
        for a, b in np.stack([one, other], 1)[apart <= MOST_LEVELS].tolist():
            a, b = sorted((_root(leader, a), _root(leader, b)))
            leader[b] = a
    groups: dict[int, Group] = {}
    for n, place in enumerate(where):
        groups.setdefault(_root(leader, n), []).append(place)
    return sorted((g for g in groups.values() if len(g) > 1), key=len, reverse=True)


def _hashes(thumbs: ByteArray) -> NDArray[np.uint64]:
    """N×8×9 grey to N hashes of 64 bits: whether a pixel is brighter than its neighbour."""
    bits = (thumbs[:, :, 1:] > thumbs[:, :, :-1]).reshape(len(thumbs), 64)
    return np.packbits(bits, axis=1).view(">u8").astype(np.uint64).ravel()


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1)  # in a byte


def _candidates(
    hashes: NDArray[np.uint64],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs whose hashes differ in at most `MOST_BITS`."""
    for turn in (0, 16, 32, 48):
        turned = (hashes << np.uint64(turn)) | (hashes >> np.uint64((64 - turn) % 64))
        order = np.argsort(turned, kind="stable")
        for step in range(1, min(WINDOW, len(order) - 1) + 1):
            one, other = order[:-step], order[step:]
            differ = (hashes[one] ^ hashes[other]).view(np.uint8).reshape(-1, 8)
            close = _ONES[differ].sum(1) <= MOST_BITS
            yield one[close], other[close]


def _root(leader: NDArray[np.int64], n: int) -> int:
    while leader[n] != n:
        leader[n] = leader[leader[n]]
        n = int(leader[n])
    return n
