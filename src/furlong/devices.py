"""Where torch computes, and how tensors get there."""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.errors import FurlongError

WITHOUT_WAITING = frozenset({"cuda"})
"""Kinds of devices to which tensors are copied while the host goes on. Not MPS: there a copy can
read memory that the host has used for something else meanwhile (pytorch issue 189690)."""


def pick_device(name: str) -> torch.device:
    """``auto`` is the accelerator if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps", "xpu"):
            raise RuntimeError("it does not compute")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FurlongError(f"--device {name} cannot be used: {reason}. Try auto or cpu.") from None
    return device


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, if possible without waiting for what the device does now."""
    return tensor.to(device, non_blocking=device.type in WITHOUT_WAITING)
