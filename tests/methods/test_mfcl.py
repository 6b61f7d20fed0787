"""MFCL: its plan, its two phases, what lies on disk (spec 2.13)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

from furlong import files
from furlong.core.context import ClientContext, Exchange, Networks
from furlong.core.exchange import run_client
from furlong.core.method import Report
from furlong.core.payload import flatten, pack
from furlong.data.augment import preset, unit
from furlong.engines.blobs import BlobStore
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.methods.mfcl import MFCL, Codes, Server
from furlong.methods.representations import Stored, stacked
from furlong.nn.peernorm import peers
from furlong.runs.cost import predict
from furlong.runs.prepare import prepare


def make(**options: Any) -> Any:
    return prepare(tiny("mfcl", **{f"method.{k}": v for k, v in options.items()}))


def kinds(p: Any) -> list[str]:
    return [e.kind for e in p.server.exchanges()]


def test_plan() -> None:
    assert kinds(make()) == ["sensor"] * 2 + ["encode"] + ["discriminate"] * 2
    again = make(refresh="per_epoch")
    assert kinds(again) == ["sensor"] * 2 + ["encode", "discriminate"] * 2
    exchanges = again.server.exchanges()
    assert [e.round for e in exchanges] == [0, 1, 2, 2, 3, 3]
    assert exchanges[2].clients == (0, 1, 2)
    assert exchanges[3].clients == ()


def test_uploads_are_bounded() -> None:
    """24 images of 2×64×16×16 floats are 3 MB: four parts of at most 1 MB, all images once."""
    p = make(upload_mb=1)
    method: MFCL = p.method
    assert method.parts(p.setup) == 3
    parts = [list(method.images_of(0, part, p.setup)) for part in range(3)]
    assert sorted(i for part in parts for i in part) == list(range(24))
    for exchange in p.server.exchanges():
        if exchange.kind == "encode":
            expected = method.expected(p.server.init(), 0, p.server.context(exchange))
            assert isinstance(expected, Codes)
            assert expected.pairs.nbytes <= 1 << 20
            assert expected.pairs.untyped_storage().nbytes() == 4  # a template without memory


@pytest.mark.parametrize(
    "bad",
    [{"server_momentum": 1.0}, {"server_weight_decay": -1}, {"warmup": 2}, {"drop": 1.0}],
    ids=str,
)
def test_impossible_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(FurlongError, match=next(iter(bad))):
        make(**bad)


@pytest.mark.parametrize(("drop", "left"), [(0.0, 3), (0.3, 3), (0.34, 2), (0.7, 1)])
def test_drop(drop: float, left: int) -> None:
    p = make(drop=drop)
    chosen = p.method.senders(p.setup)
    assert len(chosen) == left
    assert chosen == p.method.senders(p.setup)
    others = {p.method.senders(replace(p.setup, seed=s)) for s in range(20)}
    assert left == 3 or len(others) > 1


def test_drop_of_many() -> None:
    """0.29 · 100 is below 29 in floats."""
    p = make(drop=0.29)
    assert len(p.method.senders(replace(p.setup, sizes=dict.fromkeys(range(100), 4)))) == 71


def test_too_many_dropped() -> None:
    with pytest.raises(FurlongError, match="leaves 1 of 3 clients"):
        make(drop=0.7, min_clients=2).server.exchanges()


def test_peers_survive_the_servers_shuffling() -> None:
    """Spec (7): the peer of row r is row r + Q·b."""
    torch.manual_seed(0)
    first = torch.arange(12.0).view(12, 1, 1, 1)
    pairs = torch.stack([first, first + 100], 1)
    batch = stacked([pairs[:5], pairs[5:8], pairs[8:]])
    assert batch.shape == (24, 1, 1, 1)
    assert torch.equal(batch[12:], batch[:12] + 100)
    assert sorted(batch[:12].flatten().tolist()) == list(range(12))
    assert batch[:12].flatten().tolist() != list(range(12))


def test_representations_pair_two_views_of_one_image() -> None:
    """Without randomness both views are the image itself, whatever the order."""
    p = make(norm="pn")
    setup = replace(p.setup, augment=preset("none", 16))
    exchange = next(e for e in p.server.exchanges() if e.kind == "encode")
    server = p.server.init()
    down = p.method.download(server, 0, p.server.context(exchange))
    assert all(name.startswith("encoder.") for name in down.weights)
    ctx = ClientContext(setup, exchange, Networks(), client=0, data=p.federation.shard(0))
    report = run_client(p.method, down, ctx, BlobStore(1 << 30))
    pairs = report.upload.pairs
    assert pairs.shape == (24, 2, 64, 16, 16)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    sensor = p.method.sensor(p.server.context(exchange))
    sensor.load_state_dict(server.sensor)
    alone = sensor.get_submodule("encoder").eval()
    images = setup.augment.plain(p.train.pixels[p.federation.rows[0]])
    with torch.no_grad():
        lone = alone(images)
    # every image is there once: the nearest row is equal up to rounding
    distance = torch.cdist(pairs[:, 0].flatten(1), lone.flatten(1))
    nearest = distance.min(1)
    assert nearest.values.max() < 1e-3
    assert sorted(nearest.indices.tolist()) == list(range(24))


def test_shared_statistics_give_pairs_away() -> None:
    """Paired, the two views' group means are opposite: that alone tells which two belong together.

    Encoded apart they are not; this is why ``pair_codes`` can be switched off.
    """
    for paired in (True, False):
        p = make(pair_codes=paired)
        exchange = next(e for e in p.server.exchanges() if e.kind == "encode")
        down = p.method.download(p.server.init(), 0, p.server.context(exchange))
        ctx = ClientContext(p.setup, exchange, Networks(), client=0, data=p.federation.shard(0))
        encoder = torch.nn.Module()
        encoder.add_module("encoder", p.method.sensor(ctx).get_submodule("encoder"))
        encoder.load_state_dict(down.weights)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            views = torch.cat(p.setup.augment.views(p.train.pixels[:8], 2))
        last = encoder.get_submodule("encoder.norm2")
        seen: list[torch.Tensor] = []
        hook = last.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.clone()))
        with torch.no_grad(), peers(encoder) if paired else nullcontext():
            encoder.get_submodule("encoder")(views)
        hook.remove()
        means = seen[0].unflatten(1, (16, 4)).mean((2, 3, 4))  # views × groups
        first, second = means.chunk(2)
        assert torch.allclose(first, -second, atol=1e-4)
        assert (first.abs().max() > 1e-3) == paired


def run(p: Any, until: int | None = None) -> Any:
    state = p.server.init()
    with InProcess(p.method, p.federation, p.setup) as transport:
        for result in p.server.run(transport, state):
            state = result.server
            if result.exchange.kind == "discriminate":
                assert result.own["loss"] > 0
                assert result.cohort == []
                assert result.up.total == result.down.total == 0
            if until is not None and result.exchange.index == until:
                break
    return state


def test_phases_change_what_they_should() -> None:
    p = make()
    start, sensed, done = p.server.init(), run(p, 1), run(p)
    assert any(not torch.equal(start.sensor[n], sensed.sensor[n]) for n in start.sensor)
    assert pack(Server(start.sensor, sensed.discriminator, {}, {})) == pack(
        Server(start.sensor, start.discriminator, {}, {})
    )
    assert all(torch.equal(sensed.sensor[n], done.sensor[n]) for n in start.sensor)
    weights = [n for n, t in start.discriminator.items() if t.is_floating_point()]
    assert all(not torch.equal(start.discriminator[n], done.discriminator[n]) for n in weights)
    assert done.held == {0: (0,), 1: (0,), 2: (0,)}
    assert done.momentum.keys() == {
        n for n, t in start.discriminator.items() if t.is_floating_point() and "running" not in n
    }


@pytest.mark.parametrize(
    "options",
    [
        {"representation": "rep16"},
        {"norm": "gn"},
        {"norm": "bn", "bn_stats": "local", "upload_mb": 1},
        {"norm": "none", "reconstruction": "mse"},
        {"statistics": "avg_moments"},
        {"statistics": "eq3_literal"},
        {"server_optimiser": "sgd", "server_lr": 0.1},
        {"server_optimiser": "sgd", "server_lr": 0.1, "server_momentum": 0.0, "upload_mb": 1},
        {"refresh": "per_epoch"},
        {"drop": 0.4},
        {"pair_codes": True},
        {"probe_input": "projection"},
    ],
    ids=str,
)
def test_settings(options: dict[str, Any]) -> None:
    p = make(**options)
    state = run(p)
    assert all(torch.isfinite(t).all() for t in flatten(state)[0].values())
    ctx = p.server.context(Exchange(round=9))
    h = p.method.encoder(state, ctx)(p.setup.augment.plain(p.train.pixels[:3]))
    assert h.shape == (3, p.setup.width)
    if options.get("probe_input") == "projection":
        assert p.setup.width == 128


def test_per_epoch_sends_new_views() -> None:
    p = make(refresh="per_epoch")
    state = run(p)
    assert state.held.keys() == {0, 1, 2}
    (folder,) = p.server.workspace().iterdir()  # those before are of no use to any checkpoint
    assert folder.name == "representations-0001"
    new = folder / "client-00000-part-0000.bin"
    assert new.stat().st_size == 24 * 2 * 64 * 16 * 16 * 4
    run(p, 2)
    old = p.server.workspace() / "representations-0000" / new.name
    assert old.stat().st_size == 24 * 2 * 64 * 16 * 16 * 4


def test_steps_take_one_mini_batch_per_client() -> None:
    p = make(pairs_per_client=7)
    run(p)
    state = run(p)
    ctx = p.server.context(p.server.exchanges()[-1])
    steps = list(p.method.steps(state, ctx))
    assert [[len(rows) for _, rows in step] for step in steps] == [[7, 7, 7]] * 3
    # no pair twice in an epoch, and other pairs are left over in the next
    seen = torch.cat([rows for step in steps for _, rows in step[:1]])
    assert len(seen.unique()) == 21
    again = torch.cat([rows for step in p.method.steps(state, ctx) for _, rows in step[:1]])
    assert set(seen.tolist()) != set(again.tolist())
    few = replace(state, held={0: (0,), 1: (0,)})
    strict = replace(p.method, min_clients=3)
    with pytest.raises(FurlongError, match="nothing to train on"):
        strict.train(few, p.server.context(p.server.exchanges()[-1]))


def test_lost_representations_are_named() -> None:
    p = make()
    state = run(p)
    file = p.server.workspace() / "representations-0000" / "client-00001-part-0000.bin"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FurlongError, match=r"client-00001-part-0000\.bin is missing or damaged"):
        p.method.train(state, p.server.context(p.server.exchanges()[-1]))


def test_a_client_that_misses_phase_two() -> None:
    p = make()
    state = run(p, 1)
    ctx = p.server.context(p.server.exchanges()[2])
    codes = Codes(torch.randn(24, 2, 64, 16, 16))
    after = p.method.aggregate(state, [Report(1, 2, 24, codes, {})], ctx)
    assert after.held == {1: (0,)}
    last = p.server.context(p.server.exchanges()[3])
    trained = p.method.aggregate(after, [], last)
    assert last.metrics["loss"] > 0
    assert trained.held == {1: (0,)}


def test_pairs_are_found_through_all_parts() -> None:
    parts = [torch.arange(3.0), torch.empty(0), 10 + torch.arange(2.0)]
    stored = Stored([part.view(-1, 1) for part in parts])
    assert sorted(stored.take(torch.tensor([4, 0, 2])).flatten().tolist()) == [0, 2, 11]


def test_divergence_at_the_server_is_said() -> None:
    p = make(server_optimiser="sgd", server_lr=1e20)
    with pytest.raises(FurlongError, match="diverged in epoch"):
        run(p)


def test_alone_every_client_has_a_discriminator_of_its_own() -> None:
    """Whatever drop and min_clients say, and though sizes, and so the numbers of parts, differ."""
    options = {"method.drop": 0.4, "method.min_clients": 2, "method.upload_mb": 1}
    p = prepare(tiny("mfcl", bound="single", partition="quantity:3,1,1", **options))
    state = run(p)
    assert all(set(each.held) == {client} for client, each in state.states.items())
    weights = [each.discriminator["discriminator.conv1.weight"] for each in state.states.values()]
    assert not torch.equal(weights[0], weights[1])


def test_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FurlongError, match=r"are needed there"):
        files.require_space(tmp_path, 10**18)
    path = tmp_path / "gone" / "x.bin"
    with pytest.raises(FurlongError, match="cannot store"):
        files.write(path, torch.zeros(3))
    files.write(tmp_path / "x.bin", torch.arange(6.0))
    assert files.mapped(tmp_path / "x.bin", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert files.mapped(_empty(tmp_path), (0, 3)).shape == (0, 3)
    assert not list(tmp_path.glob("*.draft"))


def _empty(folder: Path) -> Path:
    files.write(folder / "empty.bin", torch.empty(0))
    return folder / "empty.bin"


@pytest.mark.parametrize("name", ["shapes", "moco_cifar", "fedu", "orchestra", "none"])
@pytest.mark.parametrize("channels", [1, 3])
def test_unit_undoes_the_normalisation(name: str, channels: int) -> None:
    recipe = preset(name, 16)
    pixels = torch.randint(0, 256, (4, channels, 16, 16), dtype=torch.uint8)
    assert torch.allclose(unit(recipe.plain(pixels), recipe), pixels / 255, atol=1e-6)


def test_early_norm_is_not_for_mfcl() -> None:
    with pytest.raises(FurlongError, match=r"method\.norm"):
        prepare(tiny("mfcl", **{"model.early_norm": "gn"}))


def test_predicted_bytes_of_the_paper_scale() -> None:
    """5 clients × 10,000 images × 65,536 values: the prediction allocates nothing of that."""
    from furlong.runs.config import from_tree
    from furlong.runs.cost import without_data

    settings = from_tree({}, {"method": "mfcl", "encoder": "resnet18", "rounds": 15}, "test")
    server = without_data(settings, dict.fromkeys(range(5), 10_000))
    costs = list(predict(server))
    codes = sum(c.up.features for c in costs)
    assert codes == 5 * 10_000 * 2 * 65_536 * 4
    assert max(c.up.features for c in costs) <= 5 * 256 * 2**20
    assert costs[0].up.params == 5 * 77_853 * 4
