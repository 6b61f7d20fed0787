"""nginx in front of a federation, and requests to it."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from federations import wait

from furlong.deploy import processes

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="there is no nginx")


@contextmanager
def nginx(server: Path, port: int) -> Iterator[None]:
    """Run nginx with the configuration in the server's folder."""
    assert NGINX is not None
    command = [NGINX, "-e", "stderr", "-c", str(server / "nginx.conf")]
    with processes.running(command, {}, server / "nginx.txt") as child:

        def up() -> bool:
            assert child.poll() is None, (server / "nginx.txt").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait(up, 10, "nginx")
        yield


def ask(
    port: int, authority: Path, path: str, method: str = "POST", body: bytes = b""
) -> tuple[int, bytes]:
    """One request with exactly this path."""
    context = ssl.create_default_context(cafile=str(authority))
    with closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)) as c:
        c._validate_path = lambda _: None  # type: ignore[attr-defined]
        c.request(method, path, body, {"content-type": "application/protobuf"})
        answer = c.getresponse()
        return answer.status, answer.read()


CONTROL = ("list-runs", "start-run", "register-node", "unregister-node")
OUTSIDE = [  # paths that must not be passed on
    "/", "/health", "/docs", "/openapi.json", "/v1/runtime/acquire-task",
    *(f"/v1/control/{name}" for name in CONTROL),
    *(
        f"{start}/list-runs"
        for start in (
            "//v1/control", "/v1//control", "/v1/./control", "/V1/control", "/x/../v1/control",
            "/v1/fleet/../control", "/v1/fleet/%2e%2e/control", "/v1/fleet/%2E%2e%2fcontrol",
            "/v1/fleet/..%2fcontrol", "/v1/fleet//../control", "/v1/fleet/a/../../control",
            "/v1/fleet/../../v1/control", "/v1/fleet/./../control", "/v1/control/../control",
            "https://127.0.0.1/v1/control", "https://127.0.0.1/v1/fleet/../control",
            "/v1/%63ontrol", "/v1/fleet/%2e%2e/%63ontrol", "v1/control", "/v1/control?/v1/fleet",
            "/v1/control;/v1/fleet", "/v1/control%2f..%2ffleet/../control",
        )
    ),
]  # fmt: skip
