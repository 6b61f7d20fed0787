"""FedCA (specification 2.9): the losses, the dictionary, temporal ensembling, alignment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_same, descend, draw, plain_client, run_round, twin
from torch import Tensor, nn

from furlong.core.context import ClientContext, Networks, ServerContext
from furlong.core.exchange import Server, run_client
from furlong.core.method import Local, Report
from furlong.core.payload import pack, traffic
from furlong.core.weights import snapshot
from furlong.engines.inprocess import InProcess
from furlong.engines.states import StateFolder
from furlong.errors import FurlongError
from furlong.methods import fedca
from furlong.methods.dictionary import share
from furlong.methods.fedca import Down, FedCA, State, Up
from furlong.nn.encoders import evaluating
from furlong.nn.losses import alignment_loss, dictionary_mass, dictionary_nce
from furlong.runs.config import from_tree
from furlong.runs.prepare import prepare
from furlong.seeding import seeded, threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As ``rounds`` has it for clients; and tests run side by side."""
    with threads():
        yield


class Case:
    """The tiny federation with some of FedCA's fields changed."""

    def __init__(self, prepared: Any, **fields: Any) -> None:
        p = prepared("fedca")
        self.setup, self.federation = p.setup, p.federation
        self.method: FedCA = replace(p.method, **fields)
        self.server: Server[Any, Any, Any] = Server(self.method, p.setup, p.server.public)
        self.start = self.server.init()

    def at(self, exchange: int) -> ServerContext:
        return self.server.context(self.server.exchanges()[exchange])

    def client(self, client: int, exchange: int = 0) -> ClientContext:
        shard = self.federation.shard(client)
        where = self.server.exchanges()[exchange]
        return ClientContext(self.setup, where, Networks(), client=client, data=shard)

    def down(self, state: Any, client: int, exchange: int = 0) -> Down:
        return self.method.download(state, client, self.at(exchange))

    def train(self, down: Down, client: int, state: State | None = None) -> Local[State, Up]:
        ctx = self.client(client)
        with seeded(self.setup.device, client):
            return self.method.local_update(state or self.method.init_client(ctx), down, ctx)

    def answer(self, state: Any, client: int, rows: Tensor | None = None) -> Report[Up]:
        """A report that costs no training."""
        expected = self.method.expected(state, client, self.at(0))
        upload = expected if rows is None else replace(expected, rows=rows)
        return Report(client, 0, self.setup.sizes[client], upload, {})


# ---------------------------------------------------------------- losses


def test_contrastive_golden_values(golden: dict[str, Any]) -> None:
    same = torch.ones(128, 16)
    got = dictionary_nce(same, same, torch.ones(1024, 16), 0.5)
    assert got.item() == pytest.approx(golden["losses"]["fedca_degenerate_N128_K1024"], abs=1e-5)
    got = dictionary_nce(same, same, torch.empty(0, 16), 0.5)
    assert got.item() == pytest.approx(golden["losses"]["fedca_round0_N128"], abs=1e-5)


def slow(z1: Tensor, z2: Tensor, dictionary: Tensor, temperature: float) -> Tensor:
    losses = []
    for i, anchor in enumerate(z1):
        terms = [F.cosine_similarity(anchor, row, dim=0) for row in (*z2, *dictionary)]
        losses.append(-F.log_softmax(torch.stack(terms) / temperature, dim=0)[i])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("entries", [0, 1, 7])
def test_contrastive_equals_the_loop_over_pairs(entries: int) -> None:
    z1, z2, rows = (torch.randn(n, 6, dtype=torch.float64) for n in (4, 4, entries))
    there, back = slow(z1, z2, rows, 0.3), slow(z2, z1, rows, 0.3)
    assert torch.allclose(dictionary_nce(z1, z2, rows, 0.3), there)
    assert torch.allclose(dictionary_nce(z1, z2, rows, 0.3, symmetric=True), (there + back) / 2)
    assert not torch.allclose(there, back)


