"""Privacy budgets: what one record or client can change, what leaves, what is spent, what not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from scipy.stats import binom
from torch import Tensor, nn

from furlong.core.context import ClientContext, Exchange
from furlong.core.exchange import run_client
from furlong.core.federation import Federation
from furlong.core.method import Local
from furlong.core.noise import KEY, Noise, repeatable, secret_in
from furlong.core.payload import flatten
from furlong.core.privacy import LEDGER, Ledger, PrivacySettings, Release, epsilon_of
from furlong.errors import FurlongError
from furlong.methods.fedsimclr import FedSimCLR
from furlong.methods.wrappers import private_records
from furlong.methods.wrappers.private import Private
from furlong.methods.wrappers.private_clients import clipped
from furlong.methods.wrappers.private_records import (
    NoisyOptimiser,
    _NoisyContext,
    _Sample,
    clipped_sum,
)
from furlong.nn.losses import nt_xent
from furlong.runs import checkpoint, loop
from furlong.runs.prepare import Prepared, prepare
from furlong.seeding import with_seed

GN = {"model.early_norm": "all_gn", "privacy.max_ratio": "inf", "privacy.noise_from": "seed"}
RECORD = {**GN, "privacy.level": "record", "privacy.noise": 1.0}
CLIENT = {**GN, "privacy.level": "client", "privacy.noise": 1.0}
# one step on all images of a client, whose weights move by the noisy mean itself
PLAIN = {
    "batch_size": 24,
    "optimiser.lr": 1.0,
    "optimiser.momentum": 0,
    "optimiser.weight_decay": 0,
    "optimiser.schedule": "constant",
}
SMALL_CLIP = 0.1  # most gradients are longer


class Nowhere:
    """No state is kept."""

    def get(self, _: int) -> None:
        return None

    def put(self, client: int, packed: Any) -> None:
        pass


def answer(
    run: Prepared, federation: Federation | None = None, client: int = 0, masks: str = ""
) -> Any:
    """A client's report in the first exchange."""
    server, method = run.server, run.method
    exchange = server.exchanges()[0]
    down = method.download(server.init(), client, server.context(exchange))
    shard = (federation or run.federation).shard(client, labels=method.needs_labels)
    ctx = ClientContext(run.setup, exchange, client=client, data=shard, masks=masks)
    return run_client(method, down, ctx, Nowhere())


def changed(federation: Federation, client: int = 0) -> Federation:
    """The same, with another picture in the place of the client's fourth."""
    pixels = federation.images.pixels.clone()
    row = federation.rows[client][3]
    pixels[row] = 255 - pixels[row].flip(2)
    return replace(federation, images=replace(federation.images, pixels=pixels))


def distance(one: Any, other: Any) -> float:
    """Between two payloads."""
    a, b = flatten(one)[0], flatten(other)[0]
    return math.sqrt(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a))


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedae", {}),
        ("fedsimsiam", {"method.predictor_steps": 0}),
        ("fedsimclr", {"privacy.group": 4}),
        pytest.param("fedbyol", {}, marks=pytest.mark.slow),
        pytest.param("fedu", {}, marks=pytest.mark.slow),
        pytest.param("fedema", {}, marks=pytest.mark.slow),
        pytest.param("fedrot", {}, marks=pytest.mark.slow),
        pytest.param("fedavg", {}, marks=pytest.mark.slow),
        pytest.param(
            "fedmae", {"encoder": "vit_mini", "model.early_norm": "bn"}, marks=pytest.mark.slow
        ),
    ],
)
def test_one_record_moves_an_upload_by_no_more_than_its_clips(
    prepared: Callable[..., Prepared],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    options: dict[str, Any],
) -> None:
    """One clip if it is missing, which is what is accounted for, and two if it is replaced.

    The noise is the same in both, so what differs is the sum of clipped gradients.
    """
    given = {**RECORD, **PLAIN, "privacy.clip": SMALL_CLIP, **options}
    run = prepared(method, **given)
    group = options.get("privacy.group", 1)
    units = 24 // group
    upload, rounding = answer(run).upload, 0.02 * SMALL_CLIP  # of some 10^5 weights to float32
    moved = units * distance(upload, answer(run, changed(run.federation)).upload)
    assert 0.01 * SMALL_CLIP < moved <= 2 * SMALL_CLIP + rounding

    def without(loss_of: Any, given: Iterator[Any], *rest: Any) -> list[Tensor]:
        """Nothing is in the place of the client's fourth image, nor of its group.

        Its gradient is computed all the same: the others' turns and masks, which are secret and
        independent, shall be those that they had beside it.
        """
        alone = [(unit, clipped_sum(loss_of, [unit], *rest)) for unit in given]
        there = [sums for unit, sums in alone if 3 not in unit.index]
        assert len(there) == units - 1
        return [torch.stack(sums).sum(0) for sums in zip(*there, strict=True)]

    monkeypatch.setattr(private_records, "clipped_sum", without)
    moved = units * distance(upload, answer(run).upload)
    assert 0.01 * SMALL_CLIP < moved <= SMALL_CLIP + rounding


