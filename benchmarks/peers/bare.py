"""What no side can go below: the same training steps in as many one-thread processes, no more.

The images are in memory as a batch wants them; nothing is loaded, sent, checked or averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from work import Clock, Job, network

LIMIT = 600.0  # seconds for a process


def trainer(job: Job) -> Callable[[], None]:
    """Does the steps of one client, on one network for all clients."""
    unit = job.unit
    net = network(unit).to(memory_format=torch.channels_last).train()
    images, labels = job.tensors(0)
    batches = [
        (x.contiguous(memory_format=torch.channels_last), y)
        for x, y in zip(images.split(unit.batch), labels.split(unit.batch), strict=True)
    ]
    optimiser = torch.optim.SGD(net.parameters(), unit.lr, fused=True)

    def client() -> None:
        for _ in range(unit.epochs):
            for x, y in batches:
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(net(x), y).backward()
                optimiser.step()

    return client


def main() -> None:
    job = Job.given()
    torch.set_num_threads(1)
    context = get_context("fork")
    ready, done = context.Barrier(job.workers + 1), context.Barrier(job.workers + 1)

    def work(number: int) -> None:
        client = trainer(job)
        client()  # the first steps are slower
        ready.wait(LIMIT)
        for _ in range(job.rounds):
            for _ in range(number, job.unit.cohort, job.workers):
                client()
            done.wait(LIMIT)
        ready.wait(LIMIT)  # processor time is read of processes that are there

    processes = [context.Process(target=work, args=(k,)) for k in range(job.workers)]
    for process in processes:
        process.start()
    ready.wait(LIMIT)
    clock = Clock()
    clock.mark()
    for _ in range(job.rounds):
        done.wait(LIMIT)
        clock.mark()
    ready.wait(LIMIT)
    for process in processes:
        process.join(LIMIT)
    job.hand_in(clock, {})


if __name__ == "__main__":
    main()