@pytest.mark.parametrize("entries", [0, 1, 7])
def test_mass_is_the_dictionarys_part_of_the_softmax(entries: int) -> None:
    z1, z2, rows = (torch.randn(n, 6, dtype=torch.float64) for n in (4, 4, entries))
    shares = []
    for anchor in z1:
        terms = [F.cosine_similarity(anchor, row, dim=0) for row in (*z2, *rows)]
        shares.append(torch.stack(terms).div(0.3).softmax(dim=0)[4:].sum())
    z1.requires_grad_()
    mass = dictionary_mass(z1, z2, rows, 0.3)
    assert torch.allclose(mass, torch.stack(shares).mean())
    assert not mass.requires_grad  # it is for the log
    same = torch.ones(128, 16)
    assert dictionary_mass(same, same, torch.ones(1024, 16), 0.5).item() == pytest.approx(
        1024 / 1152
    )


def test_logits_are_as_large_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = F.cross_entropy

    def spy(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append((tuple(logits.shape), labels.tolist()))
        return original(logits, labels)

    monkeypatch.setattr(F, "cross_entropy", spy)
    dictionary_nce(torch.randn(4, 8), torch.randn(4, 8), torch.randn(10, 8), 0.5)
    assert seen == [((4, 14), [0, 1, 2, 3])]


def test_without_dictionary_it_is_one_sided_info_nce() -> None:
    z1, z2 = (torch.randn(5, 8, dtype=torch.float64) for _ in range(2))
    logits = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T / 0.5
    wanted = -logits.log_softmax(dim=1).diagonal().mean()
    assert torch.allclose(dictionary_nce(z1, z2, z1[:0], 0.5), wanted)


def test_dictionary_and_targets_get_no_gradient() -> None:
    z1, z2, rows = (torch.randn(n, 8, requires_grad=True) for n in (4, 4, 10))
    dictionary_nce(z1, z2, rows, 0.5, symmetric=True).backward()  # type: ignore[no-untyped-call]
    assert rows.grad is None
    assert z1.grad is not None
    assert z2.grad is not None
    h, z, goal_h, goal_z = (torch.randn(3, 4, requires_grad=True) for _ in range(4))
    alignment_loss(h, z, goal_h, goal_z, "mean").backward()  # type: ignore[no-untyped-call]
    assert goal_h.grad is None
    assert goal_z.grad is None
    assert torch.allclose(h.grad, 2 / 3 * (h - goal_h))  # type: ignore[arg-type]


def test_alignment_golden_values(golden: dict[str, Any]) -> None:
    values = golden["losses"]
    h, z = torch.randn(3, 2048), torch.randn(3, 128)
    for reduction, name in (("sum", "sum"), ("mean", "mean_over_images")):
        loss = alignment_loss(h + 1, z, h, z, reduction)  # type: ignore[arg-type]
        assert loss.item() == pytest.approx(values[f"fedca_align_h_ones_3img_{name}"], rel=1e-5)
        assert alignment_loss(h, z, h, z, reduction).item() == 0.0  # type: ignore[arg-type]
        assert alignment_loss(h, z + 1, h, z, reduction).item() > 0  # type: ignore[arg-type]


# ---------------------------------------------------------------- temporal ensembling


class Fixed(nn.Module):
    """Gives every image the same projection."""

    def __init__(self, *row: float) -> None:
        super().__init__()
        self.row = torch.tensor(row, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.row.expand(len(x), -1)


def test_ensembling_golden(prepared: Any, golden: dict[str, Any]) -> None:
    case, want = Case(prepared, alignment=0.0), golden["temporal_ensembling"]
    assert case.method.ensembling == want["alpha"]
    once = case.method.ensemble(Fixed(*want["z1"]), None, case.client(0))
    twice = case.method.ensemble(Fixed(*want["z2"]), once, case.client(0))
    assert twice.shape == (24, 2)
    assert torch.equal(twice[5], torch.tensor(want["Z2"]))
    assert F.normalize(twice, dim=1)[5].tolist() == pytest.approx(want["tilde"])


def test_constant_projections_do_not_depend_on_time(prepared: Any) -> None:
    case = Case(prepared, ensembling=0.7, alignment=0.0)
    z, ensemble = torch.tensor([3.0, -4.0]), None
    for t in range(1, 6):
        ensemble = case.method.ensemble(Fixed(3.0, -4.0), ensemble, case.client(0))
        assert torch.allclose(ensemble / (1 - 0.7**t), z.expand_as(ensemble), atol=1e-5)
        assert torch.allclose(F.normalize(ensemble, dim=1)[0], z / 5, atol=1e-6)


def test_no_ensembling_forgets_the_past(prepared: Any) -> None:
    case = Case(prepared, ensembling=0.0, alignment=0.0)
    before = 100 * torch.ones(24, 2)
    after = case.method.ensemble(Fixed(0.3, 0.7), before, case.client(0))
    assert torch.equal(after, torch.tensor([0.3, 0.7]).expand(24, 2))


def test_rows_are_the_trained_models_normalised_projections(prepared: Any) -> None:
    """Of plain images in eval mode; and images trained on are counted without that pass."""
    case = Case(prepared, ensembling=0.0, dict_model="local", dict_upload="full", alignment=0.0)
    ctx = case.client(0)
    local = case.method.local_update(case.method.init_client(ctx), case.down(case.start, 0), ctx)
    assert ctx.images_seen == 24
    net = ctx.network("net", lambda: case.method.network(ctx), local.upload.weights).eval()
    with torch.no_grad():
        z = net(case.setup.augment.plain(ctx.data.pixels(torch.arange(24))))
    assert local.state.ensemble is not None
    assert torch.allclose(local.state.ensemble, z, atol=1e-5)
    assert torch.allclose(local.upload.rows, F.normalize(z, dim=1), atol=1e-5)


# ---------------------------------------------------------------- the dictionary


def test_dictionary_grows_from_empty_and_is_trimmed(prepared: Any) -> None:
    case = Case(prepared, dictionary=10, alignment=0.0)
    assert case.down(case.start, 0).dictionary.shape == (0, 128)
    assert [share(10, k, case.setup) for k in range(3)] == [4, 4, 4]  # ⌈10·24/72⌉
    reports = [case.answer(case.start, k, torch.full((4, 128), float(k))) for k in (0, 1, 2)]
    after = case.method.aggregate(case.start, reports, case.at(0))
    got = case.down(after, 1).dictionary
    # every client keeps a fair part: the last ones give up a row each, not one client all
    assert got[:, 0].tolist() == [0.0] * 4 + [1.0] * 3 + [2.0] * 3
    with InProcess(case.method, case.federation, case.setup) as transport:
        *_, last = case.server.run(transport, case.start)
    rows = torch.cat(list(last.server.rows.values()))
    assert rows.shape == (12, 128)
    assert torch.allclose(rows.norm(dim=1), torch.ones(12))


def test_shares_never_exceed_what_a_client_has(prepared: Any) -> None:
    setup = prepared("fedca").setup
    assert share(1000, 0, setup) == 24
    uneven = replace(setup, sizes={0: 1, 1: 10, 2: 989})
    assert [share(100, k, uneven) for k in range(3)] == [1, 1, 99]


def test_own_rows_can_be_left_out(prepared: Any) -> None:
    for exclude in (False, True):
        case = Case(prepared, exclude_own=exclude, alignment=0.0)
        reports = [case.answer(case.start, k, torch.full((4, 128), float(k))) for k in (0, 1, 2)]
        after = case.method.aggregate(case.start, reports, case.at(0))
        values = set(case.down(after, 1).dictionary[:, 0].tolist())
        assert values == ({0.0, 2.0} if exclude else {0.0, 1.0, 2.0})


def test_partial_participation_keeps_the_newest_rows_of_each(prepared: Any) -> None:
    case = Case(prepared, alignment=0.0)
    late = case.method.aggregate(
        case.start, [case.answer(case.start, 2, torch.full((4, 128), 2.0))], case.at(0)
    )
    early = [case.answer(late, k, torch.full((4, 128), float(k + 5))) for k in (0, 1)]
    after = case.method.aggregate(late, early, case.at(1))
    assert list(after.rows) == [0, 1, 2]
    assert [r[0, 0].item() for r in after.rows.values()] == [5.0, 6.0, 2.0]


@pytest.mark.parametrize("upload", ["sample", "full"])
def test_who_draws_the_rows(prepared: Any, upload: Any) -> None:
    case = Case(prepared, dict_upload=upload, alignment=0.0)
    local = case.train(case.down(case.start, 0), 0)
    assert local.upload.rows.shape == ((24, 128) if upload == "full" else (4, 128))
    assert local.upload.rows.shape == case.method.expected(case.start, 0, case.at(0)).rows.shape
    assert local.state.ensemble is not None
    every = F.normalize(local.state.ensemble, dim=1)
    report = replace(case.answer(case.start, 0), upload=local.upload)
    rows = case.method.aggregate(case.start, [report], case.at(0)).rows[0]
    assert rows.shape == (4, 128)
    found = [torch.nonzero((every == row).all(dim=1)).item() for row in rows]
    assert len(set(found)) == 4  # without replacement
    assert rows.data_ptr() != local.upload.rows.data_ptr()


def test_the_dictionary_changes_training(prepared: Any) -> None:
    case = Case(prepared, alignment=0.0)
    down = case.down(case.start, 0)
    full = replace(down, dictionary=F.normalize(torch.randn(12, 128), dim=1))
    without, with_it = case.train(down, 0), case.train(full, 0)
    assert with_it.metrics["loss"] > without.metrics["loss"]
    scaled = replace(full, dictionary=7 * full.dictionary)  # rows need not be normalised
    assert case.train(scaled, 0).metrics["loss"] == pytest.approx(with_it.metrics["loss"], rel=1e-4)


# ---------------------------------------------------------------- alignment


def test_alignment_is_zero_only_for_the_alignment_model(prepared: Any) -> None:
    case = Case(prepared)
    ctx = case.client(0)
    state = case.method.aim(case.method.init_client(ctx), case.start.alignment, ctx)
    assert state.h is not None
    assert state.z is not None
    assert state.h.shape == (16, case.setup.width)
    assert state.z.shape == (16, 128)
    build = lambda: case.method.network(ctx)  # noqa: E731
    net = ctx.network("net", build, case.start.alignment.weights)
    before = snapshot(net)
    assert case.method.distance(net, state, ctx).item() == pytest.approx(0.0, abs=1e-7)
    assert net.training
    after = snapshot(net)
    assert all(torch.equal(after[n], t) for n, t in before.items())  # BatchNorm's buffers as well
    net = ctx.network("net", build, case.start.weights)
    distance = case.method.distance(net, state, ctx)
    assert distance.item() > 1e-3
    distance.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in net.parameters())


def test_public_images_and_own_plain_ones_leave_the_statistics_alone(prepared: Any) -> None:
    """BatchNorm sees the training views only: with and without the extra passes, as many."""
    counts = set()
    for fields in ({}, {"dictionary": 0, "alignment": 0.0}):
        case = Case(prepared, **fields)
        weights = case.train(case.down(case.start, 0), 0).upload.weights
        counts |= {t.item() for n, t in weights.items() if n.endswith("num_batches_tracked")}
    assert counts == {3}


def test_reduction_over_images(prepared: Any) -> None:
    assert FedCA().align_reduction == "sum"  # as Eqs. 11 and 12
    got = {}
    for reduction in ("mean", "sum"):
        case = Case(prepared, align_reduction=reduction)
        ctx = case.client(0)
        state = case.method.aim(case.method.init_client(ctx), case.start.alignment, ctx)
        net = ctx.network("net", lambda: case.method.network(ctx), case.start.weights)  # noqa: B023
        with seeded(case.setup.device, 0):
            got[reduction] = case.method.distance(net, state, ctx).item()
    assert got["sum"] == pytest.approx(case.setup.batch_size * got["mean"], rel=1e-5)


def test_alignment_pulls_towards_the_alignment_model(prepared: Any) -> None:
    """The same training with a large β ends nearer to it, and the metrics say so."""
    far, near = (
        case.train(case.down(case.start, 0), 0).metrics
        for case in (Case(prepared, alignment=1e-6), Case(prepared, alignment=0.5))
    )
    assert set(far) == {"loss", "contrastive", "alignment_loss"}
    assert near["alignment_loss"] < far["alignment_loss"]
    assert near["loss"] == pytest.approx(
        near["contrastive"] + 0.5 * near["alignment_loss"], rel=1e-4
    )


def test_the_alignment_model_is_sent_once(prepared: Any) -> None:
    case = Case(prepared)
    assert all(case.down(case.start, k).alignment is not None for k in range(3))
    reports = [case.answer(case.start, k) for k in (0, 2)]  # client 1's was lost
    after = case.method.aggregate(case.start, reports, case.at(0))
    assert after.told == (0, 2)
    assert [case.down(after, k, 1).alignment is None for k in range(3)] == [True, False, True]
    again = case.method.aggregate(after, [case.answer(after, 1)], case.at(1))
    assert all(case.down(again, k, 1).alignment is None for k in range(3))


def test_a_client_may_hear_it_twice_but_must_not_lose_it(prepared: Any) -> None:
    case = Case(prepared)
    down = case.down(case.start, 1)
    first = case.train(down, 1)
    twice = case.train(down, 1, first.state)
    once = case.train(replace(down, alignment=None), 1, first.state)
    assert pack(once.state) == pack(twice.state)
    assert pack(once.upload) == pack(twice.upload)
    with pytest.raises(ValueError, match="has lost it"):
        case.train(replace(down, alignment=None), 1)


def test_what_a_client_keeps_survives_the_store(prepared: Any) -> None:
    case = Case(prepared)
    store = StateFolder()
    run_client(case.method, case.down(case.start, 0), case.client(0), store)
    told = case.method.aggregate(case.start, [case.answer(case.start, 0)], case.at(0))
    assert traffic(case.down(told, 0)).total < traffic(case.down(case.start, 0)).total / 1.9
    report = run_client(case.method, case.down(told, 0, 1), case.client(0, 1), store)
    assert report.metrics["alignment_loss"] > 0
    store.close()


def test_the_alignment_model_is_trained_on_public_images(prepared: Any) -> None:
    case = Case(prepared)
    public = case.server.public
    assert public is not None
    alignment = case.start.alignment
    assert alignment.pixels.shape == (16, 3, 16, 16)
    distinct = {bytes(image.numpy().tobytes()) for image in alignment.pixels}
    assert len(distinct) == 16
    assert distinct <= {bytes(i.numpy().tobytes()) for i in public.images.pixels}
    tracked = [n for n in alignment.weights if n.endswith("num_batches_tracked")]
    assert all(alignment.weights[n].item() == 2 for n in tracked)  # 16 images in batches of 8
    few = replace(public, rows=public.rows[:5])
    server = Server(case.method, case.setup, few)
    assert len(server.init().alignment.pixels) == 5


@pytest.mark.parametrize(("epochs", "told"), [(1, 1), (3, 3), (10, 10), (25, 10)])
def test_the_user_hears_of_it_about_ten_times(prepared: Any, epochs: int, told: int) -> None:
    p = prepared("fedca")
    said: list[str] = []
    method = replace(p.method, align_epochs=epochs, align_images=2)
    Server(method, p.setup, p.server.public, tell=said.append).init()
    assert len(said) == told
    assert said[-1].startswith(f"alignment model: epoch {epochs}/{epochs}, loss ")


def test_public_images_are_needed_for_alignment_only(prepared: Any, tiny_config: Any) -> None:
    assert FedCA().needs_public
    assert not FedCA(alignment=0).needs_public
    drawn = prepare(tiny_config("fedca", **{"data.public": None}))
    assert drawn.config.data.public == "shapes"
    assert any("--public NAME" in note for note in drawn.notes)
    p = prepared("fedca")
    with pytest.raises(FurlongError, match="--public"):
        Server(p.method, p.setup).init()
    without = prepare(tiny_config("fedca", **{"data.public": None, "method.alignment": 0}))
    assert without.server.public is None
    assert without.server.init().alignment is None


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ("nothing", {"dictionary": 0, "alignment": 0.0}),
        ("alignment", {"dictionary": 0}),
        ("dictionary", {"ensembling": 0.0, "alignment": 0.0}),
        ("dictionary, ensembling", {"alignment": 0.0}),
        ("dictionary, ensembling, alignment", {}),
    ],
)
def test_figure_5(prepared: Any, row: str, fields: dict[str, Any]) -> None:
    """The rows of the ablation are settings, and send and keep what they need only."""
    case = Case(prepared, **fields)
    with InProcess(case.method, case.federation, case.setup) as transport:
        results = list(case.server.run(transport, case.start))
    assert not any(result.failures for result in results)
    last = results[-1]
    down = case.down(last.server, 0, 1)
    assert down.dictionary.shape == ((12 if "dictionary" in row else 0), 128)
    assert (last.server.alignment is not None) == ("alignment" in row)
    assert ("alignment_loss" in last.metrics[0]) == ("alignment" in row)
    state = case.train(case.down(case.start, 0), 0).state
    assert (state.ensemble is not None) == ("dictionary" in row)
    assert (state.pixels is not None) == ("alignment" in row)
    if row == "nothing":
        assert pack(state) == pack(State(None, None, None, None))
    assert last.down.features == 3 * traffic(down).features


