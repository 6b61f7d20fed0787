"""A TOML file and options become frozen dataclasses, strictly: nothing unknown is passed over."""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from furlong.core.aggregation import ServerSettings
from furlong.core.context import OptimiserSettings
from furlong.core.method import AnyMethod, Method
from furlong.core.privacy import PrivacySettings
from furlong.core.secure.settings import SecureSettings
from furlong.data.reading import Reading
from furlong.errors import FurlongError, nearest
from furlong.evaluation.linear import RECIPES
from furlong.methods import METHODS, Row
from furlong.runs import papers
from furlong.settings import Fact, check, facts, setting

T = TypeVar("T")
RANDOM = "random"  # model.init of a run from nothing, where a method is usually begun otherwise
BOUNDS = ("none", "single", "pooled", "without:SITE")
WITHOUT = "without:"  # before the name or number of the site that is left out
GONE = ("run.state_memory_mb",)  # in files of earlier versions; it changed no result


@dataclass(frozen=True)
class MethodSettings:
    """The method; its own fields are of its class (``furlong methods NAME`` lists them)."""

    name: str = setting(
        "furlong", "Name of a method (see 'furlong methods'), or file.py:Class.", short="method"
    )


@dataclass(frozen=True)
class DataSettings:
    """Which images, and who holds them."""

    name: str = setting(
        "shapes",
        "shapes, cifar10, cifar100, fashion_mnist, mnist, stl10, mini_imagenet, folder:PATH, "
        "parquet:PATH, manifest:PATH, or sites: every node brings its own.",
        short="data",
        table=True,
    )
    root: str | None = setting(
        None,
        "Where a named set lies (else $FURLONG_DATA, else the Hub), or the files of a manifest; "
        "several folders with a colon between them (Windows: a semicolon).",
        role="place",
    )
    images: int | None = setting(
        None, "Use at most this many training images.", table=True, at_least=1
    )
    test_images: int | None = setting(
        None, "Use at most this many test images.", table=True, agree=False, at_least=1
    )
    validation: bool = setting(
        False,
        "Test on images held out of the training images (test_images of them, else a tenth) and "
        "leave the test split alone: for choosing settings.",
        table=True,
        agree=False,
    )
    image_size: int | None = setting(
        None, "Pixels of a side that images are brought to; none: as they are.", table=True
    )
    partition: str = setting(
        "classes:2",
        "iid[:stratified], classes:K, shards:K, mfcl:S[:sequential], dirichlet:A[:MIN], "
        "dirichlet_balanced:A, quantity:W,W,…, quantity:lognormal:S, quantity:powerlaw:P, natural.",
        short="partition",
        table=True,
    )
    clients: int | None = setting(
        None,
        "Number of clients; none: 5, or as many as the natural partition has.",
        short="clients",
        table=True,
        told=True,
        agree=False,
        at_least=1,
    )
    group_by: str | None = setting(
        None, "Natural partition: a column, or 'folder' (one per client).", table=True
    )
    holdout_by: str = setting(
        "auto",
        "What is kept together when images are held out: a column, folder:LEVEL (2: the folders "
        "below the first ones), or image; auto: patients where the data tell them, else images.",
        table=True,
        told=True,
        agree=False,
    )
    window: str = setting(
        "auto",
        "Values of images with more than 8 bits that become black and white: percentile, "
        "percentile:LOW:HIGH, full, LOW:HIGH; auto: a DICOM file's own, else percentiles 1 and 99.",
        table=True,
    )
    channels: int = setting(
        3,
        "Channels of an image: 3 (grey is repeated), 1 (colours become grey), or as many as all "
        "files have.",
        table=True,
        at_least=1,
        at_most=64,
    )
    slices: str = setting(
        "axial",
        "Slices of a volume (NIfTI): axial, coronal or sagittal; axial:3 is every third.",
        table=True,
    )
    augment: str = setting(
        "auto",
        "Augmentation; auto: the method's usual one (on shapes 'shapes' if that changes colours).",
    )
    public: str | None = setting(
        None,
        "A data set that the server may see, for methods that need one.",
        short="public",
        agree=False,
    )
    public_root: str | None = setting(None, "Where it lies, if not in data.root.", role="place")
    public_images: int | None = setting(
        None, "Use at most this many of it.", agree=False, at_least=1
    )
    strict: bool = setting(
        False, "Unreadable image files are errors.", role="watch", short="strict", agree=True
    )
    cache: str | None = setting(None, "Folder for decoded images.", role="place")

    @property
    def reading(self) -> Reading:
        """How image files are read."""
        return Reading(self.channels, self.window, self.slices)


