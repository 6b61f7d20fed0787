"""What lossy transport costs and saves: bytes, and milliseconds of one core, for one upload.

python benchmarks/compress.py [--smoke] [--encoder resnet18]
"""

from __future__ import annotations

from functools import partial
from typing import get_args

import torch
from measuring import medians, parse, parser

from furlong.core.payload import Weights
from furlong.core.weights import snapshot
from furlong.engines.codec import How, decode, encode
from furlong.nn.encoders import build_encoder


def main() -> None:
    """Print a table of medians."""
    words = parser(__doc__)
    words.add_argument("--encoder", default="resnet18")
    words.add_argument("--repeats", type=int, default=9)
    options = parse(words, encoder="small", repeats=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    down = snapshot(build_encoder(options.encoder))
    up = {
        n: t + 1e-3 * torch.randn_like(t) if t.is_floating_point() else t for n, t in down.items()
    }
    for how in get_args(How):
        residual = encode(up, how, down)[1]
        packed, _ = encode(up, how, down, residual)
        works = {
            "encode": partial(encode, up, how, down, residual),
            "decode": partial(decode, packed, down),
        }
        found = medians(works, options.repeats, warm=0)
        error = worst(up, decode(packed, down))
        print(
            f"{how:8} {len(packed) / 1e6:6.2f} MB   encode {found['encode']:6.1f} ms   "
            f"decode {found['decode']:5.1f} ms   largest error {error:.1e}"
        )


def worst(sent: Weights, got: Weights) -> float:
    """The largest error of any number."""
    return max(float((got[n] - t).abs().max()) for n, t in sent.items() if t.is_floating_point())


if __name__ == "__main__":
    main()
