"""Everything that can go wrong, many times, against the figures that furlong promises.

``make chaos``, or ``python tests/chaos/chaos.py --scale 1``: about 200 kills and thousands of
damaged inputs. ``--federation N`` adds N kills in a real federation of processes (SuperLink, nodes,
server), each of which takes a minute. ``--fuzz all --seconds 30`` searches every reader for inputs
that it cannot take, guided by coverage. Every fault follows from ``--seed``. Prints a table, and
ends with code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent
sys.path[:0] = map(str, (HERE, TESTS, TESTS / "deploy", TESTS.parent / "src"))

import children  # noqa: E402
import fuzzing  # noqa: E402
import torch  # noqa: E402
from conftest import tiny  # noqa: E402
from federations import Direct, Killed, flower, parts  # noqa: E402

import furlong  # noqa: E402
from furlong.core.method import Report  # noqa: E402
from furlong.core.payload import flatten, pack, replace_tensors  # noqa: E402
from furlong.deploy.session import Session  # noqa: E402
from furlong.engines.codec import decode  # noqa: E402
from furlong.runs import loop  # noqa: E402
from furlong.runs.record import RunRecord  # noqa: E402

GROUPS = ("kills", "federations", "limits", "input")
KINDS = ("slow", "lying", "replaying", "poisoned")  # of bad nodes
METHODS = ("fedsimclr", "fedema", "fcl")  # without state, with a client's state, with features
SHORT = {  # a run of a second: the faults matter, not what is learnt
    "evaluate.probe": "none",
    "evaluate.knn_every": 99,
    "rounds": 3,
    "data.images": 24,
    "data.test_images": 10,
}


@dataclass
class Row:
    """One line of the table."""

    fault: str
    figure: str
    tries: int = 0
    survived: int = 0  # ended as promised
    same: int | None = None  # with the bits of the run without the fault; none: not promised
    lost: int = 0  # runs that could not be brought to their end
    notes: list[str] = field(default_factory=list)

    def count(self, survived: bool, same: bool | None, lost: bool = False, note: str = "") -> None:
        """One try."""
        self.tries += 1
        self.survived += survived
        if same is not None:
            self.same = (self.same or 0) + same
        self.lost += lost
        if note and not (survived and same is not False):
            self.notes.append(note)

    @property
    def good(self) -> bool:
        """Whether the figure was reached."""
        return self.survived == self.tries and self.same in (None, self.tries) and not self.lost


# ---------------------------------------------------------------- runs on one machine


class Runs:
    """Tiny runs on one machine, and what they give without a fault."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance, self._whole = folder, random.Random(seed), {}
        self._number = 0
        # once here: children then find every module loaded
        first = furlong.run_config(tiny("fedsimclr", **SHORT, out=str(self.place())))
        self._bits = {"fedsimclr": str(first.summary["weights_sha256"])}

    def config(self, method: str, **options: Any) -> Path:
        """A configuration file."""
        name = "-".join([method, *(f"{k}={v}" for k, v in options.items())])
        return children.written(tiny(method, **SHORT, **options), self.folder / f"{name}.toml")

    def place(self) -> Path:
        """A new folder."""
        self._number += 1
        return self.folder / f"run-{self._number}"

    def whole(self, method: str) -> tuple[str, float, int]:
        """Bits, seconds and file operations of a run without a fault."""
        if method not in self._whole:
            out, note = self.place(), self.folder / "count"
            words = ["run", str(self.config(method)), "--out", str(out)]
            ended = children.child(words, self.folder / "log", children.counted(note))
            found = children.bits(out)
            assert ended.code == 0, ended.said
            assert found is not None, ended.said
            self._whole[method] = found, ended.seconds, int(note.read_text())
            shutil.rmtree(out)
        return self._whole[method]

    def bits(self, method: str) -> str:
        """Those of a run without a fault."""
        return self._bits.get(method) or self.whole(method)[0]

    def words(self, method: str, out: Path) -> list[str]:
        """The command that begins the run in ``out``, or goes on with it."""
        if (out / "config.toml").exists():
            return ["resume", str(out)]
        return ["run", str(self.config(method)), "--out", str(out)]

    def go_on(self, method: str, out: Path) -> tuple[bool, bool, str]:
        """Go on without a fault: (brought to its end, with the same bits, what was said)."""
        log = self.folder / "log"
        ended = children.child(self.words(method, out), log)
        found, page = children.bits(out), (out / "report.html").exists()
        left = list(out.rglob("*.draft")) + list(out.glob("server"))
        same = found == self.bits(method) and not left
        shutil.rmtree(out, ignore_errors=True)
        return ended.code == 0 and found is not None and page, same, ended.said[-300:]


