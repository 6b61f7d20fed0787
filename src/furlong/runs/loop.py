"""The one loop that logs, evaluates and saves: a run from its configuration to its report."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import furlong
from furlong.core.context import Exchange
from furlong.core.exchange import ExchangeResult, draw_cohort
from furlong.core.method import Report
from furlong.core.payload import Traffic, pack, pack_tensors
from furlong.core.weights import snapshot
from furlong.data import heterogeneity
from furlong.deploy.session import Meeting
from furlong.engines.inprocess import SPILL
from furlong.engines.remote import Wire
from furlong.errors import FurlongError
from furlong.evaluation import features, knn, linear_probe
from furlong.nn.encoders import build_encoder
from furlong.reports import page
from furlong.runs import checkpoint, config
from furlong.runs.config import Config
from furlong.runs.folder import RunFolder, load_encoder
from furlong.runs.monitor import QUALITY, Watch
from furlong.runs.prepare import SITES, Prepared, describe_partition, prepare, who
from furlong.seeding import shuffled, threads


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


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]

    @property
    def encoder(self) -> nn.Module:
        """The learnt encoder, in eval mode."""
        return load_encoder(self.folder)

    def accuracy(self, protocol: str = "linear", who: str | None = None) -> float:
        """Test accuracy of one protocol; ``who`` defaults to what the run trained."""
        for row in self.summary["results"]:
            if row["protocol"] == protocol and row["who"] == (who or self.summary["who"]):
                return float(row["accuracy"])
        raise FurlongError(f"{self.folder} has no result for {protocol!r}, {who!r}")


# ---------------------------------------------------------------- evaluation


class Evaluator:
    """kNN and the linear probe on h, against the test split; the last epoch counts."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._settings = prepared.config.evaluate
        self.possible = prepared.test is not None and prepared.test.labels is not None

    def monitor(self, encoder: nn.Module) -> float:
        """Accuracy of kNN on at most ``monitor_images`` images of either split."""
        with threads(self._prepared.workers):
            return self._knn(*self._embed(encoder, self._settings.monitor_images))

    def final(self, encoder: nn.Module, classifier: nn.Module | None = None) -> dict[str, float]:
        """Protocol -> accuracy, on all images."""
        with threads(self._prepared.workers):
            embedded = self._embed(encoder, None)
            found = {"knn": self._knn(*embedded)}
            if self._settings.probe != "none":
                found["linear"] = linear_probe(
                    *embedded,
                    recipe=self._settings.probe,
                    seed=self._prepared.setup.seed,
                    n_classes=self._prepared.train.n_classes,
                ).accuracy
            if classifier is not None:
                found["classifier"] = self._right(classifier)
        return found

    def _right(self, classifier: nn.Module) -> float:
        """The share of test images whose highest score is their class's."""
        images, setup = self._prepared.test, self._prepared.setup
        assert images is not None
        assert images.labels is not None
        scores = features(classifier.to(setup.device), images.pixels, setup.augment.plain)
        return float((scores.argmax(dim=1) == images.labels).double().mean())

    def _embed(
        self, encoder: nn.Module, limit: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features N×d and labels N of the training images, then of the test images."""
        setup, found = self._prepared.setup, []
        for images in (self._prepared.train, self._prepared.test):
            assert images is not None
            assert images.labels is not None
            rows = shuffled(len(images), setup.seed, "monitor")[:limit]
            batches = (images.pixels[part] for part in torch.split(rows, 512))
            found += [features(encoder.to(setup.device), batches, setup.augment.plain)]
            found += [images.labels[rows]]
        return found[0], found[1], found[2], found[3]

    def _knn(self, ours: Tensor, labels: Tensor, theirs: Tensor, test_labels: Tensor) -> float:
        k, n = self._settings.k, self._prepared.train.n_classes
        return knn(ours, labels, theirs, test_labels, k, self._settings.temperature, n_classes=n)

    def embed_all(self, encoder: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features N×d and labels N of all training images, then of the test images."""
        with threads(self._prepared.workers):
            return self._embed(encoder, None)


class _Angles:
    """FedCA's Figure 4: the angle between two clients' features of the same test image."""

    def __init__(self, prepared: Prepared) -> None:
        images = prepared.train if prepared.test is None else prepared.test
        rows = shuffled(len(images), prepared.setup.seed, "angles")
        self._pixels = images.pixels[rows[: prepared.config.evaluate.angles]]
        self._prepared = prepared
        self._features: list[Tensor] = []
        prepared.server.watch = self._watch

    def _watch(self, exchange: Exchange, report: Report[Any]) -> None:
        """Encode with the client's model, if it is one of the two of this round."""
        server, setup = self._prepared.server, self._prepared.setup
        cohort = draw_cohort(
            setup.seed, exchange, self._prepared.federation.clients, server.fraction
        )
        two = shuffled(len(cohort), setup.seed, "angles", exchange.round)[:2]
        if report.client not in (cohort[i] for i in two):
            return
        with torch.random.fork_rng(devices=[]), threads(self._prepared.workers):
            encoder = server.method.local_encoder(report.upload, server.context(exchange))
            if encoder is not None:
                batches = torch.split(self._pixels, 512)
                self._features += [features(encoder.to(setup.device), batches, setup.augment.plain)]

    def take(self) -> list[float] | None:
        """Percentiles 5, 25, 50, 75, 95 in degrees of the exchange that just ended."""
        found, self._features = self._features, []
        if len(found) < 2:
            return None
        points = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
        return [float(q) for q in heterogeneity.angles(*found).quantile(points)]


# ---------------------------------------------------------------- the loop


def run(
    settings: Config,
    show: Callable[[Status], None] | None = None,
    say: Callable[[str], None] | None = None,
    wire: Wire | None = None,
) -> Run:
    """A new run, from the configuration to the report; ``wire``: to nodes that wait already."""
    out = Path(settings.run.out) if settings.run.out else _free_folder(settings)
    settings = config.with_out(settings, out)
    folder, say = RunFolder.create(out), say or (lambda _: None)
    with folder.locked(), _meeting(settings, folder, say, wire) as meeting:
        try:
            prepared = prepare(settings, members=None if meeting is None else meeting.members())
        except BaseException:
            folder.discard()
            raise
        folder.write("partition.json", describe_partition(prepared.train, prepared.split))
        folder.write("config.toml", prepared.config.toml())
        return _go(prepared, folder, None, show, say, meeting)


def _meeting(
    settings: Config, folder: RunFolder, say: Callable[[str], None], wire: Wire | None
) -> AbstractContextManager[Meeting | None]:
    """The nodes of the run, if it has any."""
    if settings.run.engine == "inprocess":
        return nullcontext()
    return Meeting(settings, folder, say, wire)


def resume(
    run_folder: str | Path,
    overrides: Mapping[str, Any] | None = None,
    show: Callable[[Status], None] | None = None,
    say: Callable[[str], None] | None = None,
    wire: Wire | None = None,
) -> Run:
    """Go on with an interrupted run: the result has the same bits as without interruption.

    Only ``workers``, ``device`` (another one rounds differently), ``run.deadline``,
    ``train.min_clients`` and where the SuperLink is can be given anew.
    """
    path = Path(run_folder)
    for name in overrides or {}:
        fact = config.all_facts().get(config.full_name(name))
        if fact is None or not fact.resume:
            raise FurlongError(f"a run goes on with the settings it has: --{name} cannot be given.")
    folder = RunFolder.open(path)
    say = say or (lambda _: None)
    with folder.locked():
        summary = folder.read("summary.json")
        if summary is not None:
            say(f"{path} has finished; nothing to do.")
            shutil.rmtree(path / "server", ignore_errors=True)  # if it was killed just then
            return Run(path, summary)
        settings = config.with_out(config.load(path / "config.toml", overrides), path)
        saved = checkpoint.load(path)
        for note in saved.notes if saved else []:
            say(note)
        done = saved.done if saved else 0
        say(f"going on after exchange {done}" if done else "no checkpoint yet: starting anew")
        folder.keep_lines(done)
        for left in path.glob(f"{SPILL}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with _meeting(settings, folder, say, wire) as meeting:
            prepared = prepare(settings, members=None if meeting is None else meeting.members())
            split = describe_partition(prepared.train, prepared.split)
            began = (folder.read("partition.json") or {}).get("fingerprint")
            if settings.data.name != SITES and began != split["fingerprint"]:
                raise FurlongError(
                    f"the images are not those that {path} began with: see its partition.json. Put "
                    "them back, or start a new run."
                )
            return _go(prepared, folder, saved, show, say, meeting)


def _go(
    prepared: Prepared,
    folder: RunFolder,
    saved: checkpoint.Checkpoint | None,
    show: Callable[[Status], None] | None,
    say: Callable[[str], None],
    meeting: Meeting | None,
) -> Run:
    for note in prepared.notes:
        say(note)
    server, evaluator = prepared.server, Evaluator(prepared)
    exchanges = server.exchanges()
    counters = {"seconds": 0.0, "images": 0.0, "bytes_up": 0.0, "bytes_down": 0.0, "failures": 0.0}
    server.tell = say
    random_encoder = build_encoder(
        prepared.setup.encoder, prepared.setup.channels, prepared.setup.image_size
    ).eval()
    if saved is None:
        state, done = server.init(), 0
        folder.save_weights("random", snapshot(next(iter(prepared.encoders(state).values()))))
    else:
        state, done, counters = saved.server, saved.done, dict(saved.counters)
    folder.load_weights("random", random_encoder)
    angles = _Angles(prepared) if prepared.config.evaluate.angles else None
    watch = Watch(prepared, say)
    engine = prepared.transport() if meeting is None else meeting.transport(prepared)
    with engine as transport, _Board(folder.path) as board:
        transport.restore({} if saved is None else saved.clients)
        knn_every = prepared.config.evaluate.knn_every or max(1, len(exchanges) // 20)
        for result in server.run(prepared.federation, transport, state, done):
            state, done = result.server, result.exchange.index + 1
            last = done == len(exchanges)
            if prepared.config.run.bound != "none":  # a bound sends nothing to anybody
                result = replace(result, up=Traffic(), down=Traffic())
            _count(counters, result)
            score, label_free = None, dict.fromkeys(QUALITY)
            if last or done % knn_every == 0:
                present = prepared.encoders(state)
                score = _monitor(evaluator, present, say) if evaluator.possible else None
                label_free |= watch.measure(present)
            line = {**_line(result, score), **label_free}
            if angles is not None:
                line["angles"] = angles.take()
            folder.append(line)
            board.add(line)
            # between rounds: then no exchange depends on what another of its round left on disk
            ends = last or exchanges[done].round != result.exchange.round
            if last or (ends and (result.exchange.round + 1) % prepared.config.run.save_every == 0):
                checkpoint.save(folder.path, done, state, transport.states(), counters)
            if show is not None:
                show(_status(counters, line, done, len(exchanges)))
        encoders = prepared.encoders(state)
        weights, about = snapshot(next(iter(encoders.values()))), _about(prepared)
        transport.finish(pack_tensors(weights, {"about": json.dumps(about)}))
    summary = _summary(prepared, counters, state)
    if evaluator.possible:
        whose = {"random": random_encoder, **encoders}
        summary["results"] = _results(evaluator, whose, prepared.classifiers(state))
    folder.save_encoder(weights, about)
    folder.write("summary.json", summary)
    if server.folder is not None:  # what clients sent, of use only to a run that goes on
        shutil.rmtree(server.folder, ignore_errors=True)
    page.build(folder.path)
    return Run(folder.path, summary)


def _about(prepared: Prepared) -> dict[str, Any]:
    """What encoder.json says."""
    setup = prepared.setup
    return {
        "encoder": setup.encoder,
        "channels": setup.channels,
        "image_size": setup.image_size,
        "width": setup.width,
        "augment": prepared.config.data.augment,
        "method": prepared.config.method["name"],
        "data": prepared.config.data.name,
        "furlong": furlong.__version__,
    }


def _monitor(
    evaluator: Evaluator, encoders: Mapping[str, nn.Module], say: Callable[[str], None]
) -> float | None:
    """Mean kNN accuracy of the encoders; an encoder that cannot be measured must not end a run."""
    try:
        scores = [evaluator.monitor(encoder) for encoder in encoders.values()]
    except FurlongError as error:
        say(f"the kNN monitor failed: {error}")
        return None
    return sum(scores) / len(scores)


def _results(
    evaluator: Evaluator,
    encoders: Mapping[str, nn.Module],
    classifiers: Mapping[str, nn.Module] | None = None,
) -> list[dict[str, Any]]:
    own = classifiers or {}
    rows: list[dict[str, Any]] = [
        {"who": name, "protocol": protocol, "labels": 1.0, "accuracy": accuracy}
        for name, encoder in encoders.items()
        for protocol, accuracy in evaluator.final(encoder, own.get(name)).items()
    ]
    for protocol in sorted({row["protocol"] for row in rows}):
        alone = [r for r in rows if r["who"].endswith(" alone") and r["protocol"] == protocol]
        if alone:
            rows.append(mean_and_spread(alone, "alone"))
    return rows


def mean_and_spread(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """One row of ``name`` for those of several encoders: means, and of the accuracy ``std``."""
    merged = {**rows[0], "who": name}
    for key, value in rows[0].items():
        if isinstance(value, float) and key != "labels":
            merged[key] = float(torch.tensor([r[key] for r in rows], dtype=torch.float64).mean())
    if "collapsed" in merged:
        merged["collapsed"] = any(row["collapsed"] for row in rows)
    if "accuracy" in merged:
        scores = torch.tensor([row["accuracy"] for row in rows], dtype=torch.float64)
        merged["std"] = float(scores.std()) if len(rows) > 1 else 0.0
    return merged


def _count(counters: dict[str, float], result: ExchangeResult[Any]) -> None:
    counters["seconds"] += result.seconds
    counters["images"] += sum(m.get("images", 0.0) for m in result.metrics.values())
    counters["failures"] += len(result.failures)
    counters["bytes_up"] += result.up.total
    counters["bytes_down"] += result.down.total


def _line(result: ExchangeResult[Any], score: float | None) -> dict[str, Any]:
    total = sum(result.examples.values()) or 1
    names = sorted({name for m in result.metrics.values() for name in m} - {"images"})
    means = {
        name: sum(m[name] * result.examples[c] for c, m in result.metrics.items() if name in m)
        / total
        for name in names
    }
    images = sum(m.get("images", 0.0) for m in result.metrics.values())
    return {
        **means,  # first: what a client calls its metrics must not replace what we say
        **result.own,
        "exchange": result.exchange.index,
        "round": result.exchange.round,
        "kind": result.exchange.kind,
        "knn": score,
        "seconds": round(result.seconds, 4),
        "images_per_second": round(images / max(result.seconds, 1e-9), 1),
        "bytes_up": result.up.total,
        "bytes_down": result.down.total,
        "up": asdict(result.up),
        "down": asdict(result.down),
        "clients": {str(c): m for c, m in result.metrics.items()},
        "failures": [asdict(f) for f in result.failures],
    }


def _status(counters: dict[str, float], line: dict[str, Any], done: int, total: int) -> Status:
    return Status(
        done,
        total,
        line["round"],
        line.get("loss"),
        line["knn"],
        line["images_per_second"],
        int(counters["bytes_up"]),
        int(counters["bytes_down"]),
        counters["seconds"] / done * (total - done),
        [f"client {f['client']} {f['kind']}: {f['reason']}" for f in line["failures"]],
    )


def _summary(prepared: Prepared, counters: dict[str, float], state: Any) -> dict[str, Any]:
    seconds = counters["seconds"]
    return {
        "who": who(prepared.config),
        "method": prepared.config.method["name"],
        "data": prepared.config.data.name,
        "images": len(prepared.train) or sum(prepared.setup.sizes.values()),
        "clients": len(prepared.federation.clients),
        "rounds": prepared.setup.rounds,
        "seed": prepared.setup.seed,
        "results": [],
        "seconds": round(seconds, 3),
        "images_per_second": round(counters["images"] / max(seconds, 1e-9), 1),
        "bytes_up": int(counters["bytes_up"]),
        "bytes_down": int(counters["bytes_down"]),
        "failures": int(counters["failures"]),
        "weights_sha256": hashlib.sha256(pack(state)).hexdigest(),
        "furlong": furlong.__version__,
        "environment": {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "on": f"{platform.system()} {platform.machine()}",
            "device": str(prepared.setup.device),
        },
    }


def _free_folder(settings: Config) -> Path:
    name = str(settings.method["name"]).rpartition(":")[2]  # of an own method the class
    stem = f"{name}-{settings.data.name.split(':')[0]}"
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


class _Board:
    """TensorBoard events; opened late because the import takes a second."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def __enter__(self) -> _Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, line: dict[str, Any]) -> None:
        """One exchange."""
        step = line["exchange"]
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
