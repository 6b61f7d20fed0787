"""Watching representations during training without labels, so that no collapse goes unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields

from torch import nn

from furlong.errors import FurlongError
from furlong.evaluation import Quality, quality
from furlong.runs.prepare import Prepared
from furlong.seeding import seed_of, shuffled, threads

QUALITY = tuple(field.name for field in fields(Quality))
IMAGES = 1000  # enough for the mean over pairs; the rank of n images is at most n


class Watch:
    """Alignment, uniformity, effective rank and spread of encoders; one warning on collapse."""

    def __init__(self, prepared: Prepared, say: Callable[[str], None]) -> None:
        images, setup = prepared.train, prepared.setup
        rows = shuffled(len(images), setup.seed, "quality")
        self._pixels = images.pixels[rows[: min(IMAGES, prepared.config.evaluate.monitor_images)]]
        self._prepared, self._say, self._warned = prepared, say, False

    def measure(self, encoders: Mapping[str, nn.Module]) -> dict[str, float | None]:
        """Means over the encoders, for the log; none if they cannot be measured."""
        if not len(self._pixels):  # they are all on other machines
            return {}
        try:
            found = {name: self._quality(encoder) for name, encoder in encoders.items()}
        except FurlongError as error:  # must not end a run
            self._say(f"the monitor without labels failed: {error}")
            return {}
        self._warn(found)
        each = [asdict(one) for one in found.values()]
        return {name: sum(one[name] for one in each) / len(each) for name in each[0]}

    def _quality(self, encoder: nn.Module) -> Quality:
        setup = self._prepared.setup
        seed = seed_of(setup.seed, "quality") % 2**31  # the same views every time
        with threads(self._prepared.workers):
            return quality(encoder.to(setup.device), self._pixels, setup.augment, seed)

    def _warn(self, found: Mapping[str, Quality]) -> None:
        collapsed = [name for name, one in found.items() if one.collapsed]
        if not collapsed or self._warned:
            return
        self._warned = True
        worst = found[collapsed[0]]
        self._say(
            f"warning: the representation has collapsed ({', '.join(collapsed)}): effective rank "
            f"{worst.effective_rank:.1f}, spread {worst.spread:.3f}. All images look alike to the "
            "encoder. Try a lower --optimiser.lr, a larger --batch-size or another method."
        )
