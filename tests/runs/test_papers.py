"""Every published setting has an address, and every address is a setting that runs.

``python tests/runs/test_papers.py`` writes src/furlong/papers/lock.json anew: right after a change
that is meant to change what papers' rows are run with (a default, say); its commit says why.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.data.augment import preset
from furlong.data.partition import partition
from furlong.errors import FurlongError
from furlong.nn.encoders import ENCODERS
from furlong.reports import printed
from furlong.runs import config, grid, papers

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "src/furlong/papers/lock.json"
CLASSES = {"cifar10": 10, "cifar100": 100, "mini_imagenet": 100, "fashion_mnist": 10}
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "mini_imagenet": 50_000, "fashion_mnist": 60_000}


@cache
def load(address: str, **options: Any) -> config.Config:
    return config.load(Path(f"paper:{address}"), options)


def digest(address: str) -> str:
    """SHA-256 of every key, defaults included."""
    tree = json.dumps(asdict(load(address)), sort_keys=True)
    return hashlib.sha256(tree.encode()).hexdigest()


# What the papers report: all combinations of the parts of an address, then what each row runs.
# Random weights (the tables of transfer) are part of every evaluation and need no run. FedU's
# Table 2 has few-label FedAvg from FedCA's Table 3.
CIFAR = ("cifar10", "cifar100")
THREE = (*CIFAR, "mini_imagenet")
FCL_SETS = (*CIFAR, "fashion_mnist")
SPLITS = ("iid", "noniid")
FEW = {"fedavg-1pct": "fedavg", "fedavg-10pct": "fedavg"}
Rows = tuple[str, tuple[tuple[str, ...], ...], dict[str, str]]


def same(*names: str) -> dict[str, str]:
    """Rows that are called like their method."""
    return {name: name for name in names}


BYOL = {"single": "fedbyol"}
NORMS = dict.fromkeys(("pn", "gn", "bn"), "mfcl")
MFCL = NORMS | same("fedavg", "fedprox", "moon", "fedswav", "fedsimclr", "orchestra")
TABLES: list[Rows] = [
    (
        "fedca/table2",
        (THREE, SPLITS, ("cnn5", "resnet50")),
        same("fedca", "fedsimclr", "fedae") | {"fedpr": "fedrot"},
    ),
    ("fedca/table3", (THREE, SPLITS, ("cnn5", "resnet50")), FEW),
    ("fedca/table5", (), dict.fromkeys(("beta-0.005", "beta-0.05", "beta-0.1"), "fedca")),
    (
        "fedca/figure5",
        (SPLITS,),
        {"i": "fedsimclr"} | dict.fromkeys(("ii", "iii", "iv", "v"), "fedca"),
    ),
    ("fedca/variants/cifar10/iid/cnn5", (), {"printed": "fedca"}),
    (
        "fcl/table1",
        (FCL_SETS, ("iid", "noniid1", "noniid2")),
        same("fedrot", "feddc", "fedswav", "fedsimclr", "fedca", "fedavg", "fcl"),
    ),
    ("fcl/table1", (FCL_SETS, ("iid",)), {"moco-centralised": "fedmoco"}),
    ("fcl/table3", (FCL_SETS, ("iid", "noniid1")), FEW),
    ("fcl/figure5", (), dict.fromkeys(("cl", "cl-ff", "cl-ff-nm"), "fcl")),
    ("fcl/variants/cifar10/noniid1", (), {"remote-only": "fcl"}),
    ("fedu/table1", (CIFAR, SPLITS, ("resnet18",)), same("fedu") | BYOL),
    (
        "fedu/table1",
        (CIFAR, SPLITS, ("resnet50",)),
        same("fedu", "fedsimclr", "fedca", "fedsimsiam", "fedavg") | BYOL,
    ),
    ("fedu/table1", (CIFAR, ("iid",), ("resnet50",)), {"centralised": "fedbyol"}),
    (
        "fedu/table3/mini_imagenet",
        (SPLITS, ("resnet50",)),
        same("fedu", "fedsimclr", "fedca") | BYOL,
    ),
    ("fedu/table3/mini_imagenet/iid/resnet50", (), {"centralised": "fedbyol"}),
    (
        "fedu/table4",
        (("online", "target"), ("online", "target", "both")),
        {"global": "fedu", "local": "fedu"},
    ),
    ("fedu/table4/online/online", (), {"dapu": "fedu"}),
    ("fedu/variants", (THREE, ("noniid",), ("resnet50",)), same("fedbyol")),
    ("fedu/variants/cifar10/noniid/resnet18", (), {"printed": "fedu"}),
    ("mfcl/table2/cifar10", (tuple(f"sc{s}" for s in range(1, 11)),), MFCL),
    ("mfcl/table3/cifar100", (tuple(f"sc{10 + s}" for s in (1, 2, 3, 10, 20, 60, 99, 100)),), MFCL),
    (
        "mfcl/table7/cifar10",
        (("sc2", "sc10"),),
        {"fedsimclr-gn": "fedsimclr", "fedsimclr-pn": "fedsimclr"},
    ),
    ("mfcl/variants/cifar10/sc2", (), {"pn-code": "mfcl", "gn-code": "mfcl"}),
]
EXPECTED = {
    "/".join((table, *parts, row)): method
    for table, choices, rows in TABLES
    for parts in product(*choices)
    for row, method in rows.items()
}


def test_every_row_has_an_address_and_every_address_a_row() -> None:
    assert len(papers.addresses()) == len(EXPECTED)
    assert set(papers.addresses()) == set(EXPECTED)


def _check_name(parts: list[str], settings: config.Config) -> None:
    """A row's settings are what its address says."""
    data, method = settings.data, settings.method["name"]
    assert data.name == next((p for p in parts if p in CLASSES), "cifar10")
    assert {"cnn5", "resnet50"}.isdisjoint(parts) or settings.model.encoder in parts
    bounds = {"single": "single", "centralised": "pooled", "moco-centralised": "pooled"}
    assert settings.run.bound == bounds.get(parts[-1], "none")
    if "iid" in parts:
        assert data.partition == "iid"
    if "noniid" in parts:
        assert data.partition == f"classes:{CLASSES[data.name] // 5}"
    if parts[-1].endswith("pct"):  # of the labels
        share = IMAGES[data.name] * int(parts[-1].split("-")[1].removesuffix("pct")) // 100
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


