"""The weights that ``--init scenes`` gives the encoder ``small``, and that come with the package.

    python benchmarks/recipe/start.py src/furlong/runs/scenes/small.safetensors

It takes half an hour of one core. The number of steps was chosen by ``recipe.py --part start``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from furlong.core.payload import pack_tensors
from furlong.files import write_atomically
from furlong.runs.config import load
from furlong.runs.prepare import prepare

STEPS, SEED = 16000, 100  # a seed that no reported run has


def main(path: str) -> None:
    """Learn them, and write them with half of the bytes."""
    settings = {"init": f"scenes:{STEPS}", "seed": str(SEED), "train.server_threads": "1"}
    begun = prepare(load(None, settings), tell=print).initial
    assert begun is not None
    small = {name: halved(tensor) for name, tensor in begun.weights.items()}
    write_atomically(Path(path), pack_tensors(small, {"steps": str(STEPS), "seed": str(SEED)}))


def halved(tensor: Tensor) -> Tensor:
    """Kernels as float16; what BatchNorm knows has few numbers, and is left alone."""
    return tensor.to(torch.float16) if tensor.dim() > 1 else tensor


if __name__ == "__main__":
    main(sys.argv[1])
