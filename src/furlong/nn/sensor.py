"""MFCL's nets: a small autoencoder, the sensor, and an encoder that starts from its representation.

The sensor is trained by the federation (phase 1), the discriminator on representations at the
server (phase 2). Together they are an encoder like any other: ``rep32_pn+resnet18``.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from furlong.errors import FurlongError, nearest
from furlong.nn.backbones import ResNet
from furlong.nn.heads import head_dim
from furlong.nn.peernorm import Kind, Statistics, norm

Representation = Literal["rep32", "rep16"]

REPRESENTATION_CHANNELS = 64  # also what the first stage of a ResNet takes


def _pool(here: bool) -> nn.Module:
    return nn.MaxPool2d(2) if here else nn.Identity()


def require_even(height: int, width: int) -> None:
    if height % 2 or width % 2:
        raise FurlongError(
            f"MFCL's sensor got images of {height}×{width}; both sides must be even, because it "
            "halves them and doubles them again. Resize or pad the images."
        )


class SensorEncoder(nn.Module):
    """The half that clients keep running: images to representations."""

    def __init__(
        self, channels: int, representation: Representation, kind: Kind, statistics: Statistics
    ) -> None:
        super().__init__()
        width = REPRESENTATION_CHANNELS
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.norm1 = norm(kind, width, statistics=statistics)
        self.pool = _pool(representation == "rep16")
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = norm(kind, width, statistics=statistics)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×S×S to B×64×S×S (rep32) or B×64×S/2×S/2 (rep16)."""
        require_even(*x.shape[2:])
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        out: Tensor = self.relu(self.norm2(self.conv2(x)))
        return out


class SensorDecoder(nn.Module):
    """Representations to the logits of the images; its transposed convolutions are conv1, conv2."""

    def __init__(
        self, channels: int, representation: Representation, kind: Kind, statistics: Statistics
    ) -> None:
        super().__init__()
        width = REPRESENTATION_CHANNELS
        self.pool = _pool(representation == "rep32")
        self.conv1 = nn.ConvTranspose2d(width, width, 3, stride=2, padding=1, output_padding=1)
        self.norm1 = norm(kind, width, statistics=statistics)
        self.conv2 = nn.ConvTranspose2d(width, channels, 3, padding=1)
        self.norm2 = norm(kind, channels, statistics=statistics)
        self.conv3 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        if kind == "none":
            # no norm centres the few channels of an image, and a ReLU that starts with all of them
            # negative never learns: so it was for one in six sensors of grey images
            nn.init.ones_(self.get_parameter("conv2.bias"))

    def forward(self, x: Tensor) -> Tensor:
        """B×64×S×S (rep32) or B×64×S/2×S/2 (rep16) to B×C×S×S."""
        x = self.relu(self.norm1(self.conv1(self.pool(x))))
        out: Tensor = self.conv3(self.relu(self.norm2(self.conv2(x))))
        return out


class Sensor(nn.Module):
    """The autoencoder of MFCL's Table 5, its first transposed convolution with stride 2.

    As printed it pools once and never up-samples, so it could not reconstruct. ``rep32`` takes the
    representation before the pool, ``rep16`` after it: a quarter of the values to send.
    """

    def __init__(
        self,
        channels: int = 3,
        representation: Representation = "rep32",
        norm: Kind = "pn",
        statistics: Statistics = "pooled",
    ) -> None:
        super().__init__()
        if representation not in get_args(Representation):
            hint = nearest(representation, get_args(Representation))
            raise FurlongError(f"Unknown representation {representation!r}. {hint}")
        self.encoder: nn.Module = SensorEncoder(channels, representation, norm, statistics)
        self.decoder = SensorDecoder(channels, representation, norm, statistics)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×S×S in [0, 1] to the logits of its reconstruction, of the same shape."""
        logits: Tensor = self.decoder(self.encoder(x))
        return logits

    def reconstruct(self, x: Tensor) -> Tensor:
        """B×C×S×S in [0, 1] to its reconstruction."""
        return torch.sigmoid(self(x))


class Trunk(nn.Module):
    """A ResNet without its stem; the names of its weights are those of the ResNet."""

    def __init__(self, resnet: ResNet) -> None:
        super().__init__()
        self.layer1, self.layer2 = resnet.layer1, resnet.layer2
        self.layer3, self.layer4 = resnet.layer3, resnet.layer4
        self.out_dim = resnet.out_dim

    def forward(self, x: Tensor) -> Tensor:
        """B×64×H×W to B×512 (ResNet-18) or B×2048 (ResNet-50)."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


class Modular(nn.Module):
    """Sensor, discriminator (to features of ``width``) and, if there is one, projector in a row."""

    def __init__(
        self, sensor: nn.Module, discriminator: nn.Module, width: int, projector: nn.Module | None
    ) -> None:
        super().__init__()
        self.sensor, self.discriminator = sensor, discriminator
        self.projector = nn.Identity() if projector is None else projector
        self.out_dim = width if projector is None else head_dim(projector)

    def forward(self, x: Tensor) -> Tensor:
        """B×C×S×S to B×d."""
        features: Tensor = self.projector(self.discriminator(self.sensor(x)))
        return features


SENSORS: dict[str, tuple[Representation, Kind, Statistics]] = {
    **{f"{r}_{k}": (r, k, "pooled") for r in get_args(Representation) for k in get_args(Kind)},
    **{f"{r}_pn.{s}": (r, "pn", s) for r in get_args(Representation) for s in get_args(Statistics)},
}
"""Every sensor by its name; statistics are those of peer normalization alone."""
