"""MFCL: its plan, its two phases, what lies on disk (spec 2.13)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import LR, a_batch, local_context, plain_client, run_round
from conftest import tiny

from furlong import files
from furlong.core.context import ClientContext, Exchange, Networks
from furlong.core.exchange import run_client
from furlong.core.method import Report
from furlong.core.payload import flatten, pack
from furlong.data.augment import preset, unit
from furlong.engines.inprocess import InProcess
from furlong.engines.states import StateFolder
from furlong.errors import FurlongError
from furlong.methods.mfcl import MFCL, Codes, Server
from furlong.methods.representations import Stored, mini_batches, stacked
from furlong.nn.peernorm import given_away, peers
from furlong.runs.cost import predict
from furlong.runs.prepare import prepare
from furlong.seeding import seeded


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


@pytest.mark.parametrize("refresh", ["once", "per_epoch"])
def test_an_untrained_sensor_goes_straight_to_phase_2(refresh: str) -> None:
    p = make(train_sensor=False, refresh=refresh)
    between = ["encode"] if refresh == "per_epoch" else []
    assert kinds(p) == ["encode", "discriminate", *between, "discriminate"]
    assert [e.round for e in p.server.exchanges()] == [0, 0] + [1] * len(between) + [1]
    start, done = p.server.init(), run(p)
    assert all(torch.equal(start.sensor[n], done.sensor[n]) for n in start.sensor)
    costs = list(predict(p.server))
    assert [c.exchange for c in costs] == p.server.exchanges()
    assert sum(c.up.params for c in costs) == 0


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
    p = make(drop=drop, min_clients=1)
    chosen = p.method.senders(p.setup)
    assert len(chosen) == left
    assert chosen == p.method.senders(p.setup)
    others = {p.method.senders(replace(p.setup, seed=s)) for s in range(20)}
    assert left == 3 or len(others) > 1


def test_drop_of_many() -> None:
    """0.29 · 100 is below 29 in floats."""
    p = make(drop=0.29)
    assert len(p.method.senders(replace(p.setup, sizes=dict.fromkeys(range(100), 4)))) == 71


def test_too_few_clients() -> None:
    with pytest.raises(FurlongError, match="leaves 1 of 3 clients"):
        make(drop=0.7).server.exchanges()
    with pytest.raises(FurlongError, match=r"leaves 3 of 3 clients .*min_clients is 4: lower it"):
        make(min_clients=4).server.exchanges()


@pytest.mark.parametrize("options", [{"clients": 1}, {"bound": "pooled"}], ids=str)
def test_a_lone_client_waits_for_nobody(options: dict[str, Any]) -> None:
    p = prepare(tiny("mfcl", **options))
    assert run(p).held == {0: (0,)}


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
    whole = p.method.sensor(p.server.context(exchange)).state_dict()
    assert list(down.weights) == [name for name in whole if name.startswith("encoder.")]
    ctx = ClientContext(setup, exchange, Networks(), client=0, data=p.federation.shard(0))
    report = run_client(p.method, down, ctx, StateFolder())
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
        encoder = p.method.sensor(ctx).encoder
        encoder.load_state_dict(half(down.weights, "encoder"))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            views = torch.cat(p.setup.augment.views(p.train.pixels[:8], 2))
        last = encoder.norm2
        seen: list[torch.Tensor] = []
        hook = last.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.clone()))
        with torch.no_grad(), peers(encoder) if paired else nullcontext():
            codes = encoder(views)
        hook.remove()
        means = seen[0].unflatten(1, (16, 4)).mean((2, 3, 4))  # views × groups
        first, second = means.chunk(2)
        assert torch.allclose(first, -second, atol=1e-4)
        assert (first.abs().max() > 1e-3) == paired
        assert (given_away(codes) > 0.5) == paired


@pytest.mark.parametrize("norm", ["pn", "gn"])
def test_the_log_says_how_many_pairs_are_given_away(norm: str) -> None:
    p = make(norm=norm, pair_codes=True)
    with seeded(p.setup.device, "explain"), torch.no_grad():
        ctx = p.server.context(p.server.exchanges()[-1])
        found = p.method.explain(p.server.init(), a_batch(p, 40), ctx)
    assert found.keys() == {"given_away_together", "given_away_apart"}
    assert found["given_away_apart"] < 0.1
    assert (found["given_away_together"] > 0.4) == (norm == "pn")


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
        {"train_sensor": False, "norm": "bn"},
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


def test_clients_encode_with_their_own_statistics() -> None:
    """bn_stats = local: what stayed with a client in phase 1 is what it encodes with."""
    p = make(norm="bn", bn_stats="local")
    method, store = p.method, p.engine().store
    server = p.server.init()
    learnt: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        whole = type(method).local_update

        def seen(self: Any, state: None, down: Any, ctx: ClientContext) -> Any:
            if ctx.exchange.kind == "encode":
                learnt.append(down.weights["encoder.norm1.running_mean"])
            return whole(self, state, down, ctx)

        patched.setattr(type(method), "local_update", seen)
        for exchange in p.server.exchanges():
            if exchange.kind != "discriminate":
                ctx = local_context(p, exchange=exchange.index, client=1)
                down = method.download(server, 1, p.server.context(exchange))
                run_client(method, down, ctx, store)
    assert learnt
    assert all(mean.abs().max() > 0 for mean in learnt)  # the server's own are those of no image


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


def test_small_clients_do_not_leave_a_large_one_alone() -> None:
    """Clients of 36, 24 and 12 images: the epoch ends with the second largest."""
    p = prepare(tiny("mfcl", partition="quantity:3,2,1", **{"method.pairs_per_client": 5}))
    state = run(p, 2)
    ctx = p.server.context(p.server.exchanges()[-1])

    def clients(fewest: int) -> list[int]:
        return [len(s) for s in replace(p.method, min_clients=fewest).steps(state, ctx)]

    assert sorted(p.setup.sizes.values()) == [12, 24, 36]
    assert [len(step) for step in p.method.steps(state, ctx)] == [3, 3, 2, 2]
    assert clients(1) == [3, 3, 2, 2, 1, 1, 1]
    assert clients(3) == [3, 3]
    few = [Stored([torch.zeros(n, 1)]) for n in (0, 3, 7)]  # one sent nothing but empty parts
    assert [[len(rows) for _, rows in step] for step in mini_batches(few, 5, 1)] == [[3, 5]]


def test_lost_representations_are_named() -> None:
    p = make()
    state = run(p)
    file = p.server.workspace() / "representations-0000" / "client-00001-part-0000.bin"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FurlongError, match=r"client-00001-part-0000\.bin is missing or damaged"):
        p.method.train(state, p.server.context(p.server.exchanges()[-1]))


def test_a_client_that_misses_phase_two() -> None:
    p = make(min_clients=1)
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

    given = {"method": "mfcl", "encoder": "resnet18", "rounds": 15}
    once = {"method.representation": "rep32", "method.refresh": "once"}
    settings = from_tree({}, {**given, **once}, "test")
    server = without_data(settings, dict.fromkeys(range(5), 10_000))
    costs = list(predict(server))
    codes = sum(c.up.features for c in costs)
    assert codes == 5 * 10_000 * 2 * 65_536 * 4
    assert max(c.up.features for c in costs) <= 5 * 256 * 2**20
    assert costs[0].up.params == 5 * 77_853 * 4


# ---------------------------------------------------------------- both phases repeated by hand

Weights = dict[str, torch.Tensor]


def normalised(x: torch.Tensor, w: Weights, name: str, paired: bool) -> torch.Tensor:
    """Eqs. 3 and 4, the mean and variance of 16 groups (3 channels: one) over both views."""
    groups = 16 if x.shape[1] % 16 == 0 else 1
    maps = x.view(1 + paired, -1, groups, x.shape[1] // groups, *x.shape[2:])  # views × images × …
    mean = maps.mean((0, 3, 4, 5), keepdim=True)
    variance = ((maps - mean) ** 2).mean((0, 3, 4, 5), keepdim=True)
    y = ((maps - mean) / (variance + 1e-3).sqrt()).view(x.shape)
    return y * w[f"{name}.weight"].view(-1, 1, 1) + w[f"{name}.bias"].view(-1, 1, 1)


def encoded(x: torch.Tensor, w: Weights, paired: bool) -> torch.Tensor:
    """Layers 1 to 4 of Table 5; the pool is the decoder's (rep32)."""
    for layer in ("1", "2"):
        x = F.conv2d(x, w[f"conv{layer}.weight"], w[f"conv{layer}.bias"], padding=1)
        x = normalised(x, w, f"norm{layer}", paired).relu()
    return x


