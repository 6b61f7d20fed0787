"""The numbers that the papers print, and which of them belong beside a run.

``papers/results.csv`` has a line per printed accuracy, in our names; benchmarks/paper_results.py
made it and says by which rules. ``address`` names the row of ``furlong papers`` whose settings give
the number.

A number belongs beside a run if data set, partition, clients, encoder, method (with the fields that
an ablation names), bound, protocol and share of labels are the same. The address is no condition:
few runs have a paper's budget. ``budget`` says in words where a run had less or more.
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
    address: str

    @property
    def source(self) -> str:
        """Paper and table."""
        return f"{self.paper}, {self.table}"


@cache
def printed() -> tuple[Printed, ...]:
    """All of them, in the papers' order."""
    path = resources.files("furlong.papers").joinpath("results.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_read(line) for line in csv.DictReader(lines))


def at(address: str) -> list[Printed]:
    """What the papers print for a row; the paper that the number is from comes first."""
    found = [row for row in printed() if row.address == address]
    return sorted(found, key=lambda row: QUOTED in row.note)


def _read(line: Mapping[str, str]) -> Printed:
    whole = {k: int(line[k]) if line[k] else None for k in ("clients", "rounds", "epochs")}
    numbers = {"labels": float(line["labels"]), "accuracy": float(line["accuracy"])}
    std = float(line["std"]) if line["std"] else None
    return Printed(**{**line, **whole, **numbers, "std": std})  # type: ignore[arg-type]


def beside(settings: Mapping[str, Any], protocol: str, labels: float = 1.0) -> list[Printed]:
    """What the papers print for this run's settings (the tables of its config.toml).

    Nothing if the protocol had options of its own or was measured on other images, if the server
    merged otherwise than by the mean, or if not all clients took part: no paper did that.
    """
    word, target, options, elsewhere = parts(protocol)
    if options or elsewhere or not _as_published(settings):
        return []
    data, bound = settings["data"], settings["run"].get("bound", "none")
    found = [
        row
        for row in printed()
        if (row.protocol, row.target, row.data) == (_protocol(word), target, data["name"])
        and (row.method, row.bound or "none") == (settings["method"]["name"], bound)
        and row.encoder == settings["model"]["encoder"]
        and abs(row.labels - labels) < 1e-9
        and QUOTED not in row.note
        and (bound == "pooled" or _same_split(row, data))
        and _agrees(row.fields, settings)
    ]
    unique = {(row.paper, row.table, row.accuracy): row for row in found}
    return list(unique.values())


def _as_published(settings: Mapping[str, Any]) -> bool:
    rule = settings.get("server", {}).get("rule", "mean")
    return bool(rule == "mean" and settings["train"].get("fraction", 1.0) == 1)


def parts(protocol: str) -> tuple[str, str, list[str], str]:
    """A protocol's word, the set that it is transferred to, its options, and other images.

    ``semi-10:epochs=5 on cifar100`` -> ``semi-10``, nothing, ``epochs=5``, ``cifar100``.
    """
    name, elsewhere = protocol, ""
    if not protocol.startswith("transfer:"):
        name, _, elsewhere = protocol.partition(" on ")
    word, *more = name.split(":")
    target = ":".join(part for part in more if "=" not in part)
    return word, target, [part for part in more if "=" in part], elsewhere


def _protocol(word: str) -> str:
    """The papers' name of one of our protocols."""
    kind, dash, _ = word.partition("-")
    same = {"semi": "semi_central", "federated": "semi_federated", "linear": "linear"}
    return same.get(kind, word) if dash else word


def _same_split(row: Printed, data: Mapping[str, Any]) -> bool:
    same = row.partition in ("", data["partition"])
    return same and row.clients in (None, data.get("clients"))


def _agrees(fields: str, settings: Mapping[str, Any]) -> bool:
    """Whether the run has what ``fields`` names: ``update=online;model.early_norm=gn;drop!=0``.

    Normalisation layers are the encoder's own (bn) where a paper names no other.
    """
    if "early_norm" not in fields and settings["model"].get("early_norm", "bn") != "bn":
        return False
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


def budget(row: Printed, settings: Mapping[str, Any]) -> str:
    """Where the run had less or more than the paper, in words; empty if nowhere that is known."""
    train, whole = settings["train"], IMAGES.get(row.data)
    images = settings["data"].get("images")
    pairs = {"images": (images and whole and min(images, whole), whole)}
    if row.method != "random":  # which has not been trained
        epochs = (train["epochs"], row.epochs)
        pairs = {"rounds": (train["rounds"], row.rounds), "local epochs per round": epochs, **pairs}
    other = [
        f"{ours:,} instead of {theirs:,} {name}"
        for name, (ours, theirs) in pairs.items()
        if ours is not None and theirs is not None and ours != theirs
    ]
    return f"our run had {', '.join(other)}" if other else ""
