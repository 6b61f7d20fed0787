"""A TOML file and options become frozen dataclasses, strictly: nothing unknown is passed over."""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from furlong.core.aggregation import ServerSettings
from furlong.core.context import OptimiserSettings
from furlong.core.method import AnyMethod, Method
from furlong.errors import FurlongError, nearest
from furlong.evaluation.linear import RECIPES
from furlong.methods import METHODS, Row

T = TypeVar("T")
Bound = Literal["none", "single", "pooled"]


@dataclass(frozen=True)
class DataSettings:
    """Which images, and who holds them."""

    name: str = "shapes"
    root: str | None = None  # where a named set lies; else $FURLONG_DATA, else the Hub
    images: int | None = None  # use at most this many training images
    test_images: int | None = None
    image_size: int | None = None
    partition: str = "classes:2"
    clients: int | None = None  # 5, or as many as the natural partition has
    group_by: str | None = None  # natural partition: a column, or "folder" (one per client)
    augment: str = "auto"  # the method's usual one; on shapes "shapes" if that changes colours
    public: str | None = None  # a data set that the server may see
    public_root: str | None = None  # where it lies, if not in ``root``
    public_images: int | None = None  # use at most this many of it
    strict: bool = False  # unreadable files are errors
    cache: str | None = None  # folder for decoded images


@dataclass(frozen=True)
class ModelSettings:
    """The encoder: a name, or ``module:factory`` / ``file.py:factory``."""

    encoder: str = "small"
    early_norm: Literal["bn", "gn", "pn"] = "bn"  # after the first two convolutions


@dataclass(frozen=True)
class TrainSettings:
    """How long, and with how many."""

    rounds: int = 20
    epochs: int = 1
    batch_size: int = 128
    fraction: float = 1.0
    server_threads: int = 2  # for training at the server (FedCA, MFCL); changes the last bits
    min_clients: int = 0  # valid answers that an exchange needs (at most all); else the run stops


@dataclass(frozen=True)
class EvaluateSettings:
    """The kNN monitor during training and the linear probe at the end."""

    knn_every: int = 0  # exchanges (rounds for most methods); 0: about twenty times in a run
    k: int = 200
    temperature: float = 0.1
    monitor_images: int = 5000  # the monitor's bank is at most this large; the last kNN uses all
    angles: int = 0  # test images for the angles between two clients' models; 0: not measured
    probe: str = "default"  # a recipe of furlong.evaluate.linear, or "none"


@dataclass(frozen=True)
class RunSettings:
    """Where and how it runs.

    ``workers``, ``out`` and the last three change no bit of the weights; the deadline only if
    a client misses it.
    """

    seed: int = 0
    workers: int = 0  # 0: one per core on CPU
    device: str = "auto"
    engine: Literal["inprocess", "flower"] = "inprocess"
    out: str | None = None
    bound: Bound = "none"  # single: every client alone; pooled: all data in one place
    save_every: int = 1  # rounds between checkpoints
    state_memory_mb: int = 4096  # client states beyond this go to disk
    deadline: float = 0.0  # seconds for one exchange, then it goes on without the others; 0: none


@dataclass(frozen=True)
class FlowerSettings:
    """Of run.engine = "flower". Only ``encoding`` changes a bit of the weights."""

    superlink: str | None = None  # HOST:PORT of a SuperLink; none: a simulation on Ray
    certs: str | None = None  # the folder "server" that 'furlong certs' made
    insecure: bool = False  # without TLS, on this machine only
    wait: float = 600.0  # seconds for nodes to connect
    encoding: Literal["exact", "float16", "int8"] = "exact"  # of what travels
    slice_mb: int = 64  # larger payloads travel in several messages
    cpus: float = 1.0  # simulation: cores per client


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedu"})
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    evaluate: EvaluateSettings = EvaluateSettings()
    run: RunSettings = RunSettings()
    flower: FlowerSettings = FlowerSettings()

    def make_method(self) -> AnyMethod:
        """The method with its fields."""
        given = {k: v for k, v in self.method.items() if k != "name"}
        row = method_row(self.method["name"])
        return build(row.cls, {**row.fields, **given}, "method")

    def toml(self) -> str:
        """The file that gives this configuration again."""
        return tomli_w.dumps(without_none(asdict(self)))


