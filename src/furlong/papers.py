"""The numbers that the papers print, and which of them belong beside a run.

``paper_results.csv`` has a line per printed accuracy, in our names; benchmarks/paper_results.py
made it and says by which rules. A number belongs beside a run if data set, partition, clients,
encoder, method (with the fields that an ablation names), bound, protocol and share of labels are
the same. Budgets usually differ: ``shortfall`` says in words where a run had less than the paper.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "fashion_mnist": 60_000, "mini_imagenet": 50_000}
QUOTED = "quoted by"  # in a note: the number stands in another paper's table already


@dataclass(frozen=True)
class Printed:
    """One printed accuracy, as a fraction; empty texts and ``None``: the paper does not say."""

    paper: str
    table: str
    data: str
    target: str
    partition: str
    clients: int | None
    encoder: str
    method: str
    fields: str
    bound: str
    protocol: str
    labels: float
    accuracy: float
    std: float | None
    rounds: int | None
    epochs: int | None
    note: str

    @property
    def source(self) -> str:
        """Paper and table."""
        return f"{self.paper}, {self.table}"


@cache
def printed() -> tuple[Printed, ...]:
    """All of them, in the papers' order."""
    path = resources.files("furlong").joinpath("paper_results.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_read(line) for line in csv.DictReader(lines))


def _read(line: Mapping[str, str]) -> Printed:
    whole = {k: int(line[k]) if line[k] else None for k in ("clients", "rounds", "epochs")}
    numbers = {"labels": float(line["labels"]), "accuracy": float(line["accuracy"])}
    std = float(line["std"]) if line["std"] else None
    return Printed(**{**line, **whole, **numbers, "std": std})  # type: ignore[arg-type]


def beside(settings: Mapping[str, Any], protocol: str, labels: float = 1.0) -> list[Printed]:
    """What the papers print for this run's settings (the tables of its config.toml)."""
    protocol, target = _protocol(protocol)
    data, bound = settings["data"], settings["run"].get("bound", "none")
    found = [
        row
        for row in printed()
        if (row.protocol, row.target, row.data) == (protocol, target, data["name"])
        and (row.method, row.bound or "none") == (settings["method"]["name"], bound)
        and row.encoder == settings["model"]["encoder"]
        and abs(row.labels - labels) < 1e-9
        and QUOTED not in row.note
        and (bound == "pooled" or _same_split(row, data))
        and _agrees(row.fields, settings)
    ]
    unique = {(row.paper, row.table, row.accuracy): row for row in found}
    return list(unique.values())


def _protocol(name: str) -> tuple[str, str]:
    """Our protocol and the set that it is transferred to: ``transfer:cifar10``, ``semi-10``."""
    name, *more = name.split(":")
    target = ":".join(part for part in more if "=" not in part)  # semi-10:epochs=5
    kind, dash, _ = name.partition("-")
    same = {"semi": "semi_central", "federated": "semi_federated", "linear": "linear"}
    return (same.get(kind, name) if dash else name), target


def _same_split(row: Printed, data: Mapping[str, Any]) -> bool:
    same = row.partition in ("", data["partition"])
    return same and row.clients in (None, data.get("clients"))


def _agrees(fields: str, settings: Mapping[str, Any]) -> bool:
    """Whether the run has what ``fields`` names: ``update=online;model.early_norm=gn;drop!=0``."""
    for item in filter(None, fields.split(";")):
        name, _, wanted = item.partition("=")
        unequal = name.endswith("!")
        section, _, key = name.rstrip("!").rpartition(".")
        value = settings[section or "method"].get(key)
        if value is None or _equal(value, wanted) == unequal:
            return False
    return True


def _equal(value: Any, wanted: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) == float(wanted)
    return str(value).lower() == wanted


def shortfall(row: Printed, settings: Mapping[str, Any]) -> str:
    """Where the run had less than the paper, in words; empty if nowhere that is known."""
    train, images = settings["train"], settings["data"].get("images")
    ours = {"rounds": train["rounds"], "local epochs per round": train["epochs"], "images": images}
    theirs = {
        "rounds": row.rounds,
        "local epochs per round": row.epochs,
        "images": IMAGES.get(row.data),
    }
    less = [
        f"{ours[name]:,} instead of {wanted:,} {name}"
        for name, wanted in theirs.items()
        if wanted is not None and ours[name] is not None and ours[name] < wanted
    ]
    return f"our run had {', '.join(less)}" if less else ""
