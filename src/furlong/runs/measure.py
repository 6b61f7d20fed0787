"""Any protocols on a finished run, on a checkpoint, or on an exported encoder.

A protocol is asked for by a word, with options behind colons: ``knn``, ``semi-10:epochs=5``,
``transfer:fashion_mnist:recipe=fedca``. The rows that come out say under which settings: all of the
protocol's, and by ``section.key`` those of the run that were given anew.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from furlong.data.images import ImageSet
from furlong.errors import FurlongError, nearest
from furlong.evaluation import (
    RECIPES,
    TuningResult,
    fine_tune,
    knn,
    linear_probe,
    linear_probe_crops,
    quality,
    semi_supervised,
    tuning,
)
from furlong.evaluation.semi import labelled_rows
from furlong.evaluation.tuning import TUNINGS, Tuning
from furlong.nn.encoders import build_encoder
from furlong.runs import checkpoint, config
from furlong.runs.config import Config, DataSettings, ModelSettings
from furlong.runs.finetune import FederatedTuning, federated_fine_tune, labelled
from furlong.runs.folder import RunFolder
from furlong.runs.loop import Evaluator, mean_and_spread
from furlong.runs.prepare import NO_SPLIT, Prepared, absolute, grouping, load_data, prepare, who
from furlong.runs.record import RunRecord
from furlong.runs.saved_encoder import load_encoder, read_encoder
from furlong.seeding import seeded, shuffled, threads

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
        _check(text, kind, share, options)
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


def _check(text: str, kind: str, share: float, options: Any) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if field.name == "momentum":
            fine, allowed = 0 <= value < 1, "at least 0 and below 1"
        else:
            fine, allowed = 0 < value < math.inf, "above 0 and finite"
        if not fine:
            raise FurlongError(f"protocol {text!r}: {field.name} is {value}; it must be {allowed}.")
    recipes = {"semi": {"fcl", *TUNINGS}, "transfer": set(TUNINGS)}.get(kind, set(RECIPES))
    recipe = getattr(options, "recipe", None)
    if recipe is not None and recipe not in recipes:
        raise FurlongError(f"protocol {text!r}: recipe {recipe!r}. {nearest(recipe, recipes)}")
    if isinstance(options, Tuned):
        try:
            _plan(options, share)
        except FurlongError as error:
            raise FurlongError(f"protocol {text!r}: {error}") from None


def parse(words: str) -> list[Protocol]:
    """Protocols separated by commas."""
    asked = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
    if not asked:
        raise FurlongError(f"--protocols names none. {nearest('', WORDS)}")
    try:
        return [Protocol.parse(word) for word in asked]
    except FurlongError as error:
        cut = re.search("transfer:(folder|parquet):", words) and "unknown" in str(error)
        hint = (
            " A path in --protocols cannot hold ',' or '=': make a link to it without these "
            "(ln -s) and name the link."
        )
        raise FurlongError(f"{error}{hint if cut else ''}") from None


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Subject:
    """The encoders of a run: one, or one of every client; and what there was before training."""

    encoders: dict[str, nn.Module]
    random: nn.Module  # of an exported file: any random one
    about: dict[str, Any]  # encoder, channels, image_size, augment
    mean: str | None = None  # of several encoders: what the mean of their rows is called


def settings_of(place: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """A run's settings, or those that an exported encoder suggests, with ``overrides``."""
    given = dict(overrides or {})
    if not place.is_file():
        return RunRecord.open(place).config(given)
    name = str(read_encoder(place)[0].get("data", "shapes"))
    if "data" not in given and "data.name" not in given:
        if ":" in name:
            raise FurlongError(
                f"{place} was trained on {name}: say which images, e.g. --data {name}"
            )
        given["data"] = name
    return config.load(None, given)


def subject(place: Path, settings: Config, say: Callable[[str], None]) -> Subject:
    """What is in a run folder (its encoders, else its last checkpoint) or an exported file."""
    if place.is_file():
        encoder, about = load_encoder(place), dict(read_encoder(place)[0])
        about |= {key: int(about[key]) for key in ("channels", "image_size")}
        return Subject({"encoder": encoder}, _fresh(about, settings.run.seed), about)
    folder = RunFolder.open(place)
    own, about = folder.record.config(), folder.record.encoder
    if about and own.run.bound != "single":
        found = Subject({who(own): load_encoder(place)}, _fresh(about, own.run.seed), about)
    else:
        found = _from_checkpoint(folder, own, about, say)
    folder.load_weights("random", found.random)
    return found


def _fresh(about: dict[str, Any], seed: int) -> nn.Module:
    with seeded(torch.device("cpu"), seed, "random encoder"):
        return build_encoder(about["encoder"], about["channels"], about["image_size"]).eval()


