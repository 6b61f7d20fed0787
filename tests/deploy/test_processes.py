"""A deployment's files and programs: certificates, keys, nginx, SuperLink, SuperNodes."""

from __future__ import annotations

import http.client
import json
import os
import posixpath
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from furlong.cli import main
from furlong.errors import FurlongError

pytest.importorskip("cryptography", reason="Flower is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from furlong.deploy import keys, processes

SRC = Path(__file__).parents[2] / "src"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
FLOWER = shutil.which("flower-superlink", path=str(Path(sys.executable).parent))
needs_nginx = pytest.mark.skipif(NGINX is None, reason="there is no nginx")
needs_flower = pytest.mark.skipif(FLOWER is None, reason="Flower is not installed")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    keys.make_certs(folder, ["fl.example.org", "192.0.2.7"], ["hospital-a", "hospital-b"])
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def wait(holds: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.1)


# ---------------------------------------------------------------- certificates and keys


def test_layout_and_modes(made: Path) -> None:
    assert set(contents(made)) == {
        *(f"server/{n}" for n in ("ca.crt", "ca.key", "server.pem", "server.key")),
        *(f"server/{n}" for n in ("superexec.secret", "nginx.conf", "site.conf")),
        *(f"server/nodes/hospital-{x}.pub" for x in "ab"),
        *(f"hospital-{x}/{n}" for x in "ab" for n in ("ca.crt", "node.key", "node.pub")),
    }
    for path in made.rglob("*"):
        if path.is_dir():
            assert mode(path) == 0o700
        elif path.suffix in (".key", ".secret"):
            assert mode(path) == 0o600
    assert len((made / "server/superexec.secret").read_bytes()) == 64
    for name in ("hospital-a", "hospital-b"):
        assert (made / name / "ca.crt").read_bytes() == (made / "server/ca.crt").read_bytes()


def test_the_chain_and_the_names(made: Path) -> None:
    load = x509.load_pem_x509_certificate
    own = load((made / "server/server.pem").read_bytes())
    authority = load((made / "server/ca.crt").read_bytes())
    own.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    for name in ("fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"):
        assert handshake(made / "server", made / "hospital-a/ca.crt", name)
    assert not handshake(made / "server", made / "hospital-a/ca.crt", "other.example.org")
    about = keys.read_server(made / "server")
    assert about.hosts == ("fl.example.org", "192.0.2.7")


def handshake(server: Path, authority: Path, name: str) -> bool:
    """Whether a client that trusts ``authority`` accepts the server as ``name``; in memory."""
    offer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    offer.load_cert_chain(server / "server.pem", server / "server.key")
    trust = ssl.create_default_context(cafile=str(authority))
    trust.verify_flags |= ssl.VERIFY_X509_STRICT  # as newer Pythons do
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = offer.wrap_bio(a, b, server_side=True)
    ours = trust.wrap_bio(b, a, server_hostname=name)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return ours.version() == "TLSv1.3"


def test_node_keys_load_and_belong_together(made: Path) -> None:
    key = serialization.load_ssh_private_key((made / "hospital-a/node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert keys.node_keys(made / "server")[pem] == "hospital-a"
    assert set(keys.node_keys(made / "server").values()) == {"hospital-a", "hospital-b"}


def test_fingerprint_is_the_one_of_openssh(made: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen")
    path = made / "hospital-a/node.pub"
    printed = subprocess.check_output(["ssh-keygen", "-lf", path], text=True)
    assert keys.read_public(path).fingerprint in printed.split()


def test_again_changes_nothing_and_nodes_can_be_added(made: Path) -> None:
    before = contents(made)
    assert keys.make_certs(made, ["fl.example.org"], ["hospital-b", "hospital-a"]) == []
    assert contents(made) == before
    (made / "server/ca.key").unlink()  # kept elsewhere: not needed for a node
    del before["server/ca.key"]
    new = keys.make_certs(made, nodes=["hospital-c"])
    after = contents(made)
    assert {key: after[key] for key in before} == before
    assert {str(p.relative_to(made)) for p in new} == set(after) - set(before)
    assert "server/nodes/hospital-c.pub" in after


@pytest.mark.parametrize("lost", ["server/server.pem", "server/ca.crt", "hospital-a/node.pub"])
def test_an_interrupted_command_can_be_repeated(made: Path, lost: str) -> None:
    keys = {k: v for k, v in contents(made).items() if k.endswith((".key", ".secret"))}
    (made / lost).unlink()
    if lost == "server/ca.crt":  # it came first: nothing else was there
        (made / "server/server.pem").unlink()
    keys.make_certs(made, ["fl.example.org"], ["hospital-a"])
    keys.read_server(made / "server")
    after = contents(made)
    assert {key: after[key] for key in keys} == keys


def test_renewing(made: Path) -> None:
    before = contents(made)
    with pytest.raises(FurlongError, match=r"not for new\.example\.org: --renew"):
        keys.make_certs(made, ["new.example.org"])
    assert contents(made) == before
    keys.make_certs(made, ["new.example.org"], renew=True, days=10)
    after = contents(made)
    assert {key for key in before if before[key] != after[key]} == {"server/server.pem"}
    about = keys.read_server(made / "server")
    assert about.hosts == ("new.example.org",)
    (made / "server/ca.key").unlink()
    with pytest.raises(FurlongError, match=r"ca\.key is needed"):
        keys.make_certs(made, renew=True)


def test_a_mixed_up_server_folder_is_noticed(made: Path, tmp_path: Path) -> None:
    server = made / "server"
    other = tmp_path / "other"
    keys.make_certs(other, ["fl.example.org"])
    for name, said in (("ca.crt", "was not signed by"), ("server.key", "do not belong together")):
        kept = (server / name).read_bytes()
        shutil.copy(other / "server" / name, server / name)
        with pytest.raises(FurlongError, match=said):
            keys.read_server(server)
        (server / name).write_bytes(kept)
    with pytest.raises(FurlongError, match=f"Did you mean {re.escape(str(server))}"):
        keys.read_server(made)
    (server / "server.pem").write_text("no certificate")
    with pytest.raises(FurlongError, match="is not a certificate"):
        keys.read_server(server)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", "a b", "-a", "A", "a.b", "server", "x" * 33, "a\n", "ä"],
)
def test_bad_node_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "fed"
    with pytest.raises(FurlongError, match="cannot be a node's name"):
        keys.make_certs(folder, ["localhost"], ["good", name])
    with pytest.raises(FurlongError, match="cannot be a node's name"):
        keys.make_own_key(folder, name)
    assert not folder.exists()


@pytest.mark.parametrize(
    "host",
    ["", "https://a", "a:8443", "*.a", "a b", "-a", "300.1.2.3", "1.2.3", "a..b", "a;b", "x" * 64],
)
def test_bad_hosts(tmp_path: Path, host: str) -> None:
    with pytest.raises(FurlongError, match="neither a host name nor an address"):
        keys.make_certs(tmp_path / "fed", [host])
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"days": 0}, "--days is 0"),
        ({"public_port": 0}, "0 is not a port"),
        ({"superlink_port": 65536}, "65536 is not a port"),
        ({"listen": "everywhere"}, "--listen is 'everywhere'"),
    ],
)
def test_bad_settings(tmp_path: Path, options: dict[str, int], said: str) -> None:
    with pytest.raises(FurlongError, match=said):
        keys.make_certs(tmp_path / "fed", ["localhost"], **options)  # type: ignore[arg-type]
    with pytest.raises(FurlongError, match="nginx cannot be given the path"):
        keys.make_certs(tmp_path / "a$b", ["localhost"])
    assert list(tmp_path.iterdir()) == []


