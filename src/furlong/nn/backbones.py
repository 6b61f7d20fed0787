"""The encoders' networks: ResNets for small and large images, FedCA's CNN, a tiny one for a CPU.

Each maps images B×C×H×W to features B×d and says d in its attribute ``out_dim``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Stem = Literal["small", "large"]


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


class _Plain(nn.Module):
    """3×3 convolutions to ``widths``, each with BN and ReLU, called ``conv1``, ``bn1`` …"""

    def __init__(self, in_channels: int, widths: tuple[int, ...], stride: int) -> None:
        super().__init__()
        self.depth = len(widths)
        for i, (into, out) in enumerate(pairwise((in_channels, *widths)), 1):
            self.add_module(f"conv{i}", _conv(into, out, 3, stride))
            self.add_module(f"bn{i}", nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)
        _init_convs(self)

    def layer(self, i: int, x: Tensor) -> Tensor:
        out: Tensor = self.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)))
        return out


class CNN5(_Plain):
    """FedCA's "5-layer CNN" with 2048 features; the paper gives no more, the widths are our choice.

    Five 3×3 convolutions 64-128-256-512-512 with BN and ReLU, 2×2 max-pool after the first four,
    average pool to 2×2.
    """

    out_dim = 2048

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__(in_channels, (64, 128, 256, 512, 512), stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W, H and W at least 16, to B×2048."""
        for i in range(1, self.depth):
            x = F.max_pool2d(self.layer(i, x), 2)
        return F.adaptive_avg_pool2d(self.layer(self.depth, x), 2).flatten(1)


class Small(_Plain):
    """Four strided 3×3 convolutions 24-48-96-192: for demos and tests on a CPU.

    Halving the image in every layer, the first included, makes the work of the layers equal.
    """

    out_dim = 192

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__(in_channels, (24, 48, 96, 192), stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×192."""
        for i in range(1, self.depth + 1):
            x = self.layer(i, x)
        return x.mean(dim=(2, 3))


def resnet18(in_channels: int = 3, stem: Stem = "small") -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), in_channels, stem)


def resnet50(in_channels: int = 3, stem: Stem = "small") -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), in_channels, stem)
