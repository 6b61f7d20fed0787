"""Methods learn: kNN on ``shapes`` rises over the random encoder within seconds.

Two clients, 1,500 small figures, seed 7. Methods that are not here need more steps than a test may
take; docs/results.md has them on CIFAR-10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import furlong

BASE: dict[str, Any] = {
    "data": "shapes",
    "data.images": 1500,
    "data.test_images": 1000,
    "data.image_size": 16,
    "partition": "iid",
    "clients": 2,
    "rounds": 24,
    "batch_size": 64,
    "optimiser.name": "adam",
    "optimiser.lr": 0.003,
    "evaluate.probe": "none",
    "evaluate.k": 50,
    "evaluate.knn_every": 1000,
    "workers": 1,
    "seed": 7,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedsimclr": {"method.temperature": 0.2, "rounds": 12},
    "ldawa": {"method.temperature": 0.2, "rounds": 8, "epochs": 3},
    "fedx": {"method.temperature": 0.2, "rounds": 8, "epochs": 3},
    "fedvicreg": {},
    "feddc": {"method.images_per_prototype": 25, "optimiser.lr": 0.002},
    "fedrot": {"method.mode": "all4", "method.bn_stats": "recalibrate"},
    "mfcl": {
        "method.representation": "rep16",
        "method.server_epochs": 12,
        "rounds": 2,
        "epochs": 3,
        "optimiser.lr": 0.001,
        "train.server_threads": 1,
    },
    "fedavg": {"rounds": 10},
    "fedprox": {"rounds": 10},
    "moon": {"method.mu": 1.0, "rounds": 6, "epochs": 3},
}


QUICK = ("fedsimclr", "fedavg")  # without labels, and with


@pytest.mark.parametrize(
    "method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in SETTINGS]
)
def test_knn_rises(method: str, tmp_path: Path) -> None:
    options = {**BASE, **SETTINGS[method], "out": str(tmp_path / "run")}
    run = furlong.run(method=method, **options)
    gain = run.accuracy("knn") - run.accuracy("knn", "random")
    assert gain > 0.01, f"{100 * gain:+.1f} points"
