"""Assemble a run from its configuration; the one loop that logs, evaluates and saves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import furlong
from furlong import checkpoint, config, report
from furlong.config import Config
from furlong.context import Exchange, Setup, Shard
from furlong.data import images as data
from furlong.data.augment import preset
from furlong.data.images import ImageSet, NoSplit
from furlong.data.partition import Partition, partition
from furlong.engines.inprocess import Blob, BlobStore, InProcess, default_workers
from furlong.errors import FurlongError
from furlong.evaluate import features, knn, linear_probe
from furlong.federation import Federation
from furlong.guard import Guard
from furlong.method import Method
from furlong.methods.alone import Alone
from furlong.metrics import beta_cib, beta_hetero
from furlong.nets import build_encoder, out_dim
from furlong.payload import pack
from furlong.rounds import ExchangeResult, Server, seed_of, seeded
from furlong.runfolder import RunFolder, load_encoder
from furlong.weights import recalibrate

HOLDOUT = 0.1  # of a labelled set that has no test split


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


# ---------------------------------------------------------------- assembling


@dataclass
class Prepared:
    """Everything a run needs, before anything has been trained."""

    config: Config
    method: Method[Any, Any, Any, Any]
    train: ImageSet
    test: ImageSet | None
    split: Partition
    federation: Federation
    server: Server[Any, Any, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def setup(self) -> Setup:
        """What every party knows."""
        return self.server.setup

    def transport(self) -> InProcess:
        """The engine, with no client state yet."""
        run = self.config.run
        workers = run.workers or default_workers(self.setup.device)
        store = BlobStore(run.state_memory_mb << 20, Path(run.out) if run.out else None)
        return InProcess(self.method, self.federation, self.setup, workers, store)

    def encoders(self, state: Any) -> dict[str, nn.Module]:
        """Whose encoder -> encoder, ready for evaluation."""
        ctx = self.server.context(Exchange(round=self.setup.rounds))
        with seeded(self.setup.device, self.setup.seed, "encoder"):
            if isinstance(self.method, Alone):
                every = self.method.encoders(state, ctx)
                found = {f"client {k} alone": encoder for k, encoder in every.items()}
            else:
                found = {who(self.config): self.method.encoder(state, ctx)}
        for encoder in found.values():
            if self.method.bn_stats == "recalibrate":
                chunks = self.train.pixels[: self.config.evaluate.monitor_images].split(500)
                recalibrate(encoder, (self.setup.augment.plain(chunk) for chunk in chunks))
        return found


def who(settings: Config) -> str:
    """What a run trains, in one word."""
    return {"none": "federated", "single": "alone", "pooled": "pooled"}[settings.run.bound]


def load_data(settings: Config) -> tuple[ImageSet, ImageSet | None, list[str]]:
    """Training images, test images if there are labelled ones, and what to tell the user."""
    d = settings.data
    options = {"root": d.root, "image_size": d.image_size, "strict": d.strict,
               "cache": d.cache, "group_by": d.group_by}
    train = data.load(d.name, "train", limit=d.images, seed=settings.run.seed, **options)  # type: ignore[arg-type]
    notes = list(train.notes)
    if train.skipped:
        names = ", ".join(f"{s.name} ({s.reason})" for s in train.skipped[:10])
        more = ", …" if len(train.skipped) > 10 else ""
        notes.append(f"skipped {len(train.skipped)} unreadable file(s): {names}{more}")
    if train.labels is None:
        notes.append("the images have no labels: no accuracy will be measured")
        return train, None, notes
    try:
        size = train.size[0]
        test = data.load(d.name, "test", limit=d.test_images, seed=settings.run.seed,
                         **(options | {"image_size": size}))  # type: ignore[arg-type]
    except NoSplit:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(
            seed_of(settings.run.seed, "holdout")))
        cut = max(1, int(HOLDOUT * len(train)))
        notes.append(f"no test split: {cut} random images are held out for evaluation")
        test, train = train.subset(order[:cut]), train.subset(order[cut:].sort()[0])
    return train, test, notes


def split_data(settings: Config, train: ImageSet) -> Partition:
    """Who gets which images."""
    d = settings.data
    return partition(
        d.partition, train.labels, d.clients, n=len(train), n_classes=train.n_classes or None,
        seed=settings.run.seed, groups=train.groups,
    )


def pick_device(name: str) -> torch.device:
    """``auto`` is the accelerator if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FurlongError(f"--device {name} cannot be used: {reason}") from None
    return device


