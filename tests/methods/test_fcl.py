"""FCL (spec 2.10): the losses, the banks, what travels to whom, and the ablations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import LR, plain_client, run_round, twin
from conftest import tiny
from PIL import Image
from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, Exchange, Networks
from furlong.core.exchange import Server, run_client
from furlong.core.method import Report
from furlong.core.payload import flatten, pack, traffic, unpack
from furlong.core.weights import snapshot
from furlong.engines.inprocess import InProcess
from furlong.engines.states import StateFolder
from furlong.errors import FurlongError
from furlong.methods import fcl, instahide
from furlong.methods.bank import blank_bank, enqueue, fill, new_bank, purities, shares
from furlong.methods.fcl import FCL, Down, State, Up
from furlong.nn.encoders import untracked
from furlong.nn.losses import _matching_entropy, info_nce, neighbourhood_matching
from furlong.runs.config import from_tree
from furlong.runs.cost import predict
from furlong.runs.prepare import Prepared, prepare
from furlong.seeding import seeded, threads

# ---------------------------------------------------------------- losses


def reference(query: Tensor, bank: Tensor, neighbours: int, temperature: float) -> Tensor:
    """The definition, B×N×(K−N+1)."""
    logits = F.normalize(query, dim=1) @ F.normalize(bank, dim=1).T / temperature
    total = []
    for row in logits:
        order = row.argsort(descending=True)
        top, rest = row[order[:neighbours]], row[order[neighbours:]]
        for j in range(neighbours):
            log_p = torch.cat([top[j : j + 1], rest]).log_softmax(dim=0)
            total.append(-(log_p.exp() * log_p).sum())
    return torch.stack(total).mean()


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
@pytest.mark.parametrize(("size", "neighbours"), [(2, 1), (12, 1), (12, 5), (12, 11), (64, 10)])
def test_matching_equals_the_definition(size: int, neighbours: int, temperature: float) -> None:
    torch.manual_seed(size)
    query = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bank = torch.randn(size, 6, dtype=torch.float64)
    fast = neighbourhood_matching(query, bank, neighbours, temperature)
    slow = reference(query, bank, neighbours, temperature)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    (got,), (wanted,) = torch.autograd.grad(fast, query), torch.autograd.grad(slow, query)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


def test_matching_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    bank = torch.randn(7, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q: neighbourhood_matching(q, bank, 2, 0.3), query)


def test_golden_values(golden: dict[str, Any]) -> None:
    values = golden["losses"]
    same = torch.ones(3, 8)
    for size in (64, 4096):
        got = neighbourhood_matching(same, torch.ones(size, 8), 10, 0.1).item()
        assert got == pytest.approx(values[f"nm_all_equal_K{size}_N10"], abs=1e-5)
        assert got == pytest.approx(math.log(size - 9), abs=1e-5)
    query, bank = torch.eye(64)[:1], torch.eye(64)
    assert neighbourhood_matching(query, bank, 1, 0.1).item() == pytest.approx(
        values["nm_one_match_63_orthogonal_N1_tau0.1"], abs=1e-6
    )
    equal = info_nce(same, same, torch.ones(5 * 4096, 8), 0.1).item()
    assert equal == pytest.approx(values["infonce_all_equal_5_banks_of_4096"], abs=1e-5)
    one, other = torch.eye(2, dtype=torch.float64).split(1)
    aligned = info_nce(one, one, other.expand(4096, 2), 0.1)
    expected = values["infonce_aligned_K4096_orthogonal_negs_tau0.1"]
    assert aligned.item() == pytest.approx(expected, abs=1e-6)


def test_a_nearer_neighbour_is_never_less_certain() -> None:
    """∂H/∂(the top logit) ≤ 0 in 2000 random cases."""
    torch.manual_seed(0)
    logits = (torch.randn(2000, 24, dtype=torch.float64) * 3).requires_grad_()
    for neighbours in (1, 4):
        (gradient,) = torch.autograd.grad(_matching_entropy(logits, neighbours), logits)
        assert gradient.isfinite().all()
        assert gradient.gather(1, logits.topk(neighbours).indices).max() <= 1e-12


def test_matching_is_finite_reaches_only_the_query_and_refuses() -> None:
    query = torch.randn(5, 6, requires_grad=True)
    bank = torch.randn(20, 6, requires_grad=True)
    for temperature in (1e-4, 1e-2, 10.0):
        loss = neighbourhood_matching(query, bank, 3, temperature)
        (gradient,) = torch.autograd.grad(loss, query, retain_graph=True)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert torch.autograd.grad(loss, bank, allow_unused=True) == (None,)
    ties = neighbourhood_matching(torch.ones(2, 6).requires_grad_(), torch.ones(9, 6), 4, 0.1)
    ties.backward()
    for neighbours in (0, 20, 21):
        with pytest.raises(ValueError, match="neighbours out of 20 rows"):
            neighbourhood_matching(query, bank, neighbours, 0.1)


# ---------------------------------------------------------------- the ring


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 11, 25])
def test_a_bank_holds_the_newest_rows_and_knows_its_oldest(batch: int) -> None:
    bank, position, seen = torch.full((10, 1), -1.0), 0, [-1.0] * 10
    for start in range(0, 6 * batch, batch):
        rows = torch.arange(start, start + batch).float()
        position = enqueue(bank, position, rows[:, None])
        seen = (seen + rows.tolist())[-10:]
        assert bank.roll(-position, 0)[:, 0].tolist() == seen  # first in, first out
    if batch * 6 >= 10:  # after ⌈K/B⌉ steps no initial row survives
        assert bank.min() >= 0
    assert enqueue(bank, position, torch.empty(0, 1)) == position


def test_initial_rows_have_unit_length() -> None:
    torch.testing.assert_close(new_bank(50, 8).norm(dim=1), torch.ones(50))


def test_shares_are_those_of_the_first_rows() -> None:
    torch.manual_seed(0)
    query, rows = torch.randn(5, 4), F.normalize(torch.randn(9, 4), dim=1)
    mass, near = 0.0, 0.0
    for q in F.normalize(query, dim=1):
        weights = (rows @ q / 0.3).exp()
        mass += float(weights[:2].sum() / weights.sum()) / 5
        near += float((rows @ q).argsort(descending=True)[:3].lt(2).sum()) / 15
    assert 0 < near < 1
    torch.testing.assert_close(shares(query, rows, 2, 0.3, 3), torch.tensor([mass, near]))
    assert shares(query, rows, 9, 0.3, 30).tolist() == pytest.approx([1, 1])
    assert shares(query, rows, 0, 0.3, 3).tolist() == [0, 0]


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (10, 10), (10, 25), (1, 3)])
def test_filling_leaves_no_row_blank(size: int, batch: int) -> None:
    made: list[Tensor] = []

    def keys_of(view: Tensor) -> list[Tensor]:
        assert view.shape == (batch, 3, 8, 8)
        made.append(len(made) * batch + torch.arange(batch).float()[:, None])
        return [made[-1], -made[-1]]

    class Plain:
        def views(self, pixels: Tensor, n: int) -> tuple[Tensor, ...]:
            return (pixels.float(),) * n

    pixels = torch.zeros(batch, 3, 8, 8, dtype=torch.uint8)
    one = Batch(pixels, torch.arange(batch), None, Plain())  # type: ignore[arg-type]
    banks = [blank_bank(size, 1), blank_bank(size, 1)]
    position = fill(banks, keys_of, iter([one] * 9))
    assert len(made) == math.ceil(size / batch)  # and no pass more
    newest = torch.cat(made)[-size:]
    assert torch.equal(banks[0].roll(-position, 0), newest)
    assert torch.equal(banks[1], -banks[0])


# ---------------------------------------------------------------- one client


def local_context(p: Any, client: int = 0, exchange: int = 0) -> ClientContext:
    at = p.server.exchanges()[exchange]
    return ClientContext(p.setup, at, Networks(), client=client, data=p.federation.shard(client))


def train(p: Any, down: Down, method: FCL | None = None, exchange: int = 0) -> Any:
    method, ctx = method or p.method, local_context(p, exchange=exchange)
    with threads(), seeded(p.setup.device, 0):
        return method.local_update(method.init_client(ctx), down, ctx)


def first_download(p: Any, rows: Tensor | None = None) -> Down:
    down = p.method.download(p.server.init(), 0, p.server.context(p.server.exchanges()[0]))
    return down if rows is None else replace(down, remote=rows)


def spied(monkeypatch: pytest.MonkeyPatch, p: Any, down: Down, **fields: Any) -> list[Any]:
    """(negatives, matched bank or None) of every step of one client."""
    seen: list[list[Any]] = []
    contrast, matching = fcl.info_nce, fcl.neighbourhood_matching

    def spy_contrast(q: Tensor, k: Tensor, negatives: Tensor, temperature: float) -> Tensor:
        assert not k.requires_grad
        seen.append([negatives.clone(), None])
        return contrast(q, k, negatives, temperature)

    def spy_matching(q: Tensor, bank: Tensor, neighbours: int, temperature: float) -> Tensor:
        seen[-1][1] = bank.clone()
        return matching(q, bank, neighbours, temperature)

    monkeypatch.setattr(fcl, "info_nce", spy_contrast)
    monkeypatch.setattr(fcl, "neighbourhood_matching", spy_matching)
    train(p, down, replace(p.method, **fields))
    return seen


def test_union_and_remote_only(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("fcl")
    width = p.method.width(local_context(p))
    rows = new_bank(32, width)
    union = spied(monkeypatch, p, first_download(p, rows))
    assert [len(n) for n, _ in union] == [48] * 3
    assert all(torch.equal(n[:32], rows) for n, _ in union)
    first, second = union[0][0][32:], union[1][0][32:]
    assert torch.equal(first[8:], second[8:])  # the oldest half gave way to the first batch
    assert not (first[:8, None] == second[None, :8]).all(dim=2).any()
    for negatives, sample in union:  # K distinct rows of the union
        assert sample.shape == (16, width)
        hits = (sample[:, None] == negatives[None]).all(dim=2)
        assert (hits.sum(dim=1) == 1).all()
        assert (hits.sum(dim=0) <= 1).all()
    remote = spied(monkeypatch, p, first_download(p, rows), negatives="remote_only")
    assert all(torch.equal(n, rows) for n, _ in remote)
    assert all(len(s) == 16 for _, s in remote)


def test_without_remote_rows_it_is_moco(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("fcl")
    down = first_download(p)
    assert down.remote.shape == (0, p.method.width(local_context(p)))
    for negatives in ("union", "remote_only"):
        seen = spied(monkeypatch, p, down, negatives=negatives)
        assert [len(n) for n, _ in seen] == [16] * 3


def test_ablations(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("fcl")
    down = first_download(p, new_bank(32, p.method.width(local_context(p))))
    encoded = []
    monkeypatch.setattr(instahide, "instahide", lambda x, *_: encoded.append(len(x)) or x)
    fused = spied(monkeypatch, p, down, matching=0.0)  # CL+FF
    assert [s for _, s in fused] == [None] * 3
    assert encoded == [8] * 5  # two batches fill the bank, three train
    encoded.clear()
    lone = FCL(**{**vars(p.method), "fusion": False, "matching": 0.0})  # CL
    local = train(p, first_download(p), lone)
    assert not encoded
    assert local.upload.features is None
    assert local.state.encoded is None
    assert lone.expected(p.server.init(), 0, p.server.context(Exchange(0))).features is None
    plain = train(p, down, replace(p.method, encoding="none"))
    assert not encoded
    assert torch.equal(plain.upload.features, plain.state.local)
    same = train(p, down)  # the "encoding" here changes nothing: batch statistics, same keys
    assert torch.equal(same.state.encoded[:8], same.state.local[:8])
    monkeypatch.undo()
    default = train(p, down)
    assert torch.equal(default.upload.features, default.state.encoded)
    assert not torch.equal(default.state.encoded, default.state.local)
    norms = default.upload.features.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(16))
    assert default.state.position == 24 % 16


def test_encoded_images_leave_the_statistics_alone(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other images for the upload: nothing changes but the upload's features."""
    p = prepared("fcl")
    results = []
    for scale in (1.0, 50.0):
        monkeypatch.setattr(instahide, "instahide", lambda x, *_, s=scale: (s * x).flip(0).square())
        results.append(train(p, first_download(p)))
    a, b = results
    assert not torch.equal(a.upload.features, b.upload.features)
    for name in ("query", "key"):
        ours, theirs = getattr(a.upload, name), getattr(b.upload, name)
        assert all(torch.equal(t, theirs[n]) for n, t in ours.items())
    tracked = [n for n in a.upload.key if n.endswith("num_batches_tracked")]
    assert tracked
    assert all(a.upload.key[n] == 3 for n in tracked)  # three steps, one counted pass in each


