"""The page of the images nearest to another one: self-contained, with small copies of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from furlong.data.decode import decode
from furlong.data.folders import place_of
from furlong.data.reading import Frame, Place, Reading, Unusable, printable
from furlong.errors import FurlongError
from furlong.reports.embed import Found, images_of, text
from furlong.reports.pictures import as_uri
from furlong.reports.rendering import render

THUMB = 192  # pixels of the longer side


def page(
    query: Path, root: Path, found: Found, about: dict[str, str], files_in: str | None = None
) -> str:
    """A self-contained HTML page: the query, then its neighbours, thumbnails inside.

    ``root`` is the folder that was searched, or the manifest, whose files are in ``files_in``.
    """
    how = Reading(window=about.get("window", "auto"), slices=about.get("slices", "axial"))
    files = _files(root, [each.path for each in found.nearest], files_in, how)
    rest = max(1 - found.median, 1e-9)
    cards = [
        {
            "folder": each.path.rpartition("/")[0],
            "name": each.path.rpartition("/")[2],
            "size": f"{each.width}×{each.height}",
            "similarity": each.similarity,
            "bar": 100 * min(1.0, max(0.0, (each.similarity - found.median) / rest)),
            "image": thumbnail(files[each.path], how),
        }
        for each in found.nearest
    ]
    contents = {
        "query": printable(query.name),
        "image": thumbnail(place_of(Path(), str(query)), how),
        "cards": cards,
        "found": found,
        "about": about,
        "root": printable(root.name or str(root)),
    }
    return render("neighbours.html.jinja", contents)


def without_query(
    found: Found, k: int, query: Path, root: Path, how: Reading, files_in: str | None = None
) -> Found:
    """At most ``k`` of the nearest, without the image ``query`` itself; the rest as for a page."""
    files = _files(root, [each.path for each in found.nearest], files_in, how)
    asked = _resolved(place_of(Path(), str(query)))
    others = [each for each in found.nearest if _resolved(files[each.path]) != asked]
    if not others:
        raise FurlongError(f"{query} is the only image in {root}: there are no others.")
    return replace(found, nearest=others[:k])


def _resolved(place: Path | Frame) -> Path | Frame:
    if isinstance(place, Frame):
        return replace(place, path=place.path.resolve())
    return place.resolve()


def _files(
    root: Path, paths: list[str], files_in: str | None, how: Reading
) -> dict[str, Path | Frame]:
    """Where ``paths`` are, which :func:`text` has changed where names are not Unicode."""
    found = {path: place_of(root, path) for path in paths}
    there = (isinstance(each, Frame) or each.exists() for each in found.values())
    if root.exists() and not all(there):
        named = {text(each.name): each.place for each in images_of(root, files_in, how)[0]}
        found = {path: named.get(path, place) for path, place in found.items()}
    return found


def thumbnail(place: Place, how: Reading) -> str | None:
    """A data: URI of the whole image, small; ``None`` if the file is gone or unreadable."""
    try:
        pixels = decode(place, None, how=how)
    except Unusable:
        return None
    image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    image.thumbnail((THUMB, THUMB))
    return as_uri(image)
