"""From a configuration to everything a run needs, before anything has been trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from furlong.core.context import Exchange, Setup, Shard
from furlong.core.exchange import AnyServer, Server, cohort_size
from furlong.core.federation import Federation
from furlong.core.guard import Guard
from furlong.core.method import AnyMethod
from furlong.core.weights import recalibrate
from furlong.data import images as data
from furlong.data.augment import preset
from furlong.data.heterogeneity import beta_cib, beta_hetero, expected_false_negatives
from furlong.data.images import ImageSet, NoSplit
from furlong.data.partition import Partition, partition
from furlong.engines.inprocess import BlobStore, InProcess, default_workers
from furlong.errors import FurlongError
from furlong.methods.wrappers.alone import Alone
from furlong.methods.wrappers.ruled import Ruled
from furlong.nn.encoders import build_encoder, evaluating, out_dim
from furlong.runs.config import Config, all_facts
from furlong.seeding import seed_of, seeded, shuffled, threads

HOLDOUT = 0.1  # of a labelled set that has no test split
NO_SPLIT = "no test split"
SITES = "sites"  # the data's name when every node brings its own images


@dataclass
class Prepared:
    """Everything a run needs, before anything has been trained."""

    config: Config
    method: AnyMethod
    train: ImageSet
    test: ImageSet | None
    split: Partition
    federation: Federation
    server: AnyServer
    notes: list[str] = field(default_factory=list)

    @property
    def setup(self) -> Setup:
        """What every party knows."""
        return self.server.setup

    @property
    def workers(self) -> int:
        """Worker processes, and threads for evaluation."""
        return self.config.run.workers or default_workers(self.setup.device)

    def transport(self) -> InProcess:
        """The engine, with no client state yet."""
        run = self.config.run
        store = BlobStore(run.state_memory_mb << 20, Path(run.out) if run.out else None)
        return InProcess(
            self.method,
            self.federation,
            self.setup,
            self.workers,
            store,
            deadline=run.deadline,
        )

    def join(self, client: int, images: int) -> bool:
        """Let another client in, from the next exchange on, unless it would change the plan."""
        grown = replace(self.setup, sizes={**self.setup.sizes, client: images})
        if list(self.method.plan(grown)) != list(self.method.plan(self.setup)):
            return False
        self.setup.sizes[client] = images  # the guard's sizes too: they are the same dict
        self.federation.rows[client] = torch.zeros(1, dtype=torch.int64).expand(images)
        indices = (*self.split.indices, self.federation.rows[client])
        self.split = replace(self.split, indices=indices, n=self.split.n + images)
        return True

    def encoders(self, state: Any) -> dict[str, nn.Module]:
        """Whose encoder -> encoder, ready for evaluation."""
        return self._made(lambda method, own, ctx: method.encoder(own, ctx), state)

    def classifiers(self, state: Any) -> dict[str, nn.Module]:
        """Whose classifier -> classifier, of a method that learns from labels."""
        if not self.method.needs_labels:
            return {}
        return self._made(lambda method, own, ctx: method.classifier(own, ctx), state)

    def _made(self, make: Callable[..., nn.Module | None], state: Any) -> dict[str, nn.Module]:
        ctx = self.server.context(Exchange(round=self.setup.rounds))
        with threads(), seeded(self.setup.device, self.setup.seed, "encoder"):
            seen = {who(self.config): torch.arange(len(self.train))}  # whose -> images for it
            if isinstance(self.method, Alone):
                every = self.method.each(make, state, ctx)
                made = {f"client {k} alone": module for k, module in every.items()}
                seen = {f"client {k} alone": rows for k, rows in self.federation.rows.items()}
            else:
                made = {who(self.config): make(self.method, state, ctx)}
            found = {name: module for name, module in made.items() if module is not None}
            for name, module in found.items() if self.method.bn_stats == "recalibrate" else ():
                self._recalibrate(module, seen[name])
        return found

    def _recalibrate(self, module: nn.Module, rows: Tensor) -> None:
        """Estimate BatchNorm's statistics from a sample of the training images ``rows``."""
        chosen = rows[shuffled(len(rows), self.setup.seed, "recalibrate")]
        pixels = self.train.pixels[chosen[: self.config.evaluate.monitor_images]]
        recalibrate(module, map(self.setup.augment.plain, torch.split(pixels, 500)))


