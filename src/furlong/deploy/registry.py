"""The SuperLink's list of nodes, kept in step with the keys in the server's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from furlong.deploy.flower_private import SuperLinkNodes
from furlong.deploy.keys import PublicKey, read_public
from furlong.errors import FurlongError

Nodes = dict[bytes, tuple[int, str]]  # key -> number and state
Action = Callable[[PublicKey, int, str], str]
_TROUBLE = "not registered (furlong superlink tries again at its next start)"


@dataclass
class Registry:
    """Registers the keys in nodes/ and unregisters those in revoked/.

    That a file is gone means nothing: Flower cannot take a key back, so a slip must not revoke one.
    """

    certs: Path
    known: SuperLinkNodes
    _said: dict[Path, str] = field(default_factory=dict)

    def update(self) -> Iterator[str]:
        """Register and unregister what has changed; yields what is new about the nodes."""
        try:
            nodes = self.known.nodes()
        except FurlongError as error:  # no reason to end the SuperLink: look again later
            yield from self._new(self.certs, str(error))
            return
        for path in sorted(self.certs.glob("revoked/*.pub")):
            yield from self._one(path, self._revoke, nodes, "NOT YET REVOKED")
        for path in sorted(self.certs.glob("nodes/*.pub")):
            if not self._said.get(path, "").startswith(_TROUBLE):
                yield from self._one(path, self._admit, nodes, _TROUBLE)

    def _one(self, path: Path, act: Action, nodes: Nodes, trouble: str) -> Iterator[str]:
        """The news about one key; one that cannot be used must not stop the others."""
        name = path.stem
        try:
            key = read_public(path)
            name = key.name
            status = act(key, *nodes.get(key.pem, (0, "")))
        except FurlongError as error:
            status = f"{trouble}: {error}"
        if status:
            yield from (f"{name}: {news}" for news in self._new(path, status))

    def _new(self, about: Path, said: str) -> Iterator[str]:
        if self._said.get(about) != said:
            self._said[about] = said
            yield said

    def _revoke(self, _: PublicKey, number: int, status: str) -> str:
        if status in ("", "unregistered"):
            return ""
        self.known.unregister(number)
        return "revoked"

    def _admit(self, key: PublicKey, _: int, status: str) -> str:
        if status == "unregistered":
            return "was unregistered, and its key cannot be used again: make another"
        if not status:
            self.known.register(key.pem, key.name)
        return status or "registered"
