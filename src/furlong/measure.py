"""Any protocols on a finished run, on a checkpoint, or on an exported encoder.

A protocol is asked for by a word, with options behind colons: ``knn``, ``semi-10:epochs=5``,
``transfer:fashion_mnist:recipe=fedca``. The rows that come out say under which settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from furlong import checkpoint, config
from furlong.assemble import Prepared, prepare, who
from furlong.config import Config, ModelSettings
from furlong.data import images as data
from furlong.data.images import ImageSet
from furlong.errors import FurlongError, nearest
from furlong.evaluate import (
    RECIPES,
    TuningResult,
    knn,
    linear_probe,
    linear_probe_crops,
    quality,
    semi_supervised,
    transfer,
    tuning,
)
from furlong.evaluate.semi import labelled_rows
from furlong.evaluate.tuning import TUNINGS, Tuning
from furlong.experiment import Evaluator
from furlong.finetune import FederatedTuning, federated_fine_tune, labelled
from furlong.nets import build_encoder
from furlong.rounds import seeded, shuffled, threads
from furlong.runfolder import RunFolder, load_encoder, read_encoder

Row = dict[str, Any]
Step = Callable[[int, int], None]
Tell = Callable[[str, int, int], None]
"""Called with a protocol, what is done of it and how much there is."""


# ---------------------------------------------------------------- what is asked for


@dataclass(frozen=True)
class Knn:
    """None: as the run's settings say."""

    k: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Probe:
    """None: as the recipe says."""

    recipe: str | None = None
    epochs: int | None = None
    lr: float | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Tuned:
    """None: as the recipe says."""

    recipe: str = "fedu"
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    head_lr: float | None = None
    finetune: Literal["full", "head_bn"] | None = None
    head: Literal["linear", "mlp"] | None = None
    crops: bool | None = None


@dataclass(frozen=True)
class Transferred(Tuned):
    """Also where the other set lies and how much of it is used."""

    root: str | None = None
    images: int | None = None
    test_images: int | None = None


@dataclass(frozen=True)
class Unlabelled:
    """How many images are looked at."""

    images: int = 1000


OPTIONS: dict[str, type] = {
    "knn": Knn,
    "linear": Probe,
    "linear-crops": Probe,
    "semi": Tuned,
    "transfer": Transferred,
    "federated": FederatedTuning,
    "quality": Unlabelled,
}
WORDS = ("knn", "linear", "linear-crops", "semi-1", "semi-10", "transfer:NAME", "federated-10",
         "quality")  # fmt: skip


@dataclass(frozen=True)
class Protocol:
    """One protocol as it was asked for."""

    text: str  # what its rows are called: as given, without places on this machine
    kind: str
    share: float = 1.0  # of the labels
    target: str = ""  # the set of a transfer
    options: Any = None

    @classmethod
    def parse(cls, text: str) -> Protocol:
        """From ``semi-10:epochs=5``."""
        parts = text.split(":")
        given = dict(part.split("=", 1) for part in parts[1:] if "=" in part)
        target = ":".join(part for part in parts[1:] if "=" not in part)
        kind, share = _kind(parts[0], text)
        if (kind == "transfer") != bool(target):
            what = "needs a data set: transfer:NAME" if kind == "transfer" else "takes no data set"
            raise FurlongError(f"protocol {text!r} {what}.")
        try:
            options: Any = config.build(OPTIONS[kind], given, parts[0])
        except FurlongError as error:
            raise FurlongError(
                f"protocol {text!r}: {str(error).removeprefix('options: ')}"
            ) from None
        _check(text, kind, options)
        named = ":".join(part for part in parts if not part.startswith("root="))
        return cls(named, kind, share, target, options)


def _kind(word: str, text: str) -> tuple[str, float]:
    """The kind of protocol, and the share of the labels behind its dash."""
    kind, _, percent = word.partition("-")
    if kind in ("semi", "federated"):
        try:
            share = float(percent) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise FurlongError(
                f"protocol {text!r}: say how many percent of the labels, e.g. {kind}-10."
            )
        return kind, share
    if word not in OPTIONS:
        raise FurlongError(f"unknown protocol {text!r}. {nearest(word, WORDS)}")
    return word, 0.0 if word == "quality" else 1.0


def _check(text: str, kind: str, options: Any) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise FurlongError(f"protocol {text!r}: {field.name} is {value}; it must be above 0.")
    recipes = {"semi": {"fcl", *TUNINGS}, "transfer": set(TUNINGS)}.get(kind, set(RECIPES))
    recipe = getattr(options, "recipe", None)
    if recipe is not None and recipe not in recipes:
        raise FurlongError(f"protocol {text!r}: recipe {recipe!r}. {nearest(recipe, recipes)}")


