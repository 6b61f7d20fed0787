"""Was this image trained on? Attacks on an encoder, by whoever holds it and the image.

- *views*: EncoderMI (Liu et al., CCS 2021, arXiv 2108.11023), its threshold version: views of a
  member are more alike. The score is the mean cosine of two of ``VIEWS`` views' features.
- *norms*: LpLA (arXiv 2506.05743): the length of a member's features differs. Which way, and by
  which norm, an attacker learns from images of whose membership he knows.
- *loss*: members have a lower loss (Yeom et al., CSF 2018): the method's own where it is a function
  of one network and a batch, else the contrastive loss of the encoder's features.
- *together*: all of these, with the weights that a logistic regression gives them.

What has to be learnt is learnt on one half of the images and tried on the other, and the other way
round: an attacker who knows the membership of half of the images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.audit import memorisation
from furlong.audit.measures import Attack, Finding, by_scores, told_apart
from furlong.audit.scene import Scene, Tell
from furlong.data.augment import Augmentation
from furlong.evaluation.features import features
from furlong.seeding import seeded, shuffled

VIEWS = 10
TEMPERATURE = 0.2
NORMS = (1.0, 2.0, torch.inf)
REFERENCE = 500  # of the attacker's images, that features are contrasted with

HOW = {
    "views": "Draws ten views of an image and looks how alike their features are (EncoderMI): "
    "views of a training image are more alike.",
    "norms": "Looks at the length of an image's features by three norms (LpLA), having learnt from "
    "half of the images what lengths members have.",
    "loss": "Computes the training loss of the image: that of a training image is lower.",
    "together": "Weighs all of these and the recognition by a corner, as learnt from half of the "
    "images.",
}

Loss = Callable[[Tensor], Tensor]
"""Losses n of images uint8 n×C×H×W."""


def on_encoder(
    target: str,
    encoders: tuple[nn.Module, nn.Module],
    losses: tuple[Loss | None, Loss | None],
    here: Scene,
    rows: Tensor,
    tell: Tell,
) -> Iterator[Finding]:
    """All attacks on a learnt encoder, beside an untrained one; and recognition by a corner.

    ``losses``: the method's own, with the networks of either. ``rows``: of the training images,
    those that the encoder has seen.
    """
    members, others = here.chosen(rows)
    both, reference, columns = torch.cat([members, others]), here.own[:REFERENCE], []
    for number, (each, loss) in enumerate(zip(encoders, losses, strict=True)):
        tell(f"membership, {target}", number, 2)
        with seeded(torch.device("cpu"), here.seed, "audit", "views"):  # the same views for both
            found = scores(each, here.recipe, both, reference, loss)
        corner = memorisation.margins(each, here.recipe, both, reference)
        columns.append({**found, "corner": corner[:, None]})
    tell(f"membership, {target}", 2, 2)
    for name in ("views", "norms", "loss", "together", "corner"):
        mine, control = (_one_score(name, each, len(members), here.seed) for each in columns)
        run, untrained, gain = told_apart(*mine, control, here.seed)
        memory = name == "corner"
        family, how = ("memorisation", memorisation.HOW) if memory else ("membership", HOW[name])
        attack = Attack(name, family, target, how, len(members))
        yield by_scores(attack, run, untrained, gain, "with an untrained encoder")


def _one_score(
    name: str, columns: dict[str, Tensor], members: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Of every member, and of every other."""
    rows = torch.cat([*columns.values()], dim=1) if name == "together" else columns[name]
    if rows.shape[1] == 1:
        return rows[:members, 0], rows[members:, 0]
    return learnt(rows[:members], rows[members:], seed)


def scores(
    encoder: nn.Module,
    recipe: Augmentation,
    pixels: Tensor,
    reference: Tensor,
    loss: Loss | None = None,
) -> dict[str, Tensor]:
    """By attack, columns N×k of images uint8 N×C×H×W; the higher ``views`` and ``loss``, the surer.

    ``reference``: R×C×H×W of the attacker's own, that an image's loss is contrasted with. Random
    numbers are torch's global ones.
    """
    seen = torch.stack([features(encoder, pixels, recipe.view) for _ in range(VIEWS)], dim=1)
    unit = F.normalize(seen, dim=2)
    together = unit.sum(dim=1).square().sum(dim=1)
    plain = features(encoder, pixels, recipe.plain)
    found = {
        "views": (together - VIEWS) / (VIEWS * (VIEWS - 1)),
        "loss": -contrast(unit, F.normalize(features(encoder, reference, recipe.plain), dim=1)),
    }
    if loss is not None:
        found["loss"] = -loss(pixels)
    columns = {name: values[:, None] for name, values in found.items()}
    return columns | {"norms": torch.stack([plain.norm(p, dim=1) for p in NORMS], dim=1)}


def contrast(views: Tensor, others: Tensor) -> Tensor:
    """InfoNCE N of unit features N×V×d of views, neighbours being positives, others R×d."""
    first, second = views[:, ::2], views[:, 1::2]
    positive = (first * second).sum(dim=2) / TEMPERATURE  # N×V/2
    negative = (first @ others.T).div_(TEMPERATURE).logsumexp(dim=2)
    return (torch.logaddexp(positive, negative) - positive).mean(dim=1)


def learnt(members: Tensor, others: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """One score for each row of members n×k and others m×k, learnt from the other half's rows."""
    sides = members.double(), others.double()
    halves = [shuffled(len(side), seed, "halves") % 2 for side in sides]
    made = [torch.empty(len(side), dtype=torch.float64) for side in sides]
    for half in (0, 1):
        known = [side[own != half] for side, own in zip(sides, halves, strict=True)]
        weigh = regression(*known)
        tried = [side[own == half] for side, own in zip(sides, halves, strict=True)]
        odds = weigh(torch.cat(tried))
        odds = (odds - odds.mean()) / odds.std().clamp(min=1e-12)  # the halves have other scales
        parts = torch.split(odds, [*map(len, tried)])
        for out, own, part in zip(made, halves, parts, strict=True):
            out[own == half] = part
    return made[0], made[1]


def regression(members: Tensor, others: Tensor) -> Callable[[Tensor], Tensor]:
    """Logistic regression of members n×k against others m×k: rows to log odds; ridge 1, Newton."""
    rows = torch.cat([members, others])
    centre, scale = rows.mean(dim=0), rows.std(dim=0).clamp(min=1e-12)
    x = F.pad((rows - centre) / scale, (0, 1), value=1.0)
    y = torch.cat([torch.ones(len(members)), torch.zeros(len(others))]).double()
    ridge = torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(25):
        p = (x @ weights).sigmoid()
        slope = x.T @ (p - y) + ridge @ weights
        bend = (x * (p * (1 - p))[:, None]).T @ x + ridge
        weights = weights - torch.linalg.solve(bend, slope)
    return lambda new: ((new.double() - centre) / scale) @ weights[:-1] + weights[-1]
