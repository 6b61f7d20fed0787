"""A run is attacked from its folder: what was sent is replayed, numbers and a page are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call, tiny

from furlong.audit import auditing, gradients, sharing
from furlong.audit.replay import replay
from furlong.core.payload import flatten
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.reports import audit as pages
from furlong.runs.config import Config
from furlong.runs.loop import run
from furlong.runs.prepare import Prepared, prepare
from furlong.runs.record import RunRecord

SIZES = {"data.test_images": 120, "evaluate.probe": "none"}


def trained(folder: Path, method: str = "fedsimclr", **options: Any) -> Path:
    settings = tiny(method, out=str(folder), **{**SIZES, **options})
    return run(settings).folder


def again(folder: Path) -> Prepared:
    settings: Config = RunRecord(folder).config()
    return prepare(replace(settings, run=replace(settings.run, out=None)))


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run")


def test_a_replay_gives_what_was_sent(finished: Path) -> None:
    """Bit for bit what a whole run makes client 1 send in the last round."""
    p, seen = again(finished), []
    p.server.watch = lambda exchange, report: seen.append((exchange.index, report))
    with p.engine() as engine:
        assert isinstance(engine, InProcess)
        for _ in p.server.run(engine, p.server.init()):
            pass
    (truth,) = (r.upload for index, r in seen if index == 1 and r.client == 1)
    sent = replay(again(finished), RunRecord(finished), 1, quiet, quiet)
    assert (sent.client, sent.exchange.round) == (1, 1)
    assert "to the last bit" in sent.proof
    assert all(
        torch.equal(a, b)
        for a, b in zip(flatten(truth)[0].values(), flatten(sent.upload)[0].values(), strict=True)
    )


def test_a_replay_that_is_another_run_is_refused(finished: Path) -> None:
    p = again(finished)
    p.server.setup = replace(p.server.setup, batch_size=7)
    with pytest.raises(FurlongError, match="something else than the run"):
        replay(p, RunRecord(finished), None, quiet, quiet)
    with pytest.raises(FurlongError, match="client 9"):
        replay(again(finished), RunRecord(finished), 9, quiet, quiet)


def test_audit_from_the_shell(finished: Path, furlong_: Call, monkeypatch: Any) -> None:
    monkeypatch.setattr(gradients, "STEPS", 2)
    monkeypatch.setattr(gradients, "UPDATES", 2)
    monkeypatch.setattr("furlong.audit.membership.VIEWS", 4)
    printed = furlong_("audit", finished, "--images", "20", "--json")
    (found,) = printed.json
    assert found == json.loads((finished / "audit.json").read_text())
    rows = {(row["name"], row["target"]) for row in found["findings"]}
    assert ("views", "published encoder") in rows
    assert ("together", "upload of client 0") in rows
    assert ("gradient", "update of 2 images") in rows
    assert [each["target"] for each in found["not_tried"]] == ["features"]
    same = auditing.audit(finished, auditing.Ask(20, only=("published",))).report()
    assert same["findings"] == found["findings"][:5]  # the same seed, the same numbers
    page = (finished / "audit.html").read_text()
    assert "data:image" not in page
    assert "What remains unknown" in page
    assert all(text.split(".")[0] in page for text in pages.UNKNOWN)
    with_pictures = furlong_(
        "audit", finished, "--images", "20", "--only", "gradient", "--pictures"
    )
    assert with_pictures.code == 0, with_pictures.err
    page = (finished / "audit.html").read_text()
    assert "This page holds images of the clients" in page
    assert page.count("data:image/png") == 16
    assert not (finished / "server").exists()


def test_what_cannot_be_audited_is_refused(finished: Path, furlong_: Call) -> None:
    for words, reason in (
        (("--only", "uploads"), "upload"),
        (("--data.images", "10"), "images that it was trained on"),
        (("--images", "3"), "20 or more"),
    ):
        refused = furlong_("audit", finished, *words)
        assert refused.code == 2
        assert reason in refused.err
    missing = furlong_("audit", finished / "nowhere", "--data", "shapes")
    assert "is not a run folder" in missing.err


def test_what_was_sent_under_secret_noise_is_not_made_again(tmp_path: Path) -> None:
    """Its secret is gone: a replay would be another run. What is published is attacked."""
    given = {"model.early_norm": "all_gn", "privacy.max_ratio": "inf", "rounds": 1}
    private = {"privacy.level": "record", "privacy.noise": 1.0, **given}
    ask = auditing.Ask(images=20)
    made = auditing.audit(trained(tmp_path / "run", "fedrot", **private), ask)
    assert {finding.attack.target for finding in made.findings} == {auditing.PUBLISHED}
    assert {row["target"] for row in made.not_tried} == {"upload", "features", "gradient"}


def test_without_images_that_were_not_seen_there_is_no_audit(tmp_path: Path) -> None:
    with pytest.raises(FurlongError, match="has not seen"):
        auditing.audit(trained(tmp_path / "run", **{"data.test_images": 30}), auditing.Ask())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "second"),
    [
        ("fcl", {"method.encoding": "none"}, "inversion"),
        ("fcl", {}, "inversion"),
        ("fedca", {"method.dict_upload": "full"}, "inversion"),
        ("mfcl", {}, "decoding"),
        ("mfcl", {"method.refresh": "per_epoch"}, "decoding"),
    ],
)
def test_features_of_images_are_attacked(
    method: str, options: dict[str, Any], second: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sharing, "STEPS", 5)
    folder = trained(tmp_path / "run", method, **options)
    found = auditing.audit(folder, auditing.Ask(20, only=("features", "gradient")))
    assert [each.attack.name for each in found.findings] == ["linking", second]
    assert "gradient" in {each["target"] for each in found.not_tried}
    assert found.about["sent"]["proof"]


@pytest.mark.slow
def test_bounds_and_files_are_audited_as_far_as_they_go(tmp_path: Path, furlong_: Call) -> None:
    folder = trained(tmp_path / "run", bound="pooled")
    found = auditing.audit(folder, auditing.Ask(40))
    assert {each.attack.target for each in found.findings} == {"published encoder"}
    assert {each["target"] for each in found.not_tried} == {"upload", "features", "gradient"}
    assert furlong_("export", folder, "--to", "safetensors", "--out", "it.safetensors").code == 0
    few = ("--data.images", "72", "--data.image-size", "16")
    printed = furlong_("audit", "it.safetensors", "--images", "40", *few, "--json")
    assert printed.code == 0, printed.err
    assert "taken on trust" in printed.json[0]["note"]


def test_a_loss_of_one_network_is_attacked_whatever_trains_it(prepared: Any) -> None:
    """FedSimSiam's local training is its own; its loss needs one network and images alone."""
    p = prepared("fedsimsiam")
    assert auditing._network(p, p.server.init()) is not None
