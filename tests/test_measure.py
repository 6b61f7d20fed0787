"""The command's protocols: words, subjects, rows, and labels that stay with their clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from furlong import config, experiment, measure
from furlong.assemble import prepare
from furlong.context import Exchange, Setup
from furlong.data import images as data
from furlong.errors import FurlongError
from furlong.evaluate import fine_tune, semi_supervised, tuning
from furlong.experiment import Run
from furlong.finetune import FederatedTuning, FineTuned, federated_fine_tune, labelled
from furlong.measure import Protocol
from furlong.monitor import Watch
from furlong.payload import pack_tensors, traffic
from furlong.runfolder import RunFolder, load_encoder
from furlong.weights import snapshot
from tests.conftest import tiny

FAST = FederatedTuning(rounds=2, batch_size=8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return experiment.run(tiny(rounds=1, out=str(tmp_path_factory.mktemp("runs") / "run")))


def settings_of(run: Run) -> config.Config:
    return measure.settings_of(run.folder)


# ---------------------------------------------------------------- words


def test_protocols_are_read() -> None:
    found = measure.parse("knn, linear,semi-10:epochs=5:recipe=fcl,federated-1,transfer:mnist,knn")
    assert [p.kind for p in found] == ["knn", "linear", "semi", "federated", "transfer"]
    assert [p.share for p in found] == [1, 1, 0.1, 0.01, 1]
    assert (found[2].options.epochs, found[2].options.recipe) == (5, "fcl")
    assert found[3].options == FederatedTuning()
    own = Protocol.parse("transfer:folder:/a/b:root=/c:images=7")
    assert (own.target, own.options.images, own.options.root) == ("folder:/a/b", 7, "/c")
    assert own.text == "transfer:folder:/a/b:images=7"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kn", "unknown protocol 'kn'. Did you mean 'knn'?"),
        ("semi", "how many percent of the labels, e.g. semi-10"),
        ("federated-0", "how many percent"),
        ("semi-101", "how many percent"),
        ("transfer", "needs a data set"),
        ("knn:mnist", "takes no data set"),
        ("knn:kk=3", "unknown key knn.kk. Did you mean 'k'?"),
        ("semi-10:epochs=many", "epochs is 'many'; it must be a whole number"),
        ("semi-10:epochs=0", "epochs is 0; it must be above 0"),
        ("semi-10:recipe=fcll", "Did you mean 'fcl'?"),
        ("linear:recipe=fcl-10", "recipe 'fcl-10'"),
        ("semi-10:finetune=head", "Did you mean 'head_bn'?"),
        (" , ", "names none"),
    ],
)
def test_mistakes_are_explained(word: str, message: str) -> None:
    with pytest.raises(FurlongError) as caught:
        measure.parse(word)
    assert message in str(caught.value)


# ---------------------------------------------------------------- rows


def test_rows_of_all_protocols(run: Run) -> None:
    words = (
        "knn:k=5,linear:epochs=3,linear-crops:epochs=1,semi-20:epochs=1,federated-20:rounds=1,"
        "transfer:shapes:epochs=1:images=20:test_images=10,quality"
    )
    told: list[tuple[str, int, int]] = []
    rows = measure.evaluate(
        run.folder, settings_of(run), words, tell=lambda *step: told.append(step)
    )
    assert [(r["who"], r["protocol"].split(":")[0]) for r in rows] == [
        ("federated", "knn"),
        ("federated", "linear"),
        ("federated", "linear-crops"),
        ("federated", "semi-20"),
        ("random", "federated-20"),
        ("federated", "federated-20"),
        ("random", "transfer"),
        ("federated", "transfer"),
        ("federated", "quality"),
    ]
    assert [r["labels"] for r in rows] == [1, 1, 1, 0.2, 0.2, 0.2, 1, 1, 0]
    assert all(0 <= r["accuracy"] <= 1 for r in rows[:-1])
    assert rows[0]["settings"] == {"k": 5, "temperature": 0.1, "seed": 0}
    assert rows[1]["settings"]["recipe"] == "default"
    assert rows[3]["settings"]["finetune"] == "full"
    assert rows[4]["settings"]["rounds"] == 1
    assert rows[-1]["effective_rank"] > 1
    assert {"semi-20:epochs=1", "federated-20:rounds=1"} < {text for text, *_ in told}
    assert all(0 <= done <= total for _, done, total in told)
    assert json.loads((run.folder / "evaluations.json").read_text()) == rows


def test_rows_are_merged_by_what_they_say(run: Run) -> None:
    (run.folder / "evaluations.json").unlink(missing_ok=True)
    settings = settings_of(run)
    first = measure.evaluate(run.folder, settings, "knn,quality", random=True)
    assert [(r["who"], r["protocol"]) for r in first] == [
        (w, p) for p in ("knn", "quality") for w in ("federated", "random")
    ]
    measure.evaluate(run.folder, settings, "knn:k=3")
    measure.evaluate(run.folder, settings, "knn")
    kept = RunFolder(run.folder).evaluations()
    assert [r["protocol"] for r in kept] == ["knn", "knn", "quality", "quality", "knn:k=3"]
    measure.evaluate(run.folder, replace(settings, run=replace(settings.run, seed=1)), "knn")
    assert len(RunFolder(run.folder).evaluations()) == 6  # measured with another seed
    (run.folder / "evaluations.json").write_text("{}")
    with pytest.raises(FurlongError, match="move it away"):
        measure.evaluate(run.folder, settings, "knn")
    (run.folder / "evaluations.json").unlink()


def test_another_data_set_has_another_name(run: Run, tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("a", "b"):
            for k in range(6):
                place = tmp_path / "set" / split / label
                place.mkdir(parents=True, exist_ok=True)
                colour = (250 if label == "a" else 5, 10 * k, 0)
                Image.new("RGB", (20, 20), colour).save(place / f"{k}.png")
    settings = measure.settings_of(
        run.folder, {"data": f"folder:{tmp_path / 'set'}", "data.images": "none"}
    )
    (row,) = measure.evaluate(run.folder, settings, "knn:k=1")
    assert row["protocol"] == f"knn:k=1 on folder:{tmp_path / 'set'}"
    assert row["accuracy"] == 1  # resized to the 16 pixels of the encoder
    (run.folder / "evaluations.json").unlink()


def test_semi_is_that_of_the_library(run: Run) -> None:
    settings = settings_of(run)
    (row,) = measure.evaluate(run.folder, settings, "semi-20:recipe=fcl:epochs=2")
    prepared = prepare(settings)
    assert prepared.test is not None
    plan = tuning("fcl-10", epochs=2)
    expected = semi_supervised(
        load_encoder(run.folder), prepared.train, prepared.test, 0.2,
        plan=plan, augment=prepared.setup.augment, seed=0,
    )  # fmt: skip
    assert row["accuracy"] == expected.accuracy
    assert row["labelled"] == expected.labelled
    assert row["settings"]["recipe"] == "fcl-10"


def test_transfer_is_that_of_the_library(run: Run) -> None:
    rows = measure.evaluate(
        run.folder, settings_of(run), "transfer:shapes:epochs=1:images=30:test_images=20"
    )
    target = [
        data.load("shapes", split, image_size=16, limit=n, seed=0)
        for split, n in (("train", 30), ("test", 20))
    ]
    augment = prepare(settings_of(run)).setup.augment
    found = fine_tune(load_encoder(run.folder), *target, tuning("fedu", epochs=1), augment=augment)
    assert [r["who"] for r in rows] == ["random", "federated"]
    assert rows[1]["accuracy"] == found.accuracy
    assert rows[1]["settings"]["images"] == 30


def test_what_is_wrong_shows_before_anything_is_trained(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_: Any, **__: Any) -> None:
        raise AssertionError("trained before the mistake was found")

    monkeypatch.setattr(measure, "semi_supervised", trained)
    for last, message in (
        ("semi-1", "less than one for each of its 10 classes"),
        ("transfer:mnist:root=/nowhere", "/nowhere does not exist"),
    ):
        with pytest.raises(FurlongError, match=message):
            measure.evaluate(run.folder, settings_of(run), f"semi-20,{last}")


# ---------------------------------------------------------------- subjects


def test_a_checkpoint_is_measured_and_named(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(tiny(rounds=3, out=str(out)), show=interrupt)
    said: list[str] = []
    rows = measure.evaluate(out, measure.settings_of(out), "knn", say=said.append)
    assert [r["who"] for r in rows] == ["federated, exchange 1 of 3"]
    assert any("after exchange 1 of 3" in text for text in said)
    run = experiment.resume(out)
    later = measure.evaluate(out, measure.settings_of(out), "knn")
    assert [r["who"] for r in later] == ["federated"]
    assert later[0]["accuracy"] == run.accuracy("knn")
    assert len(RunFolder(out).evaluations()) == 2


def test_a_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(tiny().toml())
    with pytest.raises(FurlongError, match="no checkpoint yet"):
        measure.evaluate(tmp_path, measure.settings_of(tmp_path), "knn")


def exported(run: Run, path: Path, **changes: str) -> Path:
    """What ``furlong export --to safetensors`` writes."""
    about = json.loads((run.folder / "encoder.json").read_text())
    metadata = {key: str(value) for key, value in about.items()} | changes
    path.write_bytes(bytes(pack_tensors(snapshot(run.encoder), metadata)))
    return path


def test_an_exported_encoder_gives_the_same_numbers(run: Run, tmp_path: Path) -> None:
    place = exported(run, tmp_path / "mine.safetensors")
    limits = {"data.images": 72, "data.test_images": 40, "workers": 1}
    rows = measure.evaluate(place, measure.settings_of(place, limits), "knn,linear")
    assert [r["who"] for r in rows] == ["encoder"] * 2
    assert [r["accuracy"] for r in rows] == [run.accuracy("knn"), run.accuracy("linear")]
    assert list(tmp_path.iterdir()) == [place]
    other = exported(run, tmp_path / "other.safetensors", data="folder:mine")
    with pytest.raises(FurlongError, match=r"say which images, e\.g\. --data folder:mine"):
        measure.settings_of(other)


def test_the_encoder_survives_all(run: Run) -> None:
    subject = measure.subject(run.folder, settings_of(run), lambda _: None)
    bench = measure.Bench(subject, settings_of(run), split=True)
    before = snapshot(subject.encoder)
    for word in ("semi-20:epochs=1", "federated-20:rounds=1", "quality", "linear-crops:epochs=1"):
        job = measure._job(Protocol.parse(word), bench, False)
        assert list(job(lambda *_: None))
    assert all(torch.equal(before[n], t) for n, t in snapshot(subject.encoder).items())
    assert not any(part.training for part in subject.encoder.modules())


# ---------------------------------------------------------------- federated fine-tuning


def test_clients_label_their_own_images(prepared: Callable[..., Any]) -> None:
    p = prepared(partition="classes:4")
    chosen = labelled(p.federation, 0.3, seed=0)
    labels = p.train.labels
    for client, rows in p.federation.rows.items():
        own = chosen.rows[client]
        assert set(own.tolist()) <= set(rows.tolist())
        counts = labels[rows].bincount(minlength=10)
        expected = [-(-3 * n // 10) for n in counts.tolist()]  # exact ⌈0.3·n⌉, 1 if present
        assert labels[own].bincount(minlength=10).tolist() == expected
    again = labelled(p.federation, 0.3, seed=0)
    assert all(torch.equal(again.rows[k], chosen.rows[k]) for k in chosen.rows)
    other = labelled(p.federation, 0.3, seed=1)
    assert any(not torch.equal(other.rows[k], chosen.rows[k]) for k in chosen.rows)


def test_one_label_is_not_enough(prepared: Callable[..., Any]) -> None:
    p = prepared()
    alone = replace(p.federation, rows={0: (p.train.labels == 3).nonzero()[:5, 0]})
    with pytest.raises(FurlongError, match="labels of client 0 is one image"):
        labelled(alone, 0.01, seed=0)


def test_federated_fine_tuning_starts_from_the_encoder(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared()
    encoder = p.server.method.encoder(p.server.init(), p.server.context(Exchange(round=0)))
    first: list[dict[str, Tensor]] = []
    plain = FineTuned.local_update

    def note(self: FineTuned, state: None, down: Any, ctx: Any) -> Any:
        first.append(down.weights)
        assert ctx.data.images.labels is not None
        return plain(self, state, down, ctx)

    monkeypatch.setattr(FineTuned, "local_update", note)
    before = snapshot(encoder)
    steps: list[tuple[int, int]] = []
    found = federated_fine_tune(encoder, p, 0.5, FAST, lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]
    assert all(torch.equal(first[0][f"backbone.{name}"], t) for name, t in before.items())
    assert all(torch.equal(before[name], t) for name, t in snapshot(encoder).items())
    assert found == federated_fine_tune(encoder, p, 0.5, FAST)
    assert 36 <= found.labelled <= 50


def test_only_weights_leave_the_client(prepared: Callable[..., Any]) -> None:
    p = prepared()
    setup: Setup = replace(p.setup, classes=10)
    server = replace(p.server, method=FineTuned(), setup=setup)
    state = server.init()
    up = traffic(server.method.expected(state, 0, server.context(Exchange(round=0))))
    assert (up.features, up.scalars) == (0, 0)


def test_head_and_encoder_have_their_own_rates(prepared: Callable[..., Any]) -> None:
    p = prepared()
    encoder = p.server.method.encoder(p.server.init(), p.server.context(Exchange(round=0)))
    moved: dict[str, float] = {}
    for name, plan in (
        ("none", replace(FAST, rounds=1, lr=1e-30, head_lr=1e-30)),
        ("head", replace(FAST, rounds=1, lr=1e-30, head_lr=0.5)),
    ):
        moved[name] = federated_fine_tune(encoder, p, 1.0, plan).train_accuracy
    assert moved["head"] > moved["none"]
    deep = federated_fine_tune(encoder, p, 0.5, replace(FAST, rounds=1, head="mlp"))
    assert 0 <= deep.accuracy <= 1


# ---------------------------------------------------------------- the monitor


class Constant(nn.Module):
    """The same features for every image: a collapse."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), 8)


