"""The laboratory of a recipe of our own: ideas at equal budget (docs/recipe.md).

    python benchmarks/recipe.py --part gap              # run what is missing, then print
    python benchmarks/recipe.py --part ideas --only momentum --seeds 100
    python benchmarks/recipe.py --part gap --show       # print what is there

Every run sees the same number of images: 5,000 of CIFAR-10 for five clients with two classes each,
20 rounds of one epoch. Accuracy is that of 10,000 images held out of the *training* images, on
seeds 100 to 102, so nothing is chosen on what is reported later: the parts whose name begins with
``furlong`` are that report, on seeds 0 to 2 and the test images, and so is ``--part table`` of
``learning.py``. Runs and files are as there: two runs side by side, finished ones kept as numbers
in ``benchmarks/recipe``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import series
from series import Options, Part

SEEDS = (100, 101, 102)
QUICK: Options = {
    "data": "cifar10",
    "data.validation": "true",
    "data.images": 15000,
    "data.test-images": 10000,
    "rounds": 20,
    "evaluate.knn-every": 20,
    "run.save-every": 5,
}
HERE = Path(__file__).parent / "recipe"
BASE: Options = {"method": f"{HERE / 'ideas.py'}:Ideas"}  # FedSimCLR, bit for bit
GROUPNORM: Options = {
    "encoder": f"{HERE / 'groupnorm.py'}:small_gn",
    "method.projection-head": "mlp:256:128:bn",
}
KEPT: Options = {"optimiser.persist": "true"}
POOLED: Options = {"bound": "pooled"}
FALLING: Options = {"optimiser.schedule": "cosine"}
IID: Options = {"partition": "iid"}


def ideas(**options: Any) -> Options:
    """Options of the method of ideas."""
    return {f"method.{name.replace('_', '-')}": value for name, value in options.items()}


def outer(momentum: float) -> Options:
    """Momentum at the server."""
    return {"server.rule": "momentum", "server.momentum": momentum}


def part(about: str, rows: dict[str, Options], against: str) -> Part:
    """Ideas at the laboratory's budget; options of a row come on top of the base's."""
    every = {name: {**BASE, **options} for name, options in rows.items()}
    return Part(about, QUICK, every, against=against, seeds=SEEDS)


def parts() -> dict[str, Part]:
    """Every series of ideas by its name."""
    relay = ideas(chains=1)
    elsewhere: dict[str, Options] = {
        "iid": IID,
        "dirichlet:0.3": {"partition": "dirichlet:0.3"},
        "10 clients": {"clients": 10},
        "50 clients": {"clients": 50, "batch-size": 16},
        "figures": {"data": "shapes"},
    }
    return {
        "gap": part(
            "where the gap to pooled training comes from",
            {
                "federated": {},
                "pooled": POOLED,
                "federated, iid": IID,
                "pooled, batches of 160": {**POOLED, "batch-size": 160},
                "one after another": relay,
                "one after another, iid": {**relay, **IID},
                "one after another, moments carried": {**relay, **ideas(carry="true")},
                "one after another, norms fixed": {**relay, **ideas(fix_norm_from=0.3)},
                "one after another, 6 steps each": {**relay, **ideas(averagings=5)},
                "one after another, 6 steps each, moments carried": {
                    **relay,
                    **ideas(averagings=5, carry="true"),
                },
                "federated, moments kept": KEPT,
                "federated, GroupNorm": GROUPNORM,
                "federated, averaged every step": ideas(averagings=31),
                "federated, averaged every 15 steps": ideas(averagings=2),
                "federated, averaged every 155 steps": {"rounds": 4, "epochs": 5},
            },
            against="federated",
        ),
        "ideas": part(
            "one idea at a time",
            {
                "none": {},
                "server's momentum 0.6": outer(0.6),
                "server's momentum 0.8": outer(0.8),
                "batches of 16": {"batch-size": 16},
                "batches of 16, momentum 0.6": {"batch-size": 16, **outer(0.6)},
                "average of rounds 0.8": ideas(average=0.8),
                "relay, average 0.8": {**relay, **ideas(average=0.8)},
                "two relays, average 0.8": ideas(chains=2, average=0.8),
                "rate 0.004": {"optimiser.lr": 0.004},
                "two small views": ideas(small_views=2),
                "rotations 0.5": ideas(rotation=0.5),
                "τ 0.1": ideas(temperature=0.1),
                "τ 0.5": ideas(temperature=0.5),
                "projector 512-512-128": ideas(projection_head="mlp:512:512:128:bn"),
                "crops from 0.2": ideas(crop_from=0.2),
                "colours 0.2": ideas(jitter=0.2),
                "decorrelation 0.1": {"optimiser.decorrelation": 0.1},
                "others' moments 0.1": ideas(moments=0.1),
                "others' normal distributions": ideas(synthetic=32),
                "Barlow Twins 0.1": ideas(barlow=0.1),
                "others' negatives expected, own 0.2": ideas(own=0.2),
                "others' negatives expected, own 0.6": ideas(own=0.6),
                "relay, others' negatives expected, own 0.2": {**relay, **ideas(own=0.2)},
                "distillation 0.5": ideas(distil=0.5),
                "nearest negatives left out": ideas(margin=0.05),
                "debiased 0.1": ideas(prior=0.1),
                "pooled statistics": ideas(bn_stats="pooled"),
            },
            against="none",
        ),
        "start": Part(
            "how long to learn from drawn scenes",
            QUICK,
            {
                f"{steps} steps{which}": {"method": "furlong", "init": f"scenes:{steps}", **way}
                for which, way in (("", {}), (", pooled", {**POOLED, **FALLING}))
                for steps in (2000, 16000)
            }
            | {
                f"16000 steps, {name}": {"method": "furlong", "init": "scenes:16000", **way}
                for name, way in {
                    "rate 0.001": {"optimiser.lr": 0.001},
                    "rate 0.0005": {"optimiser.lr": 0.0005},
                    "rate 0.001, pooled": {"optimiser.lr": 0.001, **POOLED, **FALLING},
                    "falling rate": FALLING,
                    "without momentum": {"server.rule": "mean"},
                    "momentum 0.8": outer(0.8),
                    "momentum 0.9": outer(0.9),
                }.items()
            },
            seeds=SEEDS[:1],
            pairs=tuple((f"{n} steps", f"{n} steps, pooled") for n in (2000, 16000)),
        ),
        "furlong": Part(
            "the recipe, what each part of it adds, and pooled training; test images",
            {**QUICK, "data.validation": "false", "data.images": 5000},
            {
                "furlong": {"method": "furlong"},
                "fedsimclr": {"method": "fedsimclr"},
                "furlong, pooled": {"method": "furlong", **POOLED, **FALLING},
                "fedsimclr, pooled": {"method": "fedsimclr", **POOLED},
                "furlong, from nothing": {"method": "furlong", "init": "random"},
                "furlong, start of 2000 steps": {"method": "furlong", "init": "scenes:2000"},
                "furlong, two views": {"method": "furlong", **ideas(views=2)},
                "furlong, without momentum": {"method": "furlong", "server.rule": "mean"},
                "furlong, falling rate": {"method": "furlong", **FALLING},
                "fedsimclr, from scenes": {"method": "fedsimclr", "init": "scenes"},
                "fedsimclr, 40 rounds": {"method": "fedsimclr", "rounds": 40},
            },
            against="fedsimclr",
            pairs=(
                ("furlong", "furlong, pooled"),
                ("furlong", "furlong, from nothing"),
                ("furlong", "furlong, start of 2000 steps"),
                ("furlong", "furlong, two views"),
                ("furlong", "furlong, without momentum"),
                ("furlong", "furlong, falling rate"),
                ("furlong", "fedsimclr, 40 rounds"),
            ),
        ),
        "furlong-elsewhere": Part(
            "other partitions and images, 5,000 images, 20 rounds; test images",
            {**QUICK, "data.validation": "false", "data.images": 5000},
            {
                f"{place}: {method}": {"method": method, **options}
                for place, options in elsewhere.items()
                for method in ("furlong", "fedsimclr")
            },
            pairs=tuple((f"{place}: furlong", f"{place}: fedsimclr") for place in elsewhere),
        ),
        "furlong-fashion": Part(
            "images of another kind: 5,000 of Fashion-MNIST, two classes per client, 20 rounds",
            {**QUICK, "data": "fashion_mnist", "data.validation": "false", "data.images": 5000},
            {
                **{
                    name: {"method": name}
                    for name in ("furlong", "fedsimclr", "ldawa", "fedmoco", "fedbyol", "fedu")
                },
                "furlong, pooled": {"method": "furlong", **POOLED, **FALLING},
                "furlong, from nothing": {"method": "furlong", "init": "random"},
            },
            against="fedsimclr",
            pairs=(("furlong", "furlong, pooled"), ("furlong", "furlong, from nothing")),
        ),
    }


if __name__ == "__main__":
    series.main(__doc__, parts(), HERE, Path("runs/recipe"))
