"""Where clients' states stay between exchanges: in files, which are read when a client is asked."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from furlong.core.payload import write
from furlong.engines.blobs import Blob
from furlong.files import link

SPARE = 16  # as many files are kept to be written over


class States(ABC):
    """All that the engine asks of what holds the client states."""

    @abstractmethod
    def blob(self, client: int) -> Blob | None:
        """The client's state, if it has one; it stays the store's."""

    @abstractmethod
    def keep(self, client: int, blob: Blob) -> None:
        """Make what :meth:`draft` gave the client's state."""

    def draft(self, client: int, state: Any) -> Blob:  # noqa: ARG002
        """Pack a new state, where the client trains: perhaps in a process forked from this one.

        It counts once it is kept.
        """
        return Blob.of(state)

    def get(self, client: int) -> Any | None:
        """The packed state, or ``None``."""
        blob = self.blob(client)
        return None if blob is None else blob.read()

    def items(self) -> Iterable[tuple[int, Path]]:
        """For a checkpoint: the file of every client whose state has to be in it."""
        return ()

    def restore(self, states: Mapping[int, Path]) -> None:  # noqa: B027
        """Go on with the files of a checkpoint."""

    def close(self) -> None:  # noqa: B027
        """The engine has ended."""


class StateFolder(States):
    """The states of one machine's clients: a file for each, in one folder.

    A worker writes the file and the parent gives it its name, so that neither holds a state that
    nobody works with. No file that is in use is ever changed: a checkpoint only refers to the
    files, and removes those that none needs any more (``runs.checkpoint``). What no checkpoint has
    seen is free when it is replaced: a few such files are written over, which is much faster than
    to make new ones, and the others are removed. Without a folder there is a temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="furlong-"))
        remove = partial(shutil.rmtree, self.folder, ignore_errors=True)
        self._temporary = None if folder else weakref.finalize(self, remove)
        self._now: dict[int, Path] = {}
        self._unsaved: set[Path] = set()
        self._spare: list[Path] = []  # files that nobody needs
        names = (path.stem.rpartition("-")[2] for path in self.folder.glob("*-*.safetensors"))
        self._last = max((int(name) for name in names if name.isdecimal()), default=0)

    def _draft(self, client: int) -> Path:
        return self.folder / f".{client:05d}.draft"

    def blob(self, client: int) -> Blob | None:
        """The client's state, if it has one; a spare file waits where the next one is written."""
        if self._spare:
            self._spare.pop().rename(self._draft(client))
        path = self._now.get(client)
        return None if path is None else Blob(path.stat().st_size, path=path)

    def draft(self, client: int, state: Any) -> Blob:
        """Write the new state to a file; that of a client which is given up is used again.

        It is not written through mapped memory: a full disk would kill the process there, unless
        every block is asked for before, which takes the system ten times as long.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._draft(client)
        with open(path, "wb", opener=_as_it_is) as file:
            write(state, file)
            size = file.truncate()
        return Blob(size, path=path)

    def keep(self, client: int, blob: Blob) -> None:
        """Give the file its name; nobody needs the one before, unless a checkpoint has it."""
        blob.close()
        self._last += 1
        path = self.folder / f"{client:05d}-{self._last:06d}.safetensors"
        self._draft(client).rename(path)
        self._unsaved.add(path)
        before = self._now.get(client)
        self._now[client] = path
        if before in self._unsaved:
            self._unsaved.remove(before)
            self._spare.append(before)
            if len(self._spare) > SPARE:
                self._spare.pop(0).unlink()

    def _remove_spare(self) -> None:
        while self._spare:
            self._spare.pop().unlink()

    def put(self, client: int, state: Any) -> None:
        """Pack and keep a state."""
        self.keep(client, self.draft(client, state))

    def items(self) -> Iterator[tuple[int, Path]]:
        """(client, file) of every client that has a state; the files are the checkpoint's now."""
        self._unsaved.clear()
        self._remove_spare()
        return iter(sorted(self._now.items()))

    def restore(self, states: Mapping[int, Path]) -> None:
        """Go on with the files of a checkpoint.

        Earlier versions kept them beside the server's state, with which they would go some day.
        """
        for client, path in states.items():
            here = self.folder / path.name
            if self._temporary is None and not (here.exists() and here.samefile(path)):
                self.folder.mkdir(parents=True, exist_ok=True)
                here.unlink(missing_ok=True)
                link(path, here)
                path = here
            self._now[client] = path

    def close(self) -> None:
        """Remove what no checkpoint has."""
        self._remove_spare()
        for path in self._unsaved:
            path.unlink(missing_ok=True)
        self._unsaved.clear()
        self._now.clear()
        if self._temporary is not None:
            self._temporary()


def _as_it_is(path: str, flags: int) -> int:
    """Open a file without making it empty first."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)
