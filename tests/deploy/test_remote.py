"""The engine for clients elsewhere, over a wire that calls the sites directly: no Flower."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from federations import (
    Direct,
    Killed,
    draw_scans,
    failures,
    flower,
    go_on,
    hello,
    in_process,
    owners,
    parts,
    sites,
    train,
    weights,
)
from PIL import Image

import furlong
from furlong.core.payload import pack_tensors, unpack
from furlong.core.weights import snapshot
from furlong.deploy.node import Site
from furlong.deploy.session import Session
from furlong.engines import remote
from furlong.engines.remote import Reply
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.runs import loop
from furlong.runs.config import from_tree


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return draw_scans(tmp_path)


@pytest.mark.parametrize("method", ["fedu", "fedca", "mfcl", "fcl", "fedema"])
def test_same_bits_as_in_process(tmp_path: Path, method: str) -> None:
    run = train(flower(tmp_path, method), wire=Direct(parts(tmp_path)))
    assert weights(run) == in_process(tmp_path, method)
    assert not list(tmp_path.glob("node*/runs/*"))  # the run has ended: nodes forget its state


SLICE = 50_000


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of at most SLICE bytes."""
    from furlong.engines import remote

    made = remote.Remote.__init__

    def small(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **{**named, "slice_bytes": SLICE})

    monkeypatch.setattr(remote.Remote, "__init__", small)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("method", ["fedema", "fedca"])
def test_slices(tmp_path: Path, method: str) -> None:
    """Payloads beyond a slice travel in several messages, both ways."""
    wire = Direct(parts(tmp_path))
    run = train(flower(tmp_path, method), wire=wire)
    assert weights(run) == in_process(tmp_path, method)
    kinds = [header["kind"] for _, header, _ in wire.sent]
    assert kinds.count("fetch") > 10
    assert all(size <= SLICE for _, header, size in wire.sent if header["kind"] == "work")


@pytest.mark.usefixtures("small_slices")
def test_a_node_that_kept_another_slice_is_refused(tmp_path: Path) -> None:
    def forgetful(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return ({**header, "kept": 0} if header.get("kept") == 1 else header), body

    wire = Direct(parts(tmp_path))
    wire.before = lambda node, _: setattr(wire, "up", forgetful if node == 101 else None)
    train(flower(tmp_path, rounds=1), wire=wire)
    [[failure]] = failures(tmp_path)
    assert (failure["client"], failure["kind"]) == (1, "refused")


def test_every_node_restarts_between_rounds(tmp_path: Path) -> None:
    """State is on the node's disk: a node may be another process every time."""
    wire = Direct(parts(tmp_path))

    def restart(node: int, header: dict[str, Any]) -> None:  # noqa: ARG001
        k = node - 100
        wire.sites[node] = Site(tmp_path / f"node{k}", part=k, device="cpu")

    wire.before = restart
    settings = flower(tmp_path, "fedema", **{"optimiser.persist": True})
    run = train(settings, wire=wire)
    assert weights(run) == in_process(tmp_path, "fedema", **{"optimiser.persist": True})


def test_state_left_behind_is_noticed_by_bits(tmp_path: Path) -> None:
    """The comparison above can fail: without its state a client computes something else."""
    wire = Direct(parts(tmp_path))

    def lose(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work":
            for path in (tmp_path / f"node{node - 100}").rglob("*.state.safetensors"):
                path.unlink()

    wire.before = lose
    run = train(flower(tmp_path, "fedema"), wire=wire)
    assert weights(run) != in_process(tmp_path, "fedema")


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("fedema", 4),
        ("fedca", 6),
        pytest.param("fedema", 6, marks=pytest.mark.slow),
        pytest.param("fedca", 4, marks=pytest.mark.slow),
        pytest.param("mfcl", 4, marks=pytest.mark.slow),
        pytest.param("mfcl", 6, marks=pytest.mark.slow),
    ],
)
def test_server_killed_at_any_message_goes_on_with_the_same_bits(
    tmp_path: Path, method: str, at: int
) -> None:
    wire = Direct(parts(tmp_path))
    count = iter(range(1000))

    def kill(node: int, header: dict[str, Any]) -> None:  # noqa: ARG001
        if header["kind"] == "work" and next(count) == at:
            raise Killed

    wire.before = kill
    settings = flower(tmp_path, method, **{"optimiser.persist": True})
    with suppress(Killed):
        train(settings, wire=wire)
    again = Direct(parts(tmp_path))
    run = go_on(tmp_path / "run", wire=again)
    assert weights(run) == in_process(tmp_path, method, **{"optimiser.persist": True})


