"""Fine-tuning: a new head on an encoder, both trained with labels; and transfer by it.

Transfer asks whether what was learnt on one set of images helps on another (FedU, FedCA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.data.augment import Recipe, crop_flip
from furlong.data.images import ImageSet
from furlong.errors import FurlongError, nearest
from furlong.evaluation.features import device_of, features
from furlong.evaluation.linear import Training
from furlong.evaluation.metrics import grade, top1
from furlong.evaluation.protocol import Encoded, Images, Progress, Protocol, silent
from furlong.nn.encoders import out_dim
from furlong.seeding import with_seed
from furlong.settings import setting


@dataclass(frozen=True)
class Tuning(Training):
    """How a fine-tuning is done; ``tuning`` finds one by name and changes parts of it."""

    drop: float = 0.2
    head_lr: float = 1e-3  # ``lr`` is the encoder's
    # full: everything is trained. head_bn: only the head is, but the encoder's BatchNorm
    # statistics follow the labelled images, since it runs in training mode.
    finetune: Literal["full", "head_bn"] = "full"
    moving: int | None = None  # epochs in which the statistics move; None: all
    head: Literal["linear", "mlp"] = "linear"  # mlp: one hidden layer as wide as the features
    crops: bool = True  # random crops and flips, else the plain images

    def __post_init__(self) -> None:
        if self.batch_size < 2:  # BatchNorm needs two, so a batch of one is left out
            raise FurlongError(f"batch_size is {self.batch_size}; fine-tuning needs at least 2.")


TUNINGS: dict[str, Tuning] = {
    # FedU: 100 epochs, everything trained (paper); Adam, rate and batch from its code.
    "fedu": Tuning("adam", 1e-3, 100, 128),
    # What FedU's released script does: the optimiser has the head only. After the test that follows
    # the first epoch the script stays in eval mode, so the statistics move in that epoch alone.
    "easyfl": Tuning("adam", 1e-3, 100, 128, finetune="head_bn", moving=1),
    # FCL follows SwAV, whose rates depend on the share of labels.
    "fcl-1": Tuning("sgd", 0.02, 20, 256, head_lr=5.0, steps=(0.6, 0.8)),
    "fcl-10": Tuning("sgd", 0.01, 20, 256, head_lr=0.2, steps=(0.6, 0.8)),
    # FedCA: a head with one hidden layer, Adam, 100 epochs; the batch is our choice.
    "fedca": Tuning("adam", 1e-3, 100, 128, head="mlp"),
    # Orchestra's public script: the optimiser has the head only here, too.
    "orchestra": Tuning("sgd", 30.0, 50, 256, head_lr=30.0, cosine=True, finetune="head_bn"),
}


def tuning(name: str, **changes: Any) -> Tuning:
    """The recipe called ``name``, with those ``changes`` to its fields that are not ``None``."""
    if name not in TUNINGS:
        raise FurlongError(f"Unknown fine-tuning recipe {name!r}. {nearest(name, TUNINGS)}")
    return replace(TUNINGS[name], **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True)
class TuningResult:
    """Top-1 shares in [0, 1] after the last epoch: on the test images, on the labelled ones."""

    accuracy: float
    train_accuracy: float
    labelled: int  # training images
    scores: Tensor = field(compare=False, repr=False)  # M×C, of the test images

    def numbers(self, test: ImageSet, seed: int) -> dict[str, Any]:
        """All that is told of it."""
        told = {name: getattr(self, name) for name in ("accuracy", "train_accuracy", "labelled")}
        return {**told, **grade(self.scores.softmax(dim=1), test, seed=seed)}


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` may be trained; all its tensors, gradients and flags are put back after.

    So any module can be fine-tuned without knowing how to build a second one.
    """
    tensors = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    gradients = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    flags = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)
        for parameter, requires_grad, grad in gradients:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
        for part, training in flags:
            part.training = training


def fine_tune(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    plan: Tuning,
    *,
    augment: Recipe,
    seed: int = 0,
    progress: Progress = silent,
) -> TuningResult:
    """Train ``encoder`` with a new head on all of ``train``; its accuracy on ``test`` at the end.

    ``augment`` is what the encoder was trained with: its size and normalisation are used. The
    encoder comes back exactly as it was. The test images are looked at once, after the last epoch.
    """
    if train.labels is None or test.labels is None:
        raise FurlongError(f"{(train if train.labels is None else test).name} has no labels.")
    if len(train) < 2 or not len(test):
        raise FurlongError(f"{len(train)} training and {len(test)} test images are too few.")
    classes = max(train.n_classes, test.n_classes)
    device = device_of(encoder)
    view = crop_flip(augment).view if plan.crops else augment.plain
    with borrowed(encoder), with_seed(seed, device):
        width = out_dim(encoder, train.channels, augment.plain(train.pixels[:1]).shape[-1])
        head = new_head(plan.head, width, classes).to(device)
        _train(encoder, head, train, view, plan, device, progress)
        model = nn.Sequential(encoder, head)
        scores = class_scores(model, test, augment)
        trained = top1(class_scores(model, train, augment), train.labels)
        return TuningResult(top1(scores, test.labels), trained, len(train), scores)


