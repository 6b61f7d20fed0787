"""``furlong certs``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from furlong.cli.common import say
from furlong.errors import FurlongError


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
    listen: str | None = None,
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
        Address on which nginx will listen (default: 0.0.0.0, or this machine only if every --host
        is of this machine).
    public_port
        Port on which nginx will listen. Firewalls often let only 443 out, which needs root here.
    superlink_port
        Port of the SuperLink behind it.
    """
    from furlong.deploy.certs import add_node, make_certs, make_own_key, revoke_node
    from furlong.deploy.keys import read_public
    from furlong.deploy.proxy import Ports

    asked = [own_key is not None, add is not None, revoke is not None, any((host, nodes, renew))]
    if sum(asked) != 1:
        raise FurlongError(
            "say one thing: --host and --nodes (or --renew), --own-key, --add or --revoke."
        )
    if own_key is not None:
        for path in make_own_key(folder, own_key):
            say(f"made {path}")
        say(f"\nSend {folder / 'node.pub'} to the coordinator. node.key stays here.")
        fingerprint = read_public(folder / "node.pub").fingerprint
        say(f"Tell them this fingerprint by another way: {fingerprint}")
        say(f"Put the ca.crt that you get back into {folder}.")
    elif add is not None:
        key = add_node(folder, add)
        say(f"{key.name} may take part with the key {key.fingerprint}")
        say(f"Compare that with what the site says, and send it {folder / key.name / 'ca.crt'}")
    elif revoke is not None:
        kept = revoke_node(folder, revoke)
        say(f"{revoke} is refused within seconds by a furlong superlink (key kept in {kept}).")
    else:
        names, ports = _words(nodes), Ports(public_port, superlink_port)
        made = make_certs(
            folder, _words(host), names, days=days, listen=listen, ports=ports, renew=renew
        )
        for path in made:
            say(f"made {path}")
        if not made:
            say("everything was there already")
        for name in names:
            if (folder / name / "node.key").exists():
                say(f"\nTo {name}, by a safe way: the folder {folder / name} (has a private key)")
        say(f"\nStays here: {folder / 'server'}. Its ca.key is needed for --renew only;")
        say("keep it off this machine if you can. Next:")
        say(f"  furlong superlink --certs {shlex.quote(str(folder / 'server'))}")


def _words(given: str | None) -> list[str]:
    return [word.strip() for word in (given or "").split(",") if word.strip()]
