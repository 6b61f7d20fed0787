"""The server side of a federation: Flower's SuperLink, and the nodes that it knows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from furlong.deploy import processes
from furlong.deploy.addresses import (
    is_loopback,
    join_address,
    own_address,
    require_free_port,
    require_loopback,
)
from furlong.deploy.flower_private import Connection, SuperLinkNodes
from furlong.deploy.registry import Registry
from furlong.errors import FurlongError
from furlong.files import locked

LOOK_EVERY = 2.0  # seconds between looks at who may take part


def superlink_command(
    certs: Path | None, state: Path, *, host: str = "127.0.0.1", port: int, exposed: bool = False
) -> list[str]:
    """``flower-superlink`` with TLS and node authentication; without ``certs``, insecure.

    It is started by ``flower_store``, which keeps large objects in files; its options are Flower's.
    """
    if certs is None:
        require_loopback(host)
    elif not is_loopback(host) and not exposed:
        raise FurlongError(
            f"--host {host} would let others reach the SuperLink's control requests: whoever does "
            "can admit nodes and start runs. Leave it at 127.0.0.1 and put nginx in front (see "
            "nginx.conf beside the certificates). If nginx is on another machine, and a firewall "
            "lets only that one in: --exposed."
        )
    command = [sys.executable, "-m", "furlong.deploy.flower_store"]
    command += ["--host", host, "--port", str(port)]
    command += ["--database", str(state.absolute() / "superlink.db"), "--isolation", "process"]
    command += ["--disable-runtime-dependency-installation"]
    if certs is None:
        return [*command, "--insecure"]
    files = {
        "--ssl-ca-certfile": "ca.crt",
        "--ssl-certfile": "server.pem",
        "--ssl-keyfile": "server.key",
        "--superexec-auth-secret-file": "superexec.secret",
    }
    for option, name in files.items():
        command += [option, str(certs.absolute() / name)]
    return [*command, "--enable-supernode-auth"]


def write_connection(home: Path, address: str, authority: Path | None) -> None:
    """Flower's own configuration file, which tells its command ``flwr`` where the SuperLink is."""
    secured = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
    known = {"default": "furlong", "furlong": {"address": address, **secured}}
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": known}))


def keep_superlink(
    command: list[str],
    certs: Path | None,
    state: Path,
    host: str,
    port: int,
    say: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    """Run a SuperLink until it ends, which is an error, and keep its list of nodes up to date.

    ``ready()`` is called once it answers and knows the nodes whose keys are in ``certs``.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    address, log = join_address(own_address(host), port), state / "superlink.log"
    authority = None if certs is None else certs.absolute() / "ca.crt"
    nodes = SuperLinkNodes(Connection(address, authority))
    registry = None if certs is None else Registry(certs, nodes)
    settings = processes.environment(state / "flower")
    os.environ.update(settings)  # no proxy for what is on this machine
    say(processes.shown(command, settings))
    say(f"what it says: {log}")
    require_free_port(host, port)
    with locked(state), processes.running(command, settings, log) as child:
        processes.wait_healthy(child, host, port, authority, log)
        write_connection(state / "flower", address, authority)
        told = False
        while child.poll() is None:
            for line in () if registry is None else registry.update():
                say(line)
            if not told:
                ready()
                told = True
            time.sleep(LOOK_EVERY)
        raise FurlongError(f"flower-superlink ended with code {child.returncode}; see {log}.")
