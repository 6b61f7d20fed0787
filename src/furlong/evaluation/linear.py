"""Linear probe: a softmax classifier on frozen features, cached or of new crops every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from furlong.data.augment import crop_flip
from furlong.errors import FurlongError, nearest
from furlong.evaluation.features import check_split, device_of, features
from furlong.evaluation.metrics import grade, top1
from furlong.evaluation.protocol import Encoded, Images, Progress, Protocol, few, silent
from furlong.nn.optimisers import SGD, Adam, Fused
from furlong.seeding import with_seed
from furlong.settings import setting


@dataclass(frozen=True)
class Training:
    """How something is trained with labels."""

    optimiser: Literal["adam", "sgd"]
    lr: float
    epochs: int
    batch_size: int
    momentum: float = 0.9  # of SGD
    cosine: bool = False  # over epochs, else constant or in steps
    steps: tuple[float, ...] = ()  # shares of the epochs after which the rate drops
    drop: float = 0.1  # to so much of what it was

    def new_optimiser(self, groups: Iterable[dict[str, Any]]) -> Fused:
        """For groups of tensors, which may have rates of their own."""
        if self.optimiser == "adam":
            return Adam(groups, self.lr)
        return SGD(groups, self.lr, self.momentum)

    def decay(self, epoch: int) -> float:
        """By what learning rates are multiplied in ``epoch`` = 0, 1, …"""
        if self.cosine:
            return (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return float(self.drop ** sum(epoch >= round(s * self.epochs) for s in self.steps))


@dataclass(frozen=True)
class ProbeRecipe(Training):
    """How a probe is trained; epochs and learning rate can be overridden in ``linear_probe``."""

    shuffle: bool = True
    standardise: bool = False  # features to mean 0 and variance 1 by train statistics


RECIPES: dict[str, ProbeRecipe] = {
    # Ours: standardised features make one learning rate fit every encoder. It needs some hundred
    # steps, so give more epochs for fewer than about 400 images.
    "default": ProbeRecipe("adam", 3e-3, 100, 256, cosine=True, standardise=True),
    # FedCA says Adam and 100 epochs; rate and batch are our choice.
    "fedca": ProbeRecipe("adam", 1e-3, 100, 256),
    # FedU's public code; the paper says no more than 100 epochs.
    "fedu": ProbeRecipe("adam", 3e-3, 200, 2048, shuffle=False),
    "fedu_paper": ProbeRecipe("adam", 3e-3, 100, 2048, shuffle=False),
    # FCL follows MoCo, which takes new crops and flips every epoch: see ``LinearCrops``.
    "moco": ProbeRecipe("sgd", 30.0, 100, 256, steps=(0.6, 0.8)),
    # Orchestra's public code.
    "orchestra": ProbeRecipe("sgd", 30.0, 50, 256, cosine=True),
}


def probe(name: str, **changes: Any) -> ProbeRecipe:
    """The recipe called ``name``, with those ``changes`` to its fields that are not ``None``."""
    if name not in RECIPES:
        raise FurlongError(f"Unknown probe recipe {name!r}. {nearest(name, RECIPES)}")
    return replace(RECIPES[name], **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True)
class LinearResult:
    """Top-1 shares in [0, 1] after the last epoch, and the classifier for *raw* features.

    ``weight``: classes×d, ``bias``: classes; logits are ``features @ weight.T + bias``.
    """

    accuracy: float
    train_accuracy: float
    weight: Tensor
    bias: Tensor
    scores: Tensor  # M×classes, of the test images


@torch.no_grad()
def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    recipe: str = "default",
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    n_classes: int | None = None,
    epoch_features: Callable[[int], Tensor] | None = None,
) -> LinearResult:
    """Train a linear classifier on train features N×d; report its accuracy on test features M×d.

    The weight starts from N(0, 0.01²) and the bias from 0. The test set is looked at once, after
    the last epoch: never the best epoch. The ``default`` recipe standardises features, then runs
    Adam at 3e-3 with cosine decay for 100 epochs of batches of 256; the others follow a paper each,
    see ``RECIPES``. All randomness comes from ``seed``; torch's global state stays untouched.

    ``epoch_features`` gives other features N×d of the same images for every epoch of training.
    """
    plan = probe(recipe, epochs=epochs, lr=lr, batch_size=batch_size)
    classes = check_split(train_features, train_labels, test_features, test_labels, n_classes)
    x, y = train_features.float(), train_labels.long()
    mean, std = _statistics(x) if plan.standardise else (x.new_zeros(()), x.new_ones(()))

    def standard(rows: Tensor) -> Tensor:
        return (rows.float() - mean).div_(std) if plan.standardise else rows.float()

    shape = (classes, x.shape[1])
    if epoch_features is None:
        x = standard(x)
        weight, bias = _train(lambda _: x, y, shape, plan, seed)
    else:
        given = epoch_features
        weight, bias = _train(lambda epoch: standard(given(epoch)), y, shape, plan, seed)
    weight /= std
    bias -= (weight * mean).sum(dim=1)
    scores, own = (_scores(each, weight, bias) for each in (test_features, train_features))
    return LinearResult(
        accuracy=top1(scores, test_labels),
        train_accuracy=top1(own, train_labels),
        weight=weight,
        bias=bias,
        scores=scores,
    )


def _train(
    rows_of: Callable[[int], Tensor],
    y: Tensor,
    shape: tuple[int, int],
    plan: ProbeRecipe,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Weight of ``shape`` classes×d and bias, trained on ``rows_of(epoch)`` N×d and ``y`` N.

    The gradient of softmax regression is written out, with logits classes×B: twice as fast as
    autograd with the usual B×classes.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = 0.01 * torch.randn(shape, generator=generator)
    bias = torch.zeros(shape[0], 1)
    optimiser = plan.new_optimiser([{"params": [weight, bias]}])
    order = torch.arange(len(y))
    for epoch in range(plan.epochs):
        optimiser.param_groups[0]["lr"] = plan.lr * plan.decay(epoch)
        if plan.shuffle:
            order = torch.randperm(len(y), generator=generator)
        x = rows_of(epoch)
        for rows in torch.split(order, plan.batch_size):
            batch = x.index_select(0, rows)
            error = torch.addmm(bias, weight, batch.T).softmax(dim=0)
            error[y[rows], torch.arange(len(rows))] -= 1
            error /= len(rows)
            weight.grad, bias.grad = error @ batch, error.sum(dim=1, keepdim=True)
            optimiser.step()
    return weight, bias.squeeze(1)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean d and standard deviation d of ``x`` N×d, the latter bounded from below.

    Dead units of an encoder, and all units of a collapsed one, would else turn into amplified
    rounding errors.
    """
    variance, mean = torch.var_mean(x, dim=0, correction=0)
    std = variance.sqrt()
    floor = 1e-3 * std.mean() + 1e-5 * mean.abs().mean() + 1e-12
    return mean, std.clamp_min(floor)