@dataclass(frozen=True)
class ModelSettings:
    """The encoder."""

    encoder: str = setting(
        "small",
        "small, cnn5, resnet18, resnet50, efficientnet_lite0, vit_mini, vit_tiny, vit_small, "
        "vit_base (also vit_tiny_patch4), or module:factory, or file.py:factory.",
        short="encoder",
        table=True,
    )
    early_norm: Literal["bn", "gn", "pn", "all_gn"] = setting(
        "bn",
        "Normalisation after the first two convolutions; all_gn: group norms instead of every "
        "BatchNorm, in the heads too.",
    )
    init: str | None = setting(
        None,
        "Weights to start from: a run folder, a file .safetensors, .pt or .pth with the names of "
        "torchvision, timm, DINOv2 or MAE, hf:OWNER/NAME, scenes[:STEPS] (learnt from drawn images "
        "before the first round), or random.",
        short="init",
        told=False,
        agree=False,
    )
    init_mismatch: Literal["error", "allow"] = setting(
        "error",
        "What tensors of --init that do not fit the encoder are: an error, or left out.",
        told=False,
        agree=False,
    )
    freeze: int | str = setting(
        "none",
        "What of the encoder stays as --init gives it and is not sent: none, stem, a number of "
        "stages or blocks after the stem, or all.",
    )
    adapter: str = setting(
        "none",
        "none, or lora:RANK (lora:RANK:ALPHA): the encoder stays as --init gives it, and only "
        "low-rank matrices A and B beside its layers are trained and sent.",
    )
    adapter_average: Literal["factors", "products", "freeze_a"] = setting(
        "factors",
        "What the server merges: A and B each by itself; their products, factored again (exact up "
        "to the rank); or B alone with A fixed by the seed (exact).",
    )


@dataclass(frozen=True)
class TrainSettings:
    """How long, and with how many."""

    rounds: int = setting(40, "Rounds of communication.", short="rounds", table=True, at_least=1)
    epochs: int = setting(1, "Local epochs per round.", short="epochs", table=True, at_least=1)
    batch_size: int = setting(128, "Local batch size.", short="batch_size", at_least=2)
    fraction: float = setting(
        1.0,
        "Share of the clients that takes part in a round.",
        short="fraction",
        table=True,
        told=True,
        agree=False,
        above=0,
        at_most=1,
    )
    server_threads: int = setting(
        2,
        "Threads for training at the server (FedCA, MFCL); another number changes the last bits.",
        told=True,
        agree=False,
        at_least=1,
    )
    min_clients: int = setting(
        0,
        "Valid answers that an exchange needs (at most all); with fewer the run stops.",
        role="place",
        resume=True,
        told=True,
        at_least=0,
    )


