"""Every script in benchmarks/ works, at tiny sizes and within a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
LIMIT = 600  # seconds; the longest takes about twenty on an idle machine, a hang takes for ever


@pytest.mark.slow
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "measuring.py"])
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
