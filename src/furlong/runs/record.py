"""A run folder read back: one typed record that tables, pages, cards and ``evaluate`` share.

Every file is read and checked when it is first asked for, so a run that goes on, or was
interrupted, has a record too. A damaged file is an error that names the file and the key.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args, get_origin, get_type_hints

from furlong.core.payload import Traffic
from furlong.errors import FurlongError
from furlong.evaluation.quality import QUALITY
from furlong.runs import config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
NEEDED = ("method.name", "data.name", "data.partition", "model.encoder", "train.rounds",
          "evaluate.k", "run.seed")  # fmt: skip

EVERY_RUN = ("exchange", "round", "loss", "knn", "seconds", "images_per_second", "images",
             "bytes_up", "bytes_down", "epsilon", *QUALITY)  # fmt: skip
"""What a line of metrics.jsonl has whatever the method is."""


DIGESTS = "digests.json"
"""SHA-256 of the files that a run depends on, by name."""


UNTRAINED = ("random", "initial")
"""What results call the encoder before training: random weights, or those that --init gave."""


@dataclass(frozen=True)
class Result:
    """One accuracy of summary.json or evaluations.json."""

    who: str
    protocol: str
    accuracy: float
    labels: float = 1.0  # the share of them that was used
    std: float | None = None  # over the clients, of a mean over them
    data: str | None = None  # the images that it was measured on
    settings: dict[str, Any] = field(default_factory=dict)
    balanced_accuracy: float | None = None
    auroc: float | None = None
    average_precision: float | None = None
    intervals: dict[str, list[float]] = field(default_factory=dict)  # by measure
    resampled: dict[str, Any] = field(default_factory=dict)  # what, units, resamples
    sites: dict[str, dict[str, float]] = field(default_factory=dict)  # measures by site


@dataclass(frozen=True)
class Features:
    """What summary.json says of an encoder's features without labels."""

    who: str
    effective_rank: float


@dataclass(frozen=True)
class Summary:
    """What a finished run wrote last."""

    who: str
    results: list[Result]
    clients: int
    images: int
    seconds: float
    images_per_second: float
    bytes_up: float
    bytes_down: float
    furlong: str
    weights_sha256: str
    rounds: int | None = None
    seed: int | None = None
    failures: int | None = None
    quality: list[Features] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    privacy: dict[str, Any] | None = None  # what was spent of a privacy budget
    held_out: str | None = None  # which images were, in words; None: the set has its own test split


@dataclass(frozen=True)
class Line:
    """One exchange, a line of metrics.jsonl."""

    exchange: int
    round: int
    up: Traffic
    down: Traffic
    bytes_up: float
    bytes_down: float
    clients: dict[str, dict[str, float]]
    kind: str = "train"
    failures: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)  # the whole line: loss, knn, angles, …

    @property
    def reasons(self) -> dict[str, float]:
        """The numbers that the method logs of itself; its ``explains`` says how to read them."""
        own = ((name, value) for name, value in self.metrics.items() if name not in EVERY_RUN)
        return {name: value for name, value in own if type(value) in (int, float)}


@dataclass(frozen=True)
class Split:
    """Who holds what: partition.json. Without labels there are no classes and no measures."""

    partition: str
    sizes: list[int]
    clients: int | None = None
    fingerprint: str | None = None
    names: list[str] | None = None  # of the sites
    classes: list[str] = field(default_factory=list)
    class_counts: list[list[int]] | None = None
    beta_cib: float = 0.0
    beta_hetero_m2: float = 0.0
    beta_hetero_mm1: float = 0.0
    false_negatives: dict[str, float] | None = None


@dataclass(frozen=True)
class Federation:
    """Who takes part in a run on Flower: federation.json."""

    run: str
    sites: list[dict[str, Any]]
    channels: int | None = None
    begun: bool = False


@dataclass(frozen=True)
class Plane:
    """Representations in the plane: tsne.json, or map.json (by principal components)."""

    points: list[list[float]]
    clients: list[int]
    classes: list[str]
    labels: list[int] | None = None
    file: str = ""  # the one that it was read from


