"""furlong export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from furlong.cli.common import console
from furlong.words import size


def export(
    folder: Path,
    /,
    *,
    to: str,
    out: Path | None = None,
    pixels: Annotated[bool, Parameter(negative=())] = False,
    force: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write a run's encoder to one file for other programs, check it, and write its model card.

    Parameters
    ----------
    folder
        The run's folder.
    to
        safetensors (for ``furlong.load_encoder`` and others), onnx, timm (a state dict with
        timm's names, for ResNets), or adapter (the matrices A and B of --model.adapter alone, for
        PEFT; all others have them merged into the weights).
    out
        The file (default: in RUN/export); of an adapter the folder. The card lies beside the file
        and has .md added to the name.
    pixels
        ONNX: take uint8 images and normalise them in the graph, instead of normalised floats.
    force
        Replace files that are there.
    """
    from furlong.reports.export import export as write

    done = write(folder, to, out, force=force, pixels=pixels)
    console.print(f"{done.path} ({size(done.size)}): {done.checked}", soft_wrap=True)
    console.print(f"{done.card}: the model card", soft_wrap=True)
    console.print(f"\n{done.load}", soft_wrap=True)
