"""Weights to begin with that need nobody's images: SimCLR on drawn scenes (``--init scenes``).

Those of the encoder ``small`` come with the package (``benchmarks/recipe/start.py`` made them).
Others are learnt before the first round and kept in the user's cache, because every run with the
same encoder, size of images, steps and seed begins with the same ones.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from furlong.core.context import Batch, Context, Exchange, Optimiser, OptimiserSettings, Setup
from furlong.core.payload import Weights, pack_tensors
from furlong.core.weights import prefixed, snapshot
from furlong.data.augment import preset
from furlong.data.scenes import LARGEST, scenes
from furlong.errors import FurlongError
from furlong.files import write_atomically
from furlong.methods.furlong import Furlong
from furlong.nn.optimisers import warmup_cosine
from furlong.runs.saved_encoder import read_weights
from furlong.seeding import seeded, threads
from furlong.words import duration

NAME = "scenes"
STEPS = 2000
READY = {"small": Path(__file__).parent / NAME / "small.safetensors"}  # come with the package
BATCH = 64
AT_ONCE = 4096  # scenes that are drawn together and trained on before others are drawn
VERSION = 1  # of what is learnt: another number makes older files of the cache useless


def steps_of(source: str) -> int | None:
    """The number of steps in ``scenes`` or ``scenes:STEPS``; nothing of any other source."""
    name, _, number = source.partition(":")
    if name != NAME:
        return None
    if not number:
        return STEPS
    if not number.isdecimal() or not 1 <= int(number) <= 1_000_000:
        raise FurlongError(
            f"--init {source}: the number of steps must be from 1 to 1,000,000, as in "
            f"{NAME}:{STEPS}."
        )
    return int(number)


def drawn(setup: Setup, source: str, tell: Callable[[str], None]) -> Weights:
    """The encoder's weights after SimCLR on scenes: ready ones, of the cache, or learnt now."""
    if source == NAME and setup.encoder in READY:
        tell("the encoder begins with weights learnt from drawn scenes, which come with furlong")
        return read_weights(READY[setup.encoder])[0]
    setup, steps = replace(setup, given=None), steps_of(source)
    assert steps is not None
    about = [VERSION, torch.__version__, setup.encoder, setup.channels, setup.image_size, steps]
    about += [setup.seed, setup.server_threads, str(setup.device)]
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(home, "furlong", f"{NAME}-{name}.safetensors")
    if kept.exists():
        tell(f"weights learnt on drawn scenes before: {kept}")
        return read_weights(kept)[0]
    with threads(setup.server_threads), seeded(setup.device, setup.seed, NAME):
        weights = _learn(setup, steps, tell)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, pack_tensors(weights, {}))
    except OSError as error:  # they are there, and can be learnt again
        tell(f"cannot keep the weights learnt on drawn scenes in {kept}: {error.strerror}")
    return weights


def _learn(setup: Setup, steps: int, tell: Callable[[str], None]) -> Weights:
    method = Furlong(temperature=0.2, projection_head=f"mlp:{setup.width}:128:bn")
    net = method.network(Context(setup, Exchange(round=0))).to(setup.device)
    net = net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    settings = OptimiserSettings("adam", lr=0.002, weight_decay=0.0)
    optimiser = Optimiser(net.parameters(), settings, settings.lr)
    views = preset("moco_cifar", setup.image_size)
    draw = torch.Generator().manual_seed(torch.initial_seed())
    images, began, told = torch.empty(0), time.monotonic(), 0.0
    tell(f"before the first round the encoder learns from drawn scenes: {steps:,} steps")
    for step in range(steps):
        if step % (8 * AT_ONCE // BATCH) == 0:  # every image is seen about eight times
            with threads(1):  # many small operations: two would only wait for each other
                images = scenes(AT_ONCE, min(setup.image_size, LARGEST), setup.channels, draw)
        index = torch.randint(AT_ONCE, (BATCH,))
        batch = Batch(images[index].to(setup.device), index, None, views)
        for group in optimiser.torch.param_groups:
            group["lr"] = settings.lr * warmup_cosine((step + 1) / steps, min(1.0, 20 / steps))
        optimiser.step(method.loss(net, batch))
        spent = time.monotonic() - began
        if spent - told > 10:
            told = spent
            left = spent / (step + 1) * (steps - step - 1)
            tell(f"drawn scenes: step {step + 1:,} of {steps:,}, {duration(left)} left")
    return prefixed(snapshot(net), "backbone")
