"""Checkpoints are whole or absent; a damaged one is passed over; a killed run resumes exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import furlong
from furlong.core.payload import pack, unpack
from furlong.engines.states import StateFolder
from furlong.errors import FurlongError
from furlong.methods.base import Model
from furlong.runs import checkpoint, loop
from furlong.runs.folder import RunFolder


def server(value: float) -> Model:
    return Model({"w": torch.full((100,), value)})


def states() -> list[tuple[int, bytes]]:
    return [(k, bytes(pack({"t": torch.tensor(k)}))) for k in range(3)]


def save(run: Path, done: int) -> None:
    checkpoint.save(run, done, server(done), states(), {"seconds": 1.5})


def test_round_trip_and_pruning(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    for done in (1, 2, 3):
        save(tmp_path, done)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["000002", "000003"]
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert (found.done, found.counters, found.notes) == (3, {"seconds": 1.5}, [])
    assert found.server.weights["w"][0] == 3
    assert unpack(found.clients[1].read_bytes())["t"] == 1


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    newest = tmp_path / "checkpoints" / "000002"
    backup = tmp_path / "backup"
    shutil.copytree(newest, backup)
    chance = random.Random(0)
    for path in sorted(backup.iterdir()):
        whole = path.read_bytes()
        for how in ("cut", "flip", "gone", "empty", "flip", "flip"):
            shutil.rmtree(newest)
            shutil.copytree(backup, newest)
            place = newest / path.name
            if how == "gone":
                place.unlink()
            elif how == "flip":
                at = chance.randrange(len(whole))
                place.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            else:
                place.write_bytes(whole[: len(whole) // 2] if how == "cut" else b"")
            found = checkpoint.load(tmp_path)
            assert found is not None
            assert found.done == 1, (path.name, how)
            assert "000002 is damaged" in found.notes[0]
    shutil.rmtree(newest)
    shutil.copytree(backup, newest)
    manifest = json.loads((backup / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "done": 7}))
    found = checkpoint.load(tmp_path)  # JSON, with the right files, and yet not what was written
    assert found is not None
    assert found.done == 1
    shutil.rmtree(tmp_path / "checkpoints" / "000001")
    with pytest.raises(FurlongError, match="no checkpoint"):
        checkpoint.load(tmp_path)


def kept_states(run: Path) -> list[str]:
    """``client-number`` of every file with a state."""
    return sorted(path.stem for path in (run / checkpoint.STATES).iterdir())


def test_only_new_states_are_read_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many clients there are; what no checkpoint needs any more is removed."""
    store = StateFolder(tmp_path / checkpoint.STATES)
    read: list[str] = []
    entry = checkpoint._entry

    def seen(path: Path) -> dict[str, Any]:
        read.append(path.stem)
        return entry(path)

    monkeypatch.setattr(checkpoint, "_entry", seen)

    def save(done: int, *clients: int) -> list[str]:
        read.clear()
        for client in clients:
            store.put(client, f"state {done}")
        checkpoint.save(tmp_path, done, server(done), store.items(), {})
        return sorted(read)

    assert save(1, 0, 1, 2, 3) == ["00000-000001", "00001-000002", "00002-000003", "00003-000004"]
    assert save(2, 1, 1) == ["00001-000006"]
    assert save(3) == []
    assert kept_states(tmp_path) == ["00000-000001", "00001-000006", "00002-000003", "00003-000004"]
    assert save(4, 0) == ["00000-000007"]
    assert "00000-000001" in kept_states(tmp_path)  # of checkpoint 3
    found = checkpoint.load(tmp_path)
    assert found is not None
    texts = {client: unpack(path.read_bytes()) for client, path in found.clients.items()}
    assert texts == {0: "state 4", 1: "state 2", 2: "state 1", 3: "state 1"}


