"""FedSimCLR (2.1): its proximal term, and statistics that stay with the clients."""

from __future__ import annotations

from typing import Any

import torch
from by_hand import assert_round, distance, local_context, plain_client, twin
from torch import Tensor

from furlong.core.context import Batch, ClientContext, Networks
from furlong.core.exchange import Server, run_client
from furlong.core.payload import unpack
from furlong.core.weights import snapshot
from furlong.engines.inprocess import InProcess
from furlong.nn.losses import nt_xent


def test_fedsimclr_holds_on_to_the_received_projector(prepared: Any) -> None:
    p = prepared("fedsimclr", **{"method.head_prox_mu": 5.0})
    received = twin(p, plain_client(p), p.server.init().weights)
    start = [v.detach() for v in received.projector.parameters()]

    def loss_of(net: Any, batch: Batch) -> Tensor:
        z1, z2 = net(torch.cat(batch.views())).chunk(2)
        return nt_xent(z1, z2, 0.5) + 5.0 / 2 * distance(net.projector, start)

    assert_round(p, loss_of, batch_size=12)


def test_local_statistics_never_leave(prepared: Any) -> None:
    p = prepared("fedsimclr", **{"method.bn_stats": "local"})
    from furlong.engines.states import StateFolder

    store = StateFolder()
    server = p.server.init()
    answer = run_client(p.method, server, local_context(p), store)
    assert not any("running" in name for name in answer.upload.weights)
    kept = unpack(store.get(0))
    assert any("running_mean" in name for name in kept.stats)
    again = ClientContext(
        p.setup, p.server.exchanges()[1], Networks(), client=0, data=p.federation.shard(0)
    )
    run_client(p.method, server, again, store)
    name = next(n for n in kept.stats if n.endswith("num_batches_tracked"))
    assert unpack(store.get(0)).stats[name] == 2 * kept.stats[name]  # the statistics went on
    with InProcess(p.method, p.federation, p.setup) as transport:
        *_, last = Server(p.method, p.setup).run(transport, server)
    assert not last.failures
    start = snapshot(p.method.network(p.server.context(last.exchange)))
    untouched = [n for n in start if n.endswith("running_var")]
    assert all(torch.equal(last.server.weights[n], start[n]) for n in untouched)
    store.close()
