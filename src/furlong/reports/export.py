"""A run's encoder as one file for other programs: safetensors, ONNX, timm's names, or adapters.

Adapters (``--model.adapter``) are merged into the weights, except with ``--to adapter``: then A and
B alone are written, as PEFT reads them.

Every file is checked before it takes its place: weights bit for bit, a graph by running it. What is
written is for passing on, so it says what was trained on without the paths of this machine.
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from furlong.core.payload import Weights, pack_tensors, unpack_tensors
from furlong.data.augment import preset
from furlong.errors import FurlongError, nearest
from furlong.files import replacing, require_free, require_space
from furlong.nn.encoders import build_encoder, evaluating
from furlong.nn.lora import A, Rank
from furlong.nn.vit import Block, VisionTransformer
from furlong.reports import card as cards
from furlong.reports.rendering import render
from furlong.runs.config import short
from furlong.runs.record import RunRecord
from furlong.runs.saved_encoder import load_encoder, read_encoder, read_weights

Target = Literal["safetensors", "onnx", "timm", "adapter"]
FILES: dict[str, str] = {
    "safetensors": "encoder.safetensors",
    "onnx": "encoder.onnx",
    "timm": "encoder-timm.safetensors",
    "adapter": "adapter/adapter_model.safetensors",  # as PEFT calls it, in a folder of its own
}
OPSET = 18  # the one in which torch's translations are written; runtimes know it since early 2023
TOLERANCE = 1e-5  # of a feature, or relative to the largest one where that is above 1
BATCHES = (1, 2, 5)
TIMM = ("resnet18", "resnet50")


@dataclass(frozen=True)
class Exported:
    """What was written, and what a person should know about it."""

    path: Path
    card: Path
    size: int
    checked: str  # what the check found
    load: str  # Python that loads the file


def export(
    run: Path, to: str, out: Path | None = None, *, force: bool = False, pixels: bool = False
) -> Exported:
    """Write the encoder of a finished run to ``out`` (default: in ``run``/export), with its card.

    ``pixels`` (ONNX only): the graph takes uint8 images and normalises them itself.
    """
    if to not in FILES:
        raise FurlongError(f"--to {to} is not a format. {nearest(to, get_args(Target))}")
    if pixels and to != "onnx":
        raise FurlongError("--pixels is for --to onnx: the other formats hold weights, no program.")
    if run.is_file():
        raise FurlongError(f"{run} is a file: export takes a run folder, which the card describes.")
    path = out or run / "export" / FILES[to]
    if to == "adapter" and out is not None:
        if out.is_file():
            raise FurlongError(f"{out} is a file: --to adapter writes a folder, as PEFT reads it.")
        path = out / Path(FILES[to]).name
    require_free(path, force)  # first: a folder like "." has no name to which one could add
    card = path.with_name(f"{path.name}.md")
    require_free(card, force)
    about, weights = read_encoder(run)
    described = describe(about)
    if to == "adapter":
        weights, settings = _adapter(run)
        beside = path.with_name("adapter_config.json")
        require_free(beside, force)
        data, checked = _safetensors(weights, described, {})
        _store(beside, json.dumps(settings, indent=1).encode(), force)
    elif to == "onnx":
        data, checked = _onnx(load_encoder(run), described, pixels)
    else:
        data, checked = _safetensors(weights, described, _timm(about) if to == "timm" else {})
    _store(path, data, force)
    load = _loading(to, path, described, weights, pixels)
    text = cards.write(RunRecord.open(run), path.name, data, to, described, checked, load)
    _store(card, text.encode(), force)
    return Exported(path, card, len(data), checked, load)


def describe(about: dict[str, Any]) -> dict[str, str]:
    """What encoder.json says as strings, with the normalisation, without paths."""
    try:
        recipe = preset(str(about["augment"]))
        data, method, encoder = (str(about[key]) for key in ("data", "method", "encoder"))
        channels = int(about["channels"])
    except KeyError as error:
        raise FurlongError(f"the run's encoder.json lacks {error}.") from None
    found = {key: str(value) for key, value in about.items()}
    found["data"] = short(data)
    for key, name in (("method", method), ("encoder", encoder)):
        found[key] = Path(name).name if ":" in name else name  # file.py:name
    mean, std = recipe.mean, recipe.std
    if channels != len(mean):  # as views of such images are normalised
        mean, std = ((sum(each) / len(each),) * channels for each in (mean, std))
    return found | {"mean": json.dumps(mean), "std": json.dumps(std)}


def _store(path: Path, data: bytes, force: bool) -> None:
    """The file, read back."""
    with replacing(path, force) as draft:
        require_space(path.parent, len(data))
        draft.write_bytes(data)
        if draft.read_bytes() != data:
            raise FurlongError(f"{path} reads back other bytes than were written: a bad disk?")


# ---------------------------------------------------------------- weights


def _safetensors(
    weights: Weights, about: dict[str, str], more: dict[str, str]
) -> tuple[bytes, str]:
    data = bytes(pack_tensors(weights, {"format": "pt", **about, **more}))
    again, _ = unpack_tensors(data)
    same = again.keys() == weights.keys() and all(
        again[name].dtype == tensor.dtype and torch.equal(_bits(again[name]), _bits(tensor))
        for name, tensor in weights.items()
    )
    if not same:
        raise FurlongError("the weights do not survive being written: please report this.")
    return data, f"{len(weights)} tensors read back bit for bit"


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, since NaN is not equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _adapter(run: Path) -> tuple[Weights, dict[str, Any]]:
    """A and B under PEFT's names, and what PEFT's adapter_config.json says of them."""
    shape = Rank.parse(RunRecord.open(run).config().model.adapter)
    if shape is None:
        raise FurlongError(
            f"{run} was trained without adapters (--model.adapter lora:RANK). Use --to safetensors."
        )
    factors, _ = read_weights(run / "adapter.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": sorted(name.removesuffix(f".{A}") for name in factors if A in name),
        "bias": "none",
        "inference_mode": True,
    }
    return {f"base_model.model.{name}": tensor for name, tensor in factors.items()}, settings


def _timm(about: dict[str, Any]) -> dict[str, str]:
    """Which of timm's models it is; our ResNets have the names of timm's."""
    name = str(about["encoder"])
    base = name.removesuffix("_small").removesuffix("_large")
    if base in TIMM:
        return {"timm": base}
    if ":" not in name and _transformer(about) is not None:
        return {"timm": "VisionTransformer"}
    raise FurlongError(
        f"the encoder {name} has no counterpart in timm: only {', '.join(TIMM)} and vision "
        "transformers without registers have. Use --to safetensors or --to onnx."
    )


def _transformer(about: dict[str, Any]) -> dict[str, Any] | None:
    """How timm makes this vision transformer; ``None`` if the encoder is none, or has registers,
    which timm keeps in another way.
    """
    channels, size = int(about["channels"]), int(about["image_size"])
    with torch.device("meta"):  # only its sizes are wanted
        encoder = build_encoder(str(about["encoder"]), channels, size)
    if not isinstance(encoder, VisionTransformer) or encoder.register_tokens is not None:
        return None
    block = encoder.blocks[0]
    assert isinstance(block, Block)
    scaled = {} if isinstance(block.ls1, nn.Identity) else {"init_values": 1e-5}
    return {
        "img_size": size,
        "patch_size": encoder.patch,
        "in_chans": channels,
        "num_classes": 0,
        "embed_dim": encoder.out_dim,
        "depth": len(encoder.blocks),
        "num_heads": block.attn.heads,
        **scaled,
    }


# ---------------------------------------------------------------- ONNX


class _FromPixels(nn.Module):
    """Normalise uint8 images B×C×H×W, then encode."""

    def __init__(self, encoder: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.encoder = encoder
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """B×C×H×W bytes to B×d."""
        features: Tensor = self.encoder((images.float() / 255 - self.mean) / self.std)
        return features


def _onnx(encoder: nn.Module, about: dict[str, str], pixels: bool) -> tuple[bytes, str]:
    """The graph as bytes, and what comparing it with torch found."""
    onnx, runtime = _optional("onnx"), _optional("onnxruntime")
    _optional("onnxscript")
    transform: Callable[[Tensor], Tensor] = encoder.transform  # type: ignore[assignment]
    shape = (int(about["channels"]), int(about["image_size"]), int(about["image_size"]))
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(0, 256, (b, *shape), dtype=torch.uint8, generator=generator) for b in BATCHES
    ]
    module = encoder
    if pixels:
        module = _FromPixels(encoder, json.loads(about["mean"]), json.loads(about["std"])).eval()

    def feed(x: Tensor) -> Tensor:
        return x if pixels else transform(x).contiguous()

    with evaluating(module), _quietly():
        try:
            program = torch.onnx.export(
                module,
                (feed(images[1]),),
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # whatever an encoder of one's own makes the exporter do
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise FurlongError(
                f"the encoder {about['encoder']} cannot be written as ONNX: {reason[0][:300]}"
            ) from None
        assert program is not None
        model = program.model_proto
        _forget_origin(model.graph)
        onnx.helper.set_model_props(model, {**about, "input": _input(about, pixels)})
        onnx.checker.check_model(model)
        data = bytes(model.SerializeToString())
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
        worst = 0.0
        for batch in images:
            wanted = encoder(transform(batch))
            (found,) = session.run(["features"], {"images": feed(batch).numpy()})
            scale = max(1.0, float(wanted.abs().max()))
            worst = max(worst, float((torch.from_numpy(found) - wanted).abs().max()) / scale)
    if not worst <= TOLERANCE:
        raise FurlongError(
            f"onnxruntime's features differ from torch's by {worst:.2g}, more than {TOLERANCE:g}: "
            "nothing was written."
        )
    sizes = ", ".join(map(str, BATCHES))
    return data, (
        f"opset {OPSET}; onnxruntime and torch differ by at most {worst:.1g} for batches of {sizes}"
    )


def _input(about: dict[str, str], pixels: bool) -> str:
    side = about["image_size"]
    kind = "uint8" if pixels else "float32, pixels / 255 normalised with mean and std,"
    colours = ", RGB" if about["channels"] == "3" else ""
    return f"images: {kind} batch×{about['channels']}×{side}×{side}{colours}"


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FurlongError(
            f"--to onnx needs the package {error.name or name}: pip install furlong-fl[onnx]"
        ) from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's remarks on its own deprecations and on absent torchvision."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _forget_origin(graph: Any) -> None:
    """Take out the stack traces: they hold paths of the machine that exported."""
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""


# ---------------------------------------------------------------- how to load it


def _loading(to: str, path: Path, about: dict[str, str], weights: Weights, pixels: bool) -> str:
    """Python that loads the file and encodes; ``pixels`` there are uint8 images."""
    base = _timm(about)["timm"] if to == "timm" else None
    contents = {
        "to": to,
        "file": json.dumps(path.name, ensure_ascii=False),
        "folder": json.dumps(path.parent.name or ".", ensure_ascii=False),
        "about": about,
        "encoder": about["encoder"],
        "pixels": pixels,
        "normalised": _normalising(about),
        "base": base,
        "stem": weights["conv1.weight"].shape if base in TIMM else None,
        "transformer": _transformer(about) if base and base not in TIMM else None,
    }
    return render("loading.py.jinja", contents).strip()


def _normalising(about: dict[str, str]) -> str:
    """How pixels B×C×S×S become what the encoder takes, in NumPy."""
    mean, std = json.loads(about["mean"]), json.loads(about["std"])
    if not any(mean) and set(std) == {1.0}:
        return "pixels / 255"
    columns = [f"numpy.array({v}).reshape(-1, 1, 1)" for v in (mean, std)]
    return f"(pixels / 255 - {columns[0]}) / {columns[1]}"
