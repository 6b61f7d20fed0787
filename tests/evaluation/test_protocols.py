"""Protocols that train: known answers, exact subsets, an untouched encoder, only the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from furlong.data.augment import crop_flip, preset
from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation import tuning as tuning_module
from furlong.evaluation.protocol import Encoded, Images, stratified
from furlong.evaluation.quality import (
    alignment,
    diagnosis,
    effective_rank,
    in_words,
    quality,
    spread,
    uniformity,
)
from furlong.evaluation.tuning import TUNINGS, TuningResult, fine_tune, new_head, tuning
from furlong.nn.encoders import build_encoder
from furlong.runs.config import EvaluateSettings
from furlong.runs.results import protocols
from furlong.seeding import with_seed

PLAIN = preset("none", 16)


def measured(
    word: str, encoder: nn.Module, train: ImageSet, test: ImageSet, seed: int = 0, **more: Any
) -> dict[str, Any]:
    """The numbers of one protocol."""
    (protocol,) = protocols(EvaluateSettings(), word).values()
    images = Images(train, test, PLAIN, seed)
    protocol.check(images)
    return protocol.measure(Encoded(encoder, images), *more.values())


def coloured(n: int, classes: int = 4, seed: int = 0, noise: int = 20) -> ImageSet:
    """Images 16×16 whose class is their colour: any encoder can learn them, most know them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    palette = torch.tensor([[220, 30, 30], [30, 220, 30], [30, 30, 220], [220, 220, 30]])
    noisy = torch.randint(-noise, noise + 1, (n, 3, 16, 16), generator=generator)
    pixels = (palette[labels][:, :, None, None] + noisy).clamp(0, 255).to(torch.uint8)
    return ImageSet(pixels, labels, tuple("abcd"[:classes]), name="coloured")


