"""What a method may touch: its networks, its optimiser, its data. No transport, no other client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from furlong.core.aggregation import Average, Combiner
from furlong.core.given import Given
from furlong.core.payload import Weights
from furlong.core.weights import BatchNormPolicy, restore
from furlong.data.augment import Recipe
from furlong.data.images import ImageSet
from furlong.devices import moved
from furlong.nn.encoders import build_encoder, without_batchnorm
from furlong.nn.losses import decorrelation
from furlong.nn.optimisers import LARS, SGD, Adam, Fused
from furlong.nn.peernorm import group_normed
from furlong.settings import setting

if TYPE_CHECKING:
    from furlong.core.secure.identity import Identity  # imports cryptography


@dataclass(frozen=True)
class Exchange:
    """One message down and one up for each client of a cohort; a method plans them."""

    round: int
    kind: str = "train"
    clients: tuple[int, ...] | None = None  # None: the round's sample; (): the server alone
    part: int = 0  # of what takes several exchanges
    learns: bool = True  # whether what is learnt can change in it; if not, it prepares another one
    index: int = -1  # running number, given by ``Server.exchanges``


@dataclass(frozen=True)
class OptimiserSettings:
    """How clients train; the optimiser is made anew every round (its moments start at zero)."""

    name: Literal["sgd", "adam", "adamw", "lars"] = setting(
        "sgd", "The clients' optimiser; adam adds weight decay to the gradient, adamw does not."
    )
    lr: float = setting(0.032, "Its learning rate.", above=0)
    momentum: float = setting(0.9, "Momentum of sgd and lars.", at_least=0, below=1)
    weight_decay: float = setting(5e-4, "Its weight decay.", at_least=0)
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "The learning rate over the rounds; inside a round it is constant."
    )
    persist: bool = setting(False, "Keep the moments on the client between rounds.")
    decorrelation: float = setting(
        0.0,
        "The weight β of FedDecorr's term, ‖correlations of the encoder's features‖²/d², which is "
        "added to any method's loss (Shi et al., ICLR 2023, have 0.1).",
        at_least=0,
    )
    encoder_rate: float = setting(
        1.0,
        "What the encoder's learning rate is multiplied by, where it starts from existing weights "
        "(--init): below 1 it changes more slowly than the new heads.",
        above=0,
    )


@dataclass(frozen=True)
class Setup:
    """What every party of a run knows."""

    encoder: str
    width: int  # d_h, the size of the encoder's representations
    channels: int
    image_size: int
    augment: Recipe
    rounds: int
    epochs: int
    batch_size: int
    optimiser: OptimiserSettings
    sizes: dict[int, int]  # images per client
    classes: int = 0  # of the labels, for methods that need them
    seed: int = 0
    server_threads: int = 1  # for what the server computes; part of the result's bits
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given: Given | None = None  # what the encoder begins with, and what of it is fixed

    def steps(self, client: int) -> int:
        """How many batches a client's local epochs have in a round, see ``batches_of``."""
        images = self.sizes[client]
        return self.epochs * (images // min(self.batch_size, images))


@dataclass(frozen=True)
class Shard:
    """Some images of a set, by row, without copying them."""

    images: ImageSet
    rows: Tensor  # int64 n

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, index: Tensor) -> Tensor:
        """uint8 b×C×H×W of the shard's images ``index``."""
        return self.images.pixels[self.rows[index]]

    def labels(self, index: Tensor) -> Tensor | None:
        """int64 b, or ``None``."""
        return None if self.images.labels is None else self.images.labels[self.rows[index]]


@dataclass(frozen=True)
class Batch:
    """b images of a client; views are drawn when asked for."""

    pixels: Tensor  # uint8 b×C×H×W on the device
    index: Tensor  # int64 b: which of the client's images these are
    labels: Tensor | None
    augment: Recipe

    def views(self, n: int = 2) -> tuple[Tensor, ...]:
        """``n`` independent augmentations, each float b×C×S×S in channels_last."""
        return self.augment.views(self.pixels, n)

    @property
    def plain(self) -> Tensor:
        """The images without augmentation, normalised, float b×C×S×S."""
        return self.augment.plain(self.pixels)