def test_a_site_makes_its_own_key(made: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert {p.name for p in keys.make_own_key(site, "hospital-c")} == {
        "node.key",
        "node.pub",
    }
    assert mode(site / "node.key") == 0o600
    with pytest.raises(FurlongError, match="not replaced"):
        keys.make_own_key(site, "hospital-c")
    assert keys.add_node(made, site / "node.pub") == "hospital-c"
    assert keys.add_node(made, site / "node.pub") == "hospital-c"  # harmless
    assert set(contents(made / "hospital-c")) == {"ca.crt"}
    assert keys.make_certs(made, nodes=["hospital-c"]) == []  # no second key
    assert set(contents(made / "hospital-c")) == {"ca.crt"}

    other = tmp_path / "other"
    keys.make_own_key(other, "hospital-c")
    with pytest.raises(FurlongError, match="holds another key"):
        keys.add_node(made, other / "node.pub")
    line = (site / "node.pub").read_text().replace("hospital-c", "hospital-d")
    (other / "node.pub").write_text(line)
    with pytest.raises(FurlongError, match="is the one of 'hospital-c' already"):
        keys.add_node(made, other / "node.pub")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a public key"),
        ("ecdsa-sha2-nistp384 AAAA x", "is not a public key"),
        ("\xff", "is not a public key"),
        ("{key}", "the comment of"),
        ("{key} ../../x", "the comment of"),
        ("{key} server", "the comment of"),
        ("{key} me@here", "the comment of"),
        ("{key} two words", "the comment of"),
        ("{private}", "is not a public key"),
        ("{ed25519} name", "type ssh-ed25519, not ECDSA"),
    ],
)
def test_bad_public_keys(made: Path, tmp_path: Path, text: str, said: str) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    other = Ed25519PrivateKey.generate().public_key()
    format_ = serialization.PublicFormat.OpenSSH
    path = tmp_path / "node.pub"
    text = text.format(
        key=" ".join((made / "hospital-a/node.pub").read_text().split()[:2]),
        private=(made / "hospital-a/node.key").read_text(),
        ed25519=other.public_bytes(serialization.Encoding.OpenSSH, format_).decode(),
    )
    path.write_text(text, encoding="latin-1")
    before = contents(made)
    with pytest.raises(FurlongError, match=said):
        keys.add_node(made, path)
    assert contents(made) == before


