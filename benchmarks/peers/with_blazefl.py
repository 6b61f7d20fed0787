"""blazefl's side: its FedAvg with a pool of processes and shared memory.

Its own benchmark starts processes by spawn, for CUDA's sake, and so imports torch again in every
round. Here they are forked, which is faster and what Linux does if nothing is said. Its threads
need a Python without the global lock, for which there is no build of torch here.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer
from blazefl.core import IPCMode, ModelSelector, PartitionedDataset
from torch import Generator, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from work import Clock, Job, Unit, network


class Networks(ModelSelector):
    """The unit's network, whatever it is called."""

    def __init__(self, unit: Unit, seed: int) -> None:
        self.unit, self.seed = unit, seed

    def select_model(self, model_name: str) -> nn.Module:  # noqa: ARG002
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return network(self.unit)


class Images(PartitionedDataset):
    """Each client's images, read when a worker asks for them."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def get_dataset(self, type_: str, cid: int | None) -> Dataset:  # noqa: ARG002
        assert cid is not None
        return TensorDataset(*self.job.tensors(cid))

    def set_dataset(self, type_: str, cid: int | None, dataset: Dataset) -> None:
        """Nothing has changed."""

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None, generator: Generator | None
    ) -> DataLoader:
        images = self.get_dataset(type_, cid)
        return DataLoader(images, batch_size, shuffle=True, generator=generator)


def main() -> None:
    job = Job.given()
    unit, out = job.unit, Path(job.out)
    torch.set_num_threads(1)
    networks, images = Networks(unit, job.seed), Images(job)
    shared = {
        "model_selector": networks,
        "model_name": unit.encoder,
        "dataset": images,
        "num_clients": unit.clients,
        "device": "cpu",
        "batch_size": unit.batch,
        "seed": job.seed,
    }
    handler = FedAvgBaseServerHandler(
        **shared, global_round=job.rounds, sample_ratio=unit.cohort / unit.clients
    )
    trainer = FedAvgProcessPoolClientTrainer(
        **shared,
        share_dir=out / "share",
        state_dir=out / "state",
        epochs=unit.epochs,
        lr=unit.lr,
        num_parallels=job.workers,
        ipc_mode=IPCMode.SHARED_MEMORY,
    )
    clock = Clock()
    clock.mark()
    while not handler.if_stop():
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        clock.mark()
    job.hand_in(clock, handler.model.state_dict(), blazefl=version("blazefl"))


if __name__ == "__main__":
    main()
