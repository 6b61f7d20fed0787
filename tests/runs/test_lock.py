"""The bits of tiny runs of every method: moving code, or making it faster, must not change them.

``python tests/runs/test_lock.py NAME`` adds the run of a new method to lock.json. Without a name it
writes the file anew: that is right only after a change that is meant to change results, and its
commit says why. Other processors round differently: the lock holds
the digest of a small computation, and where that differs there is nothing to compare.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pinned
from torch import nn

import furlong
from furlong.core.payload import flatten, unpack
from furlong.runs import checkpoint

LOCK = Path(__file__).parent / "lock.json"
TINY: dict[str, Any] = {
    "data": "shapes",
    "data.images": 96,
    "data.test_images": 20,
    "data.image_size": 16,
    "data.partition": "classes:4",
    "encoder": "small",
    "clients": 3,
    "rounds": 2,
    "batch_size": 8,
    "workers": 1,
    "evaluate.probe": "none",
    "evaluate.k": 5,
}
MORE: dict[str, dict[str, Any]] = {
    "furlong": {"init": "random"},
    "fedca": {"public": "shapes", "data.public_images": 32, "method.align_epochs": 1},
    "fcl": {"method.bank": 16},
    "fedmae": {"encoder": "vit_mini"},
    "fedu": {"method.threshold": 0.01, "rounds": 3},
    "ssd": {"method.projection_head": "mlp:32:192"},
    "mfcl": {"method.representation": "rep16", "method.server_epochs": 2},
}
ADAM = {"optimiser.name": "adam", "optimiser.lr": 0.001, "optimiser.weight_decay": 5e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "fedsimclr, adam, moments kept": {"method": "fedsimclr", **ADAM, "optimiser.persist": True},
    "fedsimclr, lars": {"method": "fedsimclr", "optimiser.name": "lars"},
    "fedsimclr, groupnorm": {"method": "fedsimclr", "model.early_norm": "gn"},
    "fedsimclr, half of the clients": {"method": "fedsimclr", "fraction": 0.7, "clients": 4},
    "fedsimclr, cnn5": {"method": "fedsimclr", "encoder": "cnn5", "data.image_size": 32},
    "fedu, alone": {"method": "fedu", "bound": "single"},
    "fedu, pooled": {"method": "fedu", "bound": "pooled"},
    "fedu, adam": {"method": "fedu", **ADAM},
    **{
        f"fedsimclr, statistics {policy}": {"method": "fedsimclr", "method.bn_stats": policy}
        for policy in ("pooled", "local", "recalibrate")
    },
    **{
        f"fedbyol, rule {rule}": {"method": "fedbyol", "server.rule": rule, "clients": 5}
        for rule in ("momentum", "adam", "median", "multi_krum", "norm_bound")
    },
}
RUNS = {
    **{name: {"method": name, **MORE.get(name, {})} for name in furlong.METHODS},
    **VARIANTS,
}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, shapes, dtypes and values, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(
            value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    return found.hexdigest()[:32]


def arithmetic() -> str:
    """A digest that is the same only where a small network computes the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Conv2d(32, 64, 3, stride=2), nn.Flatten(), nn.Linear(64 * 49, 128),
            )  # fmt: skip
            net(torch.rand(8, 3, 16, 16)).logsumexp(1).sum().backward()
        gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        return f"torch {torch.__version__}, {digest(gradients)}"
    finally:
        torch.set_num_threads(before)


def result_of(options: dict[str, Any], out: Path) -> dict[str, str]:
    """Digests of what a tiny run leaves: the server, its clients, the encoder."""
    given = {**TINY, **options, "out": str(out)}
    fixed = pinned(given["method"], given["encoder"] == "small")
    run = furlong.run({}, **{**fixed, **given})
    saved = checkpoint.load(run.folder)
    assert saved is not None
    clients: dict[str, torch.Tensor] = {}
    for client, path in saved.clients.items():
        tensors = flatten(unpack(path.read_bytes()))[0]
        clients |= {f"{client}/{name}": value for name, value in tensors.items()}
    return {
        "server": digest(flatten(saved.server)[0]),
        "clients": digest(clients),
        "encoder": digest(dict(run.encoder.state_dict())),
        "weights_sha256": run.summary["weights_sha256"][:32],
    }


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(LOCK.read_text())
    if found["arithmetic"] != arithmetic():
        pytest.skip("this machine rounds differently from the one that wrote the lock")
    return found


# of each method there is a run in the quick suite; most of its variants are in the slow one
SLOW = [name for name in VARIANTS if not name.startswith(("fedsimclr, adam", "fedu, "))]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNS]
)
def test_same_bits(name: str, lock: dict[str, Any], tmp_path: Path) -> None:
    assert result_of(RUNS[name], tmp_path / "run") == lock["runs"][name]


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(RUNS)
    runs = json.loads(LOCK.read_text())["runs"] if sys.argv[1:] else {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = result_of(RUNS[name], Path(folder) / "run")
        print(f"{name}: {runs[name]['server']}", file=sys.stderr)
    LOCK.write_text(json.dumps({"arithmetic": arithmetic(), "runs": runs}, indent=1) + "\n")
