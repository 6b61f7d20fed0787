"""The server's rules: against NumPy and SciPy, against one bad client in five, in whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import scipy
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from furlong.core import weights
from furlong.core.aggregation import (
    COLLECTED,
    Average,
    Collecting,
    Rule,
    Ruling,
    ServerSettings,
    least_norm,
    weiszfeld,
)
from furlong.core.context import Exchange
from furlong.core.exchange import Server
from furlong.core.method import Method, Report
from furlong.core.payload import Weights, flatten, is_buffer, pack, replace_tensors, unpack
from furlong.core.weights import Mean
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.methods.base import Model
from furlong.methods.fedsimclr import FedSimCLR
from furlong.methods.wrappers.alone import Alone
from furlong.methods.wrappers.ruled import Ruled, State
from furlong.runs import loop
from furlong.runs.config import load
from furlong.runs.cost import predict
from furlong.runs.prepare import Prepared, prepare

RULES = get_args(Rule)
EQUAL = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "ldawa", "eua")
ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_bound")
SHAPES = {"conv.weight": (2, 3, 2), "bias": (4,), "scale": (), "bn.running_mean": (3,)}


def network(rng: np.random.Generator) -> Weights:
    """Some weights, a scalar, BatchNorm statistics and a counter, in float64."""
    made = {name: torch.from_numpy(np.asarray(rng.normal(size=s))) for name, s in SHAPES.items()}
    made["bn.running_var"] = torch.from_numpy(rng.uniform(0.5, 2, size=3))
    made["bn.num_batches_tracked"] = torch.tensor(int(rng.integers(100)))
    return made


def cohort(seed: int, n: int) -> tuple[Weights, list[Weights], list[int]]:
    """The server's network, those of ``n`` clients and their numbers of images."""
    rng = np.random.default_rng(seed)
    return network(rng), [network(rng) for _ in range(n)], rng.integers(1, 50, size=n).tolist()


def merged(
    start: Weights,
    values: list[Weights],
    images: list[int],
    policy: Any = "average",
    **options: Any,
) -> Weights:
    """One round."""
    combiner = Ruling(ServerSettings(**options), {}, "train", lambda _: None)(policy)
    for value, count in zip(values, images, strict=True):
        combiner.add(Model(value), count)
    result: Model = combiner.onto(Model(start))
    return result.weights


def stacked(values: list[Weights], name: str) -> Any:
    return np.stack([value[name].numpy() for value in values])


def floating(value: Weights) -> list[str]:
    return [name for name, tensor in value.items() if tensor.is_floating_point()]


def vector(value: Weights, buffers: bool | None = None) -> Any:
    """The floating tensors as one vector: all, the parameters or the buffers."""
    names = [n for n in floating(value) if buffers is None or is_buffer(n) == buffers]
    return np.concatenate([value[n].double().numpy().ravel() for n in names])


def close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- against references

ROUNDS = given(seed=st.integers(0, 2**32 - 1), n=st.integers(5, 9))
few = settings(max_examples=15, deadline=None)


@few
@ROUNDS
def test_median_and_trimmed_mean(seed: int, n: int) -> None:
    start, values, images = cohort(seed, n)
    median = merged(start, values, images, rule="median")
    trimmed = merged(start, values, images, rule="trimmed_mean", faulty=2)
    for name in floating(start):
        rows = stacked(values, name)
        close(median[name], np.median(rows, axis=0))
        close(trimmed[name], scipy.stats.trim_mean(rows, 2.5 / n, axis=0))


def krum_order(values: list[Weights], faulty: int) -> list[int]:
    """Clients by Krum's score, as printed."""
    points = [vector(value) for value in values]
    scores = []
    for i, point in enumerate(points):
        others = sorted(((point - p) ** 2).sum() for j, p in enumerate(points) if j != i)
        scores.append(sum(others[: len(points) - faulty - 2]))
    return sorted(range(len(points)), key=lambda i: scores[i])


@few
@ROUNDS
def test_krum_and_multi_krum(seed: int, n: int) -> None:
    start, values, images = cohort(seed, n)
    best, *_ = order = krum_order(values, 1)
    krum = merged(start, values, images, rule="krum")
    assert pack(Model(krum)) == pack(Model(values[best]))
    multi = merged(start, values, images, rule="multi_krum")
    close(vector(multi), np.mean([vector(values[k]) for k in order[: n - 1]], axis=0))


