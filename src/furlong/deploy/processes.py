"""Flower's programs as child processes, which end when this process ends.

Flower is not imported here.
"""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from furlong.deploy.addresses import own_address
from furlong.errors import FurlongError

FLOWER = "1.41"
INSECURE = (
    "INSECURE: nothing is encrypted and any program on this machine can take part. "
    "For trying things out on one machine only."
)
QUIET = {  # nothing is reported to anybody, and nothing is installed
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_END_SECONDS = 10.0  # that a child has for ending by itself
# in the child, before it becomes the program: the kernel is to kill it when we are gone
_START = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def program(name: str) -> str:
    """The path of one of Flower's programs, first of this Python's own installation."""
    own = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise FurlongError(f"there is no program {name}: pip install 'furlong-fl[flower]'")
    return found


def require_flower() -> None:
    """An error in words if Flower is missing, or is not the version whose private names we use."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith(f"{FLOWER}."):
        raise FurlongError(
            f"Flower {FLOWER} is needed, and installed is {found}: pip install "
            "'furlong-fl[flower]'."
        )


def environment(home: Path) -> dict[str, str]:
    """What is set for Flower's programs: silent, nothing installed, their files in ``home``."""
    settings = {"FLWR_HOME": str(home.absolute()), **QUIET}
    given = {name.lower(): value for name, value in os.environ.items() if value}
    if given.keys() & {"http_proxy", "https_proxy", "all_proxy"}:
        # a hospital's proxy is for the way out, not for programs of this machine
        local = ",".join(filter(None, [given.get("no_proxy"), "localhost,127.0.0.1,::1"]))
        settings |= {"NO_PROXY": local, "no_proxy": local}
    return settings


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
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that ends with the block, and with this process, however it ends.

    SIGTERM leaves the block too. Output goes where ours goes, or is added to ``log``. Call it from
    the main thread: to the kernel, the end of the calling thread is ours.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_INTERNAL_")}
    start = [sys.executable, "-I", "-S", "-c", _START, str(os.getpid())]
    output = None if log is None else log.open("ab")
    with ExitStack() as stack:
        stack.enter_context(leaving())
        if output is not None:
            stack.callback(output.close)
        child = subprocess.Popen(
            [*start, *command],
            env=inherited | dict(extra),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            umask=0o077,
            start_new_session=True,  # Ctrl-C comes to us, and we end the child
        )
        stack.callback(_end, child)
        yield child


@contextmanager
def leaving() -> Iterator[None]:
    """SIGTERM leaves the block, with exit code 0."""
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


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
        child.wait(_END_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()