def who(settings: Config) -> str:
    """What a run trains, in one word."""
    return {"none": "federated", "single": "alone", "pooled": "pooled"}[settings.run.bound]


def load_data(
    settings: Config, trained: Config | None = None
) -> tuple[ImageSet, ImageSet | None, list[str]]:
    """Training images, test images if there are labelled ones, and what to tell the user.

    ``trained``: the settings of the run that an encoder of the same data comes from. Which images
    are taken and which are held out is then as it was there; ``settings`` can only ask for fewer
    of either side, or, of a set with a test split, for more training images.
    """
    d, own = settings.data, settings if trained is None else trained
    options: dict[str, Any] = {
        "root": d.root,
        "image_size": d.image_size,
        "strict": d.strict,
        "cache": d.cache,
        "group_by": grouping(settings) or grouping(own),
        "seed": own.run.seed,
    }
    train = data.load(d.name, "train", limit=d.images, **options)
    notes = list(train.notes)
    if train.skipped:
        notes.append(skipped(train))
    if train.labels is None:
        notes.append("the images have no labels: no accuracy will be measured")
        return train, None, notes
    try:
        size = train.size[0]
        test = data.load(d.name, "test", limit=d.test_images, **(options | {"image_size": size}))
    except NoSplit:
        if d.images != own.data.images:
            _refuse_more(d.images, own.data.images)
            train = data.load(d.name, "train", limit=own.data.images, **options)
        order = shuffled(len(train), own.run.seed, "holdout")
        cut = max(1, int(HOLDOUT * len(train)))
        notes.append(f"{NO_SPLIT}: {cut} random images are held out for evaluation")
        rest = order[cut:] if d.images == own.data.images else order[cut:][: d.images]
        test, train = train.subset(order[:cut][: d.test_images]), train.subset(rest.sort()[0])
    return train, test, notes


def skipped(images: ImageSet) -> str:
    """The files that could not be read, by name."""
    names = ", ".join(f"{s.name} ({s.reason})" for s in images.skipped[:10])
    more = ", …" if len(images.skipped) > 10 else ""
    return f"skipped {len(images.skipped)} unreadable file(s): {names}{more}"


def grouping(settings: Config) -> str | None:
    """By what the images are grouped: it also decides which folders are classes."""
    d = settings.data
    natural = d.partition == "natural" and d.name.startswith("folder:")
    return d.group_by or ("folder" if natural else None)


def _refuse_more(asked: int | None, had: int | None) -> None:
    """Of a set without a test split: other images than the run's may be ones it was trained on."""
    if had is not None and (asked is None or asked > had):
        raise FurlongError(
            f"data.images is {'all' if asked is None else asked}, but the run took {had} images, "
            "and held its test images out of these, as there is no test split. Give "
            f"--data.images {had} or fewer."
        )


def absolute(name: str) -> str:
    """``folder:PATH`` so that a run can be resumed from another working directory."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).resolve()}" if colon else name


def split_data(settings: Config, train: ImageSet, seed: int | None = None) -> Partition:
    """Who gets which images; ``seed`` is the run's if it is not given."""
    d = settings.data
    return partition(
        d.partition,
        train.labels,
        client_count(settings),
        n=len(train),
        n_classes=train.n_classes or None,
        seed=settings.run.seed if seed is None else seed,
        groups=train.groups,
    )


def client_count(settings: Config) -> int | None:
    """As given, else five; ``None`` if the partition's rule or the images decide."""
    d = settings.data
    by_itself = d.partition.startswith(("natural", "fcl_"))
    return 5 if d.clients is None and not by_itself else d.clients


