"""Every attack on a case where it must succeed, and on one where it must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor, nn

from furlong.audit import gradients, measures, membership, memorisation, sharing
from furlong.audit.measures import Finding
from furlong.audit.scene import Scene, scene
from furlong.core.context import Batch
from furlong.core.method import Shared
from furlong.data.augment import Augmentation
from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.evaluation.metrics import LEVEL
from furlong.nn.losses import nt_xent
from furlong.seeding import with_seed

RECIPE = Augmentation(size=8, scale=(0.6, 1.0), flip=0.5)


def noise(count: int, seed: int) -> Tensor:
    """Images that have nothing in common, uint8 count×3×8×8, a little smoothed."""
    with with_seed(seed):
        coarse = torch.rand(count, 3, 4, 4)
    return (F.interpolate(coarse, 8, mode="bilinear") * 255).to(torch.uint8)


@pytest.fixture(scope="module")
def here() -> Scene:
    train, test = ImageSet(noise(60, 1)), ImageSet(noise(180, 2))
    return scene(train, test, RECIPE, 60, 0)


def mlp(seed: int = 3) -> nn.Sequential:
    with with_seed(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 32))


@pytest.fixture(scope="module")
def overfitted(here: Scene) -> nn.Module:
    """SimCLR on the members alone, far too long."""
    net = mlp()
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    with with_seed(4):
        views = RECIPE.views(here.train.pixels, 40)
        for _ in range(400):
            first, second = torch.randperm(len(views))[:2].tolist()
            loss = nt_xent(net(views[first]), net(views[second]), 0.2)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net


def quiet(*_: object) -> None:
    pass


def on_encoder(encoder: nn.Module, here: Scene) -> dict[str, Finding]:
    rows = torch.arange(len(here.train))
    pair = (encoder, mlp())
    found = membership.on_encoder("encoder", pair, (None, None), here, rows, quiet)
    return {each.attack.name: each for each in found}


# ---------------------------------------------------------------- measures


def told(members: Tensor, others: Tensor, seed: int = 0) -> measures.Numbers:
    control = torch.zeros_like(members), torch.zeros_like(others)
    return measures.told_apart(members, others, control, seed)[0]


def test_auc_and_true_positives() -> None:
    n = torch.arange(100.0)
    sure = told(n + 1000, n)
    assert sure["auc"].value == sure["auc"].low == 1.0
    assert sure["tpr"].value == 1.0
    same = told(n, n)
    assert same["auc"].value == pytest.approx(0.5)
    assert same["auc"].low < 0.5 < same["auc"].high
    assert same["tpr"].value == pytest.approx(0.01)  # one of a hundred others is as high
    blind = told(torch.zeros(100), torch.zeros(100))
    assert blind["auc"].value == 0.5
    assert blind["tpr"].value == 0.0  # equal scores are named together or not at all
    few = told(torch.cat([n[:10] + 500, n[:90]]), n)  # a tenth is certain
    assert few["tpr"].value == pytest.approx(0.1, abs=0.011)
    assert few["auc"].value < 0.6


def test_true_positives_by_hand() -> None:
    """At most 2 of 200 others may lie at or above the threshold."""
    others = torch.arange(200.0)
    members = torch.tensor([197.5, 198.5, 196.5, 0.5] * 5)
    found = told(members, others)
    assert found["tpr"].value == pytest.approx(0.5)


def test_shares_have_exact_intervals() -> None:
    """Of Clopper and Pearson, by scipy's own binomial test; none of n is not surely none."""
    for hits, count in ((0, 100), (3, 100), (100, 100), (10, 20)):
        found = measures.share(hits, count)
        wide, wider = (
            binomtest(hits, count).proportion_ci(level) for level in (LEVEL, measures.VERDICT)
        )
        assert (found.low, found.high) == pytest.approx((wide.low, wide.high))
        assert found.least == pytest.approx(wider.low)
    assert told(torch.zeros(100), torch.ones(100))["tpr"].high == pytest.approx(0.036, abs=1e-3)
    black, white = torch.zeros(8, 1, 4, 4), torch.ones(8, 1, 4, 4)
    none = measures.recognised(black, white, white[:3], 0, together=2)["identified"]
    assert (none.low, none.high) == (0, pytest.approx(binomtest(0, 4).proportion_ci().high))


