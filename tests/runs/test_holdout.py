"""What is held out: never a part of a patient, never a site's last one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from PIL import Image

from furlong.core.payload import pack_tensors
from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.runs import loop
from furlong.runs.datasets import load_data
from furlong.runs.holdout import hold_out, on_both_sides
from furlong.runs.prepare import prepare
from furlong.runs.split import split_data


def images(patients: list[int] | None, sites: list[int] | None = None, n: int = 0) -> ImageSet:
    count = len(patients) if patients else n
    return ImageSet(
        torch.zeros(count, 3, 4, 4, dtype=torch.uint8),
        patients=None if patients is None else torch.tensor(patients),
        groups=None if sites is None else torch.tensor(sites),
    )


def settings(**options: Any) -> Any:
    return tiny(**{name.replace("__", "."): value for name, value in options.items()})


@pytest.mark.parametrize("seed", range(6))
def test_no_patient_is_on_both_sides(seed: int) -> None:
    rng = np.random.default_rng(seed)
    patients = rng.integers(0, 40, 400).tolist()
    sites = [patient % 4 for patient in patients]
    whole = images(patients, sites)
    held, rest, words = hold_out(whole, settings(seed=seed))
    one, other = whole.subset(held), whole.subset(rest)
    assert sorted(torch.cat([held, rest]).tolist()) == list(range(400))
    assert on_both_sides(other, one) is None
    assert 20 <= len(held) <= 40
    assert "patients" in words
    assert other.groups is not None
    assert set(other.groups.tolist()) == {0, 1, 2, 3}


def test_few_patients_are_told_with_a_remedy() -> None:
    """A number of one patient is no number of the encoder."""
    few = images([patient for patient in range(20) for _ in range(10)])
    held, _, words = hold_out(few, settings())
    assert len(held) == 20
    assert "of 2 of 20 patients" in words
    assert words.endswith("--data.validation true --data.test-images 60 holds out more")
    more, _, words = hold_out(few, settings(data__validation=True, data__test_images=60))
    assert len(more) == 60
    assert "say little" not in words
    with pytest.raises(FurlongError, match=r"data\.test_images is 161, .* of the 200 training"):
        hold_out(few, settings(data__validation=True, data__test_images=161))


def test_images_of_unknown_patients_are_not_called_patients() -> None:
    """One DICOM file among 317 others tells nothing of these."""
    one = images([317, *(-1 - k for k in range(317))])
    held, rest, words = hold_out(one, settings())
    assert len(held) == 31
    assert re.search(r"[01] of 1 patients and 3[01] of 317 images of unknown patient", words)
    assert "some may show the same person on both sides" in words
    assert on_both_sides(one.subset(rest), one.subset(held)) is None
    half = images([0] * 5 + [1] * 5 + [-1 - k for k in range(10)])
    held, rest, words = hold_out(half, settings(data__validation=True, data__test_images=8))
    sides = [set(half.subset(side).patients.tolist()) for side in (held, rest)]  # type: ignore[union-attr]
    assert not sides[0] & sides[1]
    assert f"{sum(k >= 0 for k in sides[0])} of 2 patients" in words
    # where nobody is known it is as if there were no patients
    plain, _, words = hold_out(images(None, n=100), settings())
    held, _, same = hold_out(images([-1 - k for k in range(100)]), settings())
    assert (held.tolist(), same) == (plain.tolist(), words)


def test_a_run_that_starts_from_another_says_what_that_may_have_seen(tmp_path: Path) -> None:
    many = images([k // 4 for k in range(100)])
    _, _, plain = hold_out(many, settings())
    assert "none of theirs is trained on." in plain
    run, file = tmp_path / "first", tmp_path / "timm.safetensors"
    run.mkdir()
    (run / "encoder.json").write_text("{}")
    file.write_bytes(pack_tensors({"a": torch.zeros(1)}, {}))
    export = tmp_path / "export.safetensors"
    export.write_bytes(pack_tensors({"a": torch.zeros(1)}, {"method": "fedu"}))
    for source, ours in ((run, True), (export, True), (file, False), ("scenes", False)):
        _, _, words = hold_out(many, settings(init=str(source)))
        assert ("is trained on here (but " in words) == ours
        assert str(tmp_path) not in words


def test_the_last_patient_of_a_site_stays() -> None:
    """As hospital EZ of the real case: one patient."""
    patients, sites = [0] * 2 + [1] * 50 + [2] * 50, [0] * 2 + [1] * 100
    for seed in range(10):
        held, _, _ = hold_out(images(patients, sites), settings(seed=seed))
        assert 0 not in images(patients, sites).patients[held].tolist()  # type: ignore[index]
        assert len(held) == 50  # more than a tenth, as there is no smaller patient
    with pytest.raises(FurlongError, match="every site has one patient"):
        hold_out(images([0, 0, 1, 1], [0, 0, 1, 1]), settings())
    with pytest.raises(FurlongError, match="all images are of one patient"):
        hold_out(images([3, 3, 3]), settings())


def test_by_image_is_as_it_was_and_warns() -> None:
    patients = [k // 10 for k in range(100)]
    plain, _, words = hold_out(images(None, n=100), settings())
    by_image, rest, _ = hold_out(images(patients), settings(data__holdout_by="image"))
    assert plain.tolist() == by_image.tolist()
    assert "10 random images" in words
    whole = images(patients)
    said = on_both_sides(whole.subset(rest), whole.subset(by_image))
    assert said is not None
    assert "with 10 of 10 test images" in said


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., str]:
    """Three sites with four patients of five images each; ``labels``: two classes."""

    def make(labels: bool = True, weight: str = "1", test: tuple[str, ...] = ()) -> str:
        rng = np.random.default_rng(0)
        rows = ["path,site,patient,weight,split" + (",label" if labels else "")]
        for site in "abc":
            for patient in range(4):
                for k in range(5):
                    file = f"{site}{patient}{k}.png"
                    pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(tmp_path / file)
                    who = f"{site}{patient}"
                    split = "test" if who in test and k else "train"
                    end = f",{k % 2}" if labels else ""
                    rows.append(f"{file},{site},{who},{weight if k == 0 else 1},{split}{end}")
        (tmp_path / "m.csv").write_text("\n".join(rows) + "\n")
        return f"manifest:{tmp_path / 'm.csv'}"

    return make


def natural(name: str, **options: Any) -> Any:
    given = {"data": name, "partition": "natural", "clients": None, "data.images": None,
             "data.test_images": None, "data.image_size": 16}  # fmt: skip
    return tiny(**{**given, **{k.replace("__", "."): v for k, v in options.items()}})


def test_a_labelled_run_by_site(manifest: Callable[..., str]) -> None:
    name = manifest()
    train, test, notes = load_data(natural(name))
    assert test is not None
    assert len(test) == 5
    assert any("5 images of 1 of 12 patients" in note for note in notes)
    assert on_both_sides(train, test) is None
    assert len(split_data(natural(name), train)) == 3
    chosen = load_data(natural(name, data__validation=True, data__test_images=20))[1]
    assert chosen is not None
    assert len(chosen) == 20


def test_a_test_split_that_leaks_is_told(manifest: Callable[..., str]) -> None:
    _, test, notes = load_data(natural(manifest(test=("a1", "b2"))))
    assert test is not None
    assert len(test) == 8
    assert any(
        note.startswith("warning: 2 of the 2 patients") and "8 of 8 test images" in note
        for note in notes
    )


def test_unlabelled_images_are_held_out_only_if_asked(manifest: Callable[..., str]) -> None:
    name = manifest(labels=False)
    train, test, _ = load_data(natural(name))
    assert test is None
    assert len(train) == 60
    train, test, notes = load_data(natural(name, data__holdout_by="patient"))
    assert test is not None
    assert (len(train), len(test)) == (55, 5)
    assert on_both_sides(train, test) is None
    assert any("held out for evaluation" in note for note in notes)


def test_an_unlabelled_run_is_watched_on_what_was_held_out(
    manifest: Callable[..., str], tmp_path: Path
) -> None:
    from furlong.evaluation.protocol import Images
    from furlong.evaluation.quality import sample

    out = tmp_path / "run"
    given = natural(manifest(labels=False), data__holdout_by="patient", out=str(out))
    done = loop.run(given)
    assert done.summary["results"] == []
    assert done.summary["quality"]
    assert "5 images of 1 of 12" in done.summary["held_out"]
    prepared = prepare(given)
    assert prepared.test is not None
    both = Images(prepared.train, prepared.test, prepared.setup.augment, 0)
    seen = {tuple(each.flatten().tolist()) for each in sample(both, 100)}
    assert seen == {tuple(each.flatten().tolist()) for each in prepared.test.pixels}


def test_weights_count_in_training_alone(manifest: Callable[..., str]) -> None:
    given = natural(manifest(weight="3"))
    train, test, _ = load_data(given)
    assert test is not None
    assert len(train) + len(test) == 60
    sizes = split_data(given, train).sizes
    assert sum(sizes) == len(train) + 2 * 11  # one image of each of eleven patients is there thrice
    none = natural(manifest(weight="0"))
    assert sum(split_data(none, load_data(none)[0]).sizes) == len(train) - 11


def test_evaluate_keeps_to_the_runs_own_holdout(
    manifest: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed or way of holding out must not test it on images that it was trained on."""
    from furlong.runs import evaluate

    out = tmp_path / "run"
    loop.run(natural(manifest(), out=str(out)))
    seen: list[ImageSet] = []
    read = evaluate.load_data

    def spy(*arguments: Any) -> Any:
        found = read(*arguments)
        seen.append(found[1])
        return found

    monkeypatch.setattr(evaluate, "load_data", spy)
    for more in ({}, {"seed": "5"}):
        evaluate.evaluate(out, evaluate.settings_of(out, more), "knn")
    with pytest.raises(FurlongError, match="stay on the side"):
        evaluate.evaluate(out, evaluate.settings_of(out, {"data.holdout_by": "image"}), "knn")
    assert all(torch.equal(each.pixels, seen[0].pixels) for each in seen)


