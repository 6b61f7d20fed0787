"""The command's protocols: words, subjects, rows, and labels that stay with their clients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny
from PIL import Image
from torch import Tensor, nn

from furlong.core.context import Exchange, Setup
from furlong.core.federation import Federation
from furlong.core.payload import pack_tensors, traffic
from furlong.core.weights import snapshot
from furlong.data import images as data
from furlong.errors import FurlongError
from furlong.evaluation import tuning as tuning_module
from furlong.evaluation.knn import KNN
from furlong.evaluation.protocol import Encoded, Progress, silent, stratified
from furlong.evaluation.quality import QUALITY
from furlong.evaluation.tuning import Transfer, fine_tune, tuning
from furlong.methods.fedu import FedU
from furlong.runs import config, evaluate, loop
from furlong.runs.finetune import ClientImages, Federated, TwoRates, labelled
from furlong.runs.folder import RunFolder
from furlong.runs.loop import Run
from furlong.runs.observers import Event, Monitor
from furlong.runs.prepare import Prepared, prepare
from furlong.runs.results import protocols
from furlong.runs.saved_encoder import load_encoder

FAST = Federated(rounds=2, batch_size=8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return loop.run(tiny(rounds=1, out=str(tmp_path_factory.mktemp("runs") / "run")))


def settings_of(run: Run) -> config.Config:
    return evaluate.settings_of(run.folder)


# ---------------------------------------------------------------- words


def parse(words: str) -> list[Any]:
    return list(protocols(config.EvaluateSettings(), words).values())


def test_protocols_are_read() -> None:
    found = parse("knn, linear,semi-10:epochs=5:recipe=fcl,federated-1,transfer:mnist,knn")
    assert [p.kind for p in found] == ["knn", "linear", "semi", "federated", "transfer"]
    assert [p.labels for p in found] == [1, 1, 0.1, 0.01, 1]
    assert (found[2].epochs, found[2].recipe) == (5, "fcl")
    assert found[3] == Federated(labels=0.01)
    asked = protocols(config.EvaluateSettings(), "transfer:folder:/a/b:root=/c:images=7")
    own = asked["transfer:folder:/a/b:images=7"]
    assert own == Transfer(data="folder:/a/b", root="/c", images=7)


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
        ("semi-10:labels=0.5", "unknown key semi-10.labels"),
        ("semi-10:epochs=many", "epochs is 'many'; it must be a whole number"),
        ("semi-10:epochs=0", "epochs is 0; it must be above 0"),
        ("semi-10:recipe=fcll", "Did you mean 'fcl'?"),
        ("linear:recipe=fcl-10", "recipe 'fcl-10'"),
        ("semi-10:finetune=head", "Did you mean 'head_bn'?"),
        ("knn,linear:lr=nan", "'linear:lr=nan': linear.lr is nan; it must be above 0 and finite"),
        ("linear:lr=inf", "lr is inf"),
        ("knn:temperature=nan", "temperature is nan"),
        ("federated-10:momentum=1", "momentum is 1.0; it must be at least 0 and below 1"),
        ("semi-10:batch_size=1", "'semi-10:batch_size=1': semi-10.batch_size is 1"),
        ("semi-10:recipe=fcl:batch_size=1", "batch_size is 1; it must be at least 2"),
        ("transfer:mnist:batch_size=1", "batch_size is 1; it must be at least 2"),
        ("federated-10:batch_size=1", "batch_size is 1; it must be at least 2"),
        ("transfer:folder:/a,b", "unknown protocol 'b'. Valid:"),
        ("transfer:folder:/a,b", "cannot hold ',' or '=': make a link"),
        ("transfer:folder:/a=b", "cannot hold ',' or '=': make a link"),
        (" , ", "names none"),
    ],
)
def test_mistakes_are_explained(word: str, message: str) -> None:
    with pytest.raises(FurlongError) as caught:
        parse(word)
    assert message in str(caught.value)


def test_values_at_the_edge_are_taken() -> None:
    words = "federated-10:momentum=0:batch_size=2,linear:batch_size=1,transfer:folder:/a:b"
    one, _, other = parse(words)
    assert (one.momentum, other.data) == (0, "folder:/a:b")


# ---------------------------------------------------------------- rows


def test_rows_of_all_protocols(run: Run) -> None:
    words = (
        "knn:k=5,linear:epochs=3,linear-crops:epochs=1,semi-20:epochs=1,federated-30:rounds=1,"
        "transfer:shapes:epochs=1:images=20:test_images=10,quality"
    )
    told: list[tuple[str, int, int]] = []
    rows = evaluate.evaluate(
        run.folder, settings_of(run), words, tell=lambda *step: told.append(step)
    )
    assert [(r["who"], r["protocol"].split(":")[0]) for r in rows] == [
        ("federated", "knn"),
        ("federated", "linear"),
        ("federated", "linear-crops"),
        ("federated", "semi-20"),
        ("random", "federated-30"),
        ("federated", "federated-30"),
        ("random", "transfer"),
        ("federated", "transfer"),
        ("federated", "quality"),
    ]
    assert [r["labels"] for r in rows] == [1, 1, 1, 0.2, 0.3, 0.3, 1, 1, 0]
    assert all(0 <= r["accuracy"] <= 1 for r in rows[:-1])
    assert rows[0]["settings"] == {"k": 5, "temperature": 0.1, "seed": 0}
    assert rows[1]["settings"]["recipe"] == "default"
    assert rows[3]["settings"]["finetune"] == "full"
    assert rows[4]["settings"]["rounds"] == 1
    assert rows[-1]["effective_rank"] > 1
    assert {"semi-20:epochs=1", "federated-30:rounds=1"} < {text for text, *_ in told}
    assert all(0 <= done <= total for _, done, total in told)
    assert json.loads((run.folder / "evaluations.json").read_text()) == rows


def test_rows_are_merged_by_what_they_say(run: Run) -> None:
    (run.folder / "evaluations.json").unlink(missing_ok=True)
    settings = settings_of(run)
    first = evaluate.evaluate(run.folder, settings, "knn,quality", random=True)
    assert [(r["who"], r["protocol"]) for r in first] == [
        (w, p) for p in ("knn", "quality") for w in ("federated", "random")
    ]
    evaluate.evaluate(run.folder, settings, "knn:k=3")
    evaluate.evaluate(run.folder, settings, "knn")
    kept = RunFolder(run.folder).record.evaluations
    assert [r["protocol"] for r in kept] == ["knn", "knn", "quality", "quality", "knn:k=3"]
    evaluate.evaluate(run.folder, replace(settings, run=replace(settings.run, seed=1)), "knn")
    assert len(RunFolder(run.folder).record.evaluations) == 6  # measured with another seed
    (run.folder / "evaluations.json").write_text("{}")
    with pytest.raises(FurlongError, match="move it away"):
        evaluate.evaluate(run.folder, settings, "knn")
    (run.folder / "evaluations.json").unlink()


@pytest.mark.parametrize(
    ("word", "changes", "told"),
    [
        ("knn", {}, {}),
        ("knn", {"evaluate.k": 1}, {"evaluate.k": 1}),
        ("knn", {"data.test_images": 10}, {"data.test_images": 10}),
        ("knn", {"data.images": 30, "seed": 7}, {"data.images": 30, "run.seed": 7}),
        ("knn", {"partition": "classes:2", "evaluate.probe": "moco"}, {}),  # plays no part
        ("linear:epochs=1", {"evaluate.probe": "fedu"}, {"evaluate.probe": "fedu"}),
        ("quality", {"data.images": 30, "data.test_images": 9}, {"data.images": 30}),
        ("federated-50:rounds=1", {"clients": 2}, {"data.clients": 2}),
        ("federated-50:rounds=1", {"partition": "classes:4"}, {"data.partition": "classes:4"}),
        ("transfer:shapes:epochs=1:images=9", {"data.images": 30, "seed": 7}, {"run.seed": 7}),
    ],
)
def test_rows_say_what_differs_from_the_run(
    run: Run, word: str, changes: dict[str, Any], told: dict[str, Any]
) -> None:
    rows = evaluate.evaluate(run.folder, evaluate.settings_of(run.folder, changes), word)
    (run.folder / "evaluations.json").unlink()
    for row in rows:
        assert {k: v for k, v in row["settings"].items() if "." in k} == told


def test_nothing_that_is_not_a_number_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNN, "measure", lambda *_: {"accuracy": float("nan")})
    with pytest.raises(FurlongError, match="knn of federated: accuracy is nan"):
        evaluate.evaluate(run.folder, settings_of(run), "knn")
    assert not (run.folder / "evaluations.json").exists()


# ---------------------------------------------------------------- which images


def draw(folder: Path, sites: tuple[str, ...] = ("",), per_class: int = 30) -> Path:
    """Single-coloured images 16×16 of two classes: every one is another colour."""
    number = 0
    for site in sites:
        for label in ("a", "b"):
            place = folder / site / label
            place.mkdir(parents=True, exist_ok=True)
            for k in range(per_class):
                number += 1
                colour = (number % 256, number // 256, 250 if label == "a" else 5)
                Image.new("RGB", (16, 16), colour).save(place / f"{k:03d}.png")
    return folder


def colours(images: data.ImageSet | None) -> set[tuple[int, ...]]:
    assert images is not None
    return {tuple(pixel) for pixel in images.pixels[:, :, 0, 0].tolist()}


@pytest.fixture(scope="module")
def heap(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on 40 of 60 labelled images without a test split: 36 were trained on."""
    folder = tmp_path_factory.mktemp("heap")
    options = {"data.images": 40, "data.test_images": "none", "seed": 3}
    where = {"data": f"folder:{draw(folder / 'images')}", "out": str(folder / "run")}
    return loop.run(tiny(rounds=1, **where, **options))


