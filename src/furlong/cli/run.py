"""furlong run."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

import furlong
from furlong.cli.common import print_run, watching
from furlong.cli.options import with_settings
from furlong.runs import config


@with_settings()
def run(
    config_file: Annotated[str | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    settings: dict[str, Any],
) -> None:
    """Learn an encoder across clients.

    Any key of a configuration file is an option too. ``furlong methods NAME`` lists a method's own
    fields (``--method.threshold 0.2``).

    Parameters
    ----------
    config_file
        A TOML file, or paper:ADDRESS (see ``furlong papers``); options override it.
    """
    with watching() as (show, say):
        finished = furlong.run_config(config.load(config_file, settings), show, say)
    print_run(finished)
