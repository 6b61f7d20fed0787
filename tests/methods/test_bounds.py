"""The bounds: what a client alone may see, what is logged and measured of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny

from furlong.core.context import ServerContext
from furlong.core.weights import snapshot
from furlong.engines.inprocess import InProcess
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
