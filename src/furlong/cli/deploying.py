"""Commands for a federation across machines: certs, superlink."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from furlong.cli.common import console, err
from furlong.errors import FurlongError

if TYPE_CHECKING:
    from furlong.deploy.keys import ServerCertificate

LOOK_EVERY = 2.0  # seconds between looks at who may take part


def certs(
    folder: Annotated[Path, Parameter(name="DIR")],
    /,
    *,
    host: str | None = None,
    nodes: str | None = None,
    own_key: str | None = None,
    add: Path | None = None,
    revoke: str | None = None,
    renew: Annotated[bool, Parameter(negative=())] = False,
    days: int = 825,
    listen: str = "0.0.0.0",
    public_port: int = 8443,
    superlink_port: int = 8000,
) -> None:
    """Make certificates and keys for a federation, and the configuration of nginx.

    DIR/server stays at the server; DIR/NAME goes to that site. Nothing is replaced: the same
    command with other --nodes adds sites. A running ``furlong superlink`` notices.

    A site can make its own key, so that no private key travels: there ``furlong certs DIR
    --own-key NAME``; it sends DIR/node.pub, and here ``furlong certs DIR --add node.pub``.

    Parameters
    ----------
    folder
        Where the files are, or will be.
    host
        Names and addresses under which sites reach the server, separated by commas.
    nodes
        Names of sites for which a key is made here, separated by commas.
    own_key
        At a site: its name; makes DIR/node.key, which stays, and DIR/node.pub, to be sent.
    add
        A site's node.pub: lets it take part.
    revoke
        A site's name: its key is refused from now on, for ever.
    renew
        Replace the server's certificate (not its key); needs DIR/server/ca.key.
    days
        How long the server's certificate is valid.
    listen
        Address on which nginx will listen.
    public_port
        Port on which nginx will listen. Firewalls often let only 443 out, which needs root here.
    superlink_port
        Port of the SuperLink behind it.
    """
    from furlong.deploy import keys

    server_side = any((host, nodes, renew))
    asked = [own_key is not None, add is not None, revoke is not None, server_side]
    if sum(asked) != 1:
        raise FurlongError(
            "say one thing: --host and --nodes (or --renew), --own-key, --add or --revoke."
        )
    if own_key is not None:
        for path in keys.make_own_key(folder, own_key):
            _say(f"made {path}")
        key = keys.read_public(folder / "node.pub")
        _say(f"\nSend {folder / 'node.pub'} to the coordinator. node.key stays here.")
        _say(f"Tell them this fingerprint by another way: {key.fingerprint}")
        _say(f"Put the ca.crt that you get back into {folder}.")
    elif add is not None:
        name = keys.add_node(folder, add)
        key = keys.read_public(folder / "server" / "nodes" / f"{name}.pub")
        _say(f"{name} may take part with the key {key.fingerprint}")
        _say(f"Compare that with what the site says, and send it {folder / name / 'ca.crt'}")
    elif revoke is not None:
        kept = keys.revoke_node(folder, revoke)
        _say(f"{revoke} is refused within seconds by a furlong superlink (key kept in {kept}).")
    else:
        made = keys.make_certs(
            folder,
            _words(host),
            _words(nodes),
            days=days,
            listen=listen,
            public_port=public_port,
            superlink_port=superlink_port,
            renew=renew,
        )
        for path in made:
            _say(f"made {path}")
        _after_certs(folder, _words(nodes), bool(made))


def _after_certs(folder: Path, nodes: list[str], made: bool) -> None:
    if not made:
        _say("everything was there already")
    for name in nodes:
        if (folder / name / "node.key").exists():
            _say(f"\nTo {name}, by a safe way: the folder {folder / name} (it holds a private key)")
    _say(f"\nStays here: {folder / 'server'}. Its ca.key is needed for --renew only;")
    _say("keep it off this machine if you can. Next:")
    _say(f"  furlong superlink --certs {shlex.quote(str(folder / 'server'))}")


def superlink(
    *,
    certs: Path | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    state: Path | None = None,
    exposed: Annotated[bool, Parameter(negative=())] = False,
    insecure: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run the server side of a federation (Flower's SuperLink) until Ctrl-C.

    Prints Flower's command and starts it, then registers the sites whose keys are in CERTS/nodes
    and goes on looking there and in CERTS/revoked.

    Parameters
    ----------
    certs
        DIR/server of ``furlong certs DIR``.
    host
        Address to listen on. Nodes come through nginx, so this machine is enough.
    port
        Port to listen on (default: as nginx passes on to it, 8000).
    state
        Folder for the SuperLink's database (default: CERTS/state).
    exposed
        Allow a --host that others can reach. They can then admit nodes and start runs.
    insecure
        No certificates, no encryption, no authentication; on 127.0.0.1 only, for trials.
    """
    from furlong.deploy import processes
    from furlong.deploy.keys import SUPERLINK_PORT, make_secret, read_server, superlink_port
    from furlong.files import locked

    if insecure == (certs is not None):
        raise FurlongError("say --certs DIR/server ('furlong certs' makes it), or --insecure")
    about = None if certs is None else read_server(certs)
    if port is None:
        port = (None if certs is None else superlink_port(certs)) or SUPERLINK_PORT
    folder = state or (Path("superlink-state") if certs is None else certs / "state")
    command = processes.superlink_command(certs, folder, host=host, port=port, exposed=exposed)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if certs is None:
        _warn(processes.INSECURE)
    else:
        make_secret(certs / "superexec.secret")
    if not processes.is_loopback(host):
        _warn(
            f"EXPOSED: whoever reaches port {port} of {host} can admit nodes and start runs. "
            "Only your reverse proxy must reach it: see to that with a firewall."
        )
    if about is not None and about.until - datetime.now(UTC) < timedelta(days=30):
        _warn(f"{certs}/server.pem ends on {about.until:%Y-%m-%d}: 'furlong certs DIR --renew'")
    settings = processes.environment(folder / "flower")
    authority = None if certs is None else certs / "ca.crt"
    log = folder / "superlink.log"
    _say(processes.shown(command, settings))
    _say(f"what it says: {log}")
    processes.require_free_port(host, port)
    try:
        with locked(folder), processes.running(command, settings, log) as child:
            processes.wait_healthy(child, host, port, authority, log)
            processes.write_connection(folder / "flower", host, port, authority)
            look = (lambda: ()) if certs is None else processes.Roster(certs, folder).update
            for line in look():
                _say(line)
            _after_start(certs, about, processes.own_address(host), port)
            while child.poll() is None:
                for line in look():
                    _say(line)
                time.sleep(LOOK_EVERY)
            raise FurlongError(f"flower-superlink ended with code {child.returncode}; see {log}.")
    except KeyboardInterrupt:
        _say("ended")
        sys.exit(130)