def new_head(kind: Literal["linear", "mlp"], width: int, classes: int) -> nn.Module:
    """B×width to class scores B×classes; the last layer starts from N(0, 0.01²) and zero bias."""
    last = nn.Linear(width, classes)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return last if kind == "linear" else nn.Sequential(nn.Linear(width, width), nn.ReLU(), last)


def class_scores(model: nn.Module, images: ImageSet, augment: Recipe) -> Tensor:
    """The scores N×C that ``model`` gives to ``images``."""
    scores = features(model, images.pixels, augment.plain)
    if not torch.isfinite(scores).all():
        raise FurlongError("the fine-tuning diverged: its scores are not finite. Lower the rate.")
    return scores


def _train(
    encoder: nn.Module,
    head: nn.Module,
    train: ImageSet,
    view: Callable[[Tensor], Tensor],
    plan: Tuning,
    device: torch.device,
    progress: Progress,
) -> None:
    assert train.labels is not None
    encoder.requires_grad_(plan.finetune == "full")
    rates = (plan.lr, plan.head_lr)
    parts = [list(encoder.parameters()) if plan.finetune == "full" else [], head.parameters()]
    groups = [{"params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True)]
    optimiser = plan.new_optimiser(groups)
    for epoch in range(plan.epochs):
        head.train()
        encoder.train(plan.moving is None or epoch < plan.moving)
        for group, lr in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = lr * plan.decay(epoch)
        for rows in torch.split(torch.randperm(len(train)), plan.batch_size):
            if len(rows) == 1:  # BatchNorm needs two; another image is left out in the next epoch
                continue
            x = view(train.pixels[rows].to(device))
            loss = F.cross_entropy(head(encoder(x)), train.labels[rows].to(device))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            if not math.isfinite(loss.item()):
                raise FurlongError(
                    f"the fine-tuning diverged in epoch {epoch + 1}: lower its learning rate."
                )
            optimiser.step()
        progress(epoch + 1, plan.epochs)


@dataclass(frozen=True)
class FineTuned(Protocol):
    """The accuracy of an encoder after fine-tuning with a new head.

    Options that are ``None`` are as the recipe says.
    """

    recipes: ClassVar[Collection[str]] = tuple(TUNINGS)

    recipe: str = setting("fedu", "How encoder and head are trained: a key of TUNINGS.")
    epochs: int | None = setting(None, "Passes over the labelled images.", above=0)
    batch_size: int | None = setting(None, "Images per step.", at_least=2)
    lr: float | None = setting(None, "The encoder's learning rate.", above=0)
    head_lr: float | None = setting(None, "The head's learning rate.", above=0)
    finetune: Literal["full", "head_bn"] | None = setting(
        None, "full: everything is trained; head_bn: the head, and BatchNorm's statistics move."
    )
    head: Literal["linear", "mlp"] | None = setting(None, "mlp has one hidden layer.")
    crops: bool | None = setting(None, "Random crops and flips instead of the plain images.")

    def plan(self) -> tuple[str, Tuning]:
        """The recipe's name, and the recipe with what was changed of it."""
        given = {name: value for name, value in asdict(self).items() if name in CHANGES}
        return self.recipe, tuning(self.recipe, **given)

    def settings(self, _: Images) -> dict[str, Any]:
        """The recipe with what was changed of it."""
        name, plan = self.plan()
        return {"recipe": name, **{key: getattr(plan, key) for key in CHANGES}}

    def labelled(self, images: Images) -> ImageSet:
        """The images that are trained on."""
        return images.train

    def measure(self, encoded: Encoded, progress: Progress = silent) -> dict[str, Any]:
        """The accuracies on test and training images, and how many of these there were."""
        images, test = encoded.images, encoded.images.labelled()[1]
        result = fine_tune(
            encoded.encoder,
            self.labelled(images),
            test,
            self.plan()[1],
            augment=images.augment,
            seed=images.seed,
            progress=progress,
        )
        return result.numbers(test, images.seed)


CHANGES = tuple(each.name for each in fields(FineTuned) if each.name != "recipe")


@dataclass(frozen=True)
class Transfer(FineTuned):
    """Fine-tuning on all of another set; beside it a random start: what that set itself teaches."""

    kind: ClassVar[str] = "transfer"
    with_random: ClassVar[bool] = True

    data: str = setting("", "The other set.")
    root: str | None = setting(None, "Where it lies.")
    images: int | None = setting(None, "Use at most this many of its training images.", above=0)
    test_images: int | None = setting(None, "Use at most this many test images.", above=0)

    def settings(self, images: Images) -> dict[str, Any]:
        """The recipe, and how many images there were."""
        train, test = images.labelled()
        return {**super().settings(images), "images": len(train), "test_images": len(test)}