def augmentation(settings: Config, method: AnyMethod) -> str:
    """The preset of views: as given, else the method's usual one."""
    name = settings.data.augment
    if name == "auto":
        name = method.usual_augment
        if settings.data.name == "shapes" and name not in ("flip", "flip_crop", "none"):
            name = "shapes"  # instead of any that changes colours
    return name


def pick_device(name: str) -> torch.device:
    """``auto`` is the accelerator if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps", "xpu"):
            raise RuntimeError("it does not compute")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FurlongError(f"--device {name} cannot be used: {reason}. Try auto or cpu.") from None
    return device


def _try_encoder(encoder: nn.Module, name: str, channels: int, size: int) -> None:
    """Find out before anything is trained whether the encoder takes the images."""
    try:
        with evaluating(encoder):
            encoder(torch.zeros(2, channels, size, size))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise FurlongError(
            f"encoder {name} cannot take {channels}×{size}×{size} images ({reason}). Give a larger "
            "--data.image-size or another --encoder."
        ) from None


def load_public(settings: Config, train: ImageSet) -> Shard:
    """The images that the server may see: never the clients' own, even where sets are drawn."""
    d = settings.data
    if absolute(str(d.public)) == absolute(d.name) != "shapes":
        raise FurlongError(
            f"--public {d.public} is the clients' own data: the server, and all clients, would see "
            "it. Choose another set."
        )
    shown = data.load(
        str(d.public),
        "train",
        root=d.public_root or d.root,
        image_size=train.size[0],
        limit=d.public_images,
        cache=d.cache,
        seed=seed_of(settings.run.seed, "public") % 2**31,
    )
    if shown.channels != train.channels:
        raise FurlongError(
            f"the public images {d.public} have {shown.channels} channel(s), the clients' "
            f"{train.channels}: choose another --public."
        )
    return Shard(shown.unlabelled(), torch.arange(len(shown)))


def _architecture(settings: Config, method: AnyMethod) -> str:
    """The full name of the encoder: ``resnet18+pn``, ``rep32_pn+resnet18``."""
    name, norm = settings.model.encoder, settings.model.early_norm
    if norm == "pn" and not method.pairs_views:
        raise FurlongError(
            f"model.early_norm = pn needs both views of an image in one pass; method "
            f"{settings.method['name']} encodes them apart. Use gn, or method fedsimclr."
        )
    return method.architecture(name if norm == "bn" else f"{name}+{norm}")


def _ruled(method: AnyMethod, settings: Config, clients: int) -> AnyMethod:
    """The method under the server's rule, if a round has clients enough for it."""
    if settings.server.rule == "mean":
        return method
    settings.server.check_cohort(cohort_size(clients, settings.train.fraction))
    return Ruled(method, settings.server)


def _setup(settings: Config, method: AnyMethod, federation: Federation) -> Setup:
    """What every party knows, alike at the server and at a client."""
    images, train = federation.images, settings.train
    height = images.size[0]
    architecture = _architecture(settings, method)
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(architecture, images.channels, height)
        _try_encoder(encoder, architecture, images.channels, height)
    return Setup(
        encoder=architecture,
        width=out_dim(encoder, images.channels, height),
        channels=images.channels,
        image_size=height,
        augment=preset(augmentation(settings, method), height),
        rounds=train.rounds,
        epochs=train.epochs,
        batch_size=train.batch_size,
        optimiser=settings.optimiser,
        sizes=federation.sizes,
        classes=images.n_classes if method.needs_labels else 0,
        seed=settings.run.seed,
        device=pick_device(settings.run.device),
        server_threads=train.server_threads,
    )


