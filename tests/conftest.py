"""Small federations for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from furlong.assemble import Prepared, prepare
from furlong.config import Config, from_tree

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return GOLDEN


def tiny(method: str = "fedsimclr", **options: Any) -> Config:
    """Three clients with 24 small images each, two rounds."""
    base = {
        "method": method,
        "data.images": 72,
        "data.test_images": 40,
        "data.image_size": 16,
        "partition": "iid",
        "clients": 3,
        "rounds": 2,
        "batch_size": 8,
        "workers": 1,
    }
    return from_tree({}, {**base, **options}, "test")


@pytest.fixture
def tiny_config() -> Callable[..., Config]:
    return tiny


@pytest.fixture(scope="session")
def prepared() -> Callable[..., Prepared]:
    """``prepare`` of a tiny configuration, with the images read once."""
    cache: dict[str, Prepared] = {}

    def make(method: str = "fedsimclr", **options: Any) -> Prepared:
        key = json.dumps([method, options], sort_keys=True)
        if key not in cache:
            cache[key] = prepare(tiny(method, **options))
        return replace(cache[key])

    return make
