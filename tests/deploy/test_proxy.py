"""The reverse proxy: what it passes on, and which ports it has."""

from __future__ import annotations

import os
import posixpath
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from nginx import OUTSIDE, ask, needs_nginx, nginx

from furlong.errors import FurlongError

pytest.importorskip("cryptography", reason="Flower is not installed")

from furlong.deploy import addresses, certs, processes
from furlong.deploy.proxy import Ports, read_ports


def test_ports_are_kept(tmp_path: Path) -> None:
    ports = Ports(public=9443, superlink=9000)
    certs.make_certs(tmp_path / "fed", ["localhost"], ports=ports)
    said: list[str] = []
    assert read_ports(tmp_path / "fed/server", said.append) == ports
    assert said == []
    certs.make_certs(tmp_path / "fed", nodes=["a"])  # with other ports: nothing is replaced
    assert read_ports(tmp_path / "fed/server", said.append) == ports


def test_a_folder_of_an_older_version(tmp_path: Path) -> None:
    """There was no ports.json: the usual ports, and a word about it."""
    certs.make_certs(tmp_path / "fed", ["localhost"])
    path = tmp_path / "fed/server/ports.json"
    path.unlink()
    said: list[str] = []
    assert read_ports(path.parent, said.append) == Ports(8443, 8000)
    assert str(path) in said[0]
    assert certs.make_certs(tmp_path / "fed", ["localhost"]) == []  # nobody knows its ports


@pytest.mark.parametrize(
    "text", ["", "[]", "{}x", '{"public": 1, "other": 2}', '{"public": 0}', '{"public": "a"}']
)
def test_damaged_ports(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports.json").write_text(text)
    with pytest.raises(FurlongError, match=r"ports\.json does not hold two ports"):
        read_ports(tmp_path, print)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_bad_ports(port: int) -> None:
    with pytest.raises(FurlongError, match=f"{port} is not a port"):
        Ports(public=port)
    with pytest.raises(FurlongError, match=f"{port} is not a port"):
        Ports(superlink=port)


class Recorder(ThreadingHTTPServer):
    """Answers everything with 200, over TLS, and remembers what was asked."""

    daemon_threads = True

    def __init__(self, server: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Record)
        self.seen: list[tuple[str, str, bytes, str]] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server / "server.pem", server / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, *_: object) -> None:
        """A refused handshake is no news."""


class _Record(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        forwarded = self.headers.get("x-forwarded-for", "")
        self.server.seen.append((self.command, self.path, body, forwarded))
        self.send_response(200)
        self.send_header("content-length", "6000000")
        self.end_headers()
        self.wfile.write(b"y" * 6_000_000)

    do_GET = do_PUT = do_DELETE = do_POST

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def recording(server: Path, port: int) -> Iterator[Recorder]:
    recorder = Recorder(server, port)
    thread = threading.Thread(target=recorder.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        thread.join()
        recorder.server_close()


ODD = [  # passed on or not, but never as anything but a part of /v1/fleet/
    "/v1/control/../fleet/pull-messages", "/v1/fleet/%252e%252e/control/list-runs",
    "/v1/fleet/..%252fcontrol/list-runs", "/v1/fleet/..\\control\\list-runs",
    "/v1/fleet/..;/control/list-runs", "/v1/fleet/x?/../../control/list-runs",
    "/v1/fleet/#/../../control/list-runs", "/v1/fleet/%23/../../control/list-runs",
    "/v1/fleet/%3f/../../control/list-runs", "/v1/fleet/a%00/../../control/list-runs",
    "/v1/fleet/%0d%0aX:y", "/v1/fleet/%c0%ae%c0%ae/control/list-runs", "/v1//fleet//x",
    "https://127.0.0.1/v1/fleet/x", "/v1/fleet/.../control/list-runs", "/v1/fleet/%c3%a4",
]  # fmt: skip


@needs_nginx
def test_only_the_fleet_is_passed_on(tmp_path: Path) -> None:
    inside, outside = addresses.free_port(), addresses.free_port()
    folder = tmp_path / "with space"
    certs.make_certs(folder, ["localhost"], listen="127.0.0.1", ports=Ports(outside, inside))
    server = folder / "server"
    authority = server / "ca.crt"
    with nginx(server, outside):
        assert ask(outside, authority, "/v1/fleet/pull-messages")[0] == 502  # nobody there
        with recording(server, inside) as recorder:
            for path in OUTSIDE:
                for method in ("POST", "GET", "PUT"):
                    assert ask(outside, authority, path, method)[0] in (400, 404, 405), path
            for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD"):
                assert ask(outside, authority, "/v1/fleet/pull-messages", method)[0] == 403
            assert recorder.seen == []

            for path in ODD:
                ask(outside, authority, path)
            assert recorder.seen
            for method, path, _, _ in recorder.seen:
                assert method == "POST"
                decoded = unquote(path.partition("?")[0])
                assert decoded.startswith("/v1/fleet/")
                assert posixpath.normpath(decoded).startswith("/v1/fleet")

            recorder.seen.clear()
            piece = os.urandom(5_300_000)
            status, answer = ask(outside, authority, "/v1/fleet/push-object", body=piece)
            assert (status, len(answer)) == (200, 6_000_000)
            assert recorder.seen == [("POST", "/v1/fleet/push-object", piece, "127.0.0.1")]
            assert ask(outside, authority, "/v1/fleet/x", body=bytes(17_000_000))[0] == 413
            assert len(recorder.seen) == 1
        other = tmp_path / "other"  # somebody else listens on the SuperLink's port
        certs.make_certs(other, ["localhost"])
        with pytest.raises(FurlongError, match="has no certificate of"):
            processes.clock_ahead("127.0.0.1", outside, other / "server/ca.crt")
        with recording(other / "server", inside) as recorder:
            assert ask(outside, authority, "/v1/fleet/pull-messages")[0] == 502
            assert recorder.seen == []
    refused = (server / "nginx/refused.log").read_text()
    assert '"POST /v1/control/start-run HTTP/1.1" 404' in refused
    assert '"POST /v1/fleet/push-object HTTP/1.1" 200' not in refused
    for name in ("body", "proxy"):  # nothing was put on disk
        assert list((server / "nginx" / name).iterdir()) == []
