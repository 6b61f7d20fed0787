"""A node at a SuperLink: this process speaks Flower's Fleet API; written for flwr 1.41.

Flower's own program for that, the SuperNode, looks for questions every three seconds, stores each
whole, and hands it to a second program, which hands the answer back: every byte is packed, hashed
and copied twice as often as here.

``tests/deploy/test_flower_contract.py`` says what another version of Flower has moved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from furlong.deploy.flower_private import AGAIN, heartbeats
from furlong.errors import FurlongError, describe

BEAT = 20.0  # seconds between two signs of life; without one for 60 s a node counts as gone
_WAITS = (0.1, 2.0)  # seconds between two looks for a question, at least and at most
_RETRY = (0.5, 5.0)  # seconds between two tries to reach a SuperLink, at first and at last
_SEEN = 5.0  # seconds in which a server notices that a node was gone
_UNANSWERED = (httpx.HTTPError, ValueError)  # a ValueError: a proxy's page, and no answer of Flower


class Refused(FurlongError):
    """The SuperLink does not let this node in, or does not know it any more."""


def is_away(error: Exception) -> bool:
    """Whether there is no SuperLink at the moment, so that trying again can help."""
    return not isinstance(error, httpx.HTTPStatusError) or error.response.status_code >= 500


@dataclass
class Place:
    """A node's place at a SuperLink, while it is connected."""

    client: FleetHttpClient
    node: Node
    lost: threading.Event = field(default_factory=threading.Event)  # it is not known any more

    def beat(self) -> bool:
        """A sign of life; whether the SuperLink knows this node."""
        request = SendNodeHeartbeatRequest(
            node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            return bool(self.client.SendNodeHeartbeat(request).success)
        except httpx.HTTPStatusError as error:
            return is_away(error)

    def answer_questions(
        self, answer: Callable[[Message], Message], say: Callable[[str], None], stall: float
    ) -> None:
        """Answer questions one at a time, until :class:`Refused`.

        The longer none has come, the longer the wait until the next look: a tenth of that time.
        ``stall``: seconds for a question to arrive whole.
        """
        since, away = time.monotonic(), False
        while not self.lost.is_set():
            try:
                found = self.client.PullMessages(PullMessagesRequest(node=self.node))
            except _UNANSWERED as error:
                if not is_away(error):
                    break
                if not away:
                    say("the server does not answer; trying on")
                away = True
                time.sleep(_RETRY[1])
                continue
            if away:
                say("the server answers again")
                since, away = time.monotonic(), False
            if not found.messages_list:
                least, most = _WAITS
                time.sleep(min(max(least, (time.monotonic() - since) / 10), most))
                continue
            try:
                asked = found.messages_list[0].metadata, found.message_object_trees[0]
                self._converse(*asked, answer, stall)
            except Exception as error:  # a question that cannot be answered must not end the node
                say(f"a question was not answered: {_reason(error)}")
            since = time.monotonic()
        raise Refused("the server does not know this node any more")

    def _converse(
        self, about: Any, tree: Any, answer: Callable[[Message], Message], stall: float
    ) -> None:
        """Pull a question, answer it, push the answer, as long as that is of use."""
        # by its length and not by its end, which is by the clock of another machine
        began = time.monotonic()
        end, whole = began + about.ttl, min(stall, about.ttl)
        pull = insisting(self.client.PullObject, began + whole)
        confirm = insisting(self.client.ConfirmMessageReceived, began + whole)
        question = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(pull, self.node, about.run_id),
            make_confirm_message_received_fn_protobuf(confirm, self.node, about.run_id),
            return_type=Message,
            max_time=whole,
            max_tries_per_object=None,
            **AGAIN,
        )
        question.metadata.__dict__["_message_id"] = tree.object_id  # it is not in what is sent
        begun = time.monotonic()
        reply = answer(question)
        self._push(reply, time.monotonic() - begun, end)

    def _push(self, reply: Message, seconds: float, end: float) -> None:
        """Push an answer that took ``seconds``."""
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects, run = get_all_nested_objects(reply), reply.metadata.run_id
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            taken = insisting(self.client.PushMessages, end)(request)
            push = insisting(self.client.PushObject, end)
            push_objects(
                objects,
                make_push_object_fn_protobuf(push, self.node, run, taken.session_id),
                object_ids_to_push=set(taken.objects_to_push),
            )


def insisting(call: Callable[[Any], Any], end: float) -> Callable[[Any], Any]:
    """A call that is tried again, until ``end``, while the SuperLink is away."""

    def insist(request: Any) -> Any:
        pause = _RETRY[0]
        while True:
            try:
                return call(request)
            except _UNANSWERED as error:
                if not is_away(error) or time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _RETRY[1])

    return insist


def _reason(error: Exception) -> str:
    """Why a question was not answered, in words."""
    if isinstance(error, ObjectPullError):
        return "it did not arrive whole; the SuperLink may have been restarted"
    if isinstance(error, ObjectPushError):
        return "the SuperLink did not take the answer"
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 403:
        return "its run has ended"
    return describe(error)


# ---------------------------------------------------------------- coming and going


@contextmanager
def connected(
    superlink: str, certs: Path | None, number: Path, waiting: Callable[[str], None]
) -> Iterator[Place]:
    """A place at a SuperLink, which is waited for; ``certs``: a site's folder, none: insecure.

    ``number`` is a file that is there while the node is connected. If it is there before, the node
    was killed: Flower holds its place for a minute, unless somebody with its key gives it up.
    """
    keys, authority = generate_key_pairs(), None
    if certs is not None:
        private: Any = load_ssh_private_key((certs / "node.key").read_bytes(), None)
        keys, authority = (private, private.public_key()), (certs / "ca.crt").read_bytes()
    public = public_key_to_bytes(keys[1])
    client = FleetHttpClient.from_server_address(
        superlink,
        insecure=certs is None,
        root_certificates=authority,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(*keys),
        ],
    )
    with closing(client):
        node = _enter(client, public, certs is None, number, waiting)
        place = Place(client, node)
        number.write_text(str(node.node_id))
        try:
            with heartbeats(place.beat, BEAT, place.lost):
                yield place
        finally:
            with suppress(*_UNANSWERED):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
                number.unlink()
                if certs is None:
                    client.UnregisterNode(UnregisterNodeFleetRequest(node_id=node.node_id))


def _enter(
    client: FleetHttpClient,
    public: bytes,
    register: bool,
    number: Path,
    waiting: Callable[[str], None],
) -> Node:
    """Connect, as soon as there is a SuperLink; ``register``: one that takes any key."""
    while True:
        try:
            if number.exists():
                _leave(client, number)
            if register:
                client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            request = ActivateNodeRequest(
                public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
            )
            return Node(node_id=client.ActivateNode(request).node_id)
        except _UNANSWERED as error:
            if not is_away(error):
                raise Refused("the server does not let this node in") from None
            waiting(str(error))
        time.sleep(1.0)


def _leave(client: FleetHttpClient, number: Path) -> None:
    """Say goodbye for a node that was killed, and wait until the server has noticed."""
    written = number.read_text()
    if written.isdecimal():  # else it was killed while writing
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=int(written)))
            time.sleep(_SEEN)
        except httpx.HTTPStatusError as error:  # Flower has given it up by itself, or forgotten it
            if is_away(error):
                raise
    number.unlink()
