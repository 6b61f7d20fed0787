"""A run's folder: what is written where, by whom, and that two runs never mix.

config.toml · partition.json · random.safetensors (the encoder before training) · metrics.jsonl (a
line per exchange) · checkpoints/ · server/ (while it runs) · tensorboard/ · summary.json ·
encoder.safetensors + encoder.json · evaluations.json (what ``furlong evaluate`` measured) ·
report.html · federation.json, nodes/, flower.log (on Flower)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from furlong import files
from furlong.core.payload import PayloadError, Weights, pack_tensors, unpack_tensors
from furlong.core.weights import restore
from furlong.data.augment import preset
from furlong.errors import FurlongError
from furlong.files import write_atomically
from furlong.nn.encoders import build_encoder

NOTHING: Mapping[str, type] = {}
RESULT = {"who": str, "protocol": str, "accuracy": float}
SUMMARY = {
    "who": str, "results": list, "clients": int, "images": int, "seconds": float,
    "images_per_second": float, "bytes_up": float, "bytes_down": float, "furlong": str,
    "weights_sha256": str,
}  # fmt: skip


def require(found: Any, needed: Mapping[str, type], where: object) -> None:
    """An error if a piece of JSON lacks something; whole numbers are numbers too."""
    if not isinstance(found, dict):
        raise FurlongError(f"{where} does not hold what furlong wrote: it is damaged.")
    for key, kind in needed.items():
        if not isinstance(found.get(key), (int, float) if kind is float else kind):
            wrong = "is not what it should be" if key in found else "is missing"
            raise FurlongError(f"{where} does not hold what furlong wrote: {key} {wrong}.")


@dataclass
class RunFolder:
    """The files of one run."""

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
        if not (path / "config.toml").exists():
            raise FurlongError(f"{path} is not a run folder: it has no config.toml.")
        return cls(path)

    def evaluations(self) -> list[dict[str, Any]]:
        """Rows like those of summary.json that ``furlong evaluate`` has added since."""
        found = self._json("evaluations.json")
        rows = [] if found is None else found
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FurlongError(
                f"{self.path / 'evaluations.json'} does not hold what furlong wrote; move it away."
            )
        return rows

    def locked(self) -> AbstractContextManager[None]:
        """Refuse a second process."""
        return files.locked(self.path)

    def discard(self) -> None:
        """Remove a folder in which nothing has been written yet."""
        for name in (".lock", "federation.json", "flower.log"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def write(self, name: str, value: Any) -> None:
        """Write a text or JSON file atomically."""
        text = value if isinstance(value, str) else json.dumps(value, indent=1) + "\n"
        try:
            write_atomically(self.path / name, text.encode())
        except OSError as error:
            raise FurlongError(f"cannot write {self.path / name}: {error.strerror}") from None

    def read(self, name: str, needed: Mapping[str, type] = NOTHING) -> dict[str, Any] | None:
        """A JSON object with the ``needed`` entries, or ``None`` if the file is not there."""
        found: dict[str, Any] | None = self._json(name)
        if found is not None:
            require(found, needed, self.path / name)
        return found

    def summary(self) -> dict[str, Any] | None:
        """What a finished run wrote last, or ``None`` if it has not finished."""
        found = self.read("summary.json", SUMMARY)
        for row in [] if found is None else found["results"]:
            require(row, RESULT, f"{self.path / 'summary.json'}, results")
        return found

    def _json(self, name: str) -> Any:
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError, RecursionError) as error:
            raise FurlongError(f"cannot read {path}: {error}") from None

    def append(self, line: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut off by a kill is left out."""
        path = self.path / "metrics.jsonl"
        found: list[dict[str, Any]] = []
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
                found.append(dict(line, exchange=int(line["exchange"])))
            except (ValueError, TypeError, KeyError):
                break
        return found

    def keep_lines(self, done: int) -> None:
        """Forget what was logged after exchange number ``done`` - 1: it will be done again."""
        kept = [json.dumps(line) for line in self.lines() if line["exchange"] < done]
        self.write("metrics.jsonl", "".join(f"{line}\n" for line in kept))

    def save_weights(self, name: str, weights: Weights) -> None:
        """``name``.safetensors."""
        data = pack_tensors(weights, {"format": "pt"})
        path = self.path / f"{name}.safetensors"
        try:
            write_atomically(path, bytes(data))
        except OSError as error:
            raise FurlongError(f"cannot write {path}: {error.strerror}") from None

    def load_weights(self, name: str, module: nn.Module) -> None:
        """Into ``module``."""
        path = self.path / f"{name}.safetensors"
        try:
            restore(module, unpack_tensors(bytearray(path.read_bytes()))[0])
        except OSError as error:
            raise FurlongError(f"cannot read {path}: {error.strerror}") from None
        except (PayloadError, ValueError) as error:
            raise FurlongError(
                f"{path} does not hold a {type(module).__name__} of this run: {error}"
            ) from None

    def save_encoder(self, weights: Weights, about: dict[str, Any]) -> None:
        """encoder.safetensors and encoder.json."""
        self.save_weights("encoder", weights)
        self.write("encoder.json", about)


def load_encoder(run: str | os.PathLike[str]) -> nn.Module:
    """The encoder of a finished run, in eval mode: float images B×C×H×W in, h B×d out.

    ``run`` is a run folder, or a file that ``furlong export --to safetensors`` wrote. The attribute
    ``transform`` turns uint8 images B×C×H×W into what the encoder expects. An encoder of your own
    (``file.py:factory``) is imported as encoder.json says: open only folders you trust. A file,
    which people pass on, may not name code.
    """
    about, weights = read_encoder(run)
    try:
        name, channels, size = str(about["encoder"]), int(about["channels"]), about["image_size"]
        transform = preset(str(about["augment"]), int(size)).plain
    except KeyError as error:
        raise FurlongError(f"{run} does not say the encoder's {error}.") from None
    except (TypeError, ValueError) as error:
        raise FurlongError(f"{run} does not describe an encoder: {error}.") from None
    if ":" in name and Path(run).is_file():
        raise FurlongError(
            f"{run} holds the encoder {name}, which is made by somebody's code. A file must not "
            "decide what is run: open the run folder, or make the encoder yourself and load the "
            "weights with safetensors."
        )
    encoder = build_encoder(name, channels, int(size))
    try:
        restore(encoder, weights)
    except ValueError as error:
        raise FurlongError(
            f"{run} does not hold a {type(encoder).__name__}, as {name} is: {error}"
        ) from None
    encoder.transform = transform  # type: ignore[assignment]
    return encoder.eval()


def read_encoder(run: str | os.PathLike[str]) -> tuple[dict[str, Any], Weights]:
    """What encoder.json says, and the weights; of a run folder or of an exported file."""
    place = Path(run)
    about: dict[str, Any] | None = None
    path = place
    if not place.is_file():
        about, path = RunFolder(place).read("encoder.json"), place / "encoder.safetensors"
        if about is None or not path.exists():
            raise FurlongError(
                f"{place} has no encoder yet. Is it a run folder, and has the run finished? "
                f"'furlong resume {place}' goes on with an interrupted one."
            )
    try:
        weights, metadata = unpack_tensors(bytearray(path.read_bytes()))
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except PayloadError as error:
        raise FurlongError(
            f"{path} is damaged, or not a safetensors file of furlong: {error}"
        ) from None
    return (metadata if about is None else about), weights
