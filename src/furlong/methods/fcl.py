"""FCL: federated MoCo with feature fusion and neighbourhood matching.

Wu et al., "Decentralized Unsupervised Learning of Visual Representations", IJCAI 2022 (arXiv
2111.10763). We have the text submitted to ICLR 2022, "Federated Contrastive Representation Learning
with Feature Fusion and Neighborhood Matching", without the appendix that names its settings.

    q = g(f(v)), k = g_k(f_k(v')), banks of K keys: Q_l of the client's images, Q̃_l of encoded ones
    Q_s = the Q̃_l of all other clients; Q' = K random rows of Q_l ∪ Q_s
    L = -log( e^{q·k/τ} / (e^{q·k/τ} + Σ_{n ∈ Q_l ∪ Q_s} e^{q·n/τ}) ) + λ·L_nm(q, Q')
    θ_k ← m·θ_k + (1 - m)·θ after every step; the server averages θ and θ_k

CL+FF+NM is the default, CL+FF has matching = 0, CL (MoCo) fusion = False besides. A client's banks
are filled before its first step: all rows that are used or sent are keys of images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import Batch, ClientContext, Context, ServerContext
from furlong.core.method import USUAL, Local, Method, Reports, Shared
from furlong.core.payload import Weights, payload
from furlong.core.weights import ema_, snapshot
from furlong.devices import moved
from furlong.errors import FurlongError, require
from furlong.methods.bank import blank_bank, enqueue_each, fill, purities, shares
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL
from furlong.methods.fedmoco import Nets
from furlong.methods.instahide import check_limits, encode
from furlong.methods.networks import Projecting, backbone, filled, named_head
from furlong.nn.encoders import untracked
from furlong.nn.losses import info_nce, neighbourhood_matching
from furlong.settings import setting

MOCO = " (not published: that of MoCo's CIFAR-10 demo)"
OURS = " (not published: our choice)"


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

    singles = "it passes feature vectors of single images on to the other clients"
    paper = "Wu et al., Decentralized Unsupervised Learning of Visual Representations, IJCAI 2022"
    keeps = (
        "its newest feature vectors (method.bank of its images and as many of encoded images), "
        'and with encoding = "cross" the public images'
    )
    unit_rows = ("features",)
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
    explains = {
        "neighbour_purity": "Share of the nearest features that are of the same class (test "
        "images); 1 / classes is chance.",
        "neighbour_purity_encoded": "The same among features of encoded images: at chance they "
        "cannot help, whatever weight they have.",
        "remote_mass": "Share of the softmax that falls on the others' features.",
        "remote_neighbours": "Share of the matched neighbours that are the others' features.",
    }
    usual = {
        **USUAL,
        "train.batch_size": 64,
        "method.bank": 512,  # features of eight steps
        "method.temperature": 0.2,
    }
    usual_small = {"projection_head": "mlp:256:128:bn"}

    bank: int = setting(4096, f"The number K of features that a client keeps{MOCO}.", at_least=1)
    decay: float = setting(0.99, f"The decay m of the key network{MOCO}.", at_least=0, at_most=1)
    temperature: float = setting(0.1, f"The temperature τ of the contrast{MOCO}.", above=0)
    fusion: bool = setting(True, "Share features between clients.")
    negatives: Literal["union", "remote_only"] = setting(
        "union", "Contrast with a client's own and all other features, or with the others' alone."
    )
    matching: float = setting(0.1, f"The weight λ of neighbourhood matching{OURS}.", at_least=0)
    matching_from: int = setting(0, "The first round with matching, counted from 0.", at_least=0)
    neighbours: int = setting(10, f"The number N of neighbours, below bank{OURS}.")
    matching_temperature: float = setting(0.1, f"The temperature of matching{OURS}.", above=0)
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
        """Blank banks: the network that fills them comes with the first download."""
        encoded = blank_bank(self.bank, self.width(ctx)) if self.encodes else None
        return State(blank_bank(self.bank, self.width(ctx)), encoded, 0, None)

    def download(self, server: Server, client: int, ctx: ServerContext) -> Down:
        """Both networks and the features of the others, never the client's own."""
        oldest = ctx.exchange.round - self.max_staleness if self.max_staleness else -1
        fresh = (c for c in sorted(server.features) if c != client and server.rounds[c] >= oldest)
        rows = torch.cat([torch.empty(0, self.width(ctx)), *(server.features[c] for c in fresh)])
        public = None if client in server.told else server.public
        return Down(server.query, server.key, rows, public)

    def local_update(self, state: State, down: Down, ctx: ClientContext) -> Local[State, Up]:
        """MoCo with the others' features; a second bank of encoded images for them."""
        query = ctx.network("query", lambda: self.network(ctx), down.query)
        key = ctx.network("key", lambda: self.network(ctx), down.key).requires_grad_(False)
        public = state.public if down.public is None else down.public
        if self.needs_public and public is None:
            raise FurlongError("the client has lost the public images, which are sent only once.")
        # one buffer, whose last K rows are the local bank: nothing is joined at every step
        remote, union = len(down.remote), torch.cat([down.remote, state.local]).to(ctx.setup.device)
        banks = [union[remote:]]
        if state.encoded is not None:
            banks.append(state.encoded.to(union.device, copy=True))
        keys_of, position = partial(self.keys, key, public, ctx), state.position
        if state.local.isnan().any():
            with untracked(key):  # nothing is learnt from these passes
                position = fill(banks, keys_of, ctx.batches(self.bank, counted=False))
        optimiser = ctx.optimiser(query)
        seen: list[Tensor] = []
        for batch in ctx.batches():
            view, other = batch.views()
            keys, q = keys_of(other), query(view)
            seen.append(shares(q.detach(), union, remote, self.temperature, self.neighbours))
            optimiser.step(self.loss(q, keys[0], union, remote, ctx))
            ema_(key, query, self.decay)
            position = enqueue_each(banks, position, keys)
        mass, near = torch.stack(seen).mean(dim=0).tolist()
        metrics = optimiser.metrics() | {"remote_mass": mass, "remote_neighbours": near}
        shown = banks[-1].cpu()
        kept = State(banks[0].cpu(), shown if self.encodes else None, position, public)
        up = Up(snapshot(query), snapshot(key), shown if self.fusion else None)
        return Local(kept, up, metrics)

    def keys(self, net: nn.Module, public: Tensor | None, ctx: Context, x: Tensor) -> list[Tensor]:
        """Unit rows B×d for each bank: of the images, and of the same images by InstaHide."""
        with torch.no_grad():
            rows = [F.normalize(net(x), dim=1)]
            if self.encodes:
                mix = self.mix if self.encoding == "inside" else self.mix_cross
                limits = mix, self.max_coefficient, public, self.private_share
                with untracked(net):  # mixtures are no sample of the images
                    rows.append(F.normalize(net(encode(x, ctx.setup.augment, *limits)), dim=1))
        return rows

    def loss(self, q: Tensor, k: Tensor, union: Tensor, remote: int, ctx: Context) -> Tensor:
        """Of queries and keys B×d; the first ``remote`` rows of ``union`` are the others'."""
        only = self.negatives == "remote_only" and remote
        loss = info_nce(q, k, union[:remote] if only else union, self.temperature)
        if not self.matching or ctx.exchange.round < self.matching_from:
            return loss
        sample = union[moved(torch.randperm(len(union))[: self.bank], union.device)]
        matched = neighbourhood_matching(q, sample, self.neighbours, self.matching_temperature)
        return loss + self.matching * matched

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Up:  # noqa: ARG002
        """The server's networks and K rows."""
        return Up(server.query, server.key, self._rows(ctx) if self.fusion else None)

    def aggregate(self, server: Server, reports: Reports[Up], ctx: ServerContext) -> Server:
        """Both networks by the run's rule; each client's features replace its older ones."""
        combined: Combiner[Nets] = ctx.combining(self.bn_stats)
        features: dict[int, Tensor] = {}
        for report in reports:
            combined.add(Nets(report.upload.query, report.upload.key), report.examples)
            if report.upload.features is not None:
                # a copy: the upload's tensors are views that keep its whole buffer alive
                features[report.client] = report.upload.features.clone()
        nets = combined.onto(Nets(server.query, server.key))
        assert nets.key is not None
        return self._heard(replace(server, query=nets.query, key=nets.key), features, ctx)

    def outline(self, server: Server | None, cohort: list[int], ctx: ServerContext) -> Server:
        """Features of those who took part come on top."""
        if server is None:
            setup = ctx.setup
            shape = (self.public_images, setup.channels, setup.image_size, setup.image_size)
            blank = torch.zeros((), dtype=torch.uint8).expand(shape)
            return self._start(blank if self.needs_public else None, ctx)
        features = dict.fromkeys(cohort, self._rows(ctx)) if self.fusion else {}
        return self._heard(server, features, ctx)

    def _start(self, public: Tensor | None, ctx: ServerContext) -> Server:
        start = snapshot(self.network(ctx))
        return Server(start, start, {}, {}, public, ())

    def _heard(self, server: Server, features: dict[int, Tensor], ctx: ServerContext) -> Server:
        newest = server.features | features
        stamps = server.rounds | dict.fromkeys(features, ctx.exchange.round)
        told = tuple(sorted(newest)) if self.needs_public else ()  # who answered kept the images
        return replace(server, features=newest, rounds=stamps, told=told)

    def _rows(self, ctx: Context) -> Tensor:
        """A stand-in for K features."""
        return torch.zeros(()).expand(self.bank, self.width(ctx))

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        """The backbone of the query network."""
        return backbone(server.query, ctx)

    def local_encoder(self, upload: Up, ctx: ServerContext) -> nn.Module | None:
        """What would be the global encoder if this client were the only one."""
        return None if self.bn_stats == "local" else backbone(upload.query, ctx)

    def shared(self, server: Server, upload: Up, ctx: ServerContext) -> Shared | None:
        """Keys: of encoded images, or with encoding none of the images themselves."""
        if upload.features is None:
            return None
        net = filled(self.network(ctx), upload.key)
        keys_of = partial(self.keys, net, server.public, ctx)

        def sent(x: Tensor) -> Tensor:
            net.train()  # BatchNorm by the batch, as in a client's epochs
            with untracked(net):
                return keys_of(x)[-1]

        def plain(x: Tensor) -> Tensor:
            net.eval()
            return keys_of(x)[0]

        return Shared(upload.features, sent, plain)

    def explain(self, server: Server, batch: Batch, ctx: ServerContext) -> dict[str, float]:
        """The part of a query's N nearest keys that are of its class; by chance 1/classes."""
        query = ctx.network("query", lambda: self.network(ctx), server.query)
        key = ctx.network("key", lambda: self.network(ctx), server.key)
        # encoded keys mix images of all classes here, on a client only those of its own
        keys_of, size = partial(self.keys, key, server.public, ctx), ctx.setup.batch_size
        with untracked(query), untracked(key):
            found = purities(query, keys_of, batch, size, self.neighbours)
        return dict(zip(("neighbour_purity", "neighbour_purity_encoded"), found, strict=False))
