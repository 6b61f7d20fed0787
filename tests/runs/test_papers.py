"""Every published setting has a file, and every file is a setting that runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch

from furlong.data.augment import preset
from furlong.data.partition import partition
from furlong.nn.encoders import ENCODERS
from furlong.runs import config

ROOT = Path(__file__).parents[2]
FILES = [p for p in sorted((ROOT / "configs").glob("*/*.toml")) if p.parent.name != "comparisons"]
CLASSES = {"cifar10": 10, "cifar100": 100, "mini_imagenet": 100, "fashion_mnist": 10}
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "mini_imagenet": 50_000, "fashion_mnist": 60_000}


# What the papers report, as file names: all combinations of the parts, then what each row runs.
# The name of a paper's own method is left out. Random weights (the tables of transfer) are part of
# every evaluation and need no run. FedU's Table 2 has few-label FedAvg from FedCA's Table 3.
CIFAR = ("cifar10", "cifar100")
THREE = (*CIFAR, "mini_imagenet")
SPLITS = ("iid", "noniid")
FEW = {"fedavg-1pct": "fedavg", "fedavg-10pct": "fedavg"}
Rows = tuple[tuple[tuple[str, ...], ...], dict[str, str]]
FCL_SETS = (*CIFAR, "fashion_mnist")
FCL_ROWS = {
    name: name for name in ("fedrot", "feddc", "fedswav", "fedsimclr", "fedca", "fedavg")
} | {"": "fcl"}
MFCL_ROWS = {"pn": "mfcl", "gn": "mfcl", "bn": "mfcl"} | {
    name: name for name in ("fedavg", "fedprox", "moon", "fedswav", "fedsimclr", "orchestra")
}
TABLES: dict[str, list[Rows]] = {
    "fedca": [
        (
            (THREE, SPLITS, ("cnn5", "resnet50")),  # Tables 2 to 4
            {"": "fedca", "fedsimclr": "fedsimclr", "fedae": "fedae", "fedpr": "fedrot"} | FEW,
        ),
        ((("table5",), ("beta",), ("0.005", "0.05", "0.1")), {"": "fedca"}),
        ((("figure5",), SPLITS, ("i", "ii", "iii", "iv", "v")), {"": "fedca"}),
        ((("cifar10-iid-cnn5-printed",),), {"": "fedca"}),
    ],
    "fcl": [
        ((FCL_SETS, ("iid", "noniid1")), FCL_ROWS | FEW),  # Tables 1 to 3
        ((FCL_SETS, ("noniid2",)), FCL_ROWS),  # Table 1
        ((FCL_SETS, ("moco-centralised",)), {"": "fedmoco"}),
        ((("figure5",), ("cl", "cl-ff", "cl-ff-nm", "remote-only")), {"": "fcl"}),
    ],
    "fedu": [
        ((CIFAR, SPLITS), {"": "fedu", "single": "fedbyol"}),  # Tables 1 and 2, ResNet-18
        (
            (THREE, SPLITS, ("resnet50",)),  # Tables 1 to 3
            {"": "fedu", "single": "fedbyol", "fedsimclr": "fedsimclr", "fedca": "fedca"},
        ),
        ((CIFAR, SPLITS, ("resnet50",)), {"fedsimsiam": "fedsimsiam", "fedavg": "fedavg"}),
        ((THREE, ("resnet50-centralised",)), {"": "fedbyol"}),
        ((THREE, ("noniid-resnet50-fedbyol",)), {"": "fedbyol"}),
        (
            (("table4",), ("online", "target"), ("online", "target", "both"), ("global", "local")),
            {"": "fedu"},
        ),
        ((("table4-dapu", "cifar10-noniid-printed"),), {"": "fedu"}),
    ],
    "mfcl": [
        ((("cifar10",), tuple(f"sc{s}" for s in range(1, 11))), MFCL_ROWS),  # Table 2
        ((("cifar100",), tuple(f"sc{10 + s}" for s in (1, 2, 3, 10, 20, 60, 99, 100))), MFCL_ROWS),
        (
            (("table7",), ("sc2", "sc10")),
            {"fedsimclr-gn": "fedsimclr", "fedsimclr-pn": "fedsimclr"},
        ),
        ((("cifar10-sc2",),), {"pn-code": "mfcl", "gn-code": "mfcl"}),
    ],
}
EXPECTED = {
    f"{paper}/" + "-".join(filter(None, (*parts, row))): method
    for paper, tables in TABLES.items()
    for choices, rows in tables
    for parts in product(*choices)
    for row, method in rows.items()
}


def test_every_row_has_a_file_and_every_file_a_row() -> None:
    assert {f"{p.parent.name}/{p.stem}" for p in FILES} == set(EXPECTED)


def _check_name(parts: list[str], settings: config.Config) -> None:
    """A file's settings are what its name says."""
    data, method = settings.data, settings.method["name"]
    assert parts[0] in (data.name, "table4", "table5", "table7", "figure5")
    assert {"cnn5", "resnet50"}.isdisjoint(parts) or settings.model.encoder in parts
    bounds = {"single": "single", "centralised": "pooled"}
    assert settings.run.bound == next((bounds[p] for p in parts if p in bounds), "none")
    if "iid" in parts:
        assert data.partition == "iid"
    if "noniid" in parts:
        assert data.partition == f"classes:{CLASSES[data.name] // 5}"
    if parts[-1].endswith("pct"):  # of the labels
        share = IMAGES[data.name] * int(parts[-1].removesuffix("pct")) // 100
        assert (method, data.images) == ("fedavg", share)
    else:
        assert data.images is None
    for part in parts:
        if part.startswith("noniid") and part != "noniid":
            assert data.partition == f"fcl_{part}_standin"
        if part.startswith("sc"):
            classes = int(part[2:]) - (10 if data.name == "cifar100" else 0)
            assert data.partition == f"mfcl:{classes}"
            assert data.clients == CLASSES[data.name]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_file(path: Path) -> None:
    text = path.read_text()
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert f"furlong run configs/{path.parent.name}/{path.name}" in head[2]
    settings = config.load(path)
    assert settings.method["name"] == EXPECTED[f"{path.parent.name}/{path.stem}"]
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
    _check_name(path.stem.split("-"), settings)
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


LOCK: dict[str, str] = json.loads((Path(__file__).parent / "configs.lock.json").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_resolves_as_locked(path: Path) -> None:
    """The SHA-256 of every key, defaults included."""
    tree = json.dumps(asdict(config.load(path)), sort_keys=True)
    assert hashlib.sha256(tree.encode()).hexdigest() == LOCK[f"{path.parent.name}/{path.stem}"]
