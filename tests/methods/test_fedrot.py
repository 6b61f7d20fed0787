"""FedRot (2.7): turns and how they are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import a_batch
from torch import Tensor, nn

from furlong.data.augment import preset, rotated
from furlong.methods.fedrot import FedRot


class Recorder(nn.Module):
    """Remembers what it sees and answers with equal scores."""

    def forward(self, images: Tensor) -> Tensor:
        self.seen = images
        return torch.zeros(len(images), 4)


@pytest.mark.parametrize("mode", ["random", "all4"])
def test_uniform_scores_give_ln_4(prepared: Any, golden: Any, mode: Any) -> None:
    batch, net = a_batch(prepared("fedrot")), Recorder()
    loss = FedRot(mode=mode).loss(net, batch)
    assert loss.item() == pytest.approx(golden["losses"]["rotation_uniform"], abs=1e-6)
    assert len(net.seen) == (6 if mode == "random" else 24)


def test_all_four_turns_of_each_image(prepared: Any) -> None:
    net = Recorder()
    batch = replace(a_batch(prepared("fedrot")), augment=preset("none"))
    FedRot(mode="all4").loss(net, batch)
    for turn, images in enumerate(net.seen.chunk(4)):  # equally many of each class
        assert torch.equal(images, batch.plain.rot90(turn, (2, 3)))


def test_turns_are_exact() -> None:
    x = torch.rand(4, 3, 5, 5)
    turn = torch.tensor([0, 1, 2, 3])
    assert torch.equal(rotated(rotated(x, turn), (4 - turn) % 4), x)
    assert torch.equal(rotated(x, torch.full((4,), 2)), x.flip(2, 3))
    ring = torch.zeros(4, 1, 5, 5)
    ring[..., 1:4, 1:4] = 1
    assert torch.equal(rotated(ring, turn), ring)