def client_count(settings: config.Config) -> int:
    """Of the split of a small set with as many classes."""
    data, classes = settings.data, CLASSES[settings.data.name]
    labels = torch.arange(classes).repeat(60)
    split = partition(
        data.partition, labels, data.clients, n=len(labels), n_classes=classes, seed=0
    )
    return len(split.indices)


@pytest.mark.parametrize("address", papers.addresses())
def test_row(address: str) -> None:
    settings = load(address)
    assert settings.method["name"] == EXPECTED[address]
    method = settings.make_method()
    assert settings.model.encoder in ENCODERS
    assert method.needs_public == (settings.data.public is not None)
    preset(settings.data.augment, 32)
    assert settings.data.clients in (None, client_count(settings))
    _check_name(address.split("/"), settings)
    # what a file sets is what its paper sets: nothing is left to a default that may change
    given = {key for keys in papers.tree(address).values() for key in keys}
    assert {"name", "partition", "augment", "encoder", "rounds", "epochs", "batch_size"} <= given


def test_origins_stay_with_the_values() -> None:
    """Of [P], [C] and [R] the one at the line that set the value last."""
    plain = papers.settings("mfcl/table2/cifar10/sc2/pn")["method"]
    large = papers.settings("mfcl/table3/cifar100/sc12/gn")["method"]
    code = papers.settings("mfcl/variants/cifar10/sc2/pn-code")["method"]
    assert plain["pairs_per_client"] == (32, "[C] 10 × 32 pairs in a batch")
    assert large["pairs_per_client"] == (3, "[R] 100 × 3 pairs, near the 320 of CIFAR-10")
    assert plain["statistics"][1].startswith("[R] after Figure 3")
    assert code["statistics"] == ("avg_moments", "[C]")
    ablation = papers.settings("fedca/table5/beta-0.05")["method"]
    assert ablation["alignment"] == (0.05, "[P]")
    ablation = papers.settings("fedu/table4/online/both/local")
    assert (ablation["method"]["threshold"], ablation["train"]["rounds"]) == (
        (0.2, "[P]"),
        (800, "[P]"),
    )


