"""Any method that averages, with another rule than the mean at the server (``[server]``).

The rule reaches the method through its context: ``ctx.combining`` gives what merges the answers.
The moments of a server optimiser are part of the server's state, so they are saved and resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from furlong.core.aggregation import Ruling, ServerSettings
from furlong.core.context import ServerContext
from furlong.core.method import Report
from furlong.core.payload import Weights, payload
from furlong.core.products import merging
from furlong.methods.wrappers import Wrapping


@payload("furlong.methods.ruled.State")
class State:
    """The method's server state, and the moments of the server's optimiser, if it has one."""

    inner: Any
    moments: dict[str, Weights]


@dataclass(frozen=True)
class Ruled(Wrapping[State]):
    """``inner``, whose server merges by ``rule``."""

    rule: ServerSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.check_policy(self.inner.bn_stats)

    def state_of(self, server: State, client: int) -> Any:  # noqa: ARG002
        """The same for everybody."""
        return server.inner

    def init_server(self, ctx: ServerContext) -> State:
        """As the method does; no moments yet."""
        return State(self.inner.init_server(ctx), {})

    def aggregate(self, server: State, reports: Iterable[Report[Any]], ctx: ServerContext) -> State:
        """As the method does, by the rule."""

        def tell(text: str) -> None:
            ctx.tell(f"round {ctx.exchange.round + 1}: {text}")

        ruling = Ruling(self.rule, server.moments, ctx.exchange.kind, tell)
        combining = merging(ruling, ctx.setup.given)
        state = self.inner.aggregate(server.inner, reports, replace(ctx, combining=combining))
        return State(state, ruling.moments())

    def outline(self, server: State | None, cohort: list[int], ctx: ServerContext) -> State:
        """As the method does: moments do not travel."""
        inner = None if server is None else server.inner
        return State(self.inner.outline(inner, cohort, ctx), {})
