"""The encoder of a run folder, or of a file that ``furlong export`` wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from furlong.core.layout import PayloadError
from furlong.core.payload import Weights, unpack_tensors
from furlong.core.weights import restore
from furlong.data.augment import preset
from furlong.errors import FurlongError
from furlong.nn.encoders import build_encoder
from furlong.runs.record import RunRecord

MOST_CHANNELS, LARGEST_SIDE = 64, 16_384


def load_encoder(run: str | os.PathLike[str]) -> nn.Module:
    """The encoder of a finished run, in eval mode: float images B×C×H×W in, h B×d out.

    ``run`` is a run folder, or a file that ``furlong export --to safetensors`` wrote. The attribute
    ``transform`` turns uint8 images B×C×H×W into what the encoder expects. An encoder of your own
    (``file.py:factory``) is imported as encoder.json says: open only folders you trust. A file,
    which people pass on, may not name code.
    """
    about, weights = read_encoder(run)
    try:
        name, channels, size = str(about["encoder"]), int(about["channels"]), about["image_size"]
        transform = preset(str(about["augment"]), int(size)).plain
    except KeyError as error:
        raise FurlongError(f"{run} does not say the encoder's {error}.") from None
    except (TypeError, ValueError) as error:
        raise FurlongError(f"{run} does not describe an encoder: {error}.") from None
    if ":" in name and Path(run).is_file():
        raise FurlongError(
            f"{run} holds the encoder {name}, which is made by somebody's code. A file must not "
            "decide what is run: open the run folder, or make the encoder yourself and load the "
            "weights with safetensors."
        )
    encoder = _built(name, channels, int(size), weights, run)
    fill(encoder, weights, run)
    encoder.transform = transform  # type: ignore[assignment]
    return encoder.eval()


def _built(name: str, channels: int, size: int, weights: Weights, where: object) -> nn.Module:
    """The encoder without its weights, if they can be its own: before memory is taken for it."""
    if not (0 < channels <= MOST_CHANNELS and 0 < size <= LARGEST_SIDE):
        raise FurlongError(
            f"{where} describes an encoder of {channels} channels and {size}×{size} pixels: at "
            f"most {MOST_CHANNELS} and {LARGEST_SIDE} are possible."
        )
    if ":" not in name:  # what is not ours may not be able to do without memory
        with torch.device("meta"):
            wanted = build_encoder(name, channels, size).state_dict()
        shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
        if shapes != {key: tuple(tensor.shape) for key, tensor in wanted.items()}:
            raise FurlongError(
                f"{where} describes a {name} for {channels} channels and {size}×{size} pixels, and "
                "its weights are of another network."
            )
    return build_encoder(name, channels, size)


def read_encoder(run: str | os.PathLike[str]) -> tuple[dict[str, Any], Weights]:
    """What encoder.json says, and the weights; of a run folder or of an exported file."""
    place = Path(run)
    if place.is_file():
        weights, metadata = read_weights(place)
        return metadata, weights
    record, path = RunRecord(place), place / "encoder.safetensors"
    about = record.encoder
    if not about or not path.exists():
        raise FurlongError(
            f"{place} has no encoder yet. Is it a run folder, and has the run finished? "
            f"'furlong resume {place}' goes on with an interrupted one."
        )
    record.verify(path.name)
    return about, read_weights(path)[0]


def fill(module: nn.Module, weights: Weights, where: object) -> None:
    """Put the weights of the file ``where`` into ``module``."""
    try:
        restore(module, weights)
    except ValueError as error:
        raise FurlongError(f"{where} does not hold a {type(module).__name__}: {error}") from None


def read_weights(path: Path) -> tuple[Weights, dict[str, Any]]:
    """The tensors of a safetensors file and its metadata."""
    try:
        return unpack_tensors(bytearray(path.read_bytes()))
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except PayloadError as error:
        raise FurlongError(
            f"{path} is damaged, or not a safetensors file of furlong: {error}"
        ) from None