def small(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder("small", 3, 16)


# ---------------------------------------------------------------- which images get labels


@pytest.mark.parametrize("share", [0.01, 0.07, 0.1, 0.5, 1.0])
def test_the_subset_is_exact_per_class(share: float) -> None:
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate((100, 50, 7, 1))])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]
    rows = stratified(labels, share, seed=0)
    assert rows.tolist() == sorted(set(rows.tolist()))
    counts = labels[rows].bincount(minlength=4).tolist()
    percent = round(100 * share)
    assert counts == [-(-percent * n // 100) for n in (100, 50, 7, 1)]  # exact ⌈r·N_c⌉


def test_one_percent_of_cifar100_is_five_per_class() -> None:
    labels = torch.arange(50_000) % 100
    assert (labels[stratified(labels, 0.01, 0)].bincount() == 5).all()


def test_the_subset_depends_on_the_seed_and_on_nothing_else() -> None:
    labels = torch.arange(1000) % 10
    first = stratified(labels, 0.1, 0)
    torch.rand(3)
    assert torch.equal(stratified(labels, 0.1, 0), first)
    assert not torch.equal(stratified(labels, 0.1, 1), first)
    assert first.tolist() != list(range(100))  # not the first ones, as in EasyFL
    for share in (0.0, 1.1):
        with pytest.raises(FurlongError, match="above 0 and at most 1"):
            stratified(labels, share, 0)


def test_every_encoder_is_tuned_with_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def note(_: nn.Module, train: ImageSet, *__: Any, **___: Any) -> TuningResult:
        seen.append(train.pixels)
        return TuningResult(0, 0, 0, torch.zeros(50, 4))

    monkeypatch.setattr(tuning_module, "fine_tune", note)
    train, test = coloured(200), coloured(50, seed=1)
    for encoder in (small(0), small(1), nn.Flatten()):
        measured("semi-10", encoder, train, test, seed=4)
    assert len(seen[0]) == sum(math.ceil(n / 10) for n in train.labels.bincount())  # type: ignore[union-attr]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_a_share_below_one_label_per_class_is_refused() -> None:
    with pytest.raises(FurlongError, match=r"1\.0% of the 40 labels of coloured .* 4 classes"):
        measured("semi-1", small(), coloured(40), coloured(10))


# ---------------------------------------------------------------- the encoder stays as it was


def tuned(plan: str) -> Callable[[nn.Module], object]:
    word = f"semi-50:recipe={plan}:epochs=2"
    return lambda encoder: measured(word, encoder, coloured(60), coloured(20))


USES: dict[str, Callable[[nn.Module], object]] = {
    **{plan: tuned(plan) for plan in TUNINGS},
    "transfer": lambda e: measured("transfer:mine:epochs=1", e, coloured(20), coloured(20)),
    "crops": lambda e: measured("linear-crops:epochs=2", e, coloured(20), coloured(20)),
    "quality": lambda e: quality(e, coloured(20).pixels, preset("fedu", 16)),
}


@pytest.mark.parametrize("use", sorted(USES))
def test_nothing_of_the_encoder_changes(use: str) -> None:
    encoder = small()
    encoder.register_buffer("own", torch.ones(3), persistent=False)
    encoder.get_submodule("bn2").eval()
    frozen = encoder.get_parameter("conv1.weight").requires_grad_(False)
    other = encoder.get_parameter("conv2.weight")
    other.grad = torch.full_like(other, 7.0)
    before = {name: t.clone() for name, t in encoder.state_dict().items()}
    places = [p.data_ptr() for p in encoder.parameters()]
    flags = [part.training for part in encoder.modules()]
    rng = torch.get_rng_state()
    USES[use](encoder)
    assert torch.equal(torch.get_rng_state(), rng)
    after = encoder.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [part.training for part in encoder.modules()] == flags
    assert [p.data_ptr() for p in encoder.parameters()] == places
    assert not frozen.requires_grad
    assert all(p.requires_grad for p in encoder.parameters() if p is not frozen)
    assert (other.grad == 7).all()
    assert all(p.grad is None for p in encoder.parameters() if p is not other)
    assert torch.equal(encoder.get_buffer("own"), torch.ones(3))


def test_it_comes_back_even_from_an_error() -> None:
    encoder = small()
    before = {name: t.clone() for name, t in encoder.state_dict().items()}

    def stop(done: int, _: int) -> None:
        raise KeyboardInterrupt(done)

    plan = tuning("fedu", epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fine_tune(encoder, coloured(20), coloured(20), plan, augment=PLAIN, progress=stop)
    assert all(torch.equal(before[name], t) for name, t in encoder.state_dict().items())


# ---------------------------------------------------------------- what is trained


class Recorder(nn.Module):
    """Pixels' means, shifted by a weight, normalised; remembers what happens to it."""

    out_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        self.modes: list[bool] = []
        self.shifts: list[Tensor] = []
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        self.shifts.append(self.shift.detach().clone())
        running = self.norm.running_mean
        assert running is not None
        self.means.append(running.clone())
        out: Tensor = self.norm(x.mean(dim=(2, 3)) + self.shift)
        return out


def record(plan: str, **changes: Any) -> Recorder:
    encoder = Recorder()
    train = coloured(16)
    made = replace(tuning(plan, epochs=3, batch_size=8, crops=False), **changes)
    fine_tune(encoder, train, coloured(8, seed=1), made, augment=PLAIN)
    return encoder


def test_full_trains_the_encoder() -> None:
    encoder = record("fedu")
    assert encoder.modes == [True] * 6 + [False] * 2  # 3 epochs × 2 batches, then both accuracies
    assert not torch.equal(encoder.shifts[-1], encoder.shifts[0])
    assert not torch.equal(encoder.means[-1], encoder.means[0])


def test_head_bn_moves_only_the_statistics() -> None:
    encoder = record("orchestra")
    assert encoder.modes == [True] * 6 + [False] * 2
    assert all(torch.equal(shift, torch.zeros(3)) for shift in encoder.shifts)
    assert all(
        not torch.equal(a, b) for a, b in zip(encoder.means, encoder.means[1:7], strict=False)
    )


def test_the_released_script_moves_them_in_its_first_epoch_only() -> None:
    encoder = record("easyfl")
    assert encoder.modes == [True] * 2 + [False] * 6
    assert not torch.equal(encoder.means[2], encoder.means[0])
    assert torch.equal(encoder.means[2], encoder.means[-1])
    assert all(torch.equal(shift, torch.zeros(3)) for shift in encoder.shifts)


def test_the_rates_of_swav() -> None:
    for plan, lr, head_lr in ((TUNINGS["fcl-1"], 0.02, 5), (TUNINGS["fcl-10"], 0.01, 0.2)):
        assert (plan.optimiser, plan.epochs, plan.batch_size, plan.momentum) == (
            "sgd",
            20,
            256,
            0.9,
        )
        assert (plan.lr, plan.head_lr) == (lr, head_lr)
        share = [plan.decay(e) for e in range(20)]
        assert share == pytest.approx([1] * 12 + [0.2] * 4 + [0.04] * 4)


def test_the_first_step_is_that_of_sgd_with_two_rates() -> None:
    """One batch of all images: encoder and head move by their own rate times their gradient."""
    train, encoder = coloured(16), Recorder()
    plan = replace(tuning("fcl-10", epochs=1, batch_size=16, crops=False), lr=0.5)
    twin = Recorder().train()
    with with_seed(0):  # as inside: first the head is drawn
        head = new_head("linear", 3, 4)
    x, y = PLAIN.plain(train.pixels), train.labels
    assert y is not None
    head.get_parameter("bias").grad = None
    nn.functional.cross_entropy(head(twin(x)), y).backward()
    assert twin.shift.grad is not None
    fine_tune(encoder, train, train, plan, augment=PLAIN, seed=0)
    torch.testing.assert_close(encoder.shifts[-1], -0.5 * twin.shift.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_head_learns_at_a_rate_of_its_own(
    optimiser: Literal["sgd", "adam"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that is not to move, and a head that does: by head_lr times its gradient."""
    heads: list[nn.Linear] = []

    def keep(kind: Literal["linear", "mlp"], width: int, classes: int) -> nn.Module:
        head = new_head(kind, width, classes)
        assert isinstance(head, nn.Linear)
        heads.append(head)
        return head

    monkeypatch.setattr(tuning_module, "new_head", keep)
    train, encoder = coloured(16), Recorder()
    plan = replace(tuning("fcl-1", epochs=1, batch_size=16, crops=False), optimiser=optimiser)
    assert plan.head_lr == 5
    fine_tune(encoder, train, train, replace(plan, lr=1e-30), augment=PLAIN, seed=0)
    assert encoder.shifts[-1].abs().max() < 1e-20
    # the bias began at zero; the first step of Adam is its rate, whatever the gradient is
    moved = heads[0].bias.detach()
    if optimiser == "adam":
        torch.testing.assert_close(moved.abs(), torch.full((4,), 5.0), rtol=1e-3, atol=0)
        return
    with with_seed(0):
        head = new_head("linear", 3, 4)
    assert train.labels is not None
    scores = head(Recorder().train()(PLAIN.plain(train.pixels)))
    nn.functional.cross_entropy(scores, train.labels).backward()
    gradient = head.get_parameter("bias").grad
    assert gradient is not None
    torch.testing.assert_close(moved, -5.0 * gradient, atol=1e-6, rtol=1e-4)


def test_a_separable_toy_is_solved() -> None:
    train, test = coloured(200), coloured(60, seed=1)
    for recipe in ("fedu", "fedca"):
        result = measured(f"semi-30:recipe={recipe}:epochs=15", small(), train, test)
        assert result["accuracy"] == 1
        assert 60 <= result["labelled"] <= 64
    found = measured("linear-crops:recipe=default:epochs=20", small(), train, test)
    assert found["accuracy"] == found["auroc"] == 1


def test_the_last_epoch_counts_not_the_best() -> None:
    """With one seed, runs of 1, 2, … epochs are one run: a best epoch would never get worse."""
    train, test = (replace(coloured(n, noise=250), labels=torch.arange(n) % 4) for n in (32, 64))
    scores = []  # the labels mean nothing, so they wander
    for epochs in range(1, 7):
        plan = replace(tuning("fedu", epochs=epochs, batch_size=16), head_lr=0.1, lr=0.01)
        scores.append(fine_tune(nn.Flatten(), train, test, plan, augment=PLAIN, seed=2).accuracy)
    assert scores != sorted(scores)


def test_fine_tuning_is_a_function_of_its_seed() -> None:
    train, test = coloured(60, noise=90), coloured(200, seed=1, noise=90)
    plan, encoder, found = tuning("fedu", epochs=1, batch_size=16), small(), []
    for seed in (0, 0, 1):
        recorder = Recorder()
        fine_tune(recorder, train, test, plan, augment=PLAIN, seed=seed)
        found.append(recorder.shifts[-1].tolist())
        torch.rand(1)
    assert found[0] == found[1] != found[2]
    first = fine_tune(encoder, train, test, plan, augment=PLAIN)
    assert fine_tune(encoder, train, test, plan, augment=PLAIN) == first


def test_transfer_tunes_with_all_images() -> None:
    train, test, plan = coloured(40), coloured(40, seed=1), tuning("fedu", epochs=1)
    found = measured("transfer:mine:epochs=1", small(), train, test)
    result = fine_tune(small(), train, test, plan, augment=PLAIN)
    assert found == result.numbers(test, 0)
    assert found["accuracy"] == result.accuracy
    assert found["labelled"] == 40


def test_images_of_another_size_are_resized() -> None:
    large = ImageSet(coloured(20).pixels.repeat_interleave(3, 2).repeat_interleave(3, 3),
                     coloured(20).labels)  # fmt: skip
    sizes: list[tuple[int, ...]] = []

    class Look(nn.Module):
        out_dim = 3

        def forward(self, x: Tensor) -> Tensor:
            sizes.append(tuple(x.shape[-2:]))
            return x.mean(dim=(2, 3))

    fine_tune(Look(), large, large, tuning("fedca", epochs=1), augment=PLAIN)
    assert set(sizes) == {(16, 16)}


def test_the_probe_on_crops_sees_new_views_of_a_frozen_encoder() -> None:
    encoder = Recorder().train()
    seen: list[Tensor] = []
    encoder.register_forward_hook(lambda _, x, __: seen.append(x[0].clone()))
    steps: list[tuple[int, int]] = []
    progress = lambda done, total: steps.append((done, total))  # noqa: E731
    measured("linear-crops:epochs=3", encoder, coloured(8), coloured(8), progress=progress)
    assert not any(encoder.modes)
    assert len(seen) == 5  # plain train and test, three epochs
    assert not torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[2], seen[0])
    assert steps == [(0, 3), (1, 3), (2, 3)]
    views = crop_flip(preset("moco_cifar", 16))
    assert (views.scale, views.flip, views.jitter_p) == ((0.08, 1.0), 0.5, 0.0)
    assert views.mean == preset("moco_cifar").mean  # type: ignore[union-attr]
    assert crop_flip(preset("orchestra", 16)).std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": ImageSet(coloured(4).pixels, name="mine")}, "mine has no labels"),
        ({"test": ImageSet(coloured(4).pixels, name="theirs")}, "theirs has no labels"),
        ({"train": coloured(1)}, "1 training and 4 test images are too few"),
    ],
)
def test_nonsense_is_refused(change: dict[str, ImageSet], message: str) -> None:
    sets = {"train": coloured(4), "test": coloured(4)} | change
    with pytest.raises(FurlongError, match=message):
        fine_tune(
            nn.Flatten(), sets["train"], sets["test"], tuning("fedu", epochs=1), augment=PLAIN
        )


def test_divergence_is_said() -> None:
    plan = replace(tuning("fedu", epochs=3), optimiser="sgd", lr=1e30, head_lr=1e30)
    with pytest.raises(FurlongError, match="diverged"):
        fine_tune(small(), coloured(20), coloured(20), plan, augment=PLAIN)


def test_batches_in_which_nothing_is_trained_are_refused() -> None:
    with pytest.raises(FurlongError, match="batch_size is 1; fine-tuning needs at least 2"):
        tuning("fedu", batch_size=1)


def test_unknown_recipes() -> None:
    with pytest.raises(FurlongError, match="Did you mean 'fedu'"):
        tuning("fedus")


# ---------------------------------------------------------------- quality without labels


def test_alignment_of_known_points() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert alignment(x, 5 * x) == pytest.approx(0)
    assert alignment(x, -x) == pytest.approx(4)
    assert alignment(x, x.flip(0)) == pytest.approx(2)


def test_uniformity_of_known_points() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [0.0, -1.0]])
    # of the 12 pairs 8 are at squared distance 2, 4 at 4
    expected = math.log((8 * math.exp(-4) + 4 * math.exp(-8)) / 12)
    for block in (1, 3, 1024):
        assert uniformity(x, block=block) == pytest.approx(expected)
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0)


def test_uniformity_is_that_of_the_paper() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distances = torch.pdist(nn.functional.normalize(x, dim=1)).square()
    assert uniformity(x) == pytest.approx(float((-2 * distances).exp().mean().log()))


def test_effective_rank_of_known_matrices() -> None:
    both = torch.cat([torch.eye(5), -torch.eye(5)])
    assert effective_rank(both) == pytest.approx(5)
    assert effective_rank(both + 100) == pytest.approx(5)  # the mean tells no image from another
    assert effective_rank(torch.eye(5)) == pytest.approx(4)  # five points lie in four dimensions
    assert effective_rank(torch.ones(7, 4) * torch.arange(7)[:, None]) == pytest.approx(1)
    assert effective_rank(torch.zeros(4, 7)) == 0
    assert effective_rank(torch.full((4, 7), 0.1)) == 0
    # standard deviations 3 and 1, variances 9 and 1: shares 9/10 and 1/10
    expected = math.exp(-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)))
    scaled = both @ torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0]))
    assert effective_rank(scaled) == pytest.approx(expected)
    x = torch.randn(20, 60, generator=torch.Generator().manual_seed(0))
    assert effective_rank(x) == pytest.approx(effective_rank(torch.cat([x] * 4)))  # other Gram
    assert effective_rank(x) == pytest.approx(effective_rank(9 * x))


def test_spread_of_known_points() -> None:
    assert spread(torch.ones(5, 3)) == pytest.approx(0, abs=1e-6)
    assert spread(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == pytest.approx(1)
    assert spread(torch.eye(4)) == pytest.approx(math.sqrt(3 / 4))


class Around(nn.Module):
    """One direction for all images, and ``amount`` of what each image is."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        own = nn.functional.normalize(x.flatten(1)[:, :64] - 0.5, dim=1)
        return torch.ones(64) / 8 + self.amount * own


@pytest.mark.parametrize(
    ("amount", "collapsed"), [(0.0, True), (0.001, True), (0.005, True), (0.1, False), (1, False)]
)
def test_collapse_is_seen_from_both_sides(amount: float, collapsed: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (200, 3, 16, 16), dtype=torch.uint8, generator=noise)
    found = quality(Around(amount), pixels, PLAIN)
    assert found.collapsed is collapsed
    assert found.alignment == pytest.approx(0, abs=1e-9)  # nothing is augmented


def test_a_line_is_a_collapse_although_it_is_spread() -> None:
    class Line(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.mean(dim=(1, 2, 3)) - 0.5)[:, None] * torch.ones(64)

    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 256, (50, 1, 1, 1), generator=generator)
    found = quality(Line(), levels.expand(50, 3, 4, 4).to(torch.uint8), preset("none"))
    assert found.spread > 0.5
    assert found.effective_rank == pytest.approx(1)
    assert found.collapsed


def numbers(rank: float, knn: float | None = None) -> dict[str, float | None]:
    """A measurement of a run."""
    return {"effective_rank": rank, "spread": 0.5, "knn": knn}


UNTRAINED = numbers(40, 0.2)


@pytest.mark.parametrize(
    ("course", "state"),
    [
        ([], ""),
        ([(19.9, 0.18)], ""),  # once may be chance
        ([(19.9, 0.189), (19.9, 0.189)], "heading for collapse"),
        ([(30, 0.18), (19.9, 0.18)], ""),
        ([(19.9, 0.18), (20.1, 0.18)], ""),  # half of the untrained encoder's is enough
        ([(19.9, 0.191), (19.9, 0.18)], ""),  # kNN was as high as the untrained encoder's, almost
        ([(19.9, 0.18), (19.9, 0.191)], ""),
        ([(9.9, 0.2), (9.9, 0.2)], "heading for collapse"),  # far below, and no better for it
        ([(10.1, 0.2), (10.1, 0.2)], ""),
        ([(3, 0.201), (3, 0.201)], ""),  # it learns
        ([(9, 0.1), (9, 0.1), (30, 0.1)], ""),  # it has recovered
        ([(1.9, 0.2)], "collapsed"),
        ([(2.1, 0.2)], ""),
        ([(1.1, 0.21)], ""),  # two classes, learnt with labels
        ([(1.1, None)], "collapsed"),
        ([(10.1, None), (10.1, None)], ""),  # without labels the rank must fall further
        ([(9.9, None), (9.9, None)], "heading for collapse"),
    ],
)
def test_a_run_that_is_heading_for_collapse(course: list[Any], state: str) -> None:
    assert diagnosis([numbers(*each) for each in course], UNTRAINED) == state


def test_a_diagnosis_needs_what_it_is_about() -> None:
    between = [numbers(9, 0.1), {"knn": None, "effective_rank": None}, numbers(9, 0.1)]
    assert diagnosis(between, UNTRAINED) == "heading for collapse"  # not every line is measured
    assert diagnosis(between, {}) == ""
    assert diagnosis([numbers(9, 0.9)] * 2, {"effective_rank": 41.0}) == "heading for collapse"
    assert diagnosis([{"knn": 0.1}] * 2, UNTRAINED) == ""
    assert diagnosis([numbers(9) | {"spread": 0.009}], {}) == "collapsed"


def test_a_diagnosis_in_words_has_the_numbers() -> None:
    text = in_words("heading for collapse", numbers(12.34, 0.126), UNTRAINED)
    assert "heading for collapse: effective rank 12.3 (untrained encoder: 40.0)" in text
    assert "kNN 12.6\N{NO-BREAK SPACE}% (untrained encoder: 20.0\N{NO-BREAK SPACE}%)" in text
    assert "kNN" not in in_words("heading for collapse", numbers(12.34), UNTRAINED)
    assert "collapsed: effective rank 1.0, spread 0.500" in in_words("collapsed", numbers(1), {})


def test_untrained_encoders_have_not_collapsed() -> None:
    for name in ("small", "cnn5"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder = build_encoder(name, 3, 16)
        pixels = torch.randint(
            0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        assert not quality(encoder, pixels, preset("fedu", 16)).collapsed


def test_quality_depends_on_the_seed_and_refuses_nonsense() -> None:
    encoder, views, pixels = small(), preset("fedu", 16), coloured(20).pixels
    assert quality(encoder, pixels, views, 3) == quality(encoder, pixels, views, 3)
    assert quality(encoder, pixels, views, 3) != quality(encoder, pixels, views, 4)
    with pytest.raises(FurlongError, match="at least 2"):
        quality(encoder, pixels[:1], views)
    with torch.no_grad():
        encoder.get_parameter("conv1.weight").fill_(math.nan)
    with pytest.raises(FurlongError, match="NaN"):
        quality(encoder, pixels, views)
