"""The procedural set: determinism, balance, and that only the outline tells the class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from furlong.data import shapes as module
from furlong.data.shapes import KINDS, shapes
from furlong.errors import FurlongError


def grid(reach: float) -> tuple[Tensor, Tensor]:
    """The planes x and y, 1×97×97."""
    axis = torch.linspace(-reach, reach, 97)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return x[None], y[None]


def test_form_of_the_set() -> None:
    images = shapes(50, size=24, classes=7)
    assert images.labels is not None
    assert images.pixels.shape == (50, 3, 24, 24)
    assert images.pixels.dtype == torch.uint8
    assert images.labels.dtype == torch.int64
    assert len(images) == 50
    assert images.classes == KINDS[:7]
    assert len(KINDS) == len(set(KINDS)) >= 20


def test_labels_are_balanced_in_random_order() -> None:
    labels = shapes(203, size=8).labels
    assert labels is not None
    counts = labels.bincount(minlength=10)
    assert counts.max() - counts.min() <= 1
    assert not torch.equal(labels[:10], labels[10:20])


def test_seed_and_split_decide() -> None:
    one, again = shapes(30, seed=1), shapes(30, seed=1)
    assert torch.equal(one.pixels, again.pixels)
    assert one.labels is not None
    assert again.labels is not None
    assert torch.equal(one.labels, again.labels)
    for other in (shapes(30, seed=2), shapes(30, seed=1, split="test")):
        assert (one.pixels == other.pixels).float().mean() < 0.1


def test_image_depends_on_neither_chunks_nor_set_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shapes(60)
    assert torch.equal(shapes(23).pixels, whole.pixels[:23])
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert torch.equal(shapes(60).pixels, whole.pixels)


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    shapes(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", KINDS)
def test_figures_fill_a_fair_part_of_the_frame(kind: str) -> None:
    x, y = grid(1.2)
    distance = module._FIGURES[kind](x, y)
    inside = distance < 0
    reach = torch.hypot(x, y)
    # The unit disk covers 55 % of this grid.
    assert 0.1 < inside.float().mean() < 0.55
    assert reach[inside].max() < 1.2
    # A distance grows by the step at most: the antialiased edge is then about a pixel wide.
    step = float(x[0, 0, 1] - x[0, 0, 0])
    assert distance.diff(dim=1).abs().max() <= step * 1.01
    assert distance.diff(dim=2).abs().max() <= step * 1.01


def test_figures_differ() -> None:
    x, y = grid(1.0)
    flat = torch.stack([(f(x, y) < 0).flatten() for f in module._FIGURES.values()]).float()
    overlap = flat @ flat.T
    union = flat.sum(1, keepdim=True) + flat.sum(1) - overlap
    assert ((overlap / union) - torch.eye(len(KINDS))).max() < 0.95


def test_colour_carries_no_class() -> None:
    images = shapes(2000, size=16)
    assert images.labels is not None
    means = images.pixels.float().mean((2, 3))
    per_class = torch.stack([means[images.labels == c].mean(0) for c in range(10)])
    # Standard error of a class mean of 200 images.
    assert ((per_class - means.mean(0)).abs() < 5 * means.std(0) / 200**0.5).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "at least 1"),
        ({"size": 4}, "too small"),
        ({"classes": len(KINDS) + 1}, "kinds of figures"),
        ({"classes": 0}, "kinds of figures"),
        ({"seed": -1}, "negative"),
        ({"split": "tset"}, "Did you mean 'test'"),
    ],
)
def test_refusals(arguments: dict[str, int | str], message: str) -> None:
    with pytest.raises(FurlongError, match=message):
        shapes(**arguments)  # type: ignore[arg-type]


def test_a_random_encoder_does_not_solve_it() -> None:
    """Learnable is shown by the demo; here, that the class is not in the pixels' surface."""
    from furlong.data.augment import preset
    from furlong.evaluation.features import features
    from furlong.evaluation.linear import linear_probe
    from furlong.nn.encoders import build_encoder

    plain = preset("shapes", 32).plain
    train, test = shapes(2000, seed=7), shapes(1000, seed=7, split="test")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = build_encoder("small")
    ours, theirs = (features(encoder, images.pixels, plain) for images in (train, test))
    accuracy = linear_probe(ours, train.labels, theirs, test.labels).accuracy
    assert 0.12 < accuracy < 0.35
