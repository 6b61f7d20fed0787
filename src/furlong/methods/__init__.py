"""The table of methods: the only place where a method has a string name.

A row is a name, a class and the fields by which it differs from the class's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong.method import Method
from furlong.methods.fcl import FCL
from furlong.methods.fedca import FedCA
from furlong.methods.feddc import FedDC
from furlong.methods.fedema import FedEMA
from furlong.methods.fedsimclr import FedSimCLR
from furlong.methods.fedswav import FedSwAV
from furlong.methods.fedu import FedU
from furlong.methods.mfcl import MFCL
from furlong.methods.orchestra import Orchestra


@dataclass(frozen=True)
class Row:
    """A named method: its class and the fields that the name stands for."""

    cls: type[Method[Any, Any, Any, Any]]
    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""  # if the name has another paper than the class

    @property
    def paper(self) -> str:
        """Where the method was published."""
        return self.source or self.cls.paper


METHODS: dict[str, Row] = {
    "fedsimclr": Row(FedSimCLR, "contrastive"),
    "fcl": Row(FCL, "contrastive"),
    "fedca": Row(FedCA, "contrastive"),
    "fedbyol": Row(
        FedU,
        "non-contrastive",
        {"predictor": "global"},
        "Grill et al., Bootstrap Your Own Latent (BYOL), NeurIPS 2020; the baseline of FedU",
    ),
    "fedu": Row(FedU, "non-contrastive"),
    "fedema": Row(FedEMA, "non-contrastive"),
    "mfcl": Row(MFCL, "modular"),
    "fedswav": Row(FedSwAV, "clustering"),
    "feddc": Row(FedDC, "clustering"),
    "orchestra": Row(Orchestra, "clustering"),
}