def parse(words: str) -> list[Protocol]:
    """Protocols separated by commas."""
    asked = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
    if not asked:
        raise FurlongError(f"--protocols names none. {nearest('', WORDS)}")
    return [Protocol.parse(word) for word in asked]


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Subject:
    """An encoder, and the same before training."""

    who: str
    encoder: nn.Module
    random: nn.Module
    about: dict[str, Any]  # encoder, channels, image_size, augment


def settings_of(place: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """A run's settings, or those that an exported encoder suggests, with ``overrides``."""
    given = dict(overrides or {})
    if not place.is_file():
        RunFolder.open(place)
        return config.load(place / "config.toml", given)
    name = str(read_encoder(place)[0].get("data", "shapes"))
    if "data" not in given and "data.name" not in given:
        if ":" in name:
            raise FurlongError(
                f"{place} was trained on {name}: say which images, e.g. --data {name}"
            )
        given["data"] = name
    return config.load(None, given)


def subject(place: Path, settings: Config, say: Callable[[str], None]) -> Subject:
    """What is in a run folder (its encoder, else its last checkpoint) or an exported file."""
    if place.is_file():
        encoder, about = load_encoder(place), dict(read_encoder(place)[0])
        about |= {key: int(about[key]) for key in ("channels", "image_size")}
        return Subject("encoder", encoder, _fresh(about, settings.run.seed), about)
    folder = RunFolder.open(place)
    if folder.read("encoder.json") is not None:
        encoder, about = load_encoder(place), folder.read("encoder.json") or {}
        name = "client 0 alone" if settings.run.bound == "single" else who(settings)
    else:
        name, encoder, about = _unfinished(folder, say)
    random = _fresh(about, settings.run.seed)
    folder.load_weights("random", random)
    return Subject(name, encoder, random, about)


def _fresh(about: dict[str, Any], seed: int) -> nn.Module:
    with seeded(torch.device("cpu"), seed, "random encoder"):
        return build_encoder(about["encoder"], about["channels"], about["image_size"]).eval()


def _unfinished(
    folder: RunFolder, say: Callable[[str], None]
) -> tuple[str, nn.Module, dict[str, Any]]:
    saved = checkpoint.load(folder.path)
    if saved is None:
        raise FurlongError(
            f"{folder.path} has no encoder and no checkpoint yet: 'furlong resume {folder.path}' "
            "goes on with the run."
        )
    prepared = prepare(config.load(folder.path / "config.toml"), training=False)
    total = len(prepared.server.exchanges())
    say(f"{folder.path} has not finished: measuring it after exchange {saved.done} of {total}.")
    name, encoder = next(iter(prepared.encoders(saved.server).items()))
    setup = prepared.setup
    return (
        f"{name}, exchange {saved.done} of {total}",
        encoder,
        {
            "encoder": setup.encoder,
            "channels": setup.channels,
            "image_size": setup.image_size,
            "augment": prepared.config.data.augment,
        },
    )


# ---------------------------------------------------------------- measuring


class Bench:
    """One encoder with the images that it is measured on."""

    def __init__(self, measured: Subject, settings: Config, split: bool) -> None:
        self.subject = measured
        self.prepared = _images_for(measured.about, settings, split)
        device = self.prepared.setup.device
        self.encoder, self.random = measured.encoder.to(device), measured.random.to(device)
        self.train, self.augment = self.prepared.train, self.prepared.setup.augment
        self.seed = self.prepared.setup.seed
        self._embedded: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @cached_property
    def test(self) -> ImageSet:
        """The labelled test images."""
        if self.prepared.test is None or self.prepared.test.labels is None:
            raise FurlongError(
                f"{self.train.name} has no labels: accuracy cannot be measured. The protocol "
                "'quality' needs none."
            )
        return self.prepared.test

    def embedded(self, name: str, encoder: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features and labels of both splits, computed once."""
        if name not in self._embedded:
            self._embedded[name] = Evaluator(self.prepared).embed_all(encoder)
        return self._embedded[name]


def _images_for(about: dict[str, Any], settings: Config, split: bool) -> Prepared:
    """The images, at the encoder's size; nothing of the method is needed, and often no split."""
    plain = config.from_tree({}, {"method": "fedsimclr"}, "options")
    images = replace(
        settings.data,
        augment=about["augment"],
        image_size=settings.data.image_size or about["image_size"],
        public=None,
    )
    if not split:  # so that no partition can be impossible
        images = replace(images, partition="iid", clients=1)
    prepared = prepare(
        replace(
            settings,
            method=plain.method,
            model=ModelSettings(about["encoder"]),
            data=images,
            run=replace(settings.run, bound="none", out=None),
        ),
        training=False,
    )
    setup = prepared.setup
    if (setup.channels, setup.image_size) != (about["channels"], about["image_size"]):
        size = about["image_size"]
        raise FurlongError(
            f"the encoder takes {about['channels']}×{size}×{size} images, not "
            f"{setup.channels}×{setup.image_size}×{setup.image_size}; "
            + (
                f"give --data.image-size {size}."
                if setup.channels == about["channels"]
                else "choose another --data."
            )
        )
    return prepared


def evaluate(
    place: Path,
    settings: Config,
    protocols: str | None = None,
    *,
    random: bool = False,
    tell: Tell | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Row]:
    """Rows of the protocols (default: kNN and linear probe); kept in a run's evaluations.json.

    ``random`` also measures the encoder before training with protocols that do not do so anyway.
    """
    usual = "knn" if settings.evaluate.probe == "none" else "knn,linear"
    asked = parse(usual if protocols is None else protocols)
    folder = None if place.is_file() else RunFolder.open(place)
    found: list[Row] = []
    with nullcontext() if folder is None else folder.locked():
        measured = subject(place, settings, say or (lambda _: None))
        bench = Bench(measured, settings, any(p.kind == "federated" for p in asked))
        # what can be wrong with data and labels shows before the first hour of training
        jobs = [(protocol, _job(protocol, bench, random)) for protocol in asked]
        own = _own_data(place, bench)
        for protocol, job in jobs:
            with threads(bench.prepared.workers):
                rows = list(job(_steps(protocol, tell)))
            for row in rows:
                if protocol.kind != "transfer" and not own:
                    row["protocol"] += f" on {row['data']}"
            found += rows
            if folder is not None:
                _keep(folder, rows)
    return found


def _own_data(place: Path, bench: Bench) -> bool:
    """Whether the images are those that the run was trained on."""
    if place.is_file():
        return True
    return config.load(place / "config.toml").data.name == bench.prepared.config.data.name


def _steps(protocol: Protocol, tell: Tell | None) -> Step:
    return (lambda *_: None) if tell is None else (lambda d, n: tell(protocol.text, d, n))


def _keep(folder: RunFolder, rows: Iterable[Row]) -> None:
    """Add rows to evaluations.json; what was measured again replaces what was there."""

    def key(row: Row) -> str:
        same = {k: row.get(k) for k in ("who", "protocol", "labels", "data", "settings")}
        return json.dumps(same, sort_keys=True)

    merged = {key(row): row for row in [*folder.evaluations(), *rows]}
    folder.write("evaluations.json", list(merged.values()))


# ---------------------------------------------------------------- the protocols


Job = Callable[[Step], Iterator[Row]]


def _job(protocol: Protocol, bench: Bench, random: bool) -> Job:
    """The protocol with all that it needs, ready to go."""
    whose = {bench.subject.who: bench.encoder} | ({"random": bench.random} if random else {})
    maker: dict[str, Callable[[Protocol, Bench, dict[str, nn.Module]], Job]] = {
        "knn": _knn,
        "linear": _linear,
        "linear-crops": _linear_crops,
        "semi": _semi,
        "transfer": _transfer,
        "federated": _federated,
        "quality": _quality,
    }
    return maker[protocol.kind](protocol, bench, whose)


def _row(
    protocol: Protocol, bench: Bench, name: str, settings: dict[str, Any], **values: Any
) -> Row:
    return {
        "who": name,
        "protocol": protocol.text,
        "labels": protocol.share,
        **values,
        "data": protocol.target or bench.prepared.config.data.name,
        "settings": {**settings, "seed": bench.seed},
    }


def _knn(protocol: Protocol, bench: Bench, whose: dict[str, nn.Module]) -> Job:
    usual, given = bench.prepared.config.evaluate, protocol.options
    settings: dict[str, Any] = {
        "k": given.k or usual.k,
        "temperature": given.temperature or usual.temperature,
    }
    classes = max(bench.train.n_classes, bench.test.n_classes)

    def go(_: Step) -> Iterator[Row]:
        for name, encoder in whose.items():
            rows = bench.embedded(name, encoder)
            yield _row(
                protocol, bench, name, settings, accuracy=knn(*rows, **settings, n_classes=classes)
            )

    return go


def _linear(protocol: Protocol, bench: Bench, whose: dict[str, nn.Module]) -> Job:
    usual = bench.prepared.config.evaluate.probe
    given = asdict(protocol.options)
    given["recipe"] = given["recipe"] or ("default" if usual == "none" else usual)
    classes = max(bench.train.n_classes, bench.test.n_classes)

    def go(_: Step) -> Iterator[Row]:
        for name, encoder in whose.items():
            rows = bench.embedded(name, encoder)
            result = linear_probe(*rows, **given, seed=bench.seed, n_classes=classes)
            yield _row(protocol, bench, name, _probe(given), accuracy=result.accuracy)

    return go


def _linear_crops(protocol: Protocol, bench: Bench, whose: dict[str, nn.Module]) -> Job:
    given = asdict(protocol.options)
    given["recipe"] = given["recipe"] or "moco"
    given |= {"augment": bench.augment, "seed": bench.seed}
    test = bench.test

    def go(step: Step) -> Iterator[Row]:
        for name, encoder in whose.items():
            result = linear_probe_crops(encoder, bench.train, test, **given, progress=step)
            yield _row(protocol, bench, name, _probe(given), accuracy=result.accuracy)

    return go


def _probe(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a probe, written out."""
    recipe = asdict(RECIPES[given["recipe"]])
    written = {k: given[k] or recipe[k] for k in ("epochs", "lr", "batch_size")}
    return {"recipe": given["recipe"], **written}


def _plan(options: Tuned) -> tuple[Tuning, dict[str, Any]]:
    """The fine-tuning that the options ask for, and as settings of a row."""
    own = {f.name: getattr(options, f.name) for f in fields(Tuned) if f.name != "recipe"}
    plan = tuning(options.recipe, **own)
    return plan, {"recipe": options.recipe, **{name: getattr(plan, name) for name in own}}


def _tuned(result: TuningResult) -> dict[str, Any]:
    return {
        "accuracy": result.accuracy,
        "train_accuracy": result.train_accuracy,
        "labelled": result.labelled,
    }


def _semi(protocol: Protocol, bench: Bench, whose: dict[str, nn.Module]) -> Job:
    options = protocol.options
    if options.recipe == "fcl":  # SwAV's rates for 1 % and for 10 %
        options = replace(options, recipe="fcl-1" if protocol.share < 0.05 else "fcl-10")
    plan, settings = _plan(options)
    test = bench.test
    labelled_rows(bench.train, protocol.share, bench.seed)

    def go(step: Step) -> Iterator[Row]:
        for name, encoder in whose.items():
            result = semi_supervised(
                encoder,
                bench.train,
                test,
                protocol.share,
                plan=plan,
                augment=bench.augment,
                seed=bench.seed,
                progress=step,
            )
            yield _row(protocol, bench, name, settings, **_tuned(result))

    return go


def _transfer(protocol: Protocol, bench: Bench, _: dict[str, nn.Module]) -> Job:
    plan, settings = _plan(protocol.options)
    given, about = protocol.options, bench.subject.about
    load = {"root": given.root, "image_size": about["image_size"], "seed": bench.seed}
    train = data.load(protocol.target, "train", limit=given.images, **load)
    test = data.load(protocol.target, "test", limit=given.test_images, **load)
    for images in (train, test):
        if images.channels != about["channels"]:
            raise FurlongError(
                f"the encoder takes {about['channels']} channel(s), the images of "
                f"{protocol.target} have {images.channels}: choose another set."
            )
        if images.labels is None:
            raise FurlongError(f"{protocol.target} has no labels: transfer needs them.")
    settings |= {"images": len(train), "test_images": len(test)}

    def go(step: Step) -> Iterator[Row]:
        found = transfer(
            bench.encoder,
            train,
            test,
            random=bench.random,
            plan=plan,
            augment=bench.augment,
            seed=bench.seed,
            progress=step,
        )
        for name, which in (("random", "random"), (bench.subject.who, "encoder")):
            yield _row(protocol, bench, name, settings, **_tuned(found[which]))

    return go


def _federated(protocol: Protocol, bench: Bench, _: dict[str, nn.Module]) -> Job:
    plan: FederatedTuning = protocol.options
    prepared = replace(bench.prepared, test=bench.test)
    labelled(prepared.federation, protocol.share, bench.seed)
    split = prepared.config.data
    settings = {**asdict(plan), "partition": split.partition, "clients": split.clients}

    def go(step: Step) -> Iterator[Row]:
        for name, encoder in (("random", bench.random), (bench.subject.who, bench.encoder)):
            result = federated_fine_tune(encoder, prepared, protocol.share, plan, step)
            yield _row(protocol, bench, name, settings, **_tuned(result))

    return go


def _quality(protocol: Protocol, bench: Bench, whose: dict[str, nn.Module]) -> Job:
    rows = shuffled(len(bench.train), bench.seed, "quality")[: protocol.options.images]
    pixels, settings = bench.train.pixels[rows], {"images": len(rows)}

    def go(_: Step) -> Iterator[Row]:
        for name, encoder in whose.items():
            found = quality(encoder, pixels, bench.augment, bench.seed)
            yield _row(protocol, bench, name, settings, **asdict(found), collapsed=found.collapsed)

    return go
