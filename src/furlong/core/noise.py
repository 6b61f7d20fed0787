"""Random numbers that only the holder of a secret can repeat, for noise that is to protect.

A run's seed is known to everybody who takes part, so noise made from it could be taken away again.
This noise is made from a secret of 32 bytes by SHAKE-256. It depends on the secret and on names and
contents only: what is computed again from the same values gets the same noise, which tells nothing
new, and other values get other noise, so that two results never share it.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.core.payload import flatten
from furlong.errors import FurlongError
from furlong.files import sync

KEY = "noise.key"
_BYTES = 32
_LEFT = f"Delete it: whoever has {KEY} and what clients sent can take the noise away."


def secret_in(folder: Path, begun: bool = False) -> bytes:
    """The secret that ``folder`` keeps, readable by its owner only; made if it is not there.

    ``begun``: something has been made with it already, so it must be there.
    """
    path = folder / KEY
    if path.exists():
        secret = path.read_bytes()
        if len(secret) != _BYTES:
            raise FurlongError(f"{path} has {len(secret)} bytes instead of {_BYTES}: put it back.")
        return secret
    if begun:
        raise FurlongError(
            f"{path} is gone. Without it a round that is computed again gets other noise over the "
            "same images, which spends the budget a second time. Put it back, or start a new run."
        )
    folder.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(_BYTES)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
    sync(path)
    sync(folder)
    return secret


def forget(folder: Path, say: Callable[[str], None]) -> None:
    """Delete ``folder`` if it is there, and with it the secret; what stays is said."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        say(f"warning: {folder} cannot be deleted. {_LEFT}")


def forget_secret(folder: Path, say: Callable[[str], None]) -> None:
    """Delete the secret of ``folder``, if it has one, and nothing else."""
    path = folder / KEY
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        say(f"warning: {path} cannot be deleted ({error.strerror}). {_LEFT}")


def secret_from(*parts: object) -> bytes:
    """A secret that depends on ``parts``, of which one should be secret."""
    return hashlib.sha256(repr(parts).encode()).digest()


def digest(value: Any) -> str:
    """A mark of a payload's tensors."""
    found = hashlib.sha256()
    for path, tensor in flatten(value)[0].items():
        found.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def repeatable(device: torch.device) -> bool:
    """Whether ``device`` gives the same bits again for the same work; an accelerator need not."""
    return device.type == "cpu"


def arithmetic(device: torch.device) -> str:
    """What the lowest bits of a result depend on, beside all that goes into it.

    The same noise on two results that differ in these bits would fall out of their difference.
    """
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {device.type}"


class Noise:
    """A stream of numbers for ``where``, in float64 on the CPU."""

    def __init__(self, secret: bytes, *where: object) -> None:
        self._key = secret_from(secret, *where)
        self._drawn = 0

    def uniform(self, count: int) -> Tensor:
        """``count`` numbers between 0 and 1, never either."""
        self._drawn += 1
        stream = hashlib.shake_256(self._key + self._drawn.to_bytes(8, "little"))
        if not count:
            return torch.empty(0, dtype=torch.float64)
        whole = torch.frombuffer(bytearray(stream.digest(8 * count)), dtype=torch.int64)
        return ((whole >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53

    def normal(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Independent numbers of N(0, 1), by Box and Muller's formula."""
        count = math.prod(shape)
        half = (count + 1) // 2
        first, second = self.uniform(2 * half).view(2, half)
        radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].view(shape)

    def order(self, count: int) -> Tensor:
        """A permutation of ``count``."""
        return self.uniform(count).argsort()

    def seed(self) -> int:
        """A 63-bit number for torch's generator, where nobody else may repeat what it draws."""
        return int.from_bytes(secret_from(self._key, "seed")[:8], "little") >> 1
