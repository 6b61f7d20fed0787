"""Any method that only averages, with sums that the server cannot open (``[secure]``).

Every exchange of the method becomes five, one for each phase of ``core/secure/protocol.py``; the
client trains in the third. So engines, checkpoints and ``furlong resume`` know nothing of it, and a
client that is silent or fails in any exchange is one that has dropped out.

What a client sends is the sum of what all others do not see: n_k, its mean loss and n_k times every
number of its upload, as whole numbers modulo 2^64 under masks. The server's half gets one answer in
place of all: their mean. The sum has the same bits whatever the masks were, so keys and masks are
the operating system's random numbers, and a run that is resumed has the same result. Checkpoints
are written between rounds only: a round that was interrupted begins anew, with new keys.

Whatever changes an upload before it is sent, such as noise for differential privacy, belongs into a
wrapper inside of this one: ``Secured(Noisy(method))``. What its ``local_update`` gives is masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from furlong.core.context import ClientContext, Exchange, ServerContext, Setup
from furlong.core.exchange import cohort_size, expected_upload, own_statistics
from furlong.core.method import Local, Report
from furlong.core.payload import Weights, flatten, pack, payload, replace_tensors
from furlong.core.secure import protocol
from furlong.core.secure.graph import Graph, drawn, least
from furlong.core.secure.numbers import Layout, Sum, fraction_bits
from furlong.core.secure.primitives import SHARE, SIGNATURE, ProtocolError
from furlong.core.secure.protocol import ADVERT, SEALED, Alive, Inbox, Offer, Secrets, Signed, Up
from furlong.core.secure.settings import SecureSettings
from furlong.errors import FurlongError
from furlong.methods.wrappers import Wrapping
from furlong.seeding import seeded

PHASES = ("keys", "shares", "masked", "list", "unmask")
KEYS, SHARES, MASKED, LIST, UNMASK = range(len(PHASES))


@payload("furlong.methods.secured.Round")
class Round:
    """What the server knows of a round whose sum is not open yet: no client's numbers."""

    asked: int  # clients that were invited
    ring: tuple[int, ...]  # those who sent keys, see Graph
    degree: int
    threshold: int
    bits: int  # behind the point of what is sent
    adverts: Weights  # client -> uint8 ADVERT
    sealed: Weights  # sender -> uint8 n×SEALED, for each of its others
    total: Weights  # "sum": int64 n, of the masked vectors
    alive: tuple[int, ...]  # who has sent a vector
    signatures: Weights  # client -> uint8 64

    @property
    def graph(self) -> Graph:
        """Who masks with whom."""
        return Graph(self.ring, self.degree, self.threshold)

    @property
    def senders(self) -> list[int]:
        """Who has sent shares."""
        return sorted(map(int, self.sealed))

    def heard(self, client: int) -> tuple[int, ...]:
        """Those of whom ``client`` has shares, without itself."""
        return tuple(k for k in self.graph.others(client) if str(k) in self.sealed)

    def held(self, client: int) -> list[int]:
        """Whose shares ``client`` sends at the end."""
        return protocol.held(not self.degree, client, self.heard(client))


@payload("furlong.methods.secured.State")
class State:
    """The method's server state; during a round also the round's."""

    inner: Any
    round: Round | None


@payload("furlong.methods.secured.Work")
class Work:
    """What goes down in the phase in which a client trains."""

    inner: Any
    inbox: Inbox
    bits: int


@payload("furlong.methods.secured.Client")
class Client:
    """What stays on a client: the method's state, BatchNorm statistics, a round's secrets."""

    inner: Any
    begun: bool  # whether there is a method's state already
    stats: Weights  # of bn_stats = "local"
    secrets: Secrets | None


