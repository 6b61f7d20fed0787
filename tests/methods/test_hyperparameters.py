"""Hyper-parameters: every one is explained, and values that cannot work are refused."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.runs.config import from_tree
from furlong.settings import facts


@pytest.mark.parametrize("name", METHODS)
def test_every_field_says_what_it_is_for(name: str) -> None:
    for fact in facts(METHODS[name].cls):
        assert fact.help.endswith("."), fact.name


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("fedsimclr", "temperature", 0),
        ("fedsimclr", "temperature", nan),
        ("fedsimclr", "head_prox_mu", -1),
        ("fedu", "decay", 1.5),
        ("fedu", "threshold", -1),
        ("fedema", "tau", 0),
        ("fedema", "scale", nan),
        ("fedbyol", "decay", nan),
        ("fedbarlow", "off_diagonal", -1),
        ("fedx", "global_temperature", 0),
        ("fedmoco", "bank", 0),
        ("moon", "mu", inf),
        ("fedavg", "mu", -0.1),
        ("fedae", "decoder_width", 0),
        ("fedae", "decoder_width", 12),
        ("fedmae", "decoder_width", 48),
        ("fedmae", "decoder_depth", 0),
        ("fedmae", "mask", 1.0),
        ("fedmae", "mask", 0.0),
        ("fedswav", "prototypes", 0),
        ("fedswav", "epsilon", 0.0),
        ("fedswav", "temperature", nan),
        ("fedswav", "sinkhorn_iterations", 0),
        ("fedswav", "prototypes", 1),
        ("fedswav", "queue", -1),
        ("fedswav", "queue_from", -1),
        ("fedswav", "freeze_epochs", -1),
        ("feddc", "heads", 0),
        ("feddc", "prototypes", 1),
        ("feddc", "images_per_prototype", 0),
        ("feddc", "temperature", 0.0),
        ("feddc", "iterations", 0),
        ("orchestra", "temperature", 0.0),
        ("orchestra", "decay", 1.1),
        ("orchestra", "memory", 15),
        ("orchestra", "local_clusters", 0),
        ("orchestra", "global_clusters", 0),
        ("orchestra", "server_steps", 0),
    ],
)
def test_fields_that_cannot_work_are_refused(method: str, field: str, value: Any) -> None:
    with pytest.raises(FurlongError, match=rf"method\.{field} is {value}"):
        METHODS[method].cls(**{field: value})
    with pytest.raises(FurlongError, match=rf"method\.{field} is {value}"):
        from_tree({}, {"method": method, f"method.{field}": value}, "test")
