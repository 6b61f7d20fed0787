"""A run from its configuration to its results: prepare, exchange and observe, evaluate, write."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import furlong
from furlong.core.exchange import Engine
from furlong.core.noise import forget
from furlong.core.payload import Traffic, pack, pack_tensors
from furlong.core.weights import snapshot
from furlong.errors import FurlongError
from furlong.evaluation.protocol import Images
from furlong.methods.wrappers.private import budgeted
from furlong.nn.encoders import build_encoder
from furlong.runs import checkpoint, config, observers, plane, trackers
from furlong.runs.config import Config
from furlong.runs.datasets import SITES
from furlong.runs.encoders import about, adapter, classifiers, encoders, untrained, who
from furlong.runs.folder import SERVER, RunFolder
from furlong.runs.holdout import HELD_OUT
from furlong.runs.nodes import Members
from furlong.runs.observers import NOTHING_DONE, Event, Observer, Status
from furlong.runs.prepare import Prepared, prepare
from furlong.runs.results import at_the_end, final_rows, on_site, quality_rows
from furlong.runs.saved_encoder import load_encoder
from furlong.runs.split import describe_partition, site_names
from furlong.runs.trackers import Boards
from furlong.seeding import threads

Show = Callable[[Status], None]
Say = Callable[[str], None]


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


class Session(Protocol):
    """The clients of a run on other machines, which have to be found before it begins."""

    def members(self) -> Members | None:
        """With ``data = sites``: who brings how many images."""

    def engine(self, prepared: Prepared) -> Engine:
        """The engine that reaches them."""


Connect = Callable[[Config, RunFolder, Say], AbstractContextManager[Session]]
"""Opens the session of a run with ``run.engine = "flower"``; ``furlong.deploy`` has one."""


def run(
    settings: Config,
    show: Show | None = None,
    say: Say = lambda _: None,
    engine: Connect | None = None,
) -> Run:
    """A new run, from the configuration to the summary."""
    out = Path(settings.run.out) if settings.run.out else _free_folder(settings)
    settings = config.with_out(settings, out)
    folder = RunFolder.create(out)
    with folder.locked(), _session(settings, folder, say, engine) as session:
        try:
            prepared = prepare(
                settings, members=None if session is None else session.members(), tell=say
            )
            at_the_end(settings.evaluate, _images(prepared))  # mistakes show before the training
            trackers.named(settings.run.track)
        except BaseException:
            folder.discard()
            raise
        folder.write("partition.json", describe_partition(prepared.train, prepared.split))
        if prepared.initial is not None:
            folder.write("initial.json", prepared.initial.about())
        folder.write("config.toml", prepared.config.toml())
        return _train(prepared, folder, None, show, say, session)


def resume(
    run_folder: str | PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    show: Show | None = None,
    say: Say = lambda _: None,
    engine: Connect | None = None,
) -> Run:
    """Go on with an interrupted run: the result has the same bits as without interruption.

    ``overrides`` may hold settings whose facts say ``resume``, and no others.
    """
    path = Path(run_folder)
    for name in overrides or {}:
        fact = config.all_facts().get(config.full_name(name))
        if fact is None or not fact.resume:
            raise FurlongError(f"a run goes on with the settings it has: --{name} cannot be given.")
    folder = RunFolder.open(path)
    with folder.locked():
        if folder.record.summary is not None:
            say(f"{path} has finished; nothing to do.")
            forget(path / SERVER, say)  # if it was killed just then
            return Run(path, folder.record.read("summary.json"))
        settings = config.with_out(folder.record.config(overrides), path)
        saved = checkpoint.load(path, say=say)
        for note in saved.notes if saved else []:
            say(note)
        done = saved.done if saved else 0
        say(f"going on after exchange {done}" if done else "no checkpoint yet: starting anew")
        if lost := folder.record.damaged_lines:
            say(lost)
        folder.keep_lines(done)
        checkpoint.tidy(path)  # after a process that was killed
        with _session(settings, folder, say, engine) as session:
            prepared = prepare(
                settings,
                members=None if session is None else session.members(),
                saved=path / "random.safetensors",
                tell=say,
            )
            split = describe_partition(prepared.train, prepared.split)
            began = folder.record.split
            same = began is not None and began.fingerprint == split["fingerprint"]
            if settings.data.name != SITES and not same:
                raise FurlongError(
                    f"the images are not those that {path} began with: see its partition.json. Put "
                    "them back, or start a new run."
                )
            return _train(prepared, folder, saved, show, say, session)


def _session(
    settings: Config, folder: RunFolder, say: Say, engine: Connect | None
) -> AbstractContextManager[Session | None]:
    """The session with the nodes of the run, if it has any."""
    if settings.run.engine == "inprocess":
        return nullcontext()
    if engine is None:
        raise FurlongError(
            f"run.engine is {settings.run.engine}: call furlong.run or the command furlong run."
        )
    return engine(settings, folder, say)


def _train(
    prepared: Prepared,
    folder: RunFolder,
    saved: checkpoint.Checkpoint | None,
    show: Show | None,
    say: Say,
    session: Session | None,
) -> Run:
    for note in prepared.notes:
        say(note)
    server, totals = prepared.server, NOTHING_DONE
    server.tell = say
    if saved is None:
        state, done = server.init(), 0
        folder.save_weights("random", snapshot(next(iter(encoders(prepared, state).values()))))
    else:
        state, done, totals = saved.server, saved.done, saved.counters
    random = _random_encoder(prepared, folder)
    board = Boards(folder, prepared.config, say)
    with prepared.engine() if session is None else session.engine(prepared) as engine, board:
        engine.restore({} if saved is None else saved.clients)
        observe = _observers(prepared, folder, random, engine, board, show, say)
        total = len(server.exchanges())
        for result in server.run(engine, state, done):
            if not config.sends(prepared.config.run.bound):
                result = replace(result, up=Traffic(), down=Traffic())
            event = Event.after(result, totals, total)
            for observer in observe:
                observer(event)
            state, totals = result.server, event.totals
        learnt = encoders(prepared, state)
        weights = snapshot(next(iter(learnt.values())))
        engine.finish(pack_tensors(weights, {"about": json.dumps(about(prepared))}))
    summary = _summary(prepared, totals, state)
    if (budget := budgeted(prepared.method)) is not None:
        last = server.context(server.exchanges()[-1])
        summary["privacy"] = budget.statement(prepared.setup, last)
    summary |= _measured(prepared, {untrained(prepared.config): random, **learnt}, state)
    if prepared.config.model.adapter != "none":
        folder.save_weights("adapter", adapter(prepared, state))
    _draw_map(prepared, folder, next(iter(learnt.values())))
    folder.save_encoder(weights, about(prepared))
    folder.write("summary.json", summary)
    board.finish(summary)
    if server.folder is not None:  # what clients sent, of use only to a run that goes on
        forget(server.folder, say)
    return Run(folder.path, summary)


def _observers(
    prepared: Prepared,
    folder: RunFolder,
    random: nn.Module,
    engine: Engine,
    board: Observer,
    show: Show | None,
    say: Say,
) -> list[Observer]:
    """In this order: what measures, what writes down, what saves, what tells."""
    every, exchanges = prepared.config.run.save_every, prepared.server.exchanges()
    return [
        observers.Monitor(prepared, random, say),
        *([observers.Angles(prepared)] if prepared.config.evaluate.angles else []),
        lambda event: folder.append(event.line),
        board,
        observers.checkpoints(folder.path, engine, exchanges, every),
        *([lambda event: show(Status.after(event))] if show is not None else []),
    ]


def _random_encoder(prepared: Prepared, folder: RunFolder) -> nn.Module:
    """The encoder before training, as it was written down."""
    setup = prepared.setup
    encoder = build_encoder(setup.encoder, setup.channels, setup.image_size).eval()
    folder.load_weights("random", encoder)
    return encoder


def _images(prepared: Prepared) -> Images:
    setup = prepared.setup
    return Images(prepared.train, prepared.test, setup.augment, setup.seed)


def _unseen(prepared: Prepared) -> Images | None:
    """The test images of the site that is left out, beside the training images of the others."""
    client, test, images = prepared.left_out, prepared.test, _images(prepared)
    names = site_names(prepared.train, prepared.split)
    known = images.has_labels and test is not None and test.groups is not None
    if client is None or names is None or not known:
        return None
    assert test is not None
    assert test.groups is not None
    own = [test.group_names[group] == names[client] for group in test.groups.tolist()]
    others = torch.cat([prepared.federation.rows[k] for k in prepared.federation.clients])
    theirs = prepared.train.subset(others.sort()[0])
    here = replace(test.subset(torch.tensor(own).nonzero()[:, 0]), name=f"site {names[client]}")
    return replace(images, train=theirs, test=here) if len(here) else None


def _measured(
    prepared: Prepared, found: Mapping[str, nn.Module], state: Any
) -> dict[str, list[dict[str, Any]]]:
    """What encoders are worth at the end: ``results`` with labels, ``quality`` without."""
    images, device = _images(prepared), prepared.setup.device
    whose, own = (
        {name: module.to(device) for name, module in modules.items()}
        for modules in (found, classifiers(prepared, state))
    )
    labelled, here = images.has_labels, len(images.train) > 0
    with threads(prepared.workers):
        settings = prepared.config.evaluate
        rows = final_rows(settings, images, whose, own) if labelled else []
        if (elsewhere := _unseen(prepared)) is not None:
            few = replace(settings, also="")
            rows += on_site(final_rows(few, elsewhere, whose, own), elsewhere)
        return {
            "results": rows,
            "quality": quality_rows(images, whose) if here else [],
        }


def _draw_map(prepared: Prepared, folder: RunFolder, encoder: nn.Module) -> None:
    """map.json, of which a page draws the representations."""
    setup, train = prepared.setup, prepared.train
    if len(train) < plane.FEWEST:  # or they are all on other machines
        return
    with threads(prepared.workers):
        found = plane.points(
            encoder, train, prepared.split, setup.augment.plain, setup.seed, plane.principal
        )
    folder.write(plane.MAP, found)


def _summary(prepared: Prepared, totals: Mapping[str, float], state: Any) -> dict[str, Any]:
    seconds, left = totals["seconds"], prepared.left_out
    apart = 0 if left is None else len(torch.unique(prepared.split.indices[left]))
    return {
        "who": who(prepared.config),
        "method": prepared.config.method["name"],
        "data": prepared.config.data.name,
        "images": len(prepared.train) - apart or sum(prepared.setup.sizes.values()),
        "clients": len(prepared.federation.clients),
        "rounds": prepared.setup.rounds,
        "seed": prepared.setup.seed,
        "seconds": round(seconds, 3),
        "images_per_second": round(totals["images"] / max(seconds, 1e-9), 1),
        "bytes_up": int(totals["bytes_up"]),
        "bytes_down": int(totals["bytes_down"]),
        "failures": int(totals["failures"]),
        "held_out": next((note for note in prepared.notes if HELD_OUT in note), None),
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