def _scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    scores = torch.addmm(bias, x.float(), weight.T)
    if not torch.isfinite(scores).all():
        raise FurlongError("the linear probe diverged: its scores are not finite. Lower the rate.")
    return scores


STEPS = 400  # that a probe with few labels makes at least, or it would hardly leave its start


@dataclass(frozen=True)
class Linear(Protocol):
    """The test accuracy of a linear classifier that was trained on the features.

    Options that are ``None`` are as the recipe says. ``linear-5`` trains with ⌈5 % · N_c⌉ images of
    every class c, which are those of ``semi-5``; it makes at least 400 steps.
    """

    kind: ClassVar[str] = "linear"
    recipes: ClassVar[Collection[str]] = tuple(RECIPES)

    recipe: str = setting("default", "How the classifier is trained: a key of RECIPES.")
    epochs: int | None = setting(None, "Passes over the training images.", above=0)
    lr: float | None = setting(None, "The learning rate.", above=0)
    batch_size: int | None = setting(None, "Images per step.", above=0)
    labels: float = setting(1.0, "The share of the labels that is used.", above=0, at_most=1)

    def check(self, images: Images) -> None:
        """There must be labels enough."""
        super().check(images)
        self.labelled(images)

    def labelled(self, images: Images) -> Tensor | None:
        """The rows of the training images whose labels are used; ``None``: all."""
        train, _ = images.labelled()
        return None if self.labels == 1 else few(train, self.labels, images.seed)

    def settings(self, images: Images) -> dict[str, Any]:
        """The recipe with what was changed of it."""
        given = {name: getattr(self, name) for name in ("epochs", "lr", "batch_size")}
        plan, rows = probe(self.recipe, **given), self.labelled(images)
        if rows is not None and self.epochs is None:
            needed = math.ceil(STEPS / math.ceil(len(rows) / plan.batch_size))
            plan = replace(plan, epochs=max(plan.epochs, needed))
        return {"recipe": self.recipe, **{name: getattr(plan, name) for name in given}}

    def measure(self, encoded: Encoded, _: Progress = silent) -> dict[str, Any]:
        """The accuracy, and what the scores say beside it."""
        train, labels, *test = encoded.features
        rows = self.labelled(encoded.images)
        if rows is not None:
            chosen = torch.isin(encoded.rows[0], rows)
            train, labels = train[chosen], labels[chosen]
        return self._probe((train, labels, test[0], test[1]), encoded.images, encoded.rows[1])

    def _probe(
        self,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        images: Images,
        tested: Tensor,
        epoch_features: Callable[[int], Tensor] | None = None,
    ) -> dict[str, Any]:
        """Features and labels of training images, then of the test images ``tested``."""
        result = linear_probe(
            *rows,
            **self.settings(images),
            seed=images.seed,
            n_classes=images.classes,
            epoch_features=epoch_features,
        )
        count = {} if self.labels == 1 else {"labelled": len(rows[1])}
        more = grade(result.scores.softmax(dim=1), images.labelled()[1], tested, images.seed)
        return {"accuracy": result.accuracy, **count, **more}


@dataclass(frozen=True)
class LinearCrops(Linear):
    """The same on features of new random crops and flips in every epoch, as in MoCo.

    The encoder stays in eval mode. Costs a pass over the training images per epoch.
    """

    kind: ClassVar[str] = "linear-crops"

    recipe: str = setting("moco", "How the classifier is trained: a key of RECIPES.")

    def measure(self, encoded: Encoded, progress: Progress = silent) -> dict[str, Any]:
        """The accuracy."""
        images, encoder = encoded.images, encoded.encoder
        train, test = images.labelled()
        rows = self.labelled(images)
        train = train if rows is None else train.subset(rows)
        assert train.labels is not None
        assert test.labels is not None
        view, total = crop_flip(images.augment).view, self.settings(images)["epochs"]

        def cropped(epoch: int) -> Tensor:
            progress(epoch, total)
            return features(encoder, train.pixels, view)

        with with_seed(images.seed, device_of(encoder)):
            ours, theirs = (
                features(encoder, part.pixels, images.augment.plain) for part in (train, test)
            )
            both = (ours, train.labels, theirs, test.labels)
            return self._probe(both, images, torch.arange(len(test)), cropped)
