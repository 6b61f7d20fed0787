"""Furlong's own recipe: begin with drawn scenes, contrast several views, keep going at the server.

    before the first round, at the server:
        θ ← SimCLR on scenes that are drawn on the spot      (--init scenes; nobody's images)
    every round:
        θ_k ← SimCLR with V views of every image of client k, from θ; the rate does not fall
        m ← β·m + Σ_k w_k·θ_k - θ;   θ ← θ + m               (--server.rule momentum)

    ℓ = mean of -log( e_ij / (e_ij + Σ_k e_ik) ), e = exp(z̃·z̃/τ), over views i and their partners j;
        k: all views of other images

The idea of the last two: in a round each client makes few steps, and much of what it learns in them
is noise that the mean takes out, as a falling rate does elsewhere; what is left is short, and
momentum adds it up over the rounds. docs/recipe.md has the measurements, what each part adds, and
what was tried in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.methods.fedsimclr import FedSimCLR
from furlong.nn.losses import nt_xent_views
from furlong.settings import setting


@dataclass(frozen=True)
class Furlong(FedSimCLR):
    """SimCLR with several views, from drawn scenes, with momentum at the server."""

    paper = (
        "Furlong's own recipe (docs/recipe.md), of Chen et al. 2020 (SimCLR), Baradad et al. 2021 "
        "(drawn images), Chen et al. 2023 (a start for federations) and Hsu et al. 2019 (momentum)"
    )
    pairs_views = False
    usual = {
        **FedSimCLR.usual,
        "model.init": "scenes",
        "server.rule": "momentum",
        "server.momentum": 0.6,
        "optimiser.schedule": "constant",
        "train.rounds": 20,  # four views make twice the work of two
    }

    views: int = setting(4, "The views V of every image in a step.", at_least=2)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """All views in one pass, each against those of other images."""
        z = net(torch.cat(batch.views(self.views)))
        return nt_xent_views(z.unflatten(0, (self.views, -1)), self.temperature)
