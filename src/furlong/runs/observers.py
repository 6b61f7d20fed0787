"""What looks at a run after every exchange: each observer does one thing, in the list's order.

An observer is called with an :class:`Event`. The first ones add to the event's line what they have
seen; the later ones write it down, save the run, and tell whoever watches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from furlong.core.context import Batch, Exchange
from furlong.core.exchange import Engine, ExchangeResult
from furlong.core.method import Report
from furlong.errors import FurlongError
from furlong.evaluation.angles import angles
from furlong.evaluation.features import features
from furlong.evaluation.knn import KNN
from furlong.evaluation.protocol import Encoded, Images
from furlong.evaluation.quality import Quality, quality, sample
from furlong.runs import checkpoint
from furlong.runs.encoders import encoders
from furlong.runs.prepare import Prepared
from furlong.seeding import seed_of, shuffled, threads, with_seed

QUALITY = tuple(field.name for field in fields(Quality))
SAMPLE = 1000  # images for the quality: the rank of n images is at most n
NOTHING_DONE = dict.fromkeys(("seconds", "images", "bytes_up", "bytes_down", "failures"), 0.0)


@dataclass(frozen=True)
class Event:
    """One exchange has ended."""

    result: ExchangeResult[Any]
    line: dict[str, Any]  # of metrics.jsonl
    totals: dict[str, float]  # of the run so far
    done: int  # exchanges
    total: int

    @classmethod
    def after(cls, result: ExchangeResult[Any], before: Mapping[str, float], total: int) -> Event:
        """The event of ``result``; ``before``: the totals without it."""
        line = line_of(result)
        now = {
            "seconds": result.seconds,
            "images": _images(result),
            "bytes_up": result.up.total,
            "bytes_down": result.down.total,
            "failures": len(result.failures),
        }
        totals = {name: before[name] + value for name, value in now.items()}
        return cls(result, line, totals, result.exchange.index + 1, total)

    @property
    def last(self) -> bool:
        """Whether the run is over."""
        return self.done == self.total


Observer = Callable[[Event], None]


def line_of(result: ExchangeResult[Any]) -> dict[str, Any]:
    """What metrics.jsonl says of an exchange before anything has been measured."""
    total = sum(result.examples.values()) or 1
    names = sorted({name for m in result.metrics.values() for name in m} - {"images"})
    means = {
        name: sum(m[name] * result.examples[c] for c, m in result.metrics.items() if name in m)
        / total
        for name in names
    }
    return {
        **means,  # first: what a client calls its metrics must not replace what we say
        **result.own,
        "exchange": result.exchange.index,
        "round": result.exchange.round,
        "kind": result.exchange.kind,
        "knn": None,
        "seconds": round(result.seconds, 4),
        "images_per_second": round(_images(result) / max(result.seconds, 1e-9), 1),
        "bytes_up": result.up.total,
        "bytes_down": result.down.total,
        "up": asdict(result.up),
        "down": asdict(result.down),
        "clients": {str(c): m for c, m in result.metrics.items()},
        "failures": [asdict(f) for f in result.failures],
        **dict.fromkeys(QUALITY),
    }


def _images(result: ExchangeResult[Any]) -> float:
    return sum(m.get("images", 0.0) for m in result.metrics.values())


class Monitor:
    """Now and then kNN accuracy, and quality without labels; one warning when that collapses.

    An encoder that cannot be measured must not end a run.
    """

    def __init__(self, prepared: Prepared, say: Callable[[str], None]) -> None:
        self._prepared, self._say, self._warned = prepared, say, False
        setup, self._settings = prepared.setup, prepared.config.evaluate
        self._images = Images(prepared.train, prepared.test, setup.augment, setup.seed)
        self._pixels = sample(self._images, min(SAMPLE, self._settings.monitor_images))
        self._knn = KNN(self._settings.k, self._settings.temperature)

    def __call__(self, event: Event) -> None:
        """Every ``evaluate.knn_every`` exchanges and at the end."""
        every = self._settings.knn_every or max(1, event.total // 20)
        if event.last or event.done % every == 0:
            event.line.update(self.measure(encoders(self._prepared, event.result.server)))
            event.line.update(self._reasons(event))

    def measure(self, found: Mapping[str, nn.Module]) -> dict[str, float]:
        """Means over the encoders, for the log; nothing of what cannot be measured."""
        measured: dict[str, float] = {}
        moved = {name: one.to(self._prepared.setup.device) for name, one in found.items()}
        for what, measure in (
            ("the kNN monitor", self._accuracy),
            ("the monitor without labels", self._quality),
        ):
            try:
                with threads(self._prepared.workers):
                    each = measure(moved)
            except FurlongError as error:
                self._say(f"{what} failed: {error}")
            else:
                measured |= {name: sum(one[name] for one in each) / len(each) for name in each[0]}
        return measured

    def _accuracy(self, found: Mapping[str, nn.Module]) -> list[dict[str, float]]:
        if not self._images.has_labels:
            return [{}]
        limit = self._settings.monitor_images
        encoded = (Encoded(encoder, self._images, limit) for encoder in found.values())
        return [{"knn": self._knn.measure(each)["accuracy"]} for each in encoded]

    def _quality(self, found: Mapping[str, nn.Module]) -> list[dict[str, float]]:
        if not len(self._pixels):  # they are all on other machines
            return [{}]
        seed = seed_of(self._images.seed, "quality") % 2**31  # the same views every time
        views = self._images.augment
        each = {name: quality(one, self._pixels, views, seed) for name, one in found.items()}
        self._warn(each)
        return [asdict(one) for one in each.values()]

    def _reasons(self, event: Event) -> dict[str, float]:
        """What the method says of itself, from labelled images."""
        images = self._images
        if images.test is None or images.test.labels is None:
            return {}
        setup, server = self._prepared.setup, self._prepared.server
        rows = shuffled(len(images.test), setup.seed, "explain")[:SAMPLE]
        pixels, labels = images.test.pixels[rows], images.test.labels[rows]
        batch = Batch(pixels.to(setup.device), rows, labels.to(setup.device), setup.augment)
        seed = seed_of(setup.seed, "explain") % 2**31
        with with_seed(seed, setup.device), threads(self._prepared.workers), torch.no_grad():
            ctx = server.context(event.result.exchange)
            return self._prepared.method.explain(event.result.server, batch, ctx)

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


class Angles:
    """FedCA's Figure 4: the angle between two clients' features of the same test image."""

    def __init__(self, prepared: Prepared) -> None:
        images = prepared.train if prepared.test is None else prepared.test
        rows = shuffled(len(images), prepared.setup.seed, "angles")
        self._pixels = images.pixels[rows[: prepared.config.evaluate.angles]]
        self._server, self._workers = prepared.server, prepared.workers
        self._features: list[Tensor] = []
        prepared.server.watch = self._watch

    def _watch(self, exchange: Exchange, report: Report[Any]) -> None:
        """Encode with the client's model, if it is one of the two of this round."""
        server, setup = self._server, self._server.setup
        cohort = server.cohort(exchange)
        two = shuffled(len(cohort), setup.seed, "angles", exchange.round)[:2]
        if report.client not in (cohort[i] for i in two):
            return
        with torch.random.fork_rng(devices=[]), threads(self._workers):
            encoder = server.method.local_encoder(report.upload, server.context(exchange))
            if encoder is not None:
                batches = torch.split(self._pixels, 512)
                self._features += [features(encoder.to(setup.device), batches, setup.augment.plain)]

    def __call__(self, event: Event) -> None:
        """Percentiles 5, 25, 50, 75, 95 in degrees of the exchange that just ended."""
        found, self._features = self._features, []
        points = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
        event.line["angles"] = angles(*found).quantile(points).tolist() if len(found) > 1 else None


