"""Who may import whom, and what nobody may use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "furlong"
FILES = sorted(SRC.rglob("*.py"))
FEDERATION = {
    "method",
    "context",
    "federation",
    "rounds",
    "guard",
    "engines",
    "methods",
    "checkpoint",
    "runfolder",
    "assemble",
    "experiment",
    "monitor",
    "finetune",
    "measure",
    "report",
    "config",
    "cli",
    "demo",
    "tables",
    "compare",
    "comparison",
    "mapping",
    "meeting",
    "site",
}
LEAVES = {"aggregation", "losses", "clustering", "weights", "payload", "nets", "metrics"}
LEAVES |= {"errors", "figures", "words", "peernorm", "sensor", "optim", "instahide", "ondisk"}
LEAVES |= {"papers", "significance", "tsne", "compress", "certificates", "deploy"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Names of furlong modules that a file imports, without the leading ``furlong.``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "furlong":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("furlong."):
                found.add(node.module.removeprefix("furlong."))
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("furlong.") for a in node.names if a.name.startswith("furlong.")
            }
    return found


def modules(path: Path) -> set[str]:
    """All modules that a file imports, wherever in it."""
    tree = ast.parse(path.read_text())
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return found | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_respect_the_layers(path: Path) -> None:
    me, top = name_of(path), name_of(path).split(".")[0]
    tops = {name.split(".")[0] for name in imports(path)}
    if top in LEAVES | {"data", "evaluate"}:
        assert not tops & FEDERATION
    elif top == "methods":
        assert tops <= LEAVES | {"data", "method", "context", "methods"}
    elif top in ("rounds", "guard", "engines", "federation", "method", "context"):
        if me == "engines.flower":  # Flower starts a run through it
            tops -= {"experiment", "config"}
        assert not tops & {"methods", "experiment", "cli", "config", "report"}
    elif top == "cli":
        assert "rounds" not in tops
    if me != "engines.flower":  # its programs may be named elsewhere
        assert "flwr" not in {name.split(".")[0] for name in modules(path)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_pickle(path: Path) -> None:
    """No pickle, nothing that unpickles, and no torchvision."""
    banned = (
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "joblib",
        "shelve",
        "marshal",
        "torchvision",
    )
    assert not {m for m in modules(path) if m.split(".")[0] in banned}
    code = ast.unparse(ast.parse(path.read_text()))
    assert not re.search(r"torch\.(load|save)\b", code)
    assert not re.search(r"allow_pickle\s*=\s*True", code)
    assert not re.search(r"\b(eval|exec)\(", re.sub(r"\.(eval|exec)\(", "", code))
    assert "deepcopy" not in code


def test_the_scan_scans() -> None:
    assert len(FILES) > 20
    assert "rounds" in {name_of(f) for f in FILES}
    assert "method" in imports(SRC / "rounds.py")
