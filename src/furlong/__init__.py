"""Furlong: learn one image encoder from many parties that cannot share their images."""

from __future__ import annotations

__version__ = "0.1.0"

from collections.abc import Callable
from typing import Any

from furlong.core.federation import Federation
from furlong.core.method import Local, Method, Report
from furlong.core.payload import payload
from furlong.data.images import ImageSet, load
from furlong.data.partition import Partition, partition
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.methods.base import Averaging, Model, OneNetwork
from furlong.runs.config import Config, from_tree
from furlong.runs.loop import Run, Status, resume
from furlong.runs.loop import run as run_config
from furlong.runs.prepare import prepare
from furlong.runs.saved_encoder import load_encoder

__all__ = [
    "METHODS",
    "Averaging",
    "Config",
    "Federation",
    "FurlongError",
    "ImageSet",
    "Local",
    "Method",
    "Model",
    "OneNetwork",
    "Partition",
    "Report",
    "Run",
    "Status",
    "load",
    "load_encoder",
    "partition",
    "payload",
    "prepare",
    "resume",
    "run",
    "run_config",
]


def run(
    config: dict[str, Any] | None = None,
    *,
    show: Callable[[Status], None] | None = None,
    **options: Any,
) -> Run:
    """A federated run from Python, with the options of ``furlong run``.

    ``furlong.run(method="fedu", data="shapes", clients=5, rounds=10, out="runs/mine")``. Keys with
    a section go into ``config``: ``{"optimiser": {"lr": 0.1}, "method": {"threshold": 0.2}}``, or
    as ``**{"optimiser.lr": 0.1}``.
    """
    return run_config(from_tree(config or {}, options, "furlong.run"), show)
