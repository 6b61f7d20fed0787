"""``furlong superlink``."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from furlong.cli.common import say, warn
from furlong.errors import FurlongError


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
    from furlong.deploy import addresses, processes
    from furlong.deploy.keys import make_secret, read_server
    from furlong.deploy.proxy import Ports, read_ports

    processes.require_flower()
    from furlong.deploy.superlink import keep_superlink, superlink_command

    if insecure == (certs is not None):
        raise FurlongError("say --certs DIR/server ('furlong certs' makes it), or --insecure")
    about = None if certs is None else read_server(certs)
    ports = Ports() if certs is None else read_ports(certs, warn)
    port = port or ports.superlink
    folder = state or (Path("superlink-state") if certs is None else certs / "state")
    command = superlink_command(certs, folder, host=host, port=port, exposed=exposed)
    if certs is None:
        warn(processes.INSECURE)
    else:
        make_secret(certs / "superexec.secret")
    if not addresses.is_loopback(host):
        warn(
            f"EXPOSED: whoever reaches port {port} of {host} can admit nodes and start runs. "
            "Only your reverse proxy must reach it: see to that with a firewall."
        )
    if about is not None and about.until - datetime.now(UTC) < timedelta(days=30):
        warn(f"{certs}/server.pem ends on {about.until:%Y-%m-%d}: 'furlong certs DIR --renew'")
    here = addresses.join_address(addresses.own_address(host), port)

    def ready() -> None:
        """What to do next, in plain words."""
        run = f"furlong run CONFIG --engine flower --superlink {here}"
        node = "furlong node --data folder:/data/scans --agree CONFIG"
        say("\nThe SuperLink is ready; Ctrl-C ends it. Next:")
        if certs is None or about is None:
            say(f"  a node:  {node} --superlink {here} --insecure")
            say(f"  a run:   {run} --insecure\n")
            return
        outside = addresses.join_address((about.hosts or ("127.0.0.1",))[0], ports.public)
        nginx = shlex.join(["nginx", "-e", "stderr", "-c", str(certs.absolute() / "nginx.conf")])
        say(f"  let sites in:  {nginx}")
        say(f"  at a site:     {node} --superlink {outside} --certs FOLDER-OF-THE-SITE")
        say(f"  a run:         {run} --certs {shlex.quote(str(certs))}\n")
        if port != ports.superlink:
            warn(
                f"nginx passes on to port {ports.superlink}, and this is {port}: leave --port out, "
                f"or change proxy_pass in {certs / 'site.conf'} and {certs / 'ports.json'}."
            )

    try:
        keep_superlink(command, certs, folder, host, port, say, ready)
    except KeyboardInterrupt:
        say("ended")
        sys.exit(130)
