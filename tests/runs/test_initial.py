"""--init, --model.freeze and --model.adapter: from a source to results, export and resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Call, tiny
from safetensors.torch import save_file
from torch import Tensor, nn

import furlong
from furlong.core.payload import is_buffer, pack_tensors, unpack_tensors
from furlong.core.weights import snapshot
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.nn.vit import VisionTransformer, resized_position
from furlong.reports.export import export
from furlong.runs import initial, loop
from furlong.runs.cost import flows
from furlong.runs.prepare import Prepared, prepare
from furlong.runs.record import RunRecord
from furlong.words import size


def weights(name: str = "small", channels: int = 3, size: int = 16) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return snapshot(build_encoder(name, channels, size))


def stored(path: Path, tensors: Mapping[str, Tensor]) -> str:
    path.write_bytes(pack_tensors(tensors, {"format": "pt"}))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return stored(tmp_path / "w.safetensors", weights())


def states(found: initial.Initial) -> dict[str, int]:
    rows = [row.state for row in found.rows]
    return {state: rows.count(state) for state in dict.fromkeys(rows)}


# ---------------------------------------------------------------- which tensors fit


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "model.encoder.", "state_dict.q."])
def test_names_under_any_prefix_and_heads_left_out(prefix: str) -> None:
    own = weights("resnet18")
    theirs = {prefix + name: t for name, t in own.items()} | {f"{prefix}fc.weight": torch.ones(9)}
    found = initial.fitted(build_encoder("resnet18", 3, 16), theirs, "file")
    assert found.prefix == prefix
    assert states(found) == {"matched": 120, "left out": 1}
    assert all(torch.equal(found.weights[name], own[name]) for name in own)


def test_of_two_networks_in_a_file_the_fuller_is_taken() -> None:
    own = weights()
    theirs = {f"student.{n}": t for n, t in own.items() if "bn" in n}
    theirs |= {f"teacher.backbone.{n}": t for n, t in own.items()}
    assert initial.fitted(build_encoder("small"), theirs, "file").prefix == "teacher.backbone."


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    theirs = weights()
    theirs["conv2.weight"] = torch.zeros(2, 2)
    theirs["conv9.weight"] = theirs.pop("conv3.weight")
    theirs["conv1.extra"] = torch.zeros(1)
    where = stored(tmp_path / "bad.safetensors", theirs)
    with pytest.raises(FurlongError) as error:
        prepare(tiny(init=where))
    text = str(error.value)
    assert "missing        1  conv3.weight: not in the source" in text
    assert "other shape    1  conv2.weight: 2×2 in the source, 48×24×3×3 here" in text
    assert "too many       1  conv1.extra" in text
    assert "left out       1  conv9.weight" in text
    assert "--model.init-mismatch allow" in text
    allowed = prepare(tiny(init=where, **{"model.init_mismatch": "allow"}))
    again = prepare(tiny(init=where, **{"model.init_mismatch": "allow"}))
    assert allowed.initial is not None
    assert again.initial is not None
    new = allowed.initial.weights
    assert new["conv3.weight"].std() > 0.01  # random, and the same every time
    assert torch.equal(new["conv3.weight"], again.initial.weights["conv3.weight"])
    assert torch.equal(new["conv4.weight"], theirs["conv4.weight"])


def test_another_stem_has_a_remedy(tmp_path: Path) -> None:
    where = stored(tmp_path / "r.safetensors", weights("resnet18_large"))
    with pytest.raises(FurlongError, match=r"--encoder resnet18_large"):
        prepare(tiny(init=where, encoder="resnet18"))


def test_a_deeper_network_of_the_same_names_is_refused() -> None:
    theirs = weights("resnet18") | {"layer1.2.conv1.weight": torch.zeros(64, 64, 3, 3)}
    found = initial.fitted(build_encoder("resnet18", 3, 16), theirs, "file")
    assert states(found) == {"matched": 120, "too many": 1}


def test_another_network_altogether(tmp_path: Path) -> None:
    where = stored(tmp_path / "x.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(FurlongError, match=r"none of the encoder's tensors: it has a, …"):
        prepare(tiny(init=where))


@pytest.mark.parametrize(("have", "want"), [(3, 1), (1, 3), (3, 4)])
def test_channels(have: int, want: int) -> None:
    own = weights("small", have)
    found = initial.fitted(build_encoder("small", want), own, "file")
    assert states(found) == {"matched": 23, "adapted": 1}
    grey = torch.rand(2, 1, 8, 8)  # the same in every channel: outputs stay as they were
    first, second = own["conv1.weight"], found.weights["conv1.weight"]
    old, new = (
        nn.functional.conv2d(grey.expand(-1, n, -1, -1), w)
        for n, w in ((have, first), (want, second))
    )
    if want % have == 0 or want == 1:
        torch.testing.assert_close(old, new)
    assert second.shape[1] == want


def test_an_encoder_may_adapt_tensors_itself() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 4, 2))

        def adapted(self, name: str, tensor: Tensor) -> Tensor | None:
            return tensor[:, :4] if name == "pos_embed" else None

    found = initial.fitted(Positions(), {"pos_embed": torch.ones(1, 9, 2)}, "file")
    assert found.rows == (initial.Row("pos_embed", "adapted", "from 1×9×2 to 1×4×2"),)
    assert found.weights["pos_embed"].all()


def test_torchvisions_transformers_are_renamed() -> None:
    block = "encoder.layers.encoder_layer_0"
    theirs = {
        "class_token": "cls_token",
        "conv_proj.weight": "patch_embed.proj.weight",
        "encoder.pos_embedding": "pos_embed",
        f"{block}.ln_1.weight": "blocks.0.norm1.weight",
        f"{block}.self_attention.in_proj_weight": "blocks.0.attn.qkv.weight",
        f"{block}.self_attention.out_proj.bias": "blocks.0.attn.proj.bias",
        f"{block}.ln_2.bias": "blocks.0.norm2.bias",
        f"{block}.mlp.0.weight": "blocks.0.mlp.fc1.weight",
        f"{block}.mlp.linear_2.bias": "blocks.0.mlp.fc2.bias",
        "encoder.ln.weight": "norm.weight",
        "heads.head.weight": "heads.head.weight",
    }
    assert list(initial._renamed(dict.fromkeys(theirs, torch.zeros(1)))) == list(theirs.values())


def test_damage_is_noticed(tmp_path: Path) -> None:
    theirs = weights()
    theirs["conv2.weight"][0, 0, 0, 0] = torch.nan
    with pytest.raises(FurlongError, match=r"conv2\.weight holds NaN"):
        prepare(tiny(init=stored(tmp_path / "nan.safetensors", theirs)))


# ---------------------------------------------------------------- where they come from


def test_files_of_torch_are_read_and_never_run(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in weights().items()}}, path)
    p = prepare(tiny(init=str(path)))
    assert p.initial is not None
    assert p.initial.prefix == "state_dict.module."

    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"conv1.weight": Harmful()}, path)
    with pytest.raises(FurlongError, match="nothing of a file is executed") as error:
        initial.source(str(path))
    assert "it asks for getattr" in str(error.value)
    assert "weights_only" not in str(error.value)  # torch advises to run it all the same
    assert not (tmp_path / "ran").exists()
    path.write_bytes(b"no file of torch")
    with pytest.raises(FurlongError, match="damaged"):
        initial.source(str(path))
    torch.save({"epoch": 3}, path)
    with pytest.raises(FurlongError, match="holds no tensors"):
        initial.source(str(path))


def test_folders_and_absent_files(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    with pytest.raises(FurlongError, match="has no file of weights"):
        initial.source(str(folder))
    stored(folder / "a.safetensors", weights())
    assert initial.source(str(folder)).keys() == weights().keys()
    stored(folder / "b.safetensors", weights())
    with pytest.raises(FurlongError, match=r"several: a\.safetensors, b\.safetensors"):
        initial.source(str(folder))
    stored(folder / "model.safetensors", {"x": torch.ones(1)})
    assert list(initial.source(str(folder))) == ["x"]
    with pytest.raises(FurlongError, match="no such file or folder"):
        initial.source(str(tmp_path / "absent.pth"))


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "model.safetensors", weights())
    asked: list[Any] = []

    def listed(repository: str, revision: str | None) -> list[str]:
        asked.append((repository, revision))
        if repository == "no/where":
            raise OSError("cannot reach huggingface.co")
        return ["README.md", "onnx/model.safetensors", "model.safetensors"]

    hub = SimpleNamespace(
        list_repo_files=listed,
        hf_hub_download=lambda _repository, name, revision: str(tmp_path / name),  # noqa: ARG005
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert initial.source("hf:timm/small@v2").keys() == weights().keys()
    assert asked == [("timm/small", "v2")]
    with pytest.raises(FurlongError, match=r"hf:no/where: cannot reach .*--init FILE"):
        initial.source("hf:no/where")


# ---------------------------------------------------------------- runs


def test_what_needs_initial_weights_says_so(source: str) -> None:
    for name, value in (
        ("model.freeze", "stem"),
        ("model.adapter", "lora:2"),
        ("optimiser.encoder_rate", 0.1),
    ):
        with pytest.raises(FurlongError, match=f"{name} is {value}.*--init"):
            prepare(tiny(**{name: value}))
    with pytest.raises(FurlongError, match="none of them is trained"):
        prepare(tiny(init=source, **{"model.adapter": "lora:2", "optimiser.encoder_rate": 0.1}))
    with pytest.raises(FurlongError, match="leaves nothing"):
        prepare(tiny(init=source, **{"model.adapter": "lora:500"}))


def test_the_weights_are_where_a_run_begins(source: str, tmp_path: Path) -> None:
    said: list[str] = []
    run = loop.run(tiny(init=source, rounds=1, out=str(tmp_path / "run")), say=said.append)
    assert any("24 of the encoder's 24 tensors" in line for line in said)
    begun, _ = unpack_tensors((run.folder / "random.safetensors").read_bytes())
    assert all(torch.equal(begun[name], t) for name, t in weights().items())
    assert {row["who"] for row in run.summary["results"]} == {"initial", "federated"}
    about = json.loads((run.folder / "initial.json").read_text())
    assert about["sha256"] == initial.digest(weights())
    again = loop.run(tiny(init=str(run.folder), rounds=1, out=str(tmp_path / "next")))
    begun, _ = unpack_tensors((again.folder / "random.safetensors").read_bytes())
    learnt, _ = unpack_tensors((run.folder / "encoder.safetensors").read_bytes())
    assert all(torch.equal(begun[name], t) for name, t in learnt.items())


FIXED = {
    "freeze": {"model.freeze": 2},
    "adapter": {"model.adapter": "lora:2"},
    "products": {"model.adapter": "lora:2", "model.adapter_average": "products"},
}


@pytest.mark.parametrize("kind", FIXED)
def test_resume_has_the_same_bits_without_the_source(
    source: str, tmp_path: Path, kind: str
) -> None:
    options = {**FIXED[kind], "init": source, "method": "fedu", "evaluate.probe": "none"}
    whole = loop.run(tiny(**options, out=str(tmp_path / "whole")))

    class Stop(BaseException):
        pass

    def stop(_: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        loop.run(tiny(**options, out=str(tmp_path / "part")), show=stop)
    Path(source).unlink()
    said: list[str] = []
    resumed = loop.resume(tmp_path / "part", say=said.append)
    assert not any("initial weights" in line for line in said)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    wanted, found = ((r.folder / "encoder.safetensors").read_bytes() for r in (whole, resumed))
    assert wanted == found


def test_what_is_fixed_does_not_count(source: str) -> None:
    def sent(**options: Any) -> int:
        p: Prepared = prepare(tiny(init=source, **options))
        return sum(t.nbytes for t in p.server.init().weights.values())

    whole, frozen = sent(), sent(**{"model.freeze": 2})
    fixed = initial.fixed(prepare(tiny(init=source, **{"model.freeze": 2})).setup)
    assert whole - frozen == sum(t.nbytes for t in fixed.values()) > 0
    up = {
        adapter: flows("fedsimclr", "resnet18", **{"model.adapter": adapter})["train"]["up"]
        for adapter in ("none", "lora:4")
    }
    sizes = {
        adapter: sum(t.nbytes for n, t in model.weights.items() if n.startswith("backbone."))
        for adapter, model in up.items()
    }
    assert sizes == {"none": 44_713_888, "lora:4": 572_848}


def test_export_merges_or_keeps_apart(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model.adapter": "lora:2:4", "evaluate.probe": "none", "rounds": 1}
    run = loop.run(tiny(init=source, out=str(tmp_path / "run"), **options))
    export(run.folder, "safetensors")
    apart = export(run.folder, "adapter", tmp_path / "lora")
    assert sorted(file.name for file in (tmp_path / "lora").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.md"
    ]  # fmt: skip
    assert 'PeftModel.from_pretrained(base, "lora")' in apart.load
    lines = apart.load.splitlines()
    own = [each for each in lines if "peft" not in each.lower()]
    monkeypatch.chdir(run.folder)
    found: dict[str, Any] = {}
    exec("\n".join(own), found)  # all but PEFT itself, which is not here
    for name, tensor in weights().items():
        assert torch.equal(found["base"].state_dict()[name], tensor)
    with pytest.raises(FurlongError, match="is a file: --to adapter writes a folder"):
        export(run.folder, "adapter", apart.path)
    merged = furlong.load_encoder(run.folder / "export/encoder.safetensors")
    factors, _ = unpack_tensors(apart.path.read_bytes())
    settings = json.loads((apart.path.parent / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["conv1", "conv2", "conv3", "conv4"]
    assert (settings["r"], settings["lora_alpha"]) == (2, 4.0)
    for name, tensor in weights().items():
        wanted, part = tensor, name.removesuffix(".weight")
        if name.startswith("conv"):
            a, b = (factors[f"base_model.model.{part}.lora_{x}.weight"] for x in "AB")
            assert b.any()
            wanted = tensor + 2 * (b.flatten(1) @ a.flatten(1)).view_as(tensor)
        torch.testing.assert_close(merged.state_dict()[name], wanted)
    card = apart.card.read_text()
    assert "started from | w.safetensors; adapter: lora:2:4, averaged by factors" in card
    assert str(tmp_path) not in card
    assert "initial weights" in card


def test_export_of_adapters_needs_some(source: str, tmp_path: Path) -> None:
    run = loop.run(tiny(init=source, rounds=1, out=str(tmp_path / "run")))
    with pytest.raises(FurlongError, match="trained without adapters"):
        export(run.folder, "adapter")


def test_from_the_command_line(furlong_: Call, source: str) -> None:
    small = (
        "--rounds", 1, "--clients", 2, "--partition", "iid", "--data.images", 40,
        "--data.test-images", 20, "--data.image-size", 16, "--evaluate.probe", "none",
        "--method", "fedsimclr",
    )  # fmt: skip
    done = furlong_("run", "--init", source, "--model.freeze", "1", *small, "--out", "run")
    assert done.code == 0, done.err
    assert "24 of the encoder's 24 tensors" in done.err
    assert "initial" in done.out
    assert "initial weights" in Path("run/report.html").read_text()
    assert RunRecord.open(Path("run")).config().model.freeze == 1
    measured = furlong_("evaluate", "run", "--protocols", "knn", "--random")
    assert measured.code == 0, measured.err
    assert "initial" in measured.out
    bad = furlong_("run", "--init", source, "--encoder", "resnet18", *small, "--out", "bad")
    assert bad.code == 2
    assert "does not fit the encoder resnet18" in bad.err
    assert not Path("bad").exists()
    adapted = furlong_("cost", "--init", source, "--model.adapter", "lora:2", *small, "--json")
    whole = furlong_("cost", *small, "--json")
    up, before = (each.json[0]["up"] for each in (adapted, whole))
    statistics = sum(t.nbytes for name, t in weights().items() if is_buffer(name))
    assert before["buffers"] - up["buffers"] == 2 * statistics  # of two clients
    assert up["params"] < before["params"] / 2
    every = sum(t.nbytes for t in weights().values())
    told = furlong_("cost", "--init", source, "--model.adapter", "lora:2", *small, "--sizes", "9,9")
    words = f"What stays as it is ({size(every)}) is in no exchange"
    assert " ".join(words.split()) in " ".join(told.out.split())


def test_positions_of_a_transformer_follow_the_images(tmp_path: Path) -> None:
    """Weights of images of 64 pixels, for images of 16."""
    large = build_encoder("vit_mini_patch4", 3, 64)
    save_file(large.state_dict(), tmp_path / "w.safetensors")
    init = str(tmp_path / "w.safetensors")
    p = prepare(tiny(init=init, encoder="vit_mini_patch4"))
    assert p.initial is not None
    (row,) = [row for row in p.initial.rows if row.state == "adapted"]
    width = large.out_dim
    assert (row.name, row.why) == ("pos_embed", f"from 1×257×{width} to 1×17×{width}")
    expected = resized_position(large.state_dict()["pos_embed"], 4)
    assert torch.equal(p.initial.weights["pos_embed"], expected)
    small = build_encoder("vit_mini_patch4", 3, 16)
    assert isinstance(small, VisionTransformer)
    assert small.adapted("pos_embed", torch.zeros(1, 11, width)) is None  # no square
    assert small.adapted("norm.weight", torch.zeros(3)) is None