@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_state_is_noticed(tmp_path: Path, how: str) -> None:
    """It damages all checkpoints that refer to it, and no other."""
    store = StateFolder(tmp_path / checkpoint.STATES)
    for done in (1, 2):
        store.put(0, f"state {done}")
        if done == 1:
            store.put(1, "the same")
        checkpoint.save(tmp_path, done, server(done), store.items(), {})

    def damage(client: int) -> checkpoint.Checkpoint | None:
        path = dict(store.items())[client]
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] + (b"" if how == "cut" else b"!"))
        return checkpoint.load(tmp_path)

    found = damage(0)
    assert found is not None
    assert found.done == 1
    assert "000002 is damaged" in found.notes[0]
    with pytest.raises(FurlongError, match=r"no checkpoint in .* is whole.*00001-000002"):
        damage(1)


@pytest.mark.parametrize("later", [2, 5])
def test_a_name_that_is_given_anew_is_read_anew(tmp_path: Path, later: int) -> None:
    """The run went back from a damaged checkpoint, which still names other bytes so."""
    store = StateFolder(tmp_path / checkpoint.STATES)
    for done in (1, later):
        store.put(0, f"state {done}")
        checkpoint.save(tmp_path, done, server(done), store.items(), {})
    dict(store.items())[0].unlink()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.done == 1
    again = StateFolder(tmp_path / checkpoint.STATES)
    again.restore(found.clients)
    for done in (2, 3):
        again.put(done - 2, "another state")
        checkpoint.save(tmp_path, done, server(done), again.items(), {})
        found = checkpoint.load(tmp_path)
        assert found is not None
        assert found.done == done
        assert not found.notes


def test_a_folder_among_the_states_stops_nothing(tmp_path: Path) -> None:
    store = StateFolder(tmp_path / checkpoint.STATES)
    for done in range(1, 9):
        store.put(0, f"state {done}")
        for name in ("a", "b", "c", "d"):
            (store.folder / f"@{name}").mkdir(exist_ok=True)
        checkpoint.save(tmp_path, done, server(done), store.items(), {})
    assert kept_states(tmp_path) == ["00000-000007", "00000-000008", "@a", "@b", "@c", "@d"]


def test_states_stay_while_a_manifest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of descriptors, say; those of a manifest that says nonsense may go."""
    store = StateFolder(tmp_path / checkpoint.STATES)
    store.put(0, "state")
    checkpoint.save(tmp_path, 1, server(1), store.items(), {})

    def scarce(_: Path) -> bytes:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", scarce)
    checkpoint.tidy(tmp_path)
    monkeypatch.undo()
    assert kept_states(tmp_path) == ["00000-000001"]
    (tmp_path / "checkpoints" / "000001" / "manifest.json").write_text("{}")
    checkpoint.tidy(tmp_path)
    assert kept_states(tmp_path) == []


def in_the_old_layout(run: Path) -> None:
    """As versions wrote it that kept all states in every checkpoint."""
    for folder in sorted((run / "checkpoints").iterdir()):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["digest"]
        for client, known in manifest.pop("clients").items():
            name = f"client-{int(client):05d}.safetensors"
            shutil.copy(run / checkpoint.STATES / known.pop("file"), folder / name)
            manifest["files"][name] = known
        path.write_text(json.dumps({**manifest, "digest": checkpoint._digest(manifest)}))
    shutil.rmtree(run / checkpoint.STATES)
    settings = (run / "config.toml").read_text()
    (run / "config.toml").write_text(settings.replace("[run]", "[run]\nstate_memory_mb = 4096"))
    (run / "digests.json").unlink()


def test_resume_with_clients_that_wait(tmp_path: Path) -> None:
    """Two of three clients take part in a round; the third's state is from an earlier one."""
    options = {
        "fraction": 0.67,
        "rounds": 4,
        "data.images": 24,
        "data.test_images": 10,
        "evaluate.probe": "none",
        "evaluate.knn_every": 99,
    }
    whole = loop.run(tiny("fedu", out=str(tmp_path / "whole"), **options))
    stopped = tmp_path / "stopped"

    def show(status: loop.Status) -> None:
        if status.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(tiny("fedu", out=str(stopped), **options), show)
    (stopped / checkpoint.STATES / ".00001.draft").write_text("of a worker that was killed")
    (stopped / checkpoint.STATES / "00001-000099.safetensors").write_text("of no checkpoint")
    old = tmp_path / "old"
    shutil.copytree(stopped, old)
    in_the_old_layout(old)
    ended = checkpoint.load(whole.folder)
    assert ended is not None
    states = {client: path.read_bytes() for client, path in ended.clients.items()}
    assert len(states) == 3
    for out in (stopped, old):
        loop.resume(out)
        found = checkpoint.load(out)
        assert found is not None
        assert pack(found.server) == pack(ended.server)
        assert {client: path.read_bytes() for client, path in found.clients.items()} == states
        assert len(kept_states(out)) == 5  # of two checkpoints, which have one in common
        assert not list(out.rglob("*.draft"))


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path, 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FurlongError, match=r"No space left on device.*furlong resume"):
        save(tmp_path, 2)
    monkeypatch.undo()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.done == 1
    assert not list((tmp_path / "checkpoints").glob(".draft*"))


