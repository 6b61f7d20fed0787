"""Inverting gradients: the images behind a small update (Geiping et al., NeurIPS 2020).

    x* = argmin 1 - cos(∇L(x), g) + α·TV(x)

by Adam on the signs of the gradient, from noise. g is what a client with these few images would
send after one step of plain gradient descent, divided by the learning rate: the worst case. A
client with many images, steps or a momentum sends less of each image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from furlong.audit.measures import Attack, Finding, alike, by_images, recognised
from furlong.audit.scene import DECOYS, Scene, Tell
from furlong.core.context import Batch
from furlong.data.augment import Augmentation, extremes, unit
from furlong.devices import moved
from furlong.errors import FurlongError

IMAGES = 2  # behind an update: a contrast needs two
UPDATES = 4  # that are inverted
STEPS = 250
RATE = 0.1
SMOOTH = 1e-3  # α

HOW = (
    "Is the server and has the change of the weights after one step on two images; looks for "
    "images that would change them alike (inverting gradients)."
)

Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Given(Batch):
    """A batch whose views are given, not drawn."""

    given: tuple[Tensor, ...] = ()

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        """The first ``n`` of them."""
        return self.given[:n]


@dataclass(frozen=True)
class _Counting(Batch):
    """A batch that remembers how many views a loss asks for."""

    asked: list[int] = field(default_factory=list)

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        self.asked.append(n)
        return super().views(n)


def on_update(
    nets: tuple[nn.Module, nn.Module], loss: Loss, here: Scene, rows: Tensor, tell: Tell
) -> Finding:
    """Updates of two images each are inverted, of a learnt network and of an untrained one."""
    members, others = here.chosen(rows)
    recipe, index = here.recipe, torch.arange(IMAGES)
    few = torch.split(members[: IMAGES * UPDATES], IMAGES)
    counting = _Counting(few[0], index, None, recipe)
    loss(nets[0].train(), counting)
    views = [recipe.views(images, max(counting.asked)) for images in few]
    truth = torch.cat([unit(torch.cat(each), recipe) for each in views])
    decoys = unit(recipe.view(others[:DECOYS]), recipe)
    numbers, together = [], len(truth) // len(few)
    for which, net in enumerate(nets):
        found = []
        for update, (images, each) in enumerate(zip(few, views, strict=True)):
            step = _steps(tell, which * len(few) + update, 2 * len(few))
            batch = Batch(images, index, None, recipe)
            try:
                guess = inverted(net.train(), loss, batch, each, recipe, step)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise FurlongError(f"the network has no second derivative ({reason})") from None
            real = truth[update * together : (update + 1) * together]
            found.append(paired(unit(torch.cat(guess), recipe), real))
        all_found = torch.cat(found)
        measured = recognised(all_found, truth, decoys, here.seed, together)
        numbers.append((measured, here.shown(truth, all_found)))
    (run, pictures), (untrained, _) = numbers
    attack = Attack("gradient", "update", f"update of {IMAGES} images", HOW, IMAGES * len(few))
    chance = together / (together + len(decoys))  # the best of an update's guesses is taken
    return by_images(attack, (run, untrained), chance, here.blank(truth), pictures)


def _steps(tell: Tell, update: int, updates: int) -> Callable[[int, int], None]:
    """The progress of one update among several."""

    def step(done: int, total: int) -> None:
        if done % 20 == 0:
            tell("gradient inversion", update * total + done, updates * total)

    return step


def gradient(net: nn.Module, loss: Loss, batch: Batch, *, graph: bool = False) -> list[Tensor]:
    """Of the loss on ``batch``, by parameter; ``graph``: so that it can be differentiated again."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    found = torch.autograd.grad(
        loss(net, batch), parameters, create_graph=graph, materialize_grads=True
    )
    return list(found)


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """1 - the cosine of two gradients."""
    dots = torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()
    squares = [torch.stack([a.square().sum() for a in each]).sum() for each in (one, other)]
    return 1 - dots / (squares[0] * squares[1]).sqrt().clamp(min=1e-20)


def inverted(
    net: nn.Module,
    loss: Loss,
    truth: Batch,
    views: tuple[Tensor, ...],
    recipe: Augmentation,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> tuple[Tensor, ...]:
    """Views B×C×S×S each, found from the gradient of ``loss`` on ``views`` of the batch ``truth``.

    Whatever else the loss draws (rotations, masks), the attacker is taken to know.
    """
    state = torch.get_rng_state()

    def given(now: tuple[Tensor, ...]) -> Given:
        torch.set_rng_state(state)
        return Given(truth.pixels, truth.index, truth.labels, truth.augment, now)

    target = [g.detach() for g in gradient(net, loss, given(views))]
    black, white = (moved(each, views[0].device) for each in extremes(views[0], recipe))
    guess = torch.stack([torch.randn_like(view) for view in views])
    guess = (guess * (white - black) / 4 + (white + black) / 2).requires_grad_(True)
    optimiser = torch.optim.Adam([guess], RATE)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for step in range(STEPS):
        mine = gradient(net, loss, given(tuple(guess.unbind(0))), graph=True)
        aim = apart(mine, target) + SMOOTH * roughness(guess)
        (slope,) = torch.autograd.grad(aim, guess)
        guess.grad = slope.sign()
        optimiser.step()
        rates.step()
        with torch.no_grad():
            guess.copy_(torch.minimum(torch.maximum(guess, black), white))
        tell(step + 1, STEPS)
    return tuple(guess.detach().unbind(0))


def roughness(images: Tensor) -> Tensor:
    """Total variation: the mean difference of neighbouring pixels of …×H×W."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    return down + across


def paired(guesses: Tensor, truth: Tensor) -> Tensor:
    """The guesses B×C×S×S by the true images that they fit best: an update has no order."""
    rows, columns = linear_sum_assignment(-alike(truth, guesses).numpy())
    return guesses[torch.as_tensor(columns)[torch.as_tensor(rows).argsort()]]