def test_a_revoked_key_stays_revoked(made: Path) -> None:
    kept = keys.revoke_node(made, "hospital-b")
    assert kept.parent.name == "revoked"
    assert list(keys.node_keys(made / "server").values()) == ["hospital-a"]
    with pytest.raises(FurlongError, match="was revoked and stays so"):
        keys.make_certs(made, nodes=["hospital-b"])
    with pytest.raises(FurlongError, match="was revoked and stays so"):
        keys.add_node(made, made / "hospital-b/node.pub")
    with pytest.raises(FurlongError, match="There: hospital-a"):
        keys.revoke_node(made, "hospital-b")
    shutil.rmtree(made / "hospital-b")
    keys.make_certs(made, nodes=["hospital-b"])  # a new key
    keys.revoke_node(made, "hospital-b")
    assert len(list((made / "server/revoked").iterdir())) == 2


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert processes.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example"])
@needs_flower
def test_insecure_and_exposed_only_with_care(made: Path, tmp_path: Path, host: str) -> None:
    assert not processes.is_loopback(host)
    with pytest.raises(FurlongError, match="works on this machine only"):
        processes.superlink_command(None, tmp_path, host=host)
    with pytest.raises(FurlongError, match="works on this machine only"):
        processes.superlink_command(None, tmp_path, host=host, exposed=True)
    with pytest.raises(FurlongError, match="control requests"):
        processes.superlink_command(made / "server", tmp_path, host=host)
    processes.superlink_command(made / "server", tmp_path, host=host, exposed=True)
    name = f"[{host}]:80" if ":" in host else f"{host}:80"
    with pytest.raises(FurlongError, match="works on this machine only"):
        processes.supernode_command(None, name, tmp_path / "secret", port=1)


@needs_flower
def test_commands_are_safe_by_default(made: Path, tmp_path: Path) -> None:
    words = processes.superlink_command(made / "server", tmp_path / "state")
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--isolation") + 1] == "process"
    for word in ("--enable-supernode-auth", "--disable-runtime-dependency-installation"):
        assert word in words
    assert "--insecure" not in words
    files = {word: words[words.index(word) + 1] for word in words if word.startswith("--ssl-")}
    assert {Path(file).name for file in files.values()} == {"ca.crt", "server.pem", "server.key"}

    site, secret = made / "hospital-a", tmp_path / "secret"
    words = processes.supernode_command(
        site, "fl.example.org:8443", secret, port=9000, config={"name": "a b", "partition-id": 0}
    )
    assert words[words.index("--node-config") + 1] == 'name="a b" partition-id=0'
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--auth-supernode-private-key") + 1] == str(site / "node.key")
    assert "--insecure" not in words
    assert shlex.split(processes.shown(words, {"FLWR_HOME": "/a b"})) == ["FLWR_HOME=/a b", *words]
    for bad in ('a"b', "a'b", "a\\b", "a\nb"):
        with pytest.raises(FurlongError, match="quotes or backslashes"):
            processes.supernode_command(site, "h:1", secret, port=9000, config={"name": bad})
    with pytest.raises(FurlongError, match=r"there is no .*node\.key"):
        processes.supernode_command(made / "server", "h:1", secret, port=9000)


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:0", "a:65536", "https://a:1", "a:b"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(FurlongError, match="is not an address like"):
        processes.split_address(address)


