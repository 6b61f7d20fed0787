"""What looks at a run after every exchange: each observer does one thing, in the list's order.

An observer is called with an :class:`Event`. The first ones add to the event's line what they have
seen; the later ones write it down, save the run, and tell whoever watches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from furlong.evaluation.metrics import top1
from furlong.evaluation.protocol import Encoded, Images
from furlong.evaluation.quality import QUALITY, LabelFree, State, diagnosis, in_words
from furlong.runs import checkpoint
from furlong.runs.encoders import encoders
from furlong.runs.prepare import Prepared
from furlong.seeding import seed_of, shuffled, threads, with_seed

Numbers = dict[str, float]
PASSES = 6  # of an image through the encoder in training: two views, forward and (twice) back
SHARE = 0.04  # of the training that measurements may take
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
    names = sorted({name for m in result.metrics.values() for name in m} - {"images"})
    return {
        # first: what a client calls its metrics must not replace what we say
        **{name: _mean(result, name) for name in names},
        **result.own,
        "exchange": result.exchange.index,
        "round": result.exchange.round,
        "kind": result.exchange.kind,
        "knn": None,
        "untrained": None,
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


def _mean(result: ExchangeResult[Any], name: str) -> float:
    """Over the clients that have the metric, weighted by their numbers of images."""
    having = {c: m[name] for c, m in result.metrics.items() if name in m}
    total = sum(result.examples[c] for c in having) or 1
    return sum(value * result.examples[c] for c, value in having.items()) / total


def _images(result: ExchangeResult[Any]) -> float:
    return sum(m.get("images", 0.0) for m in result.metrics.values())


def usual_spacing(prepared: Prepared, learning: int) -> int:
    """How many of ``learning`` exchanges are between two measurements, if nobody says.

    About twenty measurements in a run; but of a short run no more than take ``SHARE`` of the
    training, both counted in passes of an image through an encoder, and at least two.
    """
    setup, settings = prepared.setup, prepared.config
    sizes = [len(images) for images in (prepared.train, prepared.test) if images is not None]
    passes = sum(min(settings.evaluate.monitor_images, size) for size in sizes)
    passes += 2 * min(SAMPLE, len(prepared.train))
    if settings.run.bound == "single":  # an encoder of every client is measured
        passes *= len(prepared.federation.clients)
    trained = PASSES * setup.epochs * settings.train.fraction * sum(setup.sizes.values())
    affordable = math.ceil(passes / (SHARE * trained))
    return max(1, learning // 20, min(affordable, learning // 2))


class Monitor:
    """Now and then kNN accuracy, and quality without labels, beside the untrained encoder's.

    Says once that a run is heading for collapse, and once that it has collapsed. An encoder that
    cannot be measured must not end a run.
    """

    def __init__(self, prepared: Prepared, random: nn.Module, say: Callable[[str], None]) -> None:
        self._prepared, self._random, self._say = prepared, random, say
        setup, self._settings = prepared.setup, prepared.config.evaluate
        self._images = Images(prepared.train, prepared.test, setup.augment, setup.seed)
        self._knn = KNN(self._settings.k, self._settings.temperature)
        self._quality = LabelFree(min(SAMPLE, self._settings.monitor_images))
        self._untrained: Numbers | None = None
        self._courses: dict[str, list[Numbers]] = {}  # whose encoder -> its measurements
        self._said: set[str] = set()
        self._one_class = ""  # the class that kNN gave to all test images, last time
        self._learning = [e.index for e in prepared.server.exchanges() if e.learns]
        self._every = self._settings.knn_every or usual_spacing(prepared, len(self._learning))

    def __call__(self, event: Event) -> None:
        """Every ``evaluate.knn_every`` exchanges in which something is learnt, and at the end."""
        now = event.result.exchange.index
        done = bisect_right(self._learning, now)
        if event.last or (event.result.exchange.learns and done % self._every == 0):
            if self._untrained is None:
                self._untrained = self.measure({"random": self._random})["random"]
            self._one_class = ""
            each = self.measure(encoders(self._prepared, event.result.server))
            event.line.update(_means(each.values()), untrained=self._untrained)
            event.line.update(self._reasons(event))
            self._warn(each, self._untrained)

    def measure(self, found: Mapping[str, nn.Module]) -> dict[str, Numbers]:
        """Whose encoder -> its numbers; nothing of what cannot be measured."""
        moved = {name: one.to(self._prepared.setup.device) for name, one in found.items()}
        measured: dict[str, Numbers] = {name: {} for name in found}
        for what, numbers in (
            ("the kNN monitor", self._accuracy),
            ("the monitor without labels", self._label_free),
        ):
            try:
                with threads(self._prepared.workers):
                    each = {name: numbers(encoder) for name, encoder in moved.items()}
            except FurlongError as error:
                self._say(f"{what} failed: {error}")
            else:
                measured = {name: {**measured[name], **each[name]} for name in found}
        return measured

    def _accuracy(self, encoder: nn.Module) -> Numbers:
        if not self._images.has_labels:
            return {}
        encoded = Encoded(encoder, self._images, self._settings.monitor_images)
        votes, labels = self._knn.votes(encoded), encoded.features[3]
        given = torch.unique(votes.argmax(dim=1)).tolist()
        if len(given) == 1 < len(torch.unique(labels)):
            classes = self._images.train.classes
            self._one_class = classes[given[0]] if classes else str(given[0])
        return {"knn": top1(votes, labels)}

    def _label_free(self, encoder: nn.Module) -> Numbers:
        if not len(self._images.train):  # they are all on other machines
            return {}
        found = self._quality.measure(Encoded(encoder, self._images))
        return {name: found[name] for name in QUALITY}

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

    def _warn(self, each: Mapping[str, Numbers], untrained: Numbers) -> None:
        """Say that a run is heading for collapse, or has collapsed; either once, the worse last.

        Where neither is so, say once that kNN has only one answer.
        """
        states: dict[State, str] = {}  # state -> the first encoder that is in it
        for name, numbers in each.items():
            course = self._courses.setdefault(name, [])
            course.append(numbers)
            states.setdefault(diagnosis(course, untrained), name)
        for state in ("collapsed", "heading for collapse"):
            if state in self._said:
                return
            if state in states:
                self._said.add(state)
                name = states[state]
                words = in_words(state, each[name], untrained)
                self._say(f"warning ({name}): {words} {self._prepared.method.remedy}")
                return
        if self._one_class and "one class" not in self._said:
            self._said.add("one class")
            self._say(
                f"warning: kNN gives every test image the class {self._one_class!r}, so its "
                f"accuracy is only that class's share. Either {self._settings.k} neighbours are "
                "too many for so few images (give a smaller --evaluate.k), or the encoder tells "
                "nothing apart."
            )


def _means(each: Iterable[Numbers]) -> Numbers:
    """Of several encoders, which all have the same names."""
    rows = list(each)
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


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


def scalars(line: Mapping[str, Any]) -> Numbers:
    """The numbers of a line of metrics.jsonl by the names that boards show."""
    found = {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in ("exchange", "round")
    }
    found |= {f"untrained/{name}": value for name, value in (line["untrained"] or {}).items()}
    for client, measured in line["clients"].items():
        found |= {f"clients/{client}/{name}": value for name, value in measured.items()}
    return found


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
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, step)


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
    epsilon: float | None  # of the privacy budget spent so far
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
            line.get("epsilon"),
            line["images_per_second"],
            int(totals["bytes_up"]),
            int(totals["bytes_down"]),
            totals["seconds"] / event.done * (event.total - event.done),
            [f"client {f['client']} {f['kind']}: {f['reason']}" for f in line["failures"]],
        )