# ---------------------------------------------------------------- checking


def parse(cls: type[T], found: Any, where: object) -> T:
    """A JSON object as a ``cls``; entries that the class does not have are left out."""
    if not isinstance(found, dict):
        raise damaged(where, "it is damaged")
    hints, values = get_type_hints(cls), {}
    for f in fields(cls):
        value = found.get(f.name)
        if value is not None:
            values[f.name] = _parsed(hints[f.name], value, where, f.name)
        elif f.default is MISSING and f.default_factory is MISSING:
            wrong = "is not what it should be" if f.name in found else "is missing"
            raise damaged(where, f"{f.name} {wrong}")
    return cls(**values)


def _parsed(hint: Any, value: Any, where: object, name: str) -> Any:
    if isinstance(hint, UnionType):
        hint = get_args(hint)[0]  # the other one is None
    if isinstance(hint, type) and is_dataclass(hint):
        return parse(hint, value, f"{where}, {name}")
    kind: Any = get_origin(hint) or hint
    wanted: Any = (int, float) if kind is float else kind
    if not isinstance(value, wanted):
        raise damaged(where, f"{name} is not what it should be")
    if kind is list and is_dataclass(get_args(hint)[0]):
        return [_parsed(get_args(hint)[0], item, where, name) for item in value]
    return value


def damaged(where: object, what: str) -> FurlongError:
    """The error of a file that somebody else has written or changed."""
    return FurlongError(f"{where} does not hold what furlong wrote: {what}.")


# ---------------------------------------------------------------- the record


