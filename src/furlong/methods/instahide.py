"""InstaHide (Huang et al., ICML 2020): mix images, then flip the sign of random pixels.

    x̃_i = σ_i ⊙ (λ_i1·x_i + Σ_r λ_ir·x_{π_r(i)}),  σ_i ∈ {±1}^{C×H×W} at random
    λ_i = |ε| / Σ|ε|,  ε ~ N(0, I)

redrawn until max λ ≤ c₁ and, with public images, until the private ones weigh at least c₂.

This is obfuscation, not encryption, and it guarantees nothing. Carlini et al. ("Is Private Learning
Possible with Instance Encoding?", arXiv 2011.05315) reconstruct the private images: the absolute
value undoes the signs, encodings that share an image are found by their similarity, and the
mixtures are then inverted. In particular it is NOT guaranteed that an image cannot be recovered,
that two encodings of one image cannot be linked, or that an image is mixed with others at all: a
permutation may send it to itself. Pixels should be centred on zero: where all are positive, the
absolute value is the mixture itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.data.augment import Recipe, extremes
from furlong.devices import moved
from furlong.errors import FurlongError

TRIES = 1000  # for each row of coefficients


def encode(
    images: Tensor,
    recipe: Recipe,
    mix: int,
    max_coefficient: float,
    public: Tensor | None = None,
    private_share: float = 0.3,
) -> Tensor:
    """Views B×C×S×S by ``recipe``, mixed inside the batch, or with views of ``public`` images.

    ``public``: uint8 P×C×H×W, of which as many are drawn as the batch has.
    """
    black, white = extremes(images, recipe)
    # signs hide nothing where pixels are not centred: then around grey, and back
    grey = (black + white) / 2 if bool((black >= 0).all()) else torch.zeros_like(black)
    grey = moved(grey, images.device)
    if public is None:
        return instahide(images - grey, mix, max_coefficient) + grey
    some = moved(public[torch.randint(len(public), (len(images),))], images.device)
    (views,) = recipe.views(some, 1)
    mixed = instahide(images - grey, mix, max_coefficient, views - grey, 2, private_share)
    return mixed + grey


def instahide(
    x: Tensor,
    mix: int,
    max_coefficient: float,
    public: Tensor | None = None,
    private: int = 2,
    private_share: float = 0.3,
) -> Tensor:
    """Every image of ``x`` B×C×H×W mixed with ``mix`` - 1 others of the batch, signs flipped.

    With ``public`` P×C×H×W, only ``private`` images of a mixture are of the batch, which together
    weigh at least ``private_share``.
    """
    if public is None:
        public, private, private_share = x[:0], mix, 0.0
    weights = coefficients(len(x), mix, max_coefficient, private, private_share)
    others = torch.rand(private - 1, len(x)).argsort(dim=1).T
    foreign = len(x) + torch.randint(max(1, len(public)), (len(x), mix - private))
    sources = torch.cat([torch.arange(len(x))[:, None], others, foreign], dim=1)
    return _signed(_mixed(torch.cat([x, public]), sources, weights))


def coefficients(
    count: int,
    mix: int,
    max_coefficient: float,
    private: int = 0,
    private_share: float = 0.0,
    tries: int = TRIES,
) -> Tensor:
    """``count``×``mix`` weights with sum 1, none above ``max_coefficient``.

    The first ``private`` of a row weigh at least ``private_share``. Rows that break a rule are
    drawn again, so the rest keep their distribution.
    """
    weights = torch.empty(count, mix)
    wrong = torch.arange(count)
    for _ in range(tries):
        drawn = torch.randn(len(wrong), mix).abs_()
        weights[wrong] = drawn.div_(drawn.sum(dim=1, keepdim=True))
        bad = weights[wrong].amax(dim=1) > max_coefficient
        if private_share > 0:
            bad |= weights[wrong, :private].sum(dim=1) < private_share
        wrong = wrong[bad]
        if not len(wrong):
            return weights
    share = f" of which {private} make up at least {private_share}" if private_share > 0 else ""
    raise FurlongError(
        f"InstaHide finds hardly any {mix} coefficients of at most {max_coefficient}{share}: "
        "loosen these limits."
    )


def check_limits(
    mix: int, max_coefficient: float, private: int = 0, private_share: float = 0.0
) -> None:
    """Raise if :func:`coefficients` would have to draw very often; draws no random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        coefficients(256, mix, max_coefficient, private, private_share, TRIES // 5)


def _mixed(x: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    """B mixtures of the images of ``x`` that ``sources`` B×k names, weighted by ``weights`` B×k."""
    # as one matrix product; a source that occurs twice in a row adds up
    matrix = torch.zeros(len(sources), len(x)).scatter_add_(1, sources, weights)
    return (moved(matrix, x.device).to(x.dtype) @ x.flatten(1)).view(len(sources), *x.shape[1:])


def _signed(x: Tensor) -> Tensor:
    """``x`` with each value's sign flipped with probability ½."""
    signs = torch.randint(2, x.shape, dtype=torch.int8).mul_(2).sub_(1)
    return x * moved(signs, x.device)
