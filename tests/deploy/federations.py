"""Federations inside one process: sites, and a wire that calls them directly. No Flower."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from conftest import tiny
from PIL import Image

from furlong.data.shapes import shapes
from furlong.deploy.node import OwnImages, Site
from furlong.deploy.session import Session
from furlong.engines.remote import Reply, question
from furlong.runs import loop
from furlong.runs.config import Config, from_tree
from furlong.runs.nodes import told

Change = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes] | None]


class Direct:
    """A wire to sites of this process; ``down`` and ``up`` may change or drop what passes."""

    def __init__(self, sites: Iterable[Site], down: Change | None = None, up: Change | None = None):
        self.sites = dict(enumerate(sites, 100))
        self.away: set[int] = set()
        self.names: dict[int, str] = {}
        self.down, self.up = down, up
        self.replies: dict[str, Reply] = {}
        self.sent: list[tuple[int, dict[str, Any], int]] = []
        self.before: Callable[[int, dict[str, Any]], None] = lambda *_: None

    def nodes(self) -> dict[int, str | None]:
        return {node: self.names.get(node) for node in self.sites if node not in self.away}

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:  # noqa: ARG002
        header = json.loads(json.dumps(header))  # as it travels
        self.before(node, header)
        ticket = str(len(self.sent))
        self.sent.append((node, header, len(body)))
        asked = self.down(header, body) if self.down else (header, body)
        answer = None if asked is None else self.sites[node].answer(*asked)
        if answer is not None and self.up:
            answer = self.up(*answer)
        if answer is not None:
            said = json.loads(json.dumps(answer[0]))
            self.replies[ticket] = Reply(ticket, said, bytes(answer[1]))
        return ticket

    def receive(self, tickets: Iterable[str]) -> list[Reply]:
        return [self.replies.pop(t) for t in list(tickets) if t in self.replies]


def parts(folder: Path, count: int = 3, **options: Any) -> list[Site]:
    return [Site(folder / f"node{k}", part=k, device="cpu", **options) for k in range(count)]


def flower(tmp_path: Path, method: str = "fedsimclr", **options: Any) -> Config:
    return tiny(method, **{"engine": "flower", "out": str(tmp_path / "run"), **options})


def weights(run: loop.Run) -> str:
    return str(run.summary["weights_sha256"])


def in_process(tmp_path: Path, method: str = "fedsimclr", **options: Any) -> str:
    return weights(loop.run(tiny(method, out=str(tmp_path / "inprocess"), **options)))


def train(settings: Config, wire: Any, say: Callable[[str], None] = lambda _: None) -> loop.Run:
    """A run whose nodes are behind ``wire``."""
    return loop.run(settings, say=say, engine=partial(Session, wire=wire))


def go_on(folder: Path, wire: Any, **given: Any) -> loop.Run:
    """Go on with it."""
    return loop.resume(folder, given, engine=partial(Session, wire=wire))


def failures(tmp_path: Path) -> list[list[dict[str, Any]]]:
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["failures"] for line in lines]


def hello(**changed: Any) -> dict[str, Any]:
    return {**question("ab" * 16, told(tiny("fedsimclr"))), "kind": "hello", **changed}


def work(**changed: Any) -> dict[str, Any]:
    """A question to client 0."""
    return {
        **hello(),
        "kind": "work",
        "client": 0,
        "exchange": {"round": 0, "index": 0},
        "slice": 0,
        "slices": 1,
        "seconds": 10.0,
        "oldest": 0,
        "encoding": "exact",
        "slice_bytes": 1000,
        "sizes": None,
        **changed,
    }


def draw_scans(tmp_path: Path) -> Path:
    """Three sites' folders of different sizes."""
    images = shapes(60, size=16, seed=3).pixels.permute(0, 2, 3, 1).numpy()
    for site, rows in {"amber": range(8), "blue": range(8, 28), "coral": range(28, 44)}.items():
        (tmp_path / "scans" / site).mkdir(parents=True)
        for i in rows:
            Image.fromarray(images[i]).save(tmp_path / "scans" / site / f"{i:03d}.png")
    return tmp_path / "scans"


def owners(scans: Path, folder: Path, names: Iterable[str], **options: Any) -> list[Site]:
    return [
        Site(folder / name, OwnImages(f"folder:{scans / name}"), name=name, device="cpu", **options)
        for name in names
    ]


def sites(tmp_path: Path, method: str = "fedsimclr", **options: Any) -> Config:
    base = {"data": "sites", "clients": 3, "rounds": 2, "batch_size": 8, "data.image_size": 16}
    more = {"engine": "flower", "out": str(tmp_path / "run"), "train.server_threads": 1}
    return from_tree({}, {"method": method, **base, **more, **options}, "test")


class Killed(BaseException):
    """The server ends here."""


def wait(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Until it holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.1)