def test_the_same_seed_gives_the_same_interval() -> None:
    with with_seed(0):
        a, b = torch.randn(2, 80)
    assert told(a, b, 1) == told(a, b, 1)
    assert told(a, b, 1)["auc"] != told(a, b, 2)["auc"]
    with pytest.raises(FurlongError, match="too few"):
        told(a[:10], b)


def test_members_are_matched_in_class_and_number() -> None:
    """A client with two classes is compared with others of these two classes."""
    train = ImageSet(noise(60, 1), torch.arange(60) % 2, ("a", "b", "c", "d"))
    test = ImageSet(noise(180, 2), torch.arange(180) % 4, ("a", "b", "c", "d"))
    mine, theirs = measures.matched(train, torch.arange(60), test, torch.arange(180), 40, 0)
    assert train.labels is not None
    assert test.labels is not None
    assert len(mine) == len(theirs) == 40
    assert torch.equal(train.labels[mine], test.labels[theirs])
    assert len({*mine.tolist()}) == len({*theirs.tolist()}) == 40


def test_what_the_images_alone_tell_is_not_held_against_a_run() -> None:
    """Better than guessing, but so is the control: nothing is found."""
    n = torch.arange(100.0)
    attack = measures.Attack("views", "membership", "encoder", "", 100)
    for control, found in (((n + 50, n), False), ((n, n), True)):
        numbers = measures.told_apart(n + 50, n, control, 0)
        assert measures.by_scores(attack, *numbers, "a control").found is found


# ---------------------------------------------------------------- membership, memorisation


def test_an_overfitted_encoder_is_found_out(overfitted: nn.Module, here: Scene) -> None:
    found = on_encoder(overfitted, here)
    assert found["views"].found
    assert found["views"].run["auc"].low > 0.7
    assert found["loss"].run["auc"].low > 0.65
    assert found["together"].found
    assert all(
        each.untrained["auc"].low < 0.5 < each.untrained["auc"].high for each in found.values()
    )


def test_an_untrained_encoder_reveals_nothing(here: Scene) -> None:
    assert not any(each.found for each in on_encoder(mlp(seed=9), here).values())


def test_swapped_members_are_told_apart_by_nothing(overfitted: nn.Module, here: Scene) -> None:
    """Half of the true members among either side: 0.5."""
    known = here.train.pixels
    train = ImageSet(torch.cat([known[:30], here.test.pixels[:30]]))
    free = here.free[here.free >= 30]
    test = ImageSet(torch.cat([known[30:], here.test.pixels[30:]]))
    mixed = replace(here, train=train, test=test, free=torch.cat([torch.arange(30), free[:30]]))
    for name, each in on_encoder(overfitted, mixed).items():
        assert each.run["auc"].low < 0.5 < each.run["auc"].high, name


def test_norms_are_learnt_whichever_way_they_go() -> None:
    with with_seed(0):
        members, others = torch.randn(80, 3) - 2, torch.randn(80, 3)
    low, high = membership.learnt(members, others, 0)
    assert told(low, high)["auc"].low > 0.9
    assert told(*membership.learnt(others, others.flip(0), 0))["auc"].value == pytest.approx(
        0.5, abs=0.12
    )


def test_what_is_learnt_is_tried_on_other_images() -> None:
    """Noise in twenty columns is told apart by whoever learnt it by heart, and by nobody else."""
    with with_seed(1):
        members, others = torch.randn(2, 80, 20)
    found = told(*membership.learnt(members, others, 0))["auc"]
    assert found.low < 0.5 < found.high


def test_own_losses_take_the_place_of_contrast(here: Scene) -> None:
    found = membership.scores(mlp(), RECIPE, here.own[:4], here.own, lambda x: torch.arange(len(x)))
    assert found["loss"].flatten().tolist() == [0, -1, -2, -3]


class ByHeart(nn.Module):
    """Knows whole images and their corners, and gives both the same feature."""

    def __init__(self, pixels: Tensor) -> None:
        super().__init__()
        self.rest, self.count = mlp(), len(pixels)
        parts = (RECIPE.plain(pixels), RECIPE.plain(memorisation.corners(pixels)))
        self.known = torch.cat(parts).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        apart = torch.cdist(x.flatten(1), self.known)
        which = F.one_hot(apart.argmin(dim=1) % self.count, self.count)
        known = which * (apart.amin(dim=1, keepdim=True) < 0.1)
        return torch.cat([known.float() * 10, self.rest(x)], dim=1)


