"""Run Flower's programs for a deployment: their commands, their life, and who may take part.

Flower is not imported here; its programs are started as children and end when this process ends.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import tomli_w

from furlong.deploy.keys import PublicKey, read_public
from furlong.errors import FurlongError

INSECURE = (
    "INSECURE: nothing is encrypted and any program on this machine can take part. "
    "For trying things out on one machine only."
)
_PROXIES = [
    name for kind in ("http_proxy", "https_proxy", "all_proxy") for name in (kind, kind.upper())
]
_CONNECTION = "furlong"  # the name of the SuperLink in Flower's own configuration
_TROUBLE = "not registered (furlong superlink tries again at its next start)"
_PATIENCE = 10.0  # seconds that a child has for ending by itself
# in the child, before it becomes the program: the kernel is to kill it when we are gone
_START = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(sys.argv[2]))  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


# ---------------------------------------------------------------- addresses


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise FurlongError(f"{address!r} is not an address like fl.example.org:8443")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can be behind ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_address(host: str) -> str:
    """Where this machine reaches what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def require_loopback(host: str) -> None:
    if not is_loopback(host):
        raise FurlongError(
            f"--insecure works on this machine only (127.0.0.1), not with {host}. "
            "'furlong certs' makes what a secure connection needs."
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody uses at the moment."""
    with socket.create_server((host, 0)) as server:
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


# ---------------------------------------------------------------- commands


def program(name: str) -> str:
    """The path of one of Flower's programs, first of this Python's own installation."""
    own = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise FurlongError(f"there is no program {name}: pip install 'furlong-fl[flower]'")
    return found


def environment(home: Path) -> dict[str, str]:
    """What is set for Flower's programs: silent, nothing installed, their files in ``home``."""
    settings = {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    if any(os.environ.get(name) for name in _PROXIES):
        # a hospital's proxy is for the way out, not for programs of this machine
        before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        local = ",".join(filter(None, [before, "localhost,127.0.0.1,::1"]))
        settings |= {"NO_PROXY": local, "no_proxy": local}
    return settings


def superlink_command(
    certs: Path | None,
    state: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    exposed: bool = False,
) -> list[str]:
    """``flower-superlink`` with TLS and node authentication; without ``certs``, insecure."""
    if certs is None:
        require_loopback(host)
    elif not is_loopback(host) and not exposed:
        raise FurlongError(
            f"--host {host} would let others reach the SuperLink's control requests: whoever does "
            "can admit nodes and start runs. Leave it at 127.0.0.1 and put nginx in front (see "
            "nginx.conf beside the certificates). If nginx is on another machine, and a firewall "
            "lets only that one in: --exposed."
        )
    command = [program("flower-superlink"), "--host", host, "--port", str(port)]
    command += ["--database", str(state.absolute() / "superlink.db"), "--isolation", "process"]
    command += ["--disable-runtime-dependency-installation"]
    if certs is None:
        return [*command, "--insecure"]
    certs = certs.absolute()
    command += ["--ssl-ca-certfile", str(certs / "ca.crt")]
    command += ["--ssl-certfile", str(certs / "server.pem")]
    command += ["--ssl-keyfile", str(certs / "server.key")]
    command += ["--enable-supernode-auth"]
    return [*command, "--superexec-auth-secret-file", str(certs / "superexec.secret")]


def supernode_command(
    certs: Path | None,
    superlink: str,
    secret: Path,
    *,
    port: int,
    config: Mapping[str, str | int] | None = None,
) -> list[str]:
    """``flower-supernode`` with a site's key; without ``certs``, insecure.

    ``secret`` (made by ``certificates.make_secret``) keeps other users of the machine from acting
    as the node's executor, which finds the node at ``port`` of 127.0.0.1.
    """
    host, _ = split_address(superlink)
    command = [program("flower-supernode"), "--superlink", superlink]
    if certs is None:
        require_loopback(host)
        command += ["--insecure"]
    else:
        for name in ("ca.crt", "node.key"):
            if not (certs / name).is_file():
                raise FurlongError(
                    f"there is no {certs / name}: --certs is the folder that the coordinator "
                    "made for this site (ca.crt), with the site's key in it (node.key)."
                )
        command += ["--root-certificates", str(certs.absolute() / "ca.crt")]
        command += ["--auth-supernode-private-key", str(certs.absolute() / "node.key")]
    command += ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--superexec-auth-secret-file", str(secret.absolute())]
    if config:
        words = [f"{key}={_setting(key, value)}" for key, value in config.items()]
        command += ["--node-config", " ".join(words)]
    return command


def _setting(key: str, value: str | int) -> str:
    """A value in Flower's language for settings, which has no escapes."""
    if isinstance(value, int):
        return str(value).lower()
    if not value.isprintable() or set(value) & set("\"\\'"):
        raise FurlongError(f"{key} is {value!r}; it must not have quotes or backslashes")
    return f'"{value}"'


def shown(command: Sequence[str], extra: Mapping[str, str]) -> str:
    """A command as it can be copied into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in extra.items()]
    return " ".join([*settings, shlex.join(command)])


# ---------------------------------------------------------------- children


@contextmanager
def running(
    command: Sequence[str],
    extra: Mapping[str, str],
    log: Path | None = None,
    orphaned: signal.Signals = signal.SIGKILL,
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that ends with the block, and with this process, however it ends.

    SIGTERM leaves the block too, with exit code 0. Output goes where ours goes, or is added to
    ``log``. If we crash, the kernel sends ``orphaned``: SIGTERM for a SuperNode, which then says
    goodbye; without that, the SuperLink refuses the same node for a minute. Call it from the main
    thread: to the kernel, the end of the calling thread is ours.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_INTERNAL_")}
    start = [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), str(int(orphaned))]
    output = None if log is None else log.open("ab")
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        signal.signal(signal.SIGTERM, _leave)
    try:
        child = subprocess.Popen(
            [*start, *command],
            env=inherited | dict(extra),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            umask=0o077,
            start_new_session=True,  # Ctrl-C comes to us, and we end the child
        )
        try:
            yield child
        finally:
            _end(child)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
        if output is not None:
            output.close()


def wait_healthy(
    child: subprocess.Popen[bytes],
    host: str,
    port: int,
    authority: Path | None,
    log: Path,
    patience: float = 60.0,
) -> None:
    """Wait until the child answers; with ``authority`` (ca.crt), over TLS that is verified."""
    host = own_address(host)
    where = f"{host}, port {port}"
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if child.poll() is not None:
            raise FurlongError(
                f"the program for {where} ended with code {child.returncode}; see {log}."
            )
        if healthy(host, port, authority):
            return
        time.sleep(0.2)
    raise FurlongError(f"nothing answers at {where} after {patience:.0f} s.")


def healthy(host: str, port: int, authority: Path | None) -> bool:
    """Whether one of Flower's programs answers there."""
    answer = _answer(host, port, authority)
    return answer is not None and answer.status == 200


def clock_ahead(host: str, port: int, authority: Path | None) -> float | None:
    """Seconds by which our clock is ahead of that of the server or its nginx, if it answers.

    A SuperLink refuses nodes that are more than 5 s ahead or 305 s behind, and they end without
    saying why.
    """
    answer = _answer(host, port, authority)
    date = None if answer is None else answer.headers.get("date")
    return None if date is None else time.time() - parsedate_to_datetime(date).timestamp()


def _answer(host: str, port: int, authority: Path | None) -> http.client.HTTPResponse | None:
    # not with a library that asks the environment for proxies
    if authority is None:
        connection = http.client.HTTPConnection(host, port, timeout=5)
    else:
        context = ssl.create_default_context(cafile=str(authority))
        connection = http.client.HTTPSConnection(host, port, timeout=5, context=context)
    with closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise FurlongError(
                f"what answers at {host}:{port} has no certificate of {authority}: "
                f"{error.verify_message}"
            ) from None
        except (OSError, http.client.HTTPException):
            return None


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(0)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


# ---------------------------------------------------------------- who may take part


@dataclass(frozen=True)
class Registered:
    """A node as the SuperLink has it."""

    number: int
    status: str

    @property
    def revoked(self) -> bool:
        """Whether its key can never be used again."""
        return self.status == "unregistered"


@dataclass
class Roster:
    """Keeps the SuperLink's list of nodes in step with the files in ``certs``.

    Uses Flower's own command, for which ``write_connection`` says where the SuperLink is.
    A key in nodes/ is registered, a key in revoked/ unregistered. That a file is gone means
    nothing: Flower cannot take a key back, so a slip must not revoke one.
    """

    certs: Path
    state: Path
    _said: dict[Path, str] = field(default_factory=dict)

    def update(self) -> Iterator[str]:
        """Register and unregister what has changed; yields what is new about the nodes."""
        database = self.state / "superlink.db"
        try:
            known = registered(database)
        except FurlongError as error:  # no reason to end the SuperLink: look again later
            if self._said.get(database) != str(error):
                self._said[database] = str(error)
                yield str(error)
            return
        for path in sorted(self.certs.glob("revoked/*.pub")):
            yield from self._told(path, known, self._revoke)
        for path in sorted(self.certs.glob("nodes/*.pub")):
            yield from self._told(path, known, self._admit)

    def _told(
        self,
        path: Path,
        known: Mapping[bytes, Registered],
        act: Callable[[Path, PublicKey, Registered | None], str],
    ) -> Iterator[str]:
        """The news about one key; one that cannot be used must not stop the others."""
        if self._said.get(path, "").startswith(_TROUBLE):
            return
        name = path.stem
        try:
            key = read_public(path)
            name = key.name
            status = act(path, key, known.get(key.pem))
        except FurlongError as error:
            trouble = _TROUBLE if path.parent.name == "nodes" else "NOT YET REVOKED"
            status = f"{trouble}: {error}"
        if status and self._said.get(path) != status:
            self._said[path] = status
            yield f"{name}: {status}"

    def _revoke(self, path: Path, key: PublicKey, node: Registered | None) -> str:  # noqa: ARG002
        if node is None or node.revoked:
            return ""
        self._flower("unregister", str(node.number))
        return "revoked"

    def _admit(self, path: Path, key: PublicKey, node: Registered | None) -> str:
        if node is None:
            self._flower("register", str(path.absolute()), "--name", key.name)
            return "registered"
        if node.revoked:
            return "was unregistered, and its key cannot be used again: make another"
        return node.status

    def _flower(self, action: str, *words: str) -> None:
        home = self.state / "flower"
        command = [program("flwr"), "supernode", action, words[0], _CONNECTION, *words[1:]]
        try:
            done = subprocess.run(
                [*command, "--format", "json"],
                env=os.environ | environment(home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FurlongError(f"{shlex.join(command)}: no answer within 120 s") from None
        try:
            answer = json.loads(done.stdout)  # the exit code is 0 even if it failed
        except ValueError:
            answer = {}
        if not answer.get("success"):
            said = answer.get("error-message") or (done.stdout + done.stderr).strip()[-500:]
            raise FurlongError(f"{shlex.join(command)}: {said}")


def write_connection(home: Path, host: str, port: int, authority: Path | None) -> None:
    """Flower's own configuration file, for its command ``flwr``."""
    host = own_address(host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    about: dict[str, str | bool] = {"address": address}
    if authority is None:
        about["insecure"] = True
    else:
        about["root-certificates"] = str(authority.absolute())
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = tomli_w.dumps({"superlink": {"default": _CONNECTION, _CONNECTION: about}})
    (home / "config.toml").write_text(text)


def registered(database: Path) -> dict[bytes, Registered]:
    """All nodes that the SuperLink knows, by key, from its database: its command gives no keys."""
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as link:
            rows = link.execute(
                "SELECT public_key, node_id, status, online_until FROM node"
            ).fetchall()
    except sqlite3.Error as error:
        raise FurlongError(f"cannot read the SuperLink's list in {database}: {error}") from None
    now = time.time()
    return {
        bytes(key): Registered(
            number % 2**64,  # stored with a sign
            "offline" if status == "online" and (until or 0) < now else status,
        )
        for key, number, status, until in rows
    }