@dataclass(frozen=True)
class Secured(Wrapping[State]):
    """``inner``, whose server sees sums only."""

    settings: SecureSettings
    fraction: float  # of the clients that a round asks

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.bn_stats == "local":  # this wrapper keeps them itself, see local_update
            object.__setattr__(self, "bn_stats", "average")

    @property
    def leaves(self) -> str:  # type: ignore[override]
        """What leaves a client, in words."""
        return (
            "Masked numbers, of which the server learns the sum over a round's clients and no "
            "client's own, if it keeps to the protocol and colludes with fewer clients than "
            "secure.threshold says. The sum, the number of images of each client, and who took "
            "part are not hidden. See docs/privacy.md."
        )

    # ------------------------------------------------------------ the plan

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """Five exchanges for each of the method's; training keeps its name."""
        for exchange in self.inner.plan(setup):
            for phase, name in enumerate(PHASES):
                kind = exchange.kind if phase == MASKED else f"{exchange.kind}: {name}"
                yield replace(exchange, kind=kind, learns=exchange.learns and phase == UNMASK)

    def asks(self, exchange: Exchange, state: Any, down: Any) -> tuple[Exchange, Any, Any] | None:
        """The method's own question, in the phase in which a client trains."""
        if exchange.index % len(PHASES) != MASKED:
            return None
        if not (isinstance(down, Work) and isinstance(state, Client)):
            raise ProtocolError("secure aggregation: this phase is not the client's next one")
        return _of_method(exchange), replace(state, secrets=None), down.inner

    def asked(self, server: State, cohort: list[int], ctx: ServerContext) -> list[int]:
        """Who has kept up so far; nobody where the round is given up."""
        phase, now = ctx.exchange.index % len(PHASES), server.round
        if phase == KEYS:
            return super().asked(server, cohort, _seen(ctx))
        if now is None:
            return []
        kept = (now.ring, now.senders, now.alive, map(int, now.signatures))[phase - 1]
        there = set(kept)
        return [client for client in cohort if client in there]

    def state_of(self, server: State, client: int) -> Any:  # noqa: ARG002
        """The same for everybody."""
        return server.inner

    # ------------------------------------------------------------ a client

    def init_client(self, ctx: ClientContext) -> Client:  # noqa: ARG002
        """Nothing yet: the method begins where it trains, with the random numbers it has then."""
        return Client(None, False, {}, None)

    def local_update(self, state: Client, down: Any, ctx: ClientContext) -> Local[Client, Up]:
        """The client's part of the phase."""
        phase, me, secrets = ctx.exchange.index % len(PHASES), ctx.client, state.secrets
        number = _of_method(ctx.exchange).index
        if phase == KEYS:
            known, up = protocol.advertise(me, number, ctx.identity)
            return Local(replace(state, secrets=known), up)
        if secrets is None or secrets.exchange != number:
            raise ProtocolError("secure aggregation: this client's secrets of the round are gone")
        if ctx.identity is not None:
            ctx.identity.once(f"{protocol.attempt(secrets)} {PHASES[phase]}")
        if phase == SHARES:
            known, up = protocol.share(secrets, me, down, self.settings, ctx.identity)
        elif phase == MASKED:
            masks = hashlib.sha256(pack((secrets, down.inbox))).hexdigest()
            state, vector = self._train(state, down, ctx, masks)
            known, up = protocol.mask(secrets, me, down.inbox, vector)
        elif phase == LIST:
            known, up = protocol.acknowledge(secrets, me, down, self.settings)
        else:
            return Local(replace(state, secrets=None), protocol.reveal(secrets, me, down))
        return Local(replace(state, secrets=known), up)

    def _train(
        self, state: Client, down: Work, ctx: ClientContext, masks: str
    ) -> tuple[Client, np.ndarray]:
        """The method's own exchange, with its own random numbers: the answer as a vector."""
        with _as_method(ctx, masks):
            number, setup = ctx.exchange.index, ctx.setup
            with seeded(setup.device, setup.seed, "client", ctx.client, number):
                inner = state.inner if state.begun else self.inner.init_client(ctx)
                local = self.inner.local_update(
                    inner, replace_tensors(down.inner, state.stats), ctx
                )
        upload, own = own_statistics(self.inner, local.upload)
        tensors = self._spread(flatten(upload)[0])
        layout = Layout(dict(sorted(tensors.items())), down.bits, self.settings.bound)
        weight = self._weight(ctx.setup, ctx.client)
        vector = layout.encode(tensors, weight, local.metrics.get("loss"))
        return replace(state, inner=local.state, begun=True, stats={**state.stats, **own}), vector

    # ------------------------------------------------------------ the server

    def init_server(self, ctx: ServerContext) -> State:
        """As the method does."""
        return State(self.inner.init_server(ctx), None)

    def download(self, server: State, client: int, ctx: ServerContext) -> Any:
        """What the phase needs."""
        phase, now = ctx.exchange.index % len(PHASES), server.round
        if phase == KEYS:
            return protocol.Invitation(_of_method(ctx.exchange).index)
        assert now is not None
        others = tuple(now.graph.others(client))
        if phase == SHARES:
            every = {int(k): protocol.raw(advert) for k, advert in now.adverts.items()}
            keys = {
                "adverts": torch.stack([now.adverts[str(k)] for k in others]),
                "session": protocol.row(protocol.session(every)),
            }
            return Offer(now.asked, len(now.ring), now.threshold, others, keys)
        if phase == MASKED:
            heard = now.heard(client)
            at = [now.graph.others(k).index(client) for k in heard]
            mine = [now.sealed[str(k)][i] for k, i in zip(heard, at, strict=True)]
            inbox = Inbox(heard, {"sealed": _stacked(mine, SEALED)})
            return Work(super().download(server, client, _seen(ctx)), inbox, now.bits)
        if phase == LIST:
            return Alive(now.alive)
        signers = tuple(k for k in others if str(k) in now.signatures)
        signatures = [now.signatures[str(k)] for k in signers]
        return Signed(signers, {"signatures": _stacked(signatures, SIGNATURE)})

    def expected(self, server: State, client: int, ctx: ServerContext) -> Up:
        """The right number of bytes: nothing more can be told of what is masked or sealed."""
        phase, now = ctx.exchange.index % len(PHASES), server.round
        if phase == KEYS:
            return Up({"advert": _bytes(ADVERT)})
        assert now is not None
        if phase == SHARES:
            return Up({"sealed": _bytes(len(now.graph.others(client)), SEALED)})
        if phase == MASKED:
            return Up({"masked": _bytes(8 * len(self._layout(server, now.bits, ctx)))})
        if phase == LIST:
            return Up({"signature": _bytes(SIGNATURE)})
        return Up({"shares": _bytes(len(now.held(client)), SHARE)})

    def aggregate(self, server: State, reports: Iterable[Report[Up]], ctx: ServerContext) -> State:
        """What the server makes of the phase; at the end the method's own aggregation."""
        phase, now = ctx.exchange.index % len(PHASES), server.round
        if ctx.exchange.clients == ():  # the server's own work
            return replace(server, inner=self._merge(server.inner, [], ctx, phase))
        if phase == KEYS:
            adverts = {str(r.client): r.upload.sent["advert"].clone() for r in reports}
            return self._begin(server, adverts, ctx)
        if now is None:
            return server
        if phase == SHARES:
            sealed = {str(r.client): r.upload.sent["sealed"].clone() for r in reports}
            return self._next(server, replace(now, sealed=sealed), len(sealed), ctx)
        if phase == MASKED:
            total = np.zeros(len(self._layout(server, now.bits, ctx)), dtype=np.uint64)
            alive = []
            for report in reports:
                protocol.add_masked(total, report.upload.sent["masked"])
                alive.append(report.client)
            held = {"sum": torch.from_numpy(total.view(np.int64))}
            return self._next(server, replace(now, total=held, alive=tuple(alive)), len(alive), ctx)
        if phase == LIST:
            signatures = {str(r.client): r.upload.sent["signature"].clone() for r in reports}
            return self._next(server, replace(now, signatures=signatures), len(signatures), ctx)
        return self._open(server, now, reports, ctx)

    def outline(self, server: State | None, cohort: list[int], ctx: ServerContext) -> State:
        """The sizes after the phase, if everybody takes part."""
        if server is None:
            return State(self.inner.outline(None, cohort, ctx), None)
        phase, now, names = ctx.exchange.index % len(PHASES), server.round, list(map(str, cohort))
        if phase == KEYS:
            return self._begin(server, {k: _bytes(ADVERT) for k in names}, ctx)
        if phase == UNMASK or now is None:
            return State(self.inner.outline(server.inner, cohort, _seen(ctx)), None)
        if phase == SHARES:
            others = {k: len(now.graph.others(int(k))) for k in names}
            now = replace(now, sealed={k: _bytes(n, SEALED) for k, n in others.items()})
        elif phase == MASKED:
            now = replace(now, alive=tuple(cohort))
        else:
            now = replace(now, signatures={k: _bytes(SIGNATURE) for k in names})
        return replace(server, round=now)

    def local_encoder(self, upload: Any, ctx: ServerContext) -> nn.Module | None:  # noqa: ARG002
        """Nobody can see one."""
        return None

    # ------------------------------------------------------------ parts of the server's half

    def _weight(self, setup: Setup, client: int) -> int:
        """What a client's numbers count for in the mean: its images, or one."""
        return 1 if self.inner.equal_weights else setup.sizes[client]

    def _begin(self, server: State, adverts: Weights, ctx: ServerContext) -> State:
        """Draw the graph of those who sent keys."""
        setup, clients = ctx.setup, sorted(map(int, adverts))
        named = ctx.exchange.clients
        asked = cohort_size(len(setup.sizes), self.fraction) if named is None else len(named)
        if not clients:
            return self._next(server, None, 0, ctx)
        graph = drawn(clients, asked, self.settings)
        bits = fraction_bits(sum(self._weight(setup, k) for k in clients), self.settings.bound)
        facts = (asked, graph.ring, graph.degree, graph.threshold, bits)
        return self._next(server, Round(*facts, adverts, {}, {}, (), {}), len(clients), ctx)

    def _next(self, server: State, now: Round | None, count: int, ctx: ServerContext) -> State:
        """Go on with ``count`` clients, or give the round up."""
        fewest = self.settings.fewest
        if now is not None:
            fewest = least(len(now.ring), now.threshold, now.degree, self.settings)
            if count >= fewest:
                return State(server.inner, now)
        return self._give_up(server, f"{count} of at least {fewest} clients are left", ctx)

    def _give_up(self, server: State, why: str, ctx: ServerContext) -> State:
        phase = PHASES[ctx.exchange.index % len(PHASES)]
        ctx.tell(
            f"round {ctx.exchange.round + 1}: secure aggregation is given up in phase {phase}: "
            f"{why}; the weights stay as they were"
        )
        return State(server.inner, None)

    def _open(
        self, server: State, now: Round, reports: Iterable[Report[Up]], ctx: ServerContext
    ) -> State:
        """Take the masks out of the sum, check it, and let the method merge it."""
        shares: dict[int, dict[int, bytes]] = {client: {} for client in now.senders}
        for report in reports:
            given = map(protocol.raw, report.upload.sent["shares"])
            for of, share in zip(now.held(report.client), given, strict=True):
                shares[of][report.client] = share
        total = now.total["sum"].numpy().copy().view(np.uint64)
        number = _of_method(ctx.exchange).index
        adverts = {int(k): protocol.raw(advert) for k, advert in now.adverts.items()}
        layout = self._layout(server, now.bits, ctx)
        try:
            protocol.unmask(total, now.graph, number, adverts, now.alive, shares)
        except FurlongError as error:  # nobody has seen the sum
            return self._give_up(server, str(error), ctx)
        try:
            found = layout.decode(total)
            images = sum(self._weight(ctx.setup, client) for client in now.alive)
            _check_sum(found, images, layout.bound)
        except FurlongError as error:  # it is open and makes no sense: an account must have it
            spent = State(self._merge(server.inner, [], ctx, UNMASK), None)
            return self._give_up(spent, str(error), ctx)
        like, means = self._like(server, ctx), self._gathered(found.means)
        typed = {name: means[name].to(t.dtype) for name, t in flatten(like)[0].items()}
        mean = replace_tensors(like, typed)
        ctx.metrics["summed"] = float(len(now.alive))
        if found.loss is not None:
            ctx.metrics["loss"] = found.loss
        everybody = Report(-1, number, found.images, mean, {})
        return State(self._merge(server.inner, [everybody], ctx, UNMASK), None)

    def _merge(self, inner: Any, reports: list[Report[Any]], ctx: ServerContext, phase: int) -> Any:
        """The method's aggregation, in the last phase."""
        if phase != UNMASK:
            return inner
        setup, seen = ctx.setup, _seen(ctx)
        with seeded(setup.device, setup.seed, "server", seen.exchange.index):
            return self.inner.aggregate(inner, reports, seen)

    def _like(self, server: State, ctx: ServerContext) -> Any:
        """What an upload of the method looks like; the same for all clients."""
        return expected_upload(self.inner, server.inner, min(ctx.setup.sizes), _seen(ctx))

    def _layout(self, server: State, bits: int, ctx: ServerContext) -> Layout:
        like = flatten(self._like(server, ctx))[0]
        return Layout(dict(sorted(like.items())), bits, self.settings.bound)

    # ------------------------------------------------------------ BatchNorm's variances

    def _spread(self, tensors: Weights) -> Weights:
        """With bn_stats = "pooled": σ² + μ² in place of σ², as ``weights.Mean`` adds them up."""
        return self._variances(tensors, 1.0)

    def _gathered(self, means: Weights) -> Weights:
        """And back, in the mean."""
        return self._variances(means, -1.0)

    def _variances(self, tensors: Weights, sign: float) -> Weights:
        if self.inner.bn_stats != "pooled":
            return tensors
        changed: Weights = {}
        for name in [name for name in tensors if name.endswith("running_var")]:
            squares = tensors[name.removesuffix("var") + "mean"].double().square()
            changed[name] = (tensors[name].double() + sign * squares).clamp_(min=0)
        return {**tensors, **changed}


