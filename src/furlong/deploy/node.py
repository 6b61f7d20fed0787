"""A node of a federation: its images, its clients' state, and its answers to a server.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch

from furlong.core.context import Exchange
from furlong.core.exchange import Failure, Kept
from furlong.core.layout import PayloadError
from furlong.core.method import Report
from furlong.core.noise import KEY, arithmetic, forget_secret, secret_from, secret_in
from furlong.core.payload import pack, pack_tensors, unpack, unpack_tensors
from furlong.core.privacy import LEDGER, Ledger
from furlong.data import images as data
from furlong.data.images import ImageSet
from furlong.data.reading import Reading
from furlong.deploy.agreement import Refusal, require_same_program, settings_of
from furlong.deploy.states import MOST_RUNS, Slices, StateFiles, make_room
from furlong.engines.codec import How, decode, encode
from furlong.engines.inprocess import InProcess
from furlong.engines.pool import can_fork
from furlong.errors import FurlongError, describe
from furlong.files import waiting, write_atomically
from furlong.methods.wrappers.private import budgeted, charged
from furlong.runs.config import Config, all_facts
from furlong.runs.datasets import skipped
from furlong.runs.folder import RunFolder
from furlong.runs.nodes import Participant, own_size, participate, told
from furlong.words import size

if TYPE_CHECKING:
    from furlong.core.secure.identity import Identity  # imports cryptography

_PATH = re.compile(r"'[^'\n]*/[^'\n]*'|\"[^\"\n]*/[^\"\n]*\"|[^\s'\"(]*/[^\s'\")]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENDED = f"this run has ended here, or its {KEY} is lost: this site does no more work of it"
Answer = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class OwnImages:
    """Which images a site holds. Labels are dropped as soon as they are read."""

    name: str  # folder:PATH, parquet:PATH, manifest:PATH, or a named set
    root: str | None = None
    strict: bool = False
    limit: int | None = None

    def load(self, image_size: int, how: Reading) -> ImageSet:
        """All images, brought to squares; one with a weight is there as often as that says.

        The weights stay with them, for a privacy budget of single images asks how often each is.
        """
        found = data.load(
            self.name,
            "train",
            root=self.root,
            strict=self.strict,
            limit=self.limit,
            image_size=image_size,
            how=how,
        ).unlabelled()
        if found.weights is None:
            return found
        return found.subset(found.weighted(torch.arange(len(found))))


@dataclass
class Site:
    """One node. ``part``: it takes this part of the data that a run names, instead of ``own``."""

    folder: Path  # for state; encoders of finished runs are left in it too
    own: OwnImages | None = None
    part: int | None = None
    name: str | None = None
    agree: Config | None = None  # the only configuration that this site takes part in
    code: bool = False  # whether a run may name modules and files of this machine
    device: str = "auto"
    isolate: bool = False  # train in a process of its own
    identity: Path | None = None  # where the site's signing key is, for sums under masks
    shared: bool = False  # a simulation: all clients of a run have the same folder
    say: Callable[[str], None] = lambda _: None
    _loaded: tuple[tuple[int, Reading], ImageSet] | None = field(default=None, repr=False)
    _joined: tuple[str, Participant, InProcess] | None = field(default=None, repr=False)

    def answer(self, header: Mapping[str, Any], body: bytes = b"") -> Answer:
        """The answer to a question; whatever goes wrong is an answer too."""
        kinds = {
            "hello": self._hello,
            "given": self._take,
            "work": self._work,
            "fetch": self._fetch,
            "end": self._end,
        }
        try:
            kind = kinds.get(str(header.get("kind")))
            if kind is None:
                raise Refusal(f"unknown question {str(header.get('kind'))[:40]!r}")
            require_same_program(header)
            return kind(header, body)
        except Refusal as error:
            self.say(f"refused: {error}")
            return {"refused": without_paths(str(error))}, b""
        except Exception as error:
            self.say(f"failed: {describe(error)}")
            return {"failed": "raised", "reason": outward(error)}, b""

    def close(self) -> None:
        """End the worker."""
        if self._joined is not None:
            self._joined[2].close()
            self._joined = None

    def images(self, image_size: int, how: Reading) -> ImageSet:
        """The site's own images, read once for every size and way of reading."""
        assert self.own is not None
        if self._loaded is None or self._loaded[0] != (image_size, how):
            self._loaded = (image_size, how), self.own.load(image_size, how)
        return self._loaded[1]

    def check(self) -> int | None:
        """Read the images before anybody waits for them: how many, as far as that is known yet."""
        if self.own is None:
            return None
        agreed = self.agree
        found = (
            self.images(32, Reading())
            if agreed is None
            else self.images(own_size(agreed), agreed.data.reading)
        )
        if found.skipped:
            self.say(skipped(found))
        return len(found)

    # ------------------------------------------------------------ answers

    def _hello(self, header: Mapping[str, Any], _: bytes) -> Answer:
        settings = self._settings(header)
        if self.own is not None:
            images = self._images(settings)
            count, channels, mark = len(images), images.channels, None
        else:
            party, _engine = self._join(header, settings)
            rows = party.federation.rows
            if self.part not in rows:
                raise Refusal(f"part {self.part}: the run has clients 0 to {len(rows) - 1}")
            count, channels = len(rows[self.part]), party.federation.images.channels
            mark = party.mark
        answer = {"name": self.name, "part": self.part, "images": count, "channels": channels}
        return {**answer, "mark": mark, "torch": torch.__version__}, b""

    def _work(self, header: Mapping[str, Any], body: bytes) -> Answer:
        settings = self._settings(header)
        client, exchange = _whole(header["client"]), Exchange(**header["exchange"])
        _whole(exchange.index), _whole(exchange.round)
        at, of = _whole(header["slice"]), _whole(header["slices"])
        seconds, piece = float(header["seconds"]), _whole(header["slice_bytes"])
        if not (0 < seconds < math.inf and at < of and piece):
            raise ValueError("times and sizes")
        self._require_own(header, settings, client)
        fixed = self._fixed(header, settings)
        if fixed is not None and not fixed.exists():
            return {"lacks": True}, b""
        self._make_room(header)
        slices = Slices(self._run(header), client, exchange.index)
        whole = slices.collect(body, at, of)
        if whole is None:
            return {"kept": at}, b""
        party, engine = self._join(header, settings, fixed)
        if client not in party.federation.rows:
            raise Refusal(f"client {client} is not one of this run's")
        engine.store = store = StateFiles(self._run(header))
        engine.deadline = seconds if engine.isolate else 0.0
        lost = self._go_back(store, header, client, exchange)
        try:
            down = decode(bytearray(whole))
        except PayloadError as error:
            raise Refusal(f"a download that cannot be read: {error}") from None
        kept = store.get(client)
        kept = None if kept is None else unpack(kept)
        self._spend(header, settings, party, client, exchange, kept, down)
        turn = f"round {exchange.round + 1}"
        self.say(f"{turn}: {exchange.kind}, {size(len(whole))} received")
        ((_, report),) = engine.exchange(exchange, {client: down})
        if isinstance(report, Failure):
            self.say(f"{turn}: {report.reason}")
            return {"failed": report.kind, "reason": without_paths(report.reason)}, b""
        if lost:  # the run's log must show it
            report = replace(report, metrics={**report.metrics, "state_lost": 1.0})
        packed = _encoded(report, down, header["encoding"], store)
        self.say(f"{turn}: {size(len(packed))} sent")
        kept, count = store.blob(client) is not None, slices.keep(packed, piece)
        return {"slice": 0, "slices": count, "state": kept}, bytes(packed[:piece])

    def _take(self, header: Mapping[str, Any], body: bytes) -> Answer:
        """A slice of the encoder's tensors that stay fixed during the run."""
        path = self._fixed(header, self._settings(header))
        if path is None:
            raise Refusal("weights that this run has no use for")
        client, index = _whole(header["client"]), _whole(header["exchange"]["index"])
        at, of = _whole(header["slice"]), _whole(header["slices"])
        self._make_room(header)
        whole = Slices(self._run(header), client, index).collect(body, at, of)
        if whole is not None:
            if hashlib.sha256(whole).hexdigest() != header["given"]:
                raise Refusal("fixed weights that do not match their digest")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, whole)
            self.say(f"{size(len(whole))} of fixed weights received, for the whole run")
        return {"kept": at}, b""

    def _fetch(self, header: Mapping[str, Any], _: bytes) -> Answer:
        client, index = _whole(header["client"]), _whole(header["exchange"]["index"])
        at, piece = _whole(header["slice"]), _whole(header["slice_bytes"]) or 1
        try:
            body, slices = Slices(self._run(header), client, index).fetch(at, piece)
        except OSError:
            raise Refusal("there is no answer to fetch") from None
        state = StateFiles(self._run(header)).blob(client) is not None
        return {"slice": at, "slices": slices, "state": state}, body

    def _end(self, header: Mapping[str, Any], body: bytes) -> Answer:
        run = self._run(header)
        forget_secret(self._spent(header), self.say)
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

    # ------------------------------------------------------------ what answers need

    def _settings(self, header: Mapping[str, Any]) -> Config:
        own = self.own is not None
        settings = settings_of(
            header, agree=self.agree, code=self.code, own=own, device=self.device
        )
        if self.identity is not None and not settings.secure.sums:
            raise Refusal("secure.sums is false; this node was started with --identity")
        return settings

    def _run(self, header: Mapping[str, Any]) -> Path:
        return self.folder / "runs" / str(header["run"])

    def _spent(self, header: Mapping[str, Any]) -> Path:
        """Where the run's secret and account are: not in its folder, which a server may delete."""
        return self.folder / "spent" / str(header["run"])

    def _secret(self, header: Mapping[str, Any]) -> bytes:
        """What noise is made from: of this site, another one for every run, gone when it ends."""
        place = self._spent(header)
        with waiting(place):
            if not (place / KEY).exists() and next(place.rglob(LEDGER), None) is not None:
                raise Refusal(_ENDED)
            return secret_in(place)

    def _make_room(self, header: Mapping[str, Any]) -> None:
        """A server that begins runs and never ends them must not fill the disk with states."""
        for name in make_room(self.folder / "runs", str(header["run"])):
            self.say(f"the state of run {name} is forgotten: {MOST_RUNS} runs have begun since")

    def _fixed(self, header: Mapping[str, Any], settings: Config) -> Path | None:
        """Where the encoder's tensors are that stay fixed, if the run has any."""
        if str(settings.model.freeze) == settings.model.adapter == "none":
            return None
        digest = str(header.get("given"))
        if not _DIGEST.fullmatch(digest):
            raise Refusal("the run fixes weights of the encoder and does not say which")
        return self._run(header) / f"{digest}.safetensors"

    def _images(self, settings: Config) -> ImageSet:
        """The site's own images; what is wrong with them is said here, and not to the server."""
        try:
            return self.images(own_size(settings), settings.data.reading)
        except FurlongError as error:
            self.say(f"the images cannot be read: {error}")
            raise FurlongError("the site's images cannot be read; its own log says why") from None

    def _require_own(self, header: Mapping[str, Any], settings: Config, client: int) -> None:
        """Refuse work of another client, or of this one when it had other images."""
        if self.part is not None and client != self.part:
            raise Refusal(f"this node is client {self.part}, not {client}")
        if self.own is not None:
            count, known = len(self._images(settings)), (header.get("sizes") or {}).get(str(client))
            if count != known:
                raise Refusal(f"this site has {count} images now; the run counts {known}")

    def _join(
        self, header: Mapping[str, Any], settings: Config, fixed: Path | None = None
    ) -> tuple[Participant, InProcess]:
        """The run as this site knows it; made once, and again if it changes."""
        me = None if self.own is None else header.get("client")
        known = [header["run"], header["config"], header.get("sizes"), me, str(fixed)]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        if self._joined is None or self._joined[0] != digest:
            self.close()
            sizes = {int(k): int(n) for k, n in (header.get("sizes") or {}).items()}
            own = None if self.own is None else self._images(settings)
            given = {} if fixed is None else unpack_tensors(bytearray(fixed.read_bytes()))[0]
            secret = None if settings.privacy.level == "none" else self._secret(header)
            me = int(header.get("client", -1))
            party = participate(settings, own, sizes, me, given, secret)
            engine = InProcess(
                party.method,
                party.federation,
                party.setup,
                isolate=self.isolate and can_fork(party.setup.device),
                store=StateFiles(Path()),
                identity=None if self.identity is None else identity_at(self.identity),
            )
            self._joined = digest, party, engine
        return self._joined[1:]

    def _spend(
        self,
        header: Mapping[str, Any],
        settings: Config,
        party: Participant,
        client: int,
        exchange: Exchange,
        kept: Kept | None,
        down: Any,
    ) -> None:
        """Charge the site's own account before training.

        An answer that would be the same again is free, and another one to the same exchange is
        refused, as is an exchange that the run does not have. An answer that has noise of its own
        every time is charged every time.
        """
        method, place = budgeted(party.method), self._spent(header)
        account = place / str(client) if self.shared else place
        if method is None:
            if Ledger(account).clients():
                raise Refusal("this run began with a privacy budget, and now it has none")
            return
        every = party.method.plan(party.setup)
        planned = next(islice(every, exchange.index, None), None)
        if planned is None or replace(planned, index=exchange.index) != exchange:
            raise Refusal(
                f"exchange {exchange.index + 1}, as it is asked for, is not one of this run's"
            )
        asks = charged(party.method, exchange, None if kept is None else kept.state, down)
        with waiting(place):  # another process may be asked at the same time
            if not (place / KEY).exists():
                raise Refusal(_ENDED)
            ledger = Ledger(account)
            if others := ledger.clients() - {client}:
                raise Refusal(
                    f"this site has answered as client {min(others)} of this run. As client "
                    f"{client}, too, it would be given the budgets of several"
                )
            if asks is None:
                return
            exchange, *values = asks
            if not method.repeats(party.setup):  # there is new noise in every answer
                mark = token_hex()
                method.require_budget(ledger, party.setup, exchange, [client], mark)
            else:
                values += [] if kept is None else [kept.stats, kept.moments]
                key = secret_from(method.secret, "mark").hex()
                machine = arithmetic(party.setup.device)
                made = key, machine, party.pixels
                mark = _mark(header, settings, exchange, values, made)
                if ledger.marks(exchange.index, client) - {mark}:
                    raise Refusal(
                        f"exchange {exchange.index + 1} was answered already, for other weights or "
                        f"settings, with another {KEY}, on another machine or from other images: "
                        "another answer would spend the privacy budget twice"
                    )
                method.require_budget(ledger, party.setup, exchange, [client])
            ledger.add(exchange.index, [(client, mark, method.release(party.setup, client))])

    def _go_back(
        self, store: StateFiles, header: Mapping[str, Any], client: int, exchange: Exchange
    ) -> bool:
        """Go to the state that the server counts on; whether that is lost."""
        since = header.get("since")
        last = None if since is None else _whole(since["exchange"])
        store.at(client, exchange.index, last, _whole(header["oldest"]))
        lost = since is not None and since["kept"] is True and store.blob(client) is None
        if lost:
            self.say("warning: the state of the last round is gone; this client begins anew")
        return lost


