"""Encoders and heads: plain modules, so that a state dict is everything there is to send or save.

An encoder maps images B×C×H×W to features B×d and says d in its attribute ``out_dim``. A head is
an ``nn.Sequential`` on B×d. Both are made from a name, and both draw their initial weights from
torch's global generator, which the caller has seeded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from furlong.errors import FurlongError, nearest

Stem = Literal["small", "large"]

# Up to here a stem that shrinks the image four times leaves the last stage too few positions.
LARGEST_SMALL_IMAGE = 96


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that only shrinks by its stride; no bias, since a batch norm follows."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def _init_convs(module: nn.Module) -> None:
    """He initialisation of every convolution; batch norms already start at 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


class _Residual(nn.Module):
    """Adds its input to ``branch``; a 1×1 convolution adapts the input where the shapes differ.

    The shortcut is called ``downsample`` as in torchvision and timm, so that their checkpoints
    load, and so that FedU's divergence (over names with "conv") leaves it out.
    """

    expansion: int

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                _conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
            )
        self.relu = nn.ReLU(inplace=True)

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×(width·expansion)×H/stride×W/stride."""
        out: Tensor = self.relu(self.branch(x) + self.downsample(x))
        return out


class BasicBlock(_Residual):
    """Two 3×3 convolutions (ResNet-18)."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__(in_channels, width, stride)
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.bn2(self.conv2(x))
        return out


class Bottleneck(_Residual):
    """1×1, 3×3 (which carries the stride), 1×1 to four times the width (ResNet-50)."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__(in_channels, width, stride)
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.bn3(self.conv3(x))
        return out


class ResNet(nn.Module):
    """A residual network without its classifier.

    The ``small`` stem (3×3, stride 1, no pooling) is the CIFAR variant of EasyFL, Orchestra and the
    MoCo demo; ``large`` (7×7, stride 2, max-pool) is the ImageNet one.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        in_channels: int = 3,
        stem: Stem = "small",
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, 64, 3) if stem == "small" else _conv(in_channels, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if stem == "small" else nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        stages = []
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            blocks = []
            for index in range(depth):
                blocks.append(block(channels, width, 2 if stage > 0 and index == 0 else 1))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.out_dim = channels
        _init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×512 (ResNet-18) or B×2048 (ResNet-50)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


class CNN5(nn.Module):
    """FedCA's "5-layer CNN" with 2048 features; the paper gives no more, the widths are our choice.

    Five 3×3 convolutions 64-128-256-512-512 with BN and ReLU, 2×2 max-pool after the first four,
    average pool to 2×2.
    """

    out_dim = 2048

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(in_channels, 64, 3), nn.BatchNorm2d(64)
        self.conv2, self.bn2 = _conv(64, 128, 3), nn.BatchNorm2d(128)
        self.conv3, self.bn3 = _conv(128, 256, 3), nn.BatchNorm2d(256)
        self.conv4, self.bn4 = _conv(256, 512, 3), nn.BatchNorm2d(512)
        self.conv5, self.bn5 = _conv(512, 512, 3), nn.BatchNorm2d(512)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        _init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W, H and W at least 16, to B×2048."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.maxpool(self.relu(self.bn2(self.conv2(x))))
        x = self.maxpool(self.relu(self.bn3(self.conv3(x))))
        x = self.maxpool(self.relu(self.bn4(self.conv4(x))))
        x = self.avgpool(self.relu(self.bn5(self.conv5(x))))
        return x.flatten(1)


class Small(nn.Module):
    """Four strided 3×3 convolutions 24-48-96-192: for demos and tests on a CPU.

    Halving the image in every layer, the first included, makes the work of the layers equal.
    """

    out_dim = 192

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(in_channels, 24, 3, 2), nn.BatchNorm2d(24)
        self.conv2, self.bn2 = _conv(24, 48, 3, 2), nn.BatchNorm2d(48)
        self.conv3, self.bn3 = _conv(48, 96, 3, 2), nn.BatchNorm2d(96)
        self.conv4, self.bn4 = _conv(96, 192, 3, 2), nn.BatchNorm2d(192)
        self.relu = nn.ReLU(inplace=True)
        _init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×192."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.relu(self.bn3(self.conv3(x)))
        x = self.relu(self.bn4(self.conv4(x)))
        return x.mean(dim=(2, 3))


def resnet18(in_channels: int = 3, stem: Stem = "small") -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), in_channels, stem)


def resnet50(in_channels: int = 3, stem: Stem = "small") -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), in_channels, stem)


def _stem_by_size(image_size: int) -> Stem:
    return "small" if image_size <= LARGEST_SMALL_IMAGE else "large"


ENCODERS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet18": lambda channels, size: resnet18(channels, _stem_by_size(size)),
    "resnet18_small": lambda channels, _: resnet18(channels, "small"),
    "resnet18_large": lambda channels, _: resnet18(channels, "large"),
    "resnet50": lambda channels, size: resnet50(channels, _stem_by_size(size)),
    "resnet50_small": lambda channels, _: resnet50(channels, "small"),
    "resnet50_large": lambda channels, _: resnet50(channels, "large"),
    "cnn5": lambda channels, _: CNN5(channels),
    "small": lambda channels, _: Small(channels),
}


