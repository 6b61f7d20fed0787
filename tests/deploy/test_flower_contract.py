"""What three files expect of Flower beyond its documents, written down for flwr 1.41.

``deploy/flower_private.py`` is the server of a run, ``flower_fleet.py`` a node, ``flower_store.py``
a SuperLink. If a test fails after an upgrade, Flower has moved something: look at the place that
the message names, change the file, then change this page.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("flwr")

from furlong.deploy import flower_fleet, flower_private
from furlong.deploy.processes import FLOWER

PARTS = "flwr.supercore.inflatable.inflatable_protobuf_utils"
STORE = "flwr.supercore.object_store.sql_object_store:SqlObjectStore"
CALLED = {  # what is called, and with which parameters by name or number
    "flwr.cli.build:build_fab_from_files": 1,
    "flwr.common.serde:context_from_proto": 1,
    "flwr.common.serde:fab_to_proto": 1,
    "flwr.common.serde:run_from_proto": 1,
    "flwr.supercore.fab:Fab": 3,
    "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor": 1,
    "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": {"component_name"},
    "flwr.supercore.interceptors:SuperExecAuthHttpInterceptor": {
        "master_secret",
        "protected_methods",
    },
    "flwr.supercore.runtime:RuntimeHttpClient.from_server_address": {
        "server_address",
        "insecure",
        "root_certificates",
        "interceptors",
    },
    "flwr.supercore.control.control_http_client:ControlHttpClient.from_server_address": {
        "server_address",
        "insecure",
        "root_certificates",
        "interceptors",
    },
    "flwr.superlink.grid:HttpGrid": {
        "runtime_api_address",
        "insecure",
        "root_certificates",
        "token",
    },
    "flwr.superlink.grid:HttpGrid.set_run": 2,
    "flwr.app.message:remove_content_from_message": 1,
    "flwr.common.serde:message_to_proto": 1,
    "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects": 1,
    "flwr.supercore.inflatable.inflatable_object:get_object_id": 1,
    "flwr.supercore.inflatable.inflatable_object:get_object_tree": 1,
    "flwr.supercore.inflatable.inflatable_object:no_object_id_recompute": 0,
    f"{PARTS}:make_confirm_message_received_fn_protobuf": 3,
    f"{PARTS}:make_pull_object_fn_protobuf": 3,
    f"{PARTS}:make_push_object_fn_protobuf": 4,
    "flwr.supercore.inflatable.inflatable_utils:validate_object_content": {"content"},
    "flwr.supercore.primitives.asymmetric:generate_key_pairs": 0,
    "flwr.supercore.primitives.asymmetric:public_key_to_bytes": 1,
    "flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address": {
        "server_address",
        "insecure",
        "root_certificates",
        "interceptors",
    },
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": 2,
    **{
        f"flwr.supernode.fleet_http_client:FleetHttpClient.{name}": 2
        for name in (
            *("RegisterNode", "UnregisterNode", "ActivateNode", "DeactivateNode"),
            *("SendNodeHeartbeat", "PullMessages", "PullObject", "PushMessages", "PushObject"),
            "ConfirmMessageReceived",
        )
    },
    f"{STORE}": {"database_path"},
    f"{STORE}.put": 3,
    f"{STORE}.get": 2,
    f"{STORE}.delete": 2,
    f"{STORE}.initialize": {"self", "engine_kwargs"},
    f"{STORE}._mutation_session": 1,
    "flwr.superlink.cli:flower_superlink": 0,
    **{
        f"flwr.supercore.runtime:RuntimeHttpClient.{name}": 2
        for name in ("AcquireTask", "PullTaskInput", "PushTaskOutput", "SendTaskHeartbeat")
    },
    **{
        f"flwr.supercore.control.control_http_client:ControlHttpClient.{name}": 2
        for name in ("StartRun", "ListNodes", "RegisterNode", "UnregisterNode")
    },
}
FIELDS = {  # of messages
    "flwr.proto.runtime_pb2:AcquireTaskRequest": {"supported_task_types"},
    "flwr.proto.runtime_pb2:AcquireTaskResponse": {"task", "token"},
    "flwr.proto.runtime_pb2:PullTaskInputResponse": {"task_id", "run", "context"},
    "flwr.proto.runtime_pb2:PushTaskOutputRequest": {"sub_status", "details"},
    "flwr.proto.runtime_pb2:SendTaskHeartbeatResponse": {"success"},
    "flwr.proto.control_pb2:StartRunRequest": {"fab"},
    "flwr.proto.control_pb2:StartRunResponse": {"run_id"},
    "flwr.proto.control_pb2:ListNodesResponse": {"nodes_info"},
    "flwr.proto.control_pb2:RegisterNodeRequest": {"public_key", "name"},
    "flwr.proto.control_pb2:UnregisterNodeRequest": {"node_id"},
    "flwr.proto.fleet_pb2:RegisterNodeFleetRequest": {"public_key"},
    "flwr.proto.fleet_pb2:UnregisterNodeFleetRequest": {"node_id"},
    "flwr.proto.fleet_pb2:ActivateNodeRequest": {"public_key", "heartbeat_interval"},
    "flwr.proto.fleet_pb2:ActivateNodeResponse": {"node_id"},
    "flwr.proto.fleet_pb2:DeactivateNodeRequest": {"node_id"},
    "flwr.proto.fleet_pb2:PullMessagesRequest": {"node"},
    "flwr.proto.fleet_pb2:PullMessagesResponse": {"messages_list", "message_object_trees"},
    "flwr.proto.fleet_pb2:PushMessagesRequest": {
        "node",
        "messages_list",
        "message_object_trees",
        "clientapp_runtime_list",
    },
    "flwr.proto.fleet_pb2:PushMessagesResponse": {"objects_to_push", "session_id"},
    "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest": {"node", "heartbeat_interval"},
    "flwr.proto.heartbeat_pb2:SendNodeHeartbeatResponse": {"success"},
    "flwr.proto.message_pb2:Metadata": {"run_id", "ttl"},
    "flwr.proto.message_pb2:ObjectTree": {"object_id", "children"},
    "flwr.proto.node_pb2:NodeInfo": {"node_id", "public_key", "status"},
}


def found(place: str) -> Any:
    module, _, names = place.partition(":")
    try:
        value: Any = import_module(module)
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"flwr {version('flwr')} has no {place} ({error}); 1.41 has it")
    return value


def test_the_version() -> None:
    assert FLOWER == "1.41"
    assert version("flwr").startswith("1.41."), "flower_private.py was written for flwr 1.41"


@pytest.mark.parametrize("place", CALLED)
def test_signatures(place: str) -> None:
    wanted, parameters = CALLED[place], inspect.signature(found(place)).parameters
    if isinstance(wanted, int):
        accepted = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
        needed = [p for p in accepted if p.default is p.empty]
        assert len(needed) <= wanted <= len(accepted), f"{place} takes {list(parameters)} now"
    else:
        assert wanted <= set(parameters), f"{place} takes {list(parameters)} now"
        needed_too = {n for n, p in parameters.items() if p.default is p.empty} - wanted
        assert not needed_too, f"{place} needs {needed_too} too"


@pytest.mark.parametrize("place", FIELDS)
def test_fields_of_messages(place: str) -> None:
    fields = {field.name for field in found(place).DESCRIPTOR.fields}
    assert FIELDS[place] <= fields, f"{place} has {sorted(fields)} now"


def test_what_a_grid_holds() -> None:
    """``_retry_invoker`` and ``_runtime_client`` have a leading underscore."""
    connection = flower_private.Connection("127.0.0.1:1")
    grid = connection.grid("token")
    assert isinstance(grid, found("flwr.serverapp:Grid"))
    invoker = found("flwr.supercore.retry:make_simple_http_retry_invoker")()
    for name in ("max_time", "max_tries", "should_giveup"):
        assert hasattr(invoker, name), f"the retry invoker has no {name} now"
    source = inspect.getsource(found("flwr.superlink.grid.http_grid:HttpGrid.pull_messages"))
    assert "pull_objects(" in source  # the name that Connection.grid gives another value
    wanted = inspect.signature(found("flwr.superlink.grid.http_grid:pull_objects")).parameters
    assert {name: wanted[name].default for name in flower_private.AGAIN} == flower_private.AGAIN
    client = grid._runtime_client
    assert isinstance(client, found("flwr.supercore.runtime:RuntimeHttpClient"))
    grid.close()


def test_words_and_numbers() -> None:
    """Constants."""
    status = found("flwr.supercore.constant:NodeStatus")
    assert (status.ONLINE, status.UNREGISTERED) == ("online", "unregistered")
    tasks = found("flwr.supercore.constant:TaskType")
    assert tasks.SERVER_APP
    assert found("flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL") > flower_fleet.BEAT + 5
    identity = found("flwr.supercore.task_identity:TaskIdentity")
    for name in ("task_id", "run_id", "node_id"):
        assert isinstance(getattr(type(identity), name), property)
    client = inspect.getsource(found("flwr.supercore.runtime:RuntimeHttpClient.AcquireTask"))
    assert all(method in client for method in flower_private._ACQUIRE)


def test_what_a_node_pulls_and_pushes_with() -> None:
    """Two functions with many options, of which a few are given."""
    parts = "flwr.supercore.inflatable.inflatable_utils"
    pull = inspect.signature(found(f"{parts}:pull_and_inflate_object_from_tree")).parameters
    assert list(pull)[:3] == ["object_tree", "pull_object_fn", "confirm_object_received_fn"]
    given = {"return_type", "max_time", "max_tries_per_object", *flower_private.AGAIN}
    assert given <= set(pull), f"pull_and_inflate_object_from_tree takes {list(pull)} now"
    push = inspect.signature(found(f"{parts}:push_objects")).parameters
    assert list(push)[:2] == ["objects", "push_object_fn"]
    assert "object_ids_to_push" in push, f"push_objects takes {list(push)} now"
    for name in ("ObjectPullError", "ObjectPushError"):
        assert issubclass(found(f"{parts}:{name}"), Exception)


def test_where_a_superlink_makes_its_store() -> None:
    """``flower_store`` puts its own class in the place of this name."""
    factory = "flwr.supercore.object_store.object_store_factory"
    assert found(f"{factory}:SqlObjectStore") is found(STORE)
    source = inspect.getsource(found(f"{factory}:ObjectStoreFactory.store"))
    assert "SqlObjectStore(self.database)" in source
    assert "store.initialize()" in source
    rows = found("flwr.supercore.state.schema.objectstore_models:StoredObject")
    assert {"object_id", "content", "is_available"} <= set(vars(rows))
    link = "flwr.supercore.corestate.sql_corestate:SqlCoreState"
    for name, call in {"store_object": "put", "get_object": "get"}.items():
        assert f"self.object_store.{call}(" in inspect.getsource(found(f"{link}.{name}"))
