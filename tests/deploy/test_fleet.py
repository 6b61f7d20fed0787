"""A node at a SuperLink, and what it does when that is away, restarted, or refuses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from federations import hello

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeResponse,
    PullMessagesResponse,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity

from furlong.deploy import certs, flower, flower_fleet, membership
from furlong.deploy.flower_fleet import Refused, connected
from furlong.deploy.node import Site
from furlong.errors import FurlongError

OWN = 5  # the node's number


def refused(code: int) -> httpx.HTTPStatusError:
    asked = httpx.Request("POST", "http://127.0.0.1/")
    return httpx.HTTPStatusError("no", request=asked, response=httpx.Response(code, request=asked))


class SuperLink:
    """A SuperLink that asks one question, as far as it is let; ``fail`` may raise at any call."""

    def __init__(self, ttl: float = 1e5, body: bytes = b"") -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 3, 1, 4
        question = Message(flower._content(hello(kind="odd"), body), OWN, "train", ttl=ttl)
        question.metadata.__dict__["_message_id"] = question.object_id
        objects = get_all_nested_objects(question)
        self.objects = {name: each.deflate() for name, each in objects.items()}
        about, tree = message_to_proto(question), get_object_tree(question)
        about.ClearField("content")
        self.question = PullMessagesResponse(messages_list=[about], message_object_trees=[tree])
        self.calls: list[str] = []
        self.pushed: dict[str, bytes] = {}
        self.replies: list[Any] = []
        self.fail: Callable[[str], None] = lambda _: None

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            self.calls.append(name)
            self.fail(name)
            return self._respond(name, request)

        return call

    def _respond(self, name: str, request: Any) -> Any:
        if name == "ActivateNode":
            return ActivateNodeResponse(node_id=OWN)
        if name == "SendNodeHeartbeat":
            return SendNodeHeartbeatResponse(success=True)
        if name == "PullMessages":
            first = self.calls.count(name) == 1
            return self.question if first else PullMessagesResponse()
        if name == "PullObject":
            content = self.objects.get(request.object_id, b"")
            return PullObjectResponse(
                object_found=True, object_available=bool(content), object_content=content
            )
        if name == "PushMessages":
            self.replies += request.messages_list
            wanted = [tree.object_id for tree in request.message_object_trees]
            return PushMessagesResponse(objects_to_push=wanted, session_id="s")
        if name == "PushObject":
            self.pushed[request.object_id] = request.object_content
            return PushObjectResponse(stored=True)
        return None

    def close(self) -> None:
        pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_fleet, "_WAITS", (0.01, 0.01))
    monkeypatch.setattr(flower_fleet, "_RETRY", (0.01, 0.02))
    monkeypatch.setattr(flower_fleet, "_SEEN", 0.0)


def join(
    superlink: SuperLink,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    stall: float = 1e5,
    ends: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Take part until a question is done and ``ends()`` holds; what the node said."""
    said: list[str] = []
    make = "from_server_address"
    monkeypatch.setattr(flower_fleet.FleetHttpClient, make, lambda *_, **__: superlink)
    site = Site(folder / "node", say=said.append)
    until = time.monotonic() + 20

    def fail(name: str, before: Callable[[str], None] = superlink.fail) -> None:
        before(name)
        if name == "PullMessages" and superlink.calls.count(name) > 1 and ends():
            raise refused(401)
        assert time.monotonic() < until, "it did not end"

    superlink.fail = fail
    with connected("127.0.0.1:1", None, folder / "connected", said.append) as place:
        assert (folder / "connected").read_text() == str(OWN)
        with pytest.raises(Refused, match="does not know this node"):
            flower.serve(site, place, stall)
    assert not (folder / "connected").exists()
    assert superlink.calls[-2:] == ["DeactivateNode", "UnregisterNode"]
    return said


@pytest.mark.usefixtures("quick")
def test_a_question_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    superlink = SuperLink(body=bytes(100))
    said = join(superlink, monkeypatch, tmp_path)
    assert said == ["refused: unknown question 'odd'"]
    (reply,) = superlink.replies
    (question,) = superlink.question.messages_list
    assert reply.metadata.reply_to_message_id == question.metadata.message_id
    assert reply.metadata.src_node_id == OWN
    assert list(superlink.pushed) == [reply.metadata.message_id]
    assert superlink.calls.count("ConfirmMessageReceived") == 1
    assert "GetFab" not in superlink.calls  # the server's code does not even come here


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("stall", "ttl"), [(0.3, 1e5), (1e5, 0.3)])
def test_half_a_question_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stall: float, ttl: float
) -> None:
    """The SuperLink died while it was sent; Flower's own program would ask for 83 minutes."""
    superlink = SuperLink(ttl)
    superlink.objects.popitem()
    said = join(superlink, monkeypatch, tmp_path, stall)
    assert said == [
        "a question was not answered: it did not arrive whole; the SuperLink may have been "
        "restarted"
    ]
    assert "ConfirmMessageReceived" not in superlink.calls


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("where", ["PullMessages", "PullObject", "PushMessages", "PushObject"])
@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no"), refused(502), ValueError("Invalid protobuf response")]
)
def test_a_superlink_that_is_away_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, error: Exception
) -> None:
    superlink, left = SuperLink(), [1, 2, 3]

    def fail(name: str) -> None:
        if name == where and superlink.replies[:1] == superlink.replies and left:
            left.pop()
            if name == "PullMessages":  # it is the first that has the question
                superlink.calls.remove(name)
            raise error

    superlink.fail = fail
    said = join(superlink, monkeypatch, tmp_path)
    assert not left
    assert len(superlink.replies) == 1
    away = ["the server does not answer; trying on", "the server answers again"]
    assert said[:-1] == (away if where == "PullMessages" else [])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("code", [403, 500])
