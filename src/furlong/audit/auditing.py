"""An audit: every attack that fits is tried on what a run published and on what a client sent.

Members are images of the run's clients, others are test images, as many, alike in classes and
sites. A third of the test images is the attacker's own: he trains on them and contrasts with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import furlong
from furlong.audit.gradients import on_update
from furlong.audit.measures import FEWEST, Finding
from furlong.audit.membership import Loss, on_encoder
from furlong.audit.replay import Sent, replay
from furlong.audit.scene import Scene, Tell, scene
from furlong.audit.sharing import on_features
from furlong.core.context import Batch, Exchange
from furlong.core.method import AnyMethod
from furlong.errors import FurlongError, nearest
from furlong.methods.base import Model, OneNetwork
from furlong.methods.networks import filled
from furlong.methods.wrappers import Wrapping
from furlong.runs import checkpoint, config
from furlong.runs.datasets import SITES
from furlong.runs.evaluate import Bench, settings_of, subject
from furlong.runs.folder import RunFolder
from furlong.runs.prepare import Prepared, prepare
from furlong.runs.record import RunRecord
from furlong.seeding import seeded, threads

TARGETS = ("published", "upload", "features", "gradient")
BESIDE = 7  # of the attacker's images, in a batch with one whose loss is computed
FILE = "audit.json"
PUBLISHED = "published encoder"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ask:
    """What is wanted of an audit."""

    images: int = 500  # members, and as many others
    seed: int = 0
    client: int | None = None  # whose upload; None: the first that was asked last
    only: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        for word in self.only:
            if word not in TARGETS:
                raise FurlongError(f"nothing called {word!r} is attacked. {nearest(word, TARGETS)}")
        if self.images < FEWEST:
            raise FurlongError(f"--images is {self.images}; give {FEWEST} or more.")


@dataclass
class Audit:
    """What was tried and what came out."""

    about: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    not_tried: list[dict[str, str]] = field(default_factory=list)

    def leave(self, targets: list[str], reason: str) -> None:
        """Note what is not attacked, and why."""
        self.not_tried += [{"target": target, "reason": reason} for target in targets]

    def leave_out(self, ask: Ask) -> None:
        """Note what was not asked for."""
        self.leave([target for target in TARGETS if target not in ask.only], "left out by --only")

    def report(self) -> dict[str, Any]:
        """As audit.json has it."""
        rows = [finding.asdict() for finding in self.findings]
        return {**self.about, "findings": rows, "not_tried": self.not_tried}


def audit(
    place: Path,
    ask: Ask,
    overrides: Mapping[str, Any] | None = None,
    tell: Tell = lambda *_: None,
    say: Say = lambda _: None,
) -> Audit:
    """Attack a run folder (then audit.json is written there) or an exported encoder."""
    given = dict(overrides or {})
    if place.is_file():
        with threads():
            made = _of_file(place, ask, given, tell, say)
        made.leave_out(ask)
        return made
    folder = RunFolder.open(place)
    for name in given:
        if not config.is_place(config.full_name(name)):
            raise FurlongError(
                f"--{name.replace('_', '-')} cannot be given here: a run is audited with the "
                "images that it was trained on."
            )
    with folder.locked(), threads():
        made = _of_run(folder.record, ask, given, tell, say)
        made.leave_out(ask)
        folder.write(FILE, made.report())
    return made


def _about(place: Path, ask: Ask, method: object, data: str, note: str = "") -> dict[str, Any]:
    return {
        "furlong": furlong.__version__,
        "place": str(place),
        "method": method,
        "data": data,
        "seed": ask.seed,
        "images": ask.images,
        "only": list(ask.only),
        "sent": None,
        "note": note,
    }


def _of_file(place: Path, ask: Ask, given: Mapping[str, Any], tell: Tell, say: Say) -> Audit:
    """Only the encoder is there, and whether it has seen the training images is taken on trust."""
    settings = settings_of(place, given)
    found = subject(place, settings, say)
    images = Bench(found, settings, None, split=False).images
    here = scene(images.train, images.test, images.augment, ask.images, ask.seed)
    note = (
        f"Members are the training images of {images.train.name}: that the encoder was trained on "
        "them is taken on trust."
    )
    made = Audit(_about(place, ask, found.about.get("method"), settings.data.name, note))
    made.leave([t for t in ask.only if t != "published"], "a file holds nothing that was sent")
    both = next(iter(found.encoders.values())), found.random
    rows = torch.arange(len(here.train))
    made.findings += on_encoder(PUBLISHED, both, (None, None), here, rows, tell)
    return made


def _of_run(record: RunRecord, ask: Ask, given: Mapping[str, Any], tell: Tell, say: Say) -> Audit:
    settings = record.config(given)
    if settings.data.name == SITES:
        raise FurlongError(
            f"{record.path} was trained on images that stayed on the nodes: without them no attack "
            "can be scored. Audit a run of the same settings on images that are here."
        )
    _ = record.finished
    alone = replace(settings, run=replace(settings.run, out=None))  # a replay leaves nothing there
    prepared = prepare(alone, saved=record.path / "random.safetensors")
    found = subject(record.path, settings, say)
    here = scene(prepared.train, prepared.test, prepared.setup.augment, ask.images, ask.seed)
    made = Audit(_about(record.path, ask, settings.method["name"], settings.data.name))
    begun = _begun(prepared)
    if "published" in ask.only:
        owners = prepared.federation.rows
        rows = torch.cat([*owners.values()])
        if settings.run.bound == "single":  # then it is the first client's
            rows = owners[min(owners)]
        both = next(iter(found.encoders.values())), found.random
        losses = _losses_of(prepared, here, _ended(prepared, record), begun)
        made.findings += on_encoder(PUBLISHED, both, losses, here, rows, tell)
    asked = [target for target in ask.only if target != "published"]
    if not config.sends(settings.run.bound):
        made.leave(asked, "nothing is sent in such a run: it is a bound of a federation")
    elif settings.privacy.level != "none" and settings.privacy.noise_from == "secret":
        made.leave(
            asked,
            "what clients sent cannot be made again: the secret of its noise was thrown away when "
            "the run ended; audit a run with --privacy.noise-from seed",
        )
    elif asked:
        sent = replay(prepared, record, ask.client, partial(tell, "replaying"), say)
        made.about["sent"] = {
            "client": sent.client,
            "round": sent.exchange.round + 1,
            "exchange": sent.exchange.index + 1,
            "kind": sent.exchange.kind,
            "images": prepared.setup.sizes[sent.client],
            "proof": sent.proof,
        }
        for target in asked:
            with seeded(prepared.setup.device, ask.seed, "audit", target):
                _ON_SENT[target](made, prepared, sent, begun, found.random, here, tell)
    return made


# ---------------------------------------------------------------- what was sent


def _on_upload(
    made: Audit, p: Prepared, sent: Sent, begun: Any, random: nn.Module, here: Scene, tell: Tell
) -> None:
    """The encoder in an upload, which has seen the images of one client last."""
    encoder = p.method.local_encoder(sent.upload, p.server.context(sent.exchange))
    if encoder is None:
        made.leave(["upload"], "no whole encoder can be read from what this run's clients send")
        return
    losses = _losses_of(p, here, sent.upload, begun)
    rows, target = p.federation.rows[sent.client], f"upload of client {sent.client}"
    made.findings += on_encoder(target, (encoder, random), losses, here, rows, tell)


def _on_features(
    made: Audit, p: Prepared, sent: Sent, begun: Any, _: nn.Module, here: Scene, tell: Tell
) -> None:
    """Features of single images in an upload."""
    ctx = p.server.context(sent.exchange)
    shared = p.method.shared(sent.server, sent.upload, ctx)
    blank = p.method.shared(begun, p.method.expected(begun, sent.client, ctx), ctx)
    if shared is None or blank is None:
        made.leave(["features"], "this method's clients send no features of single images")
        return
    rows, target = p.federation.rows[sent.client], f"features of client {sent.client}"
    made.findings += on_features(target, shared, blank, here, rows, tell)


def _on_gradient(
    made: Audit, p: Prepared, sent: Sent, begun: Any, _: nn.Module, here: Scene, tell: Tell
) -> None:
    """What a client with very few images would send, from the weights that this one got."""
    method, _state = _unwrapped(p, sent.server)
    nets = _network(p, sent.server), _network(p, begun)
    if not isinstance(method, OneNetwork) or nets[0] is None or nets[1] is None:
        reason = (
            "this method's loss is no function of one network and unlabelled images alone; that "
            "its updates are not inverted here does not mean that they cannot be"
        )
        made.leave(["gradient"], reason)
        return
    rows = p.federation.rows[sent.client]
    try:
        made.findings.append(on_update((nets[0], nets[1]), method.loss, here, rows, tell))
    except FurlongError as error:
        made.leave(["gradient"], str(error))


_ON_SENT: dict[str, Callable[..., None]] = {
    "upload": _on_upload,
    "features": _on_features,
    "gradient": _on_gradient,
}


# ---------------------------------------------------------------- a method's own networks


def _unwrapped(p: Prepared, state: Any) -> tuple[AnyMethod, Any]:
    """The method inside of wrappers, and its own state; or an upload as it is."""
    method, first = p.method, min(p.setup.sizes)
    wrapped = not isinstance(state, Model)  # an upload is not
    while isinstance(method, Wrapping):
        state = method.state_of(state, first) if wrapped else state
        method = method.inner
    return method, state


def _begun(p: Prepared) -> Any:
    """A server's state with untrained networks, without the work that some methods begin with."""
    with p.server.computing("init"):
        return p.method.outline(None, p.server.clients, p.server.context(Exchange(round=0)))


