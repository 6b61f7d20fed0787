"""The bounds: what a client alone may see, what is logged and measured of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from PIL import Image

from furlong.core.context import ServerContext
from furlong.core.weights import snapshot
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.evaluation.linear import Linear
from furlong.evaluation.protocol import Encoded, Images
from furlong.methods import METHODS
from furlong.methods.base import Model
from furlong.methods.fedsimclr import FedSimCLR
from furlong.methods.wrappers.alone import Alone, Each
from furlong.runs import loop
from furlong.runs.encoders import encoders
from furlong.runs.prepare import prepare


@dataclass(frozen=True)
class Logging(FedSimCLR):
    """Its server logs something of the second client only."""

    def aggregate(self, server: Model, reports: Any, ctx: ServerContext) -> Model:
        (client,) = ctx.setup.sizes
        ctx.metrics |= {"all": float(client)} | ({"late": 7.0} if client else {})
        return super().aggregate(server, reports, ctx)


def test_the_servers_metrics_are_means_over_those_that_have_them(prepared: Any) -> None:
    p = prepared()
    alone = Alone(Logging(projection_head="small_proj"))
    server = replace(p.server, method=alone)
    with InProcess(alone, p.federation, p.setup) as transport:
        first = next(server.run(transport, server.init()))
    assert first.own == {"all": 1.0, "late": 7.0}


def test_a_client_alone_recalibrates_on_its_own_images(prepared: Any) -> None:
    p = prepared(bound="single", **{"method.bn_stats": "recalibrate"})
    state = p.server.init()
    pixels = p.train.pixels.clone()
    pixels[torch.cat([p.federation.rows[1], p.federation.rows[2]])] = 0
    changed = replace(p, train=replace(p.train, pixels=pixels))
    before, after = (
        {who: snapshot(e) for who, e in encoders(run, state).items()} for run in (p, changed)
    )
    same = {
        who: all(torch.equal(t, after[who][name]) for name, t in weights.items())
        for who, weights in before.items()
    }
    assert same == {"client 0 alone": True, "client 1 alone": False, "client 2 alone": False}


@pytest.mark.parametrize("method", ["fedavg", "moon"])
@pytest.mark.parametrize("bound", ["none", "single"])
def test_accuracy_of_the_classifier_itself(tmp_path: Path, method: str, bound: str) -> None:
    settings = tiny(
        method,
        bound=bound,
        out=str(tmp_path / "run"),
        **{"optimiser.name": "adam", "optimiser.lr": 0.005, "evaluate.probe": "none"},
    )
    run = loop.run(settings)
    found = {r["who"]: r for r in run.summary["results"] if r["protocol"] == "classifier"}
    p = prepare(replace(settings, run=replace(settings.run, out=None)))
    with p.engine() as transport:
        *_, last = p.server.run(transport, p.server.init())
    models: dict[str, Model] = {"federated": last.server}
    inner: Any = p.method
    if isinstance(p.method, Alone):
        assert isinstance(last.server, Each)
        models = {f"client {k} alone": state for k, state in last.server.states.items()}
        inner = p.method.inner
    right = {}
    for who, model in models.items():
        net = inner.network(p.server.context(last.exchange))
        net.load_state_dict(model.weights)
        assert p.test is not None
        assert p.test.labels is not None
        with torch.no_grad():
            guess = net.eval()(p.setup.augment.plain(p.test.pixels)).argmax(dim=1)
        right[who] = float((guess == p.test.labels).double().mean())
    if bound == "single":
        assert len(set(right.values())) > 1
        mean, each = found.pop("alone"), list(right.values())
        assert mean["accuracy"] == pytest.approx(np.mean(each))
        assert mean["std"] == pytest.approx(np.std(each, ddof=1))
    assert {who: row["accuracy"] for who, row in found.items()} == pytest.approx(right)


def test_views_are_the_methods_usual_ones_in_every_bound() -> None:
    """As docs/guide.md says; on shapes no colours are changed."""
    usual = {name: row.cls.usual_augment for name, row in METHODS.items()}
    special = dict.fromkeys(("fedrot", "fedavg", "fedprox", "moon"), "flip_crop")
    special |= {"fedae": "flip", "fedmae": "flip", "mfcl": "mfcl"}
    assert {name: augment for name, augment in usual.items() if augment != "moco_cifar"} == special
    assert METHODS["orchestra"].cls.usual["data.augment"] == "orchestra"  # on figures, too
    for method, augment in (("fedavg", "flip_crop"), ("mfcl", "shapes"), ("fedu", "shapes")):
        for bound in ("none", "single", "pooled"):
            assert prepare(tiny(method, bound=bound)).config.data.augment == augment


# ---------------------------------------------------------------- all but one site


@pytest.fixture(scope="module")
def wards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites with 40 images each of two classes, in folders site/class."""
    root = tmp_path_factory.mktemp("wards")
    noise = np.random.default_rng(0)
    for site, shade in (("north", 20), ("south", 60), ("west", 100)):
        for kind, more in (("ill", 0), ("well", 90)):
            (root / site / kind).mkdir(parents=True)
            for number in range(20):
                pixels = noise.integers(0, 60, (12, 12, 3)) + shade + more
                place = root / site / kind / f"{number}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(place)
    return root


