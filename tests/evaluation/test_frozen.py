"""Evaluation: the encoder survives it, the numbers match slow references, nonsense is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from furlong.errors import FurlongError
from furlong.evaluation.angles import angles
from furlong.evaluation.features import features
from furlong.evaluation.knn import knn, knn_votes
from furlong.evaluation.linear import RECIPES, linear_probe
from furlong.nn.encoders import build_encoder


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(n: int, classes: int = 4, dim: int = 8, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """``n`` features around the first axes, label = axis; small spread = linearly separable."""
    labels = torch.arange(n) % classes
    return torch.eye(dim)[labels] + spread * draw(n, dim, seed=n), labels


def plain(batch: Tensor) -> Tensor:
    return batch.float() / 255


def test_features_leave_the_encoder_as_it_was() -> None:
    torch.manual_seed(0)
    encoder = build_encoder("small")
    encoder.get_submodule("bn2").eval()
    pixels = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8)
    state = {key: value.clone() for key, value in encoder.state_dict().items()}
    flags = [part.training for part in encoder.modules()]
    h = features(encoder, pixels, plain, batch_size=4)
    assert h.shape == (10, 192)
    assert h.dtype == torch.float32
    assert not h.requires_grad
    assert [part.training for part in encoder.modules()] == flags
    assert all(torch.equal(state[key], value) for key, value in encoder.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in encoder.parameters())
    with torch.no_grad():
        torch.testing.assert_close(h, encoder.eval()(plain(pixels)))


def test_features_of_batches_and_of_modules_without_parameters() -> None:
    images = draw(7, 3, 4, 4)
    h = features(nn.Flatten(), (b for b in torch.split(images, 3)), None)
    assert torch.equal(h, images.flatten(1))
    assert torch.equal(features(nn.Identity(), draw(5, 2)), draw(5, 2))


def test_features_can_be_trained_on() -> None:
    weight = nn.Parameter(torch.ones(3))
    (features(nn.Identity(), draw(5, 3)) @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("pixels", [[], draw(2, 3, 4, 4)])
def test_features_must_be_rows(pixels: Tensor | list[Tensor]) -> None:
    with pytest.raises(FurlongError, match="N×d"):
        features(nn.Identity(), pixels)


def slow_knn(train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float) -> list[int]:
    predicted = []
    for row in test:
        similarity = [float(row @ other / row.norm() / other.norm()) for other in train]
        nearest = sorted(range(len(train)), key=lambda i: -similarity[i])[:k]
        votes = [0.0] * (1 + int(labels.max()))
        for i in nearest:
            votes[int(labels[i])] += math.exp(similarity[i] / temperature)
        predicted.append(votes.index(max(votes)))
    return predicted


@pytest.mark.parametrize("k", [1, 7, 30, 1000])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_knn_equals_the_loop(k: int, temperature: float) -> None:
    train, labels, test = draw(30, 5), torch.arange(30) % 3, draw(20, 5, seed=1)
    expected = slow_knn(train, labels, test, k, temperature)
    for block in (1, 100, 1 << 25):
        votes = knn_votes(train, labels, test, k, temperature, block=block)
        assert votes.argmax(dim=1).tolist() == expected
    truth = torch.arange(20) % 3
    hits = sum(a == b for a, b in zip(expected, truth.tolist(), strict=True))
    accuracy = knn(train, labels, test, truth, k, temperature)
    assert accuracy == pytest.approx(hits / 20)


def test_knn_of_the_train_set_with_one_neighbour_is_perfect() -> None:
    x, y = draw(200, 16), torch.arange(200) % 7
    assert knn(x, y, x, y, k=1) == 1
    assert knn(x, y, x, y, k=1, temperature=1e-4) == 1


def test_knn_ignores_scale_and_follows_class_permutations() -> None:
    x, y, test = draw(60, 5), torch.arange(60) % 4, draw(40, 5, seed=1)
    predicted = knn_votes(x, y, test, k=9).argmax(dim=1)
    scale = draw(60, 1, seed=2).exp()
    assert torch.equal(knn_votes(scale * x, y, 17 * test, k=9).argmax(dim=1), predicted)
    permutation = torch.tensor([2, 0, 3, 1])
    moved = knn_votes(x, permutation[y], test, k=9).argmax(dim=1)
    assert torch.equal(moved, permutation[predicted])


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_probe_solves_a_separable_toy(recipe: str) -> None:
    result = linear_probe(*blobs(400), *blobs(100), recipe=recipe)
    assert result.accuracy == result.train_accuracy == 1


@pytest.mark.parametrize("recipe", ["default", "moco"])
def test_probe_reports_the_classifier_of_the_last_epoch(recipe: str) -> None:
    train, test = blobs(300, spread=0.6), blobs(200, spread=0.6)
    accuracies = set()
    for epochs in range(6):
        result = linear_probe(*train, *test, recipe=recipe, epochs=epochs, lr=1.0, batch_size=32)
        logits = test[0] @ result.weight.T + result.bias
        assert result.accuracy == pytest.approx(
            (logits.argmax(dim=1) == test[1]).float().mean().item()
        )
        accuracies.add(result.accuracy)
    assert len(accuracies) > 1


def test_probe_step_is_that_of_autograd() -> None:
    x, y = blobs(40, spread=0.5)
    result = linear_probe(x, y, x, y, recipe="moco", epochs=1, lr=0.7, batch_size=40, seed=4)
    weight = 0.01 * draw(4, 8, seed=4)
    layer = nn.Linear(8, 4)
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(4)})
    nn.functional.cross_entropy(layer(x), y).backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(result.weight, weight - 0.7 * layer.weight.grad)
    torch.testing.assert_close(result.bias, -0.7 * layer.bias.grad)


def test_only_some_recipes_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedU's public code takes the images as they come."""

    class Shuffled(Exception):
        pass

    def shuffle(*_: object, **__: object) -> None:
        raise Shuffled

    monkeypatch.setattr(torch, "randperm", shuffle)
    x, y = blobs(20)
    for recipe in RECIPES:
        if recipe.startswith("fedu"):
            linear_probe(x, y, x, y, recipe=recipe, epochs=1)
        else:
            with pytest.raises(Shuffled):
                linear_probe(x, y, x, y, recipe=recipe, epochs=1)