def test_resume_after_every_round(tmp_path: Path) -> None:
    """Stop a run after each of two rounds: the same bits, metrics without gaps or repeats."""
    whole = loop.run(tiny("fedu", rounds=3, out=str(tmp_path / "whole")))
    for stop in (1, 2):
        out = tmp_path / f"stopped-{stop}"

        class Stopped(Exception):
            pass

        def show(status: loop.Status, stop: int = stop) -> None:
            if status.done == stop:
                raise Stopped

        with pytest.raises(Stopped):
            loop.run(tiny("fedu", rounds=3, out=str(out)), show)
        # as if the run had been killed between the log line and the checkpoint
        RunFolder(out).append({"exchange": stop, "round": stop, "half": "done"})
        said: list[str] = []
        again = loop.resume(out, {"workers": 2}, say=said.append)
        assert f"going on after exchange {stop}" in said
        assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
        lines = RunFolder(out).record.raw_lines()
        assert [line["exchange"] for line in lines] == [0, 1, 2]
        strip = ("seconds", "images_per_second")
        for ours, theirs in zip(lines, RunFolder(whole.folder).record.raw_lines(), strict=True):
            assert {k: v for k, v in ours.items() if k not in strip} == {
                k: v for k, v in theirs.items() if k not in strip
            }
        assert again.summary["bytes_up"] == whole.summary["bytes_up"]


PARTS = {"evaluate.probe": "none", "method.upload_mb": 2}  # MFCL's codes in several exchanges


@pytest.mark.parametrize(
    ("method", "options", "stops"),
    [
        ("fedca", {"evaluate.probe": "none"}, None),
        ("fcl", {"evaluate.probe": "none"}, None),
        pytest.param(
            "mfcl", {**PARTS, "method.refresh": "per_epoch"}, (3, -1), marks=pytest.mark.slow
        ),
        ("mfcl", {**PARTS, "method.train_sensor": False}, (-1,)),
        pytest.param("mfcl", {**PARTS, "method.refresh": "once"}, None, marks=pytest.mark.slow),
        pytest.param(
            "mfcl", {**PARTS, "method.refresh": "per_epoch"}, None, marks=pytest.mark.slow
        ),
    ],
    ids=["fedca", "fcl", "mfcl", "mfcl-untrained", "mfcl-once", "mfcl-per_epoch"],
)
def test_resume_of_methods_with_more_to_keep(
    tmp_path: Path, method: str, options: dict[str, Any], stops: tuple[int, ...] | None
) -> None:
    """Banks, dictionaries, alignment targets, representations on disk.

    After any exchange, or after some: among MFCL's parts, and before the last epoch.
    """
    whole = loop.run(tiny(method, out=str(tmp_path / "whole"), **options))
    total = len(RunFolder(whole.folder).record.raw_lines())
    for stop in range(1, total) if stops is None else [n % total for n in stops]:
        out = tmp_path / f"stopped-{stop}"

        def show(status: loop.Status, stop: int = stop) -> None:
            if status.done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            loop.run(tiny(method, out=str(out), **options), show)
        again = loop.resume(out)
        assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
        lines = RunFolder(out).record.raw_lines()
        assert [line["exchange"] for line in lines] == list(range(total))
        assert not (out / "server").exists()


