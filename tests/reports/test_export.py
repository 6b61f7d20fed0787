"""An exported encoder is the encoder: for the safetensors package, onnxruntime and timm's names."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from furlong import load_encoder
from furlong.core.weights import snapshot
from furlong.data.augment import preset
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.reports import export as exporting
from furlong.reports.export import export
from furlong.reports.page import build
from furlong.reports.parts import budget
from furlong.runs import evaluate, loop
from furlong.runs.folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the encoder ``small``."""
    out = tmp_path_factory.mktemp("runs") / "first"
    loop.run(tiny(out=str(out), rounds=1, **{"data.augment": "moco_cifar"}))
    return out


@pytest.fixture
def other(run: Path, tmp_path: Path) -> Any:
    """The same run as if it had trained another encoder."""

    def make(name: str, **about: Any) -> Path:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "export"))
        torch.manual_seed(0)
        encoder = build_encoder(name, 3, 16)
        for part in encoder.modules():  # statistics that an exchange of names would show
            if isinstance(part, torch.nn.BatchNorm2d):
                part.running_mean.uniform_(-0.1, 0.1)
                part.running_var.uniform_(0.8, 1.2)
        before = json.loads((folder / "encoder.json").read_text())
        changed = {"encoder": name, "width": encoder.out_dim, **about}
        RunFolder(folder).save_encoder(snapshot(encoder), before | changed)
        return folder

    return make


def some_images(count: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8)


# ---------------------------------------------------------------- safetensors


def test_the_public_package_reads_the_file(run: Path, tmp_path: Path) -> None:
    done = export(run, "safetensors", tmp_path / "e.safetensors")
    wanted = snapshot(load_encoder(run))
    found = load_file(done.path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in wanted.items())
    with safe_open(done.path, "pt") as file:
        metadata = file.metadata()
    about = json.loads((run / "encoder.json").read_text())
    assert metadata == {
        **{key: str(value) for key, value in about.items()},
        "format": "pt",
        "mean": "[0.4914, 0.4822, 0.4465]",
        "std": "[0.2023, 0.1994, 0.201]",
    }


def test_load_encoder_reads_the_file(run: Path, tmp_path: Path) -> None:
    done = export(run, "safetensors", tmp_path / "e.safetensors")
    ours, theirs = load_encoder(run), load_encoder(done.path)
    images = some_images()
    assert torch.equal(ours.transform(images), theirs.transform(images))
    with torch.no_grad():
        assert torch.equal(ours(ours.transform(images)), theirs(theirs.transform(images)))
    assert not theirs.training


def test_paths_of_the_data_stay_here(other: Any, tmp_path: Path) -> None:
    folder = other("small", data="folder:/home/ann/patients/sites")
    done = export(folder, "safetensors", tmp_path / "e.safetensors")
    assert b"patients" not in done.path.read_bytes()
    assert "/home/ann" not in done.card.read_text()
    with safe_open(done.path, "pt") as file:
        assert file.metadata()["data"] == "folder:sites"


def test_a_file_does_not_decide_what_code_is_run(other: Any, tmp_path: Path) -> None:
    code = tmp_path / "net.py"
    code.write_text("from furlong.nn.encoders import Small\nmake = Small\n")
    folder = other(f"{code}:make")
    done = export(folder, "safetensors", tmp_path / "own.safetensors")
    assert "your own code" in done.load
    assert str(tmp_path).encode() not in done.path.read_bytes()
    load_encoder(folder)
    with pytest.raises(FurlongError, match="must not decide"):
        load_encoder(done.path)


