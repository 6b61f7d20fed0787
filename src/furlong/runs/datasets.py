"""Which images a configuration names: for training, for evaluation, and public ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from furlong.core.context import Shard
from furlong.data import images as data
from furlong.data.images import ImageSet, NoSplit
from furlong.errors import FurlongError
from furlong.runs.config import Config
from furlong.runs.holdout import hold_out, on_both_sides
from furlong.seeding import seed_of

SITES = "sites"  # the data's name when every node brings its own images


def load_data(
    settings: Config, trained: Config | None = None
) -> tuple[ImageSet, ImageSet | None, list[str]]:
    """Training images, images to measure on, and what to tell the user.

    Without labels nothing is measured on other images than those of training, unless
    ``data.holdout_by`` names what to hold out by.

    ``trained``: the settings of the run that an encoder of the same data comes from. Which images
    are taken and which are held out is then as it was there; ``settings`` can only ask for fewer
    of either side, or, of a set with a test split, for more training images.
    """
    d, own = settings.data, settings if trained is None else trained
    if d.name == SITES:
        raise FurlongError(
            "data.name is 'sites': the images are on the nodes of a real federation. Give "
            "--engine flower --superlink HOST:PORT, or another --data."
        )
    options: dict[str, Any] = {
        "root": d.root,
        "image_size": d.image_size,
        "strict": d.strict,
        "cache": d.cache,
        "group_by": grouping(settings) or grouping(own),
        "holdout_by": own.data.holdout_by,
        "how": d.reading,
        "seed": own.run.seed,
    }
    train = data.load(d.name, "train", limit=d.images, **options)
    notes = list(train.notes)
    if train.skipped:
        notes.append(skipped(train))
    if train.labels is None:
        notes.append("the images have no labels: no accuracy will be measured")
        if own.data.holdout_by in ("auto", "image"):
            return train, None, notes
    try:
        if own.data.validation:
            raise NoSplit
        size = train.size[0]
        test = data.load(d.name, "test", limit=d.test_images, **(options | {"image_size": size}))
    except NoSplit:
        if d.images != own.data.images:
            _refuse_more(d.images, own.data.images)
            train = data.load(d.name, "train", limit=own.data.images, **options)
        held, rest, words = hold_out(train, own)
        notes.append(words)
        rest = rest if d.images == own.data.images else rest[: d.images]
        test, train = train.subset(held[: d.test_images]), train.subset(rest.sort()[0])
    if said := on_both_sides(train, test):
        notes.append(said)
    return train, test, notes


def _refuse_more(asked: int | None, had: int | None) -> None:
    """Of a set without a test split: other images than the run's may be ones it was trained on."""
    if had is not None and (asked is None or asked > had):
        raise FurlongError(
            f"data.images is {'all' if asked is None else asked}, but the run took {had} images, "
            "and held its test images out of these, as there is no test split. Give "
            f"--data.images {had} or fewer."
        )


def skipped(images: ImageSet) -> str:
    """The files that could not be read, by name."""
    names = ", ".join(f"{s.name} ({s.reason})" for s in images.skipped[:10])
    more = ", …" if len(images.skipped) > 10 else ""
    return f"skipped {len(images.skipped)} unreadable file(s): {names}{more}"


def grouping(settings: Config) -> str | None:
    """By what the images are grouped: it also decides which folders are classes."""
    d = settings.data
    usual = {"folder": "folder", "parquet": "site", "manifest": "site"}
    natural = usual.get(d.name.partition(":")[0]) if d.partition == "natural" else None
    return d.group_by or natural


def absolute(name: str) -> str:
    """``folder:PATH`` so that a run can be resumed from another working directory."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).resolve()}" if colon else name


def absolute_roots(root: str) -> str:
    """``data.root``, likewise."""
    return os.pathsep.join(
        str(Path(each).expanduser().resolve()) for each in root.split(os.pathsep)
    )


def load_public(settings: Config, train: ImageSet) -> Shard:
    """The images that the server may see: never the clients' own, even where sets are drawn."""
    d = settings.data
    if absolute(str(d.public)) == absolute(d.name) != "shapes":
        raise FurlongError(
            f"--public {d.public} is the clients' own data: the server, and all clients, would see "
            "it. Choose another set."
        )
    shown = data.load(
        str(d.public),
        "train",
        root=d.public_root or d.root,
        image_size=train.size[0],
        limit=d.public_images,
        cache=d.cache,
        how=d.reading,
        seed=seed_of(settings.run.seed, "public") % 2**31,
    )
    if shown.channels != train.channels:
        raise FurlongError(
            f"the public images {d.public} have {shown.channels} channel(s), the clients' "
            f"{train.channels}: choose another --public."
        )
    return Shard(shown.unlabelled(), torch.arange(len(shown)))
