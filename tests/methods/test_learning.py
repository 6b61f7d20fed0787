"""Methods learn: features tell figures apart better than those of the untrained encoder.

Two clients, 1,000 small figures, seed 107, each method with its usual settings; the probe is ridge
regression. A loss with the wrong sign, or one that does not reach the encoder, fails here: that is
tried as well. Methods that are not here have not been tried within such a budget.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import furlong
from furlong.core.context import Optimiser
from furlong.data.images import ImageSet
from furlong.errors import FurlongError

SIZE = 16
BASE: dict[str, Any] = {
    "data": "shapes",
    "data.images": 1000,
    "data.test_images": 200,
    "data.image_size": SIZE,
    "partition": "iid",
    "clients": 2,
    "evaluate.probe": "none",
    "evaluate.knn_every": 1000,
    "evaluate.monitor_images": 100,
    "run.save_every": 100,
    "workers": 1,
    "seed": 107,
    "init": "random",
}
ROUNDS = {
    **dict.fromkeys(("furlong", "fedsimclr", "ldawa", "fedx", "fedvicreg", "fedswav", "feddc"), 20),
    **dict.fromkeys(("fedae", "fedavg", "fedprox", "moon"), 20),
    **dict.fromkeys(("fedmoco", "fcl", "fedca", "fedbarlow", "fedrot", "fedsimsiam"), 60),
}
QUICK = ("fedsimclr",)
LEAST = 0.03


@cache
def figures(split: str) -> ImageSet:
    """Other ones than those of the run."""
    return furlong.load("shapes", split, limit=2000, image_size=SIZE, seed=999)


def probed(encoder: nn.Module) -> float:
    """The accuracy of ridge regression from standardised features to classes."""
    with torch.no_grad():
        train, test = (encoder(encoder.transform(figures(s).pixels)) for s in ("train", "test"))
    mean, deviation = train.mean(dim=0), train.std(dim=0) + 1e-6
    train, test = (train - mean) / deviation, (test - mean) / deviation
    labels, wanted = figures("train").labels, figures("test").labels
    assert labels is not None
    goal = F.one_hot(labels).float() - 0.1
    gram = train.T @ train + 30 * torch.eye(train.shape[1])
    found = (test @ torch.linalg.solve(gram, train.T @ goal)).argmax(dim=1)
    return float((found == wanted).float().mean())


def gain(method: str, out: Path) -> float:
    """By how much training raises the probe."""
    run = furlong.run(method=method, **{**BASE, "rounds": ROUNDS[method], "out": str(out)})
    trained = probed(encoder := furlong.load_encoder(run.folder))
    encoder.load_state_dict(load_file(run.folder / "random.safetensors"))
    return trained - probed(encoder)


every_method = pytest.mark.parametrize(
    "method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in ROUNDS]
)


@every_method
def test_the_probe_rises(method: str, tmp_path: Path) -> None:
    found = gain(method, tmp_path / "run")
    assert found > LEAST, f"{100 * found:+.1f} points"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsimclr", "fedavg"])
def test_a_loss_with_the_wrong_sign_is_noticed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Optimiser.step
    monkeypatch.setattr(Optimiser, "step", lambda self, loss: right(self, -loss))
    try:
        found = gain(method, tmp_path / "run")
    except FurlongError:  # weights without bound are refused
        return
    assert found <= LEAST, f"{100 * found:+.1f} points"