@dataclass(frozen=True)
class RunRecord:
    """What the files of one run say, finished or not."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Self:
        """The record of a folder that must hold a run."""
        if not (path / "config.toml").exists():
            raise FurlongError(f"{path} is not a run folder: it has no config.toml.")
        return cls(path)

    # ------------------------------------------------------------ settings

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The sections of the configuration, plainly: a method of one's own is not imported."""
        tree: dict[str, dict[str, Any]] = self._read("config.toml", tomllib.loads)
        for name in NEEDED:
            section, _, key = name.partition(".")
            table = tree.get(section)
            if not isinstance(table, dict) or key not in table:
                raise FurlongError(
                    f"{self.path / 'config.toml'} is not the configuration of a run: {name} is "
                    "missing."
                )
        return tree

    def config(self, overrides: Mapping[str, Any] | None = None) -> config.Config:
        """The configuration, ready to be run again; imports a method of one's own."""
        self.verify("config.toml")
        return config.load(self.path / "config.toml", overrides, whole=True)

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.settings["method"]["name"])

    @property
    def bound(self) -> str:
        """``none`` for a federation."""
        return str(self.settings["run"].get("bound", "none"))

    @property
    def sends(self) -> bool:
        """Whether clients sent anything."""
        return config.sends(self.bound)

    @property
    def secured(self) -> bool:
        """Whether the server saw sums only; runs of an older furlong never had that."""
        return bool(self.settings.get("secure", {}).get("sums", False))

    @property
    def name(self) -> str:
        """The method, with its bound if it is one: ``fedu@pooled``."""
        return self.method if self.bound == "none" else f"{self.method}@{self.bound}"

    @property
    def seed(self) -> int:
        """Runs of one seed can be paired."""
        return int(self.settings["run"]["seed"])

    # ------------------------------------------------------------ what must not change

    def digests(self) -> dict[str, str]:
        """SHA-256 by file; runs of an older furlong have none."""
        known = self.read(DIGESTS)
        if not isinstance(known, dict | None):
            raise damaged(self.path / DIGESTS, "it is damaged")
        return known or {}

    def verify(self, name: str) -> None:
        """Refuse a file that is not as furlong wrote it."""
        digest, path = self.digests().get(name), self.path / name
        if digest is None or not path.exists():
            return
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            remedy = "Put back the file that the run wrote"
            if name == "config.toml":
                remedy += f", or begin a new run: furlong run {path} --out OTHER"
            raise FurlongError(
                f"{path} was changed or is damaged: its SHA-256 is not the one in {DIGESTS}. "
                f"{remedy}."
            )

    # ------------------------------------------------------------ what was written

    @cached_property
    def summary(self) -> Summary | None:
        """``None``: the run has not finished."""
        return self._parsed(Summary, "summary.json")

    @property
    def finished(self) -> Summary:
        """The summary of a run that must have finished."""
        if self.summary is None:
            raise FurlongError(
                f"{self.path} has not finished: 'furlong resume {self.path}' goes on with it."
            )
        return self.summary

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows that ``furlong evaluate`` has added since; some have no accuracy."""
        found = self.read("evaluations.json")
        rows = [] if found is None else found  # an empty object is damage, and is kept
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise damaged(self.path / "evaluations.json", "move it away")
        return rows

    @cached_property
    def results(self) -> list[Result]:
        """All accuracies: those of the run, then those that were measured since."""
        rows = [row for row in self.evaluations if row.get("accuracy") is not None]
        later = [parse(Result, row, self.path / "evaluations.json") for row in rows]
        return [*([] if self.summary is None else self.summary.results), *later]

    @property
    def ranks(self) -> dict[str, float]:
        """Whose encoder -> the effective rank of its features, when the run ended."""
        found = [] if self.summary is None else self.summary.quality
        return {one.who: one.effective_rank for one in found}

    @cached_property
    def split(self) -> Split | None:
        """Who holds what."""
        return self._parsed(Split, "partition.json")

    @cached_property
    def encoder(self) -> dict[str, Any]:
        """What encoder.json says of the encoder; empty before the run has finished."""
        found = self.read("encoder.json") or {}
        if not isinstance(found, dict):
            raise damaged(self.path / "encoder.json", "it is damaged")
        self.verify("encoder.json")
        return found

    @property
    def federation(self) -> Federation | None:
        """Who takes part in a run on Flower."""
        return self._parsed(Federation, "federation.json")

    @property
    def plane(self) -> Plane | None:
        """The representations in the plane: by t-SNE, if somebody asked for that."""
        name = "tsne.json" if (self.path / "tsne.json").exists() else "map.json"
        found = self._parsed(Plane, name)
        return None if found is None else replace(found, file=name)

    def lines(self) -> list[Line]:
        """The lines of metrics.jsonl, checked; read at every call, because they may be many.

        One that was cut off by a kill, or damaged, is left out: :attr:`damaged_lines` names it.
        """
        return self._lines()[0]

    def raw_lines(self) -> list[dict[str, Any]]:
        """The same as they are: all that say which exchange they are of."""
        return [line for _, line in self._objects()[0]]

    @property
    def damaged_lines(self) -> str:
        """Which lines :meth:`lines` leaves out, in words; empty if there are none."""
        numbers = self._lines()[1]
        some = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        where = self.path / "metrics.jsonl"
        return f"{where}: damaged lines are left out: {some}" if numbers else ""

    def _lines(self) -> tuple[list[Line], list[int]]:
        """The lines of metrics.jsonl, and the numbers of those that are damaged."""
        found, (objects, wrong) = [], self._objects()
        for number, line in objects:
            try:
                found.append(replace(parse(Line, line, self.path), metrics=line))
            except FurlongError:
                wrong.append(number)
        return found, sorted(wrong)

    def _objects(self) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
        """Number and JSON object of every line, and the numbers of lines that are none."""
        path = self.path / "metrics.jsonl"
        found, wrong = [], []
        for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
            try:
                line = json.loads(text)
                found.append((number, dict(line, exchange=int(line["exchange"]))))
            except (ValueError, TypeError, KeyError, RecursionError):
                wrong.append(number)
        return found, wrong

    def read(self, name: str) -> Any:
        """A JSON file as it is; ``None`` if it is not there."""
        return self._read(name, json.loads) if (self.path / name).exists() else None

    def _read(self, name: str, loads: Callable[[str], Any]) -> Any:
        try:
            return loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FurlongError(f"cannot read {self.path / name}: {error}") from None

    def _parsed(self, cls: type[T], name: str) -> T | None:
        found = self.read(name)
        return None if found is None else parse(cls, found, self.path / name)
