"""How results are named as the columns of tables: by protocol, options, images and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from furlong.evaluation.linear import RECIPES
from furlong.reports import printed
from furlong.runs.config import is_place, short
from furlong.runs.record import Result

PROTOCOLS = {
    "knn": "kNN",
    "linear": "linear probe",
    "linear-crops": "linear probe on crops",
    "classifier": "own classifier",
    "semi": "tuned in one place",
    "federated": "tuned by the clients",
    "transfer": "transfer to",
}
Key = tuple[str, float]  # protocol and share of the labels


def measured_by(row: Result, settings: Mapping[str, Any]) -> str:
    """The protocol of a result, named with what was set otherwise than in the run.

    ``knn`` with ``--evaluate.k 1`` is ``knn:k=1``; other images are named too.
    """
    protocol, target, options, elsewhere = printed.parts(row.protocol)
    given, usual = row.settings, _usual(protocol, settings)
    other = {k: v for k, v in given.items() if k in usual and v != usual[k]}
    if "recipe" in other:  # which says the rest
        other = {k: v for k, v in other.items() if k in ("recipe", "seed")}
    for key, value in given.items():  # what the row says was given anew: data.images = 10
        nested = value if isinstance(value, Mapping) else {key: value} if "." in key else {}
        other |= {k: v for k, v in nested.items() if not _said(k, usual)}
    asked = {option.partition("=")[0] for option in options}
    words = [f"{k}={word(v)}".replace(":", " ") for k, v in other.items() if k not in asked]
    own = settings["data"].get("name")
    if not elsewhere and protocol != "transfer" and row.data not in (None, own):
        elsewhere = str(row.data)
    whole = ":".join([protocol, *filter(None, [target]), *options, *words])
    return f"{whole} on {elsewhere}" if elsewhere else whole


def _usual(protocol: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a protocol takes from the run's settings, if nothing else is asked for."""
    evaluate = settings.get("evaluate", {})
    usual: dict[str, Any] = {"seed": settings["run"].get("seed", 0)}
    if protocol == "knn":
        usual |= {k: evaluate.get(k) for k in ("k", "temperature")}
    elif protocol == "linear":
        probe = evaluate.get("probe", "none")
        usual["recipe"] = "default" if probe == "none" else probe
        recipe = asdict(RECIPES[usual["recipe"]]) if usual["recipe"] in RECIPES else {}
        usual |= {k: v for k, v in recipe.items() if k in ("epochs", "lr", "batch_size")}
    elif protocol.startswith("federated"):
        usual |= {k: settings["data"].get(k) for k in ("partition", "clients")}
    return usual


def _said(name: str, usual: Mapping[str, Any]) -> bool:
    """Whether no result depends on a setting, or the protocol's name tells it anyway."""
    key = name.partition(".")[2]
    told = key in usual or name in ("data.name", "evaluate.probe")
    return told or is_place(name)


def kind_of(protocol: str) -> str:
    """``semi`` of ``semi-10:epochs=5``."""
    word = printed.parts(protocol)[0]
    return word if word in PROTOCOLS else word.partition("-")[0]


def column_title(column: Key) -> str:
    """A protocol as a heading."""
    name, share = column
    word, target, options, elsewhere = printed.parts(name)
    title = PROTOCOLS.get(kind_of(name), word)
    title += f" {short(target)}" if target else ""
    title += f" on {short(elsewhere)}" if elsewhere else ""
    title += "".join(f", {option}" for option in options)
    return title if share == 1 else f"{title}, {100 * share:g} % of the labels"


def word(value: Any) -> str:
    """A setting's value."""
    if isinstance(value, list | tuple):
        return ", ".join(map(word, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
