"""What a run has learnt, made from the server's state: encoders by the name of whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import furlong
from furlong.core.context import Exchange
from furlong.core.given import plain
from furlong.core.payload import Weights
from furlong.core.weights import recalibrate
from furlong.methods.wrappers.alone import Alone
from furlong.nn.lora import A, B
from furlong.runs.config import RANDOM, Config
from furlong.runs.prepare import Prepared
from furlong.seeding import seeded, shuffled, threads


def who(settings: Config) -> str:
    """What a run trains, in a word or two: ``federated``, ``alone``, ``without DU``."""
    bound = settings.run.bound
    return {"none": "federated", "single": "alone"}.get(bound, bound.replace(":", " ", 1))


def untrained(settings: Config) -> str:
    """What the encoder before training is called in results."""
    return "random" if settings.model.init in (None, RANDOM) else "initial"


def encoders(prepared: Prepared, state: Any) -> dict[str, nn.Module]:
    """Whose encoder -> encoder, ready for evaluation: a plain network, adapters merged."""
    made = _made(prepared, lambda method, own, ctx: method.encoder(own, ctx), state)
    return {name: plain(module) for name, module in made.items()}


def adapter(prepared: Prepared, state: Any) -> Weights:
    """The adapters of the (first) encoder, A and B by the names that PEFT gives them."""
    made = _made(prepared, lambda method, own, ctx: method.encoder(own, ctx), state)
    first = next(iter(made.values()))
    every = (*first.named_parameters(), *first.named_buffers())  # a fixed A is a buffer
    return {name: tensor.detach().cpu() for name, tensor in every if name.endswith((A, B))}


def classifiers(prepared: Prepared, state: Any) -> dict[str, nn.Module]:
    """Whose classifier -> classifier, of a method that learns from labels."""
    if not prepared.method.needs_labels:
        return {}
    made = _made(prepared, lambda method, own, ctx: method.classifier(own, ctx), state)
    return {name: plain(module) for name, module in made.items()}


def _made(
    prepared: Prepared, make: Callable[..., nn.Module | None], state: Any
) -> dict[str, nn.Module]:
    method, setup, name = prepared.method, prepared.setup, who(prepared.config)
    ctx = prepared.server.context(Exchange(round=setup.rounds))
    with threads(), seeded(setup.device, setup.seed, "encoder"):
        if isinstance(method, Alone):
            every = method.each(make, state, ctx)
            made = {f"client {k} alone": module for k, module in every.items()}
            seen = {f"client {k} alone": rows for k, rows in prepared.federation.rows.items()}
        else:
            made = {name: make(method, state, ctx)}
            seen = {name: torch.arange(len(prepared.train))}
            if prepared.left_out is not None:
                seen = {name: torch.cat(list(prepared.federation.rows.values())).sort()[0]}
        found = {name: module for name, module in made.items() if module is not None}
        for name, module in found.items() if method.bn_stats == "recalibrate" else ():
            _recalibrate(prepared, module, seen[name])
    return found


def _recalibrate(prepared: Prepared, module: nn.Module, rows: Tensor) -> None:
    """Estimate BatchNorm's statistics from a sample of the training images ``rows``."""
    setup = prepared.setup
    chosen = rows[shuffled(len(rows), setup.seed, "recalibrate")]
    pixels = prepared.train.pixels[chosen[: prepared.config.evaluate.monitor_images]]
    recalibrate(module, map(setup.augment.plain, torch.split(pixels, 500)))


def about(prepared: Prepared) -> dict[str, Any]:
    """What encoder.json says."""
    setup = prepared.setup
    return {
        "encoder": setup.encoder,
        "channels": setup.channels,
        "image_size": setup.image_size,
        "width": setup.width,
        "window": prepared.config.data.window,
        "slices": prepared.config.data.slices,
        "augment": prepared.config.data.augment,
        "method": prepared.config.method["name"],
        "data": prepared.config.data.name,
        "furlong": furlong.__version__,
    }
