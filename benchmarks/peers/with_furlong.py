"""Furlong's side: the method fedavg, its server and its engine, without a run folder.

No side writes checkpoints, measures between rounds or logs to a disk.
"""

from __future__ import annotations

from pathlib import Path

from work import Clock, Job

import furlong
from furlong.engines.pool import keep_freed_memory
from furlong.runs.config import Config, from_tree
from furlong.runs.prepare import prepare


def settings(job: Job) -> Config:
    """The configuration of a run; run.py takes the clients' images from it."""
    unit = job.unit
    return from_tree(
        {},
        {
            "method": "fedavg",
            "data": "cifar10",
            "data.root": job.data,
            "data.augment": "none",
            "partition": unit.partition,
            "clients": unit.clients,
            "fraction": unit.cohort / unit.clients,
            "encoder": f"{Path(__file__).with_name('work.py')}:{unit.encoder}",
            "rounds": job.rounds,
            "epochs": unit.epochs,
            "batch_size": unit.batch,
            "optimiser.name": "sgd",
            "optimiser.lr": unit.lr,
            "optimiser.momentum": 0.0,
            "optimiser.weight_decay": 0.0,
            "optimiser.schedule": "constant",
            "workers": job.workers,
            "seed": job.seed,
        },
        "benchmark",
    )


def main() -> None:
    job = Job.given()
    keep_freed_memory()  # as the command furlong does
    prepared = prepare(settings(job))
    state = prepared.server.init()
    clock = Clock()
    with prepared.engine() as engine:
        clock.mark()
        for result in prepared.server.run(engine, state):
            assert not result.failures
            state = result.server
            clock.mark()
    job.hand_in(clock, dict(state.weights), furlong=furlong.__version__)


if __name__ == "__main__":
    main()