def test_over_a_whole_batch_one_record_changes_the_gradient_of_every_other() -> None:
    """Why NT-Xent is refused without groups: clips of rows do not bound what one image does."""
    torch.manual_seed(0)
    weights = torch.randn(6, 4, requires_grad=True)
    images = torch.randn(2, 8, 6)
    other = images.clone()
    other[:, 3] = torch.randn(2, 6)

    def rows(pixels: Tensor) -> Tensor:
        """The gradient of every row, as hooks find it: activation times what flows back."""
        z = [view @ weights for view in pixels]
        back = torch.autograd.grad(nt_xent(z[0], z[1], 0.5), z)
        return sum(torch.einsum("bi,bj->bij", x, g) for x, g in zip(pixels, back, strict=True))

    moved = (rows(images) - rows(other)).flatten(1).norm(dim=1)
    assert (moved > 0).all()  # and not of the fourth alone


def test_a_unit_is_computed_alone_and_cut() -> None:
    net = nn.Linear(3, 2, bias=False)
    rows = [torch.full((1, 3), v) for v in (1.0, 100.0, math.nan, math.inf)]

    def loss_of(batch: Any) -> Tensor:
        out: Tensor = net(batch).sum()
        return out

    alone = [clipped_sum(loss_of, [row], [net.weight], 1.0)[0] for row in rows]
    assert [round(float(a.norm()), 3) for a in alone] == [1.0, 1.0, 0.0, 0.0]
    assert all(float(a.norm()) <= 1.0 for a in alone)
    short = clipped_sum(loss_of, [rows[0] / 100], [net.weight], 1.0)[0]
    assert torch.allclose(short, torch.full((2, 3), 0.01, dtype=torch.float64))
    together = clipped_sum(loss_of, rows, [net.weight], 1.0)[0]
    assert torch.allclose(together, sum(alone))


def noisy(settings: PrivacySettings, run: Prepared, release: Release, places: int) -> _NoisyContext:
    """A context whose optimiser and samples are what local training gets."""
    stream = Noise(b"a" * 32, "test")
    shard = run.federation.shard(0)
    return _NoisyContext(
        run.setup, Exchange(0), client=0, data=shard,
        release=release, privacy=settings, places=places, stream=stream,
    )  # fmt: skip


def test_samples_are_poisson_and_groups_are_drawn_anew(prepared: Callable[..., Prepared]) -> None:
    run, settings = prepared("fedrot", **RECORD), PrivacySettings(level="record", noise=1.0)
    ctx = noisy(settings, run, Release(0.25, 1.0, 400), 24)
    drawn = [batch.index for batch in ctx.batches()]
    often = torch.cat(drawn).bincount(minlength=24) / len(drawn)
    assert (often - 0.25).abs().max() < 0.1
    sizes = torch.tensor([float(len(index)) for index in drawn])
    assert abs(float(sizes.mean()) - 6) < 0.5
    assert abs(float(sizes.var()) - 24 * 0.25 * 0.75) < 1.2  # and not always the same number
    ctx = noisy(replace(settings, group=5), run, Release(0.5, 1.0, 20), 4)
    groups = [batch.index for batch in ctx.batches()]
    for index in groups:
        assert len(index) % 5 == 0
        assert len(index.unique()) == len(index)
    first, second = [index[:5].tolist() for index in groups if len(index)][:2]
    assert first != second
    with pytest.raises(FurlongError, match="more often than the budget counts, in 20 steps"):
        next(iter(ctx.batches()))


