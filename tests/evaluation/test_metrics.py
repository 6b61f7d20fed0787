"""Measures beside accuracy: known answers, scikit-learn's numbers, intervals over patients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from furlong.data.augment import preset
from furlong.data.images import ImageSet
from furlong.evaluation import metrics
from furlong.evaluation.features import features
from furlong.evaluation.knn import KNN, neighbours
from furlong.evaluation.linear import linear_probe
from furlong.evaluation.metrics import grade, measure
from furlong.evaluation.protocol import Encoded, Images, Protocol
from furlong.runs.config import EvaluateSettings
from furlong.runs.results import mean_and_spread, protocols


def images(labels: Tensor, **more: Any) -> ImageSet:
    return ImageSet(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels, **more)


def guesses(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores n×classes with ties that know something of the labels n, which are uneven."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    labels[: n // 3] = 0
    noise = torch.randn(n, classes, generator=generator)
    logits = noise + nn.functional.one_hot(labels, classes)
    return (2 * logits).round().div(2).softmax(dim=1).double(), labels


@pytest.mark.parametrize("classes", [2, 5])
def test_the_numbers_are_those_of_scikit_learn(classes: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    scores, labels = guesses(300, classes)
    found = measure(scores, labels, torch.ones(300, 1))
    truth = nn.functional.one_hot(labels, classes).numpy()
    wanted = {
        "accuracy": sklearn.accuracy_score(labels, scores.argmax(dim=1)),
        "balanced_accuracy": sklearn.balanced_accuracy_score(labels, scores.argmax(dim=1)),
        "auroc": sklearn.roc_auc_score(truth, scores, average="macro"),
        "average_precision": sklearn.average_precision_score(truth, scores, average="macro"),
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(wanted)


def test_a_weight_is_a_repetition() -> None:
    scores, labels = guesses(200, 3)
    weights = torch.randint(0, 4, (200, 6), generator=torch.Generator().manual_seed(1)).float()
    found = measure(scores, labels, weights)
    for column in range(6):
        rows = torch.repeat_interleave(torch.arange(200), weights[:, column].long())
        alone = measure(scores[rows], labels[rows], torch.ones(len(rows), 1))
        for name, values in found.items():
            assert float(values[column]) == pytest.approx(float(alone[name])), name


def test_always_the_larger_class_is_half_right() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    scores = torch.tensor([[0.9, 0.1]]).expand(100, 2)
    found = grade(scores, images(labels))
    assert found["balanced_accuracy"] == found["auroc"] == 0.5
    assert found["average_precision"] == pytest.approx(0.5)  # of 60 % and of 40 %
    assert found["intervals"]["balanced_accuracy"] == [0.5, 0.5]
    low, high = found["intervals"]["accuracy"]
    assert 0.45 < low < 0.55 < 0.65 < high < 0.75


def test_one_class_has_no_ranks() -> None:
    scores, labels = guesses(20, 2)
    found = grade(scores, images(torch.zeros_like(labels)))
    assert set(found) == {"balanced_accuracy", "intervals", "resampled"}


def test_intervals_are_over_patients_where_these_are_known() -> None:
    """Twenty slices of a patient are one patient: the interval is as wide as without copies."""
    scores, labels = guesses(40, 2)
    plain = grade(scores, images(labels))
    copies = torch.arange(40).repeat_interleave(20)
    test = images(labels[copies], patients=copies * 3)  # any numbers
    patients = grade(scores[copies], test)
    wrong = grade(scores[copies], replace(test, patients=None))
    assert patients["resampled"] == {"what": "patients", "units": 40, "resamples": 1000}
    assert wrong["resampled"] == {"what": "images", "units": 800, "resamples": 1000}
    for name in metrics.MEASURES:
        mine, same, narrow = (each["intervals"][name] for each in (patients, plain, wrong))
        assert mine == pytest.approx(same), name
        assert mine[1] - mine[0] > 3 * (narrow[1] - narrow[0]), name


def test_one_patient_has_no_interval_and_is_told() -> None:
    scores, labels = guesses(40, 2)
    found = grade(scores, images(labels, patients=torch.full((40,), 7)))
    assert "intervals" not in found
    assert found["resampled"] == {"what": "patients", "units": 1, "resamples": 0}


def test_images_of_unknown_patients_are_drawn_one_by_one_and_told() -> None:
    scores, labels = guesses(40, 2)
    mixed = torch.cat([torch.zeros(10), torch.arange(-30, 0)]).long()
    found = grade(scores, images(labels, patients=mixed))
    assert found["resampled"]["what"] == "patients and single images"
    assert found["resampled"]["units"] == 31
    found = grade(scores, images(labels, patients=torch.arange(-40, 0)))
    assert found["resampled"]["what"] == "images"


def test_an_interval_holds_its_number() -> None:
    """A plain percentile of average precision of rare classes lies above the number itself."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 100
    scores = torch.rand(400, 100, generator=generator).softmax(dim=1)
    found = grade(scores, images(labels))
    low, high = found["intervals"]["average_precision"]
    assert low < found["average_precision"] < high


def test_large_sets_are_resampled_less() -> None:
    scores, labels = guesses(6000, 10)
    assert grade(scores, images(labels))["resampled"]["resamples"] == 20_000_000 // 60_000


