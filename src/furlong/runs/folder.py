"""A run's folder: what is written where, by whom, and that two runs never mix.

config.toml · partition.json · initial.json (what ``--init`` gave) · random.safetensors (the encoder
before training) · metrics.jsonl (a line per exchange) · checkpoints/ · states/ (of clients; the
checkpoints refer to them) · server/ (while it runs) · tensorboard/ · summary.json ·
encoder.safetensors + encoder.json · adapter.safetensors (A and B, of which the encoder has the sum
with its weights) · map.json (representations in the plane) · evaluations.json (what ``furlong
evaluate`` measured) · audit.json, audit.html (what ``furlong audit`` found) · report.html ·
federation.json, nodes/, flower.log (on Flower) · digests.json (of config.toml, encoder.json and all
weights). ``runs.record`` reads it.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from furlong import files
from furlong.core.noise import KEY
from furlong.core.payload import Weights, pack_tensors
from furlong.errors import FurlongError
from furlong.files import write_atomically
from furlong.runs.record import DIGESTS, RunRecord
from furlong.runs.saved_encoder import fill, read_weights

SERVER = "server"  # room for what is gone when the run has finished
SEALED = ("config.toml", "encoder.json")  # and all weights: nobody edits them


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it is whole or as it was; an error that names it."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise FurlongError(f"cannot write {path}: {error.strerror}") from None


@dataclass
class RunFolder:
    """The files of one run, to be written."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A new run in ``path``, which must not hold one already."""
        if (path / "config.toml").exists():
            raise FurlongError(
                f"{path} already holds a run. 'furlong resume {path}' goes on with it; or choose "
                "another --out."
            )
        if path.exists() and not path.is_dir():
            raise FurlongError(f"--out {path} is a file, not a folder.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FurlongError(f"cannot make the run folder {path}: {error.strerror}") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        return cls(RunRecord.open(path).path)

    @property
    def record(self) -> RunRecord:
        """What the files say now."""
        return RunRecord(self.path)

    def locked(self) -> AbstractContextManager[None]:
        """Refuse a second process."""
        return files.locked(self.path)

    def discard(self) -> None:
        """Remove a folder in which nothing has been written yet."""
        for name in (".lock", "federation.json", "flower.log", f"{SERVER}/{KEY}"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / SERVER, self.path):
            with suppress(OSError):
                folder.rmdir()

    def write(self, name: str, value: Any) -> None:
        """Write a text or JSON file atomically."""
        text = value if isinstance(value, str) else json.dumps(value, indent=1) + "\n"
        self._write(name, text.encode())

    def _write(self, name: str, data: bytes) -> None:
        """Write a file; of what the run depends on the digest, first, so that none is ever old."""
        if name in SEALED or name.endswith(".safetensors"):
            known = {**self.record.digests(), name: hashlib.sha256(data).hexdigest()}
            write_file(self.path / DIGESTS, (json.dumps(known, indent=1) + "\n").encode())
        write_file(self.path / name, data)

    def append(self, line: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def keep_lines(self, done: int) -> None:
        """Forget what was logged after exchange number ``done`` - 1: it will be done again."""
        kept = [json.dumps(line) for line in self.record.raw_lines() if line["exchange"] < done]
        self.write("metrics.jsonl", "".join(f"{line}\n" for line in kept))

    def save_weights(self, name: str, weights: Weights) -> None:
        """``name``.safetensors."""
        self._write(f"{name}.safetensors", bytes(pack_tensors(weights, {"format": "pt"})))

    def load_weights(self, name: str, module: nn.Module) -> None:
        """Into ``module``."""
        self.record.verify(f"{name}.safetensors")
        path = self.path / f"{name}.safetensors"
        fill(module, read_weights(path)[0], path)

    def save_encoder(self, weights: Weights, about: dict[str, Any]) -> None:
        """encoder.safetensors and encoder.json."""
        self.save_weights("encoder", weights)
        self.write("encoder.json", about)
