"""Runs in forked children, which are killed, starved or shown a wrong clock.

A child has torch and furlong loaded already, so that a tiny run takes a second and hundreds of
kills are possible. Every fault is drawn from a seed.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from furlong import cli
from furlong.cli import common
from furlong.runs.config import Config

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
PATIENCE = 900.0  # seconds for one child, on a busy machine


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (below 0: a signal), and what it said."""

    code: int
    said: str
    seconds: float

    @property
    def clear(self) -> bool:
        """Whether it ended by itself, with a sentence if it failed."""
        return self.code >= 0 and "Traceback" not in self.said and self.code in (0, 1, 2)


def child(
    words: list[str], log: Path, fault: Callable[[], None] = lambda: None, after: float = 0.0
) -> Ended:
    """``furlong WORDS`` in a child that first calls ``fault``; killed ``after`` seconds, if any."""
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _be(words, log, fault)
    status = None
    while status is None:
        done, found = os.waitpid(pid, os.WNOHANG)
        late = time.monotonic() - began
        if done:
            status = found
        elif (after and late > after) or late > PATIENCE:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        else:
            time.sleep(0.002)
    text = log.read_text(errors="replace") if log.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), text, time.monotonic() - began)


def _be(words: list[str], log: Path, fault: Callable[[], None]) -> None:
    """The child's whole life.

    With one thread throughout: other tests may have computed with several in this process before it
    was forked, and then several would wait for each other for ever.
    """
    torch.set_num_threads(1)
    torch.set_num_threads = lambda _: None
    code = 70
    try:
        with log.open("w") as said:
            common.console.file = common.err.file = sys.stdout = sys.stderr = said
            fault()
            try:
                cli.main(words)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
            said.flush()
    finally:
        os._exit(code)


# ---------------------------------------------------------------- faults


def killed_at(number: int, note: Path) -> Callable[[], None]:
    """SIGKILL at the file operation of that number; which one it was is written to ``note``."""

    def fault() -> None:
        left = [number]
        me = os.getpid()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in FILE_EVENTS or os.getpid() != me:
                return
            left[0] -= 1
            if left[0] == 0:
                found = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.write(found, f"{event} {arguments[0]}".encode(errors="replace"))
                os.kill(me, signal.SIGKILL)

        sys.addaudithook(hook)

    return fault


def counted(note: Path) -> Callable[[], None]:
    """Write the number of file operations of a whole run to ``note``."""

    def fault() -> None:
        number, me = [0], os.getpid()

        def hook(event: str, _: tuple[Any, ...]) -> None:
            if event in FILE_EVENTS and os.getpid() == me:
                number[0] += 1

        sys.addaudithook(hook)
        leave = os._exit

        def tell(code: int) -> None:
            if os.getpid() == me:
                note.write_text(str(number[0]))
            leave(code)

        os._exit = tell  # type: ignore[assignment]

    return fault


def full_disk(number: int, folder: Path) -> Callable[[], None]:
    """No space is left for the file below ``folder`` of that number, nor for any after it."""

    def fault() -> None:
        left, write = [number], Path.write_bytes

        def refuse(self: Path, data: Any) -> int:
            if self.is_relative_to(folder):
                left[0] -= 1
                if left[0] <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
            return write(self, data)

        Path.write_bytes = refuse  # type: ignore[method-assign]

    return fault


def few_descriptors(number: int) -> Callable[[], None]:
    """At most so many open files."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def little_memory(more: int) -> Callable[[], None]:
    """At most ``more`` bytes of address space beyond what is used already."""

    def fault() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    return fault


def jumping_clock(seed: int) -> Callable[[], None]:
    """The wall clock jumps by up to a year, forwards and backwards, whenever it is read."""

    def fault() -> None:
        chance, now = random.Random(seed), time.time
        time.time = lambda: now() + chance.uniform(-3e7, 3e7)

    return fault


def lost_workers(seed: int, count: int) -> Callable[[], None]:
    """A thread that kills ``count`` of the child's own children, one after the other."""

    def fault() -> None:
        import threading

        chance, me = random.Random(seed), os.getpid()

        def hunt() -> None:
            left = count
            while left:
                time.sleep(chance.uniform(0.05, 0.4))
                found = Path(f"/proc/{me}/task/{me}/children").read_text().split()
                if found:
                    os.kill(int(chance.choice(found)), signal.SIGKILL)
                    left -= 1

        threading.Thread(target=hunt, daemon=True).start()

    return fault


# ---------------------------------------------------------------- runs


def written(settings: Config, path: Path) -> Path:
    """A configuration as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(settings.toml())
    return path


def bits(folder: Path) -> str | None:
    """The digest of a finished run's state."""
    path = folder / "summary.json"
    return json.loads(path.read_text())["weights_sha256"] if path.exists() else None
