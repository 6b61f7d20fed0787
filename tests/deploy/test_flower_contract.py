"""What ``deploy/flower_private.py`` expects of Flower, written down for flwr 1.41.

If a test fails after an upgrade, Flower has moved something that it does not document: look at
the place that the message names, change ``flower_private.py``, then change this page.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("flwr")

from furlong.deploy import flower_private
from furlong.deploy.processes import FLOWER

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
    "flwr.supernode.runtime.run_clientapp:pull_task_input": 1,
    "flwr.supernode.runtime.run_clientapp:push_message": 3,
    "flwr.supernode.runtime.run_clientapp:push_task_output": 4,
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
    client = grid._runtime_client
    assert isinstance(client, found("flwr.supercore.runtime:RuntimeHttpClient"))
    grid.close()


def test_words_and_numbers() -> None:
    """Constants, and what Flower's programs write."""
    assert found("flwr.supercore.exit:ExitCode.SUPERNODE_CONNECTION_ERROR") == int(
        flower_private.REFUSED
    )
    source = inspect.getsource(import_module("flwr.supernode.start_client_internal"))
    assert f'"{flower_private.CONNECTED.decode()}: %s"' in source
    status = found("flwr.supercore.constant:NodeStatus")
    assert (status.ONLINE, status.UNREGISTERED) == ("online", "unregistered")
    tasks = found("flwr.supercore.constant:TaskType")
    assert tasks.SERVER_APP
    assert tasks.CLIENT_APP
    identity = found("flwr.supercore.task_identity:TaskIdentity")
    for name in ("task_id", "run_id", "node_id"):
        assert isinstance(getattr(type(identity), name), property)
    client = inspect.getsource(found("flwr.supercore.runtime:RuntimeHttpClient.AcquireTask"))
    assert all(method in client for method in flower_private._ACQUIRE)