def decoded(x: torch.Tensor, w: Weights, paired: bool) -> torch.Tensor:
    """Layers 5 to 9 of Table 5, with a pool before and stride 2 in the first."""
    x, more = F.max_pool2d(x, 2), {"stride": 2, "output_padding": 1}
    for layer in ("1", "2"):
        bias = w[f"conv{layer}.bias"]
        x = F.conv_transpose2d(x, w[f"conv{layer}.weight"], bias, padding=1, **more)
        x, more = normalised(x, w, f"norm{layer}", paired).relu(), {}
    return F.conv2d(x, w["conv3.weight"], w["conv3.bias"], padding=1)


def half(w: Weights, name: str) -> Weights:
    return {n.removeprefix(f"{name}."): t for n, t in w.items() if n.startswith(f"{name}.")}


@pytest.mark.parametrize("reconstruction", ["bce", "mse"])
def test_a_round_of_the_sensor_by_hand(reconstruction: str) -> None:
    """Gradient descent on the reconstruction of both views, rows i and i+K being peers."""
    p = make(reconstruction=reconstruction)
    recipe = replace(p.setup.augment, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    ctx = plain_client(p, batch_size=8)
    ctx.setup = replace(ctx.setup, augment=recipe)
    down = p.method.download(p.server.init(), 0, p.server.context(ctx.exchange))
    local = run_round(p.method, down, ctx)
    w = {name: t.clone().requires_grad_() for name, t in down.weights.items()}
    losses = []
    with seeded(p.setup.device, "train"):
        for batch in ctx.batches():
            images = torch.cat(batch.views())
            logits = decoded(encoded(images, half(w, "encoder"), True), half(w, "decoder"), True)
            black = torch.tensor(recipe.mean).view(3, 1, 1)
            pixels = (images * torch.tensor(recipe.std).view(3, 1, 1) + black).clamp(0, 1)
            made = 1 / (1 + torch.exp(-logits))
            entropy = -(pixels * made.log() + (1 - pixels) * (1 - made).log())
            loss = (entropy if reconstruction == "bce" else (made - pixels) ** 2).mean()
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, list(w.values()))
            for weight, gradient in zip(w.values(), gradients, strict=True):
                weight.data -= LR * gradient
    assert len(losses) == 3
    assert local.metrics["loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)
    assert local.upload.weights.keys() == w.keys()
    for name, weight in w.items():
        way = (weight.detach() - down.weights[name]).norm()
        assert (local.upload.weights[name] - weight.detach()).norm() <= 0.01 * way + 1e-6, name


@pytest.mark.parametrize("pair_codes", [False, True])
def test_a_clients_encoding_by_hand(pair_codes: bool) -> None:
    """Two different views of every image once, each by itself unless ``pair_codes``."""
    p = make(pair_codes=pair_codes)
    ctx = local_context(p, exchange=2, client=1, batch_size=10)
    assert ctx.exchange.kind == "encode"
    down = p.method.download(p.server.init(), 1, p.server.context(ctx.exchange))
    pairs = run_round(p.method, down, ctx).upload.pairs
    pixels = p.train.pixels[p.federation.rows[1]]
    expected = []
    with seeded(p.setup.device, "train"):
        for rows in torch.randperm(24).split(10):
            views = torch.cat(p.setup.augment.views(pixels[rows], 2))
            first, second = encoded(views, half(down.weights, "encoder"), pair_codes).chunk(2)
            expected += [torch.stack(both) for both in zip(first, second, strict=True)]
    assert torch.allclose(pairs, torch.stack(expected), atol=1e-4)
    assert all((one - two).abs().mean() > 0.01 for one, two in pairs)


def contrasted(z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 5, row by row: view i of 2K is to be found at i ± K among all but itself."""
    z, count = z / z.norm(dim=1, keepdim=True), len(z)
    losses = []
    for i in range(count):
        scores = z @ z[i] / temperature
        others = torch.cat([scores[:i], scores[i + 1 :]])
        losses.append(others.exp().sum().log() - scores[(i + count // 2) % count])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("rule", ["lars", "sgd"])
def test_two_epochs_of_the_server_by_hand(rule: str) -> None:
    """Steps, partners, temperature, learning rate, decay, and momentum that goes on."""
    rate, momentum, decay, temperature, epochs, size, warmup = 0.5, 0.8, 0.01, 0.4, 3, 5, 0.2
    options = {
        "server_optimiser": rule,
        "server_lr": rate,
        "server_momentum": momentum,
        "server_weight_decay": decay,
        "temperature": temperature,
        "server_epochs": epochs,
        "pairs_per_client": size,
        "warmup": warmup,
    }
    given = {f"method.{name}": value for name, value in options.items()}
    p = prepare(tiny("mfcl", partition="quantity:3,2,1", **{"data.image_size": 8}, **given))
    exchanges = [e for e in p.server.exchanges() if e.kind != "sensor"]
    state, kept = p.server.init(), {}
    for client, count in p.setup.sizes.items():
        with seeded(p.setup.device, "codes", client):
            kept[client] = torch.randn(count, 2, 64, 8, 8)
    reports = [Report(client, 2, len(pairs), Codes(pairs), {}) for client, pairs in kept.items()]
    state = p.method.aggregate(state, reports, p.server.context(exchanges[0]))
    net = p.method.discriminator(p.server.context(exchanges[0]))
    net.load_state_dict(state.discriminator)
    net.train().to(memory_format=torch.channels_last)
    speed = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    for epoch in range(2):
        ctx = p.server.context(exchanges[1 + epoch])
        with seeded(p.setup.device, "server", epoch):
            state = p.method.aggregate(state, [], ctx)
        losses = []
        with seeded(p.setup.device, "server", epoch):
            left = {
                client: torch.randperm(len(pairs)).split(size) for client, pairs in kept.items()
            }
            for step in range(4):  # 36, 24 and 12 pairs: 7, 4 and 2 mini-batches of five
                now = [kept[k][r[step]] for k, r in left.items() if step < len(kept[k]) // size]
                pairs = torch.cat(now)
                pairs = pairs[torch.randperm(len(pairs))]
                loss = contrasted(net(torch.cat([pairs[:, 0], pairs[:, 1]])), temperature)
                losses.append(loss.item())
                progress = (epoch + step / 4) / epochs
                lr = rate * 3 * size / 256
                if progress < warmup:
                    lr *= progress / warmup
                else:
                    lr *= (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
                gradients = torch.autograd.grad(loss, list(net.parameters()))
                for (name, weight), gradient in zip(net.named_parameters(), gradients, strict=True):
                    if rule == "sgd":
                        speed[name] = momentum * speed[name] + gradient + decay * weight.data
                        weight.data -= lr * speed[name]
                        continue
                    way = gradient
                    if weight.ndim > 1:
                        way = gradient + decay * weight.data
                        way = 0.001 * weight.data.norm() / way.norm() * way
                    speed[name] = momentum * speed[name] + lr * way
                    weight.data -= speed[name]
        assert ctx.metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    start = p.server.init().discriminator
    for name, weight in net.state_dict().items():
        way = (weight - start[name]).float().norm()
        assert (state.discriminator[name] - weight).float().norm() <= 0.01 * way + 1e-6, name
    assert state.momentum.keys() == speed.keys()
    for name, value in speed.items():
        assert (state.momentum[name] - value).norm() <= 0.01 * value.norm() + 1e-7, name
