"""Time the augmentation presets, and compare the colour presets with kornia's operations.

    python benchmarks/augment.py [--json] [--smoke] [--batch 128] [--side 32] [--rounds 30]

One thread; each figure is the median processor time of two views of a batch (not the time on the
clock, which counts other programs when the machine is shared). Candidates take turns within a
round, so that a busy machine slows all of them alike. kornia is optional.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import parse, parser, turns
from torch import Tensor

from furlong.data.augment import PRESETS, Augmentation, preset


def kornia_views(recipe: Augmentation, side: int) -> Callable[[Tensor], Any] | None:
    """Two views by kornia with the parameters of ``recipe``; ``None`` when not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import kornia.augmentation as K
    except ImportError:
        return None
    ops: list[Any] = [
        K.RandomResizedCrop((side, side), scale=recipe.scale, ratio=recipe.ratio),
        K.RandomHorizontalFlip(p=recipe.flip),
        K.ColorJitter(*recipe.jitter, p=recipe.jitter_p),
        K.RandomGrayscale(p=recipe.gray),
    ]
    if recipe.blur:
        ops.append(K.RandomGaussianBlur((3, 3), recipe.blur_sigma, p=recipe.blur))
    if any(recipe.mean):
        ops.append(K.Normalize(torch.tensor(recipe.mean), torch.tensor(recipe.std)))
    chain = K.AugmentationSequential(*ops, same_on_batch=False)

    def run(pixels: Tensor) -> Tensor:
        x = pixels.float().div_(255)
        out: Tensor = chain(torch.cat([x, x]))
        return out.contiguous(memory_format=torch.channels_last)

    return run


def main() -> None:
    """Run the benchmark and print its table."""
    words = parser(__doc__)
    words.add_argument("--batch", type=int, default=128)
    words.add_argument("--side", type=int, default=32)
    words.add_argument("--rounds", type=int, default=30)
    words.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parse(words, batch=4, rounds=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A training step frees large activations, after which the C library keeps memory instead of
    # returning it to the system; without this, page faults would be a third of the time.
    torch.ones(7_000_000)
    pixels = torch.randint(0, 256, (args.batch, 3, args.side, args.side), dtype=torch.uint8)

    candidates: dict[str, Callable[[Tensor], Any]] = {}
    missing = False
    for name in PRESETS:
        recipe = preset(name)
        candidates[name] = recipe.views
        if name in ("fedu", "moco_cifar", "fedca") and isinstance(recipe, Augmentation):
            theirs = kornia_views(recipe, args.side)
            missing |= theirs is None
            if theirs is not None:
                candidates[f"{name} (kornia)"] = theirs
    works = {name: partial(run, pixels) for name, run in candidates.items()}
    times = turns(works, args.rounds, warm=3)
    result = {
        name: {"median_ms": statistics.median(values), "min_ms": min(values)}
        for name, values in times.items()
    }
    if args.json:
        print(json.dumps({**vars(args), "views": 2, "threads": 1, "times": result}, indent=2))
        return
    print(f"Two views of {args.batch} images of {args.side}×{args.side}, one thread")
    print(f"{'preset':24}{'median ms':>11}{'fastest ms':>12}{'kornia / ours':>15}")
    for name, row in result.items():
        theirs = result.get(f"{name} (kornia)")
        ratio = f"{theirs['median_ms'] / row['median_ms']:14.1f}×" if theirs else ""
        print(f"{name:24}{row['median_ms']:11.2f}{row['min_ms']:12.2f}{ratio}")
    if missing:
        print("kornia is not installed, so nothing to compare with: pip install kornia")


if __name__ == "__main__":
    main()
