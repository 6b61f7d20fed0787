"""The weights that a run starts from (``--init``): where they come from, and which of them fit.

A file's tensors are matched to the encoder's by name, under whatever prefix the file has
(``module.``, ``backbone.``, ``state_dict.encoder_q.``). Nothing of a file is ever executed.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from furlong.core.context import Setup
from furlong.core.given import Given
from furlong.core.payload import Weights, pack_tensors
from furlong.core.weights import first_nonfinite, snapshot
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.runs.config import RANDOM, Config
from furlong.runs.drawn import NAME, drawn, steps_of
from furlong.runs.saved_encoder import fill, read_encoder, read_weights
from furlong.seeding import seeded

HUB = "hf:"
_FILES = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "*.pth", "*.pt")
State = Literal["matched", "adapted", "missing", "other shape", "too many", "left out"]
_WRONG: tuple[State, ...] = ("missing", "other shape", "too many")
# torchvision's transformers have names of their own; all others agree with timm
_TORCHVISION = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"^(blocks\.\d+)\.ln_(\d)\.", r"\1.norm\2."),
    (r"^(blocks\.\d+)\.self_attention\.in_proj_", r"\1.attn.qkv."),
    (r"^(blocks\.\d+)\.self_attention\.out_proj\.", r"\1.attn.proj."),
    (r"^(blocks\.\d+)\.mlp\.(0|linear_1)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.mlp\.(3|linear_2)\.", r"\1.mlp.fc2."),
)


@dataclass(frozen=True)
class Row:
    """What became of one tensor of the encoder or of the file."""

    name: str
    state: State
    why: str = ""


@dataclass(frozen=True)
class Initial:
    """Weights for every tensor of an encoder, and what became of those of the source."""

    source: str
    weights: Weights
    prefix: str  # of the file's names
    rows: tuple[Row, ...]

    def table(self) -> Iterator[str]:
        """The rows in a few lines: those that differ with their reasons, alike ones together.

        Nothing of a run that goes on: it has said so before.
        """
        if not self.rows:
            return
        of = len(self.weights)
        used = sum(row.state in ("matched", "adapted") for row in self.rows)
        prefix = f", whose names begin with {self.prefix}" if self.prefix else ""
        yield f"initial weights from {self.source}{prefix}: {used} of the encoder's {of} tensors"
        for (state, why), rows in self._grouped().items():
            names = [row.name for row in rows]
            some = ", ".join(names) if len(names) < 5 else f"{names[0]} … {names[-1]}"
            yield f"  {state:<11} {len(rows):>4}  {some}" + (f": {why}" if why else "")

    def about(self) -> dict[str, Any]:
        """initial.json."""
        return {
            "source": self.source,
            "prefix": self.prefix,
            "sha256": digest(self.weights),
            "tensors": [[row.name, row.state, row.why] for row in self.rows],
        }

    def _grouped(self) -> dict[tuple[State, str], list[Row]]:
        groups: dict[tuple[State, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.state, row.why), []).append(row)
        return groups


def digest(weights: Weights) -> str:
    """SHA-256 of tensors with their names."""
    return hashlib.sha256(pack_tensors(weights, {})).hexdigest()


# ---------------------------------------------------------------- for a run


def begun(
    settings: Config, setup: Setup, saved: Path | None, tell: Callable[[str], None] | None
) -> tuple[Setup, Initial | None]:
    """``setup`` with the weights that ``model.init`` names.

    ``saved``: the encoder before training of a run that goes on; then the source is not needed.
    ``tell`` hears of long work. Without it nothing is learnt: weights that would have to be learnt
    first are random, for whoever only wants to know their sizes.
    """
    model = settings.model
    if model.init in (None, RANDOM):
        for name, value in (
            ("model.freeze", model.freeze if model.freeze != "none" else None),
            ("model.adapter", model.adapter if model.adapter != "none" else None),
            ("optimiser.encoder_rate", settings.optimiser.encoder_rate),
        ):
            if value not in (None, 1.0):
                raise FurlongError(
                    f"{name} is {value}, but the encoder starts from random weights, and these "
                    "must be learnt. Give --init SOURCE, or leave it out."
                )
        return setup, None
    if model.adapter != "none" and settings.optimiser.encoder_rate != 1:
        raise FurlongError(
            "optimiser.encoder_rate is for weights that the encoder begins with; with "
            "model.adapter none of them is trained. Leave one of them out."
        )
    with seeded(torch.device("cpu"), setup.seed, "initial"):  # for tensors that the source lacks
        encoder = build_encoder(setup.encoder, setup.channels, setup.image_size)
    if saved is not None and saved.exists():
        fill(encoder, read_weights(saved)[0], saved)
        found = Initial(model.init, snapshot(encoder), "", ())
    else:
        found = fitted(encoder, _weights(model.init, encoder, setup, tell), model.init)
        if model.init_mismatch == "error":
            _require_whole(found, setup, encoder)
    given = replace(setup.given or Given({}, seed=setup.seed), weights=found.weights)
    return replace(setup, given=given), found


def _weights(
    name: str, encoder: nn.Module, setup: Setup, tell: Callable[[str], None] | None
) -> Weights:
    """The tensors of a source by their names there; what is learnt on scenes fits by itself."""
    if steps_of(name) is None:
        return source(name)
    return snapshot(encoder) if tell is None else drawn(setup, name, tell)


def fixed(setup: Setup) -> Weights:
    """The encoder's tensors that no exchange carries: every party needs them once."""
    if setup.given is None:
        return {}
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(setup.encoder, setup.channels, setup.image_size)
    return {name: setup.given.weights[name] for name in setup.given.fixed(encoder)}


