"""furlong report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from furlong.cli.common import console, warn
from furlong.errors import FurlongError


def report(
    *runs: Annotated[Path, Parameter(name="RUNS")],
    out: Path | None = None,
    baseline: str | None = None,
    figures: Path | None = None,
    tsne: Annotated[bool, Parameter(negative=())] = False,
    pictures: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Make the page of a run again, or one page that compares several.

    Parameters
    ----------
    runs
        A run folder, or several, or folders that contain runs.
    out
        The page of a comparison (default: report.html in the folder, or comparison.html here).
    baseline
        Comparison: the row that the others are tested against (default: the first).
    figures
        Also draw every figure to this folder, as .svg and .png.
    tsne
        One run: map its representations to the plane by t-SNE (reads the images again).
    pictures
        One run: show images of every site, and neighbours before and after training. The page then
        holds images: pass it on only to whom these may be shown.
    """
    from furlong.reports import comparison
    from furlong.reports import page as pages
    from furlong.reports import pictures as images
    from furlong.reports import tsne as mapping
    from furlong.runs.record import RunRecord

    if not runs:
        raise FurlongError("give run folders, or folders that contain them.")
    single = len(runs) == 1 and (runs[0] / "config.toml").exists()
    if single and (out or baseline):
        raise FurlongError(f"{runs[0]} is one run: its page is {runs[0] / 'report.html'}.")
    for name, given in (("tsne", tsne), ("pictures", pictures)):
        if given and not single:
            raise FurlongError(f"--{name} is for one run: give the folder of one.")
    if tsne:
        mapping.make(runs[0])
    if single:
        if lost := RunRecord(runs[0]).damaged_lines:
            warn(lost)
        made = pages.build(runs[0], figures, images.pictures(runs[0]) if pictures else None)
    else:
        made = comparison.build(list(runs), out, baseline, figures)
    console.print(f"report: {made}", soft_wrap=True)
    if figures is not None:
        console.print(f"figures: {figures}", soft_wrap=True)