def prepare(settings: Config) -> Prepared:
    """Read the data, split it, build the method."""
    train, test, notes = load_data(settings)
    height, width = train.size
    if height != width:
        raise FurlongError(
            f"the images are {width}×{height}; encoders take squares. Give --data.image-size."
        )
    split = split_data(settings, train)
    federation = Federation.of(train, split)
    method = settings.make_method()
    if settings.run.bound == "pooled":
        federation = federation.pooled()
    elif settings.run.bound == "single":
        method = Alone(method)
    if method.needs_labels and train.labels is None:
        raise FurlongError(f"method {settings.method['name']} needs labels; {train.name} has none.")
    public = None
    if settings.data.public:
        shown = data.load(settings.data.public, "train", image_size=height, seed=settings.run.seed)
        public = Shard(shown.unlabelled(), torch.arange(len(shown)))
    elif method.needs_public:
        raise FurlongError(
            f"method {settings.method['name']} needs public images: give --public NAME, e.g. stl10 "
            "or folder:PATH."
        )
    device = pick_device(settings.run.device)
    name = settings.data.augment
    if name == "auto":
        name = "shapes" if settings.data.name == "shapes" else "fedu"
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(settings.model.encoder, train.channels, height)
    setup = Setup(
        encoder=settings.model.encoder,
        width=out_dim(encoder, train.channels, height),
        channels=train.channels,
        image_size=height,
        augment=preset(name, height),
        rounds=settings.train.rounds,
        epochs=settings.train.epochs,
        batch_size=settings.train.batch_size,
        optimiser=settings.optimiser,
        sizes=federation.sizes,
        seed=settings.run.seed,
        device=device,
    )
    settings = replace(settings, data=replace(settings.data, augment=name,
                                              clients=len(split.indices)))
    guard = Guard(max_examples=max(federation.sizes.values()))
    server = Server(method, setup, public, settings.train.fraction, guard)
    return Prepared(settings, method, train, test, split, federation, server, notes)


# ---------------------------------------------------------------- evaluation


