"""A method around another method: what it does not change it passes on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from furlong.core.context import Batch, ClientContext, Context, Exchange, ServerContext, Setup
from furlong.core.method import AnyMethod, Local, Method, Shared

S = TypeVar("S")
X = TypeVar("X", bound=Context)


def _inner(name: str) -> Any:
    """An attribute that is the inner method's."""
    return property(lambda self: getattr(self.inner, name))


@dataclass(frozen=True)
class Wrapping(Method[S, Any, Any, Any]):
    """``inner``, seen through :meth:`state_of` and :meth:`seen_by`."""

    inner: AnyMethod

    needs_labels = _inner("needs_labels")
    needs_public = _inner("needs_public")
    pairs_views = _inner("pairs_views")
    unit_rows = _inner("unit_rows")
    decomposes = _inner("decomposes")
    equal_weights = _inner("equal_weights")
    usual_augment = _inner("usual_augment")
    leaves = _inner("leaves")
    singles = _inner("singles")
    caution = _inner("caution")
    explains = _inner("explains")
    remedy = _inner("remedy")

    def __post_init__(self) -> None:
        object.__setattr__(self, "bn_stats", self.inner.bn_stats)  # a field, so no property

    @abstractmethod
    def state_of(self, server: S, client: int) -> Any:
        """The inner method's server state that ``client`` has to do with."""

    def seen_by(self, ctx: X, client: int) -> X:  # noqa: ARG002
        """What the inner method sees of a run when it deals with ``client``."""
        return ctx

    def asks(self, exchange: Exchange, state: Any, down: Any) -> tuple[Exchange, Any, Any] | None:
        """A client's exchange, state and download as the inner method has them, if it is asked."""
        return exchange, state, down

    def plan(self, setup: Setup) -> Iterator[Exchange]:
        """As the method plans."""
        return self.inner.plan(setup)

    def asked(self, server: S, cohort: list[int], ctx: ServerContext) -> list[int]:
        """As the method says, by the first client's server if there is one for each."""
        first = min(ctx.setup.sizes)
        return self.inner.asked(self.state_of(server, first), cohort, self.seen_by(ctx, first))

    def advice(self, setup: Setup) -> list[str]:
        """The method's."""
        return self.inner.advice(setup)

    def architecture(self, encoder: str) -> str:
        """As the method has it."""
        return self.inner.architecture(encoder)

    def init_client(self, ctx: ClientContext) -> Any:
        """As the method does."""
        return self.inner.init_client(self.seen_by(ctx, ctx.client))

    def local_update(self, state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
        """As the method does."""
        return self.inner.local_update(state, down, self.seen_by(ctx, ctx.client))

    def download(self, server: S, client: int, ctx: ServerContext) -> Any:
        """As the method does."""
        return self.inner.download(self.state_of(server, client), client, self.seen_by(ctx, client))

    def expected(self, server: S, client: int, ctx: ServerContext) -> Any:
        """As the method does."""
        return self.inner.expected(self.state_of(server, client), client, self.seen_by(ctx, client))

    def encoder(self, server: S, ctx: ServerContext) -> nn.Module:
        """The method's, for the first client if there is one for each."""
        first = min(ctx.setup.sizes)
        return self.inner.encoder(self.state_of(server, first), self.seen_by(ctx, first))

    def classifier(self, server: S, ctx: ServerContext) -> nn.Module | None:
        """The method's, for the first client if there is one for each."""
        first = min(ctx.setup.sizes)
        return self.inner.classifier(self.state_of(server, first), self.seen_by(ctx, first))

    def local_encoder(self, upload: Any, ctx: ServerContext) -> nn.Module | None:
        """As the method does."""
        return self.inner.local_encoder(upload, ctx)

    def shared(self, server: S, upload: Any, ctx: ServerContext) -> Shared | None:
        """As the method does, for the first client if there is a server for each."""
        first = min(ctx.setup.sizes)
        return self.inner.shared(self.state_of(server, first), upload, self.seen_by(ctx, first))

    def explain(self, server: S, batch: Batch, ctx: ServerContext) -> dict[str, float]:
        """The method's, for the first client if there is one for each."""
        first = min(ctx.setup.sizes)
        return self.inner.explain(self.state_of(server, first), batch, self.seen_by(ctx, first))
