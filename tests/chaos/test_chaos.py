"""A short part of ``make chaos``: the same code, the same seed, few tries."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import chaos
import children
import fuzzing
import pytest


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> chaos.Runs:
    return chaos.Runs(tmp_path_factory.mktemp("chaos"), seed=1)


def good(row: chaos.Row) -> None:
    assert row.tries
    assert row.good, row


@pytest.mark.parametrize("number", [60, 170])
def test_a_kill(runs: chaos.Runs, number: int) -> None:
    """At a file operation of the first round, and of the last."""
    out, note = runs.place(), runs.folder / "where"
    note.unlink(missing_ok=True)
    fault = children.killed_at(number, note)
    children.child(runs.words("fedsimclr", out), runs.folder / "log", fault)
    assert note.exists()
    over, same, said = runs.go_on("fedsimclr", out)
    assert over, said
    assert same


@pytest.mark.slow
def test_more_kills_and_limits(runs: chaos.Runs) -> None:
    good(chaos.kills_at_files(runs, 2))
    good(chaos.kills_at_times(runs, 2))
    good(chaos.killed_workers(runs, 1))
    good(chaos.wrong_clocks(runs, 1))
    for name, fault in (
        ("disk full", lambda out: children.full_disk(7, out)),
        ("few file descriptors", lambda _: children.few_descriptors(16)),
        ("little memory", lambda _: children.little_memory(30 << 20)),
    ):
        good(chaos.starved(runs, 1, name, fault))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        chaos.killed_servers,
        chaos.restarted_nodes,
        *(partial(chaos.bad_nodes, kind=kind) for kind in chaos.KINDS),
    ],
)
def test_federations(tmp_path: Path, fault: partial[chaos.Row]) -> None:
    good(fault(chaos.Federations(tmp_path, random.Random(1)), 1))


def test_damaged_input(tmp_path: Path) -> None:
    """Every reader, twenty times; those that decode images or train, twice."""
    rows = list(chaos.fuzzed(tmp_path / "fuzz", 10, 1, lambda _: None))
    assert len(rows) > 20
    assert not [note for row in rows for note in row.notes]


def test_a_finding_is_found() -> None:
    """The table would show it: a reader that fails in a way that nobody allowed."""
    reader = fuzzing.Reader([b"[1, 2]"], lambda data: 1 / data.count(b"["))
    assert fuzzing.by_chance(reader, 50, 1)
    row = chaos.Row("x", "y", 2, 1)
    assert not row.good
    assert "| x | 2 | 1 | – | 0 | y |" in chaos.table([row])
