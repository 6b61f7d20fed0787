"""The encoder for other programs: in a pipeline of scikit-learn, and in the Hub's layout."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from PIL import Image

import furlong
from furlong.errors import FurlongError
from furlong.runs import loop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loop.run(tiny(rounds=1, out=str(tmp_path_factory.mktemp("runs") / "run"))).folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Twelve pictures, bright and dark in turn."""
    folder, noise = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    paths = []
    for k in range(12):
        pixels = noise.integers(0, 80, (16, 16, 3)) + 120 * (k % 2)
        paths.append(folder / f"{k}.png")
        Image.fromarray(pixels.astype(np.uint8)).save(paths[-1])
    return paths


def pixels_of(files: list[Path]) -> Any:
    """uint8 N×H×W×3."""
    return np.stack([np.asarray(Image.open(path)) for path in files])


def test_paths_and_arrays_give_the_features_of_the_encoder(run: Path, files: list[Path]) -> None:
    images = torch.from_numpy(pixels_of(files)).permute(0, 3, 1, 2).contiguous()
    encoder = furlong.load_encoder(run)
    with torch.no_grad():
        expected = encoder(encoder.transform(images)).numpy()  # type: ignore[operator]
    ours = furlong.Encoder(run, batch_size=5)
    for given in (files, [str(f) for f in files], np.array(files, dtype=object)[:, None], images,
                  images.numpy(), pixels_of(files)):  # fmt: skip
        found = ours.transform(given)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert ours.transform([]).shape == (0, expected.shape[1])
    assert len(ours.get_feature_names_out()) == ours.n_features_out_ == expected.shape[1]


def test_it_is_a_step_of_a_pipeline(run: Path, files: list[Path]) -> None:
    pytest.importorskip("sklearn")
    from sklearn.base import clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    labels = [k % 2 for k in range(12)]
    pipeline = make_pipeline(furlong.Encoder(run), LogisticRegression())
    assert pipeline.fit(files, labels).score(files, labels) == 1
    copy = clone(pipeline)
    assert copy.get_params()["encoder__run"] == run
    copy.set_params(encoder__batch_size=3)
    assert copy.fit(pixels_of(files), labels).score(files, labels) == 1
    search = GridSearchCV(pipeline, {"logisticregression__C": [0.1, 1.0]}, cv=2)
    assert search.fit(np.array(files, dtype=object), labels).best_score_ == 1


def test_without_scikit_learn_the_methods_are_the_same(
    run: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "furlong.reports.encoder", raising=False)
    ours = furlong.Encoder(run)
    assert ours.get_params() == {"run": run, "batch_size": 128}
    assert ours.fit_transform(files).shape == (12, ours.n_features_out_)


def test_parameters(run: Path, tmp_path: Path) -> None:
    ours = furlong.Encoder(tmp_path / "nothing")
    with pytest.raises(FurlongError, match="no encoder"):
        ours.fit()
    assert ours.set_params(run=run).fit() is ours
    with pytest.raises(ValueError, match="no parameter 'size'"):
        ours.set_params(size=3)
    again = pickle.loads(pickle.dumps(ours))
    assert again.get_params() == ours.get_params()
    assert len(pickle.dumps(ours)) < 2000  # not the weights
    with pytest.raises(FurlongError, match="give a run folder"):
        furlong.Encoder().fit()


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (np.zeros((2, 3, 16, 16)), "uint8 images N×3×H×W"),
        (np.zeros((2, 5, 16, 16), dtype=np.uint8), "not torch.uint8 of shape"),
        ("one.png", "give a list of images"),
        (["gone.png"], "gone.png cannot be read: there is no such file"),
    ],
)
def test_what_is_no_image(run: Path, images: Any, said: str) -> None:
    with pytest.raises(FurlongError, match=said):
        furlong.Encoder(run).transform(images)


def test_a_slice_of_a_volume_must_be_named(run: Path, tmp_path: Path) -> None:
    """One of the slices in place of all, chosen by nobody, would be a wrong feature."""
    nib, pydicom = pytest.importorskip("nibabel"), pytest.importorskip("pydicom")
    voxels = np.random.default_rng(0).integers(0, 255, (16, 16, 5), dtype=np.uint8)
    volume, plain = tmp_path / "v.nii.gz", tmp_path / "3.png"
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), volume)
    Image.fromarray(np.ascontiguousarray(voxels[:, :, 3].T[::-1])).save(plain)
    ours = furlong.Encoder(run)
    with pytest.raises(FurlongError, match=r"holds 5 images. Name one of them, such as v.nii.gz#2"):
        ours.transform([volume])
    np.testing.assert_array_equal(ours.transform([f"{volume}#3"]), ours.transform([plain]))
    with pytest.raises(FurlongError, match="holds 15 images"):
        ours.transform([pydicom.examples.get_path("rt_dose")])