def test_noise_has_the_size_that_is_accounted_for(prepared: Callable[..., Prepared]) -> None:
    run = prepared("fedrot", **RECORD, **PLAIN)
    settings = PrivacySettings(level="record", noise=3.0, clip=0.5)
    ctx = noisy(settings, run, Release(0.5, 3.0, 1), 20)
    net = nn.Linear(200, 100, bias=False)
    before = net.weight.detach().clone()
    (batch,) = ctx.batches()
    ctx.optimiser(net).descend(lambda _: 0 * net.weight.sum(), batch)
    moved = net.weight.detach() - before
    assert float(moved.std()) == pytest.approx(3.0 * 0.5 / (0.5 * 20), rel=0.03)
    with pytest.raises(FurlongError, match="sample of its own"):
        ctx.optimiser(net).descend(lambda _: 0 * net.weight.sum(), batch)
    with pytest.raises(FurlongError, match="whole batch"):
        ctx.optimiser(net).step(net.weight.sum())


def test_nobody_else_knows_which_views_were_drawn(
    prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By run.seed, which all know, one image less would be other views of all behind it.

    That moves a sum of gradients by far more than one clip. It is shown here for views of the
    seed, and that what a client trains on is drawn from its secret.
    """
    run = prepared("fedrot", **RECORD, **PLAIN)
    pixels, augment = run.federation.images.pixels[:24], run.setup.augment
    with with_seed(7):
        (whole,) = augment.views(pixels, 1)
    with with_seed(7):
        (without,) = augment.views(torch.cat([pixels[:3], pixels[4:]]), 1)
    assert sum(not torch.equal(a, b) for a, b in zip(whole[4:], without[3:], strict=True)) > 15

    seen: list[Tensor] = []
    views = _Sample.views

    def looked_at(self: _Sample, n: int = 2) -> tuple[Tensor, ...]:
        if n not in self.drawn:
            seen.append(views(self, n)[0])
        return views(self, n)

    monkeypatch.setattr(_Sample, "views", looked_at)
    for secret in (b"a", b"b", b"a"):
        answer(replace(run, method=replace(run.method, secret=32 * secret)))
    one, other, again = seen
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_nothing_but_weights_leaves(prepared: Callable[..., Prepared]) -> None:
    report = answer(prepared("fedbyol", **RECORD))  # which logs a divergence, too
    assert report.metrics == {"images": 24.0}  # three steps of eight, as expected before
    assert report.examples == 24
    report = answer(prepared("fedrot", **CLIENT))
    assert report.metrics == {"images": 0.0}
    assert report.examples == 1


# ---------------------------------------------------------------- an audit


def least_epsilon(right: int, guesses: int, canaries: int, delta: float) -> float:
    """What ε is at least, with 95 % confidence, from guesses who of ``canaries`` was there.

    Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023: the number
    of right guesses is at most Binomial(guesses, e^ε/(1 + e^ε)), but for a part that δ pays for;
    at their Theorem 5.2's worst the tail grows by 2·canaries·δ·(tail over the distance to it).
    """
    best = 0.0
    for step in range(1, 1000):
        epsilon = step / 100
        share = 1 / (1 + math.exp(-epsilon))
        tails = binom.sf([right - 1 - i for i in range(guesses + 1)], guesses, share)
        paid = max((tails[i] - tails[0]) / i for i in range(1, guesses + 1))
        if tails[0] + 2 * canaries * delta * paid > 0.05:
            break
        best = epsilon
    return best


@pytest.mark.parametrize(("broken", "caught"), [(1.0, False), (0.25, True)])
def test_canaries_of_one_run_do_not_contradict_the_budget(
    prepared: Callable[..., Prepared], broken: float, caught: bool
) -> None:
    """Half of the canaries are there; each has a direction of its own. Who was it?"""
    canaries, guesses, delta = 400, 120, 1e-6
    run = prepared("fedrot", **RECORD, **PLAIN)
    claimed = Release(1.0, 2.0, 1)
    ctx = noisy(
        PrivacySettings(level="record", noise=2.0), run, replace(claimed, noise=2 * broken), 24
    )
    net = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(net.weight)
    there = torch.rand(canaries, generator=torch.Generator().manual_seed(1)) < 0.5

    def loss_of(batch: Any) -> Tensor:
        out: Tensor = -1000 * net.weight[0, batch]
        return out

    class Canaries(_Sample):
        def units(self) -> Iterator[int]:  # type: ignore[override]
            return iter(there.nonzero()[:, 0].tolist())

    sample = next(iter(ctx.batches()))
    optimiser = ctx.optimiser(net)
    assert isinstance(optimiser, NoisyOptimiser)
    optimiser.descend(loss_of, Canaries(**vars(sample)))
    order = net.weight.detach()[0].argsort()
    out, within = order[: guesses // 2], order[-guesses // 2 :]
    right = int((~there[out]).sum() + there[within].sum())
    bound = least_epsilon(right, guesses, canaries, delta)
    assert (bound > epsilon_of((claimed,), delta)) == caught
    assert bound > 0.2  # the attack does see something


# ---------------------------------------------------------------- clients


def test_an_update_is_cut_and_the_server_cuts_again(prepared: Callable[..., Prepared]) -> None:
    run = prepared("fedsimclr", **CLIENT, **{"privacy.clip": 0.01})
    report = answer(run)
    start = run.method.download(run.server.init(), 0, run.server.context(Exchange(0)))
    assert distance(report.upload, start) == pytest.approx(0.01, rel=0.05)  # float32
    long = {"a": torch.full((3,), 4.0).double()}
    assert float(clipped(long, 1.0)["a"].norm()) <= 1.0
    assert torch.equal(
        clipped({"a": torch.tensor([0.1]).double()}, 1.0)["a"], torch.tensor([0.1]).double()
    )
    assert not clipped({"a": torch.tensor([1.0, math.nan]).double()}, 1.0)["a"].any()


@pytest.mark.parametrize(("at", "enough"), [("server", 2), ("clients", 2), ("clients", 5)])
def test_the_mean_has_the_noise_that_is_accounted_for(
    prepared: Callable[..., Prepared], at: str, enough: int, tmp_path: Path
) -> None:
    """With shares, those of all but one suffice: that one knows its own and can take it away.

    Where more are to suffice than there are, all three must have answered.
    """
    noise, clip, shares = 4.0, 0.5, {"privacy.noise_at": at, "train.min_clients": enough}
    run = prepared("fedsimclr", **CLIENT, **shares, **{"privacy.clip": clip, "optimiser.lr": 1e-6})
    run = replace(run, method=replace(run.method, privacy=replace(run.method.privacy, noise=noise)))
    server = replace(run.server, method=run.method, folder=tmp_path)
    run = replace(run, server=server)
    state, ctx = server.init(), server.context(server.exchanges()[0])
    reports = [answer(run, client=k) for k in range(3)]
    new = run.method.aggregate(state, reports, ctx)
    start = flatten(state)[0]["weights/backbone.conv4.weight"]
    moved = flatten(new)[0]["weights/backbone.conv4.weight"] - start
    parts = 1.0 if at == "server" else 3 / (min(enough, 3) - 1)
    assert float(moved.std()) == pytest.approx(noise * clip / 3 * math.sqrt(parts), rel=0.03)
    forecast = run.method.forecast(run.setup)  # the ratio is that of the noise that is there
    added = clip * forecast.ratio / math.sqrt(forecast.parameters)
    assert float(moved.std()) == pytest.approx(added, rel=0.03)
    assert ctx.metrics["epsilon"] == epsilon_of((Release(1.0, noise, 1),), 1e-5)
    one = run.method.aggregate(state, reports[:1], ctx)  # the divisor is who was asked
    moved = flatten(one)[0]["weights/backbone.conv4.weight"] - start
    parts = 1.0 if at == "server" else 1 / (min(enough, 3) - 1)
    assert float(moved.std()) == pytest.approx(noise * clip / 3 * math.sqrt(parts), rel=0.03)
    none = run.method.aggregate(state, [], ctx)
    if at == "clients":  # who adds noise is not there; the run stops, for too few answered
        assert none is state
    else:  # that nobody answered is not to be seen in the model
        moved = flatten(none)[0]["weights/backbone.conv4.weight"] - start
        assert float(moved.std()) == pytest.approx(noise * clip / 3, rel=0.03)
        assert distance(none, run.method.aggregate(state, [], ctx)) == 0


def test_another_sum_gets_other_noise_and_the_same_one_the_same(
    prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    """Or two results of one round would give away the difference of their sums."""
    run = prepared("fedsimclr", **CLIENT)
    server = replace(run.server, folder=tmp_path)
    state, ctx = server.init(), server.context(server.exchanges()[0])
    reports = [answer(run, client=k) for k in range(3)]
    all_three, again = (run.method.aggregate(state, reports, ctx) for _ in range(2))
    assert distance(all_three, again) == 0
    assert Ledger(tmp_path).rounds(0) == 1
    two = run.method.aggregate(state, reports[:2], ctx)
    assert distance(all_three, two) > 100 * 0.33  # a clipped update alone is a third at most
    assert Ledger(tmp_path).rounds(0) == 2


def test_a_share_of_noise_is_never_used_twice(prepared: Callable[..., Prepared]) -> None:
    """A round that is done again without a client, or with other shares, must not give it away."""
    shares = {"privacy.noise_at": "clients", "privacy.noise_from": "secret", "train.min_clients": 2}
    run = prepared("fedsimclr", **{**CLIENT, **shares, "optimiser.lr": 1e-6})
    other = replace(run, federation=changed(run.federation))  # whose update is another

    def noise(run: Prepared, masks: str) -> Tensor:
        return flatten(answer(run, masks=masks).upload)[0]["weights/backbone.conv4.weight"]

    first = noise(run, "first")
    pairs = [(noise(run, ""), noise(run, "")), (first, noise(run, "second"))]
    for one, two in [*pairs, (first, noise(other, "first"))]:
        assert float((one - two).std()) == pytest.approx(math.sqrt(2), rel=0.03)
    assert torch.equal(first, noise(run, "first"))  # or the mean of several would have less of it


def test_noise_of_another_size_is_other_noise(prepared: Callable[..., Prepared]) -> None:
    """The same noise, twice as large, would fall out of the two answers."""
    run, name = prepared("fedrot", **RECORD, **PLAIN), "weights/backbone.conv4.weight"
    start = flatten(run.server.init())[0][name]
    moves = []
    for noise in (1000.0, 2000.0):
        method = replace(run.method, privacy=replace(run.method.privacy, noise=noise))
        moves.append(flatten(answer(replace(run, method=method)).upload)[0][name] - start)
    assert abs(float(torch.corrcoef(torch.stack([m.flatten() for m in moves]))[0, 1])) < 0.1


def test_another_version_of_torch_is_other_noise(
    prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may round otherwise, and the same noise would fall out of the difference."""
    run, name = prepared("fedrot", **RECORD, **PLAIN), "weights/backbone.conv4.weight"
    here = flatten(answer(run).upload)[0][name]
    monkeypatch.setattr(torch, "__version__", "9.9")
    there = flatten(answer(run).upload)[0][name]
    assert float((here - there).std()) == pytest.approx(math.sqrt(2) / 24, rel=0.05)


def test_an_accelerator_gets_new_noise_every_time(
    prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may round otherwise the second time: the same noise would fall out of the difference."""
    assert repeatable(torch.device("cpu"))
    assert not repeatable(torch.device("cuda"))
    secret = {"privacy.noise_from": "secret", "privacy.noise": None, "privacy.epsilon": 8.0}
    run, name = prepared("fedrot", **{**RECORD, **secret}, **PLAIN), "weights/backbone.conv4.weight"
    assert torch.equal(*(flatten(answer(run).upload)[0][name] for _ in range(2)))
    monkeypatch.setattr(private_records, "repeatable", lambda _: False)
    one, two = (flatten(answer(run).upload)[0][name] for _ in range(2))
    noise = run.method.release(run.setup, 0).noise
    assert float((one - two).std()) == pytest.approx(noise * math.sqrt(2) / 24, rel=0.05)
    server = replace(run.server, folder=tmp_path)  # and nobody is asked for what is not there
    state, (first, last) = server.init(), map(server.context, server.exchanges())
    for ctx in (first, last):
        assert run.method.asked(state, [0, 1, 2], ctx) == [0, 1, 2]
        run.method.aggregate(state, (answer(run, client=k) for k in range(3)), ctx)
    with pytest.raises(FurlongError, match="budget is used up"):
        run.method.asked(state, [0, 1, 2], last)


def test_a_client_is_charged_for_the_rounds_in_which_it_is_asked() -> None:
    """The seed tells everybody who is asked: no amplification by sampling."""
    run = prepare(tiny("fedsimclr", **CLIENT, fraction=0.34, rounds=9))
    assert isinstance(run.method, Private)
    visits = run.method.visits(run.setup)
    assert sum(visits.values()) == 9
    forecast = run.method.forecast(run.setup)
    most = Release(1.0, 1.0, max(visits.values()))
    assert forecast.epsilon == epsilon_of((most,), 1e-5)


def test_few_clients_are_told_and_refused() -> None:
    given = {**CLIENT, "privacy.noise": None, "privacy.epsilon": 8.0}
    with pytest.raises(FurlongError, match=r"drown the signal.*With 3 clients ε says little"):
        prepare(tiny("fedsimclr", **{**given, "privacy.max_ratio": 10}))
    notes = prepare(tiny("fedsimclr", **given)).notes
    assert any("33 % of all there is to learn from" in note for note in notes)
    alone = prepare(tiny("fedsimclr", **given, fraction=0.3)).notes
    assert any("The mean update of 1 client in a round" in note for note in alone)
    assert any("nobody is protected" in note for note in notes)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedsimclr", RECORD, "contrasts images with each other"),
        ("fedbarlow", RECORD, "sum over images"),
        ("fedu2", {**RECORD, "server.rule": "eua"}, "sum over images"),
        ("fedmoco", RECORD, "sum over images"),
        ("fedrot", {**RECORD, "privacy.group": 4}, "single images"),
        ("fedsimclr", {**RECORD, "privacy.group": 25}, "not one group"),
        ("fedrot", {**RECORD, "model.early_norm": "bn"}, "buffers"),
        ("fedsimclr", {**CLIENT, "model.early_norm": "bn"}, "buffers"),
        ("fedsc", CLIENT, "only the mean"),
        ("fcl", CLIENT, "only the mean"),
        ("fedsimclr", {**CLIENT, "server.rule": "median"}, "picks or weighs single ones"),
        ("fedsimclr", {**CLIENT, "server.outlier": 5.0}, "looks at single updates"),
        ("fedsimclr", {**CLIENT, "secure.sums": True}, "noise-at clients"),
        ("fedsimclr", {**CLIENT, "bound": "pooled"}, "one client"),
        ("fedsimclr", {**CLIENT, "evaluate.angles": 8}, "encoders of single clients"),
        ("fedrot", {**RECORD, "bound": "single"}, "nothing leaves"),
        ("fedsimclr", {**CLIENT, "privacy.noise_at": "clients"}, "min-clients"),
    ],
)
def test_what_the_budget_does_not_cover_is_refused(
    method: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(FurlongError, match=words):
        prepare(tiny(method, **options))


def test_batch_statistics_are_refused_where_they_are_made(
    prepared: Callable[..., Prepared],
) -> None:
    run = prepared("fedrot", **RECORD)
    ctx = noisy(PrivacySettings(level="record", noise=1.0), run, Release(1.0, 1.0, 1), 24)
    with pytest.raises(FurlongError, match="BatchNorm does that"):
        ctx.optimiser(nn.BatchNorm1d(3))
    with pytest.raises(FurlongError, match="elsewhere"):
        ctx.batches(epochs=1).__next__()
    with pytest.raises(FurlongError, match="elsewhere"):
        ctx.batches_of(ctx.data)
    ctx.setup = replace(ctx.setup, optimiser=replace(ctx.setup.optimiser, decorrelation=0.1))
    with pytest.raises(FurlongError, match="decorrelation"):
        ctx.optimiser(nn.Linear(2, 2))


def test_a_method_of_ones_own_that_steps_on_batches_is_stopped(
    prepared: Callable[..., Prepared],
) -> None:
    class Careless(FedSimCLR):
        decomposes = "records"

        def local_update(self, _: Any, down: Any, ctx: ClientContext) -> Local[Any, Any]:
            net = ctx.network("net", lambda: self.network(ctx), down.weights)
            for batch in ctx.batches():
                ctx.optimiser(net).step(self.loss(net, batch))
            raise AssertionError

    run = prepared("fedrot", **RECORD)
    method = replace(run.method, inner=Careless(projection_head="small_proj"))
    server = replace(run.server, method=method)
    with pytest.raises(FurlongError, match="loss of a whole batch"):
        answer(replace(run, method=method, server=server))


# ---------------------------------------------------------------- whole runs


def test_a_run_that_goes_on_spends_nothing_twice_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**RECORD, "evaluate.probe": "none", "rounds": 2}
    whole = loop.run(tiny("fedrot", **given, out=str(tmp_path / "whole")))
    spent = whole.summary["privacy"]
    assert spent["releases"] == 2
    assert spent["epsilon"] == epsilon_of((Release(1 / 3, 1.0, 6),), 1e-5)
    assert not (tmp_path / "whole" / "server").exists()  # the secret is thrown away
    secret_in(tmp_path / "whole" / "server")  # as if it was killed before that
    loop.resume(tmp_path / "whole")
    assert not (tmp_path / "whole" / "server").exists()
    said: list[str] = []
    secret_in(tmp_path / "whole" / "server")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        loop.resume(tmp_path / "whole", say=said.append)
    assert any("cannot be deleted" in text and KEY in text for text in said)

    class Stop(Exception):
        pass

    def stop(status: Any) -> None:
        if status.done == 2:
            raise Stop

    secret = tmp_path / "broken" / "server" / KEY
    settings = tiny("fedrot", **{**given, "rounds": 3}, out=str(tmp_path / "broken"))
    with pytest.raises(Stop):
        loop.run(settings, show=stop)
    assert secret.exists()
    entries = (secret.parent / LEDGER).read_text()
    for path in sorted((tmp_path / "broken" / "checkpoints").iterdir())[1:]:
        for file in path.iterdir():  # the last checkpoint is damaged: a round is computed again
            file.write_bytes(b"")
    saved = checkpoint.load(tmp_path / "broken")
    assert saved is not None
    assert saved.done == 1
    hidden = secret.rename(secret.with_name("elsewhere"))
    with pytest.raises(FurlongError, match="spends the budget a second time"):
        loop.resume(tmp_path / "broken")
    hidden.rename(secret)
    done = loop.resume(tmp_path / "broken")
    assert done.summary["privacy"]["releases"] == 3
    assert len(entries.splitlines()) == 2 + 2 * 3


def test_more_than_the_budget_is_never_spent(
    prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    """A round with another result than before costs again, and then the last one is too much."""
    given = {**CLIENT, "privacy.noise": None, "privacy.epsilon": 5.0}
    run = prepared("fedsimclr", **given)
    server = replace(run.server, folder=tmp_path)
    state, (first, second) = server.init(), server.exchanges()
    reports = [answer(run, client=k) for k in range(3)]
    run.method.aggregate(state, reports, server.context(first))
    run.method.aggregate(state, reports[1:], server.context(first))
    with pytest.raises(FurlongError, match="budget is used up"):
        run.method.aggregate(state, reports, server.context(second))
    with pytest.raises(FurlongError, match="budget is used up"):  # the first one a third time
        run.method.aggregate(state, reports[:2], server.context(first))
    run.method.aggregate(state, reports, server.context(first))  # which costs nothing
    assert Ledger(tmp_path).epsilon(1e-5) <= 5.0


def test_a_last_round_with_new_shares_of_noise_is_not_done_again(
    prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    """Every computation releases something new: nobody is asked for what is not in the budget."""
    budget = {"privacy.noise": None, "privacy.epsilon": 5.0, "privacy.noise_from": "secret"}
    shares = {"privacy.noise_at": "clients", "train.min_clients": 2}
    run = prepared("fedsimclr", **{**CLIENT, **budget, **shares})
    server = replace(run.server, folder=tmp_path)
    state = server.init()
    first, last = (server.context(exchange) for exchange in server.exchanges())
    run.method.asked(state, [0, 1, 2], first)
    run.method.aggregate(state, [], first)
    assert run.method.asked(state, [0, 1, 2], last) == [0, 1, 2]
    run.method.aggregate(state, [], last)
    assert Ledger(tmp_path).epsilon(1e-5) <= 5.0
    with pytest.raises(FurlongError, match="budget is used up"):
        run.method.asked(state, [0, 1, 2], last)
    assert Ledger(tmp_path).rounds(0) == 2


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    given = {**CLIENT, "privacy.max_ratio": 1e-6, "privacy.noise_from": "secret"}
    with pytest.raises(FurlongError, match="drown the signal"):
        loop.run(tiny("fedsimclr", **given, out=str(tmp_path / "run")))
    assert not list(tmp_path.iterdir())
    mine = tmp_path / "mine" / "server" / "notes.txt"  # what was there before stays
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(FurlongError, match="drown the signal"):
        loop.run(tiny("fedsimclr", **given, out=str(tmp_path / "mine")))
    assert [path.name for path in (tmp_path / "mine").rglob("*")] == ["server", "notes.txt"]
