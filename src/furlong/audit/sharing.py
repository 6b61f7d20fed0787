"""What features of single images reveal: whose they are, and what the images look like.

FedCA and FCL pass rows of features on to everybody, MFCL sends representations to the server. The
attacker holds the rows, the network that made them and images of his own.

- *linking*: is this image among those behind the rows? The score is the greatest cosine between a
  row and a feature of the image.
- *inversion*: what does the image look like? Where the server has a decoder, as in MFCL, that is
  used. Otherwise the attacker trains one on features of his own images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from furlong.audit.measures import Attack, Finding, by_images, by_scores, recognised, told_apart
from furlong.audit.scene import DECOYS, Scene, Tell
from furlong.core.method import Shared
from furlong.data.augment import Augmentation, unit
from furlong.methods.fedae import Decoder

VIEWS = 8  # of an image that is searched for
MOST_ROWS = 1000  # of those that were sent
BATCH = 64
STEPS = 400  # of the attacker's decoder
WIDTH = 128  # channels at its start
REDRAWN = 100  # images that are drawn from features

HOW = {
    "linking": "Has the features that were sent and a candidate image, computes its features in "
    "eight views and looks how near the nearest of those sent is.",
    "inversion": "Trains a decoder on features of his own images, and draws images from features "
    "as the client sends them.",
    "decoding": "Is the server, which holds the decoder that was trained to invert what clients "
    "send, and uses it.",
}


def on_features(
    target: str, shared: Shared, blank: Shared, here: Scene, rows: Tensor, tell: Tell
) -> Iterator[Finding]:
    """Linking and inversion of what the owner of the training images ``rows`` sent.

    ``blank``: the same of an untrained network, without rows.
    """
    members, others = here.chosen(rows)
    both, recipe, seed = torch.cat([members, others]), here.recipe, here.seed
    views = [recipe.plain(both), *(recipe.view(both) for _ in range(VIEWS - 1))]
    known = {
        "sent": (shared, some(shared.rows)),
        # what an untrained network's features of the same client's images would be
        "untrained": (blank, made(blank, recipe.view(here.train.pixels[rows[:MOST_ROWS]]))),
        "control": (shared, made(shared, recipe.view(here.own))),
    }
    scores = {}
    for number, (name, (whose, sent)) in enumerate(known.items(), 1):
        found = linked(sent, whose.plain, views)
        scores[name] = found[: len(members)], found[len(members) :]
        tell(f"linking, {target}", number, len(known))
    run, _, gain = told_apart(*scores["sent"], scores["control"], seed)
    untrained, _, _ = told_apart(*scores["untrained"], scores["control"], seed)
    attack = Attack("linking", "features", target, HOW["linking"], len(members))
    yield by_scores(attack, run, untrained, gain, "with features of other images")

    seen, decoys = recipe.view(members[:REDRAWN]), unit(recipe.view(others[:DECOYS]), recipe)
    truth, numbers = unit(seen, recipe), []
    word = "inversion" if shared.decoder is None else "decoding"
    for name, whose in (("", shared), (" of an untrained network", blank)):
        images = drawn(whose, seen, here.own, recipe, partial(tell, f"{word}{name}, {target}"))
        numbers.append((recognised(images, truth, decoys, seed), here.shown(truth, images)))
    (run, pictures), (untrained, _) = numbers
    attack = Attack(word, "features", target, HOW[word], len(truth))
    chance = 1 / (len(decoys) + 1)
    yield by_images(attack, (run, untrained), chance, here.blank(truth), pictures)


def linked(rows: Tensor, plain: Callable[[Tensor], Tensor], views: list[Tensor]) -> Tensor:
    """Scores N of N images, each given as views N×C×S×S: the greatest cosine to any of the rows."""
    known = F.normalize(rows.flatten(1), dim=1)
    found = []
    for one in views:
        seen = torch.cat([plain(part).flatten(1) for part in torch.split(one, BATCH)])
        found.append((F.normalize(seen, dim=1) @ known.T).amax(dim=1))
    return torch.stack(found).amax(dim=0)


def some(rows: Tensor) -> Tensor:
    """At most ``MOST_ROWS`` of the rows, at random."""
    return rows if len(rows) <= MOST_ROWS else rows[torch.randperm(len(rows))[:MOST_ROWS]]


def made(shared: Shared, views: Tensor) -> Tensor:
    """Rows as the client makes them of views N×C×S×S, in batches as it does."""
    return torch.cat([shared.sent(part) for part in torch.split(views, BATCH)])


def drawn(
    shared: Shared,
    views: Tensor,
    own: Tensor,
    recipe: Augmentation,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Tensor:
    """Images N×C×S×S in [0, 1] that an attacker draws from the rows of views N×C×S×S.

    ``own``: his images, uint8 M×C×H×W. Random numbers are torch's global ones.
    """
    rows = made(shared, views)
    if shared.decoder is not None:
        return torch.cat([shared.decoder(part) for part in torch.split(rows, BATCH)])
    decode = learnt_decoder(shared, own, recipe, tell)
    return decode(rows)


def learnt_decoder(
    shared: Shared,
    own: Tensor,
    recipe: Augmentation,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Callable[[Tensor], Tensor]:
    """Rows N×d to images N×C×S×S, learnt from views of the attacker's images and their rows."""
    first = shared.plain(recipe.view(own[:2])).flatten(1)
    size, channels = own.shape[2], own.shape[1]
    decoder = Decoder(first.shape[1], channels, recipe.size or size, WIDTH)
    optimiser = torch.optim.Adam(decoder.parameters(), 2e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=STEPS)
    for step in range(STEPS):
        view = recipe.view(own[torch.randint(len(own), (min(BATCH, len(own)),))])
        loss = F.mse_loss(decoder(shared.sent(view).flatten(1)), unit(view, recipe))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        rates.step()
        tell(step + 1, STEPS)
    decoder.eval()

    @torch.no_grad()
    def decode(rows: Tensor) -> Tensor:
        return torch.cat([decoder(part) for part in torch.split(rows.flatten(1), BATCH)])

    return decode
