"""Furlong's own recipe: begin with drawn scenes, contrast at the clients, keep going at the server.

    before the first round, at the server:
        θ ← SimCLR on scenes that are drawn on the spot       (--init scenes; nobody's images)
    every round:
        θ_k ← SimCLR on the images of client k, from θ         (a rate that does not fall)
        m ← β·m + Σ_k w_k·θ_k − θ;   θ ← θ + m                 (--server.rule momentum)

A round of many clients makes as few steps as one client does, and what single clients learn in it
is mostly noise that the mean takes out: what is left is short, and momentum adds it up over the
rounds. The mean also does what a falling rate does elsewhere. docs/recipe.md has the measurements,
what each part adds, and what was tried in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.methods.fedsimclr import FedSimCLR


@dataclass(frozen=True)
class Furlong(FedSimCLR):
    """SimCLR from an encoder that has learnt on drawn scenes, with momentum at the server."""

    paper = (
        "Furlong's own recipe (docs/recipe.md), of Chen et al. 2020 (SimCLR), Baradad et al. 2021 "
        "(drawn images), Chen et al. 2023 (a start for federations) and Hsu et al. 2019 (momentum)"
    )
    usual = {
        **FedSimCLR.usual,
        "model.init": "scenes",
        "server.rule": "momentum",
        "server.momentum": 0.6,
        "optimiser.schedule": "constant",
    }
