"""The contract of a method.

S, C, D, U are payloads: what the server keeps, what a client keeps, what goes down, what goes up.
State goes in, state comes out; a method is a frozen dataclass whose fields are its hyper-parameters
and it has no other state. ``core.exchange`` seeds torch around every call: method code is plain
torch.

A method that averages one number per client (see ``examples/new_method.py`` for a real one)::

    @payload
    class Number:
        value: Tensor

    @dataclass(frozen=True)
    class MeanPixel(Averaging[Number, None]):
        def init_server(self, ctx):
            return Number(torch.zeros(()))
        def local_update(self, state, down, ctx):
            pixels = torch.cat([batch.plain for batch in ctx.batches(epochs=1, shuffle=False)])
            return Local(state, Number(pixels.mean()), {})
        def encoder(self, server, ctx):
            return nn.Flatten()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, Exchange, ServerContext, Setup
from furlong.core.payload import payload
from furlong.core.weights import BatchNormPolicy
from furlong.settings import check, setting

S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")


@dataclass(frozen=True)
class Local(Generic[C, U]):
    """What a client has after local training: what stays, what leaves, what is logged."""

    state: C
    upload: U
    metrics: dict[str, float] = field(default_factory=dict)


@payload("furlong.method.Report")
class Report(Generic[U]):
    """One client's answer in one exchange."""

    client: int
    exchange: int
    examples: int
    upload: U
    metrics: dict[str, float]


@dataclass(frozen=True)
class Shared:
    """Features of single images inside an upload, and what whoever gets them has beside them."""

    rows: Tensor  # N×…, as they were sent
    sent: Callable[[Tensor], Tensor]  # views B×C×S×S to such rows, as the client makes them
    plain: Callable[[Tensor], Tensor]  # the same without what is to hide the images
    decoder: Callable[[Tensor], Tensor] | None = None  # rows to images in [0, 1], if there is one


Reports: TypeAlias = Iterable[Report[U]]
"""The answers of an exchange, in client order. They can be read once: reading starts the work."""


USUAL: Mapping[str, Any] = {
    "train.batch_size": 32,
    "optimiser.name": "adam",
    "optimiser.lr": 0.002,
    "optimiser.weight_decay": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Method(ABC, Generic[S, C, D, U]):
    """A federated algorithm."""

    paper: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False  # otherwise labels are stripped before a client sees data
    needs_public: ClassVar[bool] = False  # images that the server may see
    pairs_views: ClassVar[bool] = False  # both views go through the encoder in one pass
    equal_weights: ClassVar[bool] = False  # every client counts as one image, whatever it holds
    # what a client learns from its images it learns by ``optimiser.descend`` on ``ctx.batches()``
    # alone, by a loss that is the mean over single images, or makes sense for a few of them
    decomposes: ClassVar[Literal["no", "records", "groups"]] = "no"
    # settings by section.key that a run has where neither a file nor an option says another; a
    # user who names only the method gets them (how they were chosen: docs/settings.md)
    usual: ClassVar[Mapping[str, Any]] = USUAL
    usual_small: ClassVar[Mapping[str, Any]] = {}  # its own fields beside a small encoder
    usual_augment: ClassVar[str] = "moco_cifar"  # the preset that data.augment = "auto" stands for
    unit_rows: ClassVar[tuple[str, ...]] = ()  # fields of an upload whose rows have length 1
    keeps: ClassVar[str] = ""  # in words: what stays on a client between rounds
    leaves: ClassVar[str] = ""  # in words: what leaves a client, and what it may reveal
    # in words: what its server needs of single clients, so that sums alone ([secure]) will not do
    singles: ClassVar[str] = "its server looks at the answers one by one"
    caution: ClassVar[str] = ""  # in words: known criticism of the method
    explains: ClassVar[Mapping[str, str]] = {}  # metric -> how to read it, in a sentence
    remedy: ClassVar[str] = (  # in words: what to try when a run is heading for collapse
        "Try a lower --optimiser.lr, a larger --batch-size or another method."
    )

    bn_stats: BatchNormPolicy = setting(
        "average",
        "What the server makes of the clients' BatchNorm statistics: their mean, the statistics of "
        "all images pooled, or new ones from the server's images; 'local' keeps each client's own.",
    )

    def __post_init__(self) -> None:
        """Refuse hyper-parameters outside of their bounds."""
        check(self, "method")

    @abstractmethod
    def init_server(self, ctx: ServerContext) -> S:
        """The server's state before the first exchange."""

    def init_client(self, ctx: ClientContext) -> C:  # noqa: ARG002
        """A client's state before its first participation; by default it keeps nothing."""
        return None  # type: ignore[return-value]

    @abstractmethod
    def download(self, server: S, client: int, ctx: ServerContext) -> D:
        """What the server sends to ``client``."""

    @abstractmethod
    def local_update(self, state: C, down: D, ctx: ClientContext) -> Local[C, U]:
        """A client's part of the exchange ``ctx.exchange``."""

    @abstractmethod
    def expected(self, server: S, client: int, ctx: ServerContext) -> U:
        """A payload with the names, shapes and dtypes that an upload must have."""

    @abstractmethod
    def aggregate(self, server: S, reports: Reports[U], ctx: ServerContext) -> S:
        """The new server state; ``reports`` come once, in client order, and may be none."""

    @abstractmethod
    def encoder(self, server: S, ctx: ServerContext) -> nn.Module:
        """What downstream users get: images B×C×H×W in, representations h B×d out."""

    def classifier(self, server: S, ctx: ServerContext) -> nn.Module | None:  # noqa: ARG002
        """Images to class scores B×n, of a method that learns from labels."""
        return None

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """The exchanges of a run: one "train" exchange per round."""
        for index in range(setup.rounds):
            yield Exchange(round=index)

    def asked(self, server: S, cohort: list[int], ctx: ServerContext) -> list[int]:  # noqa: ARG002
        """Those of the round's ``cohort`` that ``ctx.exchange`` is about: all of them."""
        return cohort

    def advice(self, setup: Setup) -> list[str]:  # noqa: ARG002
        """What a user should be told before a run with ``setup``: each a fact and its remedy."""
        return []

    def architecture(self, encoder: str) -> str:
        """The name (see ``nn.encoders.build_encoder``) of what :meth:`encoder` gives."""
        return encoder

    def local_encoder(self, upload: U, ctx: ServerContext) -> nn.Module | None:  # noqa: ARG002
        """The encoder inside one client's upload, if there is one; for measuring."""
        return None

    def shared(self, server: S, upload: U, ctx: ServerContext) -> Shared | None:  # noqa: ARG002
        """The features of single images in one client's upload, if there are any; for measuring.

        ``server``: the state that the client got its download from.
        """
        return None

    def explain(self, server: S, batch: Batch, ctx: ServerContext) -> dict[str, float]:  # noqa: ARG002
        """Numbers for the log that tell why a run learns or fails; ``batch`` has labels.

        For measuring only: nothing that trains may see them. ``explains`` says how to read them.
        """
        return {}

    def outline(self, server: S | None, cohort: list[int], ctx: ServerContext) -> S:  # noqa: ARG002
        """A state of the size that the server's has after ``ctx.exchange`` (``None``: at first).

        For predicting traffic without training. By default an exchange changes no size.
        """
        return self.init_server(ctx) if server is None else server


AnyMethod: TypeAlias = Method[Any, Any, Any, Any]
"""A method of which only the contract is known."""
