"""Folders of images: which files are images, and what the names of folders say of them."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from furlong.data import dicom, nifti
from furlong.data.decode import HEAD, IN_PARTS, sniff
from furlong.data.reading import MAX_FILE_BYTES, PLAIN, Frame, Reading, Skipped, Unusable, printable
from furlong.data.sources import IntArray, NoSplit, Source, in_blocks, kinship, numbered
from furlong.errors import FurlongError

MAX_MEDICAL_BYTES = 4 << 30  # of a file that is read in parts

_MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"BM",
    b"GIF8",
    b"II*\0",
    b"MM\0*",
    *(b"P%d" % kind for kind in range(1, 7)),
)


class Found(NamedTuple):
    """An image that was found: its name for people, where it is, and what it belongs to."""

    name: str  # a relative POSIX path; behind "#" the number of a frame or slice
    place: Path | Frame
    kin: str  # images with the same one are of one patient or volume; "" if nothing is known

    @property
    def of_file(self) -> str:
        """The name of the file that holds it."""
        return self.name.rpartition("#")[0] if isinstance(self.place, Frame) else self.name

    @property
    def file(self) -> Path:
        """The file that holds it."""
        return self.place.path if isinstance(self.place, Frame) else self.place


def folder(
    name: str,
    path: Path,
    split: str,
    group_by: str | None,
    holdout_by: str,
    how: Reading,
) -> Source:
    """The images below ``path``: subfolders are classes, or clients with classes below."""
    if group_by not in (None, "folder"):
        raise FurlongError(f"{name} can only be grouped by 'folder', not {group_by!r}.")
    level = _level(name, holdout_by)
    if not path.is_dir():
        raise FurlongError(f"{name}: there is no folder {path}.")
    tests = [path / n for n in ("test", "validation", "valid", "val") if (path / n).is_dir()]
    splits = {"train": path}
    if tests and (path / "train").is_dir():
        splits = {"train": path / "train", "test": tests[0]}
    if split not in splits:
        raise NoSplit(
            f"{name} has no split {split!r}: {path} would need the subfolders train and test."
        )
    root = splits.pop(split)
    found, skipped = scan(root, how)
    # Names of classes and clients are shared by the splits, so that equal numbers mean equal names.
    others = [other for folder in splits.values() for other in scan(folder, how)[0]]
    every = [*found, *others]
    parents = [each.name.split("/")[:-1] for each in every]

    source = source_of(name, split, root, found, skipped, how)
    used = {level} if level else set()
    if group_by:
        owners = [part[0] if part else "." for part in parents]
        source.groups, source.group_names = numbered(owners, len(found))
        used.add(1)
    own = next(each for each in (1, 2, 3) if each not in used)  # the level of the classes
    labels = [part[own - 1] for part in parents if len(part) >= own]
    if len(set(labels)) >= 2 and len(labels) == len(parents):
        source.labels, source.classes = numbered(labels, len(found))
    elif len(set(labels)) >= 2:
        source.notes.append("Some images lie outside the class folders, so no labels were taken.")
    source.patients = (
        kinship([each.kin for each in every], [str(each.place) for each in every], len(found))
        if level is None
        else _of_level(name, level, parents, len(found))
    )
    nested = min(map(len, parents), default=0) > own
    if source.labels is not None and not splits and source.patients is None and nested:
        source.notes.append(
            "The images lie in folders below those of the classes. If all in one folder show one "
            f"patient or thing, give --data.holdout-by folder:{own + 1}: else some of them are "
            "trained on and others tested on, and the accuracy is too high."
        )
    return source


def source_of(
    name: str, split: str, where: Path, found: list[Found], skipped: list[Skipped], how: Reading
) -> Source:
    """A source of images that were found, of which nothing else is known yet."""
    blocks = in_blocks(lambda rows: [(printable(found[k].name), found[k].place) for k in rows])
    files = list(dict.fromkeys(each.file for each in found))
    rows = np.arange(len(found))
    return Source(name, split, str(where), files, rows, blocks, skipped=skipped, how=how)


def _level(name: str, holdout_by: str) -> int | None:
    """Which folder on the way to an image tells whose it is, from 1; None: none does."""
    if holdout_by in ("auto", "image"):
        return None
    word, _, number = holdout_by.partition(":")
    if word == "folder" and number in ("", *"123456789"):
        return int(number or 1)
    raise FurlongError(
        f"data.holdout_by is {holdout_by!r}, but {name} has no columns: give folder:1 for the "
        "first folder on the way to an image, folder:2 for the second, or image."
    )


def _of_level(name: str, level: int, parents: list[list[str]], count: int) -> IntArray:
    """The folder of that level of the first ``count`` images, which all must have one."""
    short = sum(len(part) < level for part in parents)
    if short:
        raise FurlongError(
            f"data.holdout_by is folder:{level}, but {short:,} of {len(parents):,} images of "
            f"{name} do not lie so deep. Give a lower number, or move them."
        )
    return numbered(["/".join(part[:level]) for part in parents], count)[0]


def scan(root: Path, how: Reading = PLAIN) -> tuple[list[Found], list[Skipped]]:
    """
    The images below ``root`` and everything else that is there.

    Returns:
        What starts like an image, sorted by relative POSIX paths; and the rest, sorted, with
        reasons. Hidden folders and links to folders count as one entry and are not entered.
    """
    found: list[Found] = []
    skipped: list[Skipped] = []

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(root).as_posix()
        skipped.append(Skipped(printable(where), "unreadable folder"))

    inside = root.resolve()
    for top, folders, files in os.walk(root, onerror=unreadable, followlinks=False):
        here = Path(top).relative_to(root)
        for folder in list(folders):
            link = os.path.islink(os.path.join(top, folder))
            if link or folder.startswith("."):
                folders.remove(folder)
                reason = "symbolic link to a folder" if link else "hidden folder"
                skipped.append(Skipped(printable((here / folder).as_posix()), reason))
        for file in files:
            name = (here / file).as_posix()
            try:
                found += images_in(name, Path(top, file), (inside,), how)
            except Unusable as why:
                skipped.append(Skipped(printable(name), str(why)))
    found.sort(key=lambda each: each.of_file)  # frames stay in their order
    return found, sorted(skipped, key=lambda each: each.name)


def images_in(name: str, path: Path, roots: Sequence[Path], how: Reading) -> list[Found]:
    """
    The images in the file ``path``: one, or the frames or slices that it holds.

    Args:
        name: what it is called.
        path: where it is.
        roots: folders, resolved, in one of which the file must lie where it is a symbolic link.
        how: which slices of volumes.

    Raises:
        Unusable: why it is not even worth decoding.
    """
    if path.name.startswith("."):
        raise Unusable("not an image (hidden file)")
    try:
        if path.is_symlink() and not _below(path.resolve(strict=True), roots):
            raise Unusable("symbolic link out of the folder")
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            raise Unusable("not a regular file")
        if info.st_size == 0:
            raise Unusable("empty file")
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except PermissionError:
        raise Unusable("unreadable: permission denied") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a symbolic link that loops
        why = getattr(error, "strerror", None) or "symbolic link loop"
        raise Unusable(f"unreadable: {why}") from None
    kind = sniff(head, path.name)
    most = MAX_MEDICAL_BYTES if kind in IN_PARTS else MAX_FILE_BYTES
    if info.st_size > most:
        size, limit = info.st_size / 1e6, most / 1e6
        raise Unusable(f"file of {size:.0f} MB; the limit is {limit:.0f} MB")
    if kind == dicom.NAME:
        with warnings.catch_warnings():  # which may quote what the file says of a patient
            warnings.simplefilter("ignore")
            about = dicom.about(path)
        if about.frames == 1:
            return [Found(name, path, about.patient or about.study)]
        kin = about.patient or about.study or str(path)
        return [Found(f"{name}#{k}", Frame(path, k), kin) for k in range(about.frames)]
    if kind == nifti.NAME:
        taken = nifti.slices(path, how)
        return [Found(f"{name}#{k}", Frame(path, k), str(path)) for k in taken]
    webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    if kind is None and not webp and not head.startswith(_MAGIC):
        raise Unusable("not an image")
    return [Found(name, path, "")]


def _below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def place_of(root: Path, name: str) -> Path | Frame:
    """Where an image below ``root`` is that `scan` called ``name``."""
    file, _, index = name.rpartition("#")
    if file and index.isascii() and index.isdigit() and not (root / name).exists():
        return Frame(root / file, int(index))
    return root / name
