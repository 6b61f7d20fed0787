"""MFCL: modular federated contrastive learning with peer normalization (anonymous, 2022).

Phase 1, rounds of FedAvg: clients train an autoencoder, the sensor, on two views of each image,
    B = (x̃_1,1 … x̃_K,1, x̃_1,2 … x̃_K,2),  L = BCE(g(f(B)), B)
with peer normalization: rows i and i+K share their statistics.
Phase 2: clients encode two views of their images with the frozen f and send the representations;
the server takes one mini-batch of b pairs from each client, stacks them to one large batch and
trains a discriminator and a projector on it with SimCLR's loss. The encoder is discriminator ∘ f.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, isfinite, prod
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import (
    Batch,
    ClientContext,
    Context,
    Exchange,
    Optimiser,
    OptimiserSettings,
    ServerContext,
    Setup,
    Shard,
)
from furlong.core.method import USUAL, Local, Method, Reports, Shared
from furlong.core.payload import Weights, payload
from furlong.core.weights import prefixed, snapshot
from furlong.data.augment import unit
from furlong.devices import moved
from furlong.errors import FurlongError
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL, Model
from furlong.methods.networks import chained, filled, named_head
from furlong.methods.representations import Store, Stored, mini_batches, stacked, views
from furlong.nn.encoders import out_dim, trunk
from furlong.nn.heads import head
from furlong.nn.losses import nt_xent
from furlong.nn.optimisers import warmup_cosine
from furlong.nn.peernorm import Kind, Statistics, given_away, peers
from furlong.nn.sensor import REPRESENTATION_CHANNELS, Sensor
from furlong.settings import setting


@payload("furlong.methods.mfcl.Server")
class Server:
    """Sensor, discriminator with projector and momentum, and what each client has sent."""

    sensor: Weights
    discriminator: Weights
    momentum: Weights
    held: dict[int, tuple[int, ...]]  # client -> parts of its representations, on disk


@payload("furlong.methods.mfcl.Codes")
class Codes:
    """Representations of two views of n images: n×2×64×S×S."""

    pairs: Tensor


Upload: TypeAlias = Model | Codes


@dataclass(frozen=True)
class MFCL(Method[Server, None, Model, Upload]):
    """A small autoencoder learns at the clients, the rest learns at the server from its codes."""

    singles = "its server trains on representations of single images"
    paper = "Modular Federated Contrastive Learning with Peer Normalization, anonymous, 2022"
    remedy = CONTRASTIVE_REMEDY
    leaves = (
        "Sensor weights; then the sensor's representations of two views of every image, from which "
        "the server, which holds the decoder, can draw the images. " + WEIGHTS_REVEAL
    )
    caution = (
        "The representations are invertible by construction: the decoder that was trained to "
        "invert them is at the server, and rep32 has 65,536 values for an image of 3,072. "
        "Where views are encoded apart (pair_codes = false), and at test time, PN is GN: only the "
        "sensor's training differs. Where they are encoded together, two views' group means are "
        "opposite, and the discriminator can find partners without looking at the images. "
        "The collapse of BN in the paper depends on bn_stats, and its GN had other groups. "
        "Refreshing the views every epoch costs more traffic than averaging whole encoders."
    )
    explains = {
        "given_away_together": "Share of views whose partner is told by the representations' "
        "group means alone, if both are encoded together.",
        "given_away_apart": "The same if they are encoded apart; what is above chance is a "
        "shortcut past the images.",
    }
    usual = {
        **USUAL,
        "train.rounds": 3,
        "train.batch_size": 64,
        "optimiser.lr": 0.001,
        "method.representation": "rep16",
        "method.server_epochs": 20,
        "method.refresh": "per_epoch",  # the same views in every epoch are learnt by heart
        "method.warmup": 0.1,
    }
    usual_augment = "mfcl"
    usual_small = {"projection_head": "mlp:256:256:128:bn"}

    representation: Literal["rep32", "rep16"] = setting(
        "rep32", "Representations with the sides of the image, or with half of them."
    )
    norm: Kind = setting("pn", "The sensor's normalisation; pn is peer normalization.")
    statistics: Statistics = setting(
        "pooled", "The statistics of peer normalization; avg_moments is the public code's."
    )
    reconstruction: Literal["bce", "mse"] = setting("bce", "The sensor's loss.")
    train_sensor: bool = setting(
        True, "Train the sensor in phase 1; if false, it stays random and train.rounds is not used."
    )
    # The paper has PN for phase 1, and writes a representation as a function of one view.
    pair_codes: bool = setting(
        False,
        "Let two views share PN's statistics in phase 2 as well, which gives away that they belong "
        "together; if false, PN is a group norm there.",
    )
    refresh: Literal["once", "per_epoch"] = setting(
        "once", "When clients send representations: once, or before each epoch of the server."
    )
    drop: float = setting(0.0, "The share δ of clients that miss phase 2.", at_least=0, below=1)
    # The paper has no number. With 1, an epoch may end in steps whose negatives are of one client.
    min_clients: int = setting(2, "The fewest clients Q of a step in phase 2.", at_least=1)
    pairs_per_client: int = setting(32, "The pairs b of each client in a step.", at_least=1)
    server_epochs: int = setting(400, "The epochs of phase 2.", at_least=1)
    server_optimiser: Literal["lars", "sgd"] = setting("lars", "The optimiser of phase 2.")
    server_lr: float = setting(1.5, "The learning rate of phase 2 for 256 pairs.", above=0)
    server_momentum: float = setting(0.9, "The momentum of phase 2.", at_least=0, below=1)
    server_weight_decay: float = setting(1e-4, "The weight decay of phase 2.", at_least=0)
    warmup: float = setting(
        0.025, "The share of phase 2 in which the rate rises.", at_least=0, at_most=1
    )
    temperature: float = setting(0.3, "The temperature of SimCLR's loss.", above=0)
    projection_head: str = named_head("mfcl_proj")
    probe_input: Literal["backbone", "projection"] = setting(
        "backbone", "Whether the encoder ends with the discriminator or with the projector."
    )
    upload_mb: int = setting(256, "The most megabytes that a client sends at once.", at_least=1)

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """Rounds of sensor training; then representations, and epochs of the server's own."""
        start, senders = self.phase_2(setup), self.senders(setup)
        for index in range(start):
            yield Exchange(index, "sensor")
        for epoch in range(self.server_epochs):
            if epoch == 0 or self.refresh == "per_epoch":
                for part in range(self.parts(setup)):
                    yield Exchange(start + epoch, "encode", senders, part)
            yield Exchange(start + epoch, "discriminate", ())

    def phase_2(self, setup: Setup) -> int:
        """The round in which phase 2 begins: the first if the sensor is not trained."""
        return setup.rounds if self.train_sensor else 0

    def fewest(self, setup: Setup) -> int:
        """Q; a lone client, such as one that holds all data, has nobody to wait for."""
        return self.min_clients if len(setup.sizes) > 1 else 1

    def senders(self, setup: Setup) -> tuple[int, ...]:
        """The clients of phase 2: all but ⌊δM⌋, drawn by the run's seed."""
        clients = sorted(setup.sizes)
        left = len(clients) - int(self.drop * len(clients) + 1e-9)
        if left < self.fewest(setup):
            raise FurlongError(
                f"method.drop = {self.drop} leaves {left} of {len(clients)} clients for phase 2; "
                f"method.min_clients is {self.min_clients}: lower it, or drop fewer."
            )
        generator = torch.Generator().manual_seed(setup.seed)
        order = torch.randperm(len(clients), generator=generator).tolist()
        return tuple(sorted(clients[i] for i in order[:left]))

    def shape(self, setup: Setup) -> tuple[int, int, int, int]:
        """Of the representations of two views of an image, 2×64×S×S."""
        size = setup.image_size if self.representation == "rep32" else setup.image_size // 2
        return 2, REPRESENTATION_CHANNELS, size, size

    def parts(self, setup: Setup) -> int:
        """In how many exchanges clients send their representations."""
        at_once = max(1, (self.upload_mb << 20) // (4 * prod(self.shape(setup))))
        return ceil(max(setup.sizes.values()) / at_once)

    def images_of(self, client: int, part: int, setup: Setup) -> range:
        """The client's images whose representations are in ``part``."""
        parts = self.parts(setup)
        return range(part, setup.sizes[client] if part < parts else 0, parts)

    def architecture(self, encoder: str) -> str:
        """``rep32_pn+resnet18``."""
        if "+" in encoder:
            raise FurlongError(
                f"MFCL's normalisation is method.norm; model.encoder or early_norm gives {encoder}."
            )
        ending = f".{self.statistics}" if self.norm == "pn" and self.statistics != "pooled" else ""
        name = f"{self.representation}_{self.norm}{ending}+{encoder}"
        return name if self.probe_input == "backbone" else f"{name}+{self.projection_head}"

    def sensor(self, ctx: Context) -> Sensor:
        """The autoencoder: images B×C×S×S to logits of the same shape."""
        made = Sensor(ctx.setup.channels, self.representation, self.norm, self.statistics)
        if ctx.setup.given is not None:
            made.encoder = ctx.encoder().get_submodule("sensor")
        return made

    def discriminator(self, ctx: Context) -> nn.Module:
        """Representations B×64×S×S to projections B×d_z."""
        _, channels, size, _ = self.shape(ctx.setup)
        if ctx.setup.given is None:
            whole, body = None, trunk(ctx.setup.encoder.split("+")[1], size)
        else:
            whole = ctx.encoder()
            body = whole.get_submodule("discriminator")
        projector: nn.Module = head(self.projection_head, out_dim(body, channels, size))
        if whole is not None and self.probe_input != "backbone":
            projector = whole.get_submodule("projector")  # it is part of the encoder then
        return chained(discriminator=body, projector=projector)

    def init_server(self, ctx: ServerContext) -> Server:
        """Both networks, freshly initialised."""
        return Server(snapshot(self.sensor(ctx)), snapshot(self.discriminator(ctx)), {}, {})

    def download(self, server: Server, client: int, ctx: ServerContext) -> Model:  # noqa: ARG002
        """The sensor; its encoder alone when representations are wanted."""
        if ctx.exchange.kind == "sensor":
            return Model(server.sensor)
        return Model(self.encoding(server))

    def encoding(self, server: Server) -> Weights:
        """The sensor's encoder by its names in the sensor, as a client's own statistics have."""
        return {n: w for n, w in server.sensor.items() if n.startswith("encoder.")}

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Upload]:
        """Train the sensor, or encode."""
        if ctx.exchange.kind == "encode":
            return Local(state, Codes(self.encode(down, ctx)))
        sensor = ctx.network("sensor", lambda: self.sensor(ctx), down.weights)
        optimiser = ctx.optimiser(sensor)
        for batch in ctx.batches():
            images = torch.cat(batch.views())
            with peers(sensor):
                target = unit(images, ctx.setup.augment)
                optimiser.step(self.mismatch(sensor(images), target))
        return Local(state, Model(snapshot(sensor)), optimiser.metrics())

    def mismatch(self, logits: Tensor, images: Tensor) -> Tensor:
        """Reconstruction loss against pixels in [0, 1], mean over pixels and images."""
        if self.reconstruction == "mse":
            return F.mse_loss(logits.sigmoid(), images)
        return F.binary_cross_entropy_with_logits(logits, images)

    def front(self, weights: Weights, ctx: Context) -> nn.Module:
        """The sensor's encoder, frozen: images B×C×S×S to representations B×64×S×S.

        ``weights``: by their names in the sensor.
        """
        own = prefixed(weights, "encoder")
        return ctx.network("encoder", lambda: self.sensor(ctx).encoder, own).eval()

    def encode(self, down: Model, ctx: ClientContext) -> Tensor:
        """Representations n×2×64×S×S of one part of the client's images, in random order."""
        encoder = self.front(down.weights, ctx)
        own = torch.tensor(self.images_of(ctx.client, ctx.exchange.part, ctx.setup)).long()
        pairs = torch.empty(len(own), *self.shape(ctx.setup))
        shard = Shard(ctx.data.images, ctx.data.rows[own[torch.randperm(len(own))]])
        once = ctx.batches_of(shard, 1, shuffle=False, counted=False) if len(own) else ()
        for batch, rows in zip(once, torch.split(pairs, ctx.setup.batch_size), strict=False):
            codes = views(encoder, batch, self.pair_codes).chunk(2)
            rows.copy_(torch.stack(codes, dim=1))
        return pairs

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Upload:
        """A sensor, or representations."""
        if ctx.exchange.kind == "sensor":
            return Model(server.sensor)
        count = len(self.images_of(client, ctx.exchange.part, ctx.setup))
        return Codes(torch.zeros(()).expand(count, *self.shape(ctx.setup)))

    def aggregate(self, server: Server, reports: Reports[Upload], ctx: ServerContext) -> Server:
        """Average sensors, store representations, or train an epoch."""
        if ctx.exchange.kind == "discriminate":
            return self.train(server, ctx)
        if ctx.exchange.kind == "encode":
            return self.keep(server, reports, ctx)
        combined: Combiner[Model] = ctx.combining(self.bn_stats)
        for report in reports:
            assert isinstance(report.upload, Model)
            combined.add(report.upload, report.examples)
        return replace(server, sensor=combined.onto(Model(server.sensor)).weights)

    def store(self, ctx: ServerContext) -> Store:
        """The representations of this epoch."""
        epoch = ctx.exchange.round - self.phase_2(ctx.setup) if self.refresh == "per_epoch" else 0
        return Store(ctx.workspace(), epoch, self.shape(ctx.setup))

    def keep(self, server: Server, reports: Reports[Upload], ctx: ServerContext) -> Server:
        """To disk with the representations; the state only says which there are."""
        store, part, held = self.store(ctx), ctx.exchange.part, dict(server.held)
        if part == 0:
            senders, held = set(ctx.exchange.clients or ()), {}
            store.prepare(sum(n for client, n in ctx.setup.sizes.items() if client in senders))
        for report in reports:
            assert isinstance(report.upload, Codes)
            store.put(report.client, part, report.upload.pairs)
            held[report.client] = (*held.get(report.client, ()), part)
        return replace(server, held=held)

    def train(self, server: Server, ctx: ServerContext) -> Server:
        """One epoch of the discriminator and the projector."""
        steps = list(self.steps(server, ctx))
        if not steps:
            raise FurlongError(
                f"{len(server.held)} client(s) sent representations; method.min_clients is "
                f"{self.min_clients}: there is nothing to train on."
            )
        net = ctx.network("discriminator", lambda: self.discriminator(ctx), server.discriminator)
        names = [name for name, _ in net.named_parameters()]
        rule, decay = self.server_optimiser, self.server_weight_decay
        settings = OptimiserSettings(rule, self.server_lr, self.server_momentum, decay)
        optimiser = Optimiser(net.parameters(), settings, self.server_lr)
        speed = {f"{names.index(n)}/momentum_buffer": v for n, v in server.momentum.items()}
        optimiser.set_moments(speed)
        epoch = ctx.exchange.round - self.phase_2(ctx.setup)
        scale = self.server_lr * len(server.held) * self.pairs_per_client / 256
        for step, chosen in enumerate(steps):
            progress = (epoch + step / len(steps)) / self.server_epochs
            for group in optimiser.torch.param_groups:
                group["lr"] = scale * warmup_cosine(progress, self.warmup)
            pairs = stacked([codes.take(rows) for codes, rows in chosen])
            batch = moved(pairs.to(memory_format=torch.channels_last), ctx.setup.device)
            first, second = net(batch).chunk(2)
            optimiser.step(nt_xent(first, second, self.temperature))
        ctx.metrics.update(optimiser.metrics())
        if not isfinite(ctx.metrics["loss"]):
            raise FurlongError(
                f"the server's training diverged in epoch {epoch + 1}: try a smaller "
                "method.server_lr, or the other method.server_optimiser."
            )
        momentum = {names[int(path.split("/")[0])]: m for path, m in optimiser.moments().items()}
        return replace(server, discriminator=snapshot(net), momentum=momentum)

    def steps(self, server: Server, ctx: ServerContext) -> Iterator[list[tuple[Stored, Tensor]]]:
        """One mini-batch of b pairs from each of at least Q clients."""
        clients = []
        for client, parts in server.held.items():
            counts = {part: len(self.images_of(client, part, ctx.setup)) for part in parts}
            clients.append(self.store(ctx).get(client, counts))
        return mini_batches(clients, self.pairs_per_client, self.fewest(ctx.setup))

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        """Discriminator ∘ sensor, a lone image being its own peer."""
        encoder = ctx.encoder()
        sensor = {f"sensor.{n}": w for n, w in prefixed(server.sensor, "encoder").items()}
        names = encoder.state_dict().keys()
        rest = {name: w for name, w in server.discriminator.items() if name in names}
        return filled(encoder, sensor | rest)

    def shared(self, server: Server, upload: Upload, ctx: ServerContext) -> Shared | None:
        """Representations, and the decoder that was trained to turn them back into images."""
        if not isinstance(upload, Codes):
            return None
        sensor = filled(self.sensor(ctx), server.sensor)

        @torch.no_grad()
        def encode(x: Tensor) -> Tensor:
            codes: Tensor = sensor.get_submodule("encoder")(x)
            return codes

        @torch.no_grad()
        def decode(codes: Tensor) -> Tensor:
            logits: Tensor = sensor.get_submodule("decoder")(codes)
            return logits.sigmoid()

        return Shared(upload.pairs.flatten(0, 1), encode, encode, decode)

    def explain(self, server: Server, batch: Batch, ctx: ServerContext) -> dict[str, float]:
        """The share of pairs that group means give away: views encoded together, and apart."""
        few = replace(batch, pixels=batch.pixels[:128])
        encoder = self.front(self.encoding(server), ctx)
        ways = {"together": True, "apart": False}
        return {f"given_away_{w}": given_away(views(encoder, few, on)) for w, on in ways.items()}
