"""Small pictures for a run's page: images of every site, and neighbours before and after training.

They are made only where they are asked for (``furlong report RUN --pictures``) and kept nowhere
but in the page: a page may leave the site, and images must not do so by themselves.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation.features import features
from furlong.nn.encoders import build_encoder
from furlong.runs.datasets import SITES, load_data
from furlong.runs.folder import RunFolder
from furlong.runs.saved_encoder import load_encoder
from furlong.runs.split import site_names, split_data
from furlong.seeding import shuffled

MOST_SITES, PER_SITE = 10, 8
QUERIES, NEIGHBOURS = 6, 5
BANK = 2000  # training images among which neighbours are looked for
LONGEST = 96  # pixels of the longer side


def pictures(run: Path) -> dict[str, Any]:
    """What the page of a finished run shows of its images; reads them again."""
    folder = RunFolder.open(run)
    settings = folder.record.config()
    if settings.data.name == SITES:
        raise FurlongError(
            f"{run} was trained on images that stayed on the nodes: there are none to show here."
        )
    train, test, _ = load_data(settings)
    split = split_data(settings, train)
    names = site_names(train, split) or [f"client {k}" for k in range(len(split.indices))]
    owner = torch.full((len(train),), -1)
    for client, rows in enumerate(split.indices):
        owner[rows] = client
    seed = settings.run.seed
    return {
        "sites": [
            _site(names[client], train, rows[shuffled(len(rows), seed, "pictures", client)])
            for client, rows in enumerate(split.indices[:MOST_SITES])
        ],
        "more": max(0, len(names) - MOST_SITES),
        "neighbours": neighbours_of(
            folder, train, test, [names[k] if k >= 0 else "" for k in owner.tolist()], seed
        ),
        "held_out": test is not None,
    }


def _site(name: str, train: ImageSet, rows: Tensor) -> dict[str, Any]:
    """The first of its images, by their rows."""
    first = rows[:PER_SITE].tolist()
    images = [{"image": data_uri(train.pixels[k]), "label": _label(train, k)} for k in first]
    return {"name": name, "count": len(rows), "images": images}


def neighbours_of(
    folder: RunFolder, train: ImageSet, test: ImageSet | None, whose: list[str], seed: int
) -> list[dict[str, Any]]:
    """Some images, each with those that were and those that are most like it."""
    learnt = load_encoder(folder.path)
    about: dict[str, Any] = folder.record.encoder
    random = build_encoder(about["encoder"], int(about["channels"]), int(about["image_size"]))
    folder.load_weights("random", random)
    transform: Callable[[Tensor], Tensor] = learnt.transform  # type: ignore[assignment]
    asked = train if test is None else test
    bank = shuffled(len(train), seed, "t-SNE")[:BANK]
    rows = _queries(asked, seed)
    near = [_nearest(one.eval(), transform, train, bank, asked, rows) for one in (random, learnt)]
    return [
        {
            "image": data_uri(asked.pixels[row]),
            "label": _label(asked, row),
            **{
                when: [
                    {
                        "image": data_uri(train.pixels[other]),
                        "label": _label(train, other),
                        "site": whose[other],
                        "same": _same(asked, row, train, other),
                    }
                    for other in bank[found[number]].tolist()
                ]
                for when, found in zip(("before", "after"), near, strict=True)
            },
        }
        for number, row in enumerate(rows.tolist())
    ]


def _queries(asked: ImageSet, seed: int) -> Tensor:
    """Rows of a few images: the classes in turn, so that a rare one is not left out."""
    order = shuffled(len(asked), seed, "queries")
    if asked.labels is None:
        return order[:QUERIES]
    labels = asked.labels[order]
    turn = torch.stack([(labels[: i + 1] == labels[i]).sum() for i in range(min(200, len(order)))])
    return order[turn.argsort(stable=True)[:QUERIES]]


def _nearest(
    encoder: nn.Module,
    transform: Callable[[Tensor], Tensor],
    train: ImageSet,
    bank: Tensor,
    asked: ImageSet,
    rows: Tensor,
) -> Tensor:
    """Places in ``bank`` of the most alike images, best first: one row for each of ``rows``.

    Neither the image itself nor another one of its patient: that would show no more than that a
    picture is like itself.
    """
    vectors = F.normalize(features(encoder, train.pixels[bank], transform), dim=1)
    queries = F.normalize(features(encoder, asked.pixels[rows], transform), dim=1)
    alike = queries @ vectors.T
    if asked is train:
        alike[rows[:, None] == bank] = -2
    if asked.patients is not None and train.patients is not None:
        alike[asked.patients[rows][:, None] == train.patients[bank]] = -2
    return alike.topk(min(NEIGHBOURS, len(bank)), dim=1).indices


def _label(images: ImageSet, row: int) -> str:
    if images.labels is None:
        return ""
    number = int(images.labels[row])
    return images.classes[number] if images.classes else str(number)


def _same(asked: ImageSet, row: int, train: ImageSet, other: int) -> bool | None:
    """Whether two images are of one class; ``None`` if that is not known."""
    if asked.labels is None or train.labels is None:
        return None
    return bool(asked.labels[row] == train.labels[other])


def data_uri(pixels: Tensor) -> str:
    """A data: URI of an image uint8 C×H×W; of other than 1 or 3 channels the first is shown."""
    shown = pixels if len(pixels) in (1, 3) else pixels[:1]
    array = np.ascontiguousarray(shown.permute(1, 2, 0).numpy())
    image = Image.fromarray(array if len(shown) == 3 else array[..., 0])
    image.thumbnail((LONGEST, LONGEST))
    return as_uri(image)


def as_uri(image: Image.Image) -> str:
    """Small images whole, as their pixels are looked at one by one; large ones as JPEG."""
    buffer = io.BytesIO()
    if max(image.size) <= LONGEST:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
