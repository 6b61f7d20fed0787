"""The same bits on Flower: simulated on Ray, and with a SuperLink and SuperNodes on loopback.

Everything is started by furlong's own commands, with TLS and node authentication, on free ports.
All processes are ended whatever happens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_federation import FURLONG, PATIENCE, Federation, bits, in_process, settings

from furlong.deploy.addresses import free_port
from furlong.deploy.processes import environment, program, running, wait_healthy

pytest.importorskip("flwr")
pytestmark = pytest.mark.xdist_group("flower")  # one SuperLink for all
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("federation"), stall=20)
    try:
        for k in range(3):
            made.node(k)
        yield made
    finally:
        made.end()


@slow
@pytest.mark.parametrize("method", ["fedu", "fedca", "mfcl"])
def test_three_supernodes_give_the_bits_of_one_process(
    federation: Federation, tmp_path: Path, method: str
) -> None:
    assert federation.run(method, method) == in_process(tmp_path / "one", method)
    assert not any(line["failures"] for line in federation.lines(method))
    assert not list(federation.folder.glob("state?/runs/*"))


@slow
def test_sums_under_masks(federation: Federation, tmp_path: Path) -> None:
    """Secure aggregation between processes: the same bits, in five exchanges for a round."""
    assert federation.run("masked", "fedema", secure=True) == in_process(
        tmp_path / "one", "fedema", secure=True
    )
    lines = federation.lines("masked")
    assert [line.get("summed") for line in lines] == ([None] * 4 + [3]) * 2
    assert not any(line["failures"] for line in lines)


@pytest.mark.slow
def test_an_unknown_node_is_refused(federation: Federation, tmp_path: Path) -> None:
    """A key that nobody registered: the node ends, with an error that says why."""
    federation.call("certs", str(tmp_path / "other"), "--own-key", "stranger")
    authority = (federation.folder / "certs" / "server" / "ca.crt").read_bytes()
    (tmp_path / "other" / "ca.crt").write_bytes(authority)
    words = ("--certs", str(tmp_path / "other"), "--state", str(tmp_path / "s"))
    words += ("--part", "0", "--patience", "0")
    said = federation.call("node", "--superlink", federation.address, *words, code=2)
    assert "does not know this site's key" in said
    assert "Traceback" not in said


@slow
def test_a_node_that_disagrees_takes_no_part(federation: Federation, tmp_path: Path) -> None:
    """Site 3 agrees to another configuration; the run says so and goes on without it."""
    (tmp_path / "agreed.toml").write_text(settings("fedu", clients=4, epochs=2).toml())
    words = ("--certs", "certs/site3", "--state", "state3", "--part", "3")
    agree = ("--agree", str(tmp_path / "agreed.toml"), "--device", "cpu")
    node = federation.start("node3", "node", "--superlink", federation.address, *words, *agree)
    try:
        options = {"clients": 4, "rounds": 1, "flower.wait": 20, "data.images": 96}
        config = federation.config("disagreed", "fedu", **options)
        said = federation.call("run", config, "--out", "disagreed")
        assert "site3 does not take part: not the configuration that this node agrees to" in said
        assert "train.epochs is 1, not 2" in said
        (line,) = federation.lines("disagreed")
        assert [(f["client"], f["reason"]) for f in line["failures"]] == [
            (3, "no node is here that takes part as it")
        ]
    finally:
        node.terminate()
        node.wait(20)


@slow
def test_a_node_killed_in_mid_round_and_back(federation: Federation, tmp_path: Path) -> None:
    """Started again, it connects again, and is asked again if that is before the deadline.

    If its SuperNode could not say goodbye, Flower holds its place for a minute, and the round ends
    without it.
    """
    options = {"rounds": 1, "epochs": 40, "run.deadline": 30}
    config = federation.config("killed", "fedema", **options)
    run = federation.start("killed", "run", config, "--out", "killed")
    before = federation.log("node1").count("received")
    federation.wait(lambda: federation.log("node1").count("received") > before, "work at node 1")
    federation.processes["node1"].kill()
    federation.processes["node1"].wait()
    connected = federation.log("node1").count("connected to")
    federation.node(1)
    federation.wait(lambda: run.poll() is not None, "the run's end")
    assert run.returncode == 0, federation.log("killed")
    (line,) = federation.lines("killed")
    if line["failures"]:
        assert [(f["client"], f["kind"]) for f in line["failures"]] == [(1, "lost")]
        assert set(line["clients"]) == {"0", "2"}
    else:
        assert bits(federation.folder / "killed") == in_process(
            tmp_path / "one", "fedema", **options
        )
    federation.wait(
        lambda: federation.log("node1").count("connected to") > connected, "node 1's return"
    )


@slow
def test_the_server_is_killed_and_resumed(federation: Federation, tmp_path: Path) -> None:
    """SIGKILL of the server in mid-round; nodes keep their state, and the bits are the same."""
    options = {"rounds": 4, "optimiser.persist": True}
    config = federation.config("crash", "fedema", **options)
    run = federation.start("crash", "run", config, "--out", "crash")
    federation.wait(lambda: len(federation.lines("crash")) >= 2, "two rounds")
    seen = federation.log("node0").count("received")
    federation.wait(lambda: federation.log("node0").count("received") > seen, "the third round")
    run.kill()
    run.wait()
    federation.call("resume", "crash")
    assert bits(federation.folder / "crash") == in_process(tmp_path / "one", "fedema", **options)


@slow
def test_the_superlink_is_killed_and_resumed(federation: Federation, tmp_path: Path) -> None:
    """The run ends with an error; nodes come back by themselves, and the run goes on."""
    options = {"rounds": 3, "optimiser.persist": True}
    config = federation.config("outage", "fedema", **options)
    run = federation.start("outage", "run", config, "--out", "outage")
    federation.wait(lambda: federation.lines("outage"), "a round")
    federation.processes["superlink"].kill()
    federation.processes["superlink"].wait()
    federation.wait(lambda: run.poll() is not None, "the run's end")
    assert run.returncode == 2
    assert "Traceback" not in federation.log("outage")
    assert "resume" in federation.log("outage")
    federation.superlink()
    federation.call("resume", "outage")
    assert bits(federation.folder / "outage") == in_process(tmp_path / "one", "fedema", **options)


@slow
def test_a_simulation_of_a_hundred_clients(tmp_path: Path) -> None:
    options = {"clients": 100, "data.images": 400, "rounds": 1, "batch_size": 4}
    config = tmp_path / "run.toml"
    config.write_text(settings("fedema", engine="flower", **options).toml())
    done = subprocess.run(
        [*FURLONG, "run", str(config), "--out", str(tmp_path / "run")],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert bits(tmp_path / "run") == in_process(tmp_path / "one", "fedema", **options)
    assert not list(tmp_path.glob("run/nodes/runs/*"))


@slow
def test_plain_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``flwr run`` with what ``furlong flower-app`` writes; Flower starts a process per message."""
    from furlong.deploy.superlink import write_connection

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for name, value in environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    options = {"clients": 2, "rounds": 1, "data.images": 48}
    config, port = tmp_path / "run.toml", free_port()
    config.write_text(settings("fedsimclr", out=str(tmp_path / "run"), **options).toml())
    app = str(tmp_path / "app")
    subprocess.run([*FURLONG, "flower-app", app, str(config)], timeout=PATIENCE, check=True)
    write_connection(tmp_path / "home", f"127.0.0.1:{port}", None)
    with ExitStack() as ends:

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            command = [program(name.rstrip("01")), "--insecure", "--host", "127.0.0.1", *words]
            return ends.enter_context(running(command, {}, tmp_path / f"{name}.log"))

        database = ("--database", str(tmp_path / "state.db"))
        superlink = start("flower-superlink", "--port", str(port), *database)
        log = tmp_path / "flower-superlink.log"
        wait_healthy(superlink, "127.0.0.1", port, None, log, PATIENCE)
        for k in range(2):
            about = f'partition-id={k} state="{tmp_path / f"node{k}"}"'
            where = ("--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
            start(f"flower-supernode{k}", *where, "--node-config", about)
        flwr = [program("flwr"), "run", app, "furlong", "--stream"]
        run = subprocess.run(flwr, capture_output=True, timeout=PATIENCE, check=False)
        logs = "".join(p.read_text(errors="replace")[-1500:] for p in tmp_path.glob("*.log"))
        assert (tmp_path / "run" / "summary.json").exists(), run.stdout.decode() + logs
    assert bits(tmp_path / "run") == in_process(tmp_path / "one", "fedsimclr", **options)
    assert not list(tmp_path.glob("node*/runs/*"))