def test_an_answer_that_is_not_taken_does_not_end_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    superlink = SuperLink(ttl=0.5)

    def fail(name: str) -> None:
        if name == "PushMessages":
            raise refused(code)

    superlink.fail = fail
    said = join(superlink, monkeypatch, tmp_path)
    assert said[-1].startswith("a question was not answered: ")
    assert ("its run has ended" in said[-1]) == (code == 403)


@pytest.mark.usefixtures("quick")
def test_a_node_that_is_not_known_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its heartbeats say so, too."""
    monkeypatch.setattr(flower_fleet, "BEAT", 0.05)
    superlink = SuperLink()

    def fail(name: str) -> None:
        if name == "SendNodeHeartbeat":
            raise refused(401)

    superlink.fail = fail
    join(superlink, monkeypatch, tmp_path, ends=lambda: False)


@pytest.mark.usefixtures("quick")
def test_the_place_of_a_killed_node_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for before, goodbyes in (("5", 2), ("", 1), ("no number", 1)):
        (tmp_path / "connected").write_text(before)
        superlink = SuperLink()
        join(superlink, monkeypatch, tmp_path)
        assert superlink.calls.count("DeactivateNode") == goodbyes
        assert superlink.calls.count("ActivateNode") == 1


def test_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the time since the last question, within limits."""
    superlink, now, waits = SuperLink(), [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(flower_fleet.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(flower_fleet.time, "sleep", sleep)
    superlink.question = PullMessagesResponse()
    place: Any = flower_fleet.Place(superlink, None)  # type: ignore[arg-type]

    def fail(_: str) -> None:
        if now[0] > 100:
            place.lost.set()

    superlink.fail = fail
    with pytest.raises(Refused):
        place.answer_questions(None, None, 1.0)
    assert waits[0] == 0.1
    assert waits[-1] == 2.0
    assert waits == sorted(waits)
    assert len(waits) < 100


# ---------------------------------------------------------------- the command's part


def test_a_refused_node_ends_after_its_patience(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "fed"
    certs.make_certs(made, ["127.0.0.1"], ["amber"])
    superlink = SuperLink()

    def fail(name: str) -> None:
        if name == "ActivateNode":
            raise refused(409)

    superlink.fail = fail
    make = "from_server_address"
    monkeypatch.setattr(flower_fleet.FleetHttpClient, make, lambda *_, **__: superlink)
    monkeypatch.setattr(membership.time, "sleep", lambda _: None)
    site = Site(tmp_path / "state")
    with pytest.raises(FurlongError, match="does not let this node in: it does not know this"):
        membership.take_part(site, "127.0.0.1:1", made / "amber", 0.2, 1.0)
    assert "DeactivateNode" not in superlink.calls


def test_what_a_node_needs(tmp_path: Path) -> None:
    made = tmp_path / "fed"
    certs.make_certs(made, ["fl.example.org"], ["amber"])
    membership.require_files("fl.example.org:8443", made / "amber")
    with pytest.raises(FurlongError, match=r"there is no .*node\.key"):
        membership.require_files("fl.example.org:8443", made / "server")
    with pytest.raises(FurlongError, match="works on this machine only"):
        membership.require_files("fl.example.org:8443", None)
    membership.require_files("127.0.0.1:8000", None)
    with pytest.raises(FurlongError, match="not an address"):
        membership.require_files("fl.example.org", made / "amber")


def test_a_server_that_cannot_be_reached_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    tell = membership._teller("fl.example.org:8443", said.append)
    for now[0] in (1.0, 14.0, 16.0, 60.0):
        tell("connection refused")
    assert said == ["fl.example.org:8443 cannot be reached yet (connection refused); trying on"]


def test_what_will_not_pass_is_said_at_once() -> None:
    said: list[str] = []
    tell = membership._teller("fl.example.org:8443", said.append)
    for reason in ("[SSL: CERTIFICATE_VERIFY_FAILED] (_ssl.c:1006)", "[SSL: WRONG_VERSION_NUMBER]"):
        tell(reason)
        tell(reason)
    assert [("ca.crt" in line, "TLS" in line) for line in said] == [(True, False), (False, True)]


# ---------------------------------------------------------------- what is carried


@pytest.mark.parametrize("size", [0, 1, 10, 11, 25])
def test_a_body_travels_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(flower, "PIECE", 10)
    body = bytes(range(size))
    content = flower._content({"a": 1}, body)
    assert len(content) == 1 + (size + 9) // 10
    assert flower._read(content) == ({"a": 1}, body)


def test_a_piece_is_smaller_than_what_nginx_takes() -> None:
    """Flower wraps it, and the limit of sites' own nginx cannot be raised from here."""
    template = Path(flower.__file__).parent / "templates" / "site.conf"
    assert "client_max_body_size 16m;" in template.read_text()
    assert flower.PIECE + (1 << 20) < 16 << 20


@pytest.mark.parametrize("pieces", [{"body1": b"x"}, {"body": b"x"}, {"body0": "text"}])
def test_what_is_no_body_is_empty(pieces: dict[str, Any]) -> None:
    records = {name: ConfigRecord({"body": value}) for name, value in pieces.items()}
    assert flower._read(RecordDict(records)) == ({}, b"")
    assert flower._read(RecordDict({"body0": ArrayRecord()})) == ({}, b"")
