"""The table of methods: the only place where a method has a string name.

A row is a name, a class and the fields by which it differs from the class's defaults; L-DAWA is a
rule of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong.core.method import AnyMethod
from furlong.methods.fcl import FCL
from furlong.methods.fedae import FedAE
from furlong.methods.fedavg import FedAvg
from furlong.methods.fedbarlow import FedBarlow
from furlong.methods.fedca import FedCA
from furlong.methods.feddc import FedDC
from furlong.methods.fedema import FedEMA
from furlong.methods.fedmae import FedMAE
from furlong.methods.fedmoco import FedMoCo
from furlong.methods.fedrot import FedRot
from furlong.methods.fedsc import FedSC
from furlong.methods.fedsimclr import FedSimCLR
from furlong.methods.fedsimsiam import FedSimSiam
from furlong.methods.fedswav import FedSwAV
from furlong.methods.fedu import FedU
from furlong.methods.fedu2 import FedU2
from furlong.methods.fedvicreg import FedVICReg
from furlong.methods.fedx import FedX
from furlong.methods.furlong import Furlong
from furlong.methods.mfcl import MFCL
from furlong.methods.moon import MOON
from furlong.methods.orchestra import Orchestra
from furlong.methods.ssd import SSD


@dataclass(frozen=True)
class Row:
    """A named method: its class and the fields that the name stands for."""

    cls: type[AnyMethod]
    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""  # if the name has another paper than the class
    server: Mapping[str, Any] = field(default_factory=dict)  # settings of [server] it stands for
    about: str = ""  # if the name is for something else than the class

    @property
    def paper(self) -> str:
        """Where the method was published."""
        return self.source or self.cls.paper

    @property
    def summary(self) -> str:
        """What the method does, in one sentence."""
        return self.about or (self.cls.__doc__ or "").strip().splitlines()[0]


METHODS: dict[str, Row] = {
    "furlong": Row(Furlong, "contrastive"),
    "fedsimclr": Row(FedSimCLR, "contrastive"),
    "ldawa": Row(
        FedSimCLR,
        "contrastive",
        source="Rehman et al., L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated "
        "Self-Supervised Visual Representation Learning, ICCV 2023",
        server={"rule": "ldawa"},
        about="SimCLR; the server weighs each tensor of a client by its cosine with its own one.",
    ),
    "fedmoco": Row(FedMoCo, "contrastive"),
    "fcl": Row(FCL, "contrastive"),
    "fedca": Row(FedCA, "contrastive"),
    "fedx": Row(FedX, "contrastive"),
    "fedsc": Row(FedSC, "contrastive"),
    "ssd": Row(SSD, "contrastive"),
    "fedbyol": Row(
        FedU,
        "non-contrastive",
        {"predictor": "global"},
        "Grill et al., Bootstrap Your Own Latent (BYOL), NeurIPS 2020; the baseline of FedU",
        about="BYOL; the global encoder and predictor replace a client's, its target stays.",
    ),
    "fedsimsiam": Row(FedSimSiam, "non-contrastive"),
    "fedbarlow": Row(FedBarlow, "non-contrastive"),
    "fedvicreg": Row(FedVICReg, "non-contrastive"),
    "fedu": Row(FedU, "non-contrastive"),
    "fedema": Row(FedEMA, "non-contrastive"),
    "fedu2": Row(FedU2, "non-contrastive", server={"rule": "eua"}),
    "fedswav": Row(FedSwAV, "clustering"),
    "feddc": Row(FedDC, "clustering"),
    "orchestra": Row(Orchestra, "clustering"),
    "fedrot": Row(FedRot, "pretext task"),
    "fedae": Row(FedAE, "reconstruction"),
    "fedmae": Row(FedMAE, "reconstruction"),
    "mfcl": Row(MFCL, "modular"),
    "fedavg": Row(FedAvg, "supervised"),
    "fedprox": Row(
        FedAvg,
        "supervised",
        {"mu": 0.01},
        "Li et al., Federated Optimization in Heterogeneous Networks (FedProx), MLSys 2020",
        about="Learn the labels without moving far away from the global weights.",
    ),
    "moon": Row(MOON, "supervised"),
}
