"""The folder of a federation: what the coordinator and the sites need, and who may take part.

In the server's folder, DIR/server::

    ca.crt ca.key          the authority of this federation; ca.key signs server.pem and nothing
                           else, so it may be kept on another machine
    server.pem server.key  for the names and addresses under which nodes reach the server
    superexec.secret       lets ``furlong run`` act as the server's program
    nodes/NAME.pub         who may take part
    revoked/               keys that may not take part any more
    nginx.conf site.conf   the reverse proxy, alone or as a part of the system's
    ports.json             the ports of the proxy and of the SuperLink

One folder for each site, DIR/NAME: ca.crt, node.key, node.pub. A key is never replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from furlong.deploy import keys
from furlong.deploy.addresses import checked_host, is_address, is_loopback
from furlong.deploy.keys import PublicKey, check_node_name, read_public
from furlong.deploy.proxy import Ports, quoted, write_proxy
from furlong.errors import FurlongError


def make_certs(
    folder: Path,
    hosts: Sequence[str] = (),
    nodes: Sequence[str] = (),
    *,
    days: int = 825,
    listen: str | None = None,
    ports: Ports | None = None,
    renew: bool = False,
) -> list[Path]:
    """Make what is missing in ``folder`` and return the new files.

    ``hosts`` are the server's public names and addresses, ``nodes`` the names of sites for which a
    key is made. ``days`` is how long the server's certificate is valid; ``renew`` replaces the
    certificate (not its key). Safe to call again: with more nodes, or after an interruption.
    """
    if days < 1:
        raise FurlongError(f"--days is {days}; it must be at least 1")
    names = [checked_host(host) for host in hosts]
    if listen is None:  # a trial on one machine is not for the network to see
        own = [name for name in names if is_loopback(name)]
        listen = "0.0.0.0" if len(own) < max(1, len(names)) else "127.0.0.1"
    if not is_address(listen):
        raise FurlongError(f"--listen is {listen!r}; it must be an address like 0.0.0.0")
    for name in nodes:
        check_node_name(name)
    server = folder / "server"
    if not names and not (server / "server.pem").exists():
        raise FurlongError(
            f"{server} has no certificate yet: name the server as the sites will reach it, "
            "e.g. --host fl.example.org"
        )
    quoted(server.resolve())  # before anything is written
    for path in (folder, server, server / "nodes", server / "nginx"):
        _make_folder(path)
    made = keys.make_authority(server, days)
    made += keys.make_server_certificate(server, names, days, renew)
    made += keys.make_secret(server / "superexec.secret")
    certified = keys.certified_names(server / "server.pem")
    made += write_proxy(server, listen, certified, ports or Ports())
    for name in nodes:
        made += _make_node(folder, name)
    return made


def make_own_key(folder: Path, name: str) -> list[Path]:
    """At a site: its key pair, made where it will be used, so that only node.pub has to travel."""
    check_node_name(name)
    if (folder / "node.key").exists():
        raise FurlongError(
            f"{folder / 'node.key'} is there already and is not replaced. "
            f"Send {folder / 'node.pub'}, or choose another folder."
        )
    return keys.make_pair(_make_folder(folder), name)


def add_node(folder: Path, public: Path) -> PublicKey:
    """Let a site take part that made its own key; its name is the comment in ``public``.

    What the site needs in return, the authority's certificate, is put into a folder of its name.
    """
    server, key = _server_of(folder), read_public(public)
    _admit(server, key)
    _hand_out_authority(server, _make_folder(folder / key.name))
    return key


def revoke_node(folder: Path, name: str) -> Path:
    """Take a site's key out of those that may take part; for ever."""
    check_node_name(name)
    server = _server_of(folder)
    public = server / "nodes" / f"{name}.pub"
    if not public.exists():
        known = ", ".join(sorted(p.stem for p in public.parent.glob("*.pub"))) or "none"
        raise FurlongError(f"there is no node {name!r} in {public.parent}. There: {known}")
    digest = hashlib.sha256(public.read_bytes()).hexdigest()[:8]
    return public.replace(_make_folder(server / "revoked") / f"{name}-{digest}.pub")


def node_keys(server: Path) -> dict[bytes, str]:
    """The sites that may take part: name by key, the key as Flower reports it."""
    return {key.pem: key.name for key in map(read_public, sorted(server.glob("nodes/*.pub")))}


def _make_node(folder: Path, name: str) -> list[Path]:
    """A key pair in the site's folder, admitted at the server."""
    server, site = folder / "server", folder / name
    public = server / "nodes" / f"{name}.pub"
    if public.exists() and not (site / "node.key").exists():
        return []  # the site made its own key, or its folder was handed over and removed here
    made = keys.make_pair(_make_folder(site), name)
    key = read_public(site / "node.pub")
    if key.name != name:
        raise FurlongError(f"{site / 'node.pub'} names {key.name!r}, not {name!r}: move it away.")
    return [*made, *_admit(server, key), *_hand_out_authority(server, site)]


def _admit(server: Path, key: PublicKey) -> list[Path]:
    """Put a key among those that may take part, unless that would be a mistake."""
    if any(key.pem == read_public(path).pem for path in server.glob("revoked/*.pub")):
        raise FurlongError(
            f"the key of {key.name!r} was revoked and stays so: "
            f"move the folder {key.name} away, then make a new key."
        )
    known, path = node_keys(server), server / "nodes" / f"{key.name}.pub"
    if known.get(key.pem, key.name) != key.name:
        raise FurlongError(f"the key of {key.name!r} is the one of {known[key.pem]!r} already.")
    if key.pem in known:
        return []
    if path.exists():
        raise FurlongError(
            f"{path} holds another key. If that one is to go: "
            f"'furlong certs DIR --revoke {key.name}' first."
        )
    return [keys.write(path, f"{key.line}\n".encode())]


def _hand_out_authority(server: Path, site: Path) -> list[Path]:
    path = site / "ca.crt"
    return [] if path.exists() else [keys.write(path, (server / "ca.crt").read_bytes())]


def _server_of(folder: Path) -> Path:
    server = folder / "server"
    if not (server / "ca.crt").exists():
        raise FurlongError(f"{folder} has no server folder: 'furlong certs {folder} --host NAME'")
    return server


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FurlongError(f"cannot make the folder {path}: {error.strerror}") from None
    return path
