"""Methods learn: features tell figures apart better than those of the untrained encoder.

Two clients, 1,000 small figures, seed 107, each method with its usual settings (BYOL and its
relatives with faster ones); the probe is ridge regression. A loss with the wrong sign, or one that
does not reach the encoder, fails here: that is tried as well, except where no such test can exist.
A predictor that ends in a linear layer can learn -q as well as q, so the negated loss of BYOL,
FedU, FedEMA, FedU² and SimSiam is the same loss with another start, and learns as well. Their
signs are in the tests that repeat a client's round by hand. Of FedMAE the loss has to fall: a
transformer that rebuilds patches needs thousands of steps (docs/results.md) before its features
are better than those that it began with.
"""

from __future__ import annotations

import json
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
from furlong.methods import METHODS

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
    **dict.fromkeys(("fedsc", "ssd"), 20),
    **dict.fromkeys(("fedmoco", "fcl", "fedca", "fedbarlow", "fedrot", "fedsimsiam"), 60),
    **dict.fromkeys(("fedbyol", "fedu", "fedema", "fedu2", "orchestra"), 60),
    "mfcl": 3,
}
FASTER: dict[str, Any] = {
    "optimiser.name": "sgd",
    "optimiser.lr": 0.1,
    "optimiser.weight_decay": 0.0005,
    "method.decay": 0.9,
}
OPTIONS: dict[str, dict[str, Any]] = dict.fromkeys(("fedbyol", "fedu", "fedema", "fedu2"), FASTER)
EITHER_SIGN = (*OPTIONS, "fedsimsiam")
QUICK = ("fedsimclr",)
LEAST = 0.03
# a network that is trained to draw as badly as it can gains four points, too
LEASTS = {"fedae": 0.08}


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
    settings = {**BASE, **OPTIONS.get(method, {}), "rounds": ROUNDS[method], "out": str(out)}
    run = furlong.run(method=method, **settings)
    trained = probed(encoder := furlong.load_encoder(run.folder))
    encoder.load_state_dict(load_file(run.folder / "random.safetensors"))
    return trained - probed(encoder)


every_method = pytest.mark.parametrize(
    "method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in ROUNDS]
)


def test_no_method_is_left_out() -> None:
    assert {*ROUNDS, "fedmae"} == set(METHODS)


@every_method
def test_the_probe_rises(method: str, tmp_path: Path) -> None:
    found = gain(method, tmp_path / "run")
    assert found > LEASTS.get(method, LEAST), f"{100 * found:+.1f} points"


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in ROUNDS if m not in EITHER_SIGN])
def test_a_loss_with_the_wrong_sign_is_noticed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Optimiser.step
    monkeypatch.setattr(Optimiser, "step", lambda self, loss: right(self, -loss))
    try:
        found = gain(method, tmp_path / "run")
    except FurlongError:  # weights without bound are refused
        return
    assert found <= LEASTS.get(method, LEAST), f"{100 * found:+.1f} points"


def fall_of_fedmae(out: Path) -> float:
    """The share of the first round's loss that is gone in the last."""
    furlong.run(method="fedmae", **{**BASE, "rounds": 8, "out": str(out)})
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return 1 - float(lines[-1]["loss"]) / float(lines[0]["loss"])


@pytest.mark.slow
def test_fedmae_rebuilds_patches(tmp_path: Path) -> None:
    assert fall_of_fedmae(tmp_path / "run") > 0.2


@pytest.mark.slow
def test_fedmae_with_the_wrong_sign_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Optimiser.step
    monkeypatch.setattr(Optimiser, "step", lambda self, loss: right(self, -loss))
    assert fall_of_fedmae(tmp_path / "run") <= 0.2  # it grows from round to round