@dataclass(frozen=True)
class EvaluateSettings:
    """The kNN monitor during training and the linear probe at the end."""

    knn_every: int = setting(
        0,
        "Exchanges (rounds for most methods) between two kNN monitors; 0: about twenty in a run, "
        "or as many as take a twenty-fifth of the training, but at least two.",
        role="watch",
        at_least=0,
    )
    k: int = setting(
        0,
        "Neighbours of the kNN; 0: a tenth of the images, at most a class's share and 200.",
        table=True,
        agree=False,
        at_least=0,
    )
    temperature: float = setting(
        0.1, "Temperature of the kNN's votes.", table=True, agree=False, above=0
    )
    monitor_images: int = setting(
        5000,
        "The monitor's bank is at most this large; the kNN at the end uses all images.",
        agree=False,
        at_least=1,
    )
    angles: int = setting(
        0,
        "Test images for the angles between two clients' models; 0: not measured.",
        role="watch",
        at_least=0,
    )
    probe: str = setting(
        "default",
        "Recipe of the linear probe (see docs/evaluate.md), or none.",
        table=True,
        agree=False,
    )
    also: str = setting(
        "",
        "More protocols at the end, as furlong evaluate names them: linear-1,linear-10,semi-1.",
        role="watch",
    )


@dataclass(frozen=True)
class RunSettings:
    """Where and how it runs."""

    seed: int = setting(
        0,
        "Determines everything: data split, initial weights, every batch.",
        short="seed",
        at_least=0,
        below=2**63,
    )
    workers: int = setting(
        0,
        "Worker processes (0: one per core on CPU); the result does not depend on it.",
        role="place",
        short="workers",
        resume=True,
        at_least=0,
    )
    device: str = setting(
        "auto", "auto, cpu, cuda, mps.", role="place", short="device", resume=True
    )
    engine: Literal["inprocess", "flower"] = setting(
        "inprocess",
        "inprocess, or flower: a simulation on Ray, or with --superlink a real federation.",
        role="place",
        short="engine",
    )
    out: str | None = setting(
        None, "Run folder (default: a new one below runs/).", role="place", short="out"
    )
    bound: str = setting(
        "none",
        "none, or single (every client alone), or pooled (all data in one place), or without:SITE "
        "(the federation of the others; SITE is a name of the natural partition, or a number).",
        short="bound",
    )
    track: str = setting(
        "",
        "Log to mlflow or wandb, too (both: separated by a comma); their own variables say where.",
        role="place",
        resume=True,
    )
    save_every: int = setting(1, "Rounds between checkpoints.", role="place", at_least=1)
    deadline: float = setting(
        0.0,
        "Seconds for one exchange, then it goes on without the others; 0: none.",
        role="place",
        resume=True,
        at_least=0,
    )


