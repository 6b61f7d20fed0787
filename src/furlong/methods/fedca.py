"""FedCA: contrastive averaging with a dictionary and alignment (Zhang et al.).

arXiv:2010.08982, 2020; FITEE 2023, doi:10.1631/FITEE.2200268.

    L   = CE([z̃_i z̃_jᵀ, z̃_i dictᵀ]/τ, 0…N-1) + β·(‖h_align - h‖² + ‖z_align - z‖²)
    Z_t ← α·Z_{t-1} + (1 - α)·z_t for every local image, Z_0 = 0;   dictionary row = Z_t/‖Z_t‖

The model that a client received makes the rows of a plain dictionary (Section 4.1); with temporal
ensembling the model that it has just trained makes them (Eqs. 9 and 10, Algorithm 1). Papers are
silent here: a client uploads its share ⌈K·n_k/Σn⌉ of the dictionary's K rows. Where not everybody
takes part (they always do in the papers), the server keeps the newest rows of each client, and t
counts a client's participations. The alignment model is SimCLR on the public images, of which each
step draws a mini-batch.

Figure 5: (i) is fedsimclr, (ii) dictionary = 0, (iii) ensembling = 0 and alignment = 0,
(iv) alignment = 0, (v) the defaults. With dictionary = 0 and alignment = 0 this is not fedsimclr:
its loss has both directions and 2N - 2 negatives, here there are N - 1, all from the other view.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.aggregation import Combiner
from furlong.core.context import ClientContext, Context, ServerContext, Setup
from furlong.core.method import USUAL, Local, Method, Reports, Shared
from furlong.core.payload import Weights, payload
from furlong.core.weights import snapshot
from furlong.methods.alignment import Alignment, distance, outline, targets, train_alignment
from furlong.methods.base import CONTRASTIVE_REMEDY, WEIGHTS_REVEAL, Model
from furlong.methods.dictionary import drawn, joined, projections, share, short_rounds
from furlong.methods.fedsimclr import FedSimCLR
from furlong.methods.networks import Projecting, backbone, filled, named_head
from furlong.nn.losses import dictionary_mass, dictionary_nce
from furlong.nn.peernorm import peers
from furlong.settings import setting


@payload("furlong.methods.fedca.Server")
class Server:
    """The global network, each client's newest dictionary rows, who has the alignment model."""

    weights: Weights
    rows: dict[int, Tensor]  # client -> unit rows r_k×d_z, ascending
    alignment: Alignment | None
    told: tuple[int, ...]


@payload("furlong.methods.fedca.Down")
class Down:
    """The network, the dictionary (rows×d_z), and at first the alignment model."""

    weights: Weights
    dictionary: Tensor
    alignment: Alignment | None


@payload("furlong.methods.fedca.Up")
class Up:
    """The trained network and rows for the dictionary."""

    weights: Weights
    rows: Tensor


@payload("furlong.methods.fedca.State")
class State:
    """What a client keeps: Z (n_k×d_z), and the alignment images with what they are to become."""

    ensemble: Tensor | None
    pixels: Tensor | None
    h: Tensor | None
    z: Tensor | None


