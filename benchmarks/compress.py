"""What lossy transport costs and saves: bytes, and milliseconds of one core, for one upload.

python benchmarks/compress.py --encoder resnet18
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch

from furlong.core.payload import Weights
from furlong.core.weights import snapshot
from furlong.engines.codec import How, decode, encode
from furlong.nn.encoders import build_encoder


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    down = snapshot(build_encoder(options.encoder))
    up = {
        n: t + 1e-3 * torch.randn_like(t) if t.is_floating_point() else t for n, t in down.items()
    }
    for how in get_args(How):
        residual = encode(up, how, down)[1]
        packed, _ = encode(up, how, down, residual)
        coding = median(lambda: encode(up, how, down, residual), options.repeats)  # noqa: B023
        reading = median(lambda: decode(packed, down), options.repeats)  # noqa: B023
        error = worst(up, decode(packed, down))
        print(
            f"{how:8} {len(packed) / 1e6:6.2f} MB   encode {coding:6.1f} ms   "
            f"decode {reading:5.1f} ms   largest error {error:.1e}"
        )


def median(work: Callable[[], Any], repeats: int) -> float:
    """Milliseconds."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - began))
    return statistics.median(found)


def worst(sent: Weights, got: Weights) -> float:
    """The largest error of any number."""
    return max(float((got[n] - t).abs().max()) for n, t in sent.items() if t.is_floating_point())


if __name__ == "__main__":
    main()
