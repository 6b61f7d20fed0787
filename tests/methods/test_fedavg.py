"""FedAvg and FedProx (2.15): labels and the proximal term."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from by_hand import assert_round, distance, plain_client, train, twin
from torch import Tensor, nn

from furlong.core.context import Batch
from furlong.core.payload import pack
from furlong.methods.fedavg import FedAvg
from furlong.methods.networks import proximal


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


def test_fedprox_holds_on_to_the_received_network(prepared: Any) -> None:
    p = prepared("fedprox", **{"method.mu": 5.0})
    start = [v.detach() for v in twin(p, plain_client(p), p.server.init().weights).parameters()]

    def loss_of(net: Any, batch: Batch) -> Tensor:
        (view,) = batch.views(1)
        return F.cross_entropy(net(view), batch.labels) + 5.0 / 2 * distance(net, start)

    assert_round(p, loss_of, batch_size=12)
