"""What a node keeps on its own disk during a run: states of its clients, slices of messages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from furlong.core.payload import Weights, unpack_tensors
from furlong.engines.blobs import Blob
from furlong.engines.states import States
from furlong.errors import FurlongError
from furlong.files import write_atomically
from furlong.words import size

MOST_SLICES, MOST_BYTES = 10_000, 8 << 30  # of one download
MOST_RUNS = 32  # whose states a node keeps


class StateFiles(States):
    """A client's states in files, one for each exchange that the server may go back to.

    A server that is killed and resumed asks for an exchange again: the client then goes on from
    the state that it had before that exchange, whatever it has stored since.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, 0

    def _of(self, client: int, what: str = "state") -> dict[int, Path]:
        found = self.folder.glob(f"{client:05d}-*.{what}.safetensors")
        return {int(path.name.split("-")[1].split(".")[0]): path for path in sorted(found)}

    def at(self, client: int, exchange: int, since: int | None, oldest: int) -> None:
        """Go (back) to the state of exchange ``since``, the last answer that reached the server.

        What was stored later belongs to answers that were lost, or to a time that the server has
        left. It keeps nothing before ``oldest``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.index = exchange
        for what in ("state", "residual"):
            files = self._of(client, what)
            needed = max((n for n in files if n < oldest), default=0)
            for number, path in files.items():
                if since is None or number > since or number < needed:
                    path.unlink(missing_ok=True)

    def blob(self, client: int) -> Blob | None:
        """The state before the present exchange."""
        files = self._of(client)
        path = files[max(files)] if files else None
        return None if path is None else Blob(path.stat().st_size, path=path)

    def put(self, client: int, packed: Any, what: str = "state") -> None:
        """The state after the present exchange, on disk before anything is answered."""
        path = self.folder / f"{client:05d}-{self.index:06d}.{what}.safetensors"
        write_atomically(path, packed)

    def keep(self, client: int, blob: Blob) -> None:
        """As :meth:`put`."""
        try:
            self.put(client, blob.map())
        finally:
            blob.close()

    def residual(self, client: int) -> Weights:
        """What rounding has lost of earlier answers."""
        files = self._of(client, "residual")
        if not files:
            return {}
        return unpack_tensors(bytearray(files[max(files)].read_bytes()))[0]


class Slices:
    """The download and the answer of one exchange, if they are larger than a message may be."""

    def __init__(self, run: Path, client: int, exchange: int) -> None:
        self._folder, self._client = run / "spool", f"{client:05d}"
        self._down = self._folder / f"{self._client}-{exchange:06d}.down"
        self._up = self._down.with_suffix(".up")

    def collect(self, body: bytes, at: int, of: int) -> bytes | None:
        """The whole download, if slice number ``at`` is its last."""
        if of == 1:
            return body
        before = self._down.stat().st_size if at and self._down.exists() else 0
        if of > MOST_SLICES or before + len(body) > MOST_BYTES:
            self._down.unlink(missing_ok=True)
            raise FurlongError(
                f"a download of {of:,} slices, {size(before + len(body))} so far, is refused: at "
                f"most {MOST_SLICES:,} and {size(MOST_BYTES)}"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._down.open("wb" if at == 0 else "ab") as file:
            file.write(body)
        if at + 1 < of:
            return None
        whole = self._down.read_bytes()
        self._down.unlink()
        return whole

    def keep(self, answer: Any, piece: int) -> int:
        """Store an answer of more than one slice, instead of older ones; the number of slices."""
        for old in self._folder.glob(f"{self._client}-*"):
            old.unlink()
        if len(answer) > piece:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._up.write_bytes(answer)
        return -(-len(answer) // piece)

    def fetch(self, at: int, piece: int) -> tuple[bytes, int]:
        """Slice number ``at`` of the answer, and the number of slices."""
        with self._up.open("rb") as file:
            file.seek(at * piece)
            return file.read(piece), -(-self._up.stat().st_size // piece)


def make_room(runs: Path, name: str) -> list[str]:
    """Forget the oldest runs, if ``name`` is one too many; the names of those that are gone."""
    if (runs / name).exists() or not runs.is_dir():
        return []
    oldest = sorted((p for p in runs.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    gone = oldest[: max(0, len(oldest) - MOST_RUNS + 1)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in gone]