def test_paper_and_code_are_both_reachable() -> None:
    variant = load("fedu/variants/cifar10/noniid/resnet18/printed").method
    code = load("fedu/table1/cifar10/noniid/resnet18/fedu").method
    assert (variant["divergence"], variant["symmetric"]) == ("sq_l2", False)
    assert (code["divergence"], code["symmetric"]) == ("mean_conv_l2", True)
    code = load("mfcl/variants/cifar10/sc2/pn-code").method
    assert (code["statistics"], code["refresh"]) == ("avg_moments", "per_epoch")


def test_figure_5_of_fedca() -> None:
    """(i) is the paper's FedSimCLR; without ensembling the received model makes the rows."""
    rows = {row: f"fedca/figure5/iid/{row}" for row in ("i", "ii", "iii", "iv", "v")}
    assert digest(rows["i"]) == digest("fedca/table2/cifar10/iid/resnet50/fedsimclr")
    assert digest(rows["v"]) == digest("fedca/table2/cifar10/iid/resnet50/fedca")
    made: dict[str, Any] = {row: load(a).make_method() for row, a in rows.items() if row != "i"}
    assert {row: m.maker for row, m in made.items() if m.dictionary} == {
        "iii": "global",
        "iv": "local",
        "v": "local",
    }
    assert {row for row, m in made.items() if m.alignment} == {"ii", "v"}
    assert {m.align_reduction for m in made.values()} == {"sum"}


def test_small_budget_by_options() -> None:
    """The same row at a small budget: a small encoder takes small heads unless one is named."""
    address = "fedu/table1/cifar10/noniid/resnet18/fedu"
    small = load(address, encoder="small", rounds=2).method
    assert (small["projection_head"], small["prediction_head"]) == ("mlp:256:128:bn", "mlp:256:128")
    named = load(address, encoder="small", **{"method.projection_head": "proj_128"}).method
    assert named["projection_head"] == "proj_128"
    assert load(address).method["projection_head"] == "easyfl_proj"


# ---------------------------------------------------------------- the lock


def test_resolves_as_locked() -> None:
    locked = json.loads((resources.files("furlong") / "papers/lock.json").read_text())
    assert {address: digest(address) for address in papers.addresses()} == locked


# ---------------------------------------------------------------- the numbers


@cache
def as_written(address: str) -> dict[str, Any]:
    """The settings of a run as its folder has them."""
    settings = asdict(load(address))
    settings["data"]["clients"] = client_count(load(address))
    if address.endswith("pct"):  # the clients tune random weights
        settings["method"]["name"] = "random"
    return settings


def test_printed_numbers_belong_to_their_address() -> None:
    """A number is found by its address and, beside a run with these settings, by the settings."""
    for row in printed.printed():
        if not row.address:
            assert row.method == "random"
            continue
        paper = "fedca" if printed.QUOTED in row.note else row.paper.lower()
        assert row.address.startswith(f"{paper}/")
        settings = as_written(row.address)
        protocol = {
            "semi_central": f"semi-{100 * row.labels:g}",
            "semi_federated": f"federated-{100 * row.labels:g}",
            "transfer": f"transfer:{row.target}",
        }.get(row.protocol, row.protocol)
        found = [
            (r.paper.lower(), r.accuracy) for r in printed.beside(settings, protocol, row.labels)
        ]
        assert (paper, row.accuracy) in found or "swapped in print" in row.note, row