def test_addresses() -> None:
    assert processes.split_address("fl.example.org:8443") == ("fl.example.org", 8443)
    assert processes.split_address("[::1]:80") == ("::1", 80)


def test_proxies_are_not_for_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert "NO_PROXY" not in processes.environment(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intranet")
    found = processes.environment(tmp_path)
    assert found["no_proxy"] == found["NO_PROXY"] == "intranet,localhost,127.0.0.1,::1"
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"


def test_a_used_port_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(FurlongError, match=rf"port {port}: .*Choose another --port"):
            processes.require_free_port("127.0.0.1", port)
    processes.require_free_port("127.0.0.1", processes.free_port())


# ---------------------------------------------------------------- children


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def test_a_child_ends_with_the_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = signal.getsignal(signal.SIGTERM)
    with processes.running(["sh", "-c", "echo $X; exec sleep 60"], {"X": "hello"}, log) as child:
        wait(lambda: log.read_text() == "hello\n", 10, "the child's output")
        assert alive(child.pid)
    assert child.returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_child_that_does_not_want_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PATIENCE", 0.2)
    log = tmp_path / "log"
    stubborn = ["sh", "-c", "trap '' TERM; echo up; while true; do sleep 0.1; done"]
    with processes.running(stubborn, {}, log) as child:
        wait(log.read_text, 10, "the child's output")
    assert child.returncode == -signal.SIGKILL


def test_no_child_is_left_behind() -> None:
    """Also if the parent crashes; after SIGTERM the exit code is 0, because it was asked to."""
    code = (
        "import time\n"
        "from furlong import deploy\n"
        "with deploy.running(['sleep', '60'], {}) as child:\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with ExitStack() as stack:
        parents = {}
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            parent = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            parents[number] = stack.enter_context(parent)
            stack.callback(parent.kill)
        for number, parent in parents.items():
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert alive(child)
            parent.send_signal(number)
            assert (parent.wait(30) == 0) == (number == signal.SIGTERM)
            wait(lambda child=child: not alive(child), 10, "the child's end")  # type: ignore[misc]


def test_a_program_that_does_not_start(tmp_path: Path) -> None:
    port = processes.free_port()
    with (
        pytest.raises(FurlongError, match="ended with code 3"),
        processes.running(["sh", "-c", "exit 3"], {}) as child,
    ):
        processes.wait_healthy(child, "127.0.0.1", port, None, Path("a.log"))
    with (
        pytest.raises(FurlongError, match="nothing answers"),
        processes.running(["sleep", "60"], {}, tmp_path / "log") as child,
    ):
        processes.wait_healthy(child, "0.0.0.0", port, None, Path("a.log"), patience=0.3)


# ---------------------------------------------------------------- who may take part


def broken(*_: object) -> None:
    raise FurlongError("no")


def test_the_roster_follows_the_files(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, state = made / "server", made / "state"
    state.mkdir()
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(processes.Roster, "_flower", lambda _, *words: called.append(words))
    roster = processes.Roster(server, state)
    (said,) = roster.update()
    assert "cannot read the SuperLink's list" in said
    assert list(roster.update()) == []  # said once

    known = {name: pem for pem, name in keys.node_keys(server).items()}
    with closing(sqlite3.connect(state / "superlink.db")) as database:
        database.execute("CREATE TABLE node (public_key, node_id, status, online_until)")

        def put(name: str, number: int, status: str, until: float | None) -> None:
            database.execute("DELETE FROM node WHERE public_key = ?", (known[name],))
            row = (known[name], number, status, until)
            database.execute("INSERT INTO node VALUES (?, ?, ?, ?)", row)
            database.commit()

        put("hospital-a", -1, "online", time.time() + 60)
        (server / "nodes/odd.pub").write_text("no key")
        *news, odd = roster.update()
        assert news == ["hospital-a: online", "hospital-b: registered"]
        assert odd.startswith("odd: not registered")
        path = str((server / "nodes/hospital-b.pub").absolute())
        assert called == [("register", path, "--name", "hospital-b")]

        put("hospital-b", 7, "registered", None)
        put("hospital-a", -1, "online", time.time() - 1)
        assert list(roster.update()) == ["hospital-a: offline"]
        keys.revoke_node(made, "hospital-a")
        with monkeypatch.context() as patch:
            patch.setattr(processes.Roster, "_flower", broken)
            assert list(roster.update()) == ["hospital-a: NOT YET REVOKED: no"]
        assert list(roster.update()) == ["hospital-a: revoked"]  # tried again
        assert called[1:] == [("unregister", str(2**64 - 1))]
        put("hospital-a", -1, "unregistered", None)
        put("hospital-b", 7, "unregistered", None)  # by somebody else
        (said,) = roster.update()
        assert "its key cannot be used again" in said
        (server / "nodes/hospital-b.pub").unlink()  # a slip: means nothing
        assert list(roster.update()) == []
        assert len(called) == 2


# ---------------------------------------------------------------- nginx in front of a recorder


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


@contextmanager
def proxy(server: Path, port: int) -> Iterator[None]:
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
OUTSIDE = [
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
    inside, outside = processes.free_port(), processes.free_port()
    folder = tmp_path / "with space"
    keys.make_certs(
        folder, ["localhost"], listen="127.0.0.1", public_port=outside, superlink_port=inside
    )
    server = folder / "server"
    authority = server / "ca.crt"
    assert keys.public_port(server) == outside
    with proxy(server, outside):
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
        keys.make_certs(other, ["localhost"])
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


# ---------------------------------------------------------------- the commands


@pytest.fixture
def furlong_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code or 0  # type: ignore[assignment]
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return call


def test_certs_from_the_command_line(furlong_: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = furlong_("certs", "fed", "--host", "localhost", "--nodes", "a, b")
    assert (code, err) == (0, "")
    assert "furlong superlink --certs fed/server" in out
    assert "made fed/a/node.key" in out
    assert furlong_("certs", "fed", "--nodes", "b")[1].startswith("everything was there already")
    code, out, err = furlong_("certs", "site", "--own-key", "c")
    print_ = keys.read_public(Path("site/node.pub")).fingerprint
    assert print_ in out
    code, out, err = furlong_("certs", "fed", "--add", "site/node.pub")
    assert (code, err) == (0, "")
    assert f"c may take part with the key {print_}" in out
    assert furlong_("certs", "fed", "--revoke", "a")[0] == 0
    assert sorted(p.name for p in Path("fed/server/nodes").iterdir()) == ["b.pub", "c.pub"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("certs fed", "say one thing"),
        ("certs fed --host localhost --add x.pub", "say one thing"),
        ("certs fed --own-key a --revoke b", "say one thing"),
        ("certs fed --nodes a", "fed/server has no certificate yet"),
        ("certs fed --revoke a", "fed has no server folder"),
        ("certs fed --add a.pub", "fed has no server folder"),
        ("certs fed --host localhost --nodes ../x", "'../x' cannot be a node's name"),
        ("certs file.txt --host localhost", "cannot make the folder"),
        ("superlink", "say --certs DIR/server"),
        ("superlink --certs nowhere", "there is no nowhere/ca.crt"),
        ("superlink --certs nowhere --insecure", "or --insecure"),
        ("superlink --insecure --host 0.0.0.0", "works on this machine only"),
        ("superlink --insecure --host 0.0.0.0 --exposed", "works on this machine only"),
    ],
)
@needs_flower
def test_mistakes(furlong_: Callable[..., tuple[int, str, str]], words: str, said: str) -> None:
    Path("file.txt").write_text("")
    code, out, err = furlong_(*words.split())
    assert code == 2
    assert said in err
    assert "Traceback" not in err + out
    assert [p.name for p in Path().iterdir()] == ["file.txt"]


# ---------------------------------------------------------------- all of it


@needs_nginx
@needs_flower
def test_a_federation_behind_nginx(tmp_path: Path) -> None:
    """SuperLink, nginx and two nodes; one of the nodes is unknown."""
    inside, outside = processes.free_port(), processes.free_port()
    fed = tmp_path / "fed"
    ports = {"public_port": outside, "superlink_port": inside}
    keys.make_certs(fed, ["127.0.0.1"], ["hospital-a"], listen="127.0.0.1", **ports)
    keys.make_own_key(tmp_path / "stranger", "stranger")
    shutil.copy(fed / "server/ca.crt", tmp_path / "stranger")
    server, authority = fed / "server", fed / "server/ca.crt"
    log, known, unknown = (tmp_path / name for name in ("superlink.txt", "a.txt", "stranger.txt"))
    command = [sys.executable, "-m", "furlong.cli", "superlink"]
    command += ["--certs", str(server), "--port", str(inside)]
    own = {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}

    def node(site: Path, output: Path) -> tuple[list[str], dict[str, str], Path]:
        secret = site / "superexec.secret"
        keys.make_secret(secret)
        port = processes.free_port()
        words = processes.supernode_command(site, f"127.0.0.1:{outside}", secret, port=port)
        return words, processes.environment(tmp_path / f"{site.name}-home"), output

    def nodes() -> dict[str, str]:
        names = keys.node_keys(server)
        found = processes.registered(server / "state/superlink.db")
        return {names.get(key, "?"): each.status for key, each in found.items()}

    with processes.running(command, own, log) as superlink:
        wait(lambda: superlink.poll() is not None or "Next:" in log.read_text(), 90, "SuperLink")
        assert superlink.poll() is None, log.read_text()
        assert f"--port {inside}" in log.read_text()  # Flower's own command is shown
        assert nodes() == {"hospital-a": "registered"}
        with (
            proxy(server, outside),
            processes.running(*node(fed / "hospital-a", known)) as first,
            processes.running(*node(tmp_path / "stranger", unknown)) as second,
        ):
            # what is there, and must not be seen from outside
            assert ask(inside, authority, "/health", "GET")[0] == 200
            assert ask(inside, authority, "/v1/control/list-runs")[0] == 200
            assert ask(inside, authority, "/v1/runtime/acquire-task")[0] == 401  # no secret
            asked = log.read_text().count("/list-runs")
            for path in OUTSIDE:
                assert ask(outside, authority, path)[0] in (400, 404), path
            assert log.read_text().count("/list-runs") == asked
            assert ask(outside, authority, "/v1/fleet/register-node")[0] == 401
            assert ask(outside, authority, "/v1/fleet/pull-messages")[0] == 401

            for port in (inside, outside):
                assert processes.clock_ahead("127.0.0.1", port, authority) == pytest.approx(
                    0, abs=3
                )

            wait(lambda: nodes()["hospital-a"] == "online", 60, "the node")
            assert second.wait(60) == 1
            assert "Exit Code: 305" in unknown.read_text()
            assert nodes() == {"hospital-a": "online"}
            assert listed(server / "state/flower") == ["online"]
            assert first.poll() is None
            wait(lambda: "hospital-a: online" in log.read_text(), 10, "the news")

            # the list of nodes is followed while it runs
            keys.make_certs(fed, nodes=["hospital-b"])
            wait(lambda: "hospital-b: registered" in log.read_text(), 30, "another node")
            keys.revoke_node(fed, "hospital-a")
            assert first.wait(60) == 0  # Flower's node leaves quietly when it is refused
            assert "hospital-a: revoked" in log.read_text()
        superlink.terminate()
        assert superlink.wait(30) == 0
    processes.require_free_port("127.0.0.1", inside)
    assert not re.search("Traceback|error:", log.read_text())


def listed(home: Path) -> list[str]:
    """The nodes' states by Flower's own command, as an operator would ask."""
    done = subprocess.run(
        [processes.program("flwr"), "supernode", "list", "furlong", "--format", "json"],
        env=os.environ | processes.environment(home),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [each["status"] for each in json.loads(done.stdout)["nodes"]]
