"""The page of the images nearest to another one: self-contained, with small copies of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from furlong.data.decode import Unusable, decode, printable
from furlong.data.folders import scan
from furlong.reports.embed import Found, text
from furlong.reports.pictures import as_uri
from furlong.reports.rendering import render

THUMB = 192  # pixels of the longer side


def page(query: Path, root: Path, found: Found, about: dict[str, str]) -> str:
    """A self-contained HTML page: the query, then its neighbours, thumbnails inside."""
    asked, files = query.resolve(), _files(root, [each.path for each in found.nearest])
    rest = max(1 - found.median, 1e-9)
    cards = [
        {
            "folder": each.path.rpartition("/")[0],
            "name": each.path.rpartition("/")[2],
            "size": f"{each.width}×{each.height}",
            "similarity": each.similarity,
            "bar": 100 * min(1.0, max(0.0, (each.similarity - found.median) / rest)),
            "self": files[each.path].resolve() == asked,
            "image": thumbnail(files[each.path]),
        }
        for each in found.nearest
    ]
    contents = {
        "query": printable(query.name),
        "image": thumbnail(query),
        "cards": cards,
        "found": found,
        "about": about,
        "root": printable(root.name or str(root)),
    }
    return render("neighbours.html.jinja", contents)


def _files(root: Path, paths: list[str]) -> dict[str, Path]:
    """The files of ``paths``, which :func:`text` has changed where names are not Unicode."""
    found = {path: root / path for path in paths}
    if root.is_dir() and not all(file.exists() for file in found.values()):
        names = {text(name): name for name in scan(root)[0]}
        found = {path: root / names.get(path, path) for path in paths}
    return found


def thumbnail(path: Path) -> str | None:
    """A data: URI of the whole image, small; ``None`` if the file is gone or unreadable."""
    try:
        pixels = decode(path, None)
    except Unusable:
        return None
    image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    image.thumbnail((THUMB, THUMB))
    return as_uri(image)
