"""Where torch computes."""

from __future__ import annotations

import torch

from furlong.errors import FurlongError


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
