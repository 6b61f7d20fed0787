"""Any protocols on a finished run, on a checkpoint, or on an exported encoder.

The rows that come out say under which settings: all of the protocol's, and by ``section.key`` those
of the run that were given anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from furlong.core.federation import Federation
from furlong.data.augment import preset
from furlong.devices import pick_device
from furlong.errors import FurlongError
from furlong.evaluation.protocol import Encoded, Images, Protocol
from furlong.evaluation.tuning import Transfer
from furlong.nn.encoders import build_encoder
from furlong.runs import checkpoint, config
from furlong.runs.config import Config, DataSettings
from furlong.runs.datasets import absolute, grouping, load_data
from furlong.runs.encoders import about as described
from furlong.runs.encoders import encoders, untrained, who
from furlong.runs.finetune import ClientImages, Federated
from furlong.runs.folder import RunFolder
from furlong.runs.holdout import HELD_OUT
from furlong.runs.prepare import prepare, workers
from furlong.runs.record import RunRecord
from furlong.runs.results import Result, mean_and_spread, protocols
from furlong.runs.saved_encoder import load_encoder, read_encoder
from furlong.runs.split import split_data
from furlong.seeding import seeded, threads

Tell = Callable[[str, int, int], None]
"""Called with a protocol, what is done of it and how much there is."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """The encoders of a run: one, or one of every client; and what there was before training."""

    encoders: dict[str, nn.Module]
    random: nn.Module  # of an exported file: any random one
    about: dict[str, Any]  # encoder, channels, image_size, augment
    mean: str | None = None  # of several encoders: what the mean of their rows is called
    before: str = "random"  # what the encoder before training is called


def settings_of(place: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """A run's settings, or those that an exported encoder suggests, with ``overrides``."""
    given = dict(overrides or {})
    if not place.is_file():
        if {"data", "data.name", "data.images"} & {*given}:  # k follows the images
            given.setdefault("evaluate.k", 0)
        return RunRecord.open(place).config(given)
    name = str(read_encoder(place)[0].get("data", "shapes"))
    if "data" not in given and "data.name" not in given:
        if ":" in name:
            raise FurlongError(
                f"{place} was trained on {name}: say which images, e.g. --data {name}"
            )
        given["data"] = name
    about = read_encoder(place)[0]
    for key in ("window", "slices"):  # as the images that it was trained on were read
        if key in about:
            given.setdefault(f"data.{key}", str(about[key]))
    return config.load(None, given)


def subject(place: Path, settings: Config, say: Say) -> Subject:
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
    return replace(found, before=untrained(own))


def _fresh(about: dict[str, Any], seed: int) -> nn.Module:
    with seeded(torch.device("cpu"), seed, "random encoder"):
        return build_encoder(about["encoder"], about["channels"], about["image_size"]).eval()


def _from_checkpoint(folder: RunFolder, own: Config, about: dict[str, Any], say: Say) -> Subject:
    """Of a run that goes on, or whose clients each have an encoder, of which it keeps but one."""
    saved = checkpoint.load(folder.path, say=say)
    begun = folder.path / "random.safetensors"
    prepared = prepare(own, training=False, saved=begun) if saved is not None else None
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
    about = described(prepared)
    return Subject(
        {f"{name}{when}": each for name, each in encoders(prepared, saved.server).items()},
        _fresh(about, own.run.seed),
        about,
        f"{who(own)}{when}" if own.run.bound == "single" else None,
    )


# ---------------------------------------------------------------- on which images


class Bench:
    """The encoders with the images that they are measured on.

    Images of the run's ``own`` set are those that it was trained on, whatever the seed is now.
    """

    def __init__(
        self, measured: Subject, settings: Config, own: Config | None, split: bool
    ) -> None:
        self.own, self._about = own, measured.about
        data = settings.data
        if own is not None and self._is_own(data.name) and data.holdout_by != own.data.holdout_by:
            raise FurlongError(
                f"data.holdout_by is {data.holdout_by}, but the run held out by "
                f"{own.data.holdout_by}, and its images stay on the side that they were on: leave "
                "it out, or name other images with --data."
            )
        self.settings = replace(settings, data=replace(data, name=absolute(data.name)))
        self.device = pick_device(settings.run.device)
        self.workers = workers(settings, self.device)
        self.held_out = False  # whether there is no test split
        self.images = self._load(split)
        self.whose = {
            name: encoder.to(self.device)
            for name, encoder in {measured.before: measured.random, **measured.encoders}.items()
        }
        self._encoded = {name: Encoded(each, self.images) for name, each in self.whose.items()}

    def _read(self, data: DataSettings) -> tuple[Images, list[str]]:
        """Images at the encoder's size; of the run's own set they are on the side they were."""
        channels, size = self._about["channels"], self._about["image_size"]
        data = replace(data, image_size=data.image_size or size, channels=channels)
        trained = self.own if self._is_own(data.name) else None
        train, test, notes = load_data(replace(self.settings, data=data), trained)
        if (train.channels, *train.size) != (channels, size, size):
            height, width = train.size
            remedy = f"--data.image-size {size}" if data.image_size != size else "another data set"
            raise FurlongError(
                f"the encoder takes {channels}×{size}×{size} images, those of {data.name} are "
                f"{train.channels}×{height}×{width}: give {remedy}."
            )
        views = preset(self._about["augment"], size)
        return Images(train, test, views, self.settings.run.seed), notes

    def _is_own(self, name: str) -> bool:
        return self.own is not None and absolute(name) == self.own.data.name

    def _load(self, split: bool) -> Images:
        """The images of the run or of another set; with who holds them only if that matters."""
        settings, own, data = self.settings, self.own, self.settings.data
        if not split:  # so that no partition can be impossible
            groups = grouping(settings)
            if own is not None and not self._is_own(data.name) and groups == grouping(own):
                groups = None  # those of the run's own set
            data = replace(data, partition="iid", group_by=groups)
        images, notes = self._read(data)
        self.held_out = any(HELD_OUT in note for note in notes)
        if not split:
            return images
        seed = own.run.seed if own is not None and self._is_own(data.name) else None
        return ClientImages(
            **vars(images),
            federation=Federation.of(images.train, split_data(settings, images.train, seed)),
            partition=data.partition,
            encoder=self._about["encoder"],
            device=self.device,
            workers=self.workers,
            server_threads=settings.train.server_threads,
        )

    def measured_on(self, protocol: Protocol) -> Images:
        """The images of a protocol; a transfer has its own."""
        if not isinstance(protocol, Transfer):
            return self.images
        counts = (protocol.images, protocol.test_images)
        return self._read(DataSettings(protocol.data, protocol.root, *counts, partition="iid"))[0]

    def encoded(self, name: str, images: Images) -> Encoded:
        """An encoder with ``images``; features of the run's images are computed once for all."""
        return self._encoded[name] if images is self.images else Encoded(self.whose[name], images)

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
            if name != "evaluate.k" or now[section][key]  # else it follows the images
        }