def _after_start(certs: Path | None, about: ServerCertificate | None, host: str, port: int) -> None:
    """What to do next, in plain words."""
    from furlong.deploy.keys import PUBLIC_PORT, public_port, superlink_port

    here = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    run = f"furlong run CONFIG --engine flower --superlink {here}"
    node = "furlong node --data folder:/data/scans --agree CONFIG"
    _say("\nThe SuperLink is ready; Ctrl-C ends it. Next:")
    if certs is None or about is None:
        _say(f"  a node:  {node} --superlink {here} --insecure")
        _say(f"  a run:   {run} --insecure\n")
        return
    name = (about.hosts or ("127.0.0.1",))[0]
    name = f"[{name}]" if ":" in name else name
    outside = f"{name}:{public_port(certs) or PUBLIC_PORT}"
    nginx = shlex.join(["nginx", "-e", "stderr", "-c", str(certs.absolute() / "nginx.conf")])
    _say(f"  let sites in:  {nginx}")
    _say(f"  at a site:     {node} --superlink {outside} --certs FOLDER-OF-THE-SITE")
    _say(f"  a run:         {run} --certs {shlex.quote(str(certs))}\n")
    site = certs / "site.conf"
    if superlink_port(certs) not in (None, port):
        _warn(f"{site} passes on to another port than {port}: change proxy_pass there, or --port.")


def _words(given: str | None) -> list[str]:
    return [word.strip() for word in (given or "").split(",") if word.strip()]


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _warn(text: str) -> None:
    err.print(f"warning: {text}", style="bold red", markup=False, soft_wrap=True)