SMALL_HEADS = {
    "projection_head": "small_proj",
    "prediction_head": "small_pred",
    "decoder_width": 64,
}
SHORT = {
    "method": "method.name",
    "data": "data.name",
    "partition": "data.partition",
    "clients": "data.clients",
    "public": "data.public",
    "fraction": "train.fraction",
    "rounds": "train.rounds",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "encoder": "model.encoder",
    "seed": "run.seed",
    "workers": "run.workers",
    "device": "run.device",
    "engine": "run.engine",
    "superlink": "flower.superlink",
    "certs": "flower.certs",
    "insecure": "flower.insecure",
    "bound": "run.bound",
    "strict": "data.strict",
    "out": "run.out",
}


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Defaults, then the TOML file, then ``section.key`` overrides; fields and values checked."""
    tree = {} if path is None else read(path)
    return from_tree(tree, overrides or {}, str(path) if path else "options")


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # also TOMLDecodeError, UnicodeDecodeError
        raise FurlongError(f"{path} is not a TOML file: {error}") from None


def from_tree(tree: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Config:
    """A configuration from nested tables and ``section.key`` (or short) overrides."""
    merged: dict[str, dict[str, Any]] = {}
    sections = {f.name for f in fields(Config)}
    for section, table in tree.items():
        if section == "methods":
            raise FurlongError(f"{where}: [methods.…] is for 'furlong compare'.")
        if section not in sections:
            raise FurlongError(
                f"{where}: unknown section [{section}]. {nearest(section, sections)}"
            )
        if not isinstance(table, Mapping):
            raise FurlongError(f"{where}: {section} must be a table: write [{section}].")
        merged[section] = dict(table)
    other = overrides.get("method", overrides.get("method.name"))
    if other is not None and other != merged.get("method", {}).get("name"):
        old = merged.pop("method", {})  # the file's fields are those of another method
        for row in (METHODS.get(str(old.get("name"))), METHODS.get(str(other))):
            for key in row.server if row else ():  # as is what its name says of the server
                merged.get("server", {}).pop(key, None)
    if overrides.get("encoder", overrides.get("model.encoder")) == "small":
        for key in SMALL_HEADS:  # the file's are for a larger encoder
            merged.get("method", {}).pop(key, None)
    for name, value in overrides.items():
        dotted = SHORT.get(name.replace("-", "_"), name)
        section, dot, key = dotted.partition(".")
        if not dot or section not in sections:
            valid = [*sections] if dot else [n.replace("_", "-") for n in SHORT]
            wrong = section if dot else name
            raise FurlongError(f"unknown option --{name}. {nearest(wrong, valid)}")
        merged.setdefault(section, {})[key.replace("-", "_")] = value
    method = {"name": "fedu", **merged.get("method", {})}
    merged["server"] = _resolve_server(str(method["name"]), merged.get("server", {}), where)
    hints = get_type_hints(Config)
    parts = {
        section: build(hints[section], merged.get(section, {}), section, where)
        for section in sections - {"method"}
    }
    config = Config(method=_resolve_method(method, parts["model"].encoder, where), **parts)
    _check(config)
    return config


def method_row(name: str) -> Row:
    """The row of the table, or a user's class as ``module:Class`` or ``file.py:Class``."""
    if ":" in name:
        from furlong.plugins import load_object

        cls = load_object(name)
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise FurlongError(f"{name} is not a subclass of furlong.Method")
        return Row(cls, "own")
    if name not in METHODS:
        raise FurlongError(f"unknown method {name!r}. {nearest(name, METHODS)}")
    return METHODS[name]


def _resolve_method(given: dict[str, Any], encoder: str, where: str) -> dict[str, Any]:
    """The method's name and all its fields, written out."""
    name = str(given.pop("name"))
    row = method_row(name)
    known = [f.name for f in fields(row.cls)]
    defaults = dict(row.fields)
    if encoder == "small":  # the papers' heads are forty times larger than this encoder
        defaults |= {key: value for key, value in SMALL_HEADS.items() if key in known}
    method = build(row.cls, {**defaults, **given}, "method", where)
    return {"name": name, **{f: getattr(method, f) for f in known}}


def _resolve_server(name: str, given: dict[str, Any], where: str) -> dict[str, Any]:
    """The server's settings with those that the method's name stands for."""
    fixed = method_row(name).server
    for key, value in fixed.items():
        if given.get(key, value) != value:
            raise FurlongError(
                f"{where}: server.{key} is {given[key]!r}, but method {name} means {value!r}. "
                "Leave it out, or choose another method."
            )
    return {**fixed, **given}