class Evaluator:
    """kNN and the linear probe on h, against the test split; the last epoch counts."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._settings = prepared.config.evaluate
        self.possible = prepared.test is not None and prepared.test.labels is not None

    def _features(self, encoder: nn.Module, images: ImageSet, rows: Tensor) -> Tensor:
        setup = self._prepared.setup
        return features(encoder.to(setup.device), images.pixels[rows], setup.augment.plain)

    def _pair(self, limit: int | None) -> tuple[ImageSet, Tensor, ImageSet, Tensor]:
        train, test = self._prepared.train, self._prepared.test
        assert test is not None
        return train, self._rows(len(train), limit), test, self._rows(len(test), limit)

    def _rows(self, n: int, limit: int | None) -> Tensor:
        if limit is None or n <= limit:
            return torch.arange(n)
        generator = torch.Generator().manual_seed(seed_of(self._prepared.setup.seed, "monitor"))
        return torch.randperm(n, generator=generator)[:limit]

    def monitor(self, encoder: nn.Module) -> float:
        """kNN accuracy on at most ``monitor_images`` images of either split."""
        train, rows, test, test_rows = self._pair(self._settings.monitor_images)
        assert train.labels is not None
        assert test.labels is not None
        return knn(
            self._features(encoder, train, rows), train.labels[rows],
            self._features(encoder, test, test_rows), test.labels[test_rows],
            k=self._settings.k, temperature=self._settings.temperature, n_classes=train.n_classes,
        )

    def final(self, encoder: nn.Module) -> dict[str, float]:
        """Protocol -> accuracy, on all images."""
        train, rows, test, test_rows = self._pair(None)
        assert train.labels is not None
        assert test.labels is not None
        ours = self._features(encoder, train, rows)
        theirs = self._features(encoder, test, test_rows)
        found = {"knn": knn(ours, train.labels, theirs, test.labels, k=self._settings.k,
                            temperature=self._settings.temperature, n_classes=train.n_classes)}
        if self._settings.probe != "none":
            found["linear"] = linear_probe(
                ours, train.labels, theirs, test.labels, recipe=self._settings.probe,
                seed=self._prepared.setup.seed, n_classes=train.n_classes,
            ).accuracy
        return found


# ---------------------------------------------------------------- the loop


def run(settings: Config, show: Callable[[Status], None] | None = None,
        say: Callable[[str], None] | None = None) -> Run:
    """A new run, from the configuration to the report."""
    out = Path(settings.run.out) if settings.run.out else _free_folder(settings)
    settings = config.with_out(settings, out)
    prepared = prepare(settings)
    folder = RunFolder.create(out)
    with folder.locked():
        folder.write("partition.json", describe_partition(prepared.train, prepared.split))
        folder.write("config.toml", prepared.config.toml())
        return _go(prepared, folder, None, show, say or (lambda _: None))


def resume(path: Path, overrides: Mapping[str, Any] | None = None,
           show: Callable[[Status], None] | None = None,
           say: Callable[[str], None] | None = None) -> Run:
    """Go on with an interrupted run: the result has the same bits as without interruption."""
    folder = RunFolder.open(path)
    say = say or (lambda _: None)
    with folder.locked():
        summary = folder.read("summary.json")
        if summary is not None:
            say(f"{path} has finished; nothing to do.")
            return Run(path, summary)
        settings = config.with_out(config.load(path / "config.toml", overrides), path)
        saved = checkpoint.load(path)
        for note in saved.notes if saved else []:
            say(note)
        done = saved.done if saved else 0
        say(f"going on after exchange {done}" if done else "no checkpoint yet: starting anew")
        folder.keep_lines(done)
        return _go(prepare(settings), folder, saved, show, say)


def _go(prepared: Prepared, folder: RunFolder, saved: checkpoint.Checkpoint | None,
        show: Callable[[Status], None] | None, say: Callable[[str], None]) -> Run:
    for note in prepared.notes:
        say(note)
    server, evaluator = prepared.server, Evaluator(prepared)
    exchanges = server.exchanges()
    counters = {"seconds": 0.0, "images": 0.0, "bytes_up": 0.0, "bytes_down": 0.0, "failures": 0.0}
    state, done = server.init(), 0
    random_encoder = next(iter(prepared.encoders(state).values()))
    with prepared.transport() as transport, _Board(folder.path) as board:
        if saved is not None:
            state, done, counters = saved.server, saved.done, dict(saved.counters)
            for client, (version, packed) in saved.clients.items():
                transport.store.keep(client, Blob.of_bytes(packed), version)
        knn_every = prepared.config.evaluate.knn_every or max(1, prepared.setup.rounds // 20)
        for result in server.run(prepared.federation, transport, state, done):
            state, done = result.server, result.exchange.index + 1
            last = done == len(exchanges)
            _count(counters, result, alone=prepared.config.run.bound != "none")
            score = None
            if evaluator.possible and (last or (result.exchange.round + 1) % knn_every == 0):
                scores = [evaluator.monitor(e) for e in prepared.encoders(state).values()]
                score = sum(scores) / len(scores)
            line = _line(result, score)
            folder.append(line)
            board.add(line)
            if last or (result.exchange.round + 1) % prepared.config.run.save_every == 0:
                checkpoint.save(folder.path, done, state, transport.store.items(), counters)
            if show is not None:
                show(_status(counters, line, done, len(exchanges)))
    encoders = prepared.encoders(state)
    summary = _summary(prepared, counters, state)
    if evaluator.possible:
        summary["results"] = _results(evaluator, {"random": random_encoder, **encoders})
    first = next(iter(encoders.values()))
    setup = prepared.setup
    folder.save_encoder(first, {
        "encoder": setup.encoder, "channels": setup.channels, "image_size": setup.image_size,
        "width": setup.width, "augment": prepared.config.data.augment,
        "method": prepared.config.method["name"], "data": prepared.config.data.name,
        "furlong": furlong.__version__,
    })
    folder.write("summary.json", summary)
    report.build(folder.path)
    return Run(folder.path, summary)


def _results(evaluator: Evaluator, encoders: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    rows = [
        {"who": name, "protocol": protocol, "labels": 1.0, "accuracy": accuracy}
        for name, encoder in encoders.items()
        for protocol, accuracy in evaluator.final(encoder).items()
    ]
    for protocol in sorted({row["protocol"] for row in rows}):
        alone = [r["accuracy"] for r in rows
                 if r["who"].endswith(" alone") and r["protocol"] == protocol]
        if alone:
            spread = torch.tensor(alone, dtype=torch.float64)
            deviation = float(spread.std()) if len(alone) > 1 else 0.0
            rows.append({"who": "alone", "protocol": protocol, "labels": 1.0,
                         "accuracy": float(spread.mean()), "std": deviation})
    return rows


def _count(counters: dict[str, float], result: ExchangeResult[Any], *, alone: bool) -> None:
    counters["seconds"] += result.seconds
    counters["images"] += sum(m.get("images", 0.0) for m in result.metrics.values())
    counters["failures"] += len(result.failures)
    if not alone:  # a bound sends nothing to anybody
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
        "exchange": result.exchange.index,
        "round": result.exchange.round,
        "kind": result.exchange.kind,
        **means,
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
        done, total, line["round"], line.get("loss"), line["knn"], line["images_per_second"],
        int(counters["bytes_up"]), int(counters["bytes_down"]),
        counters["seconds"] / done * (total - done),
        [f"client {f['client']} {f['kind']}: {f['reason']}" for f in line["failures"]],
    )


def _summary(prepared: Prepared, counters: dict[str, float], state: Any) -> dict[str, Any]:
    seconds = counters["seconds"]
    return {
        "who": who(prepared.config),
        "method": prepared.config.method["name"],
        "data": prepared.config.data.name,
        "images": len(prepared.train),
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
    }


def describe_partition(train: ImageSet, split: Partition) -> dict[str, Any]:
    """Sizes, and with labels the class counts and the MFCL paper's two heterogeneity measures."""
    about: dict[str, Any] = {"partition": split.name, "clients": len(split.indices),
                             "sizes": [len(rows) for rows in split.indices]}
    if train.labels is not None:
        counts = split.class_counts(train.labels, train.n_classes)
        about |= {
            "classes": list(train.classes),
            "class_counts": counts.tolist(),
            "beta_cib": beta_cib(counts),
            "beta_hetero_m2": beta_hetero(counts, "M2"),
            "beta_hetero_mm1": beta_hetero(counts, "MM1"),
        }
    return about


