"""How quickly the program starts, and what it imports before it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import furlong

HEAVY = {"torch", "matplotlib", "scipy", "pandas", "pyarrow", "datasets", "flwr", "tensorboard"}
HEAVY |= {"torch._dynamo"}  # torch's compiler, which its optimisers import


def measure(first: str, then: str) -> tuple[float, float, set[str]]:
    """Seconds of the processor for two statements, and heavy modules; the quicker of two runs."""
    code = f"""
import contextlib, io, json, sys, time
start = time.process_time()
{first}
between = time.process_time()
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    {then}
end = time.process_time()
print(json.dumps([between - start, end - between, sorted({HEAVY} & set(sys.modules))]))
"""
    found: list[Any] = []
    for _ in range(2):  # the first may compile
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    one, two, heavy = min(found, key=lambda each: float(each[1]))
    return one, two, set(heavy)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["rnu"]])
def test_nothing_heavy_is_imported_before_a_command_runs(words: list[str]) -> None:
    seconds, _, heavy = measure(f"from furlong.cli import main; words = {words}", "main(words)")
    assert not heavy
    assert seconds < 1.5


def test_a_run_adds_little_to_torch() -> None:
    """All that ``furlong.run`` imports before it begins."""
    run = "import furlong, furlong.deploy.session, furlong.runs.loop; furlong.run"
    torch, ours, heavy = measure("import torch", run)
    assert heavy <= {"torch"}
    assert ours < max(0.3, torch / 2)


@pytest.mark.parametrize(("given", "wanted"), [(None, "1000"), ("7", "7")])
def test_threads_that_wait_leave_their_core_to_others(given: str | None, wanted: str) -> None:
    """Before torch is there, which reads it once; whoever has set it is right."""
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    code = "import os, sys, furlong; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | ({} if given is None else {"GOMP_SPINCOUNT": given}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [wanted, "False"]


def test_training_a_client_imports_nothing_heavy() -> None:
    """A worker would import it, and each of them anew, before its first step."""
    first = """
from furlong.engines.inprocess import InProcess
from furlong.runs.config import from_tree
from furlong.runs.prepare import prepare
options = {
    "method": "fedbyol", "encoder": "small", "data": "shapes", "data.images": 40, "rounds": 1,
    "data.image_size": 16, "data.test_images": 20, "clients": 2, "batch_size": 8,
    "partition": "iid",
}
p = prepare(from_tree({}, options, "a test"))
"""
    then = "p.server.step(InProcess(p.method, p.federation, p.setup), p.server.init(), "
    _, _, heavy = measure(first, f"{then} p.server.exchanges()[0])")
    assert heavy <= {"torch"}


def test_the_list_of_methods_is_quick() -> None:
    torch, ours, heavy = measure("import torch", "from furlong.cli import main; main(['methods'])")
    assert heavy <= {"torch"}
    assert ours < max(1.0, torch)


def test_public_names_are_found_when_they_are_used() -> None:
    for name in furlong.__all__:
        assert getattr(furlong, name) is getattr(furlong, name)
        assert name in dir(furlong)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = furlong.nothing
