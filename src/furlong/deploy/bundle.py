"""The app that Flower is given: a single file that names furlong's server and client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

import furlong


def bundle(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """pyproject.toml of a Flower app; every key of the configuration can be overridden."""
    plain = {
        section: {key: _plain(value) for key, value in values.items()}
        for section, values in settings.items()
    }
    project = {
        "name": "furlong",
        "version": furlong.__version__,
        "description": "Furlong on Flower",
        "license": "Apache-2.0",
        "dependencies": [],
    }
    app = {
        "publisher": "furlong",
        "components": {
            "serverapp": "furlong.deploy.flower:server_app",
            "clientapp": "furlong.deploy.flower:client_app",
        },
        "config": {**plain, "resume": ""},
    }
    return tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})


def _plain(value: Any) -> Any:
    """Flower's settings are words and numbers: nothing is "", several are joined by commas."""
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else value