def _require_whole(found: Initial, setup: Setup, encoder: nn.Module) -> None:
    """Refuse weights of another network."""
    wrong = [row for row in found.rows if row.state in _WRONG]
    if not wrong:
        return
    base = setup.encoder.removesuffix("_small").removesuffix("_large")
    hint = ""
    if base in ("resnet18", "resnet50") and {row.name for row in wrong} == {"conv1.weight"}:
        stem = "small" if encoder.get_parameter("conv1.weight").shape[-1] == 7 else "large"
        hint = f" The file's first convolution is that of --encoder {base}_{stem}."
    raise FurlongError(
        "\n".join(found.table()) + f"\nThe source does not fit the encoder {setup.encoder}.{hint} "
        "Give the encoder that it was made for, or --model.init-mismatch allow: what does not fit "
        "then starts from random weights."
    )


# ---------------------------------------------------------------- which tensors fit


def fitted(encoder: nn.Module, found: Mapping[str, Tensor], name: str) -> Initial:
    """The tensors of a source in the places of the encoder's; what it lacks stays as it is."""
    weights = snapshot(encoder)
    named = _renamed(found)
    prefix, inside = _places(named, weights)
    first = next((key for key, tensor in weights.items() if tensor.dim() == 4), "")
    rows: list[Row] = []
    for key, own in weights.items():
        file_key = prefix + key.removeprefix(inside) if key.startswith(inside) else ""
        tensor = named.pop(file_key, None)
        row, value = _row(encoder, key, own, tensor, first)
        rows.append(row)
        if value is not None:
            weights[key] = value.to(own.dtype, copy=True)
    tops = {key.removeprefix(inside).split(".")[0] for key in weights if key.startswith(inside)}
    for key in named:
        extra = key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] in tops
        why = "the encoder has no such tensor there" if extra else "not part of the encoder"
        rows.append(Row(key, "too many" if extra else "left out", why))
    bad = first_nonfinite(weights)
    if bad is not None:
        raise FurlongError(f"{name}: {bad} holds NaN or infinity. The source is damaged.")
    order: list[State] = ["matched", "adapted", *_WRONG, "left out"]
    rows.sort(key=lambda row: order.index(row.state))  # stable
    return Initial(name, weights, prefix, tuple(rows))


def _row(
    encoder: nn.Module, name: str, own: Tensor, tensor: Tensor | None, first: str
) -> tuple[Row, Tensor | None]:
    """What becomes of the encoder's tensor ``name``, and its new value."""
    if tensor is None:
        if name.endswith("num_batches_tracked"):  # counts for nothing; files of old torch lack it
            return Row(name, "matched", "not in the file, and not needed"), None
        return Row(name, "missing", "not in the source"), None
    if tensor.shape == own.shape:
        return Row(name, "matched"), tensor
    into = own.shape[1] if own.dim() == 4 else 0
    if name == first and tensor.dim() == 4 and _without(tensor, 1) == _without(own, 1):
        had = tensor.shape[1]
        return Row(name, "adapted", f"from {had} to {into} channels"), channels(tensor, into)
    # an encoder may know how a tensor of another shape becomes its own (positions of a transformer)
    adapt = getattr(encoder, "adapted", lambda _name, _tensor: None)
    value = adapt(name, tensor)
    shapes = f"from {_size(tensor)} to {_size(own)}"
    if isinstance(value, Tensor) and value.shape == own.shape:
        return Row(name, "adapted", shapes), value
    return Row(name, "other shape", f"{_size(tensor)} in the source, {_size(own)} here"), None


def channels(weight: Tensor, into: int) -> Tensor:
    """The first convolution, out×C×kh×kw, for images of ``into`` channels.

    Grey images get the sum over the channels, so they give what the same images in colour would;
    otherwise channels repeat, scaled so that the outputs stay as large as they were (as in timm).
    """
    have = weight.shape[1]
    if into == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, [i % have for i in range(into)]] * (have / into)


