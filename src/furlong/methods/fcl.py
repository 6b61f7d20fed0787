"""FCL: federated MoCo with feature fusion and neighbourhood matching.

"Federated Contrastive Representation Learning with Feature Fusion and Neighborhood Matching",
submitted to ICLR 2022 without the authors' names.

    q = g(f(v)), k = g_k(f_k(v')), banks of K keys: Q_l of the client's images, Q̃_l of encoded ones
    Q_s = the Q̃_l of all other clients; Q' = K random rows of Q_l ∪ Q_s
    L = -log( e^{q·k/τ} / (e^{q·k/τ} + Σ_{n ∈ Q_l ∪ Q_s} e^{q·n/τ}) ) + λ·L_nm(q, Q')
    θ_k ← m·θ_k + (1 - m)·θ after every step; the server averages θ and θ_k

CL+FF+NM is the default, CL+FF has matching = 0, CL (MoCo) fusion = False besides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import ClientContext, Context, ServerContext
from furlong.core.method import Local, Method, Reports
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.data.augment import extremes
from furlong.errors import FurlongError, require
from furlong.methods.bank import enqueue, new_bank
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL
from furlong.methods.fedmoco import Nets
from furlong.methods.instahide import check_limits, instahide
from furlong.methods.networks import Projecting, backbone, named_head
from furlong.nn.encoders import untracked
from furlong.nn.losses import info_nce, neighbourhood_matching
from furlong.settings import setting


@payload("furlong.methods.fcl.Server")
class Server:
    """Both networks, and every client's newest features with the round they came in."""

    query: Weights
    key: Weights
    features: dict[int, Tensor]
    rounds: dict[int, int]
    public: Tensor | None  # uint8 P×C×H×W for encoding="cross"
    told: tuple[int, ...]  # clients that hold the public images


@payload("furlong.methods.fcl.Down")
class Down:
    """Both networks, and the features of all others, (M-1)K×d or fewer."""

    query: Weights
    key: Weights
    remote: Tensor
    public: Tensor | None


@payload("furlong.methods.fcl.Up")
class Up:
    """Both networks, and the client's features K×d, if it shares them."""

    query: Weights
    key: Weights
    features: Tensor | None


@payload("furlong.methods.fcl.State")
class State:
    """The banks that a client keeps, where both have their oldest row, the public images."""

    local: Tensor
    encoded: Tensor | None
    position: int
    public: Tensor | None