def _parties(settings: Config, train: ImageSet, split: Partition) -> tuple[AnyMethod, Federation]:
    """The method, as bounds and server rules wrap it, and who holds which images."""
    height, width = train.size
    if height != width:
        raise FurlongError(
            f"the images are {width}×{height}; encoders take squares. Give --data.image-size."
        )
    federation, method = Federation.of(train, split), settings.make_method()
    if method.needs_labels and train.labels is None:
        raise FurlongError(f"method {settings.method['name']} needs labels; {train.name} has none.")
    if settings.run.bound == "pooled":
        return method, federation.pooled()
    if settings.run.bound == "single":
        return Alone(method), federation
    return _ruled(method, settings, len(federation.clients)), federation


def prepare(
    settings: Config,
    *,
    training: bool = True,
    trained: Config | None = None,
    members: Members | None = None,
) -> Prepared:
    """Read the data, split it, build the method; without public images if nothing is trained.

    ``trained``: of the run whose images and clients these are, see :func:`load_data`.
    ``members``: of a run whose nodes bring their own images (``data = sites``).
    """
    if members is None:
        if settings.data.name == SITES:
            raise FurlongError(
                "data.name is 'sites': the images are on the nodes of a real federation. Give "
                "--engine flower --superlink HOST:PORT, or another --data."
            )
        train, test, notes = load_data(settings, trained)
        split = split_data(settings, train, None if trained is None else trained.run.seed)
    else:
        train, split = members.images(settings), members.split()
        test, notes = None, ["the images stay on the nodes: no accuracy will be measured"]
    method, federation = _parties(settings, train, split)
    if settings.run.bound != "none" and settings.server.rule != "mean":
        notes.append(
            f"server.rule = {settings.server.rule} plays no part: with bound = "
            f"{settings.run.bound} there is nothing to merge"
        )
    if method.caution and training:
        notes.append(f"known criticism of {settings.method['name']}: {method.caution}")
    if method.bn_stats == "local":
        notes.append(
            "bn_stats = local: BatchNorm statistics stay on the clients, so the evaluated and "
            "saved encoder has the initial ones (mean 0, variance 1)"
        )
    if method.bn_stats == "recalibrate" and not len(train):
        raise FurlongError(
            "method.bn_stats = recalibrate needs images at the server, and with data = sites "
            "there are none. Use average or local."
        )
    if members is not None and settings.run.bound == "pooled":
        raise FurlongError("bound = pooled puts all images in one place; data = sites does not.")
    if members is not None and settings.evaluate.angles:
        raise FurlongError("evaluate.angles needs images at the server; with data = sites: none.")
    public = None
    if settings.data.public and training:
        public = load_public(settings, train)
    elif method.needs_public and training:
        raise FurlongError(
            f"method {settings.method['name']} needs public images: give --public NAME: "
            "stl10, folder:PATH, or shapes (drawn, needs no files)."
        )
    setup = _setup(settings, method, federation)
    settings = replace(
        settings,
        data=replace(
            settings.data,
            name=absolute(settings.data.name),
            public=settings.data.public and absolute(settings.data.public),
            partition=SITES if members is not None else settings.data.partition,
            augment=augmentation(settings, method),
            clients=len(split.indices),
        ),
    )
    guard = Guard(sizes=setup.sizes)
    folder = Path(settings.run.out) / "server" if settings.run.out else None
    server = Server(
        method,
        setup,
        public,
        settings.train.fraction,
        guard,
        folder=folder,
        min_clients=settings.train.min_clients,
    )
    return Prepared(settings, method, train, test, split, federation, server, notes)


# ---------------------------------------------------------------- parties on other machines


@dataclass(frozen=True)
class Members:
    """Who takes part in a run whose nodes bring their own images."""

    sizes: dict[int, int]  # images per client
    channels: int

    def images(self, settings: Config) -> ImageSet:
        """What the server holds of them: nothing, in their shape."""
        size = own_size(settings)
        return ImageSet(torch.empty(0, self.channels, size, size, dtype=torch.uint8), name=SITES)

    def split(self, me: int = -1) -> Partition:
        """Rows for everybody, by number only but for client ``me``, whose images are here."""
        parts = {k: torch.zeros(1, dtype=torch.int64).expand(n) for k, n in self.sizes.items()}
        if me in parts:
            parts[me] = torch.arange(self.sizes[me])
        return Partition(tuple(parts[k] for k in sorted(parts)), SITES, sum(self.sizes.values()))


