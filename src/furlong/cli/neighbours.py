"""furlong neighbours."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import console, counting, err, print_skipped
from furlong.errors import FurlongError

if TYPE_CHECKING:
    from furlong.data.reading import Skipped


def neighbours(
    run: Path,
    image: Path,
    /,
    *,
    inside: Annotated[Path, Parameter("--in")],
    root: str | None = None,
    k: int = 12,
    elsewhere: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Find the images most like one image; list them and, with --out, show them in a page.

    The image itself is left out, if it is among those that are searched.

    Parameters
    ----------
    run
        A finished run's folder, or a file of ``furlong export --to safetensors``.
    image
        The image to look for.
    inside
        The folder or manifest (.csv) to search, or a file of ``furlong embed``, which is quicker.
    root
        Where the files of a manifest are, if not beside it.
    k
        How many.
    elsewhere
        Leave out the folder that the image is in, such as the other slices of its patient.
    out
        An HTML file that opens offline; it holds small copies of the images.
    force
        Replace it if it is there.
    as_json
        Print JSON.
    """
    from furlong.data.reading import printable
    from furlong.files import replacing, require_free
    from furlong.reports import embed as making
    from furlong.reports.neighbours import page, without_query

    if k < 1:
        raise FurlongError(f"--k is {k}; it must be at least 1")
    if out is not None:
        require_free(out, force)
    skipped: list[Skipped] = []
    with counting("encoding") as show:
        encoder = making.Embedder(run)
        query = encoder.one(image)
        if inside.is_file() and inside.suffix not in (".csv", ".tsv"):
            place, rows = making.stored_rows(encoder, inside)
        else:
            place, rows = inside, making.folder_rows(encoder, inside, skipped, show, root)
        own = _folder(image, place, root) if elsewhere else None
        found = making.nearest_images(query, rows, k + 1, own)  # it may be among them itself
        found = without_query(found, k, image, place, encoder.how, root)
    print_skipped(skipped)
    if as_json:
        print(json.dumps([{"path": n.path, "similarity": n.similarity} for n in found.nearest]))
    else:
        table = Table("", "cosine", "image")
        for rank, near in enumerate(found.nearest, 1):
            table.add_row(str(rank), f"{near.similarity:.3f}", printable(near.path))
        console.print(table)
        said = (
            f"the nearest of {found.count:,} images in {place}; the median has {found.median:.3f}"
        )
        console.print(said, soft_wrap=True)
    if out is not None:
        html = page(image, place, found, encoder.about, root)
        with replacing(out, force) as draft:
            draft.write_text(html, encoding="utf-8", errors="replace")
        err.print(f"page: {out}", soft_wrap=True)


def _folder(image: Path, place: Path, roots: str | None) -> str:
    """The folder of ``image`` as paths begin: below ``place`` (a manifest's folder), or a root."""
    folder = image.resolve().parent
    given = roots.split(os.pathsep) if roots else [place.parent if place.is_file() else place]
    for above in (Path(each).resolve() for each in given):
        if folder != above and folder.is_relative_to(above):
            return folder.relative_to(above).as_posix()
    raise FurlongError(
        f"--elsewhere leaves out the folder of {image}, but that is not below "
        f"{' or '.join(map(str, given))}: name an image there, or leave out --elsewhere."
    )