def test_corners_that_are_known_by_heart_are_found(here: Scene) -> None:
    found = on_encoder(ByHeart(here.train.pixels), here)["corner"]
    assert found.found
    assert found.run["auc"].low > 0.95
    assert found.run["tpr"].low > 0.5


def test_a_corner_is_the_upper_left_quarter() -> None:
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    image[..., :4, :4] = 200
    assert bool((memorisation.corners(image) == 200).all())


# ---------------------------------------------------------------- features


def raw(x: Tensor) -> Tensor:
    return x.flatten(1)


def hidden(x: Tensor) -> Tensor:
    return torch.randn(len(x), 16)


def shared(rows: Tensor, make: Callable[[Tensor], Tensor]) -> Shared:
    return Shared(rows, make, make)


def features(here: Scene, make: Callable[[Tensor], Tensor], rows: Tensor) -> dict[str, Finding]:
    every = torch.arange(len(here.train))
    with with_seed(5):
        found = list(
            sharing.on_features("f", shared(rows, make), shared(rows[:0], make), here, every, quiet)
        )
    return {each.attack.name: each for each in found}


def test_raw_features_are_linked_and_inverted(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "STEPS", 80)
    monkeypatch.setattr(sharing, "WIDTH", 32)
    found = features(here, raw, raw(RECIPE.plain(here.train.pixels)))
    assert found["linking"].run["auc"].low == 1.0
    assert found["linking"].found
    assert found["inversion"].found
    assert found["inversion"].run["identified"].value > 0.5
    assert found["inversion"].run["psnr"].low > found["inversion"].nothing["psnr"]
    assert len(found["inversion"].pictures) == 8


def test_features_of_nothing_are_not(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other images are not linked; rows of noise are neither linked nor inverted."""
    monkeypatch.setattr(sharing, "STEPS", 3)
    foreign = features(here, raw, raw(RECIPE.plain(noise(60, 8))))
    assert not foreign["linking"].found
    with with_seed(6):
        blank = features(here, hidden, torch.randn(60, 16))
    assert not any(each.found for each in blank.values())
    assert blank["linking"].run["auc"].low < 0.5 < blank["linking"].run["auc"].high


def test_a_decoder_at_the_server_is_used(here: Scene) -> None:
    known = Shared(
        raw(RECIPE.plain(here.train.pixels)), raw, raw, lambda rows: rows.view(-1, 3, 8, 8)
    )
    every = torch.arange(len(here.train))
    *_, found = sharing.on_features("f", known, known, here, every, quiet)
    assert found.attack.name == "decoding"
    assert found.run["psnr"].value == pytest.approx(60)
    assert found.run["identified"].value == 1


# ---------------------------------------------------------------- gradients


def rebuilding(net: nn.Module, batch: Batch) -> Tensor:
    (view,) = batch.views(1)
    return F.mse_loss(net(view), view.flatten(1))


def of_means(net: nn.Module, batch: Batch) -> Tensor:
    """Sees of an image only its brightness."""
    (view,) = batch.views(1)
    return net(view.mean(dim=(1, 2, 3), keepdim=True).expand_as(view)).square().mean()


def smooth() -> nn.Module:
    with with_seed(7):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Sigmoid(), nn.Linear(64, 192))


def test_the_gradient_of_one_image_gives_the_image(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "STEPS", 120)
    (view,) = RECIPE.views(here.own[:1], 1)
    batch = Batch(here.own[:1], torch.arange(1), None, RECIPE)
    with with_seed(8):
        (found,) = gradients.inverted(smooth(), rebuilding, batch, (view,), RECIPE)
    assert float(measures.alike(found, view)) > 0.9


def test_updates_are_inverted_where_they_tell_and_only_there(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "STEPS", 60)
    monkeypatch.setattr(gradients, "UPDATES", 3)
    every = torch.arange(len(here.train))
    for loss, told_something in ((rebuilding, True), (of_means, False)):
        with with_seed(9):
            found = gradients.on_update((smooth(), smooth()), loss, here, every, quiet)
        assert found.found is told_something


def test_guesses_are_paired_with_what_they_fit() -> None:
    images = noise(4, 3).float()
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(gradients.paired(images[order], images), images)