def _free_folder(settings: Config) -> Path:
    stem = f"{settings.method['name'].replace(':', '-').replace('/', '-')}-" + (
        settings.data.name.split(":")[0]
    )
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

            self._writer = SummaryWriter(str(self._folder), purge_step=step)  # type: ignore[no-untyped-call]
        for name in ("loss", "divergence", "knn", "images_per_second", "bytes_up", "bytes_down"):
            if line.get(name) is not None:
                self._writer.add_scalar(name, line[name], step)
        for client, metrics in line["clients"].items():
            for name, value in metrics.items():
                self._writer.add_scalar(f"clients/{client}/{name}", value, step)


def flows(method: str, encoder: str, channels: int = 3, image_size: int = 32) -> dict[str, Any]:
    """What goes down to and up from one client in a first exchange, without any data."""
    settings = config.from_tree({}, {"method": method, "encoder": encoder}, "options")
    made = settings.make_method()
    with torch.random.fork_rng(devices=[]):
        width = out_dim(build_encoder(encoder, channels, image_size), channels, image_size)
    setup = Setup(encoder, width, channels, image_size, preset("none", image_size), 1, 1, 128,
                  settings.optimiser, {k: 1000 for k in range(5)})
    server = Server(made, setup)
    state = server.init()
    ctx = server.context(server.exchanges()[0])
    return {"down": made.download(state, 0, ctx), "up": made.expected(state, 0, ctx)}


def evaluate(folder: Path, settings: Config) -> list[dict[str, Any]]:
    """The protocols on a finished run's encoder."""
    encoder = load_encoder(folder)
    prepared = prepare(settings)
    about = RunFolder(folder).read("encoder.json")
    if (prepared.setup.channels, prepared.setup.image_size) != (
        about["channels"], about["image_size"]
    ):
        raise FurlongError(
            f"the encoder takes {about['channels']}×{about['image_size']}×{about['image_size']} "
            f"images; give --data.image-size {about['image_size']}."
        )
    evaluator = Evaluator(prepared)
    if not evaluator.possible:
        raise FurlongError(f"{prepared.train.name} has no labels: accuracy cannot be measured.")
    return _results(evaluator, {who(settings): encoder})
