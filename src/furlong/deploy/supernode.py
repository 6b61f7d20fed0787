"""A site's side of a federation: Flower's SuperNode, kept running, and its work done here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from furlong.deploy.addresses import free_port, require_loopback, split_address
from furlong.deploy.flower import serve
from furlong.deploy.flower_private import CONNECTED, REFUSED, Connection, Stuck
from furlong.deploy.keys import make_secret
from furlong.deploy.node import Site
from furlong.deploy.processes import (
    clock_ahead,
    environment,
    healthy,
    program,
    running,
    shown,
)
from furlong.engines.pool import keep_freed_memory
from furlong.errors import FurlongError
from furlong.files import locked


def supernode_command(certs: Path | None, superlink: str, secret: Path, *, port: int) -> list[str]:
    """``flower-supernode`` with a site's key; without ``certs``, insecure.

    ``secret`` keeps other users of the machine from acting as the node's executor, which finds the
    node at ``port`` of 127.0.0.1.
    """
    host, _ = split_address(superlink)
    command = [program("flower-supernode"), "--superlink", superlink]
    if certs is None:
        require_loopback(host)
        command += ["--insecure"]
    else:
        options = {"--root-certificates": "ca.crt", "--auth-supernode-private-key": "node.key"}
        for option, name in options.items():
            if not (certs / name).is_file():
                raise FurlongError(
                    f"there is no {certs / name}: --certs is the folder that the coordinator "
                    "made for this site (ca.crt), with the site's key in it (node.key)."
                )
            command += [option, str(certs.absolute() / name)]
    command += ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--superexec-auth-secret-file", str(secret.absolute())]


def keep_node(
    site: Site, superlink: str, certs: Path | None, patience: float, stall: float
) -> None:
    """Take part until interrupted; a SuperNode that ends or is stuck is started again.

    It is an error if none reaches the server for ``patience`` seconds. One is stuck if a question
    does not arrive whole within ``stall`` seconds.
    """
    keep_freed_memory()
    site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret, log = site.folder / "executor.secret", site.folder / "flower.log"
    with locked(site.folder):
        supernode_command(certs, superlink, secret, port=1)  # are the files there?
        count = site.check()
        make_secret(secret)
        if count is not None:
            site.say(f"{count:,} images; they stay here. Ctrl-C ends this node.")
        last = time.monotonic()
        try:
            while True:
                port = free_port()
                command = supernode_command(certs, superlink, secret, port=port)
                settings = environment(site.folder / "flower")
                os.environ.update(settings)  # no proxy for what is on this machine
                site.say(shown(command, settings))
                before = log.stat().st_size if log.exists() else 0
                with running(command, settings, log, signal.SIGTERM) as child:
                    while child.poll() is None and not healthy("127.0.0.1", port, None):
                        time.sleep(0.2)
                    watch = _Watch(child, log, before, superlink, site.say)
                    own = Connection(f"127.0.0.1:{port}", None, secret)
                    stuck = _served(site, own, watch, stall)
                if watch.connected:
                    last = time.monotonic()
                if stuck:
                    site.say(f"{stuck}. Starting flower-supernode again.")
                    continue
                ended = f"flower-supernode ended with code {child.returncode}"
                if time.monotonic() > last + patience:
                    raise FurlongError(f"{ended} (see {log}): {_why(superlink, certs, log)}")
                site.say(f"{ended}: {_why(superlink, certs, log)} Trying again.")
                time.sleep(3.0)
        finally:
            site.close()


def _served(site: Site, own: Connection, watch: _Watch, stall: float) -> str:
    """Do the work of a SuperNode until it ends; why it has to be started again, if it has not."""
    try:
        serve(site, own, watch.alive, stall)
    except Stuck as error:
        return str(error)
    return ""


class _Watch:
    """Says when a SuperNode has reached the server, or has not for a while."""

    def __init__(
        self,
        child: Popen[bytes],
        log: Path,
        before: int,
        superlink: str,
        say: Callable[[str], None],
    ) -> None:
        self._child, self._log, self._superlink, self._say = child, log, superlink, say
        self._from, self._told = before, False  # its log begins there
        self._began = self._looked = time.monotonic()
        self.connected = False

    def alive(self) -> bool:
        """Whether the SuperNode runs."""
        now = time.monotonic()
        if not self.connected and now > self._looked + 1:
            self._looked = now
            self.connected = CONNECTED in self._log.read_bytes()[self._from :]
            if self.connected:
                self._say(f"connected to {self._superlink}; waiting for work")
            elif now > self._began + 15 and not self._told:
                self._told = True
                self._say(f"{self._superlink} cannot be reached yet; trying on (see {self._log})")
        return self._child.poll() is None


def _why(superlink: str, certs: Path | None, log: Path) -> str:
    """What a SuperNode's end means; Flower does not always say."""
    if REFUSED in log.read_text(errors="replace")[-2000:]:
        return (
            "the server does not know this site's key (the coordinator adds it by 'furlong certs "
            "DIR --add node.pub'), has revoked it, or another node uses it."
        )
    authority = None if certs is None else certs / "ca.crt"
    ahead = clock_ahead(*split_address(superlink), authority)
    if ahead is not None and not -300 < ahead < 4:
        return f"this machine's clock is {ahead:.0f} s ahead of the server's; set it (NTP)."
    return "the server may have revoked this site's key."