@dataclass(frozen=True)
class FlowerSettings:
    """Of run.engine = "flower"."""

    superlink: str | None = setting(
        None,
        "HOST:PORT of a SuperLink ('furlong superlink'); none: a simulation on Ray.",
        role="place",
        short="superlink",
        resume=True,
    )
    certs: str | None = setting(
        None, "DIR/server of 'furlong certs DIR'.", role="place", short="certs", resume=True
    )
    insecure: bool = setting(
        False,
        "No encryption and no authentication; on 127.0.0.1 only, for trials.",
        role="place",
        short="insecure",
        resume=True,
    )
    wait: float = setting(
        600.0, "Seconds for nodes to connect.", role="place", resume=True, above=0
    )
    encoding: Literal["exact", "float16", "int8"] = setting(
        "exact", "Of what travels; all but exact change the result.", agree=False
    )
    slice_mb: int = setting(
        64, "Larger payloads travel in several messages.", role="place", at_least=1
    )
    cpus: float = setting(1.0, "Simulation: cores per client.", role="place", resume=True, above=0)


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    method: dict[str, Any] = field(default_factory=lambda: asdict(MethodSettings()))
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    secure: SecureSettings = field(default_factory=SecureSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
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


@cache
def sections() -> dict[str, type]:
    """The tables of a file and their classes, in order."""
    return {**get_type_hints(Config), "method": MethodSettings}


@cache
def all_facts() -> dict[str, Fact]:
    """Every setting by ``section.key``; a method's own fields are :func:`facts` of its class."""
    return {
        f"{section}.{fact.name}": fact for section, cls in sections().items() for fact in facts(cls)
    }


SHORT = {fact.short: name for name, fact in all_facts().items() if fact.short}
"""Short options: ``rounds`` -> ``train.rounds``."""


def is_place(name: str) -> bool:
    """Whether no result depends on a setting: it says where and by which machinery to compute."""
    fact = all_facts().get(name)
    return fact is not None and fact.role == "place"


def resumable(config: Config) -> dict[str, Any]:
    """The settings, by ``section.key``, that may be given anew when a run goes on."""
    tree = asdict(config)
    names = [name.split(".") for name, fact in all_facts().items() if fact.resume]
    return {f"{section}.{key}": tree[section][key] for section, key in names}


def load(
    source: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    whole: bool = False,
) -> Config:
    """Defaults, then the TOML file, then ``section.key`` overrides; fields and values checked.

    ``whole``: the file says all that an earlier run had, see :func:`from_tree`.
    """
    tree = {} if source is None else read(source)
    where = "options" if source is None else str(source)
    return from_tree(tree, overrides or {}, where, whole=whole)


def read(source: str | Path) -> dict[str, Any]:
    """The tables of what a user named as CONFIG: a TOML file, or a paper's row (``paper:…``)."""
    if str(source).startswith(papers.PREFIX):
        return papers.tree(str(source).removeprefix(papers.PREFIX))
    try:
        return tomllib.loads(Path(source).read_text())
    except OSError as error:
        raise FurlongError(f"cannot read {source}: {error.strerror}") from None
    except ValueError as error:  # also TOMLDecodeError, UnicodeDecodeError
        raise FurlongError(f"{source} is not a TOML file: {error}") from None


def from_tree(
    tree: Mapping[str, Any], overrides: Mapping[str, Any], where: str, *, whole: bool = False
) -> Config:
    """A configuration from nested tables and ``section.key`` (or short) overrides.

    ``whole``: the tables are those of an earlier run. A setting that is newer than the run has the
    default of its class then, which is as it was, and not what the method is usually run with.
    """
    merged: dict[str, dict[str, Any]] = {}
    known = sections()
    for section, table in tree.items():
        if section == "methods":
            raise FurlongError(f"{where}: [methods.…] is for 'furlong compare'.")
        if section not in known:
            raise FurlongError(f"{where}: unknown section [{section}]. {nearest(section, known)}")
        if not isinstance(table, Mapping):
            raise FurlongError(f"{where}: {section} must be a table: write [{section}].")
        merged[section] = {k: v for k, v in table.items() if f"{section}.{k}" not in GONE}
    other = overrides.get("method", overrides.get("method.name"))
    if other is not None and other != merged.get("method", {}).get("name"):
        whole = False
        old = merged.pop("method", {})  # the file's fields are those of another method
        for row in (METHODS.get(str(old.get("name"))), METHODS.get(str(other))):
            for key in row.server if row else ():  # as is what its name says of the server
                merged.get("server", {}).pop(key, None)
    row = method_row(str(other or merged.get("method", {}).get("name", MethodSettings().name)))
    if _is_small(overrides.get("encoder", overrides.get("model.encoder"))):
        for key in row.cls.usual_small:  # the file's are for a larger encoder
            merged.get("method", {}).pop(key, None)
    for name, value in overrides.items():
        section, _, key = full_name(name).partition(".")
        merged.setdefault(section, {})[key] = value
    if not whole:
        _fill_usual(merged, row)
    method = {**asdict(MethodSettings()), **merged.get("method", {})}
    merged["server"] = _resolve_server(str(method["name"]), merged.get("server", {}), where)
    parts: dict[str, Any] = {
        section: build(cls, merged.get(section, {}), section, where)
        for section, cls in known.items()
        if section != "method"
    }
    config = Config(method=_resolve_method(method, where), **parts)
    _check(config)
    return config


def full_name(option: str) -> str:
    """``section.key`` of an option: ``batch-size`` is ``train.batch_size``."""
    name = option.replace("-", "_")
    section, dot, key = SHORT.get(name, name).partition(".")
    if not dot or section not in sections():
        valid = [*sections()] if dot else [n.replace("_", "-") for n in SHORT]
        wrong = section if dot else option
        raise FurlongError(f"unknown option --{option}. {nearest(wrong, valid)}")
    return f"{section}.{key}"


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


def _fill_usual(merged: dict[str, dict[str, Any]], row: Row) -> None:
    """What nobody has said is as the method is usually run; its name comes before its class."""
    usual = {**row.cls.usual, **{f"method.{key}": value for key, value in row.fields.items()}}
    if _is_small(merged.get("model", {}).get("encoder", ModelSettings().encoder)):
        usual |= {f"method.{key}": value for key, value in row.cls.usual_small.items()}
    # the rate of one optimiser means nothing to another
    own = str(usual.get("optimiser.name")).removesuffix("w")
    another = str(merged.get("optimiser", {}).get("name", own)).removesuffix("w") != own
    for name, value in usual.items():
        section, _, key = name.partition(".")
        if not (section == "optimiser" and another):
            merged.setdefault(section, {}).setdefault(key, value)


def _is_small(encoder: Any) -> bool:
    """Whether it is one of the encoders for a CPU, beside which heads are small, too."""
    return str(encoder).partition("_patch")[0] in ("small", "vit_mini")


def _resolve_method(given: dict[str, Any], where: str) -> dict[str, Any]:
    """The method's name and all its fields, written out."""
    name = str(given.pop("name"))
    cls = method_row(name).cls
    method = build(cls, given, "method", where)
    return {"name": name, **{fact.name: getattr(method, fact.name) for fact in facts(cls)}}


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
    known = {fact.name: fact for fact in facts(cls)}
    for key in values:
        if key not in known:
            raise FurlongError(f"{where}: unknown key {section}.{key}. {nearest(key, known)}")
    for key, fact in known.items():
        if key not in values and fact.default is MISSING:
            raise FurlongError(f"{where}: {section}.{key} must be given")
    made = cls(**{k: coerce(known[k].kind, v, f"{section}.{k}") for k, v in values.items()})
    check(made, section)
    return made


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
    """What the bounds of single fields cannot say."""
    link, probe = config.flower.superlink, config.evaluate.probe
    if link is not None and config.run.engine != "flower":
        raise FurlongError(f"flower.superlink is {link}, which needs --engine flower.")
    _ = config.data.reading  # refuses words that mean nothing
    recipes = {"none", *RECIPES}
    if probe not in recipes:
        raise FurlongError(f"evaluate.probe is {probe!r}. {nearest(probe, recipes)}")
    check_bound(config.run.bound, "run.bound")
    if config.run.bound.startswith(WITHOUT) and config.run.engine != "inprocess":
        raise FurlongError(
            f"run.bound is {config.run.bound!r}, which is for one machine. Across machines, start "
            "the run without that site's node instead."
        )


def check_bound(bound: str, where: str) -> None:
    """Refuse a word that is no bound; ``where`` names it."""
    named = bound.startswith(WITHOUT) and bound != WITHOUT
    if not named and bound not in BOUNDS[:-1]:
        raise FurlongError(f"{where}: unknown bound {bound!r}. {nearest(bound, BOUNDS)}")


def sends(bound: str) -> bool:
    """Whether clients send anything; alone and pooled they do not."""
    return bound not in ("single", "pooled")


def short(text: str) -> str:
    """A setting without the folders of this machine, which may say more than they should."""
    return ":".join(Path(part).name if part.startswith("/") else part for part in text.split(":"))


def without_none(value: Any) -> Any:
    """Tables without empty entries, as TOML has them."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return list(value) if isinstance(value, tuple) else value


def with_out(config: Config, out: Path) -> Config:
    """The same configuration with its run folder."""
    return replace(config, run=replace(config.run, out=str(out)))
