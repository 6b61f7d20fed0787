"""A SuperNode that has half a question: its SuperLink died while sending it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import (
    Context,
    Message,
    Metadata,
    ObjectTree,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesResponse,
    PullTaskInputResponse,
)

from furlong.deploy import supernode
from furlong.deploy.flower_private import Connection
from furlong.deploy.node import Site


class HalfAQuestion:
    """What a SuperNode says that knows of a question and never gets its parts."""

    def __init__(self, ttl: float) -> None:
        self.ttl, self.ended = ttl, 0

    def AcquireTask(self, _: Any) -> Any:
        return SimpleNamespace(token="t", HasField=lambda _: True)

    def PullTaskInput(self, _: Any) -> Any:
        return PullTaskInputResponse(context=Context(node_id=1, run_id=2))

    def PullMessages(self, _: Any) -> Any:
        message = Message(metadata=Metadata(ttl=self.ttl))
        tree = ObjectTree(object_id="a" * 64)
        return PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])

    def PullObject(self, _: Any) -> Any:
        return PullObjectResponse(object_found=True, object_available=False)

    def ConfirmMessageReceived(self, _: Any) -> None:
        raise AssertionError("nothing has been received")

    def PushTaskOutput(self, _: Any) -> None:
        self.ended += 1

    def SendTaskHeartbeat(self, _: Any) -> Any:
        return SimpleNamespace(success=True)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("stall", "ttl"), [(0.2, 1e5), (1e5, 0.2)])
def test_a_node_does_not_wait_for_the_rest_of_a_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stall: float, ttl: float
) -> None:
    """Flower's own function would ask for 83 minutes; the SuperNode has to be started again."""
    half = HalfAQuestion(ttl)
    monkeypatch.setattr(Connection, "executor", lambda _: half)
    monkeypatch.setattr(Connection, "client", lambda *_: half)
    said: list[str] = []
    site = Site(tmp_path, say=said.append)
    watch: Any = SimpleNamespace(alive=lambda: time.monotonic() < until)
    until = time.monotonic() + 6.0
    own = Connection("127.0.0.1:1")
    assert "did not arrive whole" in supernode._served(site, own, watch, stall)
    assert time.monotonic() < until
    assert half.ended == 1  # the SuperNode is told, should it live on
