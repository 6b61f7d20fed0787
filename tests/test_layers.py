"""Who may import whom, and what nobody may use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "furlong"
FILES = sorted(SRC.rglob("*.py"))
BASE = {
    "errors",
    "devices",
    "words",
    "files",
    "seeding",
    "settings",
    "plugins",
}  # modules of the top level that know nothing
RULES: dict[str, set[str]] = {  # room -> rooms that it may import
    "nn": set(),
    "data": set(),
    "core": {"nn", "data"},
    "methods": {"core", "nn", "data"},
    "engines": {"core", "nn", "data"},
    "evaluation": {"nn", "data"},
    "runs": {"core", "nn", "data", "methods", "engines", "evaluation", "papers"},
    "audit": {"runs", "core", "nn", "data", "methods", "evaluation"},
    "reports": {"audit", "runs", "core", "nn", "data", "methods", "evaluation", "papers"},
    "deploy": {"runs", "core", "nn", "data", "methods", "engines"},
    "papers": set(),
    **{name: set() for name in BASE},
}
DOCUMENTED = {  # of Flower
    "flwr.app",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.simulation",
}
PRIVATE = {"deploy.flower_private", "deploy.flower_fleet", "deploy.flower_store"}
FREE = {"cli", ""}  # may import everything; "" is the package's own __init__


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
def test_imports_respect_the_rooms(path: Path) -> None:
    me = name_of(path)
    room = me.split(".")[0].removesuffix("__init__")
    if room not in FREE:
        others = {name.split(".")[0] for name in imports(path)} - {room} - BASE
        assert others <= RULES[room], f"{me} imports {sorted(others - RULES[room])}"
    flower = {name for name in modules(path) if name.split(".")[0] == "flwr"}
    if me not in PRIVATE:
        assert flower <= (DOCUMENTED if me == "deploy.flower" else set()), (
            f"{me} imports {sorted(flower)}"
        )


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
    if name_of(path) == "runs.initial":  # the one place that reads files of torch, tensors only
        code, safe = re.subn(
            r"torch\.load\(path, map_location='cpu', weights_only=True\)", "", code
        )
        assert safe == 1
    assert not re.search(r"torch\.(load|save)\b", code)
    assert not re.search(r"allow_pickle\s*=\s*True", code)
    assert not re.search(r"\b(eval|exec)\(", re.sub(r"\.(eval|exec)\(", "", code))
    assert "deepcopy" not in code


def test_the_scan_scans() -> None:
    assert len(FILES) > 20
    assert "core.exchange" in {name_of(f) for f in FILES}
    assert "core.method" in imports(SRC / "core/exchange.py")
