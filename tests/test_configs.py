"""Every published setting has a file, and every file is a setting that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from furlong import config
from furlong.data.augment import preset
from furlong.data.partition import partition
from furlong.nets import ENCODERS

ROOT = Path(__file__).parent.parent
FILES = [p for p in sorted((ROOT / "configs").glob("*/*.toml")) if p.parent.name != "comparisons"]
CLASSES = {"cifar10": 10, "cifar100": 100, "mini_imagenet": 100, "fashion_mnist": 10}


def test_every_paper_is_there() -> None:
    """Table and figure rows by paper; see the CSV of the papers' numbers."""
    found = dict.fromkeys(("fedca", "fcl", "fedu", "mfcl"), 0)
    for path in FILES:
        found[path.parent.name] += 1
    names = {f"{p.parent.name}/{p.stem}" for p in FILES}
    for source in ("online", "target"):
        for update in ("online", "target", "both"):
            for predictor in ("global", "local"):
                assert f"fedu/table4-{source}-{update}-{predictor}" in names
    assert {
        f"fedca/figure5-{s}-{r}" for s in ("iid", "noniid") for r in ["i", "ii", "iii", "iv", "v"]
    } <= (names)
    assert {f"fcl/figure5-{row}" for row in ("cl", "cl-ff", "cl-ff-nm")} <= names
    scenarios = [*range(1, 11), 11, 12, 13, 20, 30, 70, 109, 110]
    for scenario in scenarios:
        data = "cifar10" if scenario <= 10 else "cifar100"
        assert {f"mfcl/{data}-sc{scenario}-{n}" for n in ("pn", "gn", "bn", "fedsimclr")} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_file(path: Path) -> None:
    text = path.read_text()
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert f"furlong run configs/{path.parent.name}/{path.name}" in head[2]
    settings = config.load(path)
    method = settings.make_method()
    assert settings.model.encoder in ENCODERS
    assert method.needs_public == (settings.data.public is not None)
    preset(settings.data.augment, 32)
    classes = CLASSES[settings.data.name]
    labels = torch.arange(classes).repeat(60)
    split = partition(
        settings.data.partition,
        labels,
        settings.data.clients,
        n=len(labels),
        n_classes=classes,
        seed=0,
    )
    assert settings.data.clients in (None, len(split.indices))
    # what a file sets is what its paper sets: nothing is left to a default that may change
    given = {line.split("=")[0].strip() for line in text.splitlines() if "=" in line}
    assert {"name", "partition", "augment", "encoder", "rounds", "epochs", "batch_size"} <= given


def test_paper_and_code_are_both_reachable() -> None:
    printed = config.load(ROOT / "configs/fedu/cifar10-noniid-printed.toml").method
    code = config.load(ROOT / "configs/fedu/cifar10-noniid.toml").method
    assert (printed["divergence"], printed["symmetric"]) == ("sq_l2", False)
    assert (code["divergence"], code["symmetric"]) == ("mean_conv_l2", True)
    code = config.load(ROOT / "configs/mfcl/cifar10-sc2-pn-code.toml").method
    assert (code["statistics"], code["refresh"]) == ("avg_moments", "per_epoch")


def test_small_budget_by_options() -> None:
    """The same file at a small budget: a small encoder takes small heads unless one is named."""
    path = ROOT / "configs/fedu/cifar10-noniid.toml"
    small = config.load(path, {"encoder": "small", "rounds": 2}).method
    assert (small["projection_head"], small["prediction_head"]) == ("small_proj", "small_pred")
    named = config.load(path, {"encoder": "small", "method.projection_head": "proj_128"}).method
    assert named["projection_head"] == "proj_128"
    assert config.load(path).method["projection_head"] == "easyfl_proj"