@few
@ROUNDS
def test_geometric_median(seed: int, n: int) -> None:
    start, values, images = cohort(seed, n)
    points = np.stack([vector(value) for value in values])

    def total(x: Any) -> float:
        return float(np.linalg.norm(points - x, axis=1).sum())

    best = scipy.optimize.minimize(total, points.mean(axis=0), options={"gtol": 1e-9})
    got = vector(merged(start, values, images, rule="geometric_median"))
    assert total(got) <= best.fun * (1 + 1e-7)
    close(got, best.x, 1e-3)


def test_geometric_median_at_a_client_and_of_copies() -> None:
    line = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    beta = weiszfeld((line - line[:, None]).square(), 1000, 0.0)
    assert float(beta @ line) == pytest.approx(1.0, abs=1e-4)  # the median of a line
    assert weiszfeld(torch.zeros(4, 4, dtype=torch.float64), 100, 1e-9).tolist() == [0.25] * 4


@few
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(3, 9), bound=st.sampled_from([0.0, 0.3, 99.0]))
def test_norm_bound(seed: int, n: int, bound: float) -> None:
    start, values, images = cohort(seed, n)
    got = merged(start, values, images, rule="norm_bound", max_norm=bound)
    for buffers in (False, True):
        x = vector(start, buffers)
        moves = np.stack([vector(value, buffers) - x for value in values])
        norms = np.linalg.norm(moves, axis=1)
        limit = bound if bound and not buffers else np.median(norms)
        moves *= np.minimum(1, limit / norms)[:, None]
        close(vector(got, buffers), x + np.average(moves, axis=0, weights=images))
    assert (got["bn.running_var"] > 0).all()