def test_files_that_are_not_encoders_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"hello, I am no encoder")
    with pytest.raises(FurlongError, match=r"x\.safetensors is damaged"):
        load_encoder(tmp_path / "x.safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(FurlongError, match="does not say the encoder's 'encoder'"):
        load_encoder(tmp_path / "y.safetensors")


# ---------------------------------------------------------------- ONNX


@pytest.mark.parametrize("pixels", [False, True])
def test_onnx_gives_the_same_features(run: Path, tmp_path: Path, pixels: bool) -> None:
    done = export(run, "onnx", tmp_path / "e.onnx", pixels=pixels)
    encoder = load_encoder(run)
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    assert (entry.name, entry.shape) == ("images", ["batch", 3, 16, 16])
    assert entry.type == ("tensor(uint8)" if pixels else "tensor(float)")
    for batch in (1, 4, 9):
        images = some_images(batch)
        with torch.no_grad():
            wanted = encoder(encoder.transform(images)).numpy()
        fed = images if pixels else encoder.transform(images).contiguous()
        found = session.run(["features"], {"images": fed.numpy()})[0]
        assert np.abs(found - wanted).max() <= 1e-5
    model = onnx.load(done.path)
    assert [o.version for o in model.opset_import if o.domain == ""] == [exporting.OPSET]
    props = {p.key: p.value for p in model.metadata_props}
    assert props["encoder"] == "small"
    assert "mean" in props
    assert str(Path(__file__).parents[2]).encode() not in done.path.read_bytes()  # stack traces


@pytest.mark.parametrize(
    "name",
    [
        "vit_mini",
        pytest.param("vit_mini_patch4_reg2_dinov2", marks=pytest.mark.slow),
        pytest.param("efficientnet_lite0", marks=pytest.mark.slow),
    ],
)
def test_other_kinds_of_encoders_as_onnx(other: Any, tmp_path: Path, name: str) -> None:
    """The export compares with torch by itself, for several sizes of batches."""
    assert "differ by at most" in export(other(name), "onnx", tmp_path / "e.onnx").checked


def test_a_graph_that_computes_something_else_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(preset("moco_cifar"), mean=(0.4,) * 3, std=(0.3,) * 3)
    monkeypatch.setattr(exporting, "preset", lambda _: other)
    with pytest.raises(FurlongError, match=r"differ from torch's by .*nothing was written"):
        export(run, "onnx", tmp_path / "e.onnx", pixels=True)
    assert not list(tmp_path.iterdir())


def test_without_the_packages_the_remedy_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(FurlongError, match=r"pip install furlong-fl\[onnx\]"):
        export(run, "onnx", tmp_path / "e.onnx")


# ---------------------------------------------------------------- timm


def timm_shapes(block: int, depths: tuple[int, ...], stem: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes in timm's ResNet without classifier: ``block`` is 2 or 3 convolutions."""
    found: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, stem, stem)}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{part}"] = (width,)
        found[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    channels = 64
    for layer, depth in enumerate(depths, 1):
        width = 32 * 2**layer
        out = width if block == 2 else 4 * width
        for index in range(depth):
            at = f"layer{layer}.{index}"
            steps = [(channels, width, 3), (width, width, 3)]
            if block == 3:
                steps = [(channels, width, 1), (width, width, 3), (width, out, 1)]
            for n, (i, o, kernel) in enumerate(steps, 1):
                found[f"{at}.conv{n}.weight"] = (o, i, kernel, kernel)
                norm(f"{at}.bn{n}", o)
            if index == 0 and (layer > 1 or channels != out):
                found[f"{at}.downsample.0.weight"] = (out, channels, 1, 1)
                norm(f"{at}.downsample.1", out)
            channels = out
    return found


@pytest.mark.parametrize("stem", ["small", "large"])
@pytest.mark.parametrize(("name", "block", "depths"), [
    ("resnet18", 2, (2, 2, 2, 2)),
    ("resnet50", 3, (3, 4, 6, 3)),
])  # fmt: skip
def test_the_names_are_timms(name: str, block: int, depths: tuple[int, ...], stem: str) -> None:
    encoder = build_encoder(f"{name}_{stem}")
    found = {key: tuple(tensor.shape) for key, tensor in encoder.state_dict().items()}
    assert found == timm_shapes(block, depths, {"small": 3, "large": 7}[stem])


def timm_resnet18(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Timm's forward pass with the stem that the export tells to change."""

    def norm(name: str, x: Tensor) -> Tensor:
        stats = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        return F.batch_norm(x, *stats, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    x = F.relu(norm("bn1", F.conv2d(x, w["conv1.weight"], padding=1)))
    for layer in (1, 2, 3, 4):
        for index in (0, 1):
            at, stride = f"layer{layer}.{index}", 2 if layer > 1 and index == 0 else 1
            y = F.relu(norm(f"{at}.bn1", F.conv2d(x, w[f"{at}.conv1.weight"], None, stride, 1)))
            y = norm(f"{at}.bn2", F.conv2d(y, w[f"{at}.conv2.weight"], padding=1))
            if f"{at}.downsample.0.weight" in w:
                shortcut = F.conv2d(x, w[f"{at}.downsample.0.weight"], None, stride)
                x = norm(f"{at}.downsample.1", shortcut)
            x = F.relu(y + x)
    return x.mean((2, 3))


def test_timm_would_compute_the_same(other: Any, tmp_path: Path) -> None:
    folder = other("resnet18")
    done = export(folder, "timm", tmp_path / "t.safetensors")
    assert 'timm.create_model("resnet18", num_classes=0, in_chans=3)' in done.load
    assert "Conv2d(3, 64, 3, padding=1, bias=False)" in done.load
    encoder = load_encoder(folder)
    images = encoder.transform(some_images())
    with torch.no_grad():
        torch.testing.assert_close(timm_resnet18(load_file(done.path), images), encoder(images))
    large = export(other("resnet18_large"), "timm", tmp_path / "l.safetensors")
    assert "Conv2d" not in large.load


@pytest.mark.parametrize("name", ["vit_mini_patch4", "vit_mini_patch4_dinov2"])
def test_timm_makes_the_transformer_from_these_arguments(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The lines run; what they ask of timm, which is absent here, are the encoder's own sizes."""
    folder = other(name)
    done = export(folder, "timm", tmp_path / "t.safetensors")
    asked: dict[str, Any] = {}

    def make(**given: Any) -> torch.nn.Module:
        asked.update(given)
        return build_encoder(name, given["in_chans"], given["img_size"])

    timm = SimpleNamespace(models=SimpleNamespace(VisionTransformer=make))
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(done.load, scope)
    image = {"img_size": 16, "patch_size": 4, "in_chans": 3, "num_classes": 0}
    wanted = {**image, "embed_dim": 96, "depth": 4, "num_heads": 3}
    assert asked == (wanted | {"init_values": 1e-5} if "dinov2" in name else wanted)
    encoder = load_encoder(folder)
    images = encoder.transform(some_images())
    with torch.no_grad():
        assert torch.equal(scope["model"](images), encoder(images))


@pytest.mark.parametrize(
    "name",
    ["small", "cnn5", "efficientnet_lite0", "resnet18+gn", "rep16_pn+resnet18", "vit_mini_reg2"],
)
def test_encoders_that_timm_lacks(other: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(FurlongError, match="has no counterpart in timm"):
        export(other(name), "timm", tmp_path / "t.safetensors")


# ---------------------------------------------------------------- card and files


def test_the_card_says_what_the_run_says(run: Path, tmp_path: Path) -> None:
    done = export(run, "safetensors", tmp_path / "e.safetensors")
    card = done.card.read_text()
    assert done.card.name == "e.safetensors.md"
    summary = json.loads((run / "summary.json").read_text())
    split = json.loads((run / "partition.json").read_text())
    for row in summary["results"]:
        assert f"{100 * row['accuracy']:.1f}" in card
    assert "random encoder (reference)" in card
    assert f"{split['beta_cib']:.4f}" in card
    assert "McMahan" in card  # the paper
    assert "no formal privacy guarantee" in card
    assert "| train | weights | params |" in card
    assert done.load in card
    assert "None" not in card


def test_the_card_has_the_rule_and_what_was_measured_since(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    settings = evaluate.settings_of(folder, {"data.test_images": 20})
    rows = evaluate.evaluate(folder, settings, "semi-30:epochs=1,quality")
    secret = {
        "data": "folder:/home/me/secret/cats",
        "protocol": "knn on folder:/home/me/secret/cats",
    }
    given = {"data.name": secret["data"], "seed": 0}
    kept = [*rows, {**rows[0], **secret, "settings": given}]
    (folder / "evaluations.json").write_text(json.dumps(kept))
    card = export(folder, "safetensors").card.read_text()
    assert "| merged at the server by | mean |" in card
    assert f"| federated | semi-30:epochs=1 | {100 * rows[0]['accuracy']:.1f}" in card
    assert "data.test_images 20" in card
    assert f"effective rank {rows[1]['effective_rank']:.3g}" in card
    assert "knn on folder:cats" in card
    assert "secret" not in card
    text = (folder / "config.toml").read_text()
    changed = text.replace('rule = "mean"', 'rule = "trimmed_mean"').replace(
        "faulty = 1", "faulty = 2"
    )
    (folder / "config.toml").write_text(changed)
    card = export(folder, "safetensors", force=True).card.read_text()
    assert "| merged at the server by | trimmed_mean (faulty 2) |" in card


SPENT = {
    "level": "record", "unit": "each image", "epsilon": 7.91, "delta": 1e-5, "group": 1,
    "noise": [0.8, 1.2], "clip": 1.0, "ratio": 2.0, "releases": 3, "noise_at": "clients",
    "noise_from": "seed",
}  # fmt: skip


def test_the_card_has_all_measures_and_says_who_was_held_out(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    summary = json.loads((copy / "summary.json").read_text())
    row = summary["results"][-1]
    low, high = row["intervals"]["auroc"]
    found = f"{row['auroc']:.3f} [{low:.2f}–{high:.2f}]"
    text = export(copy, "safetensors").card.read_text()
    assert found.replace("[", "\\[").replace("]", "\\]") in text
    assert "On the test split of the same data;" in text
    words = "no test split: 9 images of 7 of 27 patients are held out for evaluation"
    (copy / "summary.json").write_text(json.dumps(summary | {"held_out": words}))
    (copy / "evaluations.json").write_text(json.dumps([row]))
    text = export(copy, "safetensors", force=True).card.read_text()
    assert f"On images of the same data ({words});" in text
    assert f", AUROC {found}".replace("[", "\\[").replace("]", "\\]") in text
    assert words in build(copy).read_text()


def test_the_card_has_the_budget(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"privacy": SPENT}))
    done = export(copy, "safetensors", tmp_path / "made.safetensors")
    card = " ".join(done.card.read_text().split())
    says = ("ε = 7.91 and δ = 1e-05", "0.8 to 1.2 times", "nobody is protected", "their ε adds up")
    for words in says:
        assert words in card
    assert "no formal privacy guarantee" not in card
    page = " ".join(build(copy).read_text().split())
    for text in (card, page):
        for words in (
            "ε = 7.91 and δ = 1e-05",
            "Weights that were trained with noise",
            "if it is replaced by another, ε is up to twice as large",
            "settings that were chosen by their results",
            "rounding of floating-point numbers",
            "if clients were sites that agreed to this budget",
        ):
            assert words in text
    spent = {**SPENT, "level": "client", "noise_at": "server"}
    (copy / "summary.json").write_text(json.dumps(summary | {"privacy": spent}))
    card = " ".join(export(copy, "safetensors", force=True).card.read_text().split())
    for text in (card, " ".join(build(copy).read_text().split())):
        assert "cut to the length 1, without noise, which the server added" in text
        assert "trained with noise" not in text


@pytest.mark.parametrize(
    ("noise_at", "secured", "words"),
    [
        ("server", False, "Not against the server, which saw"),
        ("clients", False, "Not against the server: without secure aggregation"),
        ("clients", True, "Against the server, too, if it kept to the protocol"),
    ],
)
def test_the_budget_says_whether_it_holds_against_the_server(
    noise_at: str, secured: bool, words: str
) -> None:
    spent = {**SPENT, "level": "client", "noise_at": noise_at, "noise_from": "secret"}
    says = budget({**spent, "releases": 1}, secured)
    assert says[-1].startswith(words)
    assert "in more than 1 round." in says[1]
    assert ("if no two of them tell each other theirs" in says[-1]) == (noise_at == "clients")
    assert ("at most one client" in says[-1]) == secured


def test_the_budget_does_not_cover_what_a_run_started_from() -> None:
    assert "this encoder too" in budget(SPENT, False)[2]
    says = budget(SPENT, False, "runs/other")[2]
    assert "not what runs/other had learnt, from which it started" in says
    assert "this encoder too" not in says


def test_what_is_absent_is_said_to_be_absent(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for name, keys, more in (
        ("partition.json", ("beta_cib", "class_counts"), {}),
        ("summary.json", ("seed",), {"results": []}),
    ):
        found = json.loads((folder / name).read_text())
        kept = {k: v for k, v in found.items() if k not in keys}
        (folder / name).write_text(json.dumps({**kept, **more}))
    (folder / "digests.json").unlink()  # or what follows would be refused
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('"fedsimclr"', '"gone.py:Method"'))
    about = json.loads((folder / "encoder.json").read_text())
    (folder / "encoder.json").write_text(json.dumps(about | {"method": "gone.py:Method"}))
    card = export(folder, "safetensors", tmp_path / "e.safetensors").card.read_text()
    assert "no accuracy was measured, since the images had no labels" in card
    assert "β-CIB, β-hetero | absent" in card
    assert "| paper | not recorded |" in card
    assert "| seed | not recorded |" in card
    assert "the method's code was not at hand" in card


def test_statistics_that_stay_are_not_said_to_leave(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    assert "| weights | buffers |" in export(folder, "safetensors").card.read_text()
    text = (folder / "config.toml").read_text()
    assert 'bn_stats = "average"' in text
    (folder / "digests.json").unlink()
    (folder / "config.toml").write_text(text.replace('bn_stats = "average"', 'bn_stats = "local"'))
    card = export(folder, "safetensors", force=True).card.read_text()
    assert "| weights | params |" in card
    assert "| weights | buffers |" not in card


@pytest.mark.parametrize("place", [".", "/", ".."])
def test_a_folder_is_no_file_to_write(run: Path, place: str) -> None:
    with pytest.raises(FurlongError, match="is a folder: name a file in it with --out"):
        export(run, "safetensors", Path(place), force=True)


def test_nothing_is_replaced_unasked(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.safetensors"
    export(run, "safetensors", out)
    before = out.read_bytes()
    out.write_bytes(b"mine")
    with pytest.raises(FurlongError, match="--force replaces it"):
        export(run, "safetensors", out)
    assert out.read_bytes() == b"mine"
    export(run, "safetensors", out, force=True)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.safetensors", "e.safetensors.md"]


def test_an_unfinished_run_is_named(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(run / "config.toml", folder)
    with pytest.raises(FurlongError, match="furlong resume"):
        export(folder, "safetensors")
    with pytest.raises(FurlongError, match=r"not a format.*onnx"):
        export(run, "onxx")
    with pytest.raises(FurlongError, match="--pixels is for --to onnx"):
        export(run, "timm", pixels=True)


def test_a_full_disk_leaves_nothing_behind(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FurlongError, match=r"cannot write .*e\.safetensors: No space left"):
        export(run, "safetensors", tmp_path / "e.safetensors")
    assert not list(tmp_path.iterdir())
