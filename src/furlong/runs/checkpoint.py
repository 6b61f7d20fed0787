"""Atomic, verified, resumable run state: safetensors and JSON only.

``RUN/checkpoints/000012/`` holds the server's state after 12 exchanges, and a manifest with the
SHA-256 of it and of every client's state. Those are files in ``RUN/states/``, which the engine
writes and nobody changes: a checkpoint syncs and reads only those that are new, and names the
others again. It is written beside its final place, synced, then renamed, so a checkpoint is either
whole or absent; the one before is kept until the next is whole. States that neither needs are
removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furlong.core.layout import PayloadError
from furlong.core.payload import pack, unpack
from furlong.errors import FurlongError
from furlong.files import sync
from furlong.words import size

KEEP = 2
STATES = "states"  # the folder of the clients' states
_LONG = 10 << 30  # bytes that take a while to read
_THREADS = 8  # a disk syncs many files at once in the time of a few
_FOLDER = "checkpoints"
_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    PayloadError,
)


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after ``done`` exchanges."""

    done: int
    server: Any
    clients: dict[int, Path]  # files of packed states
    counters: dict[str, float]
    notes: list[str] = field(default_factory=list)  # damaged checkpoints that were passed over


def save(
    run: Path,
    done: int,
    server: Any,
    clients: Iterable[tuple[int, Any]],
    counters: dict[str, float],
) -> Path:
    """Write the checkpoint of ``done`` exchanges and remove what only older ones needed.

    A client's state is a file in ``RUN/states/``, or packed bytes, which become a file of the
    checkpoint.
    """
    folder = run / _FOLDER
    final, draft = folder / f"{done:06d}", folder / f".draft-{done:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        files = {"server.safetensors": _write(draft / "server.safetensors", pack(server))}
        states: dict[int, Path] = {}
        for client, state in clients:
            if isinstance(state, Path):
                states[client] = state
            else:
                name = f"client-{client:05d}.safetensors"
                files[name] = _write(draft / name, state)
        manifest = {
            "done": done,
            "counters": counters,
            "files": files,
            "clients": _referred(run, done, states),
        }
        manifest["digest"] = _digest(manifest)
        _write(draft / "manifest.json", json.dumps(manifest).encode())
        sync(draft)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        sync(folder)
        for later in _kept(run):  # damaged ones, which the run went back from
            if int(later.name) > done:
                shutil.rmtree(later, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise FurlongError(
            f"could not save checkpoint {done} in {folder}: {error.strerror or error}. Earlier "
            f"checkpoints are intact: make room, then 'furlong resume {run}'."
        ) from None
    tidy(run)
    return final


def _referred(run: Path, done: int, states: dict[int, Path]) -> dict[str, dict[str, Any]]:
    """File, bytes and SHA-256 of every client's state, all of them on the disk.

    What an earlier checkpoint says of a file is true. One of as many exchanges or more was found to
    be damaged, and a name in it may have been given anew.
    """
    known: dict[str, dict[str, Any]] = {}
    for path in reversed(_kept(run)):
        if int(path.name) >= done:
            continue
        with suppress(*_DAMAGE):
            known = {entry["file"]: entry for entry in _manifest(path)["clients"].values()}
            break
    new = [path for path in states.values() if path.name not in known]
    with ThreadPoolExecutor(_THREADS) as pool:
        known |= {entry["file"]: entry for entry in pool.map(_entry, new)}
    if new:
        sync(run / STATES)
    return {str(client): known[path.name] for client, path in states.items()}


def tidy(run: Path) -> None:
    """Remove all checkpoints but the newest two, and the states that neither of them needs."""
    for old in _kept(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    with suppress(OSError):  # what cannot be read or removed now can be another time
        needed = set().union(*(_needed(path) for path in _kept(run)))
        for name in set(os.listdir(run / STATES)) - needed:
            with suppress(OSError):  # such as a folder that a file server has put there
                (run / STATES / name).unlink()


def _needed(path: Path) -> set[str]:
    """The states that a checkpoint refers to; none, if nothing can go on from it."""
    try:
        return {entry["file"] for entry in _manifest(path)["clients"].values()}
    except OSError:
        raise
    except _DAMAGE:
        return set()


def _kept(run: Path) -> list[Path]:
    """The checkpoints that were written whole, the oldest first."""
    folder = run / _FOLDER
    return sorted(p for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def oldest(run: Path) -> int:
    """The number of exchanges done in the oldest checkpoint that is kept: none can be before it."""
    found = _kept(run)
    return int(found[0].name) if len(found) >= KEEP else 0


def load(
    run: Path, most: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
    """The newest checkpoint that is whole, or ``None`` if there is none at all.

    ``most``: of those after at most so many exchanges. ``say`` is told if it takes long.
    """
    folder = run / _FOLDER
    notes: list[str] = []
    for draft in folder.glob(".draft-*"):  # the writer was killed
        shutil.rmtree(draft, ignore_errors=True)
    for path in reversed(_kept(run)):
        if most is not None and int(path.name) > most:
            continue
        try:
            return _read(path, notes, say)
        except _DAMAGE as error:
            notes.append(
                f"checkpoint {path.name} is damaged ({error}); going back to the one before"
            )
    if notes:
        raise FurlongError(f"no checkpoint in {folder} is whole: {'; '.join(notes)}")
    return None


def _manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says, if it says what was written."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    if manifest.pop("digest") != _digest(manifest):
        raise ValueError("manifest.json does not match its digest")
    manifest.setdefault("clients", {})  # earlier versions had all states in ``files``
    named = [*manifest["files"], *(entry["file"] for entry in manifest["clients"].values())]
    for name in named:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file")
    return manifest


def _read(path: Path, notes: list[str], say: Callable[[str], None]) -> Checkpoint:
    manifest = _manifest(path)
    entries = {path / name: entry for name, entry in manifest["files"].items()}
    own = path / "server.safetensors"
    _verify(own, entries.pop(own))
    clients = {int(place.stem.removeprefix("client-")): place for place in entries}
    for client, entry in manifest["clients"].items():
        clients[int(client)] = place = path.parents[1] / STATES / entry["file"]
        entries[place] = entry
    total = sum(entry["bytes"] for entry in entries.values())
    if total > _LONG:
        say(f"reading {size(total)} of states, to see that checkpoint {path.name} is whole")
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(_verify, entries.keys(), entries.values()))
    server = unpack(bytearray(own.read_bytes()))
    return Checkpoint(manifest["done"], server, clients, manifest["counters"], list(notes))


def _verify(path: Path, entry: dict[str, Any]) -> None:
    if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
        raise ValueError(f"{path.name} does not match its SHA-256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    """What a manifest says of a state, which is on the disk then."""
    sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: Any) -> dict[str, Any]:
    path.write_bytes(data)
    sync(path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
