"""``furlong flower-app``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from furlong.cli.common import say
from furlong.cli.options import with_settings
from furlong.errors import FurlongError


@with_settings(lambda name, _: not name.startswith("flower."))
def flower_app(
    folder: Annotated[Path, Parameter(name="DIR")],
    config_file: Annotated[str | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    settings: dict[str, Any],
) -> None:
    """Write a Flower app for ``flwr run``, for people who operate a federation already.

    Every key can be overridden there: ``flwr run DIR NAME -c 'train.rounds=50'``.

    Parameters
    ----------
    folder
        A new folder for the app.
    config_file
        A TOML file; options override it.
    """
    from furlong.deploy.bundle import bundle
    from furlong.runs import config

    resolved = config.load(config_file, settings)
    if folder.exists() and any(folder.iterdir()):
        raise FurlongError(f"{folder} is not empty: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    text = bundle({k: v for k, v in asdict(resolved).items() if k != "flower"})
    (folder / "pyproject.toml").write_text(text)
    say(f"wrote {folder / 'pyproject.toml'}. Next:")
    say(f"  flwr run {folder} SUPERLINK --stream")
    say(
        'on each node: flower-supernode … --node-config \'data="folder:/data/scans" '
        "name=\"hospital-a\"' (with data.name = sites), or 'partition-id=0'."
    )
