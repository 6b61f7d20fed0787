"""A site's own signing key, and the keys of those that it knows: files that no server has made.

    FOLDER/identity.key   the site's secret, 32 bytes in hex; made when it is not there
    FOLDER/identity.pub   its public key, for the other sites; not by way of the server
    FOLDER/known/*.pub    the public keys of the other sites
    FOLDER/answered       which phases of which rounds it has answered

Without such a folder a client signs with a key of its own that is new in every round and that the
server passes on, so a server that lies can put another in its place.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from furlong.core.secure.primitives import KEY, ProtocolError, new_secret, signing_key
from furlong.errors import FurlongError

_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY}}}")


@dataclass(frozen=True)
class Identity:
    """Who a client is, and whom it knows."""

    secret: bytes
    known: frozenset[bytes]  # public keys of others
    answered: Path

    @classmethod
    def at(cls, folder: Path) -> Identity:
        """The identity in ``folder``; a new one if there is none."""
        (folder / "known").mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "identity.key"
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(new_secret().hex() + "\n")
        secret = _read(path)
        own = signing_key(secret)
        (folder / "identity.pub").write_text(own.hex() + "\n")
        known = {_read(file) for file in sorted((folder / "known").glob("*.pub"))}
        return cls(secret, frozenset(known - {own}), folder / "answered")

    @property
    def public(self) -> bytes:
        """The public key."""
        return signing_key(self.secret)

    def require_known(self, public: bytes, who: int) -> None:
        """Refuse a signer whose key this site was not given."""
        if public not in self.known:
            raise ProtocolError(
                f"client {who} signs with a key that is not in the folder 'known' of --identity"
            )

    def once(self, what: str) -> None:
        """Refuse to answer ``what`` a second time, whatever state a server goes back to."""
        before = self.answered.read_text().splitlines() if self.answered.exists() else []
        if what in before:
            raise ProtocolError("secure aggregation: this site has answered that already")
        with self.answered.open("a") as file:
            file.write(what + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    text = path.read_text().strip()
    if not _HEX.fullmatch(text):
        raise FurlongError(f"{path} is not a key: {2 * KEY} digits from 0 to f are expected.")
    return bytes.fromhex(text)
