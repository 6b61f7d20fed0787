"""Furlong: learn one image encoder from many parties that cannot share their images.

Names are imported when they are used, so that ``import furlong`` and ``furlong --help`` are quick.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# On a machine whose cores have other work, OpenMP's threads wait for each other by turning in a
# loop, on a core that the other one needs: a run of six seconds took thirty. They sleep
# sooner now. It counts if torch has not been imported yet; whoever has set it is right.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from furlong.core.federation import Federation
    from furlong.core.method import Local, Method, Report
    from furlong.core.payload import payload
    from furlong.data.images import ImageSet, load
    from furlong.data.partition import Partition, partition
    from furlong.errors import FurlongError
    from furlong.methods import METHODS
    from furlong.methods.base import Averaging, Model, OneNetwork
    from furlong.reports.encoder import Encoder
    from furlong.runs.config import Config
    from furlong.runs.loop import Connect, Run, Say, Show
    from furlong.runs.observers import Status
    from furlong.runs.prepare import prepare
    from furlong.runs.saved_encoder import load_encoder

__all__ = [
    "METHODS",
    "Averaging",
    "Config",
    "Encoder",
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
_WHERE = {
    "core.federation": ("Federation",),
    "core.method": ("Local", "Method", "Report"),
    "core.payload": ("payload",),
    "data.images": ("ImageSet", "load"),
    "data.partition": ("Partition", "partition"),
    "errors": ("FurlongError",),
    "methods": ("METHODS",),
    "methods.base": ("Averaging", "Model", "OneNetwork"),
    "reports.encoder": ("Encoder",),
    "runs.config": ("Config",),
    "runs.saved_encoder": ("load_encoder",),
    "runs.loop": ("Run",),
    "runs.observers": ("Status",),
    "runs.prepare": ("prepare",),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported from its module."""
    if name not in _MODULE:
        raise AttributeError(f"module 'furlong' has no attribute {name!r}")
    return getattr(import_module(f"furlong.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def run(
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    show: Show | None = None,
    **options: Any,
) -> Run:
    """A federated run from Python, with the options of ``furlong run``.

    ``furlong.run(method="fedu", data="shapes", clients=5, rounds=10, out="runs/mine")``. Keys with
    a section go into ``config``: ``{"optimiser": {"lr": 0.1}, "method": {"threshold": 0.2}}``, or
    as ``**{"optimiser.lr": 0.1}``. ``config`` may also name a file or a paper's row
    (``"paper:fedu/table1/cifar10/noniid/resnet18/fedu"``).
    """
    from furlong.runs.config import from_tree, load

    if isinstance(config, str | PathLike):
        return run_config(load(os.fspath(config), options), show)
    return run_config(from_tree(config or {}, options, "furlong.run"), show)


def run_config(
    settings: Config,
    show: Show | None = None,
    say: Say = lambda _: None,
    engine: Connect | None = None,
) -> Run:
    """A run from its configuration to its page; ``engine``: to nodes that wait already."""
    from furlong.deploy.session import Session
    from furlong.runs import loop

    return _with_page(loop.run(settings, show, say, engine or Session))


def resume(
    run_folder: str | PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    show: Show | None = None,
    say: Say = lambda _: None,
    engine: Connect | None = None,
) -> Run:
    """Go on with an interrupted run: the result has the same bits as without interruption.

    ``overrides``: settings that may be given anew, see ``furlong resume --help``.
    """
    from furlong.deploy.session import Session
    from furlong.runs import loop

    return _with_page(loop.resume(run_folder, overrides, show, say, engine or Session))


def _with_page(finished: Run) -> Run:
    from furlong.reports import page  # imports matplotlib, which no run needs before its end

    page.build(finished.folder)
    return finished
