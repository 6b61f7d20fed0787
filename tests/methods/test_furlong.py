"""Furlong's own recipe: a client's round by hand, and what it is usually run with."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from by_hand import assert_round
from torch import Tensor

from furlong.core.context import Batch
from furlong.runs.config import from_tree


def test_a_round_by_hand(prepared: Any) -> None:
    p = prepared("furlong", **{"server.rule": "mean", "method.views": 3})

    def loss_of(net: Any, batch: Batch) -> Tensor:
        views = [F.normalize(z, dim=1) for z in net(torch.cat(batch.views(3))).chunk(3)]
        terms = []
        for v, w in permutations(range(3), 2):
            for i, anchor in enumerate(views[v]):
                rest = torch.cat([torch.cat([z[:i], z[i + 1 :]]) for z in views])
                logits = torch.cat([anchor @ views[w][i : i + 1].T, anchor @ rest.T]) / 0.5
                terms.append(-logits.log_softmax(0)[0])
        return torch.stack(terms).mean()

    assert_round(p, loss_of, batch_size=12)


def test_who_names_only_the_method_gets_the_recipe() -> None:
    settings = from_tree({}, {"method": "furlong"}, "test")
    assert settings.model.init == "scenes"
    assert (settings.server.rule, settings.server.momentum) == ("momentum", 0.6)
    assert settings.optimiser.schedule == "constant"
    assert settings.method["views"] == 4
    plain = from_tree({}, {"method": "furlong", "init": "random", "server.rule": "mean"}, "test")
    assert (plain.model.init, plain.server.rule) == ("random", "mean")
