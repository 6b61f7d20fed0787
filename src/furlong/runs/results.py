"""The rows of results that summary.json and evaluations.json hold: who, by which protocol, what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from furlong.errors import FurlongError
from furlong.evaluation.features import features
from furlong.evaluation.knn import KNN
from furlong.evaluation.linear import Linear, LinearCrops
from furlong.evaluation.metrics import grade
from furlong.evaluation.protocol import Encoded, Images, Protocol, parse
from furlong.evaluation.quality import LabelFree
from furlong.evaluation.semi import Semi
from furlong.evaluation.tuning import Transfer
from furlong.runs.config import EvaluateSettings, build
from furlong.runs.finetune import Federated

Result = dict[str, Any]  # who, protocol, labels, accuracy, …
ACCURATE = ("knn", "linear", "linear-crops", "semi")  # kinds that need no other images
KINDS = (KNN, Linear, LinearCrops, Semi, Transfer, Federated, LabelFree)


def protocols(settings: EvaluateSettings, words: str | None = None) -> dict[str, Protocol]:
    """Those that ``words`` name, by default kNN and the linear probe, as the settings say."""
    probe = settings.probe
    usual: dict[str, dict[str, Any]] = {
        "knn": {"k": settings.k, "temperature": settings.temperature},
        "linear": {"recipe": "default" if probe == "none" else probe},
    }
    default = "knn" if probe == "none" else "knn,linear"
    return parse(default if words is None else words, KINDS, build, usual)


def final_rows(
    settings: EvaluateSettings,
    images: Images,
    encoders: Mapping[str, nn.Module],
    classifiers: Mapping[str, nn.Module],
) -> list[Result]:
    """The results of a run: of every encoder, and the mean of those of clients alone."""
    rows: list[Result] = []
    asked = at_the_end(settings, images)
    for whose, encoder in encoders.items():
        encoded = Encoded(encoder, images)
        scores = [
            {"protocol": name, "labels": each.labels, **each.measure(encoded)}
            for name, each in asked.items()
        ]
        if whose in classifiers:
            numbers = _right(classifiers[whose], images)
            scores.append({"protocol": "classifier", "labels": 1.0, **numbers})
        rows += [{"who": whose, **score} for score in scores]
    for protocol in sorted({row["protocol"] for row in rows}):
        rows += _mean_alone([row for row in rows if row["protocol"] == protocol])
    return rows


def on_site(rows: Iterable[Result], images: Images) -> list[Result]:
    """Rows measured on the test images of one site, which is named in the protocol."""
    name = images.labelled()[1].name
    return [{**row, "protocol": f"{row['protocol']} on {name}"} for row in rows]


def at_the_end(settings: EvaluateSettings, images: Images) -> dict[str, Protocol]:
    """The protocols that end a run; refuses those that cannot be measured on ``images``."""
    asked = protocols(settings)
    if settings.also:
        more = protocols(settings, settings.also)
        for name, each in more.items():
            if each.kind not in ACCURATE:
                raise FurlongError(
                    f"evaluate.also names {name}: a run can end with {', '.join(ACCURATE)}. "
                    f"Afterwards: furlong evaluate RUN --protocols {name}"
                )
            each.check(images)
        asked |= more
    return asked


def quality_rows(images: Images, encoders: Mapping[str, nn.Module]) -> list[Result]:
    """What needs no labels, of every encoder, and the mean of those of clients alone."""
    rows = []
    for who, encoder in encoders.items():
        with suppress(FurlongError):  # it has diverged, and the run is over all the same
            rows.append({"who": who, **LabelFree().measure(Encoded(encoder, images))})
    return [*rows, *_mean_alone(rows)]


def _mean_alone(rows: Sequence[Result]) -> list[Result]:
    """The row of the mean over clients that trained alone, if there are any."""
    alone = [row for row in rows if row["who"].endswith(" alone")]
    return [mean_and_spread(alone, "alone")] if alone else []


def _right(classifier: nn.Module, images: Images) -> dict[str, Any]:
    """The share of test images whose highest score is their class's, and what is beside it."""
    test = images.labelled()[1]
    assert test.labels is not None
    scores = features(classifier, test.pixels, images.augment.plain)
    right = float((scores.argmax(dim=1) == test.labels).double().mean())
    return {"accuracy": right, **grade(scores.softmax(dim=1), test, seed=images.seed)}


def mean_and_spread(rows: Sequence[Result], name: str) -> Result:
    """One row of ``name`` for those of several encoders: means, and of the accuracy ``std``.

    An interval tells how sure one encoder's number is; of a mean over encoders there is none.
    """
    merged = {k: v for k, v in rows[0].items() if k not in ("intervals", "resampled")}
    merged["who"] = name
    merged |= _means(rows)
    if "sites" in merged:
        each = [row["sites"] for row in rows]
        merged["sites"] = {
            site: {**numbers, **_means([sites[site] for sites in each])}
            for site, numbers in each[0].items()
        }
    if "collapsed" in merged:
        merged["collapsed"] = any(row["collapsed"] for row in rows)
    if "accuracy" in merged:
        merged["std"] = float(_column(rows, "accuracy").std()) if len(rows) > 1 else 0.0
    return merged


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of every number that is no count."""
    names = [k for k, v in rows[0].items() if isinstance(v, float) and k != "labels"]
    return {name: float(_column(rows, name).mean()) for name in names}


def _column(rows: Iterable[Mapping[str, Any]], key: str) -> torch.Tensor:
    return torch.tensor([row[key] for row in rows], dtype=torch.float64)