def test_probe_is_a_function_of_its_seed() -> None:
    train, test = blobs(300, spread=0.6), blobs(200, spread=0.6)
    before = torch.get_rng_state()
    weights = [linear_probe(*train, *test, epochs=2, seed=seed).weight for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_default_probe_ignores_scale_and_survives_collapse() -> None:
    train, test = blobs(400), blobs(100)
    scale = torch.logspace(-2, 2, 8)
    shifted = [(x * scale + 3, y) for x, y in (train, test)]
    assert linear_probe(*shifted[0], *shifted[1]).accuracy == 1
    collapsed = [(torch.full_like(x, 0.3), y) for x, y in (train, test)]
    result = linear_probe(*collapsed[0], *collapsed[1], epochs=3)
    assert result.accuracy == pytest.approx(0.25)
    assert result.weight.isfinite().all()


def test_schedules() -> None:
    moco, orchestra = RECIPES["moco"], RECIPES["orchestra"]
    assert [moco.decay(e) for e in (0, 59, 60, 79, 80)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert orchestra.decay(0) == 1
    assert orchestra.decay(25) == pytest.approx(0.5)
    assert 0 < orchestra.decay(49) < 0.05 / 30
    assert RECIPES["fedca"].decay(99) == 1


@pytest.mark.parametrize("evaluate", [knn, linear_probe])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.full((12, 8), torch.nan)}, "12 of 12 train features contain NaN"),
        ({"test": torch.full((6, 8), torch.inf)}, "6 of 6 test features contain NaN or infinity"),
        ({"y": torch.arange(12) - 1}, "from -1 to 10"),
        ({"test_y": torch.full((6,), 4)}, "test labels run from 4 to 4"),
        ({"y": torch.zeros(12)}, "integers"),
        ({"y": torch.zeros(11, dtype=torch.long)}, "N×d"),
        ({"test": torch.zeros(6, 7)}, "test features 7"),
        ({"test": torch.zeros(0, 8), "test_y": torch.zeros(0, dtype=torch.long)}, "N > 0"),
    ],
)
def test_nonsense_is_refused(evaluate: object, change: dict[str, Tensor], message: str) -> None:
    assert callable(evaluate)
    (x, y), (test, test_y) = blobs(12), blobs(6)
    data = {"x": x, "y": y, "test": test, "test_y": test_y} | change
    with pytest.raises(FurlongError, match=message):
        evaluate(*data.values(), n_classes=4)


def test_unknown_recipe() -> None:
    with pytest.raises(FurlongError, match="Did you mean 'default'"):
        linear_probe(*blobs(8), *blobs(8), recipe="defualt")


def test_a_probe_that_diverged_has_no_accuracy() -> None:
    (x, y), (test, wanted) = blobs(40, spread=9), blobs(12, spread=9)
    with pytest.raises(FurlongError, match="the linear probe diverged"):
        linear_probe(x, y, test, wanted, recipe="moco", lr=1e38)


def test_angles() -> None:
    h = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    turn = math.radians(20)
    rotation = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    assert angles(h, h).abs().max() == 0
    assert torch.allclose(angles(h, 3 * h), torch.zeros(50, dtype=torch.float64), atol=1e-5)
    twenty = torch.full((50,), 20.0, dtype=torch.float64)
    assert torch.allclose(angles(h, h @ rotation), twenty, atol=1e-4)
    assert torch.allclose(angles(h, -h), twenty * 9)
    assert angles(torch.zeros(1, 2), torch.ones(1, 2)).item() == pytest.approx(90)
    with pytest.raises(FurlongError, match="one shape"):
        angles(h, h[:4])
