"""Clients in Ray actors of this machine, or of a Ray cluster, as Flower simulates them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from furlong.deploy.flower import GridWire
from furlong.deploy.flower_app import client_app
from furlong.deploy.processes import QUIET
from furlong.errors import FurlongError

_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def simulated(clients: int, state: Path, cpus: float, log: Path) -> Iterator[GridWire]:
    """A wire to ``clients`` nodes in Ray actors with ``cpus`` cores each.

    Flower runs its simulation around a ServerApp; this one hands its Grid over and waits.
    """
    try:
        import ray
        from flwr.simulation import run_simulation
    except ImportError:
        raise FurlongError("the simulation needs Ray: pip install 'furlong-fl[flower]'.") from None
    grids: Queue[Grid | BaseException] = Queue()
    over = threading.Event()
    app = ServerApp()

    @app.main()
    def hand_over(grid: Grid, context: Context) -> None:  # noqa: ARG001
        grids.put(grid)
        over.wait()

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    resources = {"num_cpus": cpus, "num_gpus": 0.0}
    settings: Any = {"client_resources": resources, "init_args": quiet}

    def simulate() -> None:
        try:
            run_simulation(app, client_app, clients, backend_config=settings)
        except BaseException as error:
            grids.put(error)

    own = "FURLONG_STATE" not in os.environ  # on a Ray cluster it must be set everywhere
    os.environ.update({"FURLONG_STATE": str(state), **os.environ, **QUIET, **_RAY})
    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    with _logged(log):
        thread.start()
        try:
            yield GridWire(_started(grids, thread, log))
        finally:
            over.set()
            thread.join(60)
            ray.shutdown()
            if own:
                os.environ.pop("FURLONG_STATE", None)


def _started(grids: Queue[Grid | BaseException], thread: threading.Thread, log: Path) -> Grid:
    """The Grid of the simulation, once it has started."""
    while True:
        try:
            grid = grids.get(timeout=0.5)
        except Empty:
            if thread.is_alive():
                continue
            raise FurlongError(f"Flower's simulation did not start; see {log}.") from None
        if isinstance(grid, BaseException):
            raise FurlongError(f"Flower's simulation did not start: {grid}; see {log}.")
        return grid


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What Flower and Ray have to say goes to a file, not between lines of progress."""
    logger = logging.getLogger("flwr")
    handler, before, level = logging.FileHandler(path), logger.handlers, logger.level
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = before
        logger.setLevel(level)
        handler.close()