class Optimiser:
    """An optimiser with the round's learning rate; ``step(loss)`` does all three calls."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        settings: OptimiserSettings,
        lr: float,
        features: list[Tensor] | None = None,
    ):
        """``features``: where the encoder's outputs since the last step are, for FedDecorr."""
        self._features, self._decorrelation = features, settings.decorrelation
        trainable = [p for p in parameters if p.requires_grad]
        groups = _by_rate(trainable, lr, settings.encoder_rate)
        decay = settings.weight_decay
        self.torch: Fused | LARS
        if settings.name == "lars":
            self.torch = LARS(groups, lr, momentum=settings.momentum, weight_decay=decay)
        elif settings.name == "sgd":
            self.torch = SGD(groups, lr, settings.momentum, decay)
        else:
            self.torch = Adam(groups, lr, decay, decoupled=settings.name == "adamw")
        self._losses: list[Tensor] = []

    def step(self, loss: Tensor) -> None:
        """Zero, backward, update; the loss is remembered without waiting for the device.

        Gradients are as large as the weights and are gone in the end: what comes next needs room.
        At the beginning there may be some of another loss, or of a client that failed.
        """
        self.torch.zero_grad(set_to_none=True)
        if self._features:
            terms = torch.stack([decorrelation(h) for h in self._features])
            loss = loss + self._decorrelation * terms.mean()
            self._features.clear()
        loss.backward()  # type: ignore[no-untyped-call]
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())

    def descend(self, loss_of: Callable[[Batch], Tensor], batch: Batch) -> None:
        """A step on ``loss_of(batch)``.

        Whoever trains under a privacy budget asks for the loss of single images instead.
        """
        self.step(loss_of(batch))

    def metrics(self) -> dict[str, float]:
        """Mean loss over the steps taken."""
        return {"loss": float(torch.stack(self._losses).mean())} if self._losses else {}

    def moments(self) -> Weights:
        """The optimiser's tensors by ``parameter/name``."""
        return {
            f"{i}/{name}": value.detach().cpu()
            for i, parameter in enumerate(self._parameters)
            for name, value in self.torch.state.get(parameter, {}).items()
        }

    def set_moments(self, moments: Weights) -> None:
        """Go on from :meth:`moments` of an earlier round."""
        parameters = self._parameters
        for path, value in moments.items():
            index, name = path.split("/")
            parameter = parameters[int(index)]
            # fused kernels pair elements by memory offset: a moment needs its parameter's layout
            like = parameter if value.dim() else value
            own = torch.empty_like(like, device=parameter.device)
            self.torch.state.setdefault(parameter, {})[name] = own.copy_(value)

    @property
    def _parameters(self) -> list[Tensor]:
        """In the order by which moments are named."""
        return [p for group in self.torch.param_groups for p in group["params"]]


