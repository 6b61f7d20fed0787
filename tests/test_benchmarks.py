"""Every script in benchmarks/ works, at tiny sizes and within a time limit."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED = ("measuring.py", "series.py")  # what the scripts have in common
SCRIPTS = sorted(p.name for p in (ROOT / "benchmarks").glob("*.py") if p.name not in SHARED)
LIMIT = 600  # seconds; the longest takes about twenty on an idle machine, a hang takes for ever


def test_the_table_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come from JSON or from Markdown, and a goal that was missed is told."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmarks_all", ROOT / "benchmarks" / "all.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, bench)
    spec.loader.exec_module(bench)
    printed = (
        "### words\n| way | model | s per round |\n|---|---|---|\n| plain | small | 9.5 (9–10) |\n"
        "| furlong | small | 0.5 (0–1) |\n\n"
    )
    rows = bench.rows_in(printed)
    assert rows[1] == {"way": "furlong", "model": "small", "s per round": "0.5 (0–1)"}
    slow = {"method": "fedu", "clients": 1000, "overhead_ms": 2.5, "passed": False}
    assert bench.rows_in(json.dumps(slow)) == [slow]
    told = {"command": "python benchmarks/x.py", "seconds": 1, **bench.about(), "idle": False}
    for name, found in (("flower", rows), ("tiny", [slow])):
        (tmp_path / f"{name}.json").write_text(json.dumps({**told, "rows": found}))
    lines = bench.table(tmp_path).splitlines()
    assert "| `x.py` | 0.50 (plain 9.50) | less than plain | met |" in lines[3]
    assert lines[2].endswith(
        "fedu, 1,000 clients of ten images | `x.py` | 2.5 ms | 2 ms | **missed** |"
    )
    assert "- `peers`: not measured." in lines
    assert sum("a busy machine" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("found", "published", "wanted"),
    [
        ([], 1.0, "not run"),
        ([1.9], 1.0, "undecided (one seed)"),
        ([1.9], 50.0, "not reproduced (one seed)"),
        ([2.1], None, "reproduced (one seed)"),
        ([-2.1], 5.0, "refuted (one seed)"),
        ([2.1], 50.0, "reproduced in sign, not in size (one seed)"),
        ([1.0, 1.1, 1.2], 1.0, "reproduced"),
        ([-1.0, -1.1, -1.2], 1.0, "refuted"),
        ([-0.1, 0.0, 0.1], 1.0, "not reproduced"),
        ([-1.0, 0.0, 1.0], 1.0, "undecided"),
        ([-0.1, 0.0, 0.1], None, "undecided"),
    ],
)
def test_the_verdict_on_a_claim(
    found: list[float], published: float | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    claims = importlib.import_module("claims")
    assert claims.verdict(found, published) == wanted
    parts = importlib.import_module("learning").parts()
    rows = {(c.part, row) for cs in claims.PAPERS.values() for c in cs for row in (c.left, c.right)}
    assert all(row in parts[part].rows for part, row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_smoke_mode(script: str) -> None:
    """As a user starts it: from the root of the repository, with all cores for torch."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    paths = [str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--smoke"],
        cwd=ROOT,
        env=env | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=LIMIT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