def bench_of(run: Run, changes: dict[str, Any]) -> evaluate.Bench:
    settings = evaluate.settings_of(run.folder, changes)
    found = evaluate.subject(run.folder, settings, lambda _: None)
    return evaluate.Bench(found, settings, settings_of(run), split=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seed": 1},
        {"data.images": 20},
        {"seed": 1, "data.images": 5, "data.test_images": 2},
        {"partition": "classes:2"},
    ],
)
def test_no_test_image_was_trained_on(heap: Run, changes: dict[str, Any]) -> None:
    trained = prepare(settings_of(heap))
    bench = bench_of(heap, changes)
    train, test = bench.images.labelled()
    assert colours(test) <= colours(trained.test)
    assert colours(train) <= colours(trained.train)
    assert not colours(test) & colours(trained.train)
    assert len(test) == changes.get("data.test_images", 4)
    assert len(train) == changes.get("data.images", 36)
    (target,) = parse(f"transfer:{heap.summary['data']}:images=10")
    train, test = bench.measured_on(target).labelled()
    assert len(train) == 10
    assert not (colours(test) - colours(trained.test))


@pytest.mark.parametrize("count", [41, "none"])
def test_more_images_than_the_run_had_are_refused(heap: Run, count: object) -> None:
    with pytest.raises(FurlongError, match=r"the run took 40 images.*--data\.images 40 or fewer"):
        bench_of(heap, {"data.images": count})