@dataclass(frozen=True)
class FCL(Projecting, Method[Server, State, Down, Up]):
    """Contrast with the features of all clients; pull towards the nearest of them."""

    paper = (
        "Federated Contrastive Representation Learning with Feature Fusion and Neighborhood "
        "Matching (FCL), anonymous submission to ICLR 2022"
    )
    keeps = (
        "its newest feature vectors (method.bank of its images and as many of encoded images), "
        'and with encoding = "cross" the public images'
    )
    remedy = CONTRASTIVE_REMEDY
    leaves = (
        "Weights of the query and the key network, and method.bank feature vectors of the client, "
        "which the server forwards to every other client. Everybody holds the network that made "
        "them, so they can be searched, tested for membership and inverted, and secure "
        'aggregation cannot protect what must be forwarded one by one. With encoding = "none" '
        f"they are features of the plain images. {WEIGHTS_REVEAL}"
    )
    caution = (
        "InstaHide, through which images go before their features are shared, is obfuscation and "
        "no encryption: Carlini et al. broke it in 2020 (arXiv 2011.05315). It guarantees nothing. "
        'Off: encoding = "none"; nothing but weights is shared with fusion = false.'
    )

    bank: int = setting(4096, "The number K of features that a client keeps.", at_least=1)
    decay: float = setting(0.99, "The decay m of the key network.", at_least=0, at_most=1)
    temperature: float = setting(0.1, "The temperature τ of the contrastive loss.", above=0)
    fusion: bool = setting(True, "Share features between clients.")
    negatives: Literal["union", "remote_only"] = setting(
        "union", "Contrast with a client's own and all other features, or with the others' alone."
    )
    matching: float = setting(
        0.1,
        "The weight λ of neighbourhood matching; the paper's λ, N and temperature are not known.",
        at_least=0,
    )
    neighbours: int = setting(10, "The number N of neighbours, below bank.")
    matching_temperature: float = setting(0.1, "The temperature of the matching.", above=0)
    encoding: Literal["inside", "cross", "none"] = setting(
        "inside", "InstaHide on the shared images: mixed inside a batch, with public ones, or off."
    )
    mix: int = setting(4, "How many images are mixed into one by encoding inside.", at_least=1)
    mix_cross: int = setting(6, "The same for encoding cross, two of them private.", at_least=3)
    max_coefficient: float = setting(0.65, "The c₁: no image weighs more in a mixture.")
    private_share: float = setting(0.3, "The c₂: two private images weigh at least this.")
    public_images: int = setting(2000, "The public images of encoding cross.", at_least=1)
    max_staleness: int = setting(0, "For how many rounds features count; 0: for ever.", at_least=0)
    projection_head: str = named_head("proj_128")

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = 1 <= self.neighbours < self.bank or not self.matching
        require(enough, "neighbours", self.neighbours, f"from 1 to bank - 1 = {self.bank - 1}")
        if self.encoding == "inside":
            check_limits(self.mix, self.max_coefficient)
        elif self.encoding == "cross":
            check_limits(self.mix_cross, self.max_coefficient, 2, self.private_share)

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        """Only to mix public images into private ones."""
        return self.fusion and self.encoding == "cross"

    @property
    def encodes(self) -> bool:
        """Whether the shared features are of other images than the contrasted ones."""
        return self.fusion and self.encoding != "none"

    def init_server(self, ctx: ServerContext) -> Server:
        """The key network starts as the query network; the public images are drawn."""
        public = None
        if self.needs_public:
            if ctx.public is None:
                raise FurlongError('encoding = "cross" needs public images: give --public NAME.')
            public = ctx.public.pixels(torch.randperm(len(ctx.public))[: self.public_images])
            if public.shape[1] != ctx.setup.channels:
                raise FurlongError(
                    f"the public images have {public.shape[1]} channels, the clients' "
                    f"{ctx.setup.channels}: they cannot be mixed."
                )
        return self._start(public, ctx)

    def init_client(self, ctx: ClientContext) -> State:
        """Banks of random rows: an upload has K rows from the first round on."""
        encoded = new_bank(self.bank, self.width(ctx)) if self.encodes else None
        return State(new_bank(self.bank, self.width(ctx)), encoded, 0, None)

    def download(self, server: Server, client: int, ctx: ServerContext) -> Down:
        """Both networks and the features of the others, never the client's own."""
        oldest = ctx.exchange.round - self.max_staleness if self.max_staleness else -1
        remote = [
            server.features[other]
            for other in sorted(server.features)
            if other != client and server.rounds[other] >= oldest
        ]
        rows = torch.cat([torch.empty(0, self.width(ctx)), *remote])
        public = None if client in server.told else server.public
        return Down(server.query, server.key, rows, public)

    def local_update(self, state: State, down: Down, ctx: ClientContext) -> Local[State, Up]:
        """MoCo with the others' features; a second bank of encoded images for them."""
        query = ctx.network("query", lambda: self.network(ctx), down.query)
        key = ctx.network("key", lambda: self.network(ctx), down.key).requires_grad_(False)
        optimiser, device = ctx.optimiser(query), ctx.setup.device
        # one buffer, whose last K rows are the local bank: nothing is joined at every step
        union = torch.cat([down.remote, state.local]).to(device)
        local = union[len(down.remote) :]
        encoded = None if state.encoded is None else state.encoded.to(device, copy=True)
        position, public = state.position, state.public if down.public is None else down.public
        for batch in ctx.batches():
            view, other = batch.views()
            with torch.no_grad():
                k = F.normalize(key(other), dim=1)
                if encoded is not None:
                    with untracked(key):  # mixtures are no sample of the images
                        shared = F.normalize(key(self.encode(other, public, ctx)), dim=1)
            optimiser.step(self.loss(query(view), k, union, len(down.remote)))
            ema_(key, query, self.decay)
            if encoded is not None:
                enqueue(encoded, position, shared)
            position = enqueue(local, position, k)
        kept = State(local.cpu(), None if encoded is None else encoded.cpu(), position, public)
        shown = kept.local if kept.encoded is None else kept.encoded
        up = Up(snapshot(query), snapshot(key), shown if self.fusion else None)
        return Local(kept, up, optimiser.metrics())

    def loss(self, q: Tensor, k: Tensor, union: Tensor, remote: int) -> Tensor:
        """Of queries and keys B×d; the first ``remote`` rows of ``union`` are the others'."""
        only = self.negatives == "remote_only" and remote
        loss = info_nce(q, k, union[:remote] if only else union, self.temperature)
        if not self.matching:
            return loss
        sample = union[torch.randperm(len(union))[: self.bank].to(union.device)]
        matched = neighbourhood_matching(q, sample, self.neighbours, self.matching_temperature)
        return loss + self.matching * matched

    def encode(self, images: Tensor, public: Tensor | None, ctx: ClientContext) -> Tensor:
        """The batch by InstaHide: mixed inside itself, or with as many views of public images."""
        black, white = extremes(images, ctx.setup.augment)
        # signs hide nothing where pixels are not centred: then around grey, and back
        grey = (black + white) / 2 if bool((black >= 0).all()) else torch.zeros_like(black)
        centred = images - grey
        if self.encoding == "inside":
            return instahide(centred, self.mix, self.max_coefficient) + grey
        if public is None:
            raise FurlongError("the client has lost the public images, which are sent only once.")
        some = public[torch.randint(len(public), (len(images),))].to(images.device)
        (views,) = ctx.setup.augment.views(some, 1)
        limits = self.mix_cross, self.max_coefficient
        return instahide(centred, *limits, views - grey, 2, self.private_share) + grey

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Up:  # noqa: ARG002
        """The server's networks and K rows."""
        return Up(server.query, server.key, self._rows(ctx) if self.fusion else None)

    def aggregate(self, server: Server, reports: Reports[Up], ctx: ServerContext) -> Server:
        """Both networks by the run's rule; each client's features replace its older ones."""
        combined: Combiner[Nets] = ctx.combining(self.bn_stats)
        features: dict[int, Tensor] = {}
        heard: list[int] = []
        for report in reports:
            upload = report.upload
            combined.add(Nets(upload.query, upload.key), report.examples)
            heard.append(report.client)
            if upload.features is not None:
                # a copy: the upload's tensors are views that keep its whole buffer alive
                features[report.client] = upload.features.clone()
        nets = combined.onto(Nets(server.query, server.key))
        assert nets.key is not None
        return self._heard(replace(server, query=nets.query, key=nets.key), heard, features, ctx)

    def outline(self, server: Server | None, cohort: list[int], ctx: ServerContext) -> Server:
        """Features of those who took part come on top."""
        if server is None:
            setup = ctx.setup
            shape = (self.public_images, setup.channels, setup.image_size, setup.image_size)
            blank = torch.zeros((), dtype=torch.uint8).expand(shape)
            return self._start(blank if self.needs_public else None, ctx)
        features = dict.fromkeys(cohort, self._rows(ctx)) if self.fusion else {}
        return self._heard(server, cohort, features, ctx)

    def _start(self, public: Tensor | None, ctx: ServerContext) -> Server:
        start = snapshot(self.network(ctx))
        return Server(start, start, {}, {}, public, ())

    def _heard(
        self, server: Server, clients: list[int], features: dict[int, Tensor], ctx: ServerContext
    ) -> Server:
        told = server.told
        if self.needs_public:  # a client that answered has kept the images
            told = tuple(sorted({*told, *clients}))
        stamps = server.rounds | dict.fromkeys(features, ctx.exchange.round)
        return replace(server, features=server.features | features, rounds=stamps, told=told)

    def _rows(self, ctx: Context) -> Tensor:
        """A stand-in for K features."""
        return torch.zeros(()).expand(self.bank, self.width(ctx))

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        """The backbone of the query network."""
        return backbone(server.query, ctx)

    def local_encoder(self, upload: Up, ctx: ServerContext) -> nn.Module | None:
        """What would be the global encoder if this client were the only one."""
        return None if self.bn_stats == "local" else backbone(upload.query, ctx)
