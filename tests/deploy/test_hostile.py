"""Sites and servers that mean harm, and moments at which things break; no Flower needed."""

# ruff: noqa: ARG001 - callbacks

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import (
    Direct,
    Killed,
    draw_scans,
    failures,
    flower,
    go_on,
    hello,
    owners,
    parts,
    sites,
    train,
    weights,
    work,
)

from furlong.core.payload import pack_tensors, unpack
from furlong.deploy import states
from furlong.deploy.node import OwnImages, Site
from furlong.engines import remote
from furlong.engines.remote import Reply, question
from furlong.errors import FurlongError
from furlong.runs import loop
from furlong.runs.nodes import told

NAMES = ["amber", "blue", "coral"]


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return draw_scans(tmp_path)


def asked(site: Site, settings: Any, **changed: Any) -> tuple[dict[str, Any], bytes]:
    return site.answer({**question("ab" * 16, told(settings)), **changed})


# ------------------------------------------------------------- leaks


def words_of(site: Site, settings: Any, **changed: Any) -> str:
    return json.dumps(asked(site, settings, kind="hello", **changed)[0])


def test_leak_missing_folder(tmp_path: Path) -> None:
    site = Site(
        tmp_path / "s", OwnImages(f"folder:{tmp_path / 'secret-place'}"), name="amber", device="cpu"
    )
    said = words_of(site, sites(tmp_path))
    assert "secret-place" not in said


def test_leak_strict_names(tmp_path: Path, scans: Path) -> None:
    (scans / "amber" / "Mr-Smith-1961.png").write_bytes(b"broken")
    site = Site(
        tmp_path / "s",
        OwnImages(f"folder:{scans / 'amber'}", strict=True),
        name="amber",
        device="cpu",
    )
    said = words_of(site, sites(tmp_path))
    assert "Smith" not in said
    assert "scans" not in said