def _from_checkpoint(
    folder: RunFolder, own: Config, about: dict[str, Any], say: Callable[[str], None]
) -> Subject:
    """Of a run that goes on, or whose clients each have an encoder, of which it keeps but one."""
    saved = checkpoint.load(folder.path)
    prepared = prepare(own, training=False) if saved is not None else None
    total = 0 if prepared is None else len(prepared.server.exchanges())
    if about and (saved is None or saved.done < total):
        say(
            f"{folder.path} has lost its last checkpoint, and with it the encoders of all clients "
            "but client 0: what follows is of that one client, not the mean over clients."
        )
        alone = {"client 0 alone": load_encoder(folder.path)}
        return Subject(alone, _fresh(about, own.run.seed), about)
    if saved is None or prepared is None:
        raise FurlongError(
            f"{folder.path} has no encoder and no checkpoint yet: 'furlong resume {folder.path}' "
            "goes on with the run."
        )
    when = ""
    if not about:
        say(f"{folder.path} has not finished: measuring it after exchange {saved.done} of {total}.")
        when = f", exchange {saved.done} of {total}"
    setup = prepared.setup
    about = {
        "encoder": setup.encoder,
        "channels": setup.channels,
        "image_size": setup.image_size,
        "augment": prepared.config.data.augment,
    }
    return Subject(
        {f"{name}{when}": each for name, each in prepared.encoders(saved.server).items()},
        _fresh(about, own.run.seed),
        about,
        f"{who(own)}{when}" if own.run.bound == "single" else None,
    )


# ---------------------------------------------------------------- measuring


ACCURATE = ("knn", "linear", "linear-crops", "semi", "federated")  # on the run's images
MATTERS: dict[str, tuple[str, ...]] = {
    "data.name": (*ACCURATE, "quality"),
    "data.images": (*ACCURATE, "quality"),
    "data.test_images": ACCURATE,
    "data.group_by": ACCURATE,
    "data.partition": ("federated",),
    "data.clients": ("federated",),
    "evaluate.k": ("knn",),
    "evaluate.temperature": ("knn",),
    "evaluate.probe": ("linear",),
    "run.seed": tuple(OPTIONS),
}
"""Which settings of a run matter to which protocols."""


class Bench:
    """The encoders with the images that they are measured on."""

    def __init__(
        self, measured: Subject, settings: Config, own: Config | None, split: bool
    ) -> None:
        self.subject, self.own = measured, own
        name = absolute(settings.data.name)
        self.settings = replace(settings, data=replace(settings.data, name=name))
        self.prepared = _images_for(measured.about, settings, own, split)
        device = self.prepared.setup.device
        self.encoders = {name: each.to(device) for name, each in measured.encoders.items()}
        self.random = measured.random.to(device)
        self.train, self.augment = self.prepared.train, self.prepared.setup.augment
        self.seed = self.prepared.setup.seed
        self._embedded: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def changed(self, kind: str) -> dict[str, Any]:
        """Settings of the run, by ``section.key``, that are others here and matter to ``kind``."""
        if self.own is None:
            return {}
        now, then = (asdict(each) for each in (self.settings, self.own))
        return {
            name: now[section][key]
            for name, kinds in MATTERS.items()
            for section, key in [name.split(".")]
            if kind in kinds and now[section][key] != then[section][key]
        }

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


