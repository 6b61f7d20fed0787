"""Secure aggregation with clients elsewhere, over a wire that calls the sites directly."""

from __future__ import annotations

import json
from contextlib import suppress
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
    in_process,
    owners,
    parts,
    sites,
    train,
    weights,
)
from randomness import looks_random

from furlong.core.payload import unpack, unpack_tensors
from furlong.core.secure.identity import Identity
from furlong.deploy.disclosure import disclosure
from furlong.deploy.node import Site
from furlong.errors import FurlongError

SECURE = {"secure": True, "evaluate.probe": "none"}
FEW = {**SECURE, "data.images": 30, "data.test_images": 10}  # one step for each client and round


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_same_bits_as_in_process(tmp_path: Path) -> None:
    """And one node is another process every time: a round's secrets are on its disk."""
    wire = Direct(parts(tmp_path))

    def restart(node: int, header: dict[str, Any]) -> None:  # noqa: ARG001
        wire.sites[101] = Site(tmp_path / "node1", part=1, device="cpu")

    wire.before = restart
    options = {**FEW, "optimiser.persist": True}
    run = train(flower(tmp_path, "fedema", **options), wire=wire)
    assert weights(run) == in_process(tmp_path, "fedema", **options)
    assert not list(tmp_path.glob("node*/runs/*"))  # nor are there secrets of a finished run