ACCURATE = ("knn", "linear", "linear-crops", "semi", "federated")  # on the run's images
MATTERS: dict[str, tuple[str, ...]] = {
    "data.name": (*ACCURATE, "quality"),
    "data.images": (*ACCURATE, "quality"),
    "data.test_images": ACCURATE,
    "data.group_by": ACCURATE,
    "data.holdout_by": ACCURATE,
    "data.window": (*ACCURATE, "quality"),
    "data.slices": (*ACCURATE, "quality"),
    "data.partition": ("federated",),
    "data.clients": ("federated",),
    "evaluate.k": ("knn",),
    "evaluate.temperature": ("knn",),
    "evaluate.probe": ("linear",),
    "run.seed": (*ACCURATE, "transfer", "quality"),
}
"""Which settings of a run matter to which protocols."""


# ---------------------------------------------------------------- rows


def evaluate(
    place: Path,
    settings: Config,
    words: str | None = None,
    *,
    random: bool = False,
    tell: Tell = lambda *_: None,
    say: Say = lambda _: None,
) -> list[Result]:
    """Rows of the protocols (default: kNN and linear probe); kept in a run's evaluations.json.

    ``random`` also measures the encoder before training with protocols that do not do so anyway.
    Where every client has an encoder of its own, all are measured, and the mean is a row, too.
    """
    asked = protocols(settings.evaluate, words)
    folder = None if place.is_file() else RunFolder.open(place)
    own = None if folder is None else folder.record.config()
    found: list[Result] = []
    with nullcontext() if folder is None else folder.locked():
        measured = subject(place, settings, say)
        with_clients = any(isinstance(protocol, Federated) for protocol in asked.values())
        bench = Bench(measured, settings, own, with_clients)
        images = {text: bench.measured_on(protocol) for text, protocol in asked.items()}
        for text, protocol in asked.items():  # mistakes show before the first hour of training
            protocol.check(images[text])
        if folder is None:
            _caveats(place, asked.values(), bench, random, say)
        for text, protocol in asked.items():
            names = list(measured.encoders)
            if protocol.with_random:
                names = [measured.before, *names]
            elif random:
                names = [*names, measured.before]
            rows = [_row(text, protocol, bench, name, images[text], tell) for name in names]
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


def _row(
    text: str, protocol: Protocol, bench: Bench, name: str, images: Images, tell: Tell
) -> Result:
    with threads(bench.workers):
        numbers = protocol.measure(bench.encoded(name, images), partial(tell, text))
    settings = {**protocol.settings(images), "seed": images.seed, **bench.changed(protocol.kind)}
    return {
        "who": name,
        "protocol": text,
        "labels": protocol.labels,
        **numbers,
        "data": protocol.data or bench.settings.data.name,
        "settings": settings,
    }


def _caveats(place: Path, asked: Iterable[Protocol], bench: Bench, random: bool, say: Say) -> None:
    """What an exported file cannot know, and a run folder does."""
    if random or any(protocol.with_random for protocol in asked):
        say(
            f"'random' is a random encoder of the same kind: {place} does not hold the one that "
            "training began with."
        )
    if bench.held_out:
        say(
            f"{bench.images.train.name} has no test split, and {place} does not say which images "
            "were held out when it was trained: if it was trained on these, it has seen some of "
            "the test images. Measure the run folder instead."
        )


def _require_finite(row: Result) -> None:
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise FurlongError(
                f"{row['protocol']} of {row['who']}: {name} is {value}. The encoder or what was "
                "trained on it has diverged."
            )


def _keep(folder: RunFolder, rows: Iterable[Result]) -> None:
    """Add rows to evaluations.json; what was measured again replaces what was there."""

    def key(row: Result) -> str:
        same = {k: row.get(k) for k in ("who", "protocol", "labels", "data", "settings")}
        return json.dumps(same, sort_keys=True)

    merged = {key(row): row for row in [*folder.record.evaluations, *rows]}
    folder.write("evaluations.json", list(merged.values()))