def test_every_site_by_itself() -> None:
    scores, labels = guesses(60, 2)
    sites = torch.arange(60) % 2
    test = images(labels, groups=sites, group_names=("DU", "EZ", "nobody"))
    found = grade(scores[:30], test, rows=torch.arange(30))
    assert [one["images"] for one in found["sites"].values()] == [15, 15]
    own = torch.arange(0, 30, 2)
    alone = measure(scores[own], labels[own], torch.ones(15, 1))
    assert list(found["sites"]) == ["DU", "EZ"]
    assert found["sites"]["DU"]["auroc"] == pytest.approx(float(alone["auroc"]))
    assert "sites" not in grade(scores, replace(test, group_names=("DU",), groups=0 * sites))


# ---------------------------------------------------------------- the protocols


def toy(n: int = 60) -> Images:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (2 * n,), generator=generator)
    noise = torch.randint(0, 120, (2 * n, 3, 4, 4), generator=generator)
    pixels = (noise + 12 * labels[:, None, None, None]).to(torch.uint8)
    sets = [
        ImageSet(pixels[part], labels[part], ("a", "b"), groups=torch.arange(n) % 3,
                 group_names=("x", "y", "z"), patients=torch.arange(n) // 4)
        for part in (slice(n), slice(n, 2 * n))
    ]  # fmt: skip
    return Images(sets[0], sets[1], preset("none", 4), 0)


class Pixels(nn.Module):
    """Means of the channels, and a little of the pixels."""

    out_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) * self.scale


@pytest.mark.parametrize(
    "word", ["knn", "linear", "linear-50", "linear-crops:epochs=2", "linear-crops-50:epochs=2",
             "semi-50:epochs=1:crops=false"]
)  # fmt: skip
def test_every_protocol_tells_them_of_the_right_images(word: str) -> None:
    """The measure of all sites together is that of all images, in whatever order they came."""
    (protocol,) = protocols(EvaluateSettings(), word).values()
    found = protocol.measure(Encoded(Pixels(), toy()))
    assert found["resampled"] == {"what": "patients", "units": 15, "resamples": 1000}
    each = found["sites"].values()
    assert sum(one["images"] for one in each) == 60
    total = sum(one["images"] * one["accuracy"] for one in each) / 60
    assert total == pytest.approx(found["accuracy"])
    low, high = found["intervals"]["accuracy"]
    assert low <= found["accuracy"] <= high
    assert ("labelled" in found) == (protocol.labels < 1)


def test_few_labels_are_those_of_fine_tuning() -> None:
    seen = toy(400)
    words = protocols(EvaluateSettings(), "linear-5,semi-5,linear,linear-5:epochs=7")
    linear, semi, whole, short = words.values()
    rows = linear.labelled(seen)  # type: ignore[attr-defined]
    assert torch.equal(seen.train.pixels[rows], semi.labelled(seen).pixels)  # type: ignore[attr-defined]
    assert whole.labelled(seen) is None  # type: ignore[attr-defined]
    assert linear.settings(seen)["epochs"] == 400  # one step each
    assert short.settings(seen)["epochs"] == 7
    assert whole.settings(seen)["epochs"] == 100
    encoded = Encoded(Pixels(), seen)
    few, all_ = (each.measure(encoded) for each in (linear, whole))
    assert few["labelled"] == len(rows)
    assert few["accuracy"] != all_["accuracy"]
    used = torch.tensor([row for row in encoded.rows[0].tolist() if row in rows.tolist()])
    assert seen.train.labels is not None
    own = features(Pixels(), seen.train.pixels[used], seen.augment.plain)
    _, _, *test = encoded.features
    same = linear_probe(own, seen.train.labels[used], *test, epochs=400)
    assert few["accuracy"] == same.accuracy
    assert linear.labels == 0.05


@pytest.mark.parametrize(
    ("count", "classes", "k"),
    [(540, 2, 54), (50_000, 100, 200), (2000, 10, 200), (500, 100, 5), (3, 2, 1)],
)
def test_k_follows_images_and_classes(count: int, classes: int, k: int) -> None:
    assert neighbours(count, classes) == k


def test_k_as_given_is_taken_as_it_is() -> None:
    seen = toy(60)
    assert KNN().settings(seen)["k"] == 6
    assert KNN(k=200).settings(seen)["k"] == 200
    encoded = Encoded(Pixels(), seen)
    automatic, same, all_ = (KNN(k=k).measure(encoded) for k in (0, 6, 200))
    assert automatic == same != all_


def test_a_mean_over_clients_has_no_interval() -> None:
    protocol: Protocol = KNN()
    rows = [
        {"who": f"client {k} alone", **protocol.measure(Encoded(Pixels(), toy(30 + 30 * k)))}
        for k in range(2)
    ]
    merged = mean_and_spread(rows, "alone")
    assert "intervals" not in merged
    assert merged["auroc"] == pytest.approx((rows[0]["auroc"] + rows[1]["auroc"]) / 2)
    site = [row["sites"]["y"]["accuracy"] for row in rows]
    assert merged["sites"]["y"]["accuracy"] == pytest.approx(sum(site) / 2)
    assert merged["sites"]["y"]["images"] == rows[0]["sites"]["y"]["images"]
