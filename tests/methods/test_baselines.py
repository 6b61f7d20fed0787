"""The numeric properties that the specification lists for baselines: 2.3, 2.4, 2.7, 2.8, 2.15."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from furlong.core.context import Batch, ClientContext, Networks
from furlong.core.method import Report
from furlong.core.payload import pack, traffic, unpack
from furlong.data.augment import preset, rotated
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError, fitting
from furlong.methods.bank import enqueue, new_bank
from furlong.methods.base import Model, proximal
from furlong.methods.fedae import Decoder
from furlong.methods.fedavg import FedAvg
from furlong.methods.fedbarlow import FedBarlow
from furlong.methods.fedmoco import FedMoCo
from furlong.methods.fedrot import FedRot
from furlong.methods.fedx import FedX
from furlong.methods.moon import MOON
from furlong.nn.losses import (
    barlow_twins,
    cosine_simsiam,
    info_nce,
    moon_contrast,
    relational,
    vicreg,
)
from furlong.seeding import seeded


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def local_context(p: Any, exchange: int = 0, client: int = 0) -> ClientContext:
    shard = p.federation.shard(client, labels=p.method.needs_labels)
    return ClientContext(
        p.setup, p.server.exchanges()[exchange], Networks(), client=client, data=shard
    )


def train(p: Any, state: Any, down: Any, exchange: int = 0) -> Any:
    with seeded(p.setup.device, "train"):
        return p.method.local_update(state, down, local_context(p, exchange))


def a_batch(p: Any, count: int = 6) -> Batch:
    labels = None if p.train.labels is None else p.train.labels[:count]
    return Batch(p.train.pixels[:count], torch.arange(count), labels, p.setup.augment)


# ---------------------------------------------------------------- 2.3 FedSimSiam


def test_simsiam_loss_is_symmetric_and_in_range(prepared: Any) -> None:
    p = prepared("fedsimsiam")
    net = p.method.network(p.server.context(p.server.exchanges()[0]))

    class Fixed(Batch):
        def views(self, n: int = 2) -> tuple[Tensor, ...]:  # noqa: ARG002
            one, two = preset("none").views(self.pixels[:3]), preset("none").views(self.pixels[3:])
            return (one[0], two[0]) if self.index[0] == 0 else (two[0], one[0])

    batch = a_batch(p)
    forth = Fixed(batch.pixels, batch.index, None, batch.augment)
    back = Fixed(batch.pixels, batch.index + 1, None, batch.augment)
    loss = p.method.loss(net, forth)
    assert -1 <= loss.item() <= 1
    torch.testing.assert_close(loss, p.method.loss(net, back))


def test_simsiam_without_predictor_and_stop_gradient_is_a_cosine() -> None:
    z1, z2 = draw(4, 6).requires_grad_(), draw(4, 6, seed=1).requires_grad_()
    plain = -F.cosine_similarity(z1, z2, dim=1).mean()
    torch.testing.assert_close(cosine_simsiam(z1, z2), plain)
    plain.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    assert min(z1.grad.norm(), z2.grad.norm()) > 1e-3


def test_heads_that_do_not_fit_are_refused(prepared: Any) -> None:
    for method in ("fedsimsiam", "fedbyol", "fedx"):
        p = prepared(method, **{"method.prediction_head": "mlp:16:32"})
        with pytest.raises(FurlongError, match="gives 32 numbers"):
            p.server.init()


# ---------------------------------------------------------------- 2.4 FedMoCo


def test_queue_wraps_and_forgets() -> None:
    bank, position = new_bank(10, 4), 0
    start = bank.clone()
    for step in range(math.ceil(10 / 4)):
        position = enqueue(bank, position, torch.full((4, 4), float(step)))
    assert position == 12 % 10
    assert not (bank[:, None] == start).all(-1).any()  # no initial row survives
    assert bank[:, 0].tolist() == [2, 2, 0, 0, 1, 1, 1, 1, 2, 2]


def test_queue_goes_on_between_rounds(prepared: Any) -> None:
    p = prepared("fedmoco")
    server = p.server.init()
    first = train(p, p.method.init_client(local_context(p)), server)
    steps = len(p.federation.shard(0)) // p.setup.batch_size
    assert first.state.position == steps * p.setup.batch_size % p.method.bank
    again = train(p, first.state, server, 1)
    rows = {tuple(r) for r in first.state.rows.tolist()} & {
        tuple(r) for r in again.state.rows.tolist()
    }
    assert len(rows) == max(0, p.method.bank - steps * p.setup.batch_size)


@pytest.mark.parametrize("key_update", ["aggregate", "reset"])
def test_key_network_travels_or_is_reset(prepared: Any, key_update: str) -> None:
    p = prepared("fedmoco", **{"method.key_update": key_update, "method.decay": 1.0})
    server = p.server.init()
    other = replace(
        server, query={n: t + 0.01 if t.is_floating_point() else t for n, t in server.query.items()}
    )
    ctx = local_context(p)
    with seeded(p.setup.device, "moco"):
        local = p.method.local_update(p.method.init_client(ctx), other, ctx)
    key = dict(ctx.networks._slots["key"].named_parameters())
    expected = other.query if key_update == "reset" else server.key
    for name, value in key.items():  # decay 1: the key network stayed where it began
        torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=0)
    assert (local.upload.key is None) == (key_update == "reset")
    sent = traffic(local.upload).params
    assert sent == (1 if key_update == "reset" else 2) * traffic(Model(server.query)).params


def test_moco_is_the_first_row_of_fcls_ablation(prepared: Any) -> None:
    """CL = FCL without fusion and matching, bit for bit."""
    moco = prepared("fedmoco", **{"method.bank": 16, "method.temperature": 0.2})
    fcl = prepared(
        "fcl",
        **{
            "method.bank": 16,
            "method.temperature": 0.2,
            "method.fusion": False,
            "method.matching": 0,
        },
    )
    a, b = moco.server.init(), fcl.server.init()
    assert pack(Model(a.query)) == pack(Model(b.query))
    down = fcl.method.download(b, 0, fcl.server.context(fcl.server.exchanges()[0]))
    with seeded(moco.setup.device, "bank"):
        queue = moco.method.init_client(local_context(moco))
    with seeded(moco.setup.device, "bank"):
        state = fcl.method.init_client(local_context(fcl))
    one, two = train(moco, queue, a), train(fcl, state, down)
    assert pack(Model(one.upload.query)) == pack(Model(two.upload.query))
    assert pack(Model(one.upload.key)) == pack(Model(two.upload.key))
    assert torch.equal(one.state.rows, two.state.local)


@pytest.mark.parametrize("options", [{"symmetric": True}, {"bn_groups": 2}, {"bn_groups": 100}])
def test_moco_variants_train(prepared: Any, options: dict[str, Any]) -> None:
    p = prepared("fedmoco", **{f"method.{k}": v for k, v in options.items()})
    plain = prepared("fedmoco")
    server = p.server.init()
    queue = p.method.init_client(local_context(p))
    assert pack(train(p, queue, server).upload) != pack(train(plain, queue, server).upload)


@pytest.mark.parametrize(("images", "groups"), [(7, 3), (50, 8), (3, 8), (8, 4)])
def test_no_part_of_a_batch_is_one_image(images: int, groups: int) -> None:
    """BatchNorm has no variance of one image."""
    sizes = []
    net = nn.BatchNorm1d(4)
    net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    FedMoCo(bn_groups=groups).queries(net, torch.randn(images, 4))
    assert min(sizes) >= 2
    assert len(sizes) == min(groups, images // 2)


def test_keys_come_back_in_order() -> None:
    method = FedMoCo(bn_groups=2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    view = torch.randn(6, 3, 2, 2)
    torch.testing.assert_close(method.keys(net, view), F.normalize(net(view), dim=1))


def test_symmetric_moco_adds_both_directions(prepared: Any) -> None:
    """One step by hand, against the loss that the client reports."""
    p = prepared("fedmoco", batch_size=24, **{"method.symmetric": True})
    server, ctx = p.server.init(), local_context(p)
    queue = p.method.init_client(ctx)
    local = train(p, queue, server)
    with seeded(p.setup.device, "train"):
        (batch,) = list(local_context(p).batches())
        v1, v2 = batch.views()
        net = p.method.network(ctx)
        net.load_state_dict(server.query)
        net.to(memory_format=torch.channels_last).train()
        z1, z2 = net(v1), net(v2)
    by_hand = info_nce(z1, z2, queue.rows, 0.1) + info_nce(z2, z1, queue.rows, 0.1)
    assert local.metrics["loss"] == pytest.approx(by_hand.item(), rel=1e-4)


# ---------------------------------------------------------------- 2.7 FedRot


class Recorder(nn.Module):
    """Remembers what it sees and answers with equal scores."""

    def forward(self, images: Tensor) -> Tensor:
        self.seen = images
        return torch.zeros(len(images), 4)


@pytest.mark.parametrize("mode", ["random", "all4"])
def test_uniform_scores_give_ln_4(prepared: Any, golden: Any, mode: Any) -> None:
    batch, net = a_batch(prepared("fedrot")), Recorder()
    loss = FedRot(mode=mode).loss(net, batch)
    assert loss.item() == pytest.approx(golden["losses"]["rotation_uniform"], abs=1e-6)
    assert len(net.seen) == (6 if mode == "random" else 24)


def test_all_four_turns_of_each_image(prepared: Any) -> None:
    net = Recorder()
    batch = replace(a_batch(prepared("fedrot")), augment=preset("none"))
    FedRot(mode="all4").loss(net, batch)
    for turn, images in enumerate(net.seen.chunk(4)):  # equally many of each class
        assert torch.equal(images, batch.plain.rot90(turn, (2, 3)))


def test_turns_are_exact() -> None:
    x = torch.rand(4, 3, 5, 5)
    turn = torch.tensor([0, 1, 2, 3])
    assert torch.equal(rotated(rotated(x, turn), (4 - turn) % 4), x)
    assert torch.equal(rotated(x, torch.full((4,), 2)), x.flip(2, 3))
    ring = torch.zeros(4, 1, 5, 5)
    ring[..., 1:4, 1:4] = 1
    assert torch.equal(rotated(ring, turn), ring)


# ---------------------------------------------------------------- 2.8 FedAE


@pytest.mark.parametrize(("size", "start"), [(32, 4), (84, 6), (28, 4), (16, 2), (96, 6), (224, 4)])
def test_decoder_gives_the_image_back_in_size(size: int, start: int) -> None:
    decoder = Decoder(20, 3, size).eval()
    out = decoder(torch.randn(2, 20))
    assert out.shape == (2, 3, size, size)
    assert decoder.start == start
    assert 0 <= out.min() <= out.max() <= 1


def test_autoencoder_loss(prepared: Any) -> None:
    p = prepared("fedae")
    batch = replace(a_batch(p), augment=preset("none"))

    class Says(nn.Module):
        def __init__(self, answer: Tensor) -> None:
            super().__init__()
            self.answer = answer

        def forward(self, images: Tensor) -> Tensor:
            return self.answer.expand_as(images)

    assert p.method.loss(Says(batch.plain), batch).item() == 0
    black_and_white = replace(batch, pixels=(batch.pixels > 100).to(torch.uint8) * 255)
    assert p.method.loss(Says(torch.tensor(0.5)), black_and_white).item() == 0.25
    normalised = replace(
        batch, augment=preset("moco_cifar")
    )  # the target is in [0, 1] all the same
    assert 0 < p.method.loss(Says(torch.tensor(0.5)), normalised).item() <= 0.25


def test_decoder_reads_representations(prepared: Any) -> None:
    p = prepared("fedae")
    net = p.method.network(p.server.context(p.server.exchanges()[0]))
    assert net.decoder.linear.in_features == p.setup.width


@pytest.mark.parametrize("name", ["fedae", "fedavg", "fedrot"])
def test_mean_of_equal_clients_is_the_identity(prepared: Any, name: str) -> None:
    p = prepared(name)
    server, ctx = p.server.init(), p.server.context(p.server.exchanges()[0])
    reports = [Report(c, 0, n, server, {}) for c, n in ((0, 7), (1, 9), (2, 3))]
    assert pack(p.method.aggregate(server, reports, ctx)) == pack(server)


# ---------------------------------------------------------------- 2.15 supervised


def test_fedprox_gradient() -> None:
    net = nn.Linear(3, 2)
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    method = FedAvg(mu=0.3)
    penalty = method.penalty(net, start)
    assert penalty is not None
    penalty.backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in net.parameters())  # the first step
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    net.zero_grad()
    (0.3 * proximal(net, start)).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, 0.3 * (p.detach() - start[name]))


def test_fedprox_without_mu_is_fedavg(prepared: Any) -> None:
    avg, prox = prepared("fedavg"), prepared("fedprox", **{"method.mu": 0.0})
    real = prepared("fedprox")
    down = avg.server.init()
    assert pack(train(avg, None, down).upload) == pack(train(prox, None, down).upload)
    assert pack(train(avg, None, down).upload) != pack(train(real, None, down).upload)


def test_moon_without_mu_is_cross_entropy_on_the_same_network(prepared: Any) -> None:
    p = prepared("moon", **{"method.mu": 0.0})
    down = p.server.init()

    class Same(FedAvg):
        def network(self, ctx: Any) -> nn.Module:
            return p.method.network(ctx)

    plain = replace(p, method=Same())
    assert pack(train(p, None, down).upload) == pack(train(plain, None, down).upload)


def test_moon_golden_values(golden: Any) -> None:
    z = draw(3, 6)
    same = moon_contrast(z, z, z, 0.5).item()
    assert same == pytest.approx(golden["losses"]["moon_equal_global_prev"])
    apart = moon_contrast(z, 2 * z, -z, 0.5).item()
    assert apart == pytest.approx(golden["losses"]["moon_tau0.5_glob1_prev-1"], abs=1e-7)


def test_moon_keeps_its_last_model_and_trains_only_one(prepared: Any) -> None:
    p = prepared("moon")
    down = p.server.init()
    first = train(p, None, down)
    assert pack(first.state) == pack(first.upload)
    ctx = local_context(p, 1)
    with seeded(p.setup.device, "moon"):
        p.method.local_update(first.state, down, ctx)
    for slot, weights in (("received", down.weights), ("previous", first.state.weights)):
        for name, tensor in ctx.networks._slots[slot].state_dict().items():
            assert torch.equal(tensor, weights[name]), (slot, name)


def test_labelled_methods_refuse_unlabelled_images(tmp_path: Any) -> None:
    from PIL import Image

    from furlong import prepare
    from furlong.runs.config import from_tree

    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    options = {"method": "fedavg", "data": f"folder:{tmp_path}", "partition": "iid", "clients": 2}
    with pytest.raises(FurlongError, match="needs labels"):
        prepare(from_tree({}, options, "test"))


# ---------------------------------------------------------------- beyond the papers


def test_barlow_twins() -> None:
    z = draw(50, 6)
    white = torch.linalg.qr(z - z.mean(0))[0]  # centred, orthogonal columns
    white = white - white.mean(0)
    assert barlow_twins(white, white, 0.005).item() < 1e-3
    z1, z2 = draw(8, 3), draw(8, 3, seed=1)
    corr = np.corrcoef(z1.T, z2.T)[:3, 3:]
    by_hand = sum(
        (1 - corr[i, j]) ** 2 if i == j else 0.1 * corr[i, j] ** 2
        for i in range(3)
        for j in range(3)
    )
    assert barlow_twins(z1, z2, 0.1).item() == pytest.approx(by_hand, rel=1e-4)
    torch.testing.assert_close(
        barlow_twins(5 * z1 + 2, z2, 0.1), barlow_twins(z1, z2, 0.1), rtol=1e-4, atol=1e-4
    )


def test_vicreg() -> None:
    z1, z2 = draw(8, 3).numpy(), draw(8, 3, seed=1).numpy()
    invariance = ((z1 - z2) ** 2).mean()
    spread = [np.maximum(0, 1 - np.sqrt(z.var(0, ddof=1) + 1e-4)).mean() for z in (z1, z2)]
    covs = [np.cov(z.T) for z in (z1, z2)]
    mixing = sum((c**2).sum() - (np.diag(c) ** 2).sum() for c in covs) / 3
    by_hand = 25 * invariance + 25 * sum(spread) / 2 + mixing
    got = vicreg(torch.from_numpy(z1), torch.from_numpy(z2), 25, 25, 1).item()
    assert got == pytest.approx(by_hand)
    constant = torch.zeros(8, 3, dtype=torch.float64)  # collapse costs μ·(1 - √ε), and ε keeps the
    constant.requires_grad_()  # gradient finite
    loss = vicreg(constant, constant, 25, 25, 1)
    assert loss.item() == pytest.approx(25 * 0.99)
    loss.backward()
    assert constant.grad is not None
    assert constant.grad.isfinite().all()


def test_relations_are_the_jensen_shannon_divergence() -> None:
    from scipy.spatial.distance import jensenshannon

    z1, z2, anchors = draw(5, 6), draw(5, 6, seed=1), draw(9, 6, seed=2)
    relation = [
        (F.normalize(z, dim=1) @ F.normalize(anchors, dim=1).T / 0.2).softmax(1).numpy()
        for z in (z1, z2)
    ]
    expected = (jensenshannon(*relation, axis=1) ** 2).mean()
    assert relational(z1, z2, anchors, 0.2, 0.2).item() == pytest.approx(expected)
    assert relational(z1, 3 * z1, anchors, 0.2, 0.2).item() == pytest.approx(0, abs=1e-12)
    mean = torch.from_numpy(sum(relation) / 2)
    turned = [F.kl_div(torch.from_numpy(r).log(), mean, reduction="batchmean") for r in relation]
    assert relational(z1, z2, anchors, 0.2, 0.2, reverse=True).item() == pytest.approx(
        float(sum(turned)) / 2
    )
    assert relational(z1, z1, anchors, 0.2, 0.05).item() > 0.01  # a sharper target


def test_fedx_learns_from_the_received_model_without_changing_it(prepared: Any) -> None:
    p = prepared("fedx")
    down, ctx = p.server.init(), local_context(p)
    with seeded(p.setup.device, "fedx"):
        p.method.local_update(None, down, ctx)
    for name, tensor in ctx.networks._slots["received"].state_dict().items():
        assert torch.equal(tensor, down.weights[name])
    projected, predicted = draw(9, 4).requires_grad_(), draw(9, 4, seed=1).requires_grad_()
    taught = draw(9, 4, seed=2).requires_grad_()
    FedX().loss(projected, predicted, taught.detach()).backward()
    assert projected.grad is not None
    assert projected.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: FedBarlow(off_diagonal=-1), "off_diagonal"),
        (lambda: FedX(global_temperature=0), "global_temperature"),
        (lambda: FedMoCo(bank=0), "bank"),
        (lambda: MOON(mu=math.inf), "mu"),
        (lambda: FedAvg(mu=-0.1), "mu"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, word: str) -> None:
    with pytest.raises(FurlongError, match=word):
        make()


def test_what_does_not_fit_in_memory_is_named(prepared: Any) -> None:
    for method, option in (("orchestra", "global_clusters"), ("fedswav", "prototypes")):
        p = prepared(method, **{f"method.{option}": 10**12})
        what = "a table of 1,000,000,000,000 rows of 128" if method == "orchestra" else "prototypes"
        with pytest.raises(FurlongError, match=f"{what}.* does not fit in memory"):
            p.server.init()
    p = prepared("fedmoco", **{"method.bank": 10**12})
    with (
        InProcess(p.method, p.federation, p.setup) as transport,
        pytest.raises(FurlongError, match=r"client 0: a table of .* does not fit in memory"),
    ):
        next(p.server.run(transport, p.server.init()))
    with pytest.raises(RuntimeError, match="other"), fitting("it"):
        raise RuntimeError("another reason")


def test_payloads_are_registered() -> None:
    from furlong.methods.fedmoco import Nets, Queue

    for value in (Nets({"w": torch.ones(2)}, None), Queue(torch.ones(3, 2), 1)):
        assert pack(unpack(pack(value))) == pack(value)
