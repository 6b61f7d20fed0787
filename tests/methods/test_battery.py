"""One battery of contract tests over every registered method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from furlong.core.context import Batch, ClientContext, Exchange, Networks, Shard
from furlong.core.exchange import Server, run_client
from furlong.core.federation import Federation
from furlong.core.given import plain
from furlong.core.guard import Expected
from furlong.core.method import Local
from furlong.core.payload import flatten, pack, pack_tensors, traffic, unpack
from furlong.core.weights import snapshot
from furlong.engines.inprocess import InProcess
from furlong.engines.states import StateFolder
from furlong.methods import METHODS
from furlong.methods.wrappers.alone import Alone
from furlong.nn.encoders import build_encoder
from furlong.nn.vit import VisionTransformer
from furlong.runs.initial import fixed
from furlong.runs.prepare import Prepared
from furlong.runs.record import EVERY_RUN

every_method = pytest.mark.parametrize("name", METHODS)
# One network; a client's own state; rows beside the weights; exchanges of the server alone: these
# four stand for all in the quick suite where an option is the same code for every method.
FOUR = ("fedsimclr", "fedu", "fedca", "mfcl")
four_methods = pytest.mark.parametrize(
    "name", [n if n in FOUR else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]
)


def finish(
    p: Prepared, workers: int = 1, federation: Federation | None = None, **server: Any
) -> tuple[bytes, dict[int, bytes]]:
    """Final server and client states of a whole run, packed."""
    federation = federation or p.federation
    runner = Server(p.method, p.setup, p.server.public, **server)
    with InProcess(p.method, federation, p.setup, workers) as transport:
        state = runner.init()
        for result in runner.run(transport, state):
            assert not result.failures
            logged = {name for metrics in result.metrics.values() for name in metrics}
            assert {*logged, *result.own} <= {*EVERY_RUN, *p.method.explains}
            state = result.server
        clients = {c: path.read_bytes() for c, path in transport.states()}
    return bytes(pack(state)), clients


@pytest.fixture(scope="session")
def finished(prepared: Any) -> Callable[[str], tuple[bytes, dict[int, bytes]]]:
    """:func:`finish` of a method with its usual settings, computed once."""
    return cache(lambda name: finish(prepared(name)))


def shard(p: Prepared, client: int) -> Shard:
    """What an engine gives the client."""
    return p.federation.shard(client, labels=p.method.needs_labels)


@four_methods
def test_same_seed_same_bits_and_workers_agree(prepared: Any, finished: Any, name: str) -> None:
    p, once = prepared(name), finished(name)
    assert finish(p) == once
    assert finish(p, workers=2) == once
    other = prepared(name, seed=1)
    assert finish(other)[0] != once[0]


@every_method
def test_training_changes_every_parameter(prepared: Any, finished: Any, name: str) -> None:
    before = flatten(prepared(name).server.init())[0]
    after = flatten(unpack(bytearray(finished(name)[0])))[0]
    still = [n for n, t in before.items() if t.is_floating_point() and torch.equal(t, after[n])]
    assert not [n for n in still if not n.startswith("alignment")]  # FedCA's model is a constant


@every_method
def test_what_is_measured_of_a_method_is_explained(prepared: Any, finished: Any, name: str) -> None:
    p, server = prepared(name), unpack(bytearray(finished(name)[0]))
    images = p.federation.images
    batch = Batch(images.pixels, torch.arange(len(images)), images.labels, p.setup.augment)
    with torch.random.fork_rng(), torch.no_grad():
        found = p.method.explain(server, batch, p.server.context(p.server.exchanges()[-1]))
    assert set(found) <= set(p.method.explains)
    assert not set(p.method.explains) & set(EVERY_RUN)  # what every run logs means the same in all
    assert all(words.endswith(".") for words in p.method.explains.values())
    assert Alone(p.method).explains == p.method.explains
    assert Alone(p.method).remedy == p.method.remedy


@every_method
def test_inputs_are_not_mutated(prepared: Any, name: str) -> None:
    p = prepared(name)
    server = p.server.init()
    exchange = p.server.exchanges()[0]
    ctx = p.server.context(exchange)
    down = p.method.download(server, 0, ctx)
    before = pack(server), pack(down)
    pixels = p.federation.images.pixels.clone()
    store = StateFolder()
    reports = []
    for client in p.federation.clients:
        local = ClientContext(p.setup, exchange, Networks(), client=client, data=shard(p, client))
        reports.append(run_client(p.method, down, local, store))
    uploads = [pack(r) for r in reports]
    p.method.aggregate(server, reports, ctx)
    p.method.encoder(server, ctx)(p.setup.augment.plain(pixels[:4]))
    assert (pack(server), pack(down)) == before
    assert [pack(r) for r in reports] == uploads
    assert torch.equal(p.federation.images.pixels, pixels)
    kept = store.get(0)
    if kept is not None:
        state = unpack(kept).state
        again = pack(state)
        local = ClientContext(
            p.setup, p.server.exchanges()[1], Networks(), client=0, data=shard(p, 0)
        )
        with torch.random.fork_rng():
            p.method.local_update(state, down, local)
        assert pack(state) == again
    store.close()


@every_method
def test_payloads_survive_packing(prepared: Any, name: str) -> None:
    p = prepared(name)
    server = p.server.init()
    ctx = p.server.context(p.server.exchanges()[0])
    values = (server, p.method.download(server, 1, ctx), p.method.expected(server, 1, ctx))
    for value in values:
        back = unpack(pack(value))
        assert type(back) is type(value)
        assert pack(back) == pack(value)
        assert traffic(back) == traffic(value)


@every_method
def test_uploads_look_as_expected(prepared: Any, name: str) -> None:
    """The promise on which the guard and ``furlong methods`` rest."""
    p = prepared(name)
    server = p.server.init()
    exchange = p.server.exchanges()[0]
    ctx = p.server.context(exchange)
    local = ClientContext(p.setup, exchange, Networks(), client=0, data=shard(p, 0))
    report = run_client(p.method, p.method.download(server, 0, ctx), local, StateFolder())
    expected = p.method.expected(server, 0, ctx)
    assert p.server.guard.check(report, Expected(expected), exchange, 0) is None
    assert traffic(report.upload) == traffic(expected)


@every_method
def test_dropped_clients_and_empty_cohorts(prepared: Any, name: str) -> None:
    p = prepared(name)
    server = p.server.init()
    ctx = p.server.context(p.server.exchanges()[0])
    assert pack(p.method.aggregate(server, [], ctx)) == pack(server)

    class Lossy(InProcess):
        def exchange(self, exchange: Exchange, downloads: Any) -> Any:
            for client, reply in super().exchange(exchange, downloads):
                if client != 1:
                    yield client, reply

    with Lossy(p.method, p.federation, p.setup) as transport:
        results = list(p.server.run(transport, server))
    for result in results:
        if not result.cohort:  # the server's own work
            continue
        assert sorted(result.metrics) == [0, 2]
        assert [(f.client, f.kind) for f in result.failures] == [(1, "lost")]
        for metrics in result.metrics.values():  # an epoch; nothing that is only looked at
            assert metrics["images"] == (24 if "loss" in metrics else 0)


@every_method
def test_partial_participation(prepared: Any, name: str) -> None:
    p = prepared(name)
    assert finish(p, fraction=0.4) == finish(p, workers=2, fraction=0.4)


@every_method
def test_one_client_is_sequential_local_training(prepared: Any, name: str) -> None:
    """Spec 2.16: M = 1 equals R local trainings with nothing in between; so does ``Alone``."""
    p = prepared(name)
    only = p.federation.only(1)
    everybody = p.setup
    p.server = replace(p.server, setup=replace(everybody, sizes=only.sizes))
    federated, _ = finish(p, federation=only)
    state = p.server.init()
    store = StateFolder()
    for exchange in p.server.exchanges():
        ctx = p.server.context(exchange)
        reports = []
        if exchange.clients != ():  # else it is the server's own work
            local = ClientContext(p.setup, exchange, Networks(), client=1, data=shard(p, 1))
            reports = [run_client(p.method, p.method.download(state, 1, ctx), local, store)]
        with p.server.computing(exchange.index):
            state = p.method.aggregate(state, reports, ctx)
        if reports and type(state) is type(
            reports[0].upload
        ):  # the mean of one is that one, exactly
            assert pack(state) == pack(reports[0].upload)
    store.close()
    assert bytes(pack(state)) == federated
    alone = Alone(p.method)
    server = Server(alone, everybody, p.server.public, fraction=0.4)  # alone nobody is left out
    with InProcess(alone, p.federation, everybody) as transport:
        *_, last = server.run(transport, server.init())
    assert bytes(pack(last.server.states[1])) == federated


@every_method
def test_labels_are_absent(prepared: Any, name: str) -> None:
    """Methods that do not declare labels run on unlabelled data and never see labels."""
    p = prepared(name)
    if p.method.needs_labels:
        pytest.skip("declares that it needs labels")
    with InProcess(p.method, p.federation, p.setup) as transport:
        seen = []
        original = p.method.local_update

        def spy(state: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
            seen.append(ctx.data.images.labels)
            return original(state, down, ctx)

        object.__setattr__(p.method, "local_update", spy)
        try:
            *_, last = p.server.run(transport, p.server.init())
        finally:
            object.__delattr__(p.method, "local_update")
    assert seen
    assert all(labels is None for labels in seen)
    assert not last.failures


@every_method
def test_resume_from_any_exchange(prepared: Any, finished: Any, name: str) -> None:
    p = prepared(name)
    whole, whole_clients = finished(name)
    first, *_ = p.server.exchanges()
    with InProcess(p.method, p.federation, p.setup) as transport:
        start = p.server.step(transport, p.server.init(), first)
        server = unpack(pack(start.server))
        clients = [(c, path.read_bytes()) for c, path in transport.states()]
    with InProcess(p.method, p.federation, p.setup, workers=2) as transport:
        for client, packed in clients:
            transport.store.put(client, unpack(packed))
        *_, last = p.server.run(transport, server, first=1)
        after = {c: path.read_bytes() for c, path in transport.states()}
    assert bytes(pack(last.server)) == whole
    assert after == whole_clients


@every_method
def test_encoder_takes_images_and_is_in_eval_mode(prepared: Any, name: str) -> None:
    p = prepared(name)
    encoder = p.method.encoder(p.server.init(), p.server.context(p.server.exchanges()[0]))
    h = encoder(p.setup.augment.plain(p.train.pixels[:5]))
    assert h.shape == (5, p.setup.width)
    assert not encoder.training


@pytest.mark.parametrize("policy", ["average", "local", "pooled", "recalibrate"])
@four_methods
def test_every_batchnorm_policy(prepared: Any, name: str, policy: str) -> None:
    p = prepared(name, **{"method.bn_stats": policy})
    assert finish(p) == finish(p, workers=2)


@four_methods
def test_with_a_vision_transformer(prepared: Any, name: str) -> None:
    """It has no BatchNorm, tokens instead of maps, and other names."""
    own = {"method.projection_head": "mlp:32:96"} if name == "ssd" else {}  # as wide as the encoder
    p = prepared(name, encoder="vit_mini", rounds=1, **own)
    server, _ = finish(p)
    state = unpack(bytearray(server))
    encoder = p.method.encoder(state, p.server.context(p.server.exchanges()[-1]))
    assert [part for part in encoder.modules() if isinstance(part, VisionTransformer)]
    assert encoder(p.setup.augment.plain(p.train.pixels[:5])).shape == (5, p.setup.width)
    before, after = (flatten(value)[0] for value in (p.server.init(), state))
    moved = [n for n, t in before.items() if "blocks" in n and not torch.equal(t, after[n])]
    assert len(moved) >= 4 * 12  # all tensors of the four blocks


@four_methods
def test_persisted_optimiser(prepared: Any, finished: Any, name: str) -> None:
    p = prepared(name, **{"optimiser.persist": True})
    server, clients = finish(p)
    assert finish(p, workers=2) == (server, clients)
    assert server != finished(name)[0]
    assert all(unpack(bytearray(packed)).moments for packed in clients.values())


FIXED: dict[str, dict[str, Any]] = {
    "freeze": {"model.freeze": 1},
    "adapter": {"model.adapter": "lora:2"},
    "products": {"model.adapter": "lora:2", "model.adapter_average": "products"},
}


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder's weights in a file."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        weights = snapshot(build_encoder("small", 3, 16))
    path = tmp_path_factory.mktemp("begun") / "start.safetensors"
    path.write_bytes(pack_tensors(weights, {}))
    return str(path)


@pytest.mark.parametrize("kind", FIXED)
@four_methods
def test_what_is_fixed_stays_and_is_not_sent(
    prepared: Any, begun: str, name: str, kind: str
) -> None:
    if name == "fedmae":
        pytest.skip("its encoder is a transformer, of which the file has nothing")
    # mfcl has a sensor that no file of a plain encoder knows
    options = {"init": begun, "model.init_mismatch": "allow", "optimiser.lr": 0.003}
    p = prepared(name, **options, **FIXED[kind])
    assert p.initial is not None
    once = finish(p)
    assert finish(p, workers=2) == once
    server = unpack(bytearray(once[0]))
    with torch.random.fork_rng():
        encoder = p.method.encoder(server, p.server.context(p.server.exchanges()[-1]))
    held = fixed(p.setup)
    in_state = {path.rpartition("backbone.")[2] for path in flatten(server)[0]}
    assert held
    assert not in_state & set(held)
    start, after = p.initial.weights, plain(encoder).state_dict()
    moved = {n for n, tensor in after.items() if not torch.equal(tensor, start[n])}
    if kind == "freeze":
        trained = {n for n in after if n.endswith(("weight", "running_mean"))} - held.keys()
        assert not moved & held.keys()
        assert trained <= moved
    else:  # merged adapters: of convolutions, and of nothing else
        assert moved
        assert all("conv" in n and n.endswith("weight") for n in moved)