@dataclass(frozen=True)
class FedCA(Projecting, Method[Server, State, Down, Up]):
    """SimCLR with negatives from all clients, and a public model as a common system of axes."""

    singles = "it passes projections of single images on to all clients"
    paper = (
        "Zhang et al., Federated Unsupervised Representation Learning, arXiv:2010.08982; "
        "FITEE 2023, doi:10.1631/FITEE.2200268"
    )
    pairs_views = True
    unit_rows = ("rows",)
    remedy = CONTRASTIVE_REMEDY
    explains: ClassVar = {
        "contrastive": "The part of the loss that tells images apart.",
        "alignment_loss": "The distance from the alignment model on public images, before β.",
        "dictionary_mass": "P_D, the share of the softmax that falls on the dictionary: near 0 it "
        "plays no part.",
        "dictionary_cosine": "The mean cosine between any two rows of the dictionary that a client "
        "receives. Near 1 all rows are one, and there is nothing to tell images apart by.",
    }
    keeps = (
        "a running mean of the projections of its images; the public alignment images with the "
        "alignment model's representations of them"
    )
    leaves = (
        "Encoder and projector weights, and projections of single images, which the server "
        "forwards to all other clients. Everybody holds the encoder, so nearest-neighbour, "
        "membership and inversion attacks on them are white-box; secure aggregation cannot "
        f"protect what must be forwarded one by one. {WEIGHTS_REVEAL}"
    )
    caution = (
        "FedU's authors criticise FedCA for sharing features of single images; repeated over "
        "rounds they are a time series per image. The paper's results are single runs, and its "
        "semi-supervised protocol is not that of the other papers. It gives neither τ nor how "
        "the alignment model was trained: 0.5 and SimCLR are choices made here."
    )
    usual = {**USUAL, "method.temperature": 0.2, "method.align_epochs": 20}
    usual_small = {"projection_head": "mlp:256:128:bn"}  # as FedSimCLR's, to be compared with it

    temperature: float = setting(0.5, "The temperature τ, which no paper gives.", above=0)
    dictionary: int = setting(1024, "The dictionary's rows K; 0: no dictionary.", at_least=0)
    ensembling: float = setting(0.5, "The α of Z; 0: of the last model alone.", at_least=0, below=1)
    alignment: float = setting(0.01, "The weight β; 0: no public images are needed.", at_least=0)
    align_images: int = setting(3200, "How many public images every client gets, once.", at_least=1)
    align_epochs: int = setting(100, "The epochs of the alignment model.", at_least=1)
    align_reduction: Literal["mean", "sum"] = setting(
        "sum",
        "Over the images of a mini-batch; dimensions are summed. The papers print the sum "
        "(Eqs. 11 and 12); the mean is weaker by the batch size.",
    )
    dict_model: Literal["auto", "local", "global"] = setting(
        "auto",
        "Which model makes rows: the one that the client has trained, or the global one that it "
        "received. As in the papers, auto is local with ensembling and global without.",
    )
    dict_upload: Literal["sample", "full"] = setting(
        "sample", "Send the client's share of rows, or all of them, of which the server samples."
    )
    exclude_own: bool = setting(
        False, "Send a client only the rows of others, so that no image is its own negative."
    )
    symmetric: bool = setting(False, "Also contrast view j with view i.")
    projection_head: str = named_head("proj_128")

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        """Only for the alignment model."""
        return self.alignment > 0

    @property
    def maker(self) -> str:
        """Which model makes rows, local or global."""
        stage = "local" if self.ensembling else "global"
        return stage if self.dict_model == "auto" else self.dict_model

    def advice(self, setup: Setup) -> list[str]:
        """Of rounds too short for a dictionary alone."""
        return [] if self.alignment else short_rounds(self.dictionary, setup)

    def init_server(self, ctx: ServerContext) -> Server:
        """A freshly initialised network, and the alignment model trained on public images."""
        # first, so that all settings and FedSimCLR start from the same weights
        weights, alignment = snapshot(self.network(ctx)), None
        if self.alignment:
            simclr = FedSimCLR(self.temperature, self.projection_head)
            alignment = train_alignment(simclr, self.align_images, self.align_epochs, ctx)
        return Server(weights, {}, alignment, ())

    def init_client(self, ctx: ClientContext) -> State:  # noqa: ARG002
        """Nothing yet."""
        return State(None, None, None, None)

    def download(self, server: Server, client: int, ctx: ServerContext) -> Down:
        """The dictionary is everybody's newest rows, in the order of clients."""
        rows = [r for k, r in server.rows.items() if not (self.exclude_own and k == client)]
        dictionary = joined(rows, self.dictionary) if rows else self.blank(0, ctx)
        alignment = None if client in server.told else server.alignment
        return Down(server.weights, dictionary, alignment)

    def local_update(self, state: State, down: Down, ctx: ClientContext) -> Local[State, Up]:
        """ClientUpdate of Algorithm 1: train, then make rows for the dictionary."""
        if down.alignment is not None:
            state = self.aim(state, down.alignment, ctx)
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        state = self.ensembled("global", net, state, ctx)
        metrics = self.train(net, state, down.dictionary.to(ctx.setup.device), ctx)  # lines 1-4
        state = self.ensembled("local", net, state, ctx)  # line 5
        return Local(state, Up(snapshot(net), self.rows(state, ctx)), metrics)  # line 6

    def aim(self, state: State, alignment: Alignment, ctx: ClientContext) -> State:
        """The state with the alignment model's h and z, after which the model may be forgotten."""
        net = ctx.network("net", lambda: self.network(ctx), alignment.weights)
        h, z = targets(net, alignment.pixels, ctx)
        return replace(state, pixels=alignment.pixels.clone(), h=h, z=z)

    def train(
        self, net: nn.Module, state: State, dictionary: Tensor, ctx: ClientContext
    ) -> dict[str, float]:
        """The local epochs; means of the losses and of the dictionary's part in the softmax."""
        optimiser, seen = ctx.optimiser(net), defaultdict[str, list[Tensor]](list)
        for batch in ctx.batches():
            with peers(net):
                z1, z2 = net(torch.cat(batch.views())).chunk(2)
            loss = dictionary_nce(z1, z2, dictionary, self.temperature, self.symmetric)
            if len(dictionary):
                seen["dictionary_mass"] += [dictionary_mass(z1, z2, dictionary, self.temperature)]
            if self.alignment:
                apart = self.distance(net, state, ctx)
                seen["contrastive"] += [loss.detach()]
                seen["alignment_loss"] += [apart.detach()]
                loss = loss + self.alignment * apart
            optimiser.step(loss)
        means = {name: float(torch.stack(values).mean()) for name, values in seen.items()}
        metrics = optimiser.metrics() | means
        if len(dictionary):  # 1: all rows are one, and there is nothing to tell images apart by
            metrics["dictionary_cosine"] = float(dictionary.mean(dim=0).square().sum())
        return metrics

    def distance(self, net: nn.Module, state: State, ctx: ClientContext) -> Tensor:
        """The alignment loss on a random mini-batch of the alignment images."""
        if state.pixels is None or state.h is None or state.z is None:
            raise ValueError("this client was sent the alignment model before, and has lost it")
        return distance(net, state.pixels, (state.h, state.z), self.align_reduction, ctx)

    def ensembled(self, model: str, net: nn.Module, state: State, ctx: ClientContext) -> State:
        """The state with the new Z, if ``model`` is the one that makes rows."""
        if not self.dictionary or model != self.maker:
            return state
        return replace(state, ensemble=self.ensemble(net, state.ensemble, ctx))

    def ensemble(self, net: nn.Module, before: Tensor | None, ctx: ClientContext) -> Tensor:
        """Z after this round, not normalised."""
        z = projections(net, ctx)
        return torch.lerp(z, torch.zeros_like(z) if before is None else before, self.ensembling)

    def rows(self, state: State, ctx: ClientContext) -> Tensor:
        """What goes up: all rows, or the client's share."""
        if state.ensemble is None:
            return self.blank(0, ctx)
        rows = F.normalize(state.ensemble, dim=1)  # the bias correction 1/(1 - αᵗ) would cancel
        full = self.dict_upload == "full"
        return rows if full else drawn(rows, share(self.dictionary, ctx.client, ctx.setup))

    def blank(self, count: int, ctx: Context) -> Tensor:
        """``count`` dictionary rows of zeros, count×d_z."""
        return torch.zeros(count, self.width(ctx))

    def expected(self, server: Server, client: int, ctx: ServerContext) -> Up:
        """A network, and the client's share of rows or all of them."""
        full = self.dictionary and self.dict_upload == "full"
        count = ctx.setup.sizes[client] if full else share(self.dictionary, client, ctx.setup)
        return Up(server.weights, self.blank(count, ctx))

    def aggregate(self, server: Server, reports: Reports[Up], ctx: ServerContext) -> Server:
        """The networks by the run's rule; the rows of those who took part replace their old."""
        combined: Combiner[Model] = ctx.combining(self.bn_stats)
        rows: dict[int, Tensor] = {}
        for report in reports:
            combined.add(Model(report.upload.weights), report.examples)
            sent = report.upload.rows.clone()  # not a piece of the message's memory
            if self.dict_upload == "full":
                sent = drawn(sent, share(self.dictionary, report.client, ctx.setup))
            rows[report.client] = sent
        weights = combined.onto(Model(server.weights)).weights
        return self.heard(replace(server, weights=weights), rows)

    def heard(self, server: Server, rows: dict[int, Tensor]) -> Server:
        """The state after clients have answered with ``rows``."""
        newest = dict(sorted((server.rows | rows).items())) if self.dictionary else {}
        return replace(server, rows=newest, told=tuple(sorted({*server.told, *rows})))

    def outline(self, server: Server | None, cohort: list[int], ctx: ServerContext) -> Server:
        """As :meth:`init_server` and :meth:`aggregate` without training; needs no public images."""
        if server is not None:
            counts = {k: share(self.dictionary, k, ctx.setup) for k in cohort}
            rows = {k: self.blank(count, ctx) for k, count in counts.items()}
            return self.heard(server, rows)
        weights, alignment = snapshot(self.network(ctx)), None
        if self.alignment:
            alignment = outline(weights, self.align_images, ctx)
        return Server(weights, {}, alignment, ())

    def encoder(self, server: Server, ctx: ServerContext) -> nn.Module:
        """The backbone."""
        return backbone(server.weights, ctx)

    def local_encoder(self, upload: Up, ctx: ServerContext) -> nn.Module | None:
        """The client's backbone."""
        return None if self.bn_stats == "local" else backbone(upload.weights, ctx)

    def shared(self, server: Server, upload: Up, ctx: ServerContext) -> Shared | None:  # noqa: ARG002
        """Rows of the dictionary; those of ensembles are means over rounds, here of the last."""
        if not len(upload.rows):
            return None
        net = filled(self.network(ctx), upload.weights)

        def make(x: Tensor) -> Tensor:
            with torch.no_grad():
                return F.normalize(net(x), dim=1)

        return Shared(upload.rows, make, make)
