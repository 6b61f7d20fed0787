"""Who gets which images, and what can be said about it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from furlong.data.heterogeneity import beta_cib, beta_hetero, expected_false_negatives
from furlong.data.images import ImageSet
from furlong.data.partition import Partition, partition
from furlong.errors import FurlongError, nearest
from furlong.runs.config import WITHOUT, Config


def split_data(settings: Config, train: ImageSet, seed: int | None = None) -> Partition:
    """Who gets which images; ``seed`` is the run's if it is not given.

    An image with a weight is there as often as that says.
    """
    cut = partition(
        settings.data.partition,
        train.labels,
        client_count(settings),
        n=len(train),
        n_classes=train.n_classes or None,
        seed=settings.run.seed if seed is None else seed,
        groups=train.groups,
    )
    if train.weights is None:
        return cut
    rows = tuple(train.weighted(each) for each in cut.indices)
    if empty := [client for client, each in enumerate(rows) if not len(each)]:
        raise FurlongError(
            f"the weights leave client {empty[0]} without images ({len(empty)} client(s) in all): "
            "correct the column 'weight', or leave these rows out."
        )
    return replace(cut, indices=rows)


def site_names(train: ImageSet, split: Partition) -> list[str] | None:
    """What the clients are called: the natural owners of their images; ``None``: only numbers."""
    if split.name != "natural" or train.groups is None or not train.group_names:
        return None
    return [train.group_names[group] for group in torch.unique(train.groups).tolist()]


def left_out(settings: Config, train: ImageSet, split: Partition) -> int | None:
    """The client that the bound ``without:SITE`` leaves out, by its name or number."""
    bound = settings.run.bound
    if not bound.startswith(WITHOUT):
        return None
    site, names = bound.removeprefix(WITHOUT), site_names(train, split)
    if names is not None and site in names:
        return names.index(site)
    if site.isdecimal() and int(site) < len(split.indices):
        return int(site)
    known = names or [str(k) for k in range(len(split.indices))]
    raise FurlongError(f"run.bound is {bound!r}, but there is no such site. {nearest(site, known)}")


def client_count(settings: Config) -> int | None:
    """As given, else five; ``None`` if the partition's rule or the images decide."""
    d = settings.data
    by_itself = d.partition.startswith(("natural", "fcl_"))
    return 5 if d.clients is None and not by_itself else d.clients


def fingerprint(train: ImageSet, split: Partition) -> str:
    """A digest of the split, the labels and a sample of the images: are these the same data?"""
    digest = hashlib.sha256(str(tuple(train.pixels.shape)).encode())
    sample = torch.linspace(0, len(train) - 1, min(256, len(train))).long()
    for tensor in (*split.indices, train.labels, train.pixels[sample]):
        digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def describe_partition(train: ImageSet, split: Partition) -> dict[str, Any]:
    """Sizes, and with labels the class counts and the MFCL paper's two heterogeneity measures."""
    about: dict[str, Any] = {
        "partition": split.name,
        "clients": len(split.indices),
        "sizes": [len(rows) for rows in split.indices],
        "fingerprint": fingerprint(train, split),
    }
    if (names := site_names(train, split)) is not None:
        about["names"] = names
    if train.labels is not None:
        counts = split.class_counts(train.labels, train.n_classes)
        about |= {
            "classes": list(train.classes),
            "class_counts": counts.tolist(),
            "beta_cib": beta_cib(counts),
            "beta_hetero_m2": beta_hetero(counts, "M2"),
            "beta_hetero_mm1": beta_hetero(counts, "MM1"),
            "false_negatives": dict(
                zip(("local", "union", "remote"), expected_false_negatives(counts), strict=True)
            ),
        }
    return about