def build_encoder(name: str, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """The encoder called ``name``, with fresh weights and an attribute ``out_dim``.

    ``resnet18`` and ``resnet50`` take the stem for small images up to 96 pixels; a suffix
    ``_small`` or ``_large`` decides otherwise. ``package.module:factory`` or
    ``path/to/file.py:factory`` calls the user's own function (or class), with ``in_channels`` and
    ``image_size`` if it has parameters of those names.

    A suffix ``+pn`` or ``+gn`` replaces the first two batch norms (``peernorm.with_early_norm``);
    ``rep32_pn+resnet18`` is MFCL's sensor and discriminator (``sensor.modular``).
    """
    if name in ENCODERS:
        return ENCODERS[name](in_channels, image_size)
    base, plus, last = name.rpartition("+")
    # a plus sign before the last colon is part of a path
    if plus and (":" not in last or _SENSOR.match(name)):
        return _composed(name, base, last, in_channels, image_size)
    if ":" not in name:
        raise FurlongError(
            f"Unknown encoder {name!r}. {nearest(name, ENCODERS)} "
            "Or composed: 'resnet18+pn', 'rep32_pn+resnet18'. "
            "Or your own: 'package.module:factory' or 'path/to/file.py:factory'."
        )
    return _own(name, in_channels, image_size)


# The beginning of a composed name that asks for a sensor, or tries to.
_SENSOR = re.compile(r"rep\w*(\.\w+)?\+")


def _composed(name: str, base: str, last: str, in_channels: int, image_size: int) -> nn.Module:
    """An encoder ``base`` + ``last`` = ``name``, see :func:`build_encoder`."""
    # here and not above, because both modules import this one
    from furlong.nn.peernorm import EARLY, with_early_norm
    from furlong.nn.sensor import modular

    if _SENSOR.match(name):
        return modular(name, in_channels, image_size)
    if "+" in base.rpartition(":")[2]:
        raise FurlongError(f"Encoder {name!r}: only one norm may follow a '+'.")
    if last not in EARLY:
        raise FurlongError(
            f"Encoder {name!r}: no early norm is called {last!r}. {nearest(last, EARLY)} "
            "A sensor would come first: 'rep32_pn+resnet18'."
        )
    return with_early_norm(build_encoder(base, in_channels, image_size), EARLY[last])


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


def load_object(name: str) -> object:
    """The user's class or function meant by ``package.module:name`` or ``path/to/file.py:name``."""
    source, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise FurlongError(f"{name!r}: cannot import {source!r}: {error}.") from error
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise FurlongError(
            f"{name!r}: {source!r} has no {attribute!r}. {nearest(attribute, public)}"
        )
    found: object = getattr(module, attribute)
    return found


def _load_module(name: str) -> ModuleType:
    if not name:
        raise ImportError("the part before ':' is empty")
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """The module in a user's file; the same file is run once, another of that name replaces it."""
    name, place = f"furlong_user_{path.stem}", str(path.resolve())
    known = sys.modules.get(name)
    if known is not None and known.__file__ == place:
        return known
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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


def _mlp(in_dim: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out)
    )


def _mfcl_proj(dim: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(dim, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()),
        *(nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()),
        *(nn.Linear(512, 128, bias=False), nn.BatchNorm1d(128)),
    )


def _orchestra_proj(dim: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(dim, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()),
        *(nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512, affine=False)),
    )


def _simsiam_proj(dim: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(dim, 2048, bias=False), nn.BatchNorm1d(2048), nn.ReLU()),
        *(nn.Linear(2048, 2048, bias=False), nn.BatchNorm1d(2048), nn.ReLU()),
        *(nn.Linear(2048, 2048, bias=False), nn.BatchNorm1d(2048, affine=False)),
    )


def _expander(dim: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(dim, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        nn.Linear(width, width),
    )


def _plain_mlp(dim: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, out))


HEADS: dict[str, Callable[[int], nn.Sequential]] = {
    "proj_128": lambda dim: _plain_mlp(dim, dim, 128),  # FCL, FedCA
    "easyfl_proj": lambda dim: _mlp(dim, 4096, 2048),  # FedU, FedEMA
    "easyfl_pred": lambda dim: _mlp(dim, 4096, 2048),
    "mfcl_proj": _mfcl_proj,
    "orchestra_proj": _orchestra_proj,
    "simsiam_proj": _simsiam_proj,
    "simsiam_pred": lambda dim: _mlp(dim, 512, dim),
    "fedx_proj": lambda dim: _plain_mlp(dim, 256, 256),
    "fedx_pred": lambda dim: _plain_mlp(dim, 256, 256),
    "moon_proj": lambda dim: _plain_mlp(dim, dim, 256),
    "expander": lambda dim: _expander(dim, 2048),  # VICReg, Barlow Twins at CIFAR's size
    "small_proj": lambda dim: _mlp(dim, 256, 128),  # demos and tests
    "small_pred": lambda dim: _mlp(dim, 256, 128),
}


def head(name: str, in_dim: int) -> nn.Sequential:
    """A projector or predictor B×``in_dim`` to B×``head_dim``, with fresh weights.

    ``name`` is a key of ``HEADS``, or ``mlp:HIDDEN:OUT`` for Linear, BN, ReLU, Linear.
    """
    if name in HEADS:
        return HEADS[name](in_dim)
    kind, *sizes = name.split(":")
    if kind == "mlp" and len(sizes) == 2 and all(s.isdecimal() and int(s) > 0 for s in sizes):
        return _mlp(in_dim, int(sizes[0]), int(sizes[1]))
    raise FurlongError(f"Unknown head {name!r}. {nearest(name, [*HEADS, 'mlp:HIDDEN:OUT'])}")


def head_dim(module: nn.Module) -> int:
    """Output length of a head: that of its last linear layer."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise FurlongError(f"A {type(module).__name__} without a linear layer is not a head.")
    return linear[-1].out_features