def _images_for(
    about: dict[str, Any], settings: Config, own: Config | None, split: bool
) -> Prepared:
    """The images, at the encoder's size; nothing of the method is needed, and often no split.

    Of the run's ``own`` set they are those that it was trained on, whatever the seed is now.
    """
    plain = config.from_tree({}, {"method": "fedsimclr"}, "options")
    images = replace(
        settings.data,
        augment=about["augment"],
        image_size=settings.data.image_size or about["image_size"],
        public=None,
    )
    other = own is not None and absolute(images.name) != own.data.name
    if not split:  # so that no partition can be impossible
        groups = grouping(settings)
        if own is not None and other and groups == grouping(own):
            groups = None  # those of the run's own set
        images = replace(images, partition="iid", clients=1, group_by=groups)
    prepared = prepare(
        replace(
            settings,
            method=plain.method,
            model=ModelSettings(about["encoder"]),
            data=images,
            run=replace(settings.run, bound="none", out=None),
        ),
        training=False,
        trained=None if other else own,
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
    Where every client has an encoder of its own, all are measured, and the mean is a row, too.
    """
    usual = "knn" if settings.evaluate.probe == "none" else "knn,linear"
    asked = parse(usual if protocols is None else protocols)
    say = say or (lambda _: None)
    folder = None if place.is_file() else RunFolder.open(place)
    own = None if folder is None else folder.record.config()
    found: list[Row] = []
    with nullcontext() if folder is None else folder.locked():
        measured = subject(place, settings, say)
        bench = Bench(measured, settings, own, any(p.kind == "federated" for p in asked))
        # what can be wrong with data and labels shows before the first hour of training
        jobs = [(protocol, _job(protocol, bench, random)) for protocol in asked]
        if folder is None:
            _caveats(place, asked, bench, random, say)
        for protocol, job in jobs:
            with threads(bench.prepared.workers):
                rows = list(job(_steps(protocol, tell)))
            if measured.mean is not None:
                each = [row for row in rows if row["who"] in measured.encoders]
                rows.append(mean_and_spread(each, measured.mean))
            for row in rows:
                if "data.name" in row["settings"]:
                    row["protocol"] += f" on {row['data']}"
                _require_finite(row)
            found += rows
            if folder is not None:
                _keep(folder, rows)
    return found


def _caveats(
    place: Path, asked: list[Protocol], bench: Bench, random: bool, say: Callable[[str], None]
) -> None:
    """What an exported file cannot know, and a run folder does."""
    if random or any(p.kind in ("transfer", "federated") for p in asked):
        say(
            f"'random' is a random encoder of the same kind: {place} does not hold the one that "
            "training began with."
        )
    if any(note.startswith(NO_SPLIT) for note in bench.prepared.notes):
        say(
            f"{bench.train.name} has no test split, and {place} does not say which images were "
            "held out when it was trained: if it was trained on these, it has seen some of the "
            "test images. Measure the run folder instead."
        )


def _require_finite(row: Row) -> None:
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise FurlongError(
                f"{row['protocol']} of {row['who']}: {name} is {value}. The encoder or what was "
                "trained on it has diverged."
            )


def _steps(protocol: Protocol, tell: Tell | None) -> Step:
    return (lambda *_: None) if tell is None else (lambda d, n: tell(protocol.text, d, n))


def _keep(folder: RunFolder, rows: Iterable[Row]) -> None:
    """Add rows to evaluations.json; what was measured again replaces what was there."""

    def key(row: Row) -> str:
        same = {k: row.get(k) for k in ("who", "protocol", "labels", "data", "settings")}
        return json.dumps(same, sort_keys=True)

    merged = {key(row): row for row in [*folder.record.evaluations, *rows]}
    folder.write("evaluations.json", list(merged.values()))


# ---------------------------------------------------------------- the protocols


Job = Callable[[Step], Iterator[Row]]


def _job(protocol: Protocol, bench: Bench, random: bool) -> Job:
    """The protocol with all that it needs, ready to go."""
    whose = bench.encoders | ({"random": bench.random} if random else {})
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
        "settings": {**settings, "seed": bench.seed, **bench.changed(protocol.kind)},
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


def _plan(options: Tuned, share: float) -> tuple[Tuning, dict[str, Any]]:
    """The fine-tuning that the options ask for, and as settings of a row."""
    recipe = options.recipe
    if recipe == "fcl":  # SwAV's rates for 1 % and for 10 %
        recipe = "fcl-1" if share < 0.05 else "fcl-10"
    own = {f.name: getattr(options, f.name) for f in fields(Tuned) if f.name != "recipe"}
    plan = tuning(recipe, **own)
    return plan, {"recipe": recipe, **{name: getattr(plan, name) for name in own}}


def _tuned(result: TuningResult) -> dict[str, Any]:
    return {
        "accuracy": result.accuracy,
        "train_accuracy": result.train_accuracy,
        "labelled": result.labelled,
    }


def _semi(protocol: Protocol, bench: Bench, whose: dict[str, nn.Module]) -> Job:
    plan, settings = _plan(protocol.options, protocol.share)
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
    plan, settings = _plan(protocol.options, protocol.share)
    train, test = _target(protocol, bench)
    settings |= {"images": len(train), "test_images": len(test)}

    def go(step: Step) -> Iterator[Row]:
        for name, encoder in {"random": bench.random, **bench.encoders}.items():
            result = fine_tune(
                encoder,
                train,
                test,
                plan,
                augment=bench.augment,
                seed=bench.seed,
                progress=step,
            )
            yield _row(protocol, bench, name, settings, **_tuned(result))

    return go


def _target(protocol: Protocol, bench: Bench) -> tuple[ImageSet, ImageSet]:
    """The images of a transfer; of the run's own set, they are on the side where they were."""
    given, about = protocol.options, bench.subject.about
    images = DataSettings(
        protocol.target, given.root, given.images, given.test_images, about["image_size"], "iid"
    )
    same = bench.own is not None and absolute(protocol.target) == bench.own.data.name
    train, test, _ = load_data(replace(bench.settings, data=images), bench.own if same else None)
    if train.channels != about["channels"]:
        raise FurlongError(
            f"the encoder takes {about['channels']} channel(s), the images of "
            f"{protocol.target} have {train.channels}: choose another set."
        )
    if test is None or test.labels is None:
        raise FurlongError(f"{protocol.target} has no labels: transfer needs them.")
    return train, test


def _federated(protocol: Protocol, bench: Bench, _: dict[str, nn.Module]) -> Job:
    plan: FederatedTuning = protocol.options
    prepared = replace(bench.prepared, test=bench.test)
    labelled(prepared.federation, protocol.share, bench.seed)
    split = prepared.config.data
    settings = {**asdict(plan), "partition": split.partition, "clients": split.clients}

    def go(step: Step) -> Iterator[Row]:
        for name, encoder in {"random": bench.random, **bench.encoders}.items():
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