def test_untracked_uses_the_batch() -> None:
    norm = nn.BatchNorm2d(3)
    x = 5 + 3 * torch.randn(8, 3, 4, 4)
    with untracked(norm):
        y = norm(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    assert torch.equal(norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]
    assert norm.num_batches_tracked == 0
    norm(x)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize(("decay", "same"), [(1.0, "start"), (0.0, "query")])
def test_the_key_network_follows(prepared: Any, decay: float, same: str) -> None:
    p = prepared("fcl")
    down = first_download(p)
    up = train(p, down, replace(p.method, decay=decay)).upload
    wanted = down.key if same == "start" else up.query
    for name, tensor in up.key.items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(tensor, wanted[name])


# ---------------------------------------------------------------- a round by hand


def by_hand(p: Any, ctx: ClientContext, down: Down, state: State) -> Any:
    """A client's round, written from the paper: networks, banks, losses, the others' shares."""
    m: FCL = p.method
    query, key = twin(p, ctx, down.query), twin(p, ctx, down.key)
    banks = [list(bank) for bank in (state.local, state.encoded) if bank is not None]
    position, losses, taken = state.position, [], []

    def keys_of(view: Tensor, counted: bool) -> list[Tensor]:
        before = snapshot(key)
        with torch.no_grad():
            rows = [F.normalize(key(view), dim=1)]
            if not counted:
                key.load_state_dict(before)
            if len(banks) == 2:
                statistics = snapshot(key)
                mixed = instahide.instahide(view, m.mix, m.max_coefficient)
                rows.append(F.normalize(key(mixed), dim=1))
                key.load_state_dict(statistics)
        return rows

    def keep(keys: list[Tensor]) -> None:
        nonlocal position
        for bank, rows in zip(banks, keys, strict=True):
            for i, row in enumerate(rows):
                bank[(position + i) % m.bank] = row
        position = (position + len(keys[0])) % m.bank

    if state.local.isnan().all():  # the first round: passes over the images until K rows are there
        written = 0
        for batch in ctx.batches(99):
            keep(keys_of(batch.views(1)[0], counted=False))
            written += len(batch.pixels)
            if written >= m.bank:
                break
    for batch in ctx.batches():
        first, second = batch.views()
        keys = keys_of(second, counted=True)
        q = F.normalize(query(first), dim=1)
        rows = torch.stack([*down.remote, *banks[0]])
        negatives = down.remote if m.negatives == "remote_only" else rows
        own = (q * keys[0]).sum(dim=1).div(m.temperature).exp()
        loss = -(own / (own + (q @ negatives.T / m.temperature).exp().sum(dim=1))).log().mean()
        if m.matching and ctx.exchange.round >= m.matching_from:
            sample = rows[torch.randperm(len(rows))[: m.bank]]
            loss = loss + m.matching * reference(q, sample, m.neighbours, m.matching_temperature)
        weights = (q @ rows.T / m.temperature).exp()
        nearest = (q @ rows.T).argsort(dim=1, descending=True)[:, : m.neighbours]
        foreign = len(down.remote)
        share = (weights[:, :foreign].sum(dim=1) / weights.sum(dim=1)).mean().item()
        taken.append((share, (nearest < foreign).double().mean().item()))
        gradients = torch.autograd.grad(loss, list(query.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(query.parameters(), gradients, strict=True):
                parameter -= LR * gradient
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.copy_(m.decay * slow + (1 - m.decay) * fast)
        keep(keys)
        losses.append(loss.item())
    return query, key, [torch.stack(bank) for bank in banks], position, losses, taken


ROUND = {
    "method.bank": 20,
    "method.neighbours": 3,
    "method.temperature": 0.2,
    "method.decay": 0.8,
    "method.matching": 0.7,
    "method.matching_temperature": 0.5,
}


@pytest.mark.parametrize("first", [True, False], ids=["first round", "later round"])
@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "none"},
        {"encoding": "inside"},
        {"encoding": "inside", "negatives": "remote_only"},
        {"encoding": "none", "fusion": False, "matching": 0.0},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_round_by_hand(prepared: Any, options: dict[str, Any], first: bool) -> None:
    """Query, key, both banks, the upload and the metrics are those of the paper's formulas."""
    p = prepared("fcl", **ROUND | {f"method.{name}": value for name, value in options.items()})
    ctx, width = plain_client(p, batch_size=8), p.method.width(local_context(p))
    with seeded(p.setup.device, "start"):
        down = replace(first_download(p), key=snapshot(twin(p, ctx)))
        if p.method.fusion:
            down = replace(down, remote=new_bank(40, width))
        state = p.method.init_client(ctx)
        if not first:
            more = new_bank(20, width) if p.method.encodes else None
            state = State(new_bank(20, width), more, 7, None)
    local = run_round(p.method, down, ctx, state)
    assert ctx.images_seen == 24  # filling trains nothing
    with seeded(ctx.setup.device, "train"):
        query, key, banks, position, losses, taken = by_hand(p, ctx, down, state)
    near = {"rtol": 1e-3, "atol": 1e-4}
    for net, sent, start in (
        (query, local.upload.query, down.query),
        (key, local.upload.key, down.key),
    ):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(sent[name], value, **near, msg=lambda m, n=name: f"{n}: {m}")
        assert not torch.equal(sent["projector.0.weight"], start["projector.0.weight"])
    torch.testing.assert_close(local.state.local, banks[0], **near)
    assert (local.state.encoded is None) == (len(banks) == 1)
    if p.method.fusion:
        torch.testing.assert_close(local.upload.features, banks[-1], **near)
        kept = local.state.encoded if p.method.encodes else local.state.local
        assert torch.equal(kept, local.upload.features)
    else:
        assert local.upload.features is None
    assert local.state.position == position
    assert local.metrics["loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)
    mass, share = (sum(column) / 3 for column in zip(*taken, strict=True))
    assert local.metrics["remote_mass"] == pytest.approx(mass, rel=1e-3, abs=1e-6)
    assert local.metrics["remote_neighbours"] == pytest.approx(share, abs=0.02)


def test_matching_waits(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("fcl", rounds=3)
    seen = []
    real = fcl.neighbourhood_matching
    monkeypatch.setattr(
        fcl, "neighbourhood_matching", lambda *args: seen.append(exchange) or real(*args)
    )
    for exchange in range(3):
        train(p, first_download(p), replace(p.method, matching_from=1), exchange)
    assert seen == [1] * 3 + [2] * 3


@pytest.mark.parametrize("encoding", ["none", "inside"])
def test_only_keys_of_images_are_used_and_sent(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Also where the bank is far larger than a round."""
    p = prepared("fcl", **{"method.bank": 100, "method.encoding": encoding})
    made: list[list[Tensor]] = []
    real = FCL.keys

    def spy(*args: Any) -> list[Tensor]:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(FCL, "keys", spy)
    contrasts = spied(monkeypatch, p, first_download(p))
    monkeypatch.setattr(fcl, "info_nce", info_nce)
    monkeypatch.setattr(fcl, "neighbourhood_matching", neighbourhood_matching)
    assert len(made) == 13 + 3  # ⌈100/8⌉ batches fill the bank, three train
    ours, shown = ({tuple(r) for keys in made for r in keys[i].tolist()} for i in (0, -1))
    for negatives, sample in contrasts:
        assert {tuple(row) for row in negatives.tolist()} <= ours
        assert {tuple(row) for row in sample.tolist()} <= ours
        assert len(negatives.unique(dim=0)) == 100  # each key is of a view of its own
    made.clear()
    local = train(p, first_download(p))  # the same again: the seed is the same
    assert local.upload.features.shape == (100, p.method.width(local_context(p)))
    assert {tuple(row) for row in local.state.local.tolist()} <= ours
    assert {tuple(row) for row in local.upload.features.tolist()} <= shown


# ---------------------------------------------------------------- what explains a run


def labelled(p: Any, count: int = 40) -> Batch:
    pixels, labels = p.test.pixels[:count], p.test.labels[:count]
    return Batch(pixels, torch.arange(count), labels, p.setup.augment)


def test_purity_counts_the_neighbours_of_a_class() -> None:
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    centres = 5 * torch.eye(3)[labels]
    noise = torch.randn(60, 3)

    class Rows:
        """Pixels are numbers of rows."""

        def views(self, pixels: Tensor, n: int) -> tuple[Tensor, ...]:
            return (pixels.long(),) * n

    def found(query: Tensor, *banks: Tensor, size: int = 60, nearest: int = 4) -> list[float]:
        batch = Batch(torch.arange(60, dtype=torch.uint8), labels, labels, Rows())  # type: ignore[arg-type]
        return purities(
            lambda x: query[x],  # type: ignore[arg-type]
            lambda x: [bank[x] for bank in banks],
            batch, size, nearest,
        )  # fmt: skip

    assert found(centres + noise / 9, centres, -centres) == [1.0, 0.0]
    assert found(noise, noise)[0] < 0.6  # the own row is the nearest and does not count
    assert found(noise, centres, nearest=999) == [pytest.approx(19 / 59)]  # all others: chance
    assert found(noise, noise, size=7) == found(noise, noise)
    expected = 0.0
    for i, q in enumerate(F.normalize(noise, dim=1)):
        order = (F.normalize(centres + noise, dim=1) @ q).argsort(descending=True).tolist()
        order.remove(i)
        expected += sum(labels[j] == labels[i] for j in order[:4]).item() / 240
    assert found(noise, centres + noise) == [pytest.approx(expected)]


@pytest.mark.parametrize("encoding", ["none", "inside"])
def test_explain_by_hand(prepared: Any, encoding: str) -> None:
    p = prepared("fcl", batch_size=20, **{"method.encoding": encoding})
    ctx, start, batch = at(p, 0), p.server.init(), labelled(p)
    server = replace(start, key=snapshot(twin(p, local_context(p))))
    before = pack(server)
    with seeded(p.setup.device, "explain"), torch.no_grad():
        got = p.method.explain(server, batch, ctx)
    assert pack(server) == before
    query, key = (twin(p, ctx, w) for w in (server.query, server.key))
    made: list[list[Tensor]] = []
    with seeded(p.setup.device, "explain"), torch.no_grad():
        for pixels in batch.pixels.split(20):
            first, second = batch.augment.views(pixels, 2)
            made.append([query(first), key(second)])
            if encoding == "inside":
                made[-1].append(key(instahide.instahide(second, 4, 0.65)))
    q, *banks = (F.normalize(torch.cat(rows), dim=1) for rows in zip(*made, strict=True))
    names = ["neighbour_purity", "neighbour_purity_encoded"][: len(banks)]
    assert list(got) == names
    for name, rows in zip(names, banks, strict=True):
        same = []
        for i in range(40):
            order = (rows @ q[i]).argsort(descending=True).tolist()
            order.remove(i)
            same += [int(batch.labels[j] == batch.labels[i]) for j in order[:3]]
        assert got[name] == pytest.approx(sum(same) / len(same), abs=0.02)


def test_the_monitor_logs_it(tmp_path: Any) -> None:
    from furlong.runs import loop

    options = {"evaluate.probe": "none", "evaluate.knn_every": 1}
    loop.run(tiny("fcl", out=str(tmp_path / "run"), **options), say=lambda _: None)
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, written)
    for line in (first, second):
        assert 0 <= line["neighbour_purity"] <= 1
        assert 0 <= line["neighbour_purity_encoded"] <= 1
    assert first["remote_mass"] == 0  # nobody has sent anything yet
    assert 0 < second["remote_mass"] < 1


# ---------------------------------------------------------------- the server


def report(p: Any, server: Any, client: int, value: float, examples: int = 24) -> Report[Up]:
    shape = (p.method.bank, p.method.width(local_context(p)))
    query = {n: t + value if t.is_floating_point() else t for n, t in server.query.items()}
    key = {n: t - value if t.is_floating_point() else t for n, t in server.key.items()}
    return Report(client, 0, examples, Up(query, key, torch.full(shape, value)), {})


def at(p: Any, index: int) -> Any:
    return p.server.context(Exchange(round=index, index=index))


def test_a_client_never_gets_its_own_rows_and_both_networks_are_averaged(prepared: Any) -> None:
    p = prepared("fcl")
    start = p.server.init()
    reports = [report(p, start, c, float(c), examples=8 * (c + 1)) for c in (0, 1, 2)]
    server = p.method.aggregate(start, reports, at(p, 0))
    moved = (0 * 1 + 1 * 2 + 2 * 3) / 6
    name = "projector.0.weight"
    torch.testing.assert_close(server.query[name], start.query[name] + moved)
    torch.testing.assert_close(server.key[name], start.key[name] - moved)
    for client in (0, 1, 2):
        remote = p.method.download(server, client, at(p, 1)).remote
        values = remote[:, 0].reshape(-1, 16).unique(dim=1)[:, 0].tolist()
        assert values == [c for c in (0.0, 1.0, 2.0) if c != client]  # in client order
    assert len(p.method.download(server, 7, at(p, 1)).remote) == 48  # has not taken part yet
    assert pack(p.method.aggregate(server, [], at(p, 1))) == pack(server)
    assert pack(unpack(pack(server))) == pack(server)


def test_staleness(prepared: Any) -> None:
    p = prepared("fcl")
    start = p.server.init()
    server = p.method.aggregate(start, [report(p, start, c, c + 1.0) for c in (0, 1, 2)], at(p, 0))
    server = p.method.aggregate(server, [report(p, start, 1, 5.0)], at(p, 2))

    def remote(limit: int, index: int) -> list[float]:
        method = replace(p.method, max_staleness=limit)
        return list(method.download(server, 0, at(p, index)).remote[::16, 0].tolist())

    assert server.rounds == {0: 0, 1: 2, 2: 0}
    assert remote(0, 99) == [5.0, 3.0]  # no limit: the newest of everybody
    assert remote(3, 3) == [5.0, 3.0]
    assert remote(2, 3) == [5.0]
    assert remote(1, 3) == [5.0]
    assert remote(1, 4) == []


def test_partial_participation_and_predicted_traffic(prepared: Any) -> None:
    p = prepared("fcl", rounds=3)
    server = Server(p.method, p.setup, fraction=0.7)
    with InProcess(p.method, p.federation, p.setup) as transport:
        results = list(server.run(transport, server.init()))
    costs = list(predict(server))
    assert [c.cohort for c in costs] == [r.cohort for r in results]
    assert [c.down for c in costs] == [r.down for r in results]
    assert [c.up.features for c in costs] == [r.up.features for r in results]
    assert results[0].down.features == 0
    assert costs[0].up.params == results[0].up.params


def test_payload_of_the_paper() -> None:
    """Spec 2.10: 23 518 592 values up, 25 091 456 down with five clients."""
    from furlong.runs.cost import flows

    flow = flows("fcl", "resnet18", **{"method.bank": 4096})["train, later"]
    up, down = traffic(flow["up"]), traffic(flow["down"])
    assert (up.params + up.features) // 4 == 23_518_592
    assert (down.params + down.features) // 4 == 25_091_456
    assert up.features == 4096 * 128 * 4


# ---------------------------------------------------------------- public images


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A run with --public, a folder of twenty images."""
    folder = tmp_path_factory.mktemp("public")
    for i, pixels in enumerate(torch.randint(256, (20, 24, 24, 3), dtype=torch.uint8)):
        Image.fromarray(pixels.numpy()).save(folder / f"{i:02}.png")
    options = {"method.encoding": "cross", "method.public_images": 12}
    return prepare(tiny("fcl", rounds=3, **options, **{"data.public": f"folder:{folder}"}))


def test_cross_end_to_end(crossed: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    p = crossed
    assert p.method.needs_public
    shapes = set()
    real = instahide.instahide

    def spy(x: Tensor, mix: int, most: float, public: Tensor, *limits: Any) -> Tensor:
        shapes.add((x.shape, public.shape, (mix, most, *limits)))
        return real(x, mix, most, public, *limits)

    monkeypatch.setattr(instahide, "instahide", spy)
    state = p.server.init()
    assert state.public.shape == (12, 3, 16, 16)
    assert state.public.dtype == torch.uint8
    with InProcess(p.method, p.federation, p.setup) as transport:
        results = list(p.server.run(transport, state))
        kept = unpack(transport.store.get(1)).state
    assert not any(r.failures for r in results)
    assert shapes == {((8, 3, 16, 16),) * 2 + ((6, 0.65, 2, 0.3),)}
    assert torch.equal(kept.public, state.public)
    last = results[-1].server
    assert last.told == (0, 1, 2)
    again = p.method.download(last, 0, at(p, 2))
    assert again.public is None  # sent once
    assert results[0].down.features == 3 * state.public.nbytes
    assert [c.down for c in predict(p.server)] == [r.down for r in results]


def test_cross_needs_public_images_and_keeps_them(crossed: Prepared) -> None:
    drawn = prepare(tiny("fcl", **{"method.encoding": "cross"}))
    assert drawn.config.data.public == "shapes"
    assert any("--public NAME" in note for note in drawn.notes)
    p = crossed
    bare = Server(p.method, p.setup)
    with pytest.raises(FurlongError, match="--public"):
        bare.init()
    down = replace(first_download(p), public=None)
    with pytest.raises(FurlongError, match="sent only once"):
        train(p, down)
    assert not replace(p.method, fusion=False).needs_public


def test_local_statistics_and_local_encoder(prepared: Any) -> None:
    p = prepared("fcl", **{"method.bn_stats": "local"})
    store = StateFolder()
    server = p.server.init()
    down = p.method.download(server, 0, at(p, 0))
    answer = run_client(p.method, down, local_context(p), store)
    kept = unpack(store.get(0)).stats
    assert not any("running" in name for name in flatten(answer.upload)[0])
    assert {name.split("/")[0] for name in kept} == {"query", "key"}
    assert kept.keys() <= flatten(down)[0].keys()
    assert p.method.local_encoder(answer.upload, at(p, 0)) is None
    store.close()
    q = prepared("fcl")
    upload = train(q, first_download(q)).upload
    encoder = q.method.local_encoder(upload, at(q, 0))
    assert torch.equal(
        next(iter(encoder.state_dict().values())),
        upload.query["backbone." + next(iter(encoder.state_dict()))],
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bank", 0), ("decay", 1.5), ("temperature", 0), ("matching", -1), ("neighbours", 0),
        ("neighbours", 4096), ("matching_temperature", "nan"), ("mix", 0), ("mix_cross", 2),
        ("public_images", 0), ("max_staleness", -1), ("matching_from", -1),
    ],
)  # fmt: skip
def test_fields_that_cannot_work_are_refused(field: str, value: Any) -> None:
    with pytest.raises(FurlongError, match=rf"method\.{field} is"):
        from_tree({}, {"method": "fcl", f"method.{field}": value}, "test")


def test_impossible_mixtures_are_refused() -> None:
    with pytest.raises(FurlongError, match="hardly any 4 coefficients"):
        FCL(max_coefficient=0.25)
    with pytest.raises(FurlongError, match=r"2 make up at least 0\.99"):
        FCL(encoding="cross", private_share=0.99)
    FCL(bank=8, neighbours=10, matching=0.0)  # no matching: no neighbours


def test_it_says_what_leaves_and_that_instahide_is_broken() -> None:
    assert "every other client" in FCL.leaves
    assert "2011.05315" in FCL.caution
    assert "obfuscation" in FCL.caution