def test_the_seed_of_an_evaluation_changes_heads_and_labels_only(run: Run) -> None:
    first, other = bench_of(run, {}).images, bench_of(run, {"seed": 1}).images
    assert (first.seed, other.seed) == (0, 1)
    for one, two in zip(first.labelled(), other.labelled(), strict=True):
        assert torch.equal(one.pixels, two.pixels)
    more = bench_of(run, {"data.images": 90})  # there is a test split: nothing can leak
    assert len(more.images.train) == 90


def test_labels_below_sites_stay_labels(tmp_path: Path) -> None:
    """The folders of a natural split are sites; without the split they must not become classes."""
    images = draw(tmp_path / "images", ("x", "y", "z"), 10)
    where = {"data": f"folder:{images}", "out": str(tmp_path / "run")}
    options = {"data.images": "none", "clients": "none", "partition": "natural"}
    run = loop.run(tiny(rounds=1, **where, **options))
    assert bench_of(run, {}).images.train.classes == ("a", "b")
    assert bench_of(run, {"partition": "iid"}).images.train.classes == ("a", "b")
    (row,) = evaluate.evaluate(run.folder, settings_of(run), "knn")
    assert row["accuracy"] == run.accuracy("knn")
    few = draw(tmp_path / "labelled", per_class=10)  # another set has folders of its own kind
    assert bench_of(run, {"data": f"folder:{few}"}).images.train.classes == ("a", "b")