class TensorBoard:
    """TensorBoard events; opened late because the import takes a second."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def __call__(self, event: Event) -> None:
        """The line's numbers as scalars."""
        line, step = event.line, event.line["exchange"]
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        usual = ("loss", "divergence", "knn", "images_per_second", "bytes_up", "bytes_down")
        for name in (*usual, *QUALITY):
            if line.get(name) is not None:
                self._writer.add_scalar(name, line[name], step)
        for client, measured in line["clients"].items():
            for name, value in measured.items():
                self._writer.add_scalar(f"clients/{client}/{name}", value, step)


def checkpoints(run: Path, engine: Engine, exchanges: Sequence[Exchange], every: int) -> Observer:
    """A checkpoint every ``every`` rounds and at the end."""

    def save(event: Event) -> None:
        now = event.result.exchange.round
        # between rounds: then no exchange depends on what another of its round left on disk
        ends = event.last or exchanges[event.done].round != now
        if event.last or (ends and (now + 1) % every == 0):
            state = event.result.server
            checkpoint.save(run, event.done, state, engine.states(), event.totals)

    return save


@dataclass(frozen=True)
class Status:
    """What a person watching wants to know after an exchange."""

    done: int
    total: int
    round: int
    loss: float | None
    knn: float | None
    images_per_second: float
    bytes_up: int
    bytes_down: int
    seconds_left: float
    failures: list[str]

    @classmethod
    def after(cls, event: Event) -> Status:
        """The status after ``event``."""
        line, totals = event.line, event.totals
        return cls(
            event.done,
            event.total,
            line["round"],
            line.get("loss"),
            line["knn"],
            line["images_per_second"],
            int(totals["bytes_up"]),
            int(totals["bytes_down"]),
            totals["seconds"] / event.done * (event.total - event.done),
            [f"client {f['client']} {f['kind']}: {f['reason']}" for f in line["failures"]],
        )
