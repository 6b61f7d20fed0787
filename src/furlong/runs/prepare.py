"""From a configuration to everything a run needs, before anything has been trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_bytes

import torch

from furlong.core.aggregation import ROBUST
from furlong.core.context import Setup
from furlong.core.exchange import AnyServer, Server
from furlong.core.federation import Federation
from furlong.core.guard import Guard
from furlong.core.method import AnyMethod
from furlong.core.noise import secret_in
from furlong.core.outliers import USUAL
from furlong.data.images import ImageSet
from furlong.data.partition import Partition
from furlong.engines.inprocess import InProcess
from furlong.engines.pool import default_workers
from furlong.engines.states import StateFolder
from furlong.errors import FurlongError
from furlong.evaluation.knn import neighbours
from furlong.runs.checkpoint import STATES
from furlong.runs.config import Config, sends
from furlong.runs.datasets import SITES, absolute, absolute_roots, load_data, load_public
from furlong.runs.folder import SERVER
from furlong.runs.initial import Initial, begun, located
from furlong.runs.nodes import Members, own_size
from furlong.runs.parties import augmentation, parties, setup_of
from furlong.runs.split import left_out, split_data

DRAWN = "shapes"  # public images where none are named: they need no files


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
    notes: list[str]
    initial: Initial | None = None  # the weights that the encoder starts from, if it has any

    @property
    def left_out(self) -> int | None:
        """The client that the bound ``without:SITE`` leaves out."""
        return left_out(self.config, self.train, self.split)

    @property
    def setup(self) -> Setup:
        """What every party knows."""
        return self.server.setup

    @property
    def workers(self) -> int:
        """Worker processes, and threads for evaluation."""
        return workers(self.config, self.setup.device)

    def engine(self) -> InProcess:
        """The engine of this machine, with no client state yet."""
        run = self.config.run
        store = StateFolder(Path(run.out) / STATES if run.out else None)
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


def _secret(settings: Config, training: bool, saved: Path | None) -> bytes | None:
    """What the noise of a privacy budget is made from; the server's folder keeps it."""
    if settings.privacy.level == "none" or not training:
        return None
    if settings.run.out is None:  # nothing can go on later
        return token_bytes(32)
    return secret_in(_server_folder(settings.run.out), saved is not None and saved.exists())


def _server_folder(out: str) -> Path:
    return Path(out) / SERVER


def workers(settings: Config, device: torch.device) -> int:
    """Worker processes, and threads for evaluation: as given, else as many as make sense."""
    return settings.run.workers or default_workers(device)


def prepare(
    settings: Config,
    *,
    training: bool = True,
    members: Members | None = None,
    saved: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Prepared:
    """Read the data, split it, build the method; without public images if nothing is trained.

    ``members``: of a run whose nodes bring their own images (``data = sites``). ``saved``: the
    encoder before training of a run that goes on, which is then what ``--init`` gave. ``tell``
    hears of long work, see ``initial.begun``.
    """
    if members is None:
        train, test, notes = load_data(settings)
        split = split_data(settings, train)
    else:
        train, split = members.images(own_size(settings)), members.split()
        test, notes = None, ["the images stay on the nodes: no accuracy will be measured"]
    method, federation = parties(settings, train, split, _secret(settings, training, saved))
    if members is not None:
        _refuse_without_images(settings, method)
        settings = replace(settings, data=replace(settings.data, partition=SITES))
    if method.needs_public and settings.data.public is None:
        settings = replace(settings, data=replace(settings.data, public=DRAWN))
        notes.append(
            f"method {settings.method['name']} needs public images and none were named: drawn "
            "figures (shapes) take their place. Give --public NAME, e.g. stl10 or folder:PATH, for "
            "images like the clients'"
        )
    setup, initial = begun(settings, setup_of(settings, method, federation), saved, tell)
    notes += [] if initial is None else initial.table()
    server = Server(
        method,
        setup,
        load_public(settings, train) if training and settings.data.public else None,
        settings.train.fraction,
        Guard(sizes=setup.sizes, outlier=_outlier(settings)),
        folder=_server_folder(settings.run.out) if settings.run.out else None,
        min_clients=settings.train.min_clients,
    )
    notes += _notes(settings, method, setup, training)
    k = settings.evaluate.k or neighbours(len(train), train.n_classes)
    settings = resolved(settings, method, len(split.indices), k)
    return Prepared(settings, method, train, test, split, federation, server, notes, initial)


def resolved(settings: Config, method: AnyMethod, clients: int | None, k: int) -> Config:
    """The settings as a run writes them down: nothing is left open."""
    data, model = settings.data, settings.model
    return replace(
        settings,
        data=replace(
            data,
            name=absolute(data.name),
            root=data.root and absolute_roots(data.root),
            public=data.public and absolute(data.public),
            augment=augmentation(settings, method),
            clients=clients,
        ),
        model=replace(model, init=model.init and located(model.init)),
        evaluate=replace(settings.evaluate, k=k),
    )


def _outlier(settings: Config) -> float | None:
    """How much larger than others an update may be; none: there is no need to look."""
    if settings.secure.sums or settings.privacy.level == "client":
        return None  # nobody may look at single updates; clips bound them, or the client does
    times = settings.server.outlier
    if times is None:
        times = USUAL if settings.run.engine == "flower" else 0.0
    needless = not sends(settings.run.bound) or (settings.server.rule in ROBUST and not times)
    return None if needless else times


def _notes(settings: Config, method: AnyMethod, setup: Setup, training: bool) -> list[str]:
    """What a user should know about these settings."""
    notes, name, bound = [], settings.method["name"], settings.run.bound
    idle = {
        f"server.rule = {settings.server.rule}": settings.server.rule != "mean",
        "secure.sums = true": settings.secure.sums,
    }
    for what, given in idle.items():
        if given and not sends(bound):
            notes.append(f"{what} plays no part: with bound = {bound} there is nothing to merge")
    if method.caution and training:
        notes.append(f"known criticism of {name}: {method.caution}")
    if training:
        notes += method.advice(setup)
    if settings.method["bn_stats"] == "local":
        notes.append(
            "bn_stats = local: BatchNorm statistics stay on the clients, so the evaluated and "
            "saved encoder has the initial ones (mean 0, variance 1)"
        )
    return notes


def _refuse_without_images(settings: Config, method: AnyMethod) -> None:
    """What cannot be done where the server has no images (``data = sites``)."""
    if method.bn_stats == "recalibrate":
        raise FurlongError(
            "method.bn_stats = recalibrate needs images at the server, and with data = sites "
            "there are none. Use average or local."
        )
    if settings.run.bound == "pooled":
        raise FurlongError("bound = pooled puts all images in one place; data = sites does not.")
    if settings.evaluate.angles:
        raise FurlongError("evaluate.angles needs images at the server; with data = sites: none.")
