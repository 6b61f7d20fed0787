"""FedDC: DeepCluster-v2 on every client, FedAvg of encoder and projector.

Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments",
NeurIPS 2020, its improved DeepCluster (github.com/facebookresearch/swav); a baseline of FCL, which
does not say how it was federated.

    before every local epoch, for heads h = 1 … H: C_h, a_h = spherical k-means of the bank of
        projections that the epoch before left, the heads in turn on the first and the second view
    L = 1/H·Σ_h CE( z̃·C_hᵀ/τ, a_h(i) ) over both views; C_h is a constant

Prototypes never travel: the numbers of k-means' clusters mean nothing to another client. Nothing is
kept between rounds: a new network makes new projections, so the bank is filled again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.core.context import ClientContext
from furlong.core.method import USUAL, Local
from furlong.core.weights import snapshot
from furlong.devices import moved
from furlong.methods.base import WEIGHTS_REVEAL, Model, OneModel
from furlong.methods.fedswav import project
from furlong.methods.networks import Projecting, named_head
from furlong.nn.clustering import random_rows, spherical_kmeans
from furlong.nn.encoders import untracked
from furlong.nn.losses import IGNORED, cluster_cross_entropy
from furlong.settings import setting

Bank = list[tuple[Tensor, Tensor]]
"""What an epoch leaves, batch by batch: which images (int64 B), and their projections 2×B×d."""


@dataclass(frozen=True)
class FedDC(Projecting, OneModel[None]):
    """Predict the clusters that k-means found among the client's own images."""

    paper = "Caron et al. 2020 (DeepCluster-v2), averaged as in McMahan et al. 2017"
    pairs_views = True
    leaves = f"Encoder and projector weights. {WEIGHTS_REVEAL}"
    usual = {**USUAL, "train.batch_size": 64}  # its loss is of a whole batch's statistics
    usual_small = {"projection_head": "mlp:256:128"}

    heads: int = setting(3, "How many clusterings H there are.", at_least=1)
    prototypes: int = setting(3000, "The most clusters P of one of them.", at_least=2)
    images_per_prototype: int = setting(10, "The fewest images for each cluster.", at_least=1)
    temperature: float = setting(0.1, "The temperature τ of the loss.", above=0)
    iterations: int = setting(10, "The iterations of k-means.", at_least=1)
    projection_head: str = named_head("mlp:2048:128")

    def local_update(self, state: None, down: Model, ctx: ClientContext) -> Local[None, Model]:
        """Fill the bank; then cluster and train, epoch by epoch."""
        net = ctx.network("net", lambda: self.network(ctx), down.weights)
        optimiser = ctx.optimiser(net)
        # random views and batch statistics, as the official init_memory; but it is no training, so
        # the running statistics stay
        with torch.no_grad(), untracked(net):
            bank = [(batch.index, project(net, batch)) for batch in ctx.batches(1, counted=False)]
        for _ in range(ctx.setup.epochs):
            clusters = self.cluster(bank, ctx)
            bank = []
            for batch in ctx.batches(1):
                z = project(net, batch)
                index = moved(batch.index, z.device)
                losses = [
                    self.loss(z, centroids, assigned[index]) for centroids, assigned in clusters
                ]
                optimiser.step(torch.stack(losses).mean())
                bank.append((batch.index, z.detach()))
        return Local(state, Model(snapshot(net)), optimiser.metrics())

    def loss(self, z: Tensor, centroids: Tensor, assigned: Tensor) -> Tensor:
        """Of projections 2×B×d of both views and the clusters of B images."""
        both = z.flatten(0, 1)
        return cluster_cross_entropy(both, centroids, assigned.repeat(2), self.temperature)

    def cluster(self, bank: Bank, ctx: ClientContext) -> list[tuple[Tensor, Tensor]]:
        """For every head the centroids P×d and each image's cluster, int64 n.

        Images that the last epoch left out, with the last partial batch, have no cluster.
        """
        index = torch.cat([rows for rows, _ in bank])
        views = torch.cat([z for _, z in bank], dim=1)
        count = min(self.prototypes, len(ctx.data) // self.images_per_prototype)
        count = min(max(2, count), len(index))  # with a single cluster there is nothing to predict
        found = []
        for head in range(self.heads):
            rows = views[head % 2]
            seeds = random_rows(rows, count)
            centroids, assigned = spherical_kmeans(rows, seeds, self.iterations)
            everybody = torch.full((len(ctx.data),), IGNORED, device=rows.device)
            everybody[moved(index, rows.device)] = assigned
            found.append((centroids, everybody))
        return found
