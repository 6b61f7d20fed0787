"""The examples run, and the new method keeps the contract like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from furlong.core.payload import pack
from furlong.engines.inprocess import InProcess

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_new_method_in_at_most_sixty_lines(prepared: Any) -> None:
    path = EXAMPLES / "new_method.py"
    assert len(path.read_text().splitlines()) <= 60
    p = prepared(f"{path}:FedUniform")

    def finish(workers: int) -> bytes:
        with InProcess(p.method, p.federation, p.setup, workers) as transport:
            *_, last = p.server.run(transport, p.server.init())
        assert not last.failures
        return bytes(pack(last.server))

    assert finish(1) == finish(2)