def test_leak_state_folder(tmp_path: Path, scans: Path) -> None:
    """An OSError of the state folder has its path."""
    said: list[str] = []

    def listen(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        said.append(json.dumps(header))
        return header, body

    made = owners(scans, tmp_path, NAMES)
    made[1].folder.mkdir()
    (made[1].folder / "runs").write_text("in the way")
    train(sites(tmp_path, "fedema"), wire=Direct(made, up=listen))
    assert str(tmp_path) not in " ".join(said)


def test_hello_failed_reason_is_shown(tmp_path: Path, scans: Path) -> None:
    made = owners(scans, tmp_path, NAMES)
    made[1].own = OwnImages(f"folder:{tmp_path / 'gone'}")
    said: list[str] = []
    train(sites(tmp_path, **{"flower.wait": 0.3}), say=said.append, wire=Direct(made))
    mine = [s for s in said if "take part" in s]
    assert not any("None images" in s for s in mine)


# ------------------------------------------------------------- hostile sites


def hostile_hello(**changed: Any) -> Any:
    def up(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return ({**header, **changed}, body) if header.get("name") == "amber" else (header, body)

    return up


@pytest.mark.parametrize(
    "changed",
    [
        {"images": 10**30},
        {"images": 10**13},
        {"channels": 3.0},
        {"channels": True},
        {"name": ["x"]},
        {"name": "a" * 10**6},
    ],
)
def test_hostile_hello(tmp_path: Path, scans: Path, changed: dict[str, Any]) -> None:
    said: list[str] = []
    wire = Direct(owners(scans, tmp_path, NAMES), up=hostile_hello(**changed))
    train(sites(tmp_path, **{"flower.wait": 0.3}), say=said.append, wire=wire)
    assert max(map(len, said)) < 5000


def test_hostile_late_join(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, NAMES), up=hostile_hello(images=10**13))
    wire.away = {100}

    def come(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 102:
            wire.away = set()

    wire.before = come
    train(sites(tmp_path, **{"flower.wait": 0.1, "rounds": 3}), wire=wire)


def test_kept_for_ever(tmp_path: Path) -> None:
    iter(range(10**9))

    def up(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return header, body

    wire = Direct(parts(tmp_path), up=up)
    sent = [0, 0]

    def down(header: dict[str, Any], body: bytes) -> Any:
        if header["kind"] == "work" and header["client"] == 1:
            sent[0] += 1
            sent[1] += len(body)
            wire.up = lambda *_: ({"kept": header["slice"]}, b"")
        else:
            wire.up = None
        return header, body

    wire.down = down
    # site 1 would train every time: make it cheap
    wire.sites[101].answer = lambda h, b=b"": (
        Site.answer(wire.sites[101], h, b) if h["kind"] == "hello" else ({}, b"")
    )  # type: ignore[method-assign]
    train(flower(tmp_path, **{"run.deadline": 10}), wire=wire)
    assert sent[0] <= 4


def test_drip(tmp_path: Path) -> None:
    """One byte a time."""
    fetched = [0]

    def down(header: dict[str, Any], body: bytes) -> Any:
        if header.get("client") == 1 and header["kind"] in ("work", "fetch"):
            fetched[0] += 1
            at = header["slice"] if header["kind"] == "fetch" else 0
            wire.up = lambda *_: ({"slice": at, "slices": 10**30}, b"x")
        else:
            wire.up = None
        return header, body

    wire = Direct(parts(tmp_path), down)
    wire.sites[101].answer = lambda h, b=b"": (
        Site.answer(wire.sites[101], h, b) if h["kind"] == "hello" else ({}, b"")
    )  # type: ignore[method-assign]
    train(flower(tmp_path, **{"run.deadline": 5, "rounds": 1}), wire=wire)
    assert fetched[0] < 10


@pytest.mark.parametrize(
    "shape", [[0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [0] * 200, [0, 2**30, 2**30]]
)
def test_hostile_shapes(tmp_path: Path, shape: list[int]) -> None:
    text = json.dumps(
        {
            "__metadata__": {"furlong": "1"},
            "x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]},
        }
    ).encode()
    text += b" " * (-len(text) % 8)
    bad = len(text).to_bytes(8, "little") + text

    def up(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        mine = body and unpack(bytearray(body)).client == 1
        return (header, bad) if mine else (header, body)

    train(flower(tmp_path), wire=Direct(parts(tmp_path), up=up))


# ------------------------------------------------------------- identity


def test_restarted_node_with_a_new_id_is_taken_when_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY", 0.0)
    wire = Direct([*parts(tmp_path), Site(tmp_path / "node1", part=1, device="cpu")])
    wire.away = {103}

    def swap(node: int, header: dict[str, Any]) -> None:
        if header["kind"] != "work":
            return
        if header["exchange"]["round"] == 1 and node == 100:
            wire.away = set()  # the new one is there, the old one is still believed to be
        if header["exchange"]["round"] == 3 and node == 100:
            wire.away = {101}

    wire.before = swap
    said: list[str] = []
    train(flower(tmp_path, rounds=7), say=said.append, wire=wire)
    assert not failures(tmp_path)[-1]


# ------------------------------------------------------------- resume


class Slow(Direct):
    """Answers to hello take a while, each its own."""

    def __init__(self, *a: Any, **k: Any) -> None:
        super().__init__(*a, **k)
        self.late: dict[str, float] = {}

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:
        ticket = super().send(node, header, body, seconds)
        if header["kind"] == "hello":
            self.late[ticket] = time.monotonic() + 0.6 * (node - 100)
        return ticket

    def receive(self, tickets: Any) -> list[Reply]:
        now = time.monotonic()
        return super().receive([t for t in tickets if self.late.get(t, 0) < now])


def test_resume_of_sites_waits_for_all(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, NAMES))
    count = iter(range(1000))

    def kill(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and next(count) == 4:
            raise Killed

    wire.before = kill
    with pytest.raises(Killed):
        train(sites(tmp_path, "fedema"), wire=wire)
    go_on(tmp_path / "run", wire=Slow(owners(scans, tmp_path, NAMES)))
    assert failures(tmp_path) == [[], []]


def test_resume_after_late_join_killed_between_two_files(
    tmp_path: Path, scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from furlong.runs.folder import RunFolder

    wire = Direct(owners(scans, tmp_path, NAMES))
    wire.away = {100}
    write = RunFolder.write
    n = [0]

    def come(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 102:
            wire.away = set()

    def killed(self: Any, name: str, value: Any) -> None:
        if name == "partition.json":
            n[0] += 1
            if n[0] == 3:
                raise Killed
        write(self, name, value)

    wire.before = come
    monkeypatch.setattr(RunFolder, "write", killed)
    with pytest.raises(Killed):
        train(sites(tmp_path, **{"flower.wait": 0.1, "rounds": 4}), wire=wire)
    monkeypatch.setattr(RunFolder, "write", write)
    go_on(tmp_path / "run", wire=Direct(owners(scans, tmp_path, NAMES)))


def test_failed_start_leaves_nothing(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, NAMES))
    wire.away = {100}
    with pytest.raises(FurlongError, match="needs labels"):
        train(sites(tmp_path, "fedavg", **{"flower.wait": 0.1}), wire=wire)
    wire.away = set()
    assert not (tmp_path / "run" / "federation.json").exists()
    again = Direct(owners(scans, tmp_path, NAMES))
    train(sites(tmp_path, "fedu"), wire=again)
    first = {
        h["client"] for _, h, _ in again.sent if h["kind"] == "work" and not h["exchange"]["round"]
    }
    assert first == {0, 1, 2}


def test_state_of_an_abandoned_time(tmp_path: Path) -> None:
    """Killed after client 2 did exchange 1; at the resume client 2 is away for exchange 1."""
    opts = {"optimiser.persist": True, "rounds": 3, "flower.wait": 0.1}

    def gone(wire: Direct) -> None:
        def before(node: int, header: dict[str, Any]) -> None:
            if header["kind"] == "work" and node == 101:
                wire.away = {102} if header["exchange"]["round"] == 0 else set()

        wire.before = before

    a = tmp_path / "a"
    b = tmp_path / "b"
    a.mkdir()
    b.mkdir()
    wire = Direct(parts(a))
    gone(wire)
    one = weights(train(flower(a, "fedema", **opts), wire=wire))
    fa = failures(a)
    wire = Direct(parts(b))
    saved = loop.checkpoint.save

    def dying(run: Path, done: int, *rest: Any) -> Any:
        if done == 2:
            raise Killed
        return saved(run, done, *rest)

    loop.checkpoint.save = dying
    try:
        with pytest.raises(Killed):
            train(flower(b, "fedema", **opts), wire=wire)
    finally:
        loop.checkpoint.save = saved
    wire = Direct(parts(b))
    wire.away = {102}

    def before(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 101 and header["exchange"]["round"] == 1:
            wire.away = set()

    wire.before = before
    two = weights(go_on(b / "run", wire=wire, **{"train.min_clients": 1}))
    assert [[f["client"] for f in line] for line in fa] == [
        [f["client"] for f in line] for line in failures(b)
    ]
    assert one == two


def test_lost_answers_do_not_move_the_state(tmp_path: Path) -> None:
    """A node that answered too late has trained nothing, as in process."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    a.mkdir()
    b.mkdir()
    opts = {"optimiser.persist": True, "rounds": 3, "run.deadline": 1}

    def down(header: dict[str, Any], body: bytes) -> Any:  # never reaches the node
        return (
            None
            if header["kind"] == "work"
            and header["client"] == 1
            and header["exchange"]["round"] == 1
            else (header, body)
        )

    one = weights(train(flower(a, "fedema", **opts), wire=Direct(parts(a), down)))
    lost: list[bool] = [False]

    def note(header: dict[str, Any], body: bytes) -> Any:
        lost[0] = (
            header["kind"] == "work" and header["client"] == 1 and header["exchange"]["round"] == 1
        )
        return header, body

    def up(header: dict[str, Any], body: bytes) -> Any:  # the answer never arrives
        return None if lost[0] else (header, body)

    two = weights(train(flower(b, "fedema", **opts), wire=Direct(parts(b), note, up)))
    assert failures(a) == failures(b)
    assert one == two


def test_state_loss_is_told(tmp_path: Path) -> None:
    wire = Direct(parts(tmp_path))

    def lose(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and header["exchange"]["round"] == 1:
            shutil.rmtree(tmp_path / f"node{node - 100}", ignore_errors=True)

    wire.before = lose
    said: list[str] = []
    train(flower(tmp_path, "fedema", rounds=3), say=said.append, wire=wire)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert [line["clients"][str(k)].get("state_lost") for k in range(3)] == [1.0] * 3


# ------------------------------------------------------------- a site changes its images


@pytest.mark.parametrize("change", [-3, 3])
def test_images_change_without_a_hello(tmp_path: Path, scans: Path, change: int) -> None:
    wire = Direct(owners(scans, tmp_path, NAMES))
    done = [False]

    def before(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and header["exchange"]["round"] == 1 and not done[0]:
            done[0] = True
            files = sorted((scans / "blue").iterdir())
            for i in range(abs(change)):
                if change < 0:
                    files[i].unlink()
                else:
                    shutil.copy(files[i], scans / "blue" / f"zz{i}.png")
            wire.sites[101] = owners(scans, tmp_path, ["blue"])[0]

    wire.before = before
    train(sites(tmp_path), wire=wire)
    assert "20" in failures(tmp_path)[1][0]["reason"]


# ------------------------------------------------------------- hostile questions


@pytest.mark.parametrize(
    "changed",
    [
        {"client": -1},
        {"exchange": {"round": 0, "index": -1}},
        {"exchange": {"round": 0, "index": 10**400}},
        {"exchange": {"round": 0, "index": "../../x"}},
        {"slice_bytes": 0},
        {"slice_bytes": -5},
        {"encoding": ["x"]},
        {"encoding": "zip"},
        {"seconds": math.nan},
        {"seconds": -1},
        {"seconds": math.inf},
        {"oldest": 10**30},
        {"slices": 10**30, "slice": 5},
        {"exchange": {"round": 0, "index": 0, "kind": 7}},
        {"exchange": {"round": 10**400, "index": 0}},
        {"sizes": [1]},
        {"sizes": {"0": 10**13}},
        {"kind": "fetch"},
        {"kind": "fetch", "slice": -1},
        {"kind": "fetch", "slice_bytes": 0},
        {"kind": "fetch", "client": "../../../etc/passwd"},
        {"kind": "fetch", "client": None},
    ],
)
def test_hostile_work(tmp_path: Path, changed: dict[str, Any]) -> None:
    from conftest import tiny

    from furlong.core.context import Exchange
    from furlong.core.payload import pack
    from furlong.runs.prepare import prepare

    p = prepare(tiny("fedsimclr"))
    state = p.server.init()
    down = bytes(pack(p.method.download(state, 0, p.server.context(Exchange(0)))))
    (site,) = parts(tmp_path, 1)
    found: list[Any] = []
    t = threading.Thread(
        target=lambda: found.append(site.answer(work(**changed), down)), daemon=True
    )
    t.start()
    t.join(300)  # a machine may be busy
    assert found, "the node hangs"
    said = found[0][0]
    assert str(tmp_path) not in json.dumps(said)
    # and still works
    found.clear()
    t = threading.Thread(target=lambda: found.append(site.answer(work(), down)), daemon=True)
    t.start()
    t.join(300)  # a machine may be busy
    assert found
    assert found[0][1], found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sizes": {"1": 10**9}}, "at most 10,000,000 images"),
        ({"sizes": dict.fromkeys(map(str, range(10_001)), 1)}, "at most 10,000 sites"),
        ({"sizes": [1]}, "sites are taken"),
        ({"slices": 2**39}, "slices, "),
        ({"config": ("train", "epochs", 10**6)}, "goes up to 1,000"),
        ({"config": ("train", "batch_size", 10**6)}, "goes up to 16,384"),
        ({"config": ("method", "projection_head", "mlp:999999:8")}, "goes up to 16,384"),
    ],
)
def test_a_server_cannot_exhaust_a_node(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    """Refused before anything is made of it."""
    question = work()
    if "config" in changed:
        section, key, value = changed["config"]
        question["config"][section][key] = value
    else:
        question |= changed
    (site,) = parts(tmp_path, 1)
    answer = site.answer(question, b"x")[0]
    assert said in str(answer.get("refused", answer.get("reason")))
    assert not list(tmp_path.rglob("*.down"))


def test_a_download_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST_BYTES", 10)
    slices = states.Slices(tmp_path, 0, 0)
    assert slices.collect(b"x" * 6, 0, 100) is None
    with pytest.raises(FurlongError, match="is refused"):
        slices.collect(b"x" * 6, 1, 100)
    assert not list(tmp_path.rglob("*.down"))


def test_invented_runs_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST_RUNS", 3)
    for number in range(6):
        states.make_room(tmp_path, f"{number:016x}")
        (tmp_path / f"{number:016x}").mkdir()
        os.utime(tmp_path / f"{number:016x}", (number, number))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["3", "4", "5"]
    assert states.make_room(tmp_path, f"{4:016x}") == []


def test_encoder_of_a_hostile_server_runs_no_code(tmp_path: Path, scans: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text("def build():\n    raise SystemExit\n")
    (site,) = owners(scans, tmp_path, ["amber"])
    about = {"encoder": f"{evil}:build", "channels": 3, "image_size": 16, "augment": "none"}
    body = bytes(pack_tensors({"weight": torch.zeros(1)}, {"about": json.dumps(about)}))
    question = {**hello(), "kind": "end", "client": 0}
    assert "took no part" in site.answer(question, body)[0]["refused"]
    (site.folder / "runs" / str(question["run"])).mkdir(parents=True)
    assert "code of this machine" in site.answer(question, body)[0]["refused"]
    assert not list(site.folder.rglob("encoder.json"))


@pytest.mark.parametrize(
    "options",
    [
        {"run.bound": "single"},
        {"server.rule": "median"},
        {"method.bn_stats": "local"},
        {"train.fraction": 0.5},
    ],
)
def test_sites_with(tmp_path: Path, scans: Path, options: dict[str, Any]) -> None:
    wire = Direct(owners(scans, tmp_path, NAMES))
    train(sites(tmp_path, "fedu", **options), wire=wire)
    assert not any(failures(tmp_path))


@pytest.mark.parametrize("options", [{"run.bound": "pooled"}, {"evaluate.angles": 8}])
def test_sites_cannot(tmp_path: Path, scans: Path, options: dict[str, Any]) -> None:
    wire = Direct(owners(scans, tmp_path, NAMES))
    with pytest.raises(FurlongError, match="data = sites"):
        train(sites(tmp_path, "fedu", **options), wire=wire)
    assert not any(header["kind"] == "work" for _, header, _ in wire.sent)


# ------------------------------------------------------------- memory


class Counting(Direct):
    """Counts the clients whose answers are awaited."""

    awaited = 0

    def receive(self, tickets: Any) -> list[Reply]:
        asked = {int(ticket) for ticket in tickets}
        work = [self.sent[ticket] for ticket in asked if self.sent[ticket][1]["kind"] == "work"]
        self.awaited = max(self.awaited, len(work))
        return super().receive(tickets)


@pytest.mark.parametrize(("held", "awaited"), [(1, 1), (1 << 30, 3)])
def test_answers_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, awaited: int
) -> None:
    """Clients are asked at once, as far as their answers fit into memory."""
    monkeypatch.setattr(remote, "HELD", held)
    wire = Counting(parts(tmp_path))
    train(flower(tmp_path), wire=wire)
    assert wire.awaited == awaited