# ---------------------------------------------------------------- helpers


def _of_method(exchange: Exchange) -> Exchange:
    """The method's own exchange, of which this is a phase."""
    kind = exchange.kind.partition(": ")[0]
    return replace(exchange, kind=kind, index=exchange.index // len(PHASES), learns=True)


def _seen(ctx: ServerContext) -> ServerContext:
    """The server's context, in the method's own exchange; metrics go to the same place."""
    return replace(ctx, exchange=_of_method(ctx.exchange))


@contextmanager
def _as_method(ctx: ClientContext, masks: str) -> Iterator[None]:
    """The client's context itself, in the method's own exchange: it counts images and steps."""
    phase = ctx.exchange
    ctx.exchange, ctx.masks = _of_method(phase), masks
    try:
        yield
    finally:
        ctx.exchange, ctx.masks = phase, ""


def _bytes(*shape: int) -> Tensor:
    """So many bytes, without the memory."""
    return torch.zeros(1, dtype=torch.uint8).expand(*shape)


def _stacked(rows: list[Tensor], width: int) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.uint8)


def _check_sum(found: Sum, images: int, bound: float) -> None:
    """What can be checked of a sum whose parts nobody can look at: its images, and its range."""
    if found.images != images:
        raise ProtocolError(f"the sum says {found.images} images and its clients hold {images}")
    for name, mean in found.means.items():
        low, high = (float(v) for v in torch.aminmax(mean)) if mean.numel() else (0.0, 0.0)
        counts = not mean.is_floating_point()
        least = 0.0 if counts or name.endswith("running_var") else -bound
        if low < least or (high > bound and not counts):
            raise ProtocolError(f"the mean of {name} goes from {low:g} to {high:g}")
