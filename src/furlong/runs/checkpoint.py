"""Atomic, verified, resumable run state: safetensors and JSON only.

``RUN/checkpoints/000012/`` holds the server's state and every client's state after 12 exchanges,
and a manifest with their SHA-256. It is written beside its final place, synced, then renamed, so a
checkpoint is either whole or absent; the one before is kept until the next is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furlong.core.payload import PayloadError, pack, unpack
from furlong.errors import FurlongError
from furlong.files import sync

KEEP = 2
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
    clients: dict[int, bytes]  # packed states
    counters: dict[str, float]
    notes: list[str] = field(default_factory=list)  # damaged checkpoints that were passed over


def save(
    run: Path,
    done: int,
    server: Any,
    clients: Iterable[tuple[int, Any]],
    counters: dict[str, float],
) -> Path:
    """Write the checkpoint of ``done`` exchanges and drop all but the newest two."""
    folder = run / _FOLDER
    final, draft = folder / f"{done:06d}", folder / f".draft-{done:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        files = {"server.safetensors": _write(draft / "server.safetensors", pack(server))}
        for client, packed in clients:
            name = f"client-{client:05d}.safetensors"
            files[name] = _write(draft / name, packed)
        manifest = {"done": done, "counters": counters, "files": files}
        manifest["digest"] = _digest(manifest)
        _write(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync(draft)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        sync(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise FurlongError(
            f"could not save checkpoint {done} in {folder}: {error.strerror or error}. Earlier "
            f"checkpoints are intact: make room, then 'furlong resume {run}'."
        ) from None
    for old in _kept(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _kept(run: Path) -> list[Path]:
    """The checkpoints that were written whole, the oldest first."""
    folder = run / _FOLDER
    return sorted(p for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def oldest(run: Path) -> int:
    """The number of exchanges done in the oldest checkpoint that is kept: none can be before it."""
    found = _kept(run)
    return int(found[0].name) if len(found) >= KEEP else 0


def load(run: Path, most: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, or ``None`` if there is none at all.

    ``most``: of those after at most so many exchanges.
    """
    folder = run / _FOLDER
    notes: list[str] = []
    for draft in folder.glob(".draft-*"):  # the writer was killed
        shutil.rmtree(draft, ignore_errors=True)
    for path in reversed(_kept(run)):
        if most is not None and int(path.name) > most:
            continue
        try:
            return _read(path, notes)
        except _DAMAGE as error:
            notes.append(
                f"checkpoint {path.name} is damaged ({error}); going back to the one before"
            )
    if notes:
        raise FurlongError(f"no checkpoint in {folder} is whole: {'; '.join(notes)}")
    return None


def _read(path: Path, notes: list[str]) -> Checkpoint:
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest.pop("digest") != _digest(manifest):
        raise ValueError("manifest.json does not match its digest")
    contents: dict[str, bytearray] = {}
    for name, known in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file")
        data = bytearray((path / name).read_bytes())
        if len(data) != known["bytes"] or hashlib.sha256(data).hexdigest() != known["sha256"]:
            raise ValueError(f"{name} does not match its SHA-256")
        contents[name] = data
    server = unpack(contents.pop("server.safetensors"))
    clients = {
        int(name.removeprefix("client-").removesuffix(".safetensors")): bytes(data)
        for name, data in contents.items()
    }
    return Checkpoint(manifest["done"], server, clients, manifest["counters"], list(notes))


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: Any) -> dict[str, Any]:
    path.write_bytes(data)
    sync(path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