def test_folder_levels(tmp_path: Path) -> None:
    """SITE/PATIENT/CLASS: the level of the patients is not taken for that of the classes."""
    for site in "ab":
        for patient in "wxyz":
            for label in ("ill", "well"):
                for k in range(2):
                    file = tmp_path / "s" / site / patient / label / f"{k}.png"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    Image.new("L", (8, 8), ord(patient)).save(file)
    name = f"folder:{tmp_path / 's'}"
    train, test, _ = load_data(natural(name, data__holdout_by="folder:2"))
    assert test is not None
    assert train.classes == ("ill", "well")
    assert on_both_sides(train, test) is None
    assert len(set(test.patients.tolist())) == 1  # type: ignore[union-attr]
    for wrong, message in (("folder:4", "do not lie so deep"), ("patient", "has no columns"),
                           ("folder:x", "has no columns")):  # fmt: skip
        with pytest.raises(FurlongError, match=message):
            load_data(natural(name, data__holdout_by=wrong))
    told = load_data(natural(name))[2]
    assert any("--data.holdout-by folder:3" in note for note in told)


def test_public_and_drawn_sets_have_no_patients() -> None:
    with pytest.raises(FurlongError, match="whose images are whose"):
        load_data(tiny(**{"data.holdout_by": "patient"}))
    with pytest.raises(FurlongError, match="has 3 channels"):
        load_data(tiny(**{"data.channels": 4}))


def test_a_run_on_four_channels(tmp_path: Path) -> None:
    """All the way: views, an encoder, evaluation, features."""
    from furlong.reports.embed import Embedder, embed
    from furlong.runs import evaluate

    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "n" / label).mkdir(parents=True)
        for k in range(12):
            deep = rng.integers(0, 4000, (16, 16, 4), dtype=np.uint16)
            np.save(tmp_path / "n" / label / f"{k}.npy", deep)
    out = tmp_path / "run"
    given = {"data": f"folder:{tmp_path / 'n'}", "partition": "iid", "clients": 2,
             "data.images": None, "data.test_images": None, "data.augment": "moco_cifar",
             "data.channels": 4, "data.window": "0:4000", "out": str(out)}  # fmt: skip
    done = loop.run(tiny(**given))
    assert done.summary["results"]
    assert evaluate.evaluate(out, evaluate.settings_of(out), "knn")
    count, skipped = embed(Embedder(out), tmp_path / "n", tmp_path / "f.parquet")
    assert (count, skipped) == (24, [])
