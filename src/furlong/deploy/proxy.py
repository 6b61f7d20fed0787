"""The reverse proxy in front of a SuperLink: nginx's configuration, made from ``templates/``.

Which ports were chosen is kept in ports.json beside it, for our own commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from jinja2 import StrictUndefined, Template

from furlong.deploy.keys import write
from furlong.errors import FurlongError


@dataclass(frozen=True)
class Ports:
    """Where sites reach nginx, and where nginx reaches the SuperLink."""

    public: int = 8443
    superlink: int = 8000

    def __post_init__(self) -> None:
        for port in (self.public, self.superlink):
            if type(port) is not int or not 0 < port < 65536:
                raise FurlongError(f"{port} is not a port: choose 1 to 65535")


def read_ports(server: Path, say: Callable[[str], None]) -> Ports:
    """The ports of ports.json; of a folder from before there was one, the usual ones."""
    path, usual = server / "ports.json", Ports()
    try:
        return Ports(**json.loads(path.read_text()))
    except FileNotFoundError:
        say(
            f"there is no {path} (an older furlong made the folder): assuming port {usual.public} "
            f"for sites and {usual.superlink} for the SuperLink. If site.conf has others, write "
            f"them there: {json.dumps(asdict(usual))}"
        )
        return usual
    except (OSError, ValueError, TypeError, FurlongError) as error:
        raise FurlongError(
            f"{path} does not hold two ports like {json.dumps(asdict(usual))}: {error}"
        ) from None


def write_proxy(server: Path, listen: str, hosts: Sequence[str], ports: Ports) -> list[Path]:
    """nginx.conf, site.conf and ports.json, as far as they are missing."""
    server, made = server.resolve(), []
    if not (server / "nginx.conf").exists():
        made.append(write(server / "nginx.conf", _filled("nginx.conf", server)))
    if not (server / "site.conf").exists():  # the ports belong to it, so both are written
        about = json.dumps(asdict(ports)).encode() + b"\n"
        made.append(write(server / "ports.json", about, replace=True))
        address, *names = (f"[{name}]" if ":" in name else name for name in (listen, *hosts))
        text = _filled(
            "site.conf",
            server,
            listen=address,
            names=" ".join(names),
            public_port=ports.public,
            superlink_port=ports.superlink,
        )
        made.append(write(server / "site.conf", text))
    return made


def _filled(name: str, server: Path, **values: object) -> bytes:
    text = resources.files("furlong.deploy").joinpath(f"templates/{name}").read_text("utf-8")
    template = Template(text, undefined=StrictUndefined, keep_trailing_newline=True)
    filled: str = template.render(values, path=lambda below: quoted(server / below))
    return filled.encode()


def quoted(path: Path) -> str:
    """A path in nginx's language."""
    if not path.is_absolute() or re.search(r"[^ -~]|[\"'\\${};#]", str(path)):
        raise FurlongError(
            f"nginx cannot be given the path {path}: choose a folder whose name has "
            "no quotes, dollars, braces, semicolons, hashes, backslashes or other signs."
        )
    return f'"{path}"' if " " in str(path) else str(path)
