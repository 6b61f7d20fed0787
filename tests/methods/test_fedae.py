"""FedAE (2.8): the decoder and its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import a_batch
from torch import Tensor, nn

from furlong.data.augment import preset
from furlong.methods.fedae import Decoder


@pytest.mark.parametrize(("size", "start"), [(32, 4), (84, 6), (28, 4), (16, 2), (96, 6), (224, 4)])
def test_decoder_gives_the_image_back_in_size(size: int, start: int) -> None:
    decoder = Decoder(20, 3, size).eval()
    out = decoder(torch.randn(2, 20))
    assert out.shape == (2, 3, size, size)
    assert decoder.start == start
    assert 0 <= out.min() <= out.max() <= 1


def test_autoencoder_loss(prepared: Any) -> None:
    p = prepared("fedae")
    batch = replace(a_batch(p), augment=preset("none"))

    class Says(nn.Module):
        def __init__(self, answer: Tensor) -> None:
            super().__init__()
            self.answer = answer

        def forward(self, images: Tensor) -> Tensor:
            return self.answer.expand_as(images)

    assert p.method.loss(Says(batch.plain), batch).item() == 0
    black_and_white = replace(batch, pixels=(batch.pixels > 100).to(torch.uint8) * 255)
    assert p.method.loss(Says(torch.tensor(0.5)), black_and_white).item() == 0.25
    normalised = replace(
        batch, augment=preset("moco_cifar")
    )  # the target is in [0, 1] all the same
    assert 0 < p.method.loss(Says(torch.tensor(0.5)), normalised).item() <= 0.25


def test_decoder_reads_representations(prepared: Any) -> None:
    p = prepared("fedae")
    net = p.method.network(p.server.context(p.server.exchanges()[0]))
    assert net.decoder.linear.in_features == p.setup.width
