"""What the base classes of methods do: the weighted mean, BatchNorm statistics, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from furlong.core.aggregation import Average
from furlong.core.method import Report
from furlong.core.payload import pack
from furlong.core.weights import Mean
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError, fitting
from furlong.methods.base import Averaging, Model
from furlong.runs.config import from_tree


class OnlyAverage(Averaging[Model, None]):
    def init_server(self, ctx: Any) -> Any: ...
    def local_update(self, state: Any, down: Any, ctx: Any) -> Any: ...
    def encoder(self, server: Any, ctx: Any) -> Any: ...


def report(client: int, examples: int, **weights: Any) -> Report[Model]:
    tensors = {k.replace("__", "."): torch.as_tensor(v) for k, v in weights.items()}
    return Report(client, 0, examples, Model(tensors), {})


def aggregate(policy: Any, *reports: Report[Model]) -> dict[str, torch.Tensor]:
    server = Model({k: torch.zeros_like(v) for k, v in reports[0].upload.weights.items()})
    ctx: Any = SimpleNamespace(combining=Average)
    return OnlyAverage(bn_stats=policy).aggregate(server, iter(reports), ctx).weights


def test_weighted_mean_is_renormalised_over_participants() -> None:
    got = aggregate("average", report(0, 1, w=0.0), report(1, 3, w=4.0))
    assert got["w"].item() == 3.0


def test_mean_of_one_is_the_identity() -> None:
    weight = torch.randn(1000)
    assert torch.equal(aggregate("average", report(0, 9973, w=weight))["w"], weight)


def test_mean_of_equals_is_the_identity() -> None:
    weight = torch.randn(1000)
    reports = [report(k, n, w=weight.clone()) for k, n in enumerate((10, 999, 5000))]
    assert torch.equal(aggregate("average", *reports)["w"], weight)


def test_pooled_variance_counts_the_spread_of_means() -> None:
    reports = [
        report(0, 5, bn__running_mean=-1.0, bn__running_var=1.0, bn__num_batches_tracked=3),
        report(1, 5, bn__running_mean=1.0, bn__running_var=1.0, bn__num_batches_tracked=8),
    ]
    average, pooled = aggregate("average", *reports), aggregate("pooled", *reports)
    assert average["bn.running_var"].item() == 1.0
    assert pooled["bn.running_var"].item() == 2.0
    assert average["bn.num_batches_tracked"].item() == 8
    assert average["bn.num_batches_tracked"].dtype == torch.int64


def test_mean_is_float64_inside() -> None:
    mean: Mean[Model] = Mean()
    for _ in range(1000):
        mean.add(Model({"w": torch.tensor(0.1)}), 1)
    result = mean.result()
    assert result is not None
    assert result.weights["w"].item() == torch.tensor(0.1).item()
    assert Mean[Model]().result() is None


@pytest.mark.parametrize("name", ["fedae", "fedavg", "fedrot"])
def test_mean_of_equal_clients_is_the_identity(prepared: Any, name: str) -> None:
    p = prepared(name)
    server, ctx = p.server.init(), p.server.context(p.server.exchanges()[0])
    reports = [Report(c, 0, n, server, {}) for c, n in ((0, 7), (1, 9), (2, 3))]
    assert pack(p.method.aggregate(server, reports, ctx)) == pack(server)


def test_heads_that_do_not_fit_are_refused(prepared: Any) -> None:
    for method in ("fedsimsiam", "fedbyol", "fedx"):
        p = prepared(method, **{"method.prediction_head": "mlp:16:32"})
        with pytest.raises(FurlongError, match="gives 32 numbers"):
            p.server.init()


def test_labelled_methods_refuse_unlabelled_images(tmp_path: Any) -> None:
    from PIL import Image

    from furlong import prepare

    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    options = {"method": "fedavg", "data": f"folder:{tmp_path}", "partition": "iid", "clients": 2}
    with pytest.raises(FurlongError, match="needs labels"):
        prepare(from_tree({}, options, "test"))


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