@few
@ROUNDS
def test_ldawa(seed: int, n: int) -> None:
    start, values, images = cohort(seed, n)
    start["bias"] = torch.zeros(4, dtype=torch.float64)
    got = merged(start, values, images, rule="ldawa")
    weight, x = stacked(values, "conv.weight"), start["conv.weight"].numpy()
    cosines = [1 - scipy.spatial.distance.cosine(w.ravel(), x.ravel()) for w in weight]
    close(got["conv.weight"], sum(c * w for c, w in zip(cosines, weight, strict=True)) / n)
    for name in ("bias", "scale", "bn.running_mean", "bn.running_var"):
        close(got[name], stacked(values, name).mean(axis=0))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_least_norm(n: int) -> None:
    """Against a search over the simplex; orthogonal vectors share by 1/length²."""
    rows = torch.randn(n, 7, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    shares = least_norm(rows @ rows.T)
    assert float(shares.sum()) == pytest.approx(1)
    assert (shares >= 0).all()
    tried = torch.distributions.Dirichlet(torch.full((n,), 0.5, dtype=torch.float64)).sample(
        (5000,)
    )
    assert float((shares @ rows).norm()) <= float((tried @ rows).norm(dim=1).min()) * 1.001
    square = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    assert least_norm(square).tolist() == pytest.approx([0.8, 0.2])


def test_eua_counts_those_less_who_went_far_or_together() -> None:
    before = {"w": torch.zeros(2, dtype=torch.float64)}
    right, up = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()

    def merged(*moves: Tensor) -> list[float]:
        cohort: Collecting[Any] = Collecting("average", ServerSettings("eua"), print)
        for move in moves:
            cohort.add({"w": move}, 10)
        return cohort.onto(before)["w"].tolist()

    assert merged(right, up) == pytest.approx([0.5, 0.5])
    assert merged(4 * right, up) == pytest.approx([0.8, 0.8])  # shares 1/5 and 4/5
    assert merged(right, right, up) == pytest.approx([0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("lr", [None, 0.3])
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_server_optimisers_over_rounds(rule: str, lr: float | None) -> None:
    options: dict[str, Any] = {"rule": rule, "lr": lr, "momentum": 0.8, "beta2": 0.9, "tau": 0.1}
    start, _, _ = cohort(0, 1)
    moments: dict[str, Weights] = {}
    x, m, v = vector(start, False), 0.0, 0.1**2
    for turn in range(4):
        _, values, images = cohort(turn + 1, 3)
        ruling = Ruling(ServerSettings(**options), moments, "train", lambda _: None)
        combiner = ruling("average")
        for value, count in zip(values, images, strict=True):
            combiner.add(Model(value), count)
        start, moments = combiner.onto(Model(start)).weights, ruling.moments()
        mean = np.average([vector(value, False) for value in values], axis=0, weights=images)
        delta = mean - x
        if rule == "momentum":
            m = 0.8 * m + delta
            x = x + (lr or 1) * m
        else:
            m, v = 0.8 * m + 0.2 * delta, 0.9 * v + 0.1 * delta**2
            x = x + (lr or 0.01) * m / (np.sqrt(v) + 0.1)
        close(vector(start, False), x)
        buffers = [vector(value, True) for value in values]
        close(vector(start, True), np.average(buffers, axis=0, weights=images))


def test_mean_and_first_step_of_momentum_are_the_mean() -> None:
    """Without momentum from before, a step of length 1 reaches the mean."""
    start, values, images = cohort(3, 5)
    mean: Mean[Model] = Mean()
    for value, count in zip(values, images, strict=True):
        mean.add(Model(value), count)
    plain = merged(start, values, images, rule="mean")
    assert pack(Model(plain)) == pack(mean.result())
    close(vector(merged(start, values, images, rule="momentum")), vector(plain))


@pytest.mark.parametrize("rule", ["mean", "momentum", "adam"])
def test_what_a_rule_gives_keeps_no_other_memory_alive(rule: Any) -> None:
    """A small view of a large piece of memory would hold all of it until the next round."""
    start, values, images = cohort(3, 5)
    for value in (start, *values):
        value["large"] = torch.ones(10_000, dtype=torch.float64)
    found = merged(start, values, images, rule=rule)
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in found.values()}
    wanted = sum(t.nbytes for t in found.values())
    assert sum(piece.nbytes() for piece in pieces.values()) <= 1.1 * wanted


@pytest.mark.parametrize("pooled", [False, True])
def test_the_mean_of_parts_is_that_of_the_whole(
    pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, whatever lies in a block, in a piece of memory or by itself."""
    _, values, images = cohort(3, 5)
    kinds = {"conv.weight": torch.float32, "bias": torch.float16}
    values = [{n: t.to(kinds.get(n, t.dtype)) for n, t in value.items()} for value in values]

    def bits(block: int, together: bool) -> Any:
        monkeypatch.setattr(weights, "BLOCK", block)
        mean: Mean[Model] = Mean(pooled)
        for value, count in zip(values, images, strict=True):
            model = Model(value)
            mean.add(unpack(pack(model)) if together else model, count)
        return pack(mean.result())

    whole = bits(weights.BLOCK, True)
    assert all(bits(block, together) == whole for block in (1, 5) for together in (True, False))


# ---------------------------------------------------------------- properties of all rules


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_order_of_clients_does_not_matter(rule: Any, seed: int, data: Any) -> None:
    start, values, images = cohort(seed, 6)
    order = data.draw(st.permutations(range(6)))
    once = merged(start, values, images, rule=rule)
    again = merged(start, [values[k] for k in order], [images[k] for k in order], rule=rule)
    close(vector(again), vector(once), 1e-7)
    if rule != "krum":  # which takes over one client's
        most = max(int(value["bn.num_batches_tracked"]) for value in values)
        assert again["bn.num_batches_tracked"] <= most


@pytest.mark.parametrize("rule", RULES)
def test_claimed_numbers_of_images(rule: Any) -> None:
    start, values, images = cohort(1, 5)
    boast = [10**6, *images[1:]]
    once, again = (merged(start, values, i, rule=rule) for i in (images, boast))
    assert (pack(Model(once)) == pack(Model(again))) == (rule in EQUAL)


@pytest.mark.parametrize("rule", RULES)
def test_inputs_stay_and_types_are_kept(rule: Any) -> None:
    start, values, images = cohort(1, 5)
    half: list[Weights] = [
        {n: t.float() if t.is_floating_point() else t for n, t in value.items()}
        for value in (start, *values)
    ]
    before = [pack(Model(value)) for value in half]
    got = merged(half[0], half[1:], images, rule=rule)
    assert [pack(Model(value)) for value in half] == before
    assert {n: (t.dtype, t.shape) for n, t in got.items()} == {
        n: (t.dtype, t.shape) for n, t in half[0].items()
    }


@pytest.mark.parametrize("rule", RULES)
def test_nobody_answers_and_statistics_that_never_travel(rule: Any) -> None:
    start, values, images = cohort(1, 5)
    assert pack(Model(merged(start, [], [], rule=rule))) == pack(Model(start))
    sent = [{n: t for n, t in value.items() if not is_buffer(n)} for value in values]
    local = merged(start, sent, images, rule=rule)
    assert all(torch.equal(local[n], start[n]) for n in start if is_buffer(n))
    assert not np.array_equal(vector(local, False), vector(start, False))


@pytest.mark.parametrize("rule", [r for r in RULES if r not in ("median", "trimmed_mean")])
def test_pooled_statistics(rule: Any) -> None:
    """Two groups of equal clients far apart: variances get the spread between those merged."""
    start, (one, *_), _ = cohort(1, 1)
    other = {**one, "bn.running_mean": one["bn.running_mean"] + 2}
    values = [one] * 3 + [other] * 3
    average, pooled = (
        merged(start, values, [1] * 6, policy, rule=rule) for policy in ("average", "pooled")
    )
    gained = pooled["bn.running_var"] - average["bn.running_var"]
    if rule == "krum":
        close(gained, 0.0)  # one client has no spread
    elif rule == "multi_krum":  # five of them
        close(gained, 4 * (3 / 5) * (2 / 5))
    elif rule != "norm_bound":  # there everybody is pulled to the server's value
        close(gained, 1.0, 1e-6)


def test_rules_that_take_numbers_one_by_one_refuse_pooled_statistics() -> None:
    for rule in ("median", "trimmed_mean"):
        with pytest.raises(FurlongError, match="bn_stats = average"):
            prepare(five(server__rule=rule, method__bn_stats="pooled"))


# ---------------------------------------------------------------- too few clients


def five(method: str = "fedsimclr", **options: Any) -> Any:
    """Five clients with 16 small images each."""
    named = {key.replace("__", "."): value for key, value in options.items()}
    return tiny(method, **{"clients": 5, "data.images": 80, "data.test_images": 20, **named})


def test_settings_are_checked() -> None:
    for name, value in (
        ("lr", 0.0),
        ("momentum", 1.0),
        ("beta2", -0.1),
        ("tau", 0.0),
        ("faulty", -1),
        ("max_norm", float("inf")),
        ("iterations", 0),
        ("tolerance", float("nan")),
        ("rule", "krumm"),
    ):
        with pytest.raises(FurlongError, match=rf"server\.{name} is"):
            five(**{f"server__{name}": value})


@pytest.mark.parametrize(
    ("rule", "faulty", "fraction", "least"),
    [("krum", 2, 1.0, 7), ("multi_krum", 1, 0.8, 5), ("trimmed_mean", 3, 1.0, 7)],
)
def test_a_round_must_have_clients_enough(
    rule: str, faulty: int, fraction: float, least: int
) -> None:
    options = {"server__rule": rule, "train__fraction": fraction}
    with pytest.raises(FurlongError, match=rf"at least {least} .* {int(5 * fraction)}\. Use more"):
        prepare(five(**options, server__faulty=faulty))
    assert isinstance(prepare(five(**options, server__faulty=0)).method, Ruled)


@pytest.mark.parametrize("rule", ROBUST)
def test_a_robust_rule_needs_three_clients(rule: str) -> None:
    with pytest.raises(FurlongError, match=r"a round has 2\. .*another --server\.rule"):
        prepare(five(server__rule=rule, train__fraction=0.4, server__faulty=0))


@pytest.mark.parametrize("rule", ROBUST)
def test_clients_that_drop_out(rule: Any) -> None:
    """Those missing count as bad; with two nobody knows whom to believe."""
    start, values, _ = cohort(2, 5)
    for heard in (5, 4, 3, 2):
        told: list[str] = []
        combiner = Ruling(ServerSettings(rule=rule, faulty=1), {}, "train", told.append)("average")
        bad = {n: t * 1e6 if t.is_floating_point() else t for n, t in values[0].items()}
        for value in [bad, *values[1:heard]]:
            combiner.add(Model(value), 1)
        got = combiner.onto(Model(start)).weights
        assert np.abs(vector(got)).max() < 10
        assert bool(told) == (heard < (5 if "krum" in rule else 3))
        assert (pack(Model(got)) == pack(Model(start))) == (heard == 2)
        assert all(f"{heard} answered" in text for text in told)


# ---------------------------------------------------------------- one bad client in five


class Replay:
    """A transport that brings the same answers again, the second client's forged."""

    def __init__(self, reports: list[Report[Any]], forge: Any) -> None:
        self.reports, self.forge = reports, forge

    def exchange(self, _: Exchange, downloads: Any) -> Iterator[tuple[int, Any]]:
        for client in downloads:
            report = self.reports[client]
            if client != 1:
                yield client, report
            elif self.forge is not None:
                tensors = {n: self.forge(n, t) for n, t in flatten(report.upload)[0].items()}
                yield client, replace(report, upload=replace_tensors(report.upload, tensors))


def times(factor: float) -> Any:
    def forge(name: str, tensor: Tensor) -> Tensor:
        # the guard refuses negative variances
        return tensor if is_buffer(name) and factor < 0 else (tensor * factor).to(tensor.dtype)

    return forge


def nan(_: str, tensor: Tensor) -> Tensor:
    return tensor * torch.nan if tensor.is_floating_point() else tensor


@pytest.fixture(scope="module")
def first_round() -> tuple[Prepared, list[Report[Any]]]:
    """The honest answers of five clients, which no rule changes."""
    p, found = prepare(five()), []
    p.server.watch = lambda _, report: found.append(report)
    with InProcess(p.method, p.federation, p.setup) as transport:
        p.server.step(transport, p.server.init(), p.server.exchanges()[0])
    return p, found


def attacked(first: tuple[Prepared, list[Report[Any]]], rule: str, forge: Any) -> Any:
    """The round by ``rule`` with the forged answer: result, and what the server told."""
    p, reports = first
    told: list[str] = []
    method = Ruled(p.method, ServerSettings(rule=rule))  # type: ignore[arg-type]
    server = Server(method, p.setup, tell=told.append)
    transport = Replay(reports, forge)
    result = server.step(transport, server.init(), server.exchanges()[0])
    return result, told


@pytest.mark.parametrize("attack", ["nan", "large", "flipped"])
@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_one_bad_client_in_five(first_round: Any, rule: str, attack: str) -> None:
    forge = {"nan": nan, "large": times(1e6), "flipped": times(-1.0)}[attack]
    result, told = attacked(first_round, rule, forge)
    p, reports = first_round
    start = flatten(p.server.init())[0]
    honest = [flatten(r.upload)[0] for r in reports if r.client != 1]
    if attack == "nan":  # the gate is before any rule
        assert [(f.client, f.kind) for f in result.failures] == [(1, "refused")]
        assert pack(result.server) == pack(attacked(first_round, rule, None)[0].server)
        assert bool(told) == ("krum" in rule)
    else:
        assert not result.failures
        assert not told
    got = flatten(result.server.inner)[0]
    for buffers in (False, True):
        goal = np.mean([vector(value, buffers) for value in honest], axis=0)
        moved = max(np.linalg.norm(vector(v, buffers) - vector(start, buffers)) for v in honest)
        error = np.linalg.norm(vector(got, buffers) - goal)
        if rule == "mean" and (attack == "large" or (attack == "flipped" and not buffers)):
            assert error > 3 * moved
        else:
            assert error < moved


# ---------------------------------------------------------------- whole runs


def finished(p: Prepared, workers: int = 1) -> tuple[Any, bytes]:
    with InProcess(p.method, p.federation, p.setup, workers) as transport:
        *_, last = p.server.run(transport, p.server.init())
    assert not last.failures
    return last.server, bytes(pack(last.server))


@pytest.mark.parametrize(
    ("method", "rule"),
    [("fedsimclr", rule) for rule in RULES]
    + [
        pytest.param(method, rule, marks=pytest.mark.slow)
        for method, rule in {
            "fedu": "adam",
            "fedca": "momentum",
            "fcl": "krum",
            "mfcl": "median",
            "fedbyol": "ldawa",
            "fedema": "geometric_median",
        }.items()
    ],
)
def test_every_rule_runs_with_the_same_bits(method: str, rule: str) -> None:
    p = prepare(five(method, server__rule=rule))
    server, once = finished(p)
    assert finished(p, workers=2)[1] == once
    assert isinstance(server, State) == (rule != "mean")
    if rule != "mean":
        assert once != finished(prepare(five(method)))[1]
        assert bool(server.moments) == (rule not in COLLECTED)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_moments_survive_a_checkpoint(tmp_path: Path, rule: str) -> None:
    """A run that dies after its first round goes on to the same bits."""
    settings = five(server__rule=rule, evaluate__probe="none")
    whole = loop.run(replace_out(settings, tmp_path / "whole"))
    part = tmp_path / "part"

    def die(_: loop.Status) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(replace_out(settings, part), show=die)
    resumed = loop.resume(part)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    saved = unpack((whole.folder / "checkpoints/000002/server.safetensors").read_bytes())
    assert set(saved.moments) == {"train 0"}


def replace_out(settings: Any, out: Path) -> Any:
    return replace(settings, run=replace(settings.run, out=str(out)))


def test_bounds_have_no_rule() -> None:
    for bound in ("single", "pooled"):
        p = prepare(five(server__rule="krum", run__bound=bound))
        assert not isinstance(p.method, Ruled)
        assert [note for note in p.notes if "server.rule = krum plays no part" in note]


def test_a_rule_changes_no_traffic() -> None:
    with_rule, without = (
        [(c.up, c.down) for c in predict(prepare(five("fcl", server__rule=rule)).server)]
        for rule in ("adam", "mean")
    )
    assert with_rule == without


@pytest.mark.parametrize("name", METHODS)
def test_every_method_merges_by_the_rule(prepared: Any, name: str) -> None:
    """A method that made its own mean would pass over --server.rule in silence."""
    p = prepared(name)
    method = p.config.make_method()
    server = Server(method, p.setup, p.server.public)
    ctx, asked = server.context(server.exchanges()[0]), []
    method.aggregate(
        server.init(), [], replace(ctx, combining=lambda p: asked.append(p) or Average(p))
    )
    assert set(asked) == {method.bn_stats}


def test_wrappers_pass_everything_on() -> None:
    """Whatever the contract has, a method behind a wrapper has too."""
    everything = {name for name in vars(Method) if not name.startswith("_")}
    for wrapper, own in ((Ruled, set()), (Alone, {"outline", "caution"})):  # it sends nothing
        same = {n for n in everything if getattr(wrapper, n) is getattr(Method, n)}
        # the first four are asked of the class, and bn_stats is a field
        assert same == {"paper", "keeps", "usual", "usual_small", "bn_stats", *own}

    @dataclass(frozen=True)
    class Scoring(FedSimCLR):
        usual_augment = "flip"

        def classifier(self, server: Model, ctx: Any) -> Any:
            return server, ctx.setup.sizes

    p = prepare(five())
    inner = Scoring(bn_stats="recalibrate")
    for wrapper in (Alone(inner), Ruled(inner, ServerSettings(rule="median"))):
        assert wrapper.usual_augment == "flip"
        assert wrapper.bn_stats == "recalibrate"
        server = Server(wrapper, p.setup)
        score: Any = wrapper.classifier(server.init(), server.context(Exchange(0)))
        assert isinstance(score[0], Model)
        assert len(score[1]) == (1 if isinstance(wrapper, Alone) else 5)


# ---------------------------------------------------------------- L-DAWA by name


def test_ldawa_is_fedsimclr_with_a_rule(tmp_path: Path) -> None:
    named, spelt = five("ldawa"), five("fedsimclr", server__rule="ldawa")
    assert named.server == spelt.server
    assert finished(prepare(named))[1] == finished(prepare(spelt))[1]
    path = tmp_path / "config.toml"
    path.write_text(named.toml())
    assert 'rule = "ldawa"' in path.read_text()
    assert load(path) == named
    assert load(path, {"method": "fedu"}).server.rule == "mean"
    path.write_text(five("fedu", server__rule="krum").toml())
    assert load(path, {"method": "fedbyol"}).server.rule == "krum"
    assert load(path, {"method": "ldawa"}).server.rule == "ldawa"
    with pytest.raises(FurlongError, match="method ldawa means 'ldawa'"):
        five("ldawa", server__rule="mean")