def _by_rate(parameters: list[nn.Parameter], lr: float, rate: float) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser: what the encoder began with has a rate of its own."""
    old = [p for p in parameters if rate != 1 and hasattr(p, "begun")]
    if not old:
        return [{"params": parameters}]
    new = [p for p in parameters if not hasattr(p, "begun")]
    return [{"params": new}, {"params": old, "lr": rate * lr}]


class Networks:
    """Modules of one process, built once per slot and refilled for every use.

    Building a ResNet costs more than loading its weights, and initialisation would draw random
    numbers: reuse keeps both away from the training of the second client.
    """

    def __init__(self) -> None:
        self._slots: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []

    def get(self, slot: str, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """The module of ``slot``; its weights are whatever was there before."""
        if slot not in self._slots:
            with torch.random.fork_rng(devices=[]):
                module = build().to(device)
            self._slots[slot] = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self._slots[slot]

    def watch(self, modules: Iterable[nn.Module]) -> list[Tensor]:
        """A list to which their encoders add what they give for training, B×d_h for each pass."""
        features: list[Tensor] = []

        def keep(_: nn.Module, __: object, output: Tensor) -> None:
            if output.requires_grad:
                features.append(output)

        for hook in self._hooks:  # of the last client
            hook.remove()
        parts = [part for m in modules for name, part in m.named_children() if name == "backbone"]
        self._hooks = [part.register_forward_hook(keep) for part in parts]
        return features


@dataclass
class Context:
    """What client and server have in common."""

    setup: Setup
    exchange: Exchange
    networks: Networks = field(default_factory=Networks)
    images_seen: int = 0
    optimisers: list[Optimiser] = field(default_factory=list)
    moments: list[Weights] = field(default_factory=list)  # kept from the last round, if at all

    @property
    def width(self) -> int:
        """d_h, the size of the encoder's representations."""
        return self.setup.width

    def encoder(self) -> nn.Module:
        """A new encoder as the run's settings say: freshly initialised, or from given weights.

        What is fixed during the run (frozen stages, weights beside adapters) is in none of its
        parameters and not in its state dict.
        """
        setup = self.setup
        encoder = build_encoder(setup.encoder, setup.channels, setup.image_size)
        return encoder if setup.given is None else setup.given.begin(encoder)

    def normed(self, part: nn.Module) -> nn.Module:
        """``part``, which goes beside the encoder, with group norms where the encoder has them."""
        return group_normed(part) if without_batchnorm(self.setup.encoder) else part

    def network(self, slot: str, build: Callable[[], nn.Module], weights: Weights) -> nn.Module:
        """A module holding a copy of ``weights``, in training mode.

        The same ``slot`` gives the same module again, so two networks that are alive at the same
        time need two slots.
        """
        module = self.networks.get(slot, build, self.setup.device)
        restore(module, weights)
        module.requires_grad_(True)
        return module.train()

    def on_device(self, weights: Weights) -> Weights:
        """``weights`` where the networks are; on a CPU they are there."""
        device = self.setup.device
        if device.type == "cpu":
            return weights
        return {name: moved(tensor, device) for name, tensor in weights.items()}

    def optimiser(self, *modules: nn.Module) -> Optimiser:
        """An optimiser over the modules' parameters with this round's learning rate."""
        parameters = [p for module in modules for p in module.parameters()]
        features = self.networks.watch(modules) if self.setup.optimiser.decorrelation else None
        made = self.new_optimiser(parameters, features)
        if len(self.optimisers) < len(self.moments):
            made.set_moments(self.moments[len(self.optimisers)])
        self.optimisers.append(made)
        return made

    def new_optimiser(
        self, parameters: list[nn.Parameter], features: list[Tensor] | None
    ) -> Optimiser:
        """What :meth:`optimiser` gives, without moments."""
        return Optimiser(parameters, self.setup.optimiser, self.learning_rate, features)

    @property
    def learning_rate(self) -> float:
        """η₀, or η₀/2·(1 + cos(π·round/rounds)): the first value is η₀, the last above zero."""
        settings = self.setup.optimiser
        if settings.schedule == "constant":
            return settings.lr
        progress = min(self.exchange.round, self.setup.rounds) / self.setup.rounds
        return settings.lr / 2 * (1 + math.cos(math.pi * progress))

    def batches_of(
        self,
        data: Shard,
        epochs: int | None = None,
        *,
        shuffle: bool = True,
        counted: bool = True,
    ) -> Iterator[Batch]:
        """Batches of ``data``. Shuffled epochs drop the last partial batch, ordered ones keep it.

        A shard smaller than the batch size makes one batch of its own size. ``counted`` batches are
        what training works through, for ``images_seen``; not so those that it only looks at.
        """
        n, device = len(data), self.setup.device
        size = min(self.setup.batch_size, n)
        for _ in range(self.setup.epochs if epochs is None else epochs):
            order = torch.randperm(n) if shuffle else torch.arange(n)
            stop = n - n % size if shuffle else n
            for start in range(0, stop, size):
                index = order[start : start + size]
                labels = data.labels(index)
                self.images_seen += len(index) if counted else 0
                yield Batch(
                    moved(data.pixels(index), device),
                    index,
                    None if labels is None else moved(labels, device),
                    self.setup.augment,
                )


@dataclass(kw_only=True)
class ServerContext(Context):
    """The server's side: public images, if the run has any, and room on disk."""

    public: Shard | None = None
    workspace: Callable[[], Path]  # a folder for what is too large for the server's state
    tell: Callable[[str], None] = lambda _: None  # a word to the user during long work
    metrics: dict[str, float] = field(default_factory=dict)  # the server's own, for the log
    # makes what merges the clients' answers by the run's rule ([server]): the mean, if no other
    combining: Callable[[BatchNormPolicy], Combiner[Any]] = Average


@dataclass(kw_only=True)
class ClientContext(Context):
    """A client's side: its number and its data (without labels unless the method needs them)."""

    client: int
    data: Shard
    identity: Identity | None = None  # by which the client signs, if it has one ([secure])
    masks: str = ""  # a name of the masks that are put on the upload, if any are ([secure])

    def batches(
        self, epochs: int | None = None, *, shuffle: bool = True, counted: bool = True
    ) -> Iterator[Batch]:
        """Batches of the client's images; by default the run's local epochs, shuffled."""
        return self.batches_of(self.data, epochs, shuffle=shuffle, counted=counted)
