"""A node's side of a federation: its images, what it agrees to, its state on its own disk.

:meth:`Site.answer` is all a node does, however questions reach it (see ``engines.remote`` for what
is asked). A site decides for itself which images are read, and it never runs code that a server
names: a question can only choose among what is installed here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import furlong
from furlong.core.context import Exchange
from furlong.core.exchange import AnyServer, Failure, Server
from furlong.core.payload import (
    PayloadError,
    pack_tensors,
    unpack_tensors,
)
from furlong.data import images as data
from furlong.data.images import ImageSet
from furlong.deploy.states import StateFiles
from furlong.engines.codec import decode, encode
from furlong.engines.inprocess import InProcess, can_fork, describe
from furlong.engines.remote import PROTOCOL
from furlong.errors import FurlongError
from furlong.runs.config import Config, all_facts, from_tree, without_none
from furlong.runs.folder import RunFolder
from furlong.runs.prepare import (
    SITES,
    Participant,
    own_size,
    participate,
    skipped,
    told,
)
from furlong.words import size

_PATH = re.compile(r"'[^'\n]*/[^'\n]*'|\"[^\"\n]*/[^\"\n]*\"|[^\s'\"(]*/[^\s'\")]*")
_RUN = re.compile(r"[0-9a-f]{16,64}")
Answer = tuple[dict[str, Any], bytes]


class Refusal(FurlongError):
    """A question that this site does not answer, and why."""


@dataclass(frozen=True)
class Own:
    """Which images a site holds. Labels are dropped as soon as they are read."""

    name: str  # folder:PATH, parquet:PATH, or a named set
    root: str | None = None
    strict: bool = False
    limit: int | None = None

    def load(self, image_size: int) -> ImageSet:
        """All images, brought to squares."""
        return data.load(
            self.name,
            "train",
            root=self.root,
            strict=self.strict,
            limit=self.limit,
            image_size=image_size,
        ).unlabelled()


@dataclass
class Site:
    """One node. ``part``: it takes this part of the data that a run names, instead of ``own``."""

    folder: Path  # for state; encoders of finished runs are left in it too
    own: Own | None = None
    part: int | None = None
    name: str | None = None
    agree: Config | None = None  # the only configuration that this site takes part in
    code: bool = False  # whether a run may name modules and files of this machine
    device: str = "auto"
    isolate: bool = False  # train in a process of its own
    say: Callable[[str], None] = lambda _: None
    _party: tuple[str, Participant, InProcess] | None = field(default=None, repr=False)

    def answer(self, header: Mapping[str, Any], body: bytes = b"") -> Answer:
        """The answer to a question; whatever goes wrong is an answer too."""
        kinds = {"hello": self._hello, "work": self._work, "fetch": self._fetch, "end": self._end}
        try:
            kind = kinds.get(str(header.get("kind")))
            if kind is None:
                raise Refusal(f"unknown question {str(header.get('kind'))[:40]!r}")
            self._same_program(header)
            return kind(header, body)
        except Refusal as error:
            self.say(f"refused: {error}")
            return {"refused": without_paths(str(error))}, b""
        except Exception as error:
            self.say(f"failed: {describe(error)}")
            return {"failed": "raised", "reason": outward(error)}, b""

    def close(self) -> None:
        """End the worker."""
        if self._party is not None:
            self._party[2].close()
            self._party = None

    def check(self) -> int | None:
        """Read the images before anybody waits for them: how many, as far as that is known yet."""
        if self.own is None:
            return None
        found = _loaded(self.own, 32 if self.agree is None else own_size(self.agree))
        if found.skipped:
            self.say(skipped(found))
        return len(found)

    def predicted(self, settings: Config) -> AnyServer:
        """The server of a run whose sites are all like this one, to predict what is sent."""
        own = None if self.own is None else _loaded(self.own, own_size(settings))
        count = settings.data.clients or 2
        sizes = {} if own is None else dict.fromkeys(range(count), len(own))
        party = participate(settings, own, sizes)
        return Server(party.method, party.setup, fraction=settings.train.fraction)

    # ------------------------------------------------------------ may it?

    def _same_program(self, header: Mapping[str, Any]) -> None:
        theirs, mine = header.get("furlong"), furlong.__version__
        if header.get("protocol") != PROTOCOL or theirs != mine:
            raise Refusal(
                f"the server runs furlong {str(theirs)[:20]} (protocol "
                f"{str(header.get('protocol'))[:20]}), this node {mine} (protocol {PROTOCOL}). "
                "Install the same version on both."
            )
        if not _RUN.fullmatch(str(header.get("run"))):
            raise Refusal(f"{str(header.get('run'))[:80]!r} is not the name of a run")

    def settings(self, header: Mapping[str, Any]) -> Config:
        """The run's configuration, if this site takes part in such a run."""
        tree = header.get("config")
        if not isinstance(tree, dict):
            raise Refusal("no configuration")
        tree = without_none(tree)
        for name, fact in all_facts().items():
            section, _, key = name.partition(".")
            if not fact.told and key in (tree.get(section) or {}) and not self.code:
                raise Refusal(f"a server may not say {name}")
        names = [tree.get("method", {}).get("name"), tree.get("model", {}).get("encoder")]
        for name in [*names, tree.get("data", {}).get("name")]:
            if ":" in str(name) and not self.code:
                raise Refusal(
                    f"the run names {str(name)[:80]!r}: a file, a folder or code of this machine. "
                    "A node takes none of that from a server unless it is started with "
                    "--trust-server."
                )
        try:
            settings = from_tree(tree, {"run.device": self.device}, "the run's configuration")
        except FurlongError as error:
            raise Refusal(str(error)) from None
        if self.agree is not None:
            self._agreed(settings)
        sites = settings.data.name == SITES
        if sites != (self.own is not None):
            raise Refusal(
                f"this node holds {'its own images' if self.own else 'no images of its own'}, but "
                f"the run's data is {settings.data.name!r}"
                + ("" if sites else ": it must be 'sites' for nodes started with --data")
            )
        return settings

    def _agreed(self, settings: Config) -> None:
        assert self.agree is not None
        theirs, mine = dict(_flat(told(settings))), dict(_flat(told(self.agree)))
        free = {name for name, fact in all_facts().items() if not fact.agree}
        other = [key for key in mine if mine[key] != theirs.get(key) and key not in free]
        if other:
            lines = (f"{key} is {theirs.get(key)!r}, not {mine[key]!r}" for key in other[:5])
            raise Refusal(f"not the configuration that this node agrees to: {'; '.join(lines)}")

    # ------------------------------------------------------------ what it does

    def _hello(self, header: Mapping[str, Any], _: bytes) -> Answer:
        settings = self.settings(header)
        if self.own is not None:
            images = self._images(settings)
            count, channels, mark = len(images), images.channels, None
        else:
            party = self._participant(header, settings)
            rows = party.federation.rows
            if self.part not in rows:
                raise Refusal(f"part {self.part}: the run has clients 0 to {len(rows) - 1}")
            count, channels = len(rows[self.part]), party.federation.images.channels
            mark = party.mark
        answer = {"name": self.name, "part": self.part, "images": count, "channels": channels}
        return {**answer, "mark": mark, "torch": torch.__version__}, b""

    def _work(self, header: Mapping[str, Any], body: bytes) -> Answer:
        settings = self.settings(header)
        client, exchange = _whole(header["client"]), Exchange(**header["exchange"])
        _whole(exchange.index), _whole(exchange.round)
        at, of = _whole(header["slice"]), _whole(header["slices"])
        seconds, oldest = float(header["seconds"]), _whole(header["oldest"])
        piece, how, since = _whole(header["slice_bytes"]), header["encoding"], header.get("since")
        if not (0 < seconds < math.inf and at < of and piece):
            raise ValueError("times and sizes")
        run = self._run(header)
        if self.part is not None and client != self.part:
            raise Refusal(f"this node is client {self.part}, not {client}")
        if self.own is not None:
            count, known = len(self._images(settings)), (header.get("sizes") or {}).get(str(client))
            if count != known:
                raise Refusal(f"this site has {count} images now; the run counts {known}")
        spool = run / "spool" / f"{client:05d}-{exchange.index:06d}.down"
        if of > 1:
            _collect(spool, body, at)
            if at + 1 < of:
                return {"kept": at}, b""
            body = spool.read_bytes()
            spool.unlink()
        party = self._participant(header, settings)
        engine, store = self._engine(), StateFiles(run)
        if client not in party.federation.rows:
            raise Refusal(f"client {client} is not one of this run's")
        last = None if since is None else _whole(since["exchange"])
        store.at(client, exchange.index, last, oldest)
        lost = since is not None and since["kept"] is True and store.blob(client) is None
        if lost:
            self.say("warning: the state of the last round is gone; this client begins anew")
        engine.store = store
        engine.deadline = seconds if engine.isolate else 0.0
        try:
            down = decode(bytearray(body))
        except PayloadError as error:
            raise Refusal(f"a download that cannot be read: {error}") from None
        self.say(f"round {exchange.round + 1}: {exchange.kind}, {size(len(body))} received")
        ((_, report),) = engine.exchange(exchange, {client: down})
        if isinstance(report, Failure):
            self.say(f"round {exchange.round + 1}: {report.reason}")
            return {"failed": report.kind, "reason": without_paths(report.reason)}, b""
        if lost:  # the run's log must show it
            report = replace(report, metrics={**report.metrics, "state_lost": 1.0})
        # a report's weights as differences to what the server sent, where names are the same
        base = None if how == "exact" else {"upload": down}
        left = None if how == "exact" else store.residual(client)
        packed, left = encode(report, how, base, left)
        if left:
            store.put(client, pack_tensors(left, {}), "residual")
        self.say(f"round {exchange.round + 1}: {size(len(packed))} sent")
        slices = -(-len(packed) // piece)
        for old in (run / "spool").glob(f"{client:05d}-*"):
            old.unlink()
        if slices > 1:
            spool.parent.mkdir(parents=True, exist_ok=True)
            spool.with_suffix(".up").write_bytes(packed)
        kept = store.blob(client) is not None
        return {"slice": 0, "slices": slices, "state": kept}, bytes(packed[:piece])

    def _fetch(self, header: Mapping[str, Any], _: bytes) -> Answer:
        client, index = _whole(header["client"]), _whole(header["exchange"]["index"])
        path = self._run(header) / "spool" / f"{client:05d}-{index:06d}.up"
        at, piece = _whole(header["slice"]), _whole(header["slice_bytes"]) or 1
        try:
            with path.open("rb") as file:
                file.seek(at * piece)
                body = file.read(piece)
        except OSError:
            raise Refusal("there is no answer to fetch") from None
        state = StateFiles(self._run(header)).blob(client) is not None
        return {"slice": at, "slices": -(-path.stat().st_size // piece), "state": state}, body

    def _end(self, header: Mapping[str, Any], body: bytes) -> Answer:
        run = self._run(header)
        if not run.is_dir():
            raise Refusal("this node took no part in that run")
        self.close()
        shutil.rmtree(run, ignore_errors=True)
        if body and self.own is not None:
            weights, metadata = unpack_tensors(bytearray(body))
            about = json.loads(metadata["about"])
            if ":" in str(about["encoder"]) and not self.code:
                raise Refusal("an encoder that is made by code of this machine is not kept")
            for kept in (self.folder / "encoders" / run.name, self.folder / "encoder"):
                kept.mkdir(parents=True, exist_ok=True)
                RunFolder(kept).save_encoder(weights, about)
            self.say(f"the run has ended; its encoder is in {kept}")
        return {"ended": True}, b""

    def _images(self, settings: Config) -> ImageSet:
        """The site's own images; what is wrong with them is said here, and not to the server."""
        assert self.own is not None
        try:
            return _loaded(self.own, own_size(settings))
        except FurlongError as error:
            self.say(f"the images cannot be read: {error}")
            raise FurlongError("the site's images cannot be read; its own log says why") from None

    def _run(self, header: Mapping[str, Any]) -> Path:
        return self.folder / "runs" / str(header["run"])

    def _participant(self, header: Mapping[str, Any], settings: Config) -> Participant:
        """The run as this site knows it; made once, and again if it changes."""
        me = None if self.own is None else header.get("client")
        known = [header["run"], header["config"], header.get("sizes"), me]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        if self._party is None or self._party[0] != digest:
            self.close()
            sizes = {int(k): int(n) for k, n in (header.get("sizes") or {}).items()}
            own = None if self.own is None else self._images(settings)
            party = participate(settings, own, sizes, int(header.get("client", -1)))
            isolate = self.isolate and can_fork(party.setup.device)
            engine = InProcess(
                party.method,
                party.federation,
                party.setup,
                isolate=isolate,
                store=StateFiles(Path()),
            )
            self._party = digest, party, engine
        return self._party[1]

    def _engine(self) -> InProcess:
        assert self._party is not None
        return self._party[2]


@lru_cache(maxsize=1)
def _loaded(own: Own, image_size: int) -> ImageSet:
    """A site's images, read once."""
    return own.load(image_size)


def without_paths(text: str) -> str:
    """A text as it may leave a site: what looks like a path is cut out."""
    return _PATH.sub("…", text)


def outward(error: Exception) -> str:
    """An error as it may leave a site; those of the system name files."""
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {os.strerror(error.errno or 0)}"
    return without_paths(describe(error))


def _whole(value: Any) -> int:
    """A number that a server said, if it can be used in the name of a file."""
    if type(value) is not int or not 0 <= value < 2**40:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number")
    return value


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _collect(path: Path, body: bytes, at: int) -> None:
    """Append slice ``at`` of a download to those that came before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb" if at == 0 else "ab") as file:
        file.write(body)