def killed(
    runs: Runs, row: Row, tries: int, kill: Callable[[str, list[str]], tuple[bool, str]]
) -> None:
    """Kill runs one to four times each, then bring them to their end.

    ``kill(method, words)`` says whether the command was killed, and where.
    """
    while row.tries < tries:
        method, out = runs.chance.choice(METHODS), runs.place()
        met = [kill(method, runs.words(method, out)) for _ in range(runs.chance.randint(1, 4))]
        over, same, said = runs.go_on(method, out)
        for hit, where in met:
            if hit:
                row.count(over, same, not over, f"{method}, {where}: {said}")
        print(f"  {row.fault}: {row.tries} of {tries}, same bits {row.same}", flush=True)


def kills_at_files(runs: Runs, tries: int) -> Row:
    """SIGKILL at a file operation: in the middle of every kind of writing."""
    row, note = Row("kill -9 at a file operation", ""), runs.folder / "where"
    drafts = 0

    def kill(method: str, words: list[str]) -> tuple[bool, str]:
        nonlocal drafts
        number = runs.chance.randint(1, runs.whole(method)[2])
        note.unlink(missing_ok=True)
        ended = children.child(words, runs.folder / "log", children.killed_at(number, note))
        where = note.read_text() if note.exists() else ""
        drafts += "draft" in where or "metrics.jsonl" in where
        return ended.code == -signal.SIGKILL, where

    killed(runs, row, tries, kill)
    row.figure = f"same bits, nothing lost, 10 of 50 in mid-write (here {drafts} of {row.tries})"
    return row


def kills_at_times(runs: Runs, tries: int) -> Row:
    """SIGKILL at a random moment of training, measuring or writing."""
    row = Row("kill -9 at a random moment", "same bits, nothing lost")

    def kill(method: str, words: list[str]) -> tuple[bool, str]:
        after = runs.chance.uniform(0.01, 1.0) * runs.whole(method)[1]
        ended = children.child(words, runs.folder / "log", after=after)
        return ended.code == -signal.SIGKILL, f"after {after:.1f} s"

    killed(runs, row, tries, kill)
    return row


def killed_workers(runs: Runs, tries: int) -> Row:
    """Workers die: their clients are named as lost, the run goes on to its end."""
    row = Row("kill -9 of workers", "the round goes on, the client is named")
    for number in range(tries):
        out, method = runs.place(), "fedsimclr"
        words = ["run", str(runs.config(method, workers=2)), "--out", str(out)]
        fault = children.lost_workers(runs.chance.randrange(2**31), 1 + number % 2)
        ended = children.child(words, runs.folder / "log", fault)
        lost = [f for line in RunRecord(out).lines() for f in line.failures]
        named = all("SIGKILL" in f["reason"] for f in lost)
        row.count(ended.code == 0 and named, None, children.bits(out) is None, ended.said[-300:])
        shutil.rmtree(out, ignore_errors=True)
    return row


def starved(runs: Runs, tries: int, name: str, fault: Callable[[Path], Callable[[], None]]) -> Row:
    """A limit: the run ends, or stops with a sentence and goes on when there is room."""
    row = Row(name, "ends, or a clear error; then same bits")
    for _ in range(tries):
        method, out = runs.chance.choice(METHODS), runs.place()
        words = ["run", str(runs.config(method)), "--out", str(out)]
        ended = children.child(words, runs.folder / "log", fault(out))
        over, same, said = runs.go_on(method, out)
        row.count(ended.clear and over, same, not over, f"{method}: {ended.said[-300:]} {said}")
    return row


def wrong_clocks(runs: Runs, tries: int) -> Row:
    """The wall clock jumps by up to a year at every look."""
    row = Row("clock jumps by up to a year", "same bits")
    for _ in range(tries):
        method, out = runs.chance.choice(METHODS), runs.place()
        words = ["run", str(runs.config(method)), "--out", str(out)]
        fault = children.jumping_clock(runs.chance.randrange(2**31))
        ended = children.child(words, runs.folder / "log", fault)
        same = children.bits(out) == runs.bits(method)
        row.count(ended.code == 0, same, note=ended.said[-300:])
        shutil.rmtree(out, ignore_errors=True)
    return row


# ---------------------------------------------------------------- federations


@dataclass
class Federations:
    """Federations inside this process: real nodes, and a wire that calls them."""

    folder: Path
    chance: random.Random
    number: int = 0

    def place(self) -> Path:
        """A new folder."""
        self.number += 1
        return self.folder / f"federation-{self.number}"

    def settings(self, place: Path, method: str, **options: Any) -> Any:
        """Of a run with three nodes; the probe is left out."""
        return flower(place, method, **{**SHORT, "flower.wait": 0.2, **options})


