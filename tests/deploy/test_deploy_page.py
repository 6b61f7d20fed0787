"""docs/deploy.md, executed literally: every shell block, one after another, in one shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.deploy.addresses import free_port

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="no nginx"),
]
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) > 8
    script = "set -e\n" + "".join(blocks)
    public, inner = free_port(), free_port()
    # the page's ports may be in use here
    ports = f"--public-port {public} --superlink-port {inner}"
    script = script.replace(
        "--nodes hospital-a,hospital-b", f"--nodes hospital-a,hospital-b {ports}"
    )
    script = script.replace(":8443", f":{public}").replace(":8000", f":{inner}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    environment = os.environ | {"PATH": path, "HOME": str(tmp_path)}
    with (tmp_path / "out").open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-m", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = shell.wait(240)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(shell.pid)], check=False)
    text = (tmp_path / "out").read_text(errors="replace")
    assert code == 0, text[-6000:]
    assert "Traceback" not in text
    assert "the clients of this run are 0: hospital-a, 1: hospital-b" in text
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert (tmp_path / "features-a.parquet").exists()
    assert len(list(tmp_path.glob("state-*/encoders/*/encoder.safetensors"))) == 2
    assert (tmp_path / "app" / "pyproject.toml").exists()
