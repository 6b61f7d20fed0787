"""--init scenes: learnt once, kept, the same bits again, and only where something is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Call, tiny

import furlong
from furlong.data.augment import preset
from furlong.data.scenes import scenes
from furlong.errors import FurlongError
from furlong.methods.furlong import Furlong
from furlong.nn.encoders import build_encoder
from furlong.runs import drawn
from furlong.runs.initial import fitted
from furlong.runs.prepare import prepare

SMALL = {
    "method": "fedsimclr", "clients": 2, "partition": "iid", "rounds": 2, "data.images": 40,
    "data.test_images": 20, "data.image_size": 16, "evaluate.probe": "none", "run.save_every": 1,
    "workers": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(drawn, "AT_ONCE", 64)
    return tmp_path / "cache" / "furlong"


def test_learnt_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = prepare(tiny(init="scenes:2"), tell=said.append)
    assert any("learns from drawn scenes" in text for text in said)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(drawn, "_learn", None)  # whoever learns again fails
    again = prepare(tiny(init="scenes:2"), tell=said.append)
    assert first.initial is not None
    assert again.initial is not None
    assert first.initial.about() == again.initial.about()
    assert {row.state for row in again.initial.rows} == {"matched"}
    for other in ({"run.seed": 1}, {"init": "scenes:3"}, {"train.server_threads": 2}):
        with pytest.raises(TypeError):  # these are other weights
            prepare(tiny(**{"init": "scenes:2", **other}), tell=said.append)


def test_the_same_bits_without_the_cache(cache: Path) -> None:
    found = []
    for _ in range(2):
        p = prepare(tiny(init="scenes:3"), tell=lambda _: None)
        assert p.initial is not None
        found.append(p.initial.about()["sha256"])
        for file in cache.iterdir():
            file.unlink()
    assert found[0] == found[1]


def test_a_cache_that_cannot_be_written_is_only_told(cache: Path) -> None:
    cache.parent.write_text("a file where a folder should be")
    said: list[str] = []
    prepare(tiny(init="scenes:1"), tell=said.append)
    assert any("cannot keep the weights" in text for text in said)


def test_nothing_is_learnt_where_nothing_is_trained(
    furlong_: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "_learn", None)
    options = [str(w) for k, v in SMALL.items() for w in (f"--{k.replace('_', '-')}", v)]
    assert furlong_("cost", "--init", "scenes", *options).code == 0


def test_a_run_begins_with_them_and_resumes_without_the_cache(tmp_path: Path, cache: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "init": "scenes:2", "out": str(tmp_path / "run")}
    run = furlong.run(**settings)
    results = json.loads((run.folder / "summary.json").read_text())["results"]
    assert {row["who"] for row in results} == {"initial", "federated"}
    for file in cache.iterdir():
        file.unlink()
    whole = json.loads((run.folder / "digests.json").read_text())
    for later in sorted((run.folder / "checkpoints").iterdir())[1:]:
        later.rename(tmp_path / later.name)
    furlong.resume(run.folder)
    assert json.loads((run.folder / "digests.json").read_text()) == whole


def test_those_of_the_small_encoder_come_with_the_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "_learn", None)  # whoever learns fails
    found = []
    for options in ({}, {"run.seed": 1, "train.server_threads": 2}):
        p = prepare(tiny(init="scenes", **options), tell=lambda _: None)
        assert p.initial is not None
        assert {row.state for row in p.initial.rows} == {"matched"}
        found.append(p.initial.about()["sha256"])
    assert found[0] == found[1]
    assert not cache.exists()
    ready = drawn.drawn(p.setup, "scenes", lambda _: None)
    grey = fitted(build_encoder("small", 1, 16), ready, "scenes")
    assert [row.state for row in grey.rows].count("adapted") == 1
    for other in ({"model.encoder": "cnn5"}, {"model.early_norm": "gn"}):
        with pytest.raises(TypeError):
            prepare(tiny(init="scenes", **other), tell=lambda _: None)


def test_they_know_a_scene_again() -> None:
    """Of two views of each of 128 new scenes, far more are found by them than by random weights."""
    pixels = scenes(128, 32, 3, torch.Generator().manual_seed(7))
    shares = []
    for init in ("random", "scenes"):
        p = prepare(tiny(init=init, **{"data.image_size": 32}), tell=lambda _: None)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            encoder = build_encoder("small", 3, 32)
            if p.initial is not None:
                encoder.load_state_dict(p.initial.weights)
            views = preset("moco_cifar", 32).views(pixels, 2)
        with torch.no_grad():
            one, two = (F.normalize(encoder.eval()(view)) for view in views)
        shares.append(float(((one @ two.T).argmax(1) == torch.arange(128)).float().mean()))
    assert shares[1] > 2 * shares[0]


def test_random_is_the_same_as_nothing() -> None:
    plain, named = prepare(tiny()), prepare(tiny(init="random"))
    assert named.initial is None
    assert named.setup.given is None
    assert plain.setup == named.setup


@pytest.mark.parametrize("wrong", ["scenes:", "scenes:0", "scenes:x", "scenes:-3"])
def test_wrong_numbers_of_steps(wrong: str) -> None:
    if wrong == "scenes:":
        assert drawn.steps_of(wrong) == drawn.STEPS
        return
    with pytest.raises(FurlongError, match="from 1 to 1,000,000"):
        drawn.steps_of(wrong)


def test_what_is_learnt_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    real = Furlong.loss

    def watched(self: Furlong, net: Any, batch: Any) -> torch.Tensor:
        loss = real(self, net, batch)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(Furlong, "loss", watched)
    prepare(tiny(init="scenes:30"), tell=lambda _: None)
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.3