def on_wards(wards: Path, **options: Any) -> Any:
    given = {"data.images": None, "data.test_images": None, "data.image_size": 12, "clients": None}
    return tiny(data=f"folder:{wards}", partition="natural", **given, **options)


def test_the_others_train_as_if_the_site_had_never_been(wards: Path, tmp_path: Path) -> None:
    """By name and by number; no image of the site has a part in the weights."""
    named, numbered = (prepare(on_wards(wards, bound=f"without:{s}")) for s in ("south", "1"))
    assert named.left_out == numbered.left_out == 1
    assert named.federation.clients == [0, 2]
    everybody = prepare(on_wards(wards)).setup.sizes
    assert named.setup.sizes == {k: everybody[k] for k in (0, 2)}
    weights = []
    for number, settings in enumerate((named.config, named.config)):
        out = tmp_path / str(number)
        p = prepare(replace(settings, run=replace(settings.run, out=str(out))))
        if number:
            p.train.pixels[p.split.indices[1]] = 255
        with p.engine() as engine:
            *_, last = p.server.run(engine, p.server.init())
        weights.append(snapshot(next(iter(encoders(p, last.server).values()))))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_site_that_was_left_out_is_measured_by_itself(wards: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run = loop.run(on_wards(wards, bound="without:south", **{"run.out": out, "rounds": 1}))
    rows = {(row["who"], row["protocol"]): row for row in run.summary["results"]}
    whole, apart = rows["without south", "linear"], rows["without south", "linear on site south"]
    assert set(whole["sites"]) <= {"north", "south", "west"}
    assert whole["sites"]["south"]["images"] > 0
    assert "sites" not in apart or set(apart["sites"]) == {"south"}
    assert ("random", "knn on site south") in rows
    assert run.summary["who"] == "without south"
    assert run.summary["clients"] == 2
    assert run.summary["bytes_up"] > 0  # the others do send
    p = prepare(on_wards(wards, bound="without:south"))
    assert run.summary["images"] == sum(p.setup.sizes.values()) < len(p.train)
    assert p.test is not None
    south = p.test.subset((p.test.groups == 1).nonzero()[:, 0])
    others = p.train.subset((p.train.groups != 1).nonzero()[:, 0])
    images = Images(others, south, p.setup.augment, p.setup.seed)
    expected = Linear().measure(Encoded(run.encoder, images))
    assert apart["accuracy"] == expected["accuracy"]
    assert whole["labels"] == apart["labels"] == 1


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("without:est", "there is no such site. Did you mean 'west'"),
        ("without:3", "there is no such site"),
        ("without:", "unknown bound 'without:'"),
        ("without", "unknown bound 'without'"),
    ],
)
def test_a_site_that_is_not_there(wards: Path, bound: str, said: str) -> None:
    with pytest.raises(FurlongError, match=said):
        prepare(on_wards(wards, bound=bound))


def test_across_machines_a_site_is_left_out_by_not_being_there() -> None:
    with pytest.raises(FurlongError, match="without that site's node"):
        tiny(bound="without:1", engine="flower")
