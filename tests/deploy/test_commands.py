"""The commands of a deployment, and a federation behind nginx that they make."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Call
from federations import wait
from nginx import OUTSIDE, ask, needs_nginx, nginx

pytest.importorskip("flwr")

from furlong.deploy import addresses, certs, keys, processes
from furlong.deploy.flower_private import Connection, SuperLinkNodes
from furlong.deploy.proxy import Ports

SRC = Path(__file__).parents[2] / "src"


def test_certs_from_the_command_line(furlong_: Call) -> None:
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
def test_mistakes(furlong_: Call, words: str, said: str) -> None:
    Path("file.txt").write_text("")
    code, out, err = furlong_(*words.split())
    assert code == 2
    assert said in err
    assert "Traceback" not in err + out
    assert [p.name for p in Path().iterdir()] == ["file.txt"]


# ---------------------------------------------------------------- all of it


@pytest.mark.slow
@needs_nginx
def test_a_federation_behind_nginx(tmp_path: Path) -> None:
    """SuperLink, nginx and two nodes; one of the nodes is unknown."""
    inside, outside = addresses.free_port(), addresses.free_port()
    fed = tmp_path / "fed"
    ports = Ports(outside, inside)
    certs.make_certs(fed, ["127.0.0.1"], ["hospital-a"], listen="127.0.0.1", ports=ports)
    certs.make_own_key(tmp_path / "stranger", "stranger")
    shutil.copy(fed / "server/ca.crt", tmp_path / "stranger")
    server, authority = fed / "server", fed / "server/ca.crt"
    log, known, unknown = (tmp_path / name for name in ("superlink.txt", "a.txt", "stranger.txt"))
    command = [sys.executable, "-m", "furlong.cli", "superlink"]
    command += ["--certs", str(server)]
    own = {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}

    def node(site: Path, output: Path) -> tuple[list[str], dict[str, str], Path]:
        words = [sys.executable, "-m", "furlong.cli", "node", "--certs", str(site), "--part", "0"]
        words += ["--superlink", f"127.0.0.1:{outside}", "--state", str(tmp_path / site.name)]
        return [*words, "--patience", "3"], own, output

    def nodes() -> dict[str, str]:
        names, connection = certs.node_keys(server), Connection(f"127.0.0.1:{inside}", authority)
        found = SuperLinkNodes(connection).nodes()
        return {names.get(key, "?"): status for key, (_, status) in found.items()}

    with processes.running(command, own, log) as superlink:
        wait(lambda: superlink.poll() is not None or "Next:" in log.read_text(), 90, "SuperLink")
        assert superlink.poll() is None, log.read_text()
        assert f"--port {inside}" in log.read_text()  # Flower's own command is shown
        assert nodes() == {"hospital-a": "registered"}
        with (
            nginx(server, outside),
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
            assert second.wait(60) == 2
            assert "does not know this site's key" in unknown.read_text()
            assert nodes() == {"hospital-a": "online"}
            assert listed(server / "state/flower") == ["online"]
            assert first.poll() is None
            wait(lambda: "hospital-a: online" in log.read_text(), 10, "the news")

            # the list of nodes is followed while it runs
            certs.make_certs(fed, nodes=["hospital-b"])
            wait(lambda: "hospital-b: registered" in log.read_text(), 30, "another node")
            certs.revoke_node(fed, "hospital-a")
            assert first.wait(60) == 2
            assert "does not know this node any more" in known.read_text()
            assert "hospital-a: revoked" in log.read_text()
        superlink.terminate()
        assert superlink.wait(30) == 0
    addresses.require_free_port("127.0.0.1", inside)
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
