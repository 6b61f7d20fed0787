"""A site's side of a federation: connected to a SuperLink until somebody ends it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from furlong.deploy.addresses import require_loopback, split_address
from furlong.deploy.flower import serve
from furlong.deploy.flower_fleet import Refused, connected
from furlong.deploy.node import Site
from furlong.deploy.processes import clock_ahead, environment, leaving
from furlong.engines.pool import keep_freed_memory
from furlong.errors import FurlongError
from furlong.files import locked


def require_files(superlink: str, certs: Path | None) -> None:
    """Refuse a folder without certificate and key; without ``certs``, other machines."""
    host, _ = split_address(superlink)
    if certs is None:
        require_loopback(host)
        return
    for name in ("ca.crt", "node.key"):
        if not (certs / name).is_file():
            raise FurlongError(
                f"there is no {certs / name}: --certs is the folder that the coordinator "
                "made for this site (ca.crt), with the site's key in it (node.key)."
            )


def take_part(
    site: Site, superlink: str, certs: Path | None, patience: float, stall: float
) -> None:
    """Take part until interrupted.

    It is an error if the server refuses this node for ``patience`` seconds. ``stall``: seconds for
    a question to arrive whole.
    """
    keep_freed_memory()
    site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(site.folder), leaving():
        require_files(superlink, certs)
        count = site.check()
        if count is not None:
            site.say(f"{count:,} images; they stay here. Ctrl-C ends this node.")
        os.environ.update(environment(site.folder / "flower"))  # no proxy for this machine
        last, said = time.monotonic(), ""
        try:
            while True:
                tell = _teller(superlink, site.say)
                try:
                    with connected(superlink, certs, site.folder / "connected", tell) as place:
                        said = ""
                        site.say(f"connected to {superlink}; waiting for work")
                        try:
                            serve(site, place, stall)
                        finally:
                            last = time.monotonic()
                except Refused as error:
                    reason = f"{error}: {_why(superlink, certs)}"
                    if time.monotonic() > last + patience:
                        raise FurlongError(reason) from None
                    if reason != said:
                        said = reason
                        site.say(f"{reason} Trying for {patience:.0f} s.")
                    time.sleep(3.0)
        finally:
            site.close()


_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not one of --certs (ca.crt), or for another "
    "host: ask the coordinator for this federation's ca.crt",
    "WRONG_VERSION_NUMBER": "what listens there does not speak TLS: is it the right port?",
}


def _teller(superlink: str, say: Callable[[str], None]) -> Callable[[str], None]:
    """Says once for each reason that a server cannot be reached; after a while, if it may pass."""
    began, told = time.monotonic(), set()

    def tell(reason: str) -> None:
        hint = next((hint for mark, hint in _HINTS.items() if mark in reason), None)
        if reason not in told and (hint or time.monotonic() > began + 15):
            told.add(reason)
            say(f"{superlink} cannot be reached yet ({hint or reason}); trying on")

    return tell


def _why(superlink: str, certs: Path | None) -> str:
    """What it means that a node is refused; Flower does not say."""
    authority = None if certs is None else certs / "ca.crt"
    ahead = clock_ahead(*split_address(superlink), authority)
    if ahead is not None and not -300 < ahead < 4:
        return f"this machine's clock is {ahead:.0f} s ahead of the server's; set it (NTP)."
    return (
        "it does not know this site's key (the coordinator adds it by 'furlong certs DIR --add "
        "node.pub'), has revoked it, or another node uses it."
    )