def test_every_setting_starts_where_fedsimclr_does(prepared: Any) -> None:
    simclr = prepared("fedsimclr").server.init().weights
    for fields in ({}, {"alignment": 0.0}, {"dictionary": 0}):
        weights = Case(prepared, **fields).start.weights
        assert all(torch.equal(weights[n], t) for n, t in simclr.items())


@pytest.mark.parametrize("upload", ["sample", "full"])
@pytest.mark.parametrize("alignment", [0.0, 0.01])
def test_outline_has_the_sizes_of_the_real_thing(
    prepared: Any, upload: Any, alignment: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(prepared, dict_upload=upload, alignment=alignment)
    reports = [case.answer(case.start, k) for k in (0, 2)]
    real = case.method.aggregate(case.start, reports, case.at(0))
    monkeypatch.setattr(fedca, "train_alignment", None)  # an outline must not train
    first = case.method.outline(None, [], case.at(0))
    second = case.method.outline(first, [0, 2], case.at(0))
    for outlined, state in ((first, case.start), (second, real)):
        assert traffic(outlined) == traffic(state)
        assert outlined.told == state.told
        assert traffic(case.down(outlined, 1)) == traffic(case.down(state, 1))
        assert traffic(case.down(outlined, 0)) == traffic(case.down(state, 0))
    without = replace(case.server, public=None).context(case.server.exchanges()[0])
    assert traffic(case.method.outline(None, [], without)) == traffic(first)


def test_the_encoder_of_an_upload(prepared: Any) -> None:
    case = Case(prepared, alignment=0.0)
    upload = case.method.expected(case.start, 0, case.at(0))
    encoder = case.method.local_encoder(upload, case.at(0))
    assert encoder is not None
    wanted = case.method.encoder(case.start, case.at(0)).state_dict()
    assert all(torch.equal(t, wanted[n]) for n, t in encoder.state_dict().items())
    local = replace(case.method, bn_stats="local")
    assert local.local_encoder(upload, case.at(0)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", "nan"), ("dictionary", -1), ("ensembling", 1),
        ("ensembling", -0.1), ("alignment", -1), ("alignment", "inf"), ("align_images", 0),
        ("align_epochs", 0),
    ],
)  # fmt: skip
def test_fields_that_cannot_work_are_refused(field: str, value: Any) -> None:
    with pytest.raises(FurlongError, match=rf"method\.{field} is"):
        from_tree({}, {"method": "fedca", f"method.{field}": value}, "test")


