"""requirements.txt is what 'make requirements' would make of constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_every_requirement_is_pinned_as_in_the_constraints_and_has_hashes() -> None:
    text = (ROOT / "requirements.txt").read_text()
    known, mine = pins((ROOT / "constraints.txt").read_text()), pins(text)
    assert {"numpy", "flwr", "cryptography", "sympy"} <= mine.keys()
    assert "torch" not in mine  # left to the platform's index
    assert not [name for name in mine if name.startswith("nvidia")]
    assert {name: v for name, v in mine.items() if known.get(name, v) != v} == {}
    blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
    assert len(blocks) == len(mine)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    assert "://" not in text
