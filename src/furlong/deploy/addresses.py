"""Addresses and ports: how they are written, and whether only this machine is behind them."""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address

from furlong.errors import FurlongError

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


def is_address(text: str) -> bool:
    """Whether a text is an IP address, and not a name."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def checked_host(host: str) -> str:
    """A host name or an address in its usual spelling."""
    if is_address(host):
        return str(ip_address(host))
    if not _HOST.fullmatch(host.lower()) or re.fullmatch(r"[\d.]+", host):
        raise FurlongError(
            f"--host {host!r} is neither a host name nor an address. "
            "Give it without https:// and port, several with commas."
        )
    return host.lower()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise FurlongError(f"{address!r} is not an address like fl.example.org:8443")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of :func:`split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can be behind ``host``."""
    return ip_address(host).is_loopback if is_address(host) else host.lower() == "localhost"


def require_loopback(host: str) -> None:
    """Refuse to do without encryption what others can reach."""
    if not is_loopback(host):
        raise FurlongError(
            f"--insecure works on this machine only (127.0.0.1), not with {host}. "
            "'furlong certs' makes what a secure connection needs."
        )


def own_address(host: str) -> str:
    """Where this machine reaches what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """An error now; otherwise another program's answers would be taken for ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise FurlongError(
            f"cannot listen on {host}, port {port}: {error.strerror}. Choose another --port."
        ) from None
