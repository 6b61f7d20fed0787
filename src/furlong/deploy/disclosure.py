"""What would leave a site in a run, before it takes part: ``furlong node --dry-run``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from furlong.core.exchange import Server
from furlong.core.payload import by_field
from furlong.deploy.node import Site
from furlong.errors import FurlongError
from furlong.runs.cost import predict, sent_by
from furlong.runs.nodes import own_size, participate


class Field(NamedTuple):
    """A field of an answer."""

    answer: str  # kind of exchange
    name: str
    kind: str  # weights, features, …
    elements: int
    bytes: int


@dataclass(frozen=True)
class Disclosure:
    """What a site would send, if other sites are like it."""

    images: int
    fields: list[Field]  # of each kind of answer
    answers: int  # in the whole run
    total: int  # bytes in the whole run
    caution: str  # the method's words about what that may reveal


def disclosure(site: Site) -> Disclosure:
    """What the site would send in a run of the configuration that it agrees to."""
    settings = site.agree
    if settings is None:
        raise FurlongError("--dry-run needs --agree CONFIG: what leaves depends on the method.")
    own = None if site.own is None else site.images(own_size(settings), settings.data.reading)
    sizes = {} if own is None else dict.fromkeys(range(settings.data.clients or 2), len(own))
    party = participate(settings, own, sizes)
    server, me = Server(party.method, party.setup, fraction=settings.train.fraction), site.part or 0
    fields = [
        Field(when, name, kind, elements, size)
        for when, flow in sent_by(server).items()
        for (name, kind), (elements, size) in by_field(flow["up"]).items()
    ]
    asked = [item for item in predict(server, me) if item.cohort]
    total = sum(item.up.total for item in asked)
    return Disclosure(party.setup.sizes[me], fields, len(asked), total, party.method.leaves)