def test_the_pages_block_of_python_works_beside_files_that_cannot_be_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of docs/hospitals.md, in a folder as it is described there."""
    pytest.importorskip("sklearn")
    nib = pytest.importorskip("nibabel")
    from furlong.reports import embed

    monkeypatch.chdir(tmp_path)
    noise, rows = np.random.default_rng(0), ["path,label,site,patient"]
    Path("sites/DU/DU_5849").mkdir(parents=True)
    for k in range(20):
        path = f"sites/DU/DU_5849/{k:03}.png"
        pixels = noise.integers(0, 80, (16, 16, 3)) + 120 * (k % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        rows.append(f"{path},{k % 2},DU,p{k // 4}")
    Path("sites/bad.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing more")
    voxels = noise.integers(0, 255, (16, 16, 3), dtype=np.uint8)
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), "sites/v.nii.gz")
    rows += ["sites/bad.png,1,DU,p9", "sites/v.nii.gz,0,DU,p1", "sites/gone.png,1,DU,p2"]
    Path("slices.csv").write_text("\n".join(rows))
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(run)
    embed.embed(embed.Embedder(run), Path("slices.csv"), Path("features.parquet"))
    text = (Path(__file__).parents[2] / "docs" / "hospitals.md").read_text()
    block = text.rpartition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(block, found)
    assert len(found["features"]) == 23  # twenty files and three slices
    assert found["labels"][-3:] == ["0"] * 3
    assert Path("encoder/model.safetensors").exists()


# ---------------------------------------------------------------- the Hub


def test_a_folder_in_the_layout_of_the_hub(run: Path, files: list[Path], tmp_path: Path) -> None:
    ours, place = furlong.Encoder(run), tmp_path / "pushed"
    assert ours.push_to_hub(str(place)) == str(place)
    assert sorted(p.name for p in place.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    settings = json.loads((place / "config.json").read_text())
    assert settings["model_type"] == "furlong"
    assert settings["encoder"] == "small"
    card = (place / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: furlong\n")
    assert "furlong.Encoder.from_pretrained" in card
    for text in (card, json.dumps(settings)):
        assert str(run.parent) not in text
    again = furlong.Encoder.from_pretrained(place)
    np.testing.assert_array_equal(again.transform(files), ours.transform(files))
    np.testing.assert_array_equal(furlong.Encoder(place).transform(files), ours.transform(files))
    with pytest.raises(FurlongError, match="already"):
        ours.save_pretrained(place)
    ours.save_pretrained(place, force=True)
    (place / "model.safetensors").unlink()
    with pytest.raises(FurlongError, match=r"has no model\.safetensors"):
        furlong.Encoder.from_pretrained(place)


def test_the_hub_itself(
    run: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that keeps what is uploaded: what is asked of the Hub, and what comes back."""
    calls: list[Any] = []

    class Api:
        def __init__(self, token: str | None = None) -> None:
            calls.append(("token", token))

        def create_repo(self, name: str, **options: Any) -> None:
            calls.append((name, options))

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
            for file in Path(folder_path).iterdir():
                (tmp_path / file.name).write_bytes(file.read_bytes())
            calls.append((repo_id, commit_message))
            return f"https://hub/{repo_id}"

    def download(name: str, **options: Any) -> str:
        if name != "us/brains":
            raise OSError("401: Repository Not Found\nand more")
        calls.append((name, options))
        return str(tmp_path)

    hub = SimpleNamespace(HfApi=Api, snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    ours = furlong.Encoder(run)
    assert ours.push_to_hub("us/brains", token="t") == "https://hub/us/brains"
    assert ("us/brains", {"private": True, "exist_ok": True}) in calls
    again = furlong.Encoder.from_pretrained("us/brains", revision="v1")
    assert calls[-1][1]["revision"] == "v1"
    assert calls[-1][1]["allow_patterns"] == ["model.safetensors", "config.json"]
    np.testing.assert_array_equal(again.transform(files), ours.transform(files))
    with pytest.raises(FurlongError, match=r"us/lungs is no folder here.*Not Found$"):
        furlong.Encoder.from_pretrained("us/lungs")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FurlongError, match="pip install huggingface_hub"):
        ours.push_to_hub("us/brains")