@pytest.mark.parametrize(
    ("which", "ensembling", "maker"),
    [
        ("local", 0.0, "local"),
        ("global", 0.5, "global"),
        ("auto", 0.0, "global"),
        ("auto", 0.5, "local"),
    ],
)
def test_rows_of_the_received_or_the_trained_model(
    prepared: Any, which: str, ensembling: float, maker: str
) -> None:
    """Papers: the received one makes the plain dictionary, the trained one that of Eqs. 9, 10."""
    p = prepared("fedca", **{"method.dict_model": which, "method.ensembling": ensembling})
    start = p.server.init()
    with InProcess(p.method, p.federation, p.setup) as transport:
        first, second = p.server.run(transport, start)
    net = p.method.network(p.server.context(first.exchange))
    net.load_state_dict(start.weights)
    images = p.setup.augment.plain(p.train.pixels[p.federation.rows[0]])
    with evaluating(net):
        received = F.normalize(net(images), dim=1)
    near = (first.server.rows[0] @ received.T).max(dim=1).values
    assert bool((near > 1 - 1e-5).all()) == (maker == "global")
    cosine = second.metrics[0]["dictionary_cosine"]
    rows = torch.cat(list(first.server.rows.values()))
    assert cosine == pytest.approx(float((rows @ rows.T).mean()), rel=1e-4)
    assert "dictionary_cosine" not in first.metrics[0]
    assert "dictionary_mass" not in first.metrics[0]
    assert 0 < second.metrics[0]["dictionary_mass"] < 1


