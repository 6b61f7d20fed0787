"""Flower's programs: addresses, commands, child processes."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from federations import wait

from furlong.errors import FurlongError

pytest.importorskip("flwr")

from furlong.deploy import addresses, certs, membership, processes, superlink

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    certs.make_certs(folder, ["fl.example.org", "192.0.2.7"], ["hospital-a", "hospital-b"])
    return folder


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert addresses.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example"])
def test_insecure_and_exposed_only_with_care(made: Path, tmp_path: Path, host: str) -> None:
    assert not addresses.is_loopback(host)
    with pytest.raises(FurlongError, match="works on this machine only"):
        superlink.superlink_command(None, tmp_path, host=host, port=1)
    with pytest.raises(FurlongError, match="works on this machine only"):
        superlink.superlink_command(None, tmp_path, host=host, port=1, exposed=True)
    with pytest.raises(FurlongError, match="control requests"):
        superlink.superlink_command(made / "server", tmp_path, host=host, port=1)
    superlink.superlink_command(made / "server", tmp_path, host=host, port=1, exposed=True)
    name = f"[{host}]:80" if ":" in host else f"{host}:80"
    with pytest.raises(FurlongError, match="works on this machine only"):
        membership.require_files(name, None)


def test_commands_are_safe_by_default(made: Path, tmp_path: Path) -> None:
    words = superlink.superlink_command(made / "server", tmp_path / "state", port=1)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--isolation") + 1] == "process"
    for word in ("--enable-supernode-auth", "--disable-runtime-dependency-installation"):
        assert word in words
    assert "--insecure" not in words
    files = {word: words[words.index(word) + 1] for word in words if word.startswith("--ssl-")}
    assert {Path(file).name for file in files.values()} == {"ca.crt", "server.pem", "server.key"}
    assert shlex.split(processes.shown(words, {"FLWR_HOME": "/a b"})) == ["FLWR_HOME=/a b", *words]


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:0", "a:65536", "https://a:1", "a:b"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(FurlongError, match="is not an address like"):
        addresses.split_address(address)


def test_addresses() -> None:
    assert addresses.split_address("fl.example.org:8443") == ("fl.example.org", 8443)
    assert addresses.split_address("[::1]:80") == ("::1", 80)


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
            addresses.require_free_port("127.0.0.1", port)
    addresses.require_free_port("127.0.0.1", addresses.free_port())


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
    monkeypatch.setattr(processes, "_END_SECONDS", 0.2)
    log = tmp_path / "log"
    stubborn = ["sh", "-c", "trap '' TERM; echo up; while true; do sleep 0.1; done"]
    with processes.running(stubborn, {}, log) as child:
        wait(log.read_text, 10, "the child's output")
    assert child.returncode == -signal.SIGKILL


def test_no_child_is_left_behind() -> None:
    """Also if the parent crashes; after SIGTERM the exit code is 0, because it was asked to."""
    code = (
        "import time\n"
        "from furlong.deploy.processes import running\n"
        "with running(['sleep', '60'], {}) as child:\n"
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
    port = addresses.free_port()
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
