"""docs/scenes.png: some of the scenes that ``--init scenes`` learns from.

python benchmarks/recipe/picture.py docs/scenes.png
"""

from __future__ import annotations

import sys

import torch
from PIL import Image

from furlong.data.scenes import scenes

ROWS, COLUMNS, SIZE = 3, 14, 48


def main(path: str) -> None:
    """Draw them side by side."""
    drawn = scenes(ROWS * COLUMNS, SIZE, 3, torch.Generator().manual_seed(0))
    sheet = drawn.unflatten(0, (ROWS, COLUMNS)).permute(0, 3, 1, 4, 2)
    Image.fromarray(sheet.reshape(ROWS * SIZE, COLUMNS * SIZE, 3).numpy()).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