def test_checkpoints_are_between_rounds(tmp_path: Path) -> None:
    """MFCL's third round has two exchanges, the fourth one."""
    run = loop.run(tiny("mfcl", out=str(tmp_path / "run")))
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["000004", "000005"]


def test_resume_says_when_it_goes_back(tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = loop.run(tiny("fedema", rounds=3, out=str(out)))
    (out / "summary.json").unlink()
    with (out / "checkpoints" / "000003" / "server.safetensors").open("r+b") as file:
        file.seek(500)
        file.write(b"damage")
    said: list[str] = []
    again = loop.resume(out, say=said.append)
    assert any("000003 is damaged" in line for line in said)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    loop.resume(out, say=said.append)
    assert "has finished" in said[-1]


@pytest.mark.parametrize("manifest", ["[]", "{}", "[" * 100_000, '{"files": {"../x": {}}}', "\0"])
def test_a_strange_manifest_is_damage(tmp_path: Path, manifest: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "000002" / "manifest.json").write_text(manifest)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.done == 1
    save(tmp_path, 2)
    again = checkpoint.load(tmp_path)
    assert again is not None
    assert again.done == 2


def test_resume_refuses_other_images(tmp_path: Path) -> None:
    out = tmp_path / "run"
    loop.run(tiny("fedsimclr", out=str(out)))
    (out / "summary.json").unlink()
    config = (out / "config.toml").read_text()
    (out / "config.toml").write_text(config.replace("images = 72", "images = 66"))
    (out / "digests.json").unlink()  # as if the images had changed and not their number here
    with pytest.raises(FurlongError, match="not those that"):
        loop.resume(out)


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    def other() -> None:
        try:
            with RunFolder(tmp_path / "run").locked():
                os._exit(0)
        except FurlongError as error:
            os._exit(7 if "another process" in str(error) else 1)

    with RunFolder.create(tmp_path / "run").locked():
        process = get_context("fork").Process(target=other)
        process.start()
        process.join()
        assert process.exitcode == 7
    process = get_context("fork").Process(target=other)
    process.start()
    process.join()
    assert process.exitcode == 0


def killed_when(condition: Callable[[], bool], *arguments: str) -> None:
    """Start ``furlong ARGUMENTS`` and kill it as soon as ``condition`` holds, or in the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "furlong.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            end = time.monotonic() + 600  # a machine may be busy
            while not condition():
                assert process.poll() is None, process.communicate()[1].decode()
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            process.kill()


def test_kill_9_then_resume(tmp_path: Path) -> None:
    """SIGKILL at two moments, one of them while a checkpoint is being written if it can be met."""
    settings = [
        "--method",
        "fedu",
        "--data.images",
        "72",
        "--data.test-images",
        "40",
        "--data.image-size",
        "16",
        "--partition",
        "iid",
        "--clients",
        "3",
        "--rounds",
        "6",
        "--batch-size",
        "8",
        "--workers",
        "2",
    ]
    out = tmp_path / "killed"
    checkpoints = out / "checkpoints"
    killed_when((checkpoints / "000002").exists, "run", *settings, "--out", str(out))
    killed_when(
        lambda: bool(list(checkpoints.glob(".draft-*"))) or (out / "summary.json").exists(),
        "resume",
        str(out),
    )
    resumed = loop.resume(out)
    options = dict(zip((s.removeprefix("--") for s in settings[::2]), settings[1::2], strict=True))
    options["workers"] = "1"
    whole = furlong.run({}, **options, out=str(tmp_path / "whole"))
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert json.loads((out / "summary.json").read_text())["rounds"] == 6