def build(cls: type[T], values: Mapping[str, Any], section: str, where: str = "options") -> T:
    """An instance of a settings dataclass from plain values or from strings of the command line."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in values:
        if key not in known:
            raise FurlongError(f"{where}: unknown key {section}.{key}. {nearest(key, known)}")
    missing = [
        n
        for n, f in known.items()
        if n not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise FurlongError(f"{where}: {section}.{missing[0]} must be given")
    return cls(**{k: coerce(hints[k], v, f"{section}.{k}") for k, v in values.items()})


def coerce(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the annotated type, or an error that says what is allowed."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [arg for arg in get_args(hint) if arg is not type(None)]
        absent = value is None or (isinstance(value, str) and value.lower() == "none")
        if absent and len(options) < len(get_args(hint)):
            return None
        for option in options[:-1]:
            try:
                return coerce(option, value, name)
            except FurlongError:
                continue
        return coerce(options[-1], value, name)
    if origin is Literal:
        allowed = get_args(hint)
        for choice in allowed:
            if value == choice or str(value) == str(choice):
                return choice
        valid = nearest(str(value), map(str, allowed))
        raise FurlongError(f"{name} is {value!r}, which is not a choice. {valid}")
    if hint is bool:
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word in ("true", "yes", "on", "1"):
            return True
        if word in ("false", "no", "off", "0"):
            return False
        raise FurlongError(f"{name} is {value!r}; it must be true or false")
    if hint in (int, float):
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            try:
                number = hint(value) if not isinstance(value, float) else value
                if hint is float or number == int(number):
                    return hint(number)
            except (ValueError, OverflowError):
                pass
        kind = "a whole number" if hint is int else "a number"
        raise FurlongError(f"{name} is {value!r}; it must be {kind}")
    if hint is str and isinstance(value, str | Path):
        return str(value)
    if origin is tuple and isinstance(value, list | tuple | str):
        items = value.split(",") if isinstance(value, str) else value
        return tuple(coerce(get_args(hint)[0], item, name) for item in items)
    raise FurlongError(f"{name} is {value!r}, which is not {getattr(hint, '__name__', hint)}")


def _check(config: Config) -> None:
    train, data, run = config.train, config.data, config.run
    for name, value, low in (
        ("train.rounds", train.rounds, 1),
        ("train.epochs", train.epochs, 1),
        ("train.batch_size", train.batch_size, 2),
        ("train.server_threads", train.server_threads, 1),
        ("train.min_clients", train.min_clients, 0),
        ("data.clients", 1 if data.clients is None else data.clients, 1),
        ("run.workers", run.workers, 0),
        ("run.save_every", run.save_every, 1),
        ("run.state_memory_mb", run.state_memory_mb, 0),
        ("flower.slice_mb", config.flower.slice_mb, 1),
        ("evaluate.k", config.evaluate.k, 1),
        ("evaluate.knn_every", config.evaluate.knn_every, 0),
        ("evaluate.angles", config.evaluate.angles, 0),
        ("evaluate.monitor_images", config.evaluate.monitor_images, 1),
    ):
        if value < low:
            raise FurlongError(f"{name} is {value}; it must be at least {low}")
    if config.flower.superlink is not None and run.engine != "flower":
        link = config.flower.superlink
        raise FurlongError(f"flower.superlink is {link}, which needs --engine flower.")
    if not 0 <= run.seed < 2**63:
        raise FurlongError(f"run.seed is {run.seed}; it must be at least 0 and below 2**63")
    if not 0 < train.fraction <= 1:
        raise FurlongError(f"train.fraction is {train.fraction}; it must be above 0 and at most 1")
    if not 0 <= config.optimiser.momentum < 1:
        momentum = config.optimiser.momentum
        raise FurlongError(f"optimiser.momentum is {momentum}; it must be at least 0 and below 1")
    for name, number in (
        ("optimiser.weight_decay", config.optimiser.weight_decay),
        ("run.deadline", run.deadline),
    ):
        if not 0 <= number < math.inf:
            raise FurlongError(f"{name} is {number}; it must be at least 0 and finite")
    for name, number in (
        ("flower.wait", config.flower.wait),
        ("flower.cpus", config.flower.cpus),
        ("optimiser.lr", config.optimiser.lr),
        ("evaluate.temperature", config.evaluate.temperature),
    ):
        if not 0 < number < math.inf:
            raise FurlongError(f"{name} is {number}; it must be above 0 and finite")
    recipes = {"none", *RECIPES}
    if config.evaluate.probe not in recipes:
        probe = config.evaluate.probe
        raise FurlongError(f"evaluate.probe is {probe!r}. {nearest(probe, recipes)}")


def without_none(value: Any) -> Any:
    """Tables without empty entries, as TOML has them."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return list(value) if isinstance(value, tuple) else value


def with_out(config: Config, out: Path) -> Config:
    """The same configuration with its run folder."""
    return replace(config, run=replace(config.run, out=str(out)))