def test_transfer_holds_out_where_there_is_no_test_split(run: Run, tmp_path: Path) -> None:
    place = draw(tmp_path / "images", per_class=20)
    rows = evaluate.evaluate(run.folder, settings_of(run), f"transfer:folder:{place}:epochs=1")
    assert [r["settings"]["images"] for r in rows] == [36, 36]
    assert [r["settings"]["test_images"] for r in rows] == [4, 4]
    (run.folder / "evaluations.json").unlink()


def test_another_data_set_has_another_name(run: Run, tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("a", "b"):
            for k in range(6):
                place = tmp_path / "set" / split / label
                place.mkdir(parents=True, exist_ok=True)
                colour = (250 if label == "a" else 5, 10 * k, 0)
                Image.new("RGB", (20, 20), colour).save(place / f"{k}.png")
    settings = evaluate.settings_of(
        run.folder, {"data": f"folder:{tmp_path / 'set'}", "data.images": "none"}
    )
    (row,) = evaluate.evaluate(run.folder, settings, "knn:k=1")
    assert row["protocol"] == f"knn:k=1 on folder:{tmp_path / 'set'}"
    assert row["accuracy"] == 1  # resized to the 16 pixels of the encoder
    (run.folder / "evaluations.json").unlink()


def test_semi_is_that_of_the_library(run: Run) -> None:
    settings = settings_of(run)
    (row,) = evaluate.evaluate(run.folder, settings, "semi-20:recipe=fcl:epochs=2")
    prepared = prepare(settings)
    assert prepared.test is not None
    assert prepared.train.labels is not None
    few = prepared.train.subset(stratified(prepared.train.labels, 0.2, seed=0))
    expected = fine_tune(
        load_encoder(run.folder), few, prepared.test, tuning("fcl-10", epochs=2),
        augment=prepared.setup.augment, seed=0,
    )  # fmt: skip
    assert row["accuracy"] == expected.accuracy
    assert row["labelled"] == expected.labelled
    assert row["settings"]["recipe"] == "fcl-10"


def test_transfer_is_that_of_the_library(run: Run) -> None:
    rows = evaluate.evaluate(
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

    monkeypatch.setattr(tuning_module, "fine_tune", trained)
    for last, message in (
        ("semi-1", "less than one for each of its 10 classes"),
        ("transfer:mnist:root=/nowhere", "/nowhere does not exist"),
    ):
        with pytest.raises(FurlongError, match=message):
            evaluate.evaluate(run.folder, settings_of(run), f"semi-20,{last}")


# ---------------------------------------------------------------- subjects


def test_a_checkpoint_is_measured_and_named(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(tiny(rounds=3, out=str(out)), show=interrupt)
    said: list[str] = []
    rows = evaluate.evaluate(out, evaluate.settings_of(out), "knn", say=said.append)
    assert [r["who"] for r in rows] == ["federated, exchange 1 of 3"]
    assert any("after exchange 1 of 3" in text for text in said)
    run = loop.resume(out)
    later = evaluate.evaluate(out, evaluate.settings_of(out), "knn")
    assert [r["who"] for r in later] == ["federated"]
    assert later[0]["accuracy"] == run.accuracy("knn")
    assert len(RunFolder(out).record.evaluations) == 2


def test_a_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(tiny().toml())
    with pytest.raises(FurlongError, match="no checkpoint yet"):
        evaluate.evaluate(tmp_path, evaluate.settings_of(tmp_path), "knn")


def test_every_client_alone_is_measured(tmp_path: Path) -> None:
    run = loop.run(tiny(rounds=1, bound="single", out=str(tmp_path / "run")))
    settings = settings_of(run)
    rows = evaluate.evaluate(run.folder, settings, "knn", random=True)
    assert [r["who"] for r in rows] == [
        "client 0 alone", "client 1 alone", "client 2 alone", "random", "alone"
    ]  # fmt: skip
    (wanted,) = [r for r in run.summary["results"] if (r["who"], r["protocol"]) == ("alone", "knn")]
    assert (rows[-1]["accuracy"], rows[-1]["std"]) == (wanted["accuracy"], wanted["std"])
    mean = evaluate.evaluate(run.folder, settings, "quality,federated-50:rounds=1")
    (alone,) = [r for r in mean if r["who"] == "alone" and r["protocol"] == "quality"]
    each = [r for r in mean if " alone" in r["who"] and r["protocol"] == "quality"]
    ranks = [r["effective_rank"] for r in each]
    assert alone["effective_rank"] == pytest.approx(sum(ranks) / 3)
    assert [r["labels"] for r in mean if r["who"] == "alone"] == [0, 0.5]
    shutil.rmtree(run.folder / "checkpoints")
    said: list[str] = []
    (only,) = evaluate.evaluate(run.folder, settings, "knn", say=said.append)
    assert only["who"] == "client 0 alone"
    assert "not the mean over clients" in said[0]


def exported(run: Run, path: Path, **changes: str) -> Path:
    """What ``furlong export --to safetensors`` writes."""
    about = json.loads((run.folder / "encoder.json").read_text())
    metadata = {key: str(value) for key, value in about.items()} | changes
    path.write_bytes(bytes(pack_tensors(snapshot(run.encoder), metadata)))
    return path


def test_an_exported_encoder_gives_the_same_numbers(run: Run, tmp_path: Path) -> None:
    place = exported(run, tmp_path / "mine.safetensors")
    limits = {"data.images": 72, "data.test_images": 40, "workers": 1}
    rows = evaluate.evaluate(place, evaluate.settings_of(place, limits), "knn,linear")
    assert [r["who"] for r in rows] == ["encoder"] * 2
    assert [r["accuracy"] for r in rows] == [run.accuracy("knn"), run.accuracy("linear")]
    assert list(tmp_path.iterdir()) == [place]
    said: list[str] = []
    evaluate.evaluate(place, evaluate.settings_of(place, limits), "knn", say=said.append)
    assert said == []
    evaluate.evaluate(
        place, evaluate.settings_of(place, limits), "knn", random=True, say=said.append
    )
    assert "'random' is a random encoder of the same kind" in said.pop()
    folder = {"data": f"folder:{draw(tmp_path / 'set', per_class=10)}", "workers": 1}
    evaluate.evaluate(place, evaluate.settings_of(place, folder), "knn", say=said.append)
    assert "does not say which images were held out" in said.pop()
    other = exported(run, tmp_path / "other.safetensors", data="folder:mine")
    with pytest.raises(FurlongError, match=r"say which images, e\.g\. --data folder:mine"):
        evaluate.settings_of(other)


def test_the_encoder_survives_all(run: Run) -> None:
    subject = evaluate.subject(run.folder, settings_of(run), lambda _: None)
    asked = parse("semi-20:epochs=1,federated-30:rounds=1,quality,linear-crops:epochs=1")
    bench = evaluate.Bench(subject, settings_of(run), settings_of(run), split=True)
    (encoder,) = subject.encoders.values()
    before = snapshot(encoder)
    for protocol in asked:
        assert protocol.measure(Encoded(encoder, bench.images))
    assert all(torch.equal(before[n], t) for n, t in snapshot(encoder).items())
    assert not any(part.training for part in encoder.modules())


# ---------------------------------------------------------------- federated fine-tuning


def tuned(
    p: Prepared, labels: float, plan: Federated, progress: Progress = silent
) -> dict[str, Any]:
    """The numbers of federated fine-tuning of the first encoder of a run."""
    images = ClientImages(
        p.train, p.test, p.setup.augment, p.setup.seed, p.federation, "iid", p.setup.encoder,
        p.setup.device, 1, 1,
    )  # fmt: skip
    return replace(plan, labels=labels).measure(Encoded(first_encoder(p), images), progress)


def first_encoder(p: Prepared) -> nn.Module:
    found: nn.Module = p.method.encoder(p.server.init(), p.server.context(Exchange(round=0)))
    return found


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


def test_more_labels_than_the_share_says_are_refused() -> None:
    """200 images of 10 classes at 5 clients: one of each class is a quarter of all labels."""
    labels = torch.arange(200) % 10
    images = data.ImageSet(torch.zeros(200, 3, 4, 4, dtype=torch.uint8), labels, name="mine")
    rows = {k: torch.arange(200)[k * 40 : k * 40 + 40] for k in range(5)}
    federation = Federation(images, rows)
    with pytest.raises(FurlongError, match=r"10\.0% of the 200 labels of mine.* are 25\.0%"):
        labelled(federation, 0.1, seed=0)
    assert sum(map(len, labelled(federation, 0.25, seed=0).rows.values())) == 50


def test_federated_fine_tuning_starts_from_the_encoder(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared()
    first: list[dict[str, Tensor]] = []
    plain = TwoRates.local_update

    def note(self: TwoRates, state: None, down: Any, ctx: Any) -> Any:
        first.append(down.weights)
        assert ctx.data.images.labels is not None
        return plain(self, state, down, ctx)

    monkeypatch.setattr(TwoRates, "local_update", note)
    before = snapshot(first_encoder(p))
    steps: list[tuple[int, int]] = []
    found = tuned(p, 0.5, FAST, lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]
    assert all(torch.equal(first[0][f"backbone.{name}"], t) for name, t in before.items())
    assert found == tuned(p, 0.5, FAST)
    assert 36 <= found["labelled"] <= 50


def test_only_weights_leave_the_client(prepared: Callable[..., Any]) -> None:
    p = prepared()
    setup: Setup = replace(p.setup, classes=10)
    server = replace(p.server, method=TwoRates(), setup=setup)
    state = server.init()
    up = traffic(server.method.expected(state, 0, server.context(Exchange(round=0))))
    assert (up.features, up.scalars) == (0, 0)


def test_head_and_encoder_have_their_own_rates(prepared: Callable[..., Any]) -> None:
    p = prepared()
    moved: dict[str, float] = {}
    for name, plan in (
        ("none", replace(FAST, rounds=1, lr=1e-30, head_lr=1e-30)),
        ("head", replace(FAST, rounds=1, lr=1e-30, head_lr=0.5)),
    ):
        moved[name] = tuned(p, 1.0, plan)["train_accuracy"]
    assert moved["head"] > moved["none"]
    deep = tuned(p, 0.5, replace(FAST, rounds=1, head="mlp"))
    assert 0 <= deep["accuracy"] <= 1


# ---------------------------------------------------------------- the monitor


class Constant(nn.Module):
    """The same features for every image: a collapse."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), 8)


class Few(nn.Module):
    """A few pixels far from each other: features in a few directions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, ::150]


class Seen:
    """What a monitor makes of encoders that take turns, without training."""

    def __init__(self, p: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.monitor = Monitor(p, nn.Flatten(), self.said.append)
        self.server, self.done = p.server.init(), 0
        self.found: dict[str, nn.Module] = {}
        monkeypatch.setattr("furlong.runs.observers.encoders", lambda *_: self.found)

    def __call__(self, **found: nn.Module) -> dict[str, Any]:
        """The line of an exchange that left these encoders."""
        self.found, self.done = found, self.done + 1
        result: Any = SimpleNamespace(server=self.server, exchange=Exchange(round=self.done - 1))
        line: dict[str, Any] = {}
        self.monitor(Event(result, line, {}, self.done, 20))
        return line


def test_collapse_is_said_once(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(prepared(), monkeypatch)
    fine = seen(federated=nn.Flatten())
    assert seen.said == []
    assert fine["effective_rank"] > 2
    assert fine["untrained"] == {name: fine[name] for name in ("knn", *QUALITY)}
    for _ in range(3):
        line = seen(federated=nn.Flatten(), other=Constant())
    assert len(seen.said) == 1
    assert seen.said[0].startswith("warning (other): the representation has collapsed")
    assert "spread 0.000" in seen.said[0]
    assert line["effective_rank"] == pytest.approx(fine["effective_rank"] / 2)


def test_a_run_that_is_heading_for_collapse_is_told_so_once(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(prepared("fedbyol"), monkeypatch)
    knn = {nn.Flatten: 0.5, Few: 0.4, Constant: 0.1}
    monkeypatch.setattr(seen.monitor, "_accuracy", lambda one: {"knn": knn[type(one)]})
    seen(federated=Few())
    assert seen.said == []
    rank = seen(federated=Few())["effective_rank"]
    (text,) = seen.said
    assert f"heading for collapse: effective rank {rank:.1f} (untrained encoder:" in text
    assert text.endswith(FedU.remedy)
    assert "mlp:256:128:bn" in text
    seen(federated=Few())
    assert len(seen.said) == 1
    seen(federated=Constant())
    seen(federated=Few())
    seen(federated=Few())
    assert len(seen.said) == 2
    assert "has collapsed" in seen.said[1]


def test_a_monitor_with_one_answer_says_so_once(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many neighbours as there are images: the largest class has every vote."""
    for k, warnings in ((1, 0), (72, 1)):
        p = prepared(**{"evaluate.k": k, "evaluate.temperature": 100.0})
        mostly = torch.where(torch.arange(72) < 60, 3, p.train.labels)
        seen = Seen(replace(p, train=replace(p.train, labels=mostly)), monkeypatch)
        for _ in range(2):
            seen(federated=nn.Flatten())
        assert len(seen.said) == warnings
    assert "kNN gives every test image the class '" in seen.said[0]
    assert "72 neighbours are too many" in seen.said[0]


def test_what_cannot_be_measured_does_not_end_a_run(prepared: Callable[..., Any]) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) * torch.nan

    said: list[str] = []
    monitor = Monitor(prepared(), nn.Flatten(), said.append)
    assert monitor.measure({"federated": Broken()}) == {"federated": {}}
    assert len(said) == 2  # neither with labels nor without
    assert all("NaN" in text for text in said)


def test_the_monitor_needs_no_labels(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for k in range(30):
        colour = (8 * k, 255 - 8 * k, (40 * k) % 255)
        Image.new("RGB", (16, 16), colour).save(tmp_path / "images" / f"{k}.png")
    settings = tiny(
        data=f"folder:{tmp_path / 'images'}", rounds=1, out=str(tmp_path / "run"),
        **{"data.images": "none", "data.test_images": "none", "data.image_size": "none"},
    )  # fmt: skip
    run = loop.run(settings)
    (line,) = [json.loads(x) for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert line["knn"] is None
    assert line["effective_rank"] > 1
    assert line["uniformity"] < 0
    (row,) = evaluate.evaluate(run.folder, settings_of(run), "quality")
    assert row["effective_rank"] > 1
    with pytest.raises(FurlongError, match=r"has no labels.*'quality' needs none"):
        evaluate.evaluate(run.folder, settings_of(run), "quality,knn")