def _ended(p: Prepared, record: RunRecord) -> Any | None:
    """The server's state at the end, if its checkpoint is still there."""
    saved = checkpoint.load(record.path)
    whole = saved is not None and saved.done == len(p.server.exchanges())
    return saved.server if saved is not None and whole else None


def _network(p: Prepared, state: Any) -> nn.Module | None:
    """The method's network with the weights of ``state``, if its loss needs only that."""
    method, own = _unwrapped(p, state)
    if not isinstance(method, OneNetwork) or method.needs_labels:
        return None
    with torch.random.fork_rng(devices=[]):
        made = method.network(p.server.context(Exchange(round=0)))
    return filled(made, own.weights)


def _losses_of(
    p: Prepared, here: Scene, learnt: Any, begun: Any
) -> tuple[Loss | None, Loss | None]:
    """The method's own loss of single images, with learnt and with untrained networks."""
    method, _ = _unwrapped(p, begun)
    if learnt is None or not isinstance(method, OneNetwork):
        return None, None
    nets = _network(p, learnt), _network(p, begun)
    if nets[0] is None or nets[1] is None:
        return None, None
    return partial(_losses, method, nets[0], here), partial(_losses, method, nets[1], here)


@torch.no_grad()
def _losses(method: OneNetwork, net: nn.Module, here: Scene, pixels: Tensor) -> Tensor:
    """Of each of N images beside some of the attacker's, by the same random numbers: N."""
    beside, found = here.own[:BESIDE], torch.zeros(len(pixels))
    index = torch.arange(1 + len(beside))
    for row, image in enumerate(pixels):
        batch = Batch(torch.cat([image[None], beside]), index, None, here.recipe)
        with seeded(torch.device("cpu"), here.seed, "audit", "loss"):
            found[row] = sum(float(method.loss(net, batch)) for _ in range(2))
    return found