def test_what_crosses_the_wire_is_random(tmp_path: Path) -> None:
    """The bytes themselves, of every answer that has more than some hundreds of them."""
    seen: list[bytes] = []

    def keep(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if len(body) > 100_000:
            tensors, _ = unpack_tensors(bytearray(body))
            seen.extend(t.numpy().tobytes() for t in tensors.values())
        return header, body

    train(flower(tmp_path, rounds=1, **FEW), wire=Direct(parts(tmp_path), up=keep))
    assert len(seen) == 3
    assert [looks_random(each) for each in seen] == [None] * 3


@pytest.mark.parametrize("phase", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
def test_server_killed_in_a_round_goes_on_with_the_same_bits(tmp_path: Path, phase: int) -> None:
    """The round begins anew, with new keys; nodes go back to the state before it."""
    wire = Direct(parts(tmp_path))
    adverts: list[bytes] = []

    def kill(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and header["exchange"]["index"] == 5 + phase and node == 101:
            raise Killed

    def look(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        tensors = unpack_tensors(bytearray(body))[0] if body else {}
        adverts.extend(t.numpy().tobytes() for n, t in tensors.items() if n.endswith("advert"))
        return header, body

    wire.before, wire.up = kill, look
    with suppress(Killed):
        train(flower(tmp_path, "fedsimclr", **FEW), wire=wire)
    run = go_on(tmp_path / "run", wire=Direct(parts(tmp_path), up=look))
    assert weights(run) == in_process(tmp_path, "fedsimclr", **FEW)
    assert len(adverts) == len(set(adverts)) == 9  # of two rounds, and one once more


RECORD = {
    "privacy.level": "record",
    "privacy.noise": 1.0,
    "privacy.noise_from": "seed",
    "model.early_norm": "all_gn",
    "privacy.max_ratio": "inf",
}
CLIENT = {
    **RECORD,
    "privacy.level": "client",
    "privacy.noise_at": "clients",
    "train.min_clients": 3,
}


def spent(tmp_path: Path) -> list[list[int]]:
    """The exchanges that each site's own account counts."""
    accounts = sorted(tmp_path.glob("node*/spent/*/spent.json"))
    return [sorted(entry[0] for entry in json.loads(path.read_text())) for path in accounts]


@pytest.mark.parametrize("private", [RECORD, CLIENT], ids=["record", "client"])
def test_a_budget_under_masks(tmp_path: Path, private: dict[str, Any]) -> None:
    """The same bits as in one process, and every site counts the method's own exchanges."""
    options = {**FEW, **private}
    run = train(flower(tmp_path, "fedrot", **options), wire=Direct(parts(tmp_path)))
    assert weights(run) == in_process(tmp_path, "fedrot", **options)
    assert spent(tmp_path) == [[0, 1]] * 3


def test_a_round_that_is_done_again_costs_only_where_the_noise_is_new(tmp_path: Path) -> None:
    """The server dies before a sum is opened: keys are new, and so is the noise of level client."""

    def kill(node: int, header: dict[str, Any]) -> None:
        if header["kind"] == "work" and header["exchange"]["index"] == 8 and node == 101:
            raise Killed

    for name, private, counted in (("record", RECORD, [0, 1]), ("client", CLIENT, [0, 1, 1])):
        place = tmp_path / name
        wire = Direct(parts(place))
        wire.before = kill
        options = {**FEW, **private, "privacy.noise_from": "secret"}
        with suppress(Killed):
            train(flower(place, "fedrot", **options), wire=wire)
        go_on(place / "run", wire=Direct(parts(place)))
        assert spent(place) == [counted] * 3


def test_clients_open_no_sum_with_too_little_noise(tmp_path: Path) -> None:
    """A server that names fewer clients than their shares of the noise were made for."""
    wire = Direct(parts(tmp_path, 4))

    def fewer(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if header["kind"] == "work" and header["exchange"]["index"] == 3:
            assert b"[0, 1, 2, 3]" in body
            body = body.replace(b"[0, 1, 2, 3]", b"[0, 1, 2   ]")
        return header, body

    wire.down = fewer
    options = {**FEW, **CLIENT, "clients": 4, "train.min_clients": 4, "data.images": 40}
    with pytest.raises(FurlongError, match=r"client 0: .* fewer than 4 clients"):
        train(flower(tmp_path, "fedrot", rounds=1, **options), wire=wire)


def test_a_site_that_falls_silent(tmp_path: Path) -> None:
    """In the middle of a round: the others' sum is opened without it, and it comes back."""
    scans = draw_scans(tmp_path)
    names = ("amber", "blue", "coral")
    wire = Direct(owners(scans, tmp_path, names))

    def silent(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes] | None:
        stuck = header["kind"] == "work" and header["client"] == 1
        return None if stuck and header["exchange"]["index"] == 2 else (header, body)

    wire.down = silent
    settings = sites(
        tmp_path, **SECURE, **{"secure.fewest": 2, "secure.threshold": 0.5, "run.deadline": 1}
    )
    train(settings, wire=wire)
    assert [line.get("summed") for line in lines(tmp_path)] == [None] * 4 + [2] + [None] * 4 + [3]
    assert [len(line) for line in failures(tmp_path)] == [0, 0, 1] + [0] * 7


def test_a_site_is_shown_what_leaves_it(tmp_path: Path) -> None:
    scans = draw_scans(tmp_path)
    plain, masked = (
        disclosure(owners(scans, tmp_path, ["amber"], agree=sites(tmp_path, secure=on))[0])
        for on in (False, True)
    )
    assert {field.name for field in masked.fields} == {"sent"}
    answers = {field.answer: field.bytes for field in masked.fields}
    assert set(answers) == {"train", *(f"train: {p}" for p in ("keys", "shares", "list", "unmask"))}
    numbers = sum(field.elements for field in plain.fields)
    assert answers["train"] == 8 * (numbers + 3)
    assert "Masked numbers" in masked.caution


# ---------------------------------------------------------------- sites that know each other's keys


def acquainted(tmp_path: Path, strangers: tuple[tuple[int, int], ...] = ()) -> list[Site]:
    """Three nodes with identities; ``strangers``: (who does not know, whom)."""
    folders = [tmp_path / f"identity{k}" for k in range(3)]
    keys = [Identity.at(folder).public.hex() for folder in folders]
    for k, folder in enumerate(folders):
        for other, key in enumerate(keys):
            if (k, other) not in strangers:
                (folder / "known" / f"{other}.pub").write_text(key)
    return [
        Site(tmp_path / f"node{k}", part=k, device="cpu", identity=folder)
        for k, folder in enumerate(folders)
    ]


def replay(wire: Direct, *, index: int) -> list[dict[str, Any]]:
    """The server asks node 101 again what it asked in exchange ``index``, one exchange later."""
    asked: list[Any] = []
    answers: list[dict[str, Any]] = []

    def again(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if header["kind"] == "work" and header["client"] == 1:
            if header["exchange"]["index"] == index:
                asked.append((header, body))
            elif header["exchange"]["index"] == index + 1:
                answers.append(wire.sites[101].answer(*asked[0])[0])
        return header, body

    wire.down = again
    return answers


def test_a_site_answers_once(tmp_path: Path) -> None:
    """A server that makes a site go back could ask for another list; with an identity it cannot."""
    with_it, without = Direct(acquainted(tmp_path)), Direct(parts(tmp_path / "without"))
    refused, answered = replay(with_it, index=3), replay(without, index=3)
    train(flower(tmp_path, rounds=1, **FEW), wire=with_it)
    train(flower(tmp_path / "without", rounds=1, **FEW), wire=without)
    assert [said.get("failed") for said in refused] == ["raised"]
    assert "answered that already" in refused[0]["reason"]
    assert [said.get("slice") for said in answered] == [0]


def test_under_the_same_masks_a_share_of_noise_is_the_same(tmp_path: Path) -> None:
    """Or a server that asks everybody ten times has the mean of ten shares in its sum."""
    wire, replies = Direct(parts(tmp_path)), list[bytes]()
    answer = wire.sites[101].answer

    def keep(header: Any, body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        said = answer(header, body)
        if header["kind"] == "work" and header["exchange"]["index"] == 2:
            replies.append(bytes(said[1]))
        return said

    wire.sites[101].answer = keep  # type: ignore[method-assign]
    again = replay(wire, index=2)
    options = {**FEW, **CLIENT, "privacy.noise_from": "secret"}
    train(flower(tmp_path, "fedrot", rounds=1, **options), wire=wire)
    assert [said.get("slice") for said in again] == [0]
    masked = [unpack(bytearray(reply)).upload.sent["masked"] for reply in replies]
    assert len(masked) == 2
    assert torch.equal(*masked)
    assert spent(tmp_path) == [[0], [0, 0], [0]]  # each answer is counted, whatever it is


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    """Client 0 was not given client 2's key: it does not share with it, and nothing is summed."""
    train(flower(tmp_path, rounds=1, **FEW), wire=Direct(acquainted(tmp_path, ((0, 2),))))
    [failure] = failures(tmp_path)[1]
    assert failure["client"] == 0
    assert "client 2 signs with a key" in failure["reason"]
    assert [line.get("summed") for line in lines(tmp_path)] == [None] * 5


def test_an_identity_takes_part_in_secure_runs_only(tmp_path: Path) -> None:
    said, _ = acquainted(tmp_path)[0].answer(hello())
    assert "secure.sums is false" in said["refused"]


def test_identities_are_files(tmp_path: Path) -> None:
    one = Identity.at(tmp_path)
    assert Identity.at(tmp_path) == one
    assert (tmp_path / "identity.key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "identity.pub").read_text().strip() == one.public.hex()
    (tmp_path / "known" / "other.pub").write_text("not a key")
    with pytest.raises(FurlongError, match=r"other\.pub is not a key"):
        Identity.at(tmp_path)
