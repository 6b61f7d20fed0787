"""Small federations for all tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from furlong.methods import METHODS
from furlong.runs.config import Config, from_tree
from furlong.runs.prepare import Prepared, prepare
from furlong.settings import facts

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


# Tests run side by side, on images so small that a second thread costs more than it gives: torch's
# threads wait for each other in a loop. Programs that tests start take it from the environment.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return GOLDEN


EXTRAS: dict[str, dict[str, Any]] = {  # what a method needs to be run at all, or to be fast
    "fedsimsiam": {"method.predictor_steps": 2},
    "furlong": {"model.init": "random", "server.rule": "mean"},  # else minutes of drawn scenes
    "fedca": {
        "data.public": "shapes",
        "data.public_images": 100,
        "method.align_epochs": 1,
        "method.align_images": 16,
        "method.dictionary": 12,
    },
    "fcl": {"method.bank": 16, "method.neighbours": 3},
    "fedswav": {"method.prototypes": 6, "method.queue": 16, "method.queue_from": 0},
    "orchestra": {
        "method.memory": 16,
        "method.local_clusters": 4,
        "method.global_clusters": 8,
        "method.server_steps": 5,
    },
    "ssd": {"method.projection_head": "mlp:32:192"},
    "mfcl": {"method.server_epochs": 2, "method.pairs_per_client": 8, "method.server_lr": 0.5},
}


SMALL = {"projection_head": "small_proj", "prediction_head": "small_pred", "decoder_width": 64}


def pinned(method: str, small: bool = True) -> dict[str, Any]:
    """Settings that do not follow what is usual for a method: its class's own, and plain SGD."""
    row = METHODS.get(method)
    given: dict[str, Any] = {"optimiser.name": "sgd"}
    if row is None:  # a user's own
        return given
    fields = {fact.name: fact.default for fact in facts(row.cls)}
    heads = {key: value for key, value in SMALL.items() if small and key in fields}
    usual = [name.removeprefix("method.") for name in row.cls.usual if name.startswith("method.")]
    usual += [name for name in row.cls.usual_small if name not in SMALL]
    own = {**{name: fields[name] for name in usual}, **heads}
    if "data.augment" in row.cls.usual:
        given["data.augment"] = "shapes"
    return given | {f"method.{n}": v for n, v in own.items() if n not in row.fields}


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
        "train.server_threads": 1,
    }
    small = options.get("encoder", options.get("model.encoder", "small")) == "small"
    given = {**base, **pinned(method, small), **EXTRAS.get(method, {}), **options}
    return from_tree({}, given, "test")


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


# ---------------------------------------------------------------- the command line


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str  # in one line

    @property
    def json(self) -> Any:
        """What it printed, read."""
        return json.loads(self.out)


Call = Callable[..., Result]


@pytest.fixture
def furlong_(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Call ``furlong WORDS`` in this process, in an empty directory."""
    from furlong import cli
    from furlong.cli import common
    from furlong.engines import pool

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(common, "LOG_EVERY", float("inf"))  # on a slow machine too

    def call(*words: object) -> Result:
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Result(code, captured.out, " ".join(captured.err.replace("│", " ").split()))

    return call
