"""The command that measures what a run has learnt: evaluate."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from furlong import config, experiment
from furlong.cli.common import app, console, dotted, err, results_table


@app.command
def evaluate(
    folder: Path,
    /,
    *,
    data: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Measure a finished run's encoder: kNN and linear probe on the test split.

    Parameters
    ----------
    folder
        The run's folder.
    data
        Another data set to measure on (default: the run's own).
    as_json
        Print JSON.
    """
    settings = config.load(folder / "config.toml", ({"data": data} if data else {}) | dotted)
    with err.status("measuring") if err.is_terminal else nullcontext():
        rows = experiment.evaluate(folder, settings)
    if as_json:
        print(json.dumps(rows))
    else:
        console.print(results_table(rows))