def _places(found: Mapping[str, Tensor], weights: Weights) -> tuple[str, str]:
    """Which beginning of names in the file stands for which beginning of the encoder's."""
    insides = [""] + ["discriminator."] * any(name.startswith("discriminator.") for name in weights)
    matches: Counter[tuple[str, str]] = Counter()
    for inside in insides:
        own = {name.removeprefix(inside) for name in weights if name.startswith(inside)}
        for key in found:
            parts = key.split(".")
            for at in range(len(parts)):
                if ".".join(parts[at:]) in own:
                    matches[".".join([*parts[:at], ""]), inside] += 1
    if not matches:
        raise FurlongError(
            f"the source has none of the encoder's tensors: it has {_some(found)}, the encoder "
            f"{_some(weights)}. Is it the right --encoder?"
        )
    return matches.most_common(1)[0][0]  # of equals the first in the file


def _renamed(found: Mapping[str, Tensor]) -> Weights:
    """The names of timm, if a transformer has those of torchvision."""
    named = dict(found)
    if "encoder.layers.encoder_layer_0.ln_1.weight" in named:
        for pattern, new in _TORCHVISION:
            named = {re.sub(pattern, new, key): tensor for key, tensor in named.items()}
    return named


def _without(tensor: Tensor, dim: int) -> list[int]:
    return [n for i, n in enumerate(tensor.shape) if i != dim]


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _some(names: Iterable[str]) -> str:
    return ", ".join([*names][:3]) + ", …"


# ---------------------------------------------------------------- where they come from


def source(name: str) -> Weights:
    """The tensors of what ``--init`` names, by their names there."""
    if name.startswith(HUB):
        return _file(_from_hub(name.removeprefix(HUB)))
    path = Path(name)
    if (path / "encoder.json").exists() or (path / "config.toml").exists():  # a run's folder
        return read_encoder(path)[1]
    if path.is_dir():
        return _file(path / _chosen(_names(path), name))
    if not path.exists():
        raise FurlongError(
            f"--init {name}: there is no such file or folder. It takes a run folder, a file "
            f"(.safetensors, .pt, .pth), {HUB}OWNER/NAME of a repository on the Hub, {NAME}, or "
            f"{RANDOM}."
        )
    return _file(path)


def by_furlong(name: str | None) -> bool:
    """Whether weights come from a run of furlong: which images that has seen is not known here."""
    if name is None or name.startswith(HUB) or name == RANDOM or steps_of(name) is not None:
        return False
    path = Path(name)
    if not path.exists() or any((path / file).exists() for file in ("encoder.json", "config.toml")):
        return True  # what is gone may have been one
    file = path / "model.safetensors" if path.is_dir() else path
    return file.suffix == ".safetensors" and file.is_file() and "method" in read_weights(file)[1]


def located(name: str) -> str:
    """``name`` as it is written down: of a path the whole."""
    known = name.startswith(HUB) or name == RANDOM or steps_of(name) is not None
    return name if known else str(Path(name).resolve())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _chosen(names: list[str], where: str) -> str:
    """The file of a folder or repository that holds the weights."""
    for pattern in _FILES:
        found = [name for name in names if Path(name).match(pattern) and "/" not in name]
        if len(found) == 1:
            return found[0]
        if found:
            raise FurlongError(f"{where} has several: {', '.join(found)}. Name one of them.")
    raise FurlongError(f"{where} has no file of weights ({', '.join(_FILES)}).")


def _from_hub(name: str) -> Path:
    """The file of weights of OWNER/NAME or OWNER/NAME@REVISION, fetched or from the Hub's cache."""
    from huggingface_hub import hf_hub_download, list_repo_files

    repository, _, revision = name.partition("@")
    try:
        names = list_repo_files(repository, revision=revision or None)
        chosen = _chosen(names, HUB + name)
        return Path(hf_hub_download(repository, chosen, revision=revision or None))
    except FurlongError:
        raise
    except Exception as error:  # no network, no such repository, no permission
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FurlongError(
            f"cannot fetch {HUB}{name}: {reason[:300]}. Fetch its file of weights on a machine "
            "that can, and give --init FILE."
        ) from None


def _file(path: Path) -> Weights:
    """The tensors of a safetensors file, or of one that torch wrote."""
    if path.suffix == ".safetensors":
        return read_weights(path)[0]
    try:
        # weights_only: torch reads tensors and plain containers, and refuses whatever would run
        held = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # the unpickler's own, of which there are many
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if reason.startswith("Weights only"):  # torch advises to execute it all the same
            asked = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it asks for {asked[1]}" if asked else "torch refuses it"
        raise FurlongError(
            f"{path} is damaged, or holds more than tensors, and nothing of a file is executed "
            f"({reason[:200]}). Save its state dict, best as .safetensors."
        ) from None
    tensors = dict(_tensors(held, ""))
    if not tensors:
        raise FurlongError(f"{path} holds no tensors.")
    return tensors


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors in dicts within dicts, by names joined with dots."""
    if isinstance(value, Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}" if path else str(key))
