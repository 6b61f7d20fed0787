"""furlong compare."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from furlong.cli.common import console, err, watching
from furlong.cli.options import with_settings
from furlong.cli.table import print_tables
from furlong.errors import FurlongError
from furlong.runs import grid as grids


@with_settings(lambda name, _: name not in grids.PER_CELL)
def compare(
    *config_files: Annotated[str, Parameter(name="CONFIG")],
    out: Path,
    methods: str | None = None,
    seeds: int = 1,
    baseline: str | None = None,
    settings: dict[str, Any],
) -> None:
    """Run configurations × methods × seeds, then print the table and build the report.

    The same command goes on with a grid that was interrupted. Settings that are given as options
    hold for all runs; ``[methods.NAME]`` tables of a file hold for one method. The runs lie in
    OUT/CONFIGURATION/METHOD/SEED.

    Parameters
    ----------
    config_files
        TOML files, or paper:ADDRESS (see ``furlong papers``), where * in an address stands for any
        text; without any, the defaults and the options.
    out
        Folder of the grid.
    methods
        Names, separated by commas; fedu@single and fedu@pooled are the bounds. Default: those that
        a file names.
    seeds
        Number of seeds.
    baseline
        The method that the others are tested against (default: the first).
    """
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    cells = grids.grid(config_files, names, seeds, out, settings)
    labels = {cell.row for cell in cells}
    if baseline is not None and baseline not in labels:
        raise FurlongError(f"--baseline {baseline} is not one of {', '.join(sorted(labels))}.")
    from furlong.deploy.session import Session
    from furlong.reports import page

    grids.try_data(cells)
    grids.keep(out, _command(config_files, out, names, seeds, baseline, settings), cells)
    heard: set[str] = set()

    def tell(text: str) -> None:
        err.print(text, soft_wrap=True)

    try:
        with watching() as (show, say):

            def once(text: str) -> None:
                if text not in heard:
                    heard.add(text)
                    say(text)

            outcomes = []
            for outcome in grids.run(cells, show, once, tell, Session):
                outcomes.append(outcome)
                folder = outcome.cell.folder
                missing = not (folder / "report.html").exists()
                if outcome.state == "done" or (outcome.state == "was there" and missing):
                    page.build(folder)
    except KeyboardInterrupt:
        tell("interrupted. The same command goes on where it stopped.")
        sys.exit(130)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    states = [outcome.state for outcome in outcomes]
    tell(f"{states.count('done')} runs done, {states.count('was there')} were there before.")
    for outcome in failed:
        tell(f"failed: {outcome.cell}: {outcome.reason}")
    if len(failed) < len(outcomes):
        print_tables([o.cell.folder for o in outcomes if o.state != "failed"], baseline)
        from furlong.reports import comparison

        console.print(f"report: {comparison.build([out], baseline=baseline)}", soft_wrap=True)
    if failed:
        sys.exit(1)


def _command(
    files: tuple[str, ...],
    out: Path,
    names: list[str],
    seeds: int,
    baseline: str | None,
    options: dict[str, Any],
) -> str:
    """What was typed, to be typed again."""
    words = ["furlong", "compare", *files]
    words += ["--methods", ",".join(names)] if names else []
    words += ["--seeds", str(seeds)]
    words += ["--baseline", baseline] if baseline else []
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--out", str(out)])