def test_collapse_is_said_once(prepared: Callable[..., Any]) -> None:
    said: list[str] = []
    watch = Watch(prepared(), said.append)
    fine = watch.measure({"federated": nn.Flatten()})
    assert said == []
    assert fine["effective_rank"] > 2  # type: ignore[operator]
    for _ in range(3):
        found = watch.measure({"federated": nn.Flatten(), "other": Constant()})
    assert len(said) == 1
    assert "collapsed (other): effective rank 1.0, spread 0.000" in said[0]
    assert found["effective_rank"] == pytest.approx((fine["effective_rank"] + 1) / 2)  # type: ignore[operator]


def test_what_cannot_be_measured_does_not_end_a_run(prepared: Callable[..., Any]) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) * torch.nan

    said: list[str] = []
    assert Watch(prepared(), said.append).measure({"federated": Broken()}) == {}
    assert "NaN" in said[0]


def test_the_monitor_needs_no_labels(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for k in range(30):
        colour = (8 * k, 255 - 8 * k, (40 * k) % 255)
        Image.new("RGB", (16, 16), colour).save(tmp_path / "images" / f"{k}.png")
    settings = tiny(
        data=f"folder:{tmp_path / 'images'}", rounds=1, out=str(tmp_path / "run"),
        **{"data.images": "none", "data.test_images": "none", "data.image_size": "none"},
    )  # fmt: skip
    run = experiment.run(settings)
    (line,) = [json.loads(x) for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert line["knn"] is None
    assert line["effective_rank"] > 1
    assert line["uniformity"] < 0
    (row,) = measure.evaluate(run.folder, settings_of(run), "quality")
    assert row["effective_rank"] > 1
    with pytest.raises(FurlongError, match=r"has no labels.*'quality' needs none"):
        measure.evaluate(run.folder, settings_of(run), "quality,knn")
