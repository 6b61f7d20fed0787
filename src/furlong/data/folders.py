"""Folders of images: which files are images, and what the names of folders say of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np

from furlong.data.decode import MAX_FILE_BYTES, Skipped, printable
from furlong.data.sources import NoSplit, Source, in_blocks, numbered
from furlong.errors import FurlongError

_MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"BM",
    b"GIF8",
    b"II*\0",
    b"MM\0*",
    *(b"P%d" % kind for kind in range(1, 7)),
)


def folder(name: str, path: Path, split: str, group_by: str | None) -> Source:
    """The images below ``path``: subfolders are classes, or clients with classes below."""
    if group_by not in (None, "folder"):
        raise FurlongError(f"{name} can only be grouped by 'folder', not {group_by!r}.")
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
    names, skipped = scan(root)
    # Names of classes and clients are shared by the splits, so that equal numbers mean equal names.
    others = [other for folder in splits.values() if folder != path for other in scan(folder)[0]]
    parents = [each.split("/")[:-1] for each in [*names, *others]]
    files = [root / each for each in names]

    blocks = in_blocks(lambda rows: [(printable(names[row]), files[row]) for row in rows])
    rows = np.arange(len(names))
    source = Source(name, split, str(root), files, rows, blocks, skipped=skipped)
    depth = 0
    if group_by:
        owners = [part[0] if part else "." for part in parents]
        source.groups, source.group_names = numbered(owners, len(names))
        depth = 1
    labels = [part[depth] for part in parents if len(part) > depth]
    if len(set(labels)) >= 2 and len(labels) == len(parents):
        source.labels, source.classes = numbered(labels, len(names))
    elif len(set(labels)) >= 2:
        source.notes.append("Some images lie outside the class folders, so no labels were taken.")
    return source


def scan(root: Path) -> tuple[list[str], list[Skipped]]:
    """
    The images below ``root`` and everything else that is there.

    Returns:
        Relative POSIX paths of the files that start like an image, sorted; and the rest, sorted,
        with reasons. Hidden folders and links to folders count as one entry and are not entered.
    """
    found: list[str] = []
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
            refusal = _refusal(Path(top, file), inside)
            if refusal is None:
                found.append(name)
            else:
                skipped.append(Skipped(printable(name), refusal))
    return sorted(found), sorted(skipped, key=lambda each: each.name)


def _refusal(path: Path, inside: Path) -> str | None:
    """Why ``path`` is not even worth decoding; None if it looks like an image."""
    if path.name.startswith("."):
        return "not an image (hidden file)"
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(inside):
            return "symbolic link out of the folder"
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            return "not a regular file"
        if info.st_size == 0:
            return "empty file"
        if info.st_size > MAX_FILE_BYTES:
            return f"file of {info.st_size / 1e6:.0f} MB; the limit is 200 MB"
        with open(path, "rb") as file:
            head = file.read(16)
    except PermissionError:
        return "unreadable: permission denied"
    except (OSError, RuntimeError) as error:  # RuntimeError: a symbolic link that loops
        return f"unreadable: {getattr(error, 'strerror', None) or 'symbolic link loop'}"
    webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    return None if webp or head.startswith(_MAGIC) else "not an image"