# ---------------------------------------------------------------- nodes that fail


def test_a_resumed_run_does_not_silently_lack_a_node(tmp_path: Path) -> None:
    """A node that answered before and is away now: the bits would be others, so it is an error."""
    wire, asked = Direct(parts(tmp_path)), count()

    def kill(_: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and next(asked) == 4:  # in the second round
            raise Killed

    wire.before = kill
    with pytest.raises(Killed):
        train(flower(tmp_path, "fedema", **{"evaluate.probe": "none"}), wire)
    there = Direct(parts(tmp_path))
    there.away = {101}
    engine, folder = partial(Session, wire=there), tmp_path / "run"
    with pytest.raises(FurlongError, match=r"client 1 answered before .* --train\.min-clients"):
        loop.resume(folder, {"flower.wait": 0.1}, engine=engine)
    said: list[str] = []
    given = {"flower.wait": 0.1, "train.min_clients": 2}
    loop.resume(folder, given, say=said.append, engine=engine)
    assert any("warning: client 1 answered before the interruption" in line for line in said)


def leave_and_return(wire: Direct) -> None:
    """Node 102 leaves after its first answer; it is back when 101 is asked in the next round."""

    def away(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 102 and header["exchange"]["round"] == 0:
            wire.away = {102}
        if header["kind"] == "work" and node == 101 and header["exchange"]["round"] == 1:
            wire.away = set()

    wire.before = away


def test_a_node_that_is_away_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETURN", 0.0)
    wire = Direct(parts(tmp_path))
    leave_and_return(wire)
    run = train(flower(tmp_path, rounds=4), wire=wire)
    assert run.summary["failures"] == 1
    lost = [[f["client"] for f in line] for line in failures(tmp_path)]
    assert lost == [[], [2], [], []]
    assert failures(tmp_path)[1][0]["reason"] == "no node is here that takes part as it"
    hellos = [node for node, header, _ in wire.sent if header["kind"] == "hello"]
    assert sorted(hellos) == [100, 101, 102, 102]  # greeted again when it returns


def test_a_node_that_is_back_soon_is_waited_for(tmp_path: Path) -> None:
    """Flower takes nodes for disconnected when its own link was away: the bits stay the same."""
    wire = Direct(parts(tmp_path))
    leave_and_return(wire)
    run = train(flower(tmp_path, "fedema", rounds=3), wire=wire)
    assert failures(tmp_path) == [[], [], []]
    assert weights(run) == in_process(tmp_path, "fedema", rounds=3)


def test_a_node_that_disconnects_in_mid_exchange_is_asked_again(tmp_path: Path) -> None:
    """From the beginning, and so from the state before, although it has done the work already."""
    wire = Direct(parts(tmp_path))
    receive, nodes = wire.receive, wire.nodes
    lost: list[str] = []

    def lose(tickets: Iterable[str]) -> list[Reply]:
        for ticket in tickets if not lost else ():
            node, header, _ = wire.sent[int(ticket)]
            if header["kind"] == "work" and header["exchange"]["round"] == 1 and node == 102:
                wire.replies[ticket] = Reply(ticket, {}, error="gone", gone=True)
                wire.away = {102}
                lost.append(ticket)
        return receive(tickets)

    def come() -> dict[int, str | None]:
        found = nodes()
        wire.away = set()  # at the next look it is back
        return found

    wire.receive, wire.nodes = lose, come  # type: ignore[method-assign]
    options = {"rounds": 3, "optimiser.persist": True}
    run = train(flower(tmp_path, "fedema", **options), wire=wire)
    assert failures(tmp_path) == [[], [], []]
    work = [node for node, header, _ in wire.sent if header["kind"] == "work"]
    assert work.count(102) == 4
    assert weights(run) == in_process(tmp_path, "fedema", **options)


@pytest.mark.usefixtures("small_slices")
def test_a_node_that_goes_between_two_questions_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has some slices of a download; who looks whether another node is back sees it gone."""
    monkeypatch.setattr(remote, "LOOK", 0.0)
    wire = Direct(parts(tmp_path))
    receive, nodes = wire.receive, wire.nodes
    lost: list[str] = []

    def lose(tickets: Iterable[str]) -> list[Reply]:
        for ticket in tickets if not lost else ():
            node, header, _ = wire.sent[int(ticket)]
            if header["kind"] == "work" and node == 102:
                wire.replies[ticket] = Reply(ticket, {}, error="gone", gone=True)
                wire.away = {101, 102}
                lost.append(ticket)
        return receive(tickets)

    def come() -> dict[int, str | None]:
        found = nodes()
        wire.away = set()  # at the next look they are back
        return found

    wire.receive, wire.nodes = lose, come  # type: ignore[method-assign]
    run = train(flower(tmp_path, "fedema", rounds=1), wire=wire)
    assert lost
    assert failures(tmp_path) == [[]]
    first = [node for node, header, _ in wire.sent if header.get("slice") == 0]
    assert (first.count(100), first.count(101), first.count(102)) == (1, 2, 2)
    assert weights(run) == in_process(tmp_path, "fedema", rounds=1)


def test_a_node_that_stays_away_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETURN", 1.5)
    monkeypatch.setattr(remote, "LOOK", 0.1)
    wire = Direct(parts(tmp_path))

    def leave(_: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and header["exchange"]["round"] == 1:
            wire.away = {102}

    wire.before = leave
    train(flower(tmp_path, rounds=4), wire=wire)
    found = failures(tmp_path)
    assert [[f["client"] for f in line] for line in found] == [[], [], [2], [2]]
    assert {line[0]["reason"] for line in found[2:]} == {"no node is here that takes part as it"}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    assert seconds[2] > 1.5 > seconds[3]


def test_a_late_node_joins(tmp_path: Path) -> None:
    wire = Direct(parts(tmp_path))
    wire.away = {101}

    def come(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 102:
            wire.away = set()

    wire.before = come
    settings = flower(tmp_path, **{"flower.wait": 0.1, "rounds": 3})
    train(settings, wire=wire)
    assert [[f["client"] for f in line] for line in failures(tmp_path)] == [[1], [], []]


def test_a_silent_node_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    def silent(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes] | None:
        stuck = header["kind"] == "work" and header["client"] == 1
        return None if stuck and header["exchange"]["round"] == 1 else (header, body)

    settings = flower(tmp_path, **{"run.deadline": 1, "rounds": 3})
    train(settings, wire=Direct(parts(tmp_path), silent))
    found = failures(tmp_path)
    assert [len(line) for line in found] == [0, 1, 0]
    assert found[1][0] == {"client": 1, "kind": "lost", "reason": "no answer within 1 s"}


def test_too_few_nodes(tmp_path: Path) -> None:
    settings = flower(tmp_path, **{"flower.wait": 0.1, "train.min_clients": 3})
    with pytest.raises(FurlongError, match="min_clients"):
        train(settings, wire=Direct(parts(tmp_path, 2)))


def test_a_bad_answer_is_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    def replay(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if body and unpack(bytearray(body)).client == 2:
            old.append(body)
            return header, old[0]
        return header, body

    old: list[bytes] = []
    train(flower(tmp_path), wire=Direct(parts(tmp_path), up=replay))
    found = failures(tmp_path)
    assert [len(line) for line in found] == [0, 1]
    assert found[1][0]["kind"] == "refused"
    assert "answers exchange 0, not 1" in found[1][0]["reason"]


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        ({"slice": 0, "slices": 1}, b"not a payload", "not a safetensors buffer"),
        ({"slice": 0, "slices": 10**9}, b"x" * (3 << 20), "more than the"),
        ({"slice": 0, "slices": 1}, b"x" * (3 << 20), "more than the"),
        ({"slice": 7, "slices": 9}, b"x", "makes no sense"),
        ({"slice": 0, "slices": "many"}, b"x", "makes no sense"),
        ({}, b"", "makes no sense"),
        ({"kept": 5}, b"", "makes no sense"),
        ({"failed": "raised", "reason": "out of memory"}, b"", "out of memory"),
        ({"failed": "lost", "reason": "it died"}, b"", "it died"),
        ({"refused": "no"}, b"", "its node refuses: no"),
    ],
)
def test_nonsense(tmp_path: Path, header: dict[str, Any], body: bytes, reason: str) -> None:
    def nonsense(said: dict[str, Any], sent: bytes) -> tuple[dict[str, Any], bytes]:
        mine = sent and unpack(bytearray(sent)).client == 1
        return (header, body) if mine else (said, sent)

    train(flower(tmp_path, rounds=1), wire=Direct(parts(tmp_path), up=nonsense))
    for line in failures(tmp_path):
        assert [f["client"] for f in line] == [1]
        assert reason in line[0]["reason"]


# ---------------------------------------------------------------- what a node refuses


def refusal(site: Site, **changed: Any) -> str:
    said, body = site.answer(hello(**changed))
    assert not body
    return str(said.get("refused", ""))


def test_another_version_is_refused(tmp_path: Path) -> None:
    (site,) = parts(tmp_path, 1)
    assert refusal(site) == ""
    assert "runs furlong 9.9.9" in refusal(site, furlong="9.9.9")
    assert furlong.__version__ in refusal(site, furlong="9.9.9")
    assert "protocol 99" in refusal(site, protocol=99)


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    (site,) = parts(tmp_path, 1, agree=tiny("fedsimclr"))
    assert refusal(site) == ""
    other = hello()["config"]
    other["optimiser"]["lr"] = 7.0
    assert "optimiser.lr is 7.0, not 0.032" in refusal(site, config=other)
    fraction = hello()["config"]
    fraction["train"]["fraction"] = 0.5  # who is asked is the server's business
    assert refusal(site, config=fraction) == ""


@pytest.mark.parametrize("run", ["", "../../etc", "ab/cd", "a" * 65, "AB" * 16, None, 7])
def test_names_of_runs(tmp_path: Path, run: Any) -> None:
    (site,) = parts(tmp_path, 1)
    assert "not the name of a run" in refusal(site, run=run)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("method", "name", "os:system"),
        ("model", "encoder", "/tmp/evil.py:build"),
        ("data", "name", "folder:/etc"),
        ("method", "nonsense", 1),
        ("train", "rounds", -1),
        ("evil", "key", 1),
    ],
)
def test_what_a_server_may_not_name(tmp_path: Path, section: str, key: str, value: Any) -> None:
    (site,) = parts(tmp_path, 1)
    config = hello()["config"]
    config.setdefault(section, {})[key] = value
    assert refusal(site, config=config)


@pytest.mark.parametrize("header", [{}, {"kind": "work"}, {"kind": "rm"}, {"kind": ["hello"]}])
def test_hostile_questions_never_raise(tmp_path: Path, header: dict[str, Any]) -> None:
    (site,) = parts(tmp_path, 1)
    said, _ = site.answer(header)
    assert said.keys() & {"refused", "failed"}
    said, _ = site.answer({**hello(), **header})
    assert said.keys() & {"refused", "failed", "part"}


# ---------------------------------------------------------------- nodes with images of their own


@pytest.mark.parametrize("method", ["fedu", "mfcl"])
def test_own_images_give_the_bits_of_one_folder_per_client(
    tmp_path: Path, scans: Path, method: str
) -> None:
    extra = {"method.server_epochs": 1} if method == "mfcl" else {}
    wire = Direct(owners(scans, tmp_path, ["coral", "amber", "blue"]))
    run = train(sites(tmp_path, method, **extra), wire=wire)
    together = {"data": f"folder:{scans}", "partition": "natural", "data.image_size": 16}
    options = {"method": method, "rounds": 2, "batch_size": 8, "train.server_threads": 1, **extra}
    out = {"out": str(tmp_path / "together"), "workers": 1}
    one = loop.run(from_tree({}, {**options, **together, **out}, "test"))
    assert weights(run) == weights(one)
    assert run.summary["images"] == 44
    told = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert [site["name"] for site in told["sites"]] == ["amber", "blue", "coral"]


def test_no_path_and_no_image_reaches_the_server(tmp_path: Path, scans: Path) -> None:
    """Everything that sites say, searched for paths, file names and pixels."""
    said: list[tuple[dict[str, Any], bytes]] = []

    def listen(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        said.append((header, body))
        return header, body

    wire = Direct(owners(scans, tmp_path, ["amber", "blue", "coral"]), up=listen)
    train(sites(tmp_path), wire=wire)
    words = " ".join(json.dumps(header) for header, _ in said)
    assert "scans" not in words
    assert ".png" not in words
    for path in scans.rglob("*.png"):
        pixels = Image.open(path).tobytes()
        assert not any(pixels[:200] in body or pixels[:200].hex() in words for _, body in said)
    assert any(body for _, body in said)


def test_every_site_gets_the_encoder(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, ["amber", "blue", "coral"]))
    run = train(sites(tmp_path), wire=wire)
    learnt = (run.folder / "encoder.safetensors").read_bytes()
    for name in ("amber", "blue", "coral"):
        (folder,) = (tmp_path / name / "encoders").iterdir()
        assert (folder / "encoder.safetensors").read_bytes() == learnt
        furlong.load_encoder(folder)


def test_a_site_joins_between_rounds(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, ["amber", "blue", "coral"]))
    wire.away = {100}

    def come(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 102:
            wire.away = set()

    wire.before = come
    settings = sites(tmp_path, **{"flower.wait": 0.1, "rounds": 4})
    run = train(settings, wire=wire)
    asked = [(h["exchange"]["round"], h["client"]) for _, h, _ in wire.sent if h["kind"] == "work"]
    assert asked == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
    assert run.summary["clients"] == 3
    assert len(json.loads((tmp_path / "run" / "partition.json").read_text())["sizes"]) == 3


def test_a_site_that_would_change_the_plan_waits_for_the_next_run(
    tmp_path: Path, scans: Path
) -> None:
    """MFCL's second phase is planned with all clients from the start."""
    wire = Direct(owners(scans, tmp_path, ["amber", "blue", "coral"]))
    wire.away = {101}

    def come(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and node == 102:
            wire.away = set()

    wire.before = come
    said: list[str] = []
    settings = sites(tmp_path, "mfcl", **{"flower.wait": 0.1, "method.server_epochs": 1})
    train(settings, say=said.append, wire=wire)
    assert any("can join the next run" in text for text in said)


def test_sites_that_do_not_fit(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, ["amber", "blue", "coral"]) + parts(tmp_path, 1))
    wire.names = {100: "amber", 101: "amber", 102: "coral"}  # a second key of the same name
    said: list[str] = []
    settings = sites(tmp_path, **{"flower.wait": 0.2, "train.min_clients": 2})
    run = train(settings, say=said.append, wire=wire)
    assert run.summary["clients"] == 2
    assert any("began the run with 8 images and now has 20" in text for text in said)
    assert any("no images of its own" in text for text in said)


def test_labels_cannot_be_asked_of_sites(tmp_path: Path, scans: Path) -> None:
    wire = Direct(owners(scans, tmp_path, ["amber", "blue", "coral"]))
    with pytest.raises(FurlongError, match="needs labels"):
        train(sites(tmp_path, "fedavg"), wire=wire)
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("left_out", ["clients", "data.image_size"])
def test_what_a_run_of_sites_must_say(tmp_path: Path, left_out: str) -> None:
    with pytest.raises(FurlongError, match=left_out.split(".")[-1]):
        train(sites(tmp_path, **{left_out: None}), wire=Direct([]))


# ---------------------------------------------------------------- fixed weights


@pytest.fixture
def begun(tmp_path: Path) -> str:
    """Weights to start from."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        start = snapshot(build_encoder("small", 3, 16))
    path = tmp_path / "start.safetensors"
    path.write_bytes(pack_tensors(start, {}))
    return str(path)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(
    "options",
    [{"model.freeze": 2}, {"model.adapter": "lora:2", "model.adapter_average": "freeze_a"}],
)
def test_fixed_weights_reach_every_node_once(
    tmp_path: Path, begun: str, options: dict[str, Any]
) -> None:
    wire = Direct(parts(tmp_path))
    run = train(flower(tmp_path, "fedu", init=begun, **options), wire=wire)
    assert weights(run) == in_process(tmp_path, "fedu", init=begun, **options)
    assert not any(failures(tmp_path))
    given = [(node, header["slice"]) for node, header, _ in wire.sent if header["kind"] == "given"]
    assert len(given) == len(set(given)) > 3  # in slices, each once per node
    assert {node for node, _ in given} == {100, 101, 102}
    assert not list(tmp_path.glob("node*/runs/*"))  # forgotten with the run
    assert "init" not in json.dumps(wire.sent[-1][1]["config"])  # a path of the server's machine


def test_nothing_is_given_where_nothing_is_fixed(tmp_path: Path, begun: str) -> None:
    wire = Direct(parts(tmp_path))
    run = train(flower(tmp_path, init=begun), wire=wire)
    assert weights(run) == in_process(tmp_path, init=begun)
    assert "given" not in {header["kind"] for _, header, _ in wire.sent}


def test_a_node_that_lost_its_fixed_weights_gets_them_again(tmp_path: Path, begun: str) -> None:
    wire, options = Direct(parts(tmp_path)), {"init": begun, "model.freeze": "stem"}

    def lose(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and header["exchange"]["index"] == 1 and node == 101:
            for path in (tmp_path / "node1").glob("runs/*/*.safetensors"):
                if len(path.stem) == 64:
                    path.unlink()
            wire.before = lambda *_: None

    wire.before = lose
    run = train(flower(tmp_path, **options), wire=wire)
    assert weights(run) == in_process(tmp_path, **options)
    given = [node for node, header, _ in wire.sent if header["kind"] == "given"]
    assert sorted(given) == [100, 101, 101, 102]


def test_fixed_weights_that_were_changed_on_the_way_are_refused(tmp_path: Path, begun: str) -> None:
    def changed(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if header["kind"] == "given" and header["client"] == 1:
            body = body[:-1] + bytes([body[-1] ^ 1])
        return header, body

    wire = Direct(parts(tmp_path), down=changed)
    train(flower(tmp_path, rounds=1, init=begun, **{"model.freeze": "stem"}), wire=wire)
    [[failure]] = failures(tmp_path)
    assert (failure["client"], failure["kind"]) == (1, "refused")
    assert "do not match their digest" in failure["reason"]


def test_a_run_that_fixes_weights_must_say_which(tmp_path: Path, begun: str) -> None:
    def silent(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return {key: value for key, value in header.items() if key != "given"}, body

    wire = Direct(parts(tmp_path), down=silent)
    with pytest.raises(FurlongError, match="fixes weights of the encoder and does not say which"):
        train(flower(tmp_path, rounds=1, init=begun, **{"model.freeze": "stem"}), wire=wire)
