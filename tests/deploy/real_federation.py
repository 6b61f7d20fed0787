"""A federation of real processes: SuperLink, nodes and servers, by furlong's commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import tiny

from furlong.deploy.addresses import free_port
from furlong.runs import loop
from furlong.runs.config import Config

FURLONG = [sys.executable, "-m", "furlong.cli"]
PATIENCE = 150.0  # seconds for anything, on a busy machine


def settings(method: str, **options: Any) -> Config:
    return tiny(method, **{"evaluate.probe": "none", **options})


def bits(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


def in_process(folder: Path, method: str, **options: Any) -> str:
    loop.run(settings(method, out=str(folder), **options))
    return bits(folder)


class Federation:
    """A SuperLink and nodes, as subprocesses of furlong's commands."""

    def __init__(self, folder: Path, stall: float = 300.0) -> None:
        self.folder, self.port, self.stall = folder, free_port(), stall
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{self.port}"
        names = ",".join(f"site{k}" for k in range(4))
        self.call("certs", "certs", "--host", "127.0.0.1", "--nodes", names)
        self.superlink()

    def call(self, *words: str, code: int = 0) -> str:
        """Run a command to its end."""
        done = subprocess.run(
            [*FURLONG, *words], cwd=self.folder, capture_output=True, timeout=PATIENCE, check=False
        )
        text = (done.stdout + done.stderr).decode()
        assert done.returncode == code, text
        return text

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command that stays; its output is in NAME.log."""
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [*FURLONG, *words], cwd=self.folder, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            logs = "\n".join(f"--- {n}\n{self.log(n)[-1500:]}" for n in self.processes)
            assert time.monotonic() < end, f"{what} did not happen\n{logs}"
            time.sleep(0.1)

    def superlink(self) -> None:
        (self.folder / "superlink.log").unlink(missing_ok=True)
        self.start("superlink", "superlink", "--certs", "certs/server", "--port", str(self.port))
        self.wait(lambda: "is ready" in self.log("superlink"), "the SuperLink's start")

    def node(self, k: int) -> None:
        words = ("--certs", f"certs/site{k}", "--state", f"state{k}", "--part", str(k))
        words += ("--device", "cpu", "--stall", str(self.stall))
        self.start(f"node{k}", "node", "--superlink", self.address, *words)

    def config(self, name: str, method: str, **options: Any) -> str:
        more = {"engine": "flower", "superlink": self.address, "certs": "certs/server"}
        text = settings(method, **{**more, "flower.wait": PATIENCE, **options}).toml()
        (self.folder / f"{name}.toml").write_text(text)
        return f"{name}.toml"

    def run(self, name: str, method: str, **options: Any) -> str:
        self.call("run", self.config(name, method, **options), "--out", name)
        return bits(self.folder / name)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
