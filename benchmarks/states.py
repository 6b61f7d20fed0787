"""What a checkpoint costs, and how much memory a run takes, beside how many clients have a state.

    python benchmarks/states.py [--json] [--smoke] [--encoder small] [--clients 10 100 1000]
    python benchmarks/states.py --encoder resnet18 --clients 1000 --held 20 100 200 --cohort 20

Rounds of FedU with a checkpoint after each. Before the first, ``--held`` of the clients (default:
all) have a state already, each in a file of its own. The cohort stays the same, so that bytes and
seconds of a checkpoint should, too. ``all_seconds`` and ``all_bytes`` are those of a checkpoint
that writes every state anew, as earlier versions did: both are written after every round, in turn
(and left out where all states together exceed ``--most-gb``). ``own_mb`` is the most memory that
this process and its workers held for themselves, messages between them included; ``resident_mb``
the most with the pages of files that they had mapped, which the system takes back when it likes.
What several processes share is counted once.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import parse, parser, show

from furlong.core.payload import unpack
from furlong.engines.inprocess import InProcess
from furlong.engines.states import StateFolder
from furlong.runs import checkpoint
from furlong.runs.config import from_tree
from furlong.runs.prepare import Prepared, prepare

IMAGES = 10  # of each client


def setup(encoder: str, clients: int, cohort: int, workers: int) -> Prepared:
    """A federation in which ``cohort`` clients take part in each round."""
    options = {
        "method": "fedu",
        "encoder": encoder,
        "data.images": IMAGES * clients,
        "data.test_images": 100,
        "partition": "iid",
        "clients": clients,
        "fraction": min(1.0, cohort / clients),
        "rounds": 1000,
        "epochs": 1,
        "batch_size": IMAGES,
        "workers": workers,
    }
    return prepare(from_tree({}, options, "benchmark"))


class Peak(threading.Thread):
    """The most memory that some processes held, looked at every few milliseconds."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.pids, self.own, self.resident = pids, 0, 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            own, files = held(self.pids)
            self.own, self.resident = max(self.own, own), max(self.resident, own + files)


def held(pids: list[int]) -> tuple[int, int]:
    """Bytes of memory that are the processes' own, and of pages of files that they have mapped."""
    found = {"Pss_Anon:": 0, "Pss_File:": 0, "Pss_Shmem:": 0}
    messages: dict[int, int] = {}  # anonymous memory behind descriptors, mapped or not
    for pid in pids:
        for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if row.split()[0] in found:
                found[row.split()[0]] += int(row.split()[1]) * 1024
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "memfd:" in str(fd.readlink()):
                    messages[fd.stat().st_ino] = fd.stat().st_blocks * 512
            except OSError:  # closed since
                continue
    shared = max(found["Pss_Shmem:"], sum(messages.values()))
    return found["Pss_Anon:"] + shared, found["Pss_File:"]


def written(folder: Path, before: set[int]) -> int:
    """Bytes of the files below ``folder`` that were not there before."""
    found = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(stat.st_size for stat in found if stat.st_ino not in before)


def inodes(folder: Path) -> set[int]:
    """Of all files below ``folder``."""
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def timed(run: Path, done: int, server: Any, clients: Any) -> float:
    """Seconds of a checkpoint."""
    began = time.perf_counter()
    checkpoint.save(run, done, server, clients, {})
    return time.perf_counter() - began


def contents(store: StateFolder) -> Iterator[tuple[int, bytes]]:
    """Every client's state, one after another."""
    return ((client, path.read_bytes()) for client, path in store.items())


def measured(p: Prepared, folder: Path, holding: int, rounds: int, most: float) -> dict[str, Any]:
    """One row: ``holding`` clients have a state before the first of ``rounds`` rounds."""
    run, whole = folder / "run", folder / "all"
    store = StateFolder(run / checkpoint.STATES)
    rows: dict[str, list[float]] = {"seconds": [], "bytes": [], "all_seconds": [], "all_bytes": []}
    spent: list[float] = []
    with InProcess(p.method, p.federation, p.setup, p.workers, store) as engine:
        workers = engine.pool.processes if engine.pool else []
        peak = Peak([os.getpid(), *(worker.pid for worker in workers if worker.pid)])
        first, *later = p.server.exchanges()[: rounds + 1]
        state = p.server.step(engine, p.server.init(), first).server
        size = fill(store, p.federation.clients[:holding])
        compared = size * holding <= most * 1e9
        timed(run, 1, state, store.items())
        peak.start()
        for done, exchange in enumerate(later, 2):
            before = inodes(run)  # states of the round count, which workers write
            result = p.server.step(engine, state, exchange)
            assert not result.failures
            state = result.server
            spent.append(result.seconds)
            rows["seconds"].append(timed(run, done, state, store.items()))
            rows["bytes"].append(written(run, before))
            if compared:
                rows["all_seconds"].append(timed(whole, done, state, contents(store)))
                rows["all_bytes"].append(written(whole / "checkpoints" / f"{done:06d}", set()))
        peak.over.set()
        peak.join()
        kept = sum(path.stat().st_size for path in store.folder.iterdir())
        having = len(dict(store.items()))
    found = {name: statistics.median(values) for name, values in rows.items() if values}
    return {
        "clients": len(p.federation.clients),
        "held": having,
        "cohort": len(p.server.cohort(first)),
        "state_mb": round(size / 1e6, 3),
        "states_gb": round(kept / 1e9, 3),
        "round_seconds": round(statistics.median(spent), 3),
        **{k: round(v, 4) if "seconds" in k else int(v) for k, v in found.items()},
        "own_mb": round(peak.own / 1e6),
        "resident_mb": round(peak.resident / 1e6),
    }


def fill(store: StateFolder, clients: list[int]) -> int:
    """Give all ``clients`` the state that one has; its bytes."""
    one = next(path for _, path in store.items())
    state = unpack(bytearray(one.read_bytes()))
    for client in clients:
        if store.blob(client) is None:
            store.put(client, state)
    return one.stat().st_size


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--json", action="store_true")
    words.add_argument("--encoder", default="small")
    words.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    words.add_argument("--held", type=int, nargs="+", help="clients that have a state (all)")
    words.add_argument("--cohort", type=int, default=10, help="clients of a round")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument("--most-gb", type=float, default=4.0)
    words.add_argument("--out", type=Path, default=None, help="on the disk to be measured")
    given = parse(words, clients=[3, 6], cohort=2, rounds=2, workers=2)
    for clients in given.clients:
        p = setup(given.encoder, clients, given.cohort, given.workers)
        for holding in given.held or [clients]:
            folder = Path(tempfile.mkdtemp(prefix="states-", dir=given.out))
            try:
                row = measured(p, folder, holding, given.rounds, given.most_gb)
            finally:
                shutil.rmtree(folder)
            show({"encoder": given.encoder, "workers": given.workers, **row}, given.json)


if __name__ == "__main__":
    main()