def killed_servers(f: Federations, tries: int) -> Row:
    """The server dies at any message and goes on; nodes go back to the state of its checkpoint."""
    row = Row("server of a federation killed at a message", "same bits, nothing lost")
    whole: dict[str, tuple[str, int]] = {}
    for _ in range(tries):
        method = f.chance.choice(("fedema", "fedsimclr"))
        if method not in whole:
            place = f.place()
            wire = Direct(parts(place))
            run = loop.run(f.settings(place, method), engine=partial(Session, wire=wire))
            whole[method] = run.summary["weights_sha256"], len(wire.sent)
        place = f.place()
        left = [f.chance.randrange(3, whole[method][1])]

        def kill(_: int, __: dict[str, Any], left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        wire = Direct(parts(place))
        wire.before = kill
        try:
            run = loop.run(f.settings(place, method), engine=partial(Session, wire=wire))
        except Killed:
            engine = partial(Session, wire=Direct(parts(place)))
            out = place / "run"
            if (out / "config.toml").exists():
                run = loop.resume(out, engine=engine)
            else:
                run = loop.run(f.settings(place, method), engine=engine)
        row.count(True, run.summary["weights_sha256"] == whole[method][0])
        shutil.rmtree(place, ignore_errors=True)
    return row


def restarted_nodes(f: Federations, tries: int) -> Row:
    """Nodes are restarted between messages; their state is on disk."""
    row = Row("node restarted between messages", "same bits")
    whole = ""
    for _ in range(tries):
        if not whole:
            place = f.place()
            engine = partial(Session, wire=Direct(parts(place)))
            whole = loop.run(f.settings(place, "fedema"), engine=engine).summary["weights_sha256"]
        place = f.place()
        wire = Direct(parts(place))

        def restart(node: int, _: dict[str, Any], wire: Direct = wire, place: Path = place) -> None:
            if f.chance.random() < 0.4:
                wire.sites[node].close()
                wire.sites[node] = parts(place)[node - 100]

        wire.before = restart
        run = loop.run(f.settings(place, "fedema"), engine=partial(Session, wire=wire))
        row.count(True, run.summary["weights_sha256"] == whole)
        shutil.rmtree(place, ignore_errors=True)
    return row


def forged(chance: random.Random, kind: str, answers: list[tuple[Any, bytes]]) -> Any:
    """What a bad node makes of its newest answer, the last of ``answers``; none: silence."""
    header, body = answers[-1]
    if kind == "slow":
        return None
    if kind == "replaying":
        return (header, answers[-2][1]) if len(answers) > 1 else (header, body[:-9])
    if kind == "lying":
        lie = {"slices": chance.choice((0, -1, 10**9, "x")), "slice": chance.choice((1, None))}
        choice = chance.randrange(3)
        if choice == 0:
            return {**header, **lie}, body
        if choice == 1:
            return header, fuzzing.mutated(chance, body, [body])[: len(body) - 1]
        report: Report[Any] = decode(bytearray(body))
        bad = chance.choice((
            {"examples": 10**7}, {"examples": -3}, {"metrics": {"loss": 1e300}}, {"client": 0},
            {"metrics": {"images": -1.0}}, {"exchange": report.exchange + 1},
        ))  # fmt: skip
        return header, bytes(pack(replace(report, **bad)))
    report = decode(bytearray(body))
    tensors = {n: t for n, t in flatten(report.upload)[0].items() if t.is_floating_point()}
    factor = chance.choice((torch.nan, torch.inf, 9e9, -1e4, 1e3))
    worse = {name: tensor * factor for name, tensor in tensors.items() if "var" not in name}
    return header, bytes(pack(replace(report, upload=replace_tensors(report.upload, worse))))


class Bad(Direct):
    """A wire on which node 101 answers what ``forged`` says, and the others as they should."""

    def __init__(self, place: Path, chance: random.Random, kind: str) -> None:
        super().__init__(parts(place))
        self.chance, self.kind = chance, kind
        self.answers: list[tuple[Any, bytes]] = []

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:
        """As the node answers, or as a bad one does."""
        self.up = self.forge if node == 101 and header["kind"] == "work" else None
        return super().send(node, header, body, seconds)

    def forge(self, header: dict[str, Any], body: bytes) -> Any:
        """The bad answer."""
        self.answers.append((header, body))
        return forged(self.chance, self.kind, self.answers)


def bad_nodes(f: Federations, tries: int, kind: str) -> Row:
    """Refused by name in every round; the result has the bits of the run without that node."""
    row = Row(f"{kind} node", "refused or given up by name; bits as without it")
    honest = ""
    for number in range(tries):
        results = []
        for who in ("slow", kind) if not honest else (kind,):
            place = f.place()
            deadline = {"run.deadline": 3.0} if who == "slow" and kind == "slow" else {}
            wire = Bad(place, random.Random(f.chance.random()), who)
            if who == "slow" and kind != "slow":  # the run without that node
                wire.away = {101}
            engine = partial(Session, wire=wire)
            run = loop.run(f.settings(place, "fedsimclr", **deadline), engine=engine)
            named = [[x["client"] for x in line.failures] for line in RunRecord(run.folder).lines()]
            results.append((run.summary["weights_sha256"], named))
            shutil.rmtree(place, ignore_errors=True)
        honest = honest or results[0][0]
        bits, named = results[-1]
        row.count(named == [[1]] * 3, bits == honest, note=f"{number}: {named}")
    return row


# ---------------------------------------------------------------- real processes


def processes(tries: int, seed: int) -> Iterator[Row]:
    """SuperLink, nodes and server as processes that are killed at random moments."""
    import real_federation as real

    real.PATIENCE = children.PATIENCE
    chance = random.Random(seed)
    rows = {
        "superlink": Row("SuperLink killed (processes)", "nodes come back, resume: same bits"),
        "server": Row("server killed (processes)", "resume: same bits"),
        "node": Row("node killed (processes)", "the round goes on, it comes back"),
    }
    folder = Path(tempfile.mkdtemp(prefix="furlong-chaos-"))
    federation = real.Federation(folder, stall=20)
    options = {"rounds": 3, "optimiser.persist": True}
    try:
        for k in range(3):
            federation.node(k)
        whole = real.in_process(folder / "whole", "fedema", **options)
        for number in range(tries):
            victim, name = list(rows)[number % 3], f"run{number}"
            more = {"run.deadline": 60.0} if victim == "node" else {}
            config = federation.config(name, "fedema", **options, **more)
            run = federation.start(name, "run", config, "--out", name)
            federation.wait(lambda name=name: (folder / name / "config.toml").exists(), "a start")
            if chance.random() < 0.7:  # in the middle of work, of which sending is a part
                _work_begins(federation, run, chance.randint(1, 3))
            time.sleep(chance.uniform(0.0, 3.0))
            ended = run.poll() is not None
            try:
                _strike(federation, victim, run, name)
                survived, same = True, real.bits(folder / name) == whole
                note = ""
            except AssertionError as error:
                survived, same, note = False, False, str(error)[-800:]
            row = rows[victim]
            row.count(survived, None if victim == "node" else same, not survived, note)
            row.figure += " (once it was over already)" if ended else ""
            print(f"  {victim}: survived {survived}, same bits {same}", flush=True)
    finally:
        federation.end()
        shutil.rmtree(folder, ignore_errors=True)
    yield from (row for row in rows.values() if row.tries)


def _work_begins(federation: Any, run: subprocess.Popen[bytes], pieces: int) -> None:
    """Wait until node 0 has received so many questions, or the run has ended."""
    wanted = federation.log("node0").count("received") + pieces
    federation.wait(
        lambda: run.poll() is not None or federation.log("node0").count("received") >= wanted,
        "work at node 0",
    )


def _strike(federation: Any, victim: str, run: subprocess.Popen[bytes], name: str) -> None:
    """Kill, start again, bring the run to its end."""
    if victim == "server":
        run.kill()
        run.wait()
        federation.call("resume", name)
        return
    process = federation.processes["superlink" if victim == "superlink" else "node1"]
    process.kill()
    process.wait()
    if victim == "superlink":
        federation.wait(lambda: run.poll() is not None, "the run's end")
        federation.superlink()
        federation.call("resume", name)
        return
    connected = federation.log("node1").count("connected to")
    federation.node(1)
    federation.wait(lambda: run.poll() is not None, "the run's end")
    assert run.returncode == 0, federation.log(name)
    federation.wait(lambda: federation.log("node1").count("connected to") > connected, "a return")


# ---------------------------------------------------------------- the table


def campaign(
    scale: float, seed: int, only: str = "", say: Callable[[str], None] = print
) -> Iterator[Row]:
    """The faults on this machine whose group ``only`` is, ``scale`` times as often as usual."""
    torch.set_num_threads(1)

    def times(number: int) -> int:
        return max(1, round(scale * number))

    with tempfile.TemporaryDirectory(prefix="furlong-chaos-") as name:
        chance = random.Random(seed)
        runs, f = Runs(Path(name), seed), Federations(Path(name), chance)

        def starve(count: int, what: str, fault: Callable[[Path], Callable[[], None]]) -> Row:
            return starved(runs, times(count), what, fault)

        steps: list[tuple[str, Callable[[], Row]]] = [
            ("kills", lambda: kills_at_files(runs, times(100))),
            ("kills", lambda: kills_at_times(runs, times(60))),
            ("kills", lambda: killed_workers(runs, times(12))),
            ("federations", lambda: killed_servers(f, times(40))),
            ("federations", lambda: restarted_nodes(f, times(5))),
            *(("federations", partial(bad_nodes, f, times(6), kind)) for kind in KINDS),
            ("limits", lambda: starve(
                12, "disk full", lambda out: children.full_disk(chance.randint(1, 30), out))),
            ("limits", lambda: starve(
                8, "12 to 64 file descriptors",
                lambda _: children.few_descriptors(chance.randint(12, 64)))),
            ("limits", lambda: starve(
                8, "little memory",
                lambda _: children.little_memory(chance.randint(1, 200) << 20))),
            ("limits", lambda: wrong_clocks(runs, times(5))),
        ]  # fmt: skip
        for group, step in steps:
            if only in ("", group):
                began = time.monotonic()
                row = step()
                say(f"{row.fault}: {row.survived} of {row.tries}, {time.monotonic() - began:.0f} s")
                yield row
        if only in ("", "input"):
            yield from fuzzed(Path(name) / "fuzz", times(200), seed, say)


def fuzzed(folder: Path, tries: int, seed: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Every reader against damage by chance."""
    folder.mkdir()
    for number, (name, reader) in enumerate(fuzzing.readers(folder).items()):
        slow = name.startswith(("node", "image", "parquet", "encoder"))
        count = max(1, tries // 5 if slow else tries)
        found = fuzzing.by_chance(reader, count, seed + number)
        row = Row(f"damaged input: {name}", "an answer or a clear error", count, count - len(found))
        row.notes += found
        say(f"{row.fault}: {row.survived} of {row.tries}")
        yield row


def guided(seconds: int, seed: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Every reader in a process of its own, which atheris guides by what code an input reaches."""
    with tempfile.TemporaryDirectory(prefix="furlong-fuzz-") as name:
        readers = list(fuzzing.readers(Path(name)))
        for reader in readers:
            words = ["--fuzz", reader, "--seconds", str(seconds), "--seed", str(seed)]
            done = subprocess.run(
                [sys.executable, __file__, *words],
                env=os.environ | {"TMPDIR": name},  # what it leaves is removed with this folder
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            ended = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
            tries, took = map(int, ended.groups()) if ended else (0, 0)
            found = done.returncode != 0 or ended is None
            row = Row(f"fuzzed: {reader}", "an answer or a clear error", tries, tries - found)
            row.lost += ended is None
            row.notes += [done.stderr[-3000:]] if found else []
            what = "FOUND" if found else "nothing found"
            say(f"{row.fault}: {tries:,} inputs in {took} s, {what}")
            yield row


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| fault | tries | survived | same bits | lost | figure |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        same = "–" if row.same is None else str(row.same)
        cells = (row.fault, row.tries, row.survived, same, row.lost, row.figure)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="how often, 1: about 200 kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", choices=["", *GROUPS], help="one group of faults")
    parser.add_argument("--federation", type=int, default=0, help="kills among real processes")
    parser.add_argument("--fuzz", help="one reader or all, guided by coverage (atheris)")
    parser.add_argument("--seconds", type=int, default=60, help="of --fuzz, for each reader")
    given = parser.parse_args()
    if given.fuzz and given.fuzz != "all":
        fuzzing.guided(given.fuzz, given.seconds, given.seed)
    before, began = os.getloadavg(), time.time()
    say = partial(print, flush=True)
    if given.fuzz:
        rows = list(guided(given.seconds, given.seed, say))
    else:
        rows = list(campaign(given.scale, given.seed, given.only, say)) if given.scale else []
        rows += processes(given.federation, given.seed) if given.federation else []
    for row in rows:
        for note in [] if row.good else row.notes[:5]:
            say(f"\n{row.fault}: {note}")
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(began))
    minutes, after = (time.time() - began) / 60, os.getloadavg()
    say(f"\nseed {given.seed}, begun {when} UTC, {minutes:.0f} minutes")
    say(f"load average {before[0]:.1f} at the beginning, {after[0]:.1f} at the end\n")
    say(table(rows))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