# ---------------------------------------------------------------- by hand


def one_sided(a: Tensor, b: Tensor, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Eqs. 4 to 8 from a to b, and the share of the probabilities on the dictionary."""
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    odds = (torch.cat([a @ b.T, a @ rows.T], dim=1) / temperature).exp()
    chances = odds / odds.sum(dim=1, keepdim=True)
    return -chances.diagonal().log().mean(), chances[:, len(b) :].sum(dim=1).mean()


class ByHand:
    """A client's rounds in plain torch, as Algorithm 1 and Eqs. 4 to 14 have them."""

    def __init__(self, p: Any, ctx: ClientContext, alignment: Any) -> None:
        self.p, self.ctx, self.ensemble = p, ctx, torch.zeros(24, 128)
        teacher = twin(p, ctx, alignment.weights).eval()
        self.public = p.setup.augment.plain(alignment.pixels)
        with torch.no_grad():
            self.h = teacher.backbone(self.public)
            self.z = teacher.projector(self.h)

    def round(self, down: Down, maker: str) -> tuple[nn.Module, Tensor, dict[str, float]]:
        """The trained network, the rows that are sent, and what is logged."""
        method, net = self.p.method, twin(self.p, self.ctx, down.weights)
        logged: dict[str, list[float]] = {"contrastive": [], "alignment": [], "mass": []}

        def loss_of(batch: Any) -> Tensor:
            first, second = batch.views()
            z1, z2 = net(torch.cat([first, second])).chunk(2)
            loss, mass = one_sided(z1, z2, down.dictionary, method.temperature)
            if method.symmetric:
                back, _ = one_sided(z2, z1, down.dictionary, method.temperature)
                loss = (loss + back) / 2
            chosen = torch.randperm(16)[:8]
            net.eval()
            h = net.backbone(self.public[chosen])
            z = net.projector(h)
            net.train()
            apart = ((self.h[chosen] - h) ** 2).sum() + ((self.z[chosen] - z) ** 2).sum()
            if method.align_reduction == "mean":
                apart = apart / 8
            for name, value in zip(logged, (loss, apart, mass), strict=True):
                logged[name].append(value.item())
            return loss + method.alignment * apart

        with seeded(self.ctx.setup.device, "train"):
            made = {"global": self.projections(net)}
            loss = descend(self.ctx.batches(), loss_of, net)
            made["local"] = self.projections(net)
            assert (made["local"] - made["global"]).norm() > 0.1  # so that it matters which
            alpha = method.ensembling
            self.ensemble = alpha * self.ensemble + (1 - alpha) * made[maker]
            rows = self.ensemble[torch.randperm(24)[:4]]
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        return net, rows / rows.norm(dim=1, keepdim=True), {"loss": loss, **means}

    def projections(self, net: nn.Module) -> Tensor:
        images = self.p.setup.augment.plain(self.ctx.data.pixels(torch.arange(24)))
        with evaluating(net):
            return net(images).clone()


@pytest.mark.parametrize(
    ("symmetric", "reduction", "dict_model", "ensembling", "maker"),
    [
        (False, "sum", "auto", 0.3, "local"),
        (True, "mean", "auto", 0.0, "global"),
        (True, "sum", "local", 0.0, "local"),
        (False, "mean", "global", 0.3, "global"),
    ],
)
def test_two_rounds_of_a_client_by_hand(
    prepared: Any, symmetric: bool, reduction: str, dict_model: str, ensembling: float, maker: str
) -> None:
    fields = {
        "temperature": 0.2,
        "symmetric": symmetric,
        "alignment": 0.05,
        "align_reduction": reduction,
        "dict_model": dict_model,
        "ensembling": ensembling,
    }
    p = prepared("fedca", **{f"method.{name}": value for name, value in fields.items()})
    start, ctx = p.server.init(), plain_client(p, batch_size=8)
    hand, state = ByHand(p, ctx, start.alignment), p.method.init_client(ctx)
    weights, alignment = start.weights, start.alignment
    for t in range(2):
        rows = F.normalize(draw(12, 128, seed=t).float(), dim=1)
        down = Down(weights, rows, alignment)
        local = run_round(p.method, down, ctx, state)
        net, sent, logged = hand.round(down, maker)
        assert_same(net, local.upload.weights, weights)
        for name, buffer in net.named_buffers():
            assert torch.allclose(local.upload.weights[name], buffer, rtol=1e-3, atol=1e-5), name
        assert torch.allclose(local.state.ensemble, hand.ensemble, atol=1e-4)
        assert torch.allclose(local.upload.rows, sent, atol=1e-3)
        logged["dictionary_mass"] = logged.pop("mass")
        logged["alignment_loss"] = logged.pop("alignment")
        logged["dictionary_cosine"] = (rows @ rows.T).mean().item()
        assert local.metrics == pytest.approx(logged, rel=1e-3)
        state, weights, alignment = local.state, local.upload.weights, None


def test_the_alignment_model_by_hand(prepared: Any) -> None:
    """SimCLR (Chen et al. 2020) on the public images, with the method's temperature."""
    p = prepared("fedca", **{"method.temperature": 0.2, "method.align_epochs": 2})
    ctx, public = plain_client(p, batch_size=8), p.server.public
    server = Server(p.method, ctx.setup, public)

    def simclr(pixels: Tensor) -> Tensor:
        z = net(torch.cat(p.setup.augment.views(pixels, 2)))
        z = z / z.norm(dim=1, keepdim=True)
        odds = (z @ z.T / 0.2).exp() * (1 - torch.eye(16))
        partner = torch.arange(16).roll(8)
        return -(odds[torch.arange(16), partner] / odds.sum(dim=1)).log().mean()

    def batches(pixels: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            yield from pixels[torch.randperm(16)].split(8)

    with server.computing("init"):
        weights = snapshot(p.method.network(ctx))
        pixels = public.pixels(torch.randperm(len(public))[:16])
        net = p.method.network(ctx).to(memory_format=torch.channels_last).train()
        start = snapshot(net)
        descend(batches(pixels), simclr, net)
    made = server.init()
    assert torch.equal(made.alignment.pixels, pixels)
    assert_same(net, made.alignment.weights, start)
    assert all(torch.equal(made.weights[name], value) for name, value in weights.items())


# ---------------------------------------------------------------- advice


def test_short_rounds_with_a_dictionary_alone_are_told(prepared: Any) -> None:
    """And every remedy that is named ends it."""
    sizes = dict.fromkeys(range(5), 1000)
    setup = replace(prepared("fedca").setup, epochs=1, batch_size=64, sizes=sizes)
    bare = FedCA(alignment=0)
    (said,) = bare.advice(setup)
    assert "1024 rows beside a batch of 64" in said
    assert "15 step(s)" in said
    assert len(bare.advice(replace(setup, epochs=6))) == 1  # 90 steps
    assert "--epochs" in said
    assert bare.advice(replace(setup, epochs=7)) == []
    assert "--method.alignment" in said
    assert FedCA().advice(setup) == []
    assert "--method.dictionary" in said
    assert FedCA(alignment=0, dictionary=64).advice(setup) == []
    assert FedCA(alignment=0, dictionary=0).advice(setup) == []


def test_advice_is_said_where_something_is_trained(tiny_config: Any) -> None:
    def notes(training: bool = True, **options: Any) -> list[str]:
        settings = tiny_config("fedca", **{"data.public": None, "method.alignment": 0}, **options)
        found = prepare(settings, training=training).notes
        return [note for note in found if "may collapse" in note]

    assert (
        len(notes()) == len(notes(bound="single")) == len(notes(**{"server.rule": "median"})) == 1
    )
    assert notes(training=False) == []


@pytest.mark.parametrize("images", [5, 8, 23, 24])
def test_steps_of_a_round(prepared: Any, images: int) -> None:
    case = Case(prepared, alignment=0.0)
    ctx = case.client(0)
    ctx.data = replace(ctx.data, rows=ctx.data.rows[:images])
    setup = replace(case.setup, epochs=3, sizes={0: images})
    ctx.setup = setup
    assert setup.steps(0) == len(list(ctx.batches()))
