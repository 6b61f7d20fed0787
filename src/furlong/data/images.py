"""Image sets: one type for them all, and `load`, which reads every kind by name.

Names are those in `READERS`. A named public set is looked for in ``root``, then below the
directory in the environment variable ``FURLONG_DATA``, then where Debian installs it, and only
then on the Hugging Face Hub. Pickled files are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.data import named
from furlong.data.cache import Pixels, Plan, decoded, first_size
from furlong.data.decode import OtherSize
from furlong.data.reading import PLAIN, Reading, Skipped, by_file
from furlong.data.sources import IntArray, NoSplit, Source, places
from furlong.errors import FurlongError, nearest

__all__ = ["READERS", "ImageSet", "NoSplit", "Skipped", "load"]

READERS: dict[str, str] = {
    "shapes": "drawn on the spot, needs no files",
    "cifar10": "CIFAR-10, 32 px",
    "cifar100": "CIFAR-100, 32 px",
    "fashion_mnist": "Fashion-MNIST, padded to 32 px, RGB",
    "mnist": "MNIST, padded to 32 px, RGB",
    "stl10": "STL-10, 96 px; also has the split 'unlabelled'",
    "mini_imagenet": "mini-ImageNet, 84 px",
    "folder:PATH": "any folder of images",
    "parquet:PATH": "a parquet file, or a folder of them, in the Hugging Face image layout",
    "manifest:PATH": "a CSV or parquet table of paths, with labels, sites, patients as columns",
}


# --------------------------------------------------------------------------- the set


@dataclass(frozen=True, eq=False)
class ImageSet:
    """
    Images with what is known about each.

    Attributes:
        pixels: uint8 N×C×H×W; may be memory-mapped.
        labels: int64 N, indices into ``classes``; None if unknown.
        classes: names of the classes.
        groups: int64 N, the natural owner (client) of each image, an index into ``group_names``.
        group_names: names of the owners.
        patients: int64 N; images with the same number show one patient (or what ``holdout_by``
            names), and belong on one side of any split. An image of which nobody knows whose it is
            has a negative number of its own. None if that holds for all.
        weights: int64 N, how often each counts in training; None: once.
        name: what was loaded.
        skipped: images that were met but could not be used.
        notes: decisions taken while loading that a person should know of.
    """

    pixels: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    patients: Tensor | None = None
    weights: Tensor | None = None
    name: str = "images"
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            raise FurlongError(
                f"{self.name}: pixels must be uint8 N×C×H×W, not "
                f"{self.pixels.dtype} of shape {tuple(self.pixels.shape)}."
            )
        for what, values, names in (
            ("labels", self.labels, self.classes),
            ("groups", self.groups, self.group_names),
            ("patients", self.patients, ()),
            ("weights", self.weights, ()),
        ):
            if values is None:
                continue
            if values.dtype != torch.int64 or tuple(values.shape) != (len(self),):
                raise FurlongError(
                    f"{self.name}: {what} must be int64 of length {len(self)}, not "
                    f"{values.dtype} of shape {tuple(values.shape)}."
                )
            low, high = (int(values.min()), int(values.max())) if len(values) else (0, -1)
            if (low < 0 and what != "patients") or (names and high >= len(names)):
                allowed = f"between 0 and {len(names) - 1}" if names else "not negative"
                raise FurlongError(
                    f"{self.name}: {what} run from {low} to {high}; they must be {allowed}."
                )

    def __len__(self) -> int:
        return self.pixels.shape[0]

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.pixels.shape[2], self.pixels.shape[3]

    @property
    def n_classes(self) -> int:
        if self.classes or self.labels is None or not len(self):
            return len(self.classes)
        return int(self.labels.max()) + 1

    def subset(self, indices: Tensor | NDArray[np.integer[Any]] | Sequence[int]) -> ImageSet:
        """The images at ``indices`` (int M), in that order, copied; names and notes are kept."""
        where = torch.as_tensor(indices)
        fractional = where.dtype == torch.bool or where.dtype.is_floating_point
        if where.ndim != 1 or (len(where) and fractional):
            raise FurlongError(f"{self.name}: a subset needs a flat list of whole numbers.")
        where = where.long()

        def chosen(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[where]

        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < len(self):
            raise FurlongError(
                f"{self.name}: subset indices run from {int(where.min())} to {int(where.max())}, "
                f"but there are {len(self)} images."
            )
        return replace(
            self,
            pixels=self.pixels[where],
            labels=chosen(self.labels),
            groups=chosen(self.groups),
            patients=chosen(self.patients),
            weights=chosen(self.weights),
        )

    def weighted(self, rows: Tensor) -> Tensor:
        """``rows`` (int64 M), each as often as its weight says."""
        return rows if self.weights is None else rows.repeat_interleave(self.weights[rows])

    def unlabelled(self) -> ImageSet:
        """The same images without labels or class names, as a client without labels has them."""
        return replace(self, labels=None, classes=())


# --------------------------------------------------------------------------- load


def load(
    name: str,
    split: str = "train",
    *,
    root: str | Path | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    strict: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
    group_by: str | None = None,
    holdout_by: str = "auto",
    how: Reading = PLAIN,
) -> ImageSet:
    """
    Read an image set.

    Args:
        name: one of `READERS`.
        split: ``train`` or ``test``; ``stl10`` also has ``unlabelled``.
        root: where a named set lies: the directory itself or the one above it. Nothing is
            downloaded if it is given. Of a manifest: the folder, or several with ``os.pathsep``
            between them, in which its files must lie.
        image_size: resize to this many pixels square. A folder or parquet of one size up to 96 px
            keeps it by default; other folders become 64 px, which is noted.
        limit: keep at most this many images, chosen by ``seed`` and in proportion to the classes.
            Only those are decoded, so ``skipped`` and ``strict`` cover only those too.
        strict: refuse a set in which any image had to be skipped.
        seed: of ``limit`` and of ``shapes``.
        cache: directory for decoded pixels. Sets above 1 GiB are cached (and memory-mapped) in
            ``$XDG_CACHE_HOME/furlong`` regardless.
        group_by: a column, or ``folder`` for one first-level folder per client.
        holdout_by: what ``patients`` are: a column, ``folder:LEVEL``, or ``auto`` (also
            ``image``): the column ``patient``, DICOM files' patients and volumes, else nothing.
        how: channels, window and slices.

    Raises:
        NoSplit: the set has no such split.
        FurlongError: for everything else that a person can put right.
    """
    split = {"unlabeled": "unlabelled"}.get(split, split)
    for what, value, most in (("image_size", image_size, 1024), ("limit", limit, None)):
        if value is not None and not 1 <= value <= (most or value):
            upper = f" and at most {most}" if most else ""
            raise FurlongError(f"{what} must be at least 1{upper}, not {value}.")
    kind, _, path = name.partition(":")
    if kind in OWN and path:
        source = own_images(name, split, group_by, holdout_by, how, root)
    elif name == "shapes":
        _refuse_reading(name, holdout_by, how)
        return _shapes(split, image_size or 32, limit, seed, group_by)
    elif name in named.SETS:
        _refuse_reading(name, holdout_by, PLAIN)
        source = named.find(name, split, root, group_by)
        source.how = how
    else:
        raise FurlongError(f"Unknown image set {name!r}. {nearest(name, READERS)}")
    return _build(source, image_size, limit, strict, seed, Path(cache) if cache else None)


OWN = ("folder", "parquet", "manifest")  # what comes before the path of a user's own images


def own_images(
    name: str,
    split: str,
    group_by: str | None,
    holdout_by: str = "auto",
    how: Reading = PLAIN,
    root: str | Path | None = None,
) -> Source:
    """The images of ``folder:PATH``, ``parquet:PATH`` or ``manifest:PATH``, not decoded yet."""
    kind, _, rest = name.partition(":")
    path = Path(rest).expanduser()
    if kind == "manifest":
        from furlong.data.manifest import manifest

        return manifest(name, path, split, group_by, holdout_by, how, root)
    if kind == "folder":
        from furlong.data.folders import folder as read
    else:
        from furlong.data.tables import parquet as read  # imports pyarrow
    return read(name, path, split, group_by, holdout_by, how)


def _refuse_reading(name: str, holdout_by: str, how: Reading) -> None:
    """Refuse what a set of public or drawn images does not have."""
    if holdout_by not in ("auto", "image"):
        raise FurlongError(f"{name} does not say whose images are whose: leave holdout_by out.")
    if how.channels != 3:
        raise FurlongError(f"{name} has 3 channels, not {how.channels}: leave data.channels out.")


def _shapes(
    split: str, size: int, limit: int | None, seed: int, group_by: str | None
) -> ImageSet:  # fmt: skip
    from furlong.data.shapes import shapes

    counts = {"train": 5_000, "test": 2_000}
    if group_by is not None:
        raise FurlongError("shapes has no natural groups: leave group_by out.")
    if split not in counts:
        raise NoSplit(f"shapes has no split {split!r}. {nearest(split, counts)}")
    return shapes(limit or counts[split], size=size, seed=seed, split=split)


# --------------------------------------------------------------------------- from source to set


def _build(
    source: Source, size: int | None, limit: int | None, strict: bool, seed: int, cache: Path | None
) -> ImageSet:
    rows = source.rows
    if limit is not None and cache is None:
        rows = rows[_pick(source.labels, rows, limit, seed)]
    pixels, bad = _pixels(source, rows, size, cache)
    if bad and len(rows) < len(source.rows) and not strict:
        # Some of the chosen are unusable; choosing among the usable needs to know them all.
        rows = source.rows
        pixels, bad = _pixels(source, rows, size, cache)
    kept = rows[~np.isin(rows, list(bad))]
    empty = sum(each.is_empty for each in bad.values())
    if empty:
        source.notes.append(f"{empty:,} empty slices of volumes were left out.")
    unusable = [each for each in bad.values() if not each.is_empty]
    skipped = by_file([*source.skipped, *unusable])
    if strict and skipped:
        lines = "".join(f"\n  {each.name}: {each.reason}" for each in skipped[:10])
        more = f"\n  … and {len(skipped) - 10} more" if len(skipped) > 10 else ""
        raise FurlongError(
            f"{source.name}: {len(skipped)} file(s) cannot be used, and strict is set.{lines}{more}"
        )
    if not len(kept):
        why = f" The first of {len(skipped)} skipped: {skipped[0]}." if skipped else ""
        raise FurlongError(f"{source.name}: no readable image in {source.where}.{why}")

    def of_kept(values: IntArray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[kept])

    result = ImageSet(
        pixels=torch.from_numpy(pixels),
        labels=of_kept(source.labels),
        classes=source.classes,
        groups=of_kept(source.groups),
        group_names=source.group_names,
        patients=of_kept(source.patients),
        weights=of_kept(source.weights),
        name=source.name,
        skipped=tuple(skipped),
        notes=tuple(dict.fromkeys(source.notes)),
    )
    if limit is not None and limit < len(result):
        return result.subset(_pick(source.labels, kept, limit, seed))
    return result


def _pick(labels: IntArray | None, rows: IntArray, limit: int, seed: int) -> IntArray:
    """Sorted positions in ``rows`` of ``limit`` of them, spread over the classes in proportion."""
    order = np.random.default_rng(seed).permutation(len(rows))
    if labels is not None:
        # Each class gets its share rounded down, then one more by the largest remainder.
        place, size = places(labels[rows][order])
        whole, rest = np.divmod(min(limit, len(rows)) * size, len(rows))
        last = np.where(place == whole, len(rows) - rest, 2 * len(rows))
        order = order[np.argsort(np.where(place < whole, 0, last), kind="stable")]
    return np.sort(order[:limit])


def _pixels(source: Source, rows: IntArray, asked: int | None, cache: Path | None) -> Pixels:
    """Pixels (M×C×H×W) of the usable ``rows``, and the unusable ones by row number."""

    def square(size: int) -> tuple[int, int]:
        return size, size

    if source.exact and source.size:
        out = square(asked or source.size + 2 * source.pad)
        try:
            return decoded(source, rows, Plan(square(source.size), out, True, source.pad), cache)
        except OtherSize as other:
            raise FurlongError(
                f"{source.where} has an image of {other} pixels, but those of {source.name} are "
                f"{source.size}×{source.size}: it seems to hold another set."
            ) from None
    if fixed := asked or source.size:
        return decoded(source, rows, Plan(square(fixed), square(fixed)), cache)
    first = first_size(source, rows)
    if max(first) <= 96:
        try:
            return decoded(source, rows, Plan(first, first, exact=True), cache)
        except OtherSize:
            pass
    source.notes.append(
        "Images were resized and cropped to 64×64 pixels; set image_size to choose otherwise."
    )
    return decoded(source, rows, Plan((64, 64), (64, 64)), cache)