def own_size(settings: Config) -> int:
    """The side of the square that all nodes bring their images to."""
    if settings.data.image_size is None:
        raise FurlongError(
            "data.image_size must be given with data = sites: all nodes bring their images to it."
        )
    return settings.data.image_size


def told(settings: Config, *, paths: bool = False) -> dict[str, Any]:
    """What nodes are told of a configuration: no path, no address, nothing of evaluation.

    ``paths``: where a named set lies too, for a simulation, whose nodes are this program.
    """
    tree = asdict(settings)
    tree["data"]["augment"] = augmentation(settings, settings.make_method())
    names = [name for name, fact in all_facts().items() if fact.told]
    if settings.data.name == SITES:  # nobody else has a say in which images a site has
        own = ("data.name", "data.image_size", "data.augment")
        names = [name for name in names if not name.startswith("data.") or name in own]
    names += ["data.root", "data.cache"] if paths else []
    chosen: dict[str, Any] = {}
    for section, key in (name.split(".") for name in names):
        chosen.setdefault(section, {})[key] = tree[section][key]
    return {**chosen, "method": tree["method"]}


@dataclass(frozen=True)
class Participant:
    """A run as one of its clients knows it."""

    method: AnyMethod
    federation: Federation
    setup: Setup
    mark: str  # a digest of images and split, to be compared with the server's


def participate(
    settings: Config, own: ImageSet | None, sizes: dict[int, int], me: int = -1
) -> Participant:
    """A client's view: of ``own`` images, or of the part that the run's partition gives it.

    ``sizes``: of all clients, if they bring their own images; ``me`` is this one's number.
    """
    if own is None:
        train = load_data(settings)[0]
        split = split_data(settings, train)
    else:
        train, split = own, Members(sizes, own.channels).split(me)
    method, federation = _parties(settings, train, split)
    setup = _setup(settings, method, federation)
    return Participant(method, federation, setup, fingerprint(train, split))


def fingerprint(train: ImageSet, split: Partition) -> str:
    """A digest of the split, the labels and a sample of the images: are these the same data?"""
    digest = hashlib.sha256(str(tuple(train.pixels.shape)).encode())
    sample = torch.linspace(0, len(train) - 1, min(256, len(train))).long()
    for tensor in (*split.indices, train.labels, train.pixels[sample]):
        digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def describe_partition(train: ImageSet, split: Partition) -> dict[str, Any]:
    """Sizes, and with labels the class counts and the MFCL paper's two heterogeneity measures."""
    about: dict[str, Any] = {
        "partition": split.name,
        "clients": len(split.indices),
        "sizes": [len(rows) for rows in split.indices],
        "fingerprint": fingerprint(train, split),
    }
    if train.labels is not None:
        counts = split.class_counts(train.labels, train.n_classes)
        about |= {
            "classes": list(train.classes),
            "class_counts": counts.tolist(),
            "beta_cib": beta_cib(counts),
            "beta_hetero_m2": beta_hetero(counts, "M2"),
            "beta_hetero_mm1": beta_hetero(counts, "MM1"),
            "false_negatives": dict(
                zip(("local", "union", "remote"), expected_false_negatives(counts), strict=True)
            ),
        }
    return about


def without_data(
    settings: Config, sizes: dict[int, int], channels: int = 3, image_size: int = 32
) -> AnyServer:
    """The server of a run whose clients hold ``sizes`` images, for predicting what is sent."""
    none = torch.empty(0, channels, image_size, image_size, dtype=torch.uint8)
    images = ImageSet(none, classes=tuple("0123456789"))
    federation = Federation.of(images, Members(sizes, channels).split())
    method = _ruled(settings.make_method(), settings, len(sizes))
    setup = _setup(settings, method, federation)
    return Server(method, setup, fraction=settings.train.fraction)
