"""furlong resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

import furlong
from furlong.cli.common import print_run, watching
from furlong.cli.options import with_settings


@with_settings(lambda _, fact: fact.resume)
def resume(folder: Annotated[Path, Parameter(name="RUN")], /, *, settings: dict[str, Any]) -> None:
    """Go on with an interrupted run; the final weights have the same bits as without interruption.

    Settings that are not given are as before.

    Parameters
    ----------
    folder
        The run's folder.
    """
    with watching() as (show, say):
        finished = furlong.resume(folder, settings, show, say)
    print_run(finished)
