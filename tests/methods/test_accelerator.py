"""Every method on a device that is not the CPU: torch's ``meta`` device, which computes nothing.

Nothing here says how quick an accelerator is, or whether its numbers are right. It says that all
tensors of an operation are on one device, and that the host never waits for the device in a step.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from furlong import devices
from furlong.core.context import ClientContext, Networks, Optimiser
from furlong.core.method import Report
from furlong.data.augment import PRESETS, preset
from furlong.methods import METHODS
from furlong.seeding import seeded

DEVICE = torch.device("meta")
HOME = re.compile(r".*/furlong/(?!devices\.py)")
aten = torch.ops.aten
UNKNOWN = (aten.nonzero.default, aten.masked_select.default, aten.equal.default)


class Accelerator(TorchDispatchMode):
    """The device ``meta``, which answers with zeros where the host asks it for values.

    ``waits``: the lines of furlong at which the host would wait for an accelerator, and how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def wait(self, why: object) -> None:
        """Remember the innermost line of furlong that is not in devices.py."""
        frame: Any = sys._getframe(1)
        while frame is not None and not HOME.match(frame.f_code.co_filename):
            frame = frame.f_back
        where = "a test"
        if frame is not None:
            where = f"{frame.f_code.co_filename.rpartition('/furlong/')[2]}:{frame.f_lineno}"
        self.waits[f"{where} {why}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in tensors if t.is_meta]
        if func is aten._to_copy.default and "device" in kwargs:
            return self.copied(func, args, kwargs)
        if func is aten.copy_.default and args[0].device != args[1].device:
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            if blocking or not args[0].is_meta:
                self.wait("copy_")
            return args[0] if args[0].is_meta else args[0].zero_()
        if not there:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.wait("item")
            return torch.zeros((), dtype=args[0].dtype).item()
        if func.name().startswith("aten::_fused_"):  # optimisers, in place
            return None
        if func in UNKNOWN:
            self.wait(func)
            assert func is aten.nonzero.default, f"{func} has as many rows as the values say"
            return torch.zeros(3, args[0].ndim, dtype=torch.int64, device=DEVICE)
        if func in (aten.index.Tensor, aten.index_put_.default) and args[1] is not None:
            return self.indexed(func, args)
        near = [t for t in tensors if not t.is_meta and t.ndim]
        assert not near, f"{func} of tensors on two devices"
        return func(*args, **kwargs)

    def indexed(self, func: Any, args: Any) -> Tensor:
        """Indices are brought to the device; how many are true in a mask must be known."""
        indices = []
        for index in args[1]:
            if index is not None and not index.is_meta:
                self.wait("index on the host")
                index = index.to(DEVICE, non_blocking=True)
            if index is not None and index.dtype == torch.bool:
                self.wait("mask")
                index = torch.zeros(3, dtype=torch.int64, device=DEVICE)
            indices.append(index)
        return func(args[0], indices, *args[2:])

    def copied(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        source, device = args[0], torch.device(kwargs["device"])
        if source.is_meta and device.type == "cpu":
            self.wait("to the host")
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if not source.is_meta and device.type == "meta" and not kwargs.get("non_blocking"):
            self.wait("to the device")
        return func(*args, **kwargs)


class Made(TorchFunctionMode):
    """Sees values that Python makes on the device, which no dispatch mode does."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE
        if made or (func is Tensor.new_tensor and args[0].is_meta):
            self._device.wait("made on the host")
        return func(*args, **kwargs)


def waits(p: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """Where the host waits between steps that follow each other, and how many of these there are.

    One client takes part in two rounds of two epochs, each of which is one step.
    """
    setup = replace(p.setup, epochs=2, batch_size=24)
    server = replace(p.server, setup=setup)
    state, states = server.init(), dict[int, Any]()
    far = replace(setup, device=DEVICE)
    found, pairs, before = Counter[str](), 0, dict[Optimiser, Counter[str]]()
    take, above, below = Optimiser.step, Networks(), Networks()

    def step(self: Optimiser, loss: Tensor) -> None:
        nonlocal found, pairs
        if self in before:
            found, pairs = found + (device.waits - before[self]), pairs + 1
        before[self] = device.waits.copy()
        take(self, loss)

    monkeypatch.setattr(Optimiser, "step", step)
    with Accelerator() as device, Made(device):
        for exchange in server.exchanges():
            ctx = replace(server.context(exchange), setup=far, networks=above)
            reports = []
            for client in server.cohort(exchange)[:1]:
                shard = p.federation.shard(client, labels=p.method.needs_labels)
                own = ClientContext(far, exchange, below, client=client, data=shard)
                if client not in states:
                    states[client] = p.method.init_client(own)
                down = p.method.download(state, client, ctx)
                local = p.method.local_update(states[client], down, own)
                states[client] = local.state
                reports.append(Report(client, exchange.index, len(shard), local.upload, {}))
            state = p.method.aggregate(state, iter(reports), ctx)
    return found, pairs


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to this device are as those to a CUDA device."""
    monkeypatch.setattr(devices, "WITHOUT_WAITING", {DEVICE.type})


@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize("name", METHODS)
def test_the_host_never_waits_in_a_step(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = {"data.augment": "flip"} | ({"method.min_clients": 1} if name == "mfcl" else {})
    found, pairs = waits(prepared(name, **options), monkeypatch)
    assert pairs >= 2
    assert not found


@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize("name", PRESETS)
def test_the_host_never_waits_for_views(name: str) -> None:
    pixels = torch.empty(6, 3, 16, 16, dtype=torch.uint8, device=DEVICE)
    with Accelerator() as device, Made(device), seeded(DEVICE, 0):
        views = preset(name, 16).views(pixels)
    assert {view.device for view in views} == {DEVICE}
    assert not device.waits


def test_waits_are_seen() -> None:
    """Or the tests above would show nothing."""
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    waiting: list[Callable[[], Any]] = [
        lambda: float(there.sum()),
        lambda: bool(there.any()),
        lambda: there.tolist(),
        lambda: there.cpu(),
        lambda: here.to(DEVICE),
        lambda: there.copy_(here),
        lambda: there.nonzero(),
        lambda: there[there > 0],
        lambda: there[torch.tensor([1])],
        lambda: torch.tensor([1.0], device=DEVICE),
        lambda: there.new_tensor([1.0]),
    ]
    for ask in waiting:
        with Accelerator() as device, Made(device):
            ask()
        assert device.waits
    with Accelerator() as device, Made(device):
        (there * 2 + here.to(DEVICE, non_blocking=True)).sum()
    assert not device.waits
    with Accelerator(), pytest.raises((AssertionError, RuntimeError), match="device"):
        _ = there + here
