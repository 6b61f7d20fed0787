"""Encoders by name: plain modules, so that a state dict is everything there is to send or save.

An encoder maps images B×C×H×W to features B×d and says d in its attribute ``out_dim``. It draws its
initial weights from torch's global generator, which the caller has seeded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from furlong.errors import FurlongError, nearest
from furlong.nn.backbones import CNN5, ResNet, Small, Stem, resnet18, resnet50
from furlong.nn.efficientnet import EfficientNetLite0
from furlong.nn.heads import head
from furlong.nn.peernorm import EARLY, EVERYWHERE, group_normed, with_early_norm
from furlong.nn.sensor import (
    REPRESENTATION_CHANNELS,
    SENSORS,
    Modular,
    Sensor,
    Trunk,
    require_even,
)
from furlong.nn.vit import SIZES, build_vit
from furlong.plugins import load_object


def _stem_by_size(image_size: int) -> Stem:
    """Up to 96 pixels the large one would leave the last stage too few positions."""
    return "small" if image_size <= 96 else "large"


ENCODERS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet18": lambda channels, size: resnet18(channels, _stem_by_size(size)),
    "resnet18_small": lambda channels, _: resnet18(channels, "small"),
    "resnet18_large": lambda channels, _: resnet18(channels, "large"),
    "resnet50": lambda channels, size: resnet50(channels, _stem_by_size(size)),
    "resnet50_small": lambda channels, _: resnet50(channels, "small"),
    "resnet50_large": lambda channels, _: resnet50(channels, "large"),
    "efficientnet_lite0": lambda channels, _: EfficientNetLite0(channels),
    "cnn5": lambda channels, _: CNN5(channels),
    "small": lambda channels, _: Small(channels),
}


def build_encoder(name: str, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """The encoder called ``name``, with fresh weights and an attribute ``out_dim``.

    ``resnet18`` and ``resnet50`` take the stem for small images up to 96 pixels; a suffix
    ``_small`` or ``_large`` decides otherwise. ``vit_tiny`` and its like take the patches that suit
    the image; ``vit_tiny_patch4`` names them (``vit.build_vit``). ``package.module:factory`` or
    ``path/to/file.py:factory`` calls the user's own function (or class), with ``in_channels`` and
    ``image_size`` if it has parameters of those names.

    A suffix ``+pn`` or ``+gn`` replaces the first two batch norms (``peernorm.with_early_norm``),
    ``+all_gn`` every one (``peernorm.group_normed``);
    ``rep32_pn+resnet18`` is MFCL's sensor and discriminator (:func:`modular`).
    """
    if name in ENCODERS:
        return ENCODERS[name](in_channels, image_size)
    transformer = build_vit(name, in_channels, image_size)
    if transformer is not None:
        return transformer
    base, plus, last = name.rpartition("+")
    # a plus sign before the last colon is part of a path
    if plus and (":" not in last or _SENSOR.match(name)):
        return _composed(name, base, last, in_channels, image_size)
    if ":" not in name:
        raise FurlongError(
            f"Unknown encoder {name!r}. {nearest(name, [*ENCODERS, *SIZES])} "
            "Or with its patches: 'vit_tiny_patch4'. "
            "Or composed: 'resnet18+pn', 'rep32_pn+resnet18'. "
            "Or your own: 'package.module:factory' or 'path/to/file.py:factory'."
        )
    return _own(name, in_channels, image_size)


# The beginning of a composed name that asks for a sensor, or tries to.
_SENSOR = re.compile(r"rep\w*(\.\w+)?\+")


def _composed(name: str, base: str, last: str, in_channels: int, image_size: int) -> nn.Module:
    """An encoder ``base`` + ``last`` = ``name``, see :func:`build_encoder`."""
    if _SENSOR.match(name):
        return modular(name, in_channels, image_size)
    if "+" in base.rpartition(":")[2]:
        raise FurlongError(f"Encoder {name!r}: only one norm may follow a '+'.")
    if last == EVERYWHERE:
        return group_normed(build_encoder(base, in_channels, image_size))
    if last not in EARLY:
        raise FurlongError(
            f"Encoder {name!r}: no early norm is called {last!r}. "
            f"{nearest(last, [*EARLY, EVERYWHERE])} "
            "A sensor would come first: 'rep32_pn+resnet18'."
        )
    return with_early_norm(build_encoder(base, in_channels, image_size), last)


def without_batchnorm(name: str) -> bool:
    """Whether ``name`` asks for group norms everywhere, in the heads beside the encoder too."""
    return name.endswith(f"+{EVERYWHERE}")


def trunk(name: str, image_size: int) -> nn.Module:
    """MFCL's discriminator: B×64×``image_size``×``image_size`` to B×d, with d as ``out_dim``.

    One of our ResNets loses its stem, any other encoder gets 64 input channels.
    """
    encoder = build_encoder(name, REPRESENTATION_CHANNELS, image_size)
    if name in ENCODERS and isinstance(encoder, ResNet):
        return Trunk(encoder)
    return encoder


def modular(name: str, channels: int, image_size: int) -> Modular:
    """The encoder ``SENSOR+TRUNK`` or ``SENSOR+TRUNK+HEAD`` with fresh weights.

    ``SENSOR`` is e.g. ``rep32_pn``, ``rep16_bn`` or ``rep32_pn.avg_moments``, ``TRUNK`` the name of
    an encoder and ``HEAD`` of a head: ``rep32_pn+resnet18+mfcl_proj``.
    """
    first, *parts = name.split("+")
    if first not in SENSORS:
        raise FurlongError(f"Encoder {name!r}: unknown sensor {first!r}. {nearest(first, SENSORS)}")
    if len(parts) not in (1, 2):
        raise FurlongError(
            f"Encoder {name!r} has {len(parts) + 1} parts; it must be SENSOR+TRUNK or "
            "SENSOR+TRUNK+HEAD, e.g. 'rep32_pn+resnet18+mfcl_proj'."
        )
    require_even(image_size, image_size)
    representation, kind, statistics = SENSORS[first]
    sensor = Sensor(channels, representation, kind, statistics).encoder
    body = trunk(parts[0], image_size // 2 if representation == "rep16" else image_size)
    width = out_dim(body)
    return Modular(sensor, body, width, head(parts[1], width) if len(parts) == 2 else None)


def _own(name: str, in_channels: int, image_size: int) -> nn.Module:
    """What the user's ``package.module:factory`` or ``path/to/file.py:factory`` makes."""
    factory = load_object(name)
    if not callable(factory):
        raise FurlongError(f"Encoder {name!r}: {factory!r} is not a function or class.")
    wanted = inspect.signature(factory).parameters
    offered = {"in_channels": in_channels, "image_size": image_size}
    encoder = factory(**{key: value for key, value in offered.items() if key in wanted})
    if not isinstance(encoder, nn.Module):
        raise FurlongError(f"Encoder {name!r}: got a {type(encoder).__name__}, not an nn.Module.")
    encoder.out_dim = out_dim(encoder, in_channels, image_size)  # type: ignore[assignment]
    return encoder


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; every submodule's own training flag is put back after."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


@contextmanager
def untracked(module: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm normalises by the batch and leaves its running statistics alone."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def out_dim(encoder: nn.Module, in_channels: int = 3, image_size: int = 32) -> int:
    """Length d of an encoder's features: its ``out_dim``, or else found by encoding a blank image.

    Neither the encoder's state nor torch's random state changes.
    """
    known = getattr(encoder, "out_dim", None)
    if isinstance(known, int):
        return known
    device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
    blank = torch.zeros(2, in_channels, image_size, image_size, device=device)
    with evaluating(encoder), torch.random.fork_rng(devices=[]):
        features = encoder(blank)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise FurlongError(
            f"The encoder turns images {list(blank.shape)} into {got}; it must return features "
            "[2, d]: pool or flatten them at its end."
        )
    return int(features.shape[1])
