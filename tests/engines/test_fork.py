"""A program may have computed with several threads before it starts a run with workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 600  # seconds; the program takes about ten on an idle machine, a hang takes for ever
PROGRAM = """
import os, signal, sys, threading
from pathlib import Path

import torch

torch.set_num_threads(2)

def compute():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3), torch.nn.Flatten(), torch.nn.Linear(32 * 28 * 28, 64),
    )
    net(torch.randn(16, 3, 32, 32)).square().sum().backward()
    large = torch.randn(512, 512)
    large @ large

compute()
assert len(os.listdir("/proc/self/task")) > 1, "there are no threads, so nothing is tested"

import furlong

me = os.getpid()
met = set()

def workers():
    return Path(f"/proc/{me}/task/{me}/children").read_text().split()

def kill():
    os.kill(int(workers()[0]), signal.SIGKILL)

def after_an_exchange(status):
    met.update(workers())
    compute()
    if status.done == 1:  # a worker that waits
        kill()
    elif status.done == 2:  # a worker that trains
        threading.Timer(0.1, kill).start()

run = furlong.run(
    {}, show=after_an_exchange, method="fedbyol", data="shapes", partition="iid", encoder="small",
    clients=4, rounds=3, batch_size=16, workers=2, device="cpu", out=sys.argv[1],
    **{"data.images": 128, "data.test_images": 40, "data.image_size": 32,
       "train.server_threads": 2, "evaluate.knn_every": 1, "evaluate.probe": "none",
       "evaluate.k": 5},
)
assert torch.get_num_threads() == 2
assert len(met) > 2, f"nobody was replaced: {met}"
print("finished")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_after_several_threads_workers_work_and_are_replaced(tmp_path: Path) -> None:
    """A worker is killed while it waits, and one while it trains."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("finished\n"), done.stderr
