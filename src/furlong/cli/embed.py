"""furlong embed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from furlong.cli.common import console, counting, print_skipped
from furlong.words import size


def embed(
    run: Path,
    folder: Path,
    /,
    *,
    root: str | None = None,
    out: Path = Path("features.parquet"),
    force: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write the features of all images in a folder or manifest to a parquet file.

    Columns: path, folder, width, height, feature. Files that cannot be read are named and left out.

    Parameters
    ----------
    run
        A finished run's folder, or a file of ``furlong export --to safetensors``.
    folder
        Images, in subfolders or not; or a manifest (.csv, .parquet) that names them.
    root
        Where the files of a manifest are, if not beside it.
    out
        The parquet file.
    force
        Replace it if it is there.
    """
    from furlong.reports import embed as making

    with counting("encoding") as show:
        encoder = making.Embedder(run)
        count, skipped = making.embed(encoder, folder, out, root=root, force=force, show=show)
    print_skipped(skipped)
    text = f"{out}: {count:,} images × {encoder.width} numbers, {size(out.stat().st_size)}"
    console.print(text, soft_wrap=True)
