"""What an encoder begins with, and which part of it is the same for everybody during a run.

Existing weights, frozen stages and adapters (``--init``, ``--model.freeze``, ``--model.adapter``)
enter a run here and nowhere else: methods ask for ``ctx.encoder()`` and get a network whose state
dict has only what is trained and sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from furlong.core.payload import Weights
from furlong.nn.fixed import fix, frozen, released
from furlong.nn.lora import Rank, adapt, adapters, merged

Average = Literal["factors", "products", "freeze_a"]


@dataclass(frozen=True)
class Given:
    """Of the run's encoder, by the names of the plain network.

    ``weights``: all of them at the server, at a node the fixed ones (what is trained comes with
    every download), and none where only names and sizes matter.
    """

    weights: Weights
    freeze: str = "none"
    adapter: str = "none"
    average: Average = "factors"
    seed: int = 0  # the run's: all parties draw the same A

    def begin(self, encoder: nn.Module) -> nn.Module:
        """``encoder`` itself, a plain network, as training begins with it."""
        own = encoder.state_dict()
        for name, tensor in self.weights.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"the given weights have {name}, which does not fit the encoder")
            own[name].copy_(tensor)
        for parameter in encoder.parameters():
            parameter.begun = True  # type: ignore[attr-defined]  # an old part, for its rate
        shape = Rank.parse(self.adapter)
        layers = [] if shape is None else adapters(encoder, shape, self._free(encoder))
        fix(encoder, self.fixed(encoder))
        if shape is not None:
            a = adapt(encoder, layers, shape, self.seed)
            fix(encoder, a if self.average == "freeze_a" else [])
        return encoder

    def fixed(self, encoder: nn.Module) -> list[str]:
        """The tensors of the plain network ``encoder`` that stay as they are."""
        return frozen(encoder, "all" if self.adapter != "none" else self.freeze)

    def _free(self, encoder: nn.Module) -> set[str]:
        return {*encoder.state_dict()}.difference(frozen(encoder, self.freeze))


def plain(module: nn.Module) -> nn.Module:
    """``module`` itself as a plain network: adapters merged, nothing fixed, every tensor there."""
    return released(merged(module))