def test_rows_without_a_printed_number() -> None:
    tables = {"/".join(a.split("/")[:2]) for a in papers.addresses() if not printed.at(a)}
    # FedCA's text has no numbers of its Figure 5, FedU's tables none of DAPU at Table 4's settings
    # and, under its own settings, none of FedSimCLR and FedCA
    assert tables - {f"{paper}/variants" for paper in papers.papers()} == {
        "fedca/figure5",
        "fedu/table1",
        "fedu/table3",
        "fedu/table4",
    }


# ---------------------------------------------------------------- the commands


def test_lists(furlong_: Any) -> None:
    tables = furlong_("papers", "--json").json
    assert sum(table["rows"] for table in tables.values()) == 396
    assert tables["mfcl/table2"]["rows"] == 90
    shown = furlong_("papers").out
    assert all(place in shown for place in tables)
    assert furlong_("papers", "mfcl/table7").out.split() == papers.addresses("mfcl/table7/*")
    assert len(furlong_("papers", "fedu", "--json").json) == len(papers.addresses("fedu/*"))
    assert len(furlong_("papers", "*/cifar10/*/fedu").out.split()) == 4


def test_one_row_is_printed_as_a_file_that_gives_its_settings(furlong_: Any) -> None:
    for address in ("mfcl/table3/cifar100/sc12/gn", "fedca/table5/beta-0.05", "fcl/figure5/cl"):
        text = furlong_("papers", address).out
        assert config.from_tree(tomllib.loads(text), {}, "test") == load(address)
        assert f"paper:{address}" in text
        assert "[P]" in text.split("[method]")[1]
    assert "64.34 %" in furlong_("papers", "fedca/table5/beta-0.05").out
    found = furlong_("papers", "fedca/table5/beta-0.05", "--json").json
    assert found["settings"] == papers.tree("fedca/table5/beta-0.05")
    assert [number["accuracy"] for number in found["printed"]] == [0.6434]


@pytest.mark.parametrize(
    "words", ["papers ", "run paper:", "cost paper:", "compare --out x paper:"]
)
def test_a_wrong_address_names_the_nearest(furlong_: Any, words: str) -> None:
    result = furlong_(*f"{words}mfcl/table2/cifar10/sc4/pm".split())
    assert result.code == 2
    assert "mfcl/table2/cifar10/sc4/pn" in result.err


def test_a_table_without_a_row_is_no_configuration() -> None:
    with pytest.raises(FurlongError, match="no paper has the address"):
        load("mfcl/table2")
    with pytest.raises(FurlongError, match="no paper has the address"):
        load("")


def test_cost_of_a_row(furlong_: Any) -> None:
    address = "paper:fedu/table1/cifar10/noniid/resnet18/fedu"
    found = furlong_("cost", address, "--sizes", "10x5", "--rounds", "2", "--json").json
    assert len(found) == 2


def test_compare_takes_patterns(tmp_path: Path) -> None:
    cells = grid.grid([Path("paper:mfcl/table2/*/sc2/*")], [], 1, tmp_path, {"rounds": 1})
    assert [cell.settings.method["name"] for cell in cells] == [
        EXPECTED[address] for address in papers.addresses("mfcl/table2/*/sc2/*")
    ]
    assert cells[-1].folder == tmp_path / "mfcl-table2-cifar10-sc2-pn/mfcl/0"
    assert {cell.settings.train.rounds for cell in cells} == {1}


if __name__ == "__main__":
    found = {address: digest(address) for address in papers.addresses()}
    LOCK.write_text(json.dumps(found, indent=1) + "\n")