def _mark(
    header: Mapping[str, Any],
    settings: Config,
    exchange: Exchange,
    values: Any,
    made: tuple[str, str, str],
) -> str:
    """A digest of all that an answer depends on; ``values`` are payloads.

    ``made``: of what noise is made, by what the rest is computed, and from which images.
    """
    config = told(settings)
    free = [name.split(".") for name, fact in all_facts().items() if fact.resume]
    for section, key in free:  # may differ in a run that goes on, and changes no answer
        config.get(section, {}).pop(key, None)
    names = ("sizes", "given", "encoding")
    about = [config, asdict(exchange), *(header.get(name) for name in names), made]
    rest = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(pack(values)).digest() + rest).hexdigest()


def identity_at(folder: Path) -> Identity:
    """The site's identity."""
    from furlong.core.secure.identity import Identity

    return Identity.at(folder)


def _encoded(report: Report[Any], down: Any, how: How, store: StateFiles) -> Any:
    """A packed report: its weights as differences to what the server sent, if that is not exact."""
    if how == "exact":
        return encode(report, how)[0]
    packed, left = encode(report, how, {"upload": down}, store.residual(report.client))
    if left:  # what rounding loses is sent with the next answer
        store.put(report.client, pack_tensors(left, {}), "residual")
    return packed


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
