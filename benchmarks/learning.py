"""What the methods learn, and which claims of their papers hold (docs/results.md).

    python benchmarks/learning.py --part usual-shapes      # run what is missing, then print
    python benchmarks/learning.py --part fedca --only K=256 --seeds 0,1
    python benchmarks/learning.py --part table --show      # print what is there
    python benchmarks/learning.py --part table --show --into docs/results.md
    python benchmarks/learning.py --smoke                  # one tiny run on figures

A part is a list of rows, which are options of ``furlong run``; ``series.py`` runs and prints them,
and keeps a few numbers of every finished run in ``benchmarks/learning/PART.json``.
Parts whose name begins with ``choose`` are for choosing settings: seeds from 100 on, and tested on
images held out of the training images. All others have seeds 0 to 2 and the test images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import series
from series import HELD, Options, Part

KEPT = Path(__file__).parent / "learning"
METHODS = (
    *("furlong", "fedsimclr", "ldawa", "fedmoco", "fcl", "fedca", "fedx", "fedsc", "ssd"),
    *("fedbyol", "fedsimsiam", "fedbarlow", "fedvicreg", "fedu", "fedema", "fedu2"),
    *("fedswav", "feddc", "orchestra", "fedrot", "fedae", "fedmae", "mfcl"),
)
SUPERVISED = ("fedavg", "fedprox", "moon")


CIFAR: Options = {"data": "cifar10", "data.images": 5000, "data.test-images": 5000}
TABLE: Options = {**CIFAR, "data.images": 10000, "data.test-images": 10000}
QUIET: Options = {"evaluate.knn-every": 10, "run.save-every": 5}
SHORT: dict[str, dict[str, Options]] = {
    "fedbarlow": {
        "rate 0.001, batch 32, 60 rounds": {
            "optimiser.lr": 0.001,
            "batch-size": 32,
            "rounds": 60,
        },
        "60 rounds": {"rounds": 60},
        "off-diagonal 0.0051": {"method.off-diagonal": 0.0051},
        "off-diagonal 0.02": {"method.off-diagonal": 0.02},
        "off-diagonal 0.05": {"method.off-diagonal": 0.05},
        "head 512-512": {"method.projection-head": "mlp:512:512"},
    },
    "fedsimsiam": {  # without steps of the predictor alone, at the rate and rounds of that time
        name: {"method.predictor-steps": 0, "optimiser.lr": 0.0005, "rounds": 80, **options}
        for name, options in {
            "batch 16": {"batch-size": 16},
            "batch 16, 40 rounds, rate 0.001": {
                "batch-size": 16,
                "rounds": 40,
                "optimiser.lr": 0.001,
            },
            "constant rate": {"optimiser.schedule": "constant"},
            "constant rate 0.0003": {"optimiser.schedule": "constant", "optimiser.lr": 0.0003},
            "server's momentum 0.6": {"server.rule": "momentum", "server.momentum": 0.6},
            "centred head, rate 0.001": {
                "method.projection-head": "mlp:256:256:128:centred",
                "method.prediction-head": "mlp:32:128",
                "optimiser.lr": 0.001,
            },
            # with them
            "predictor's steps 3, rate 0.001": {
                "method.predictor-steps": 3,
                "optimiser.lr": 0.001,
            },
            "predictor's steps 3, rate 0.002, 40 rounds": {
                "method.predictor-steps": 3,
                "optimiser.lr": 0.002,
                "rounds": 40,
            },
            "predictor's steps 0, rate 0.002, 40 rounds": {"optimiser.lr": 0.002, "rounds": 40},
        }.items()
    },
    "orchestra": {
        "80 rounds": {"rounds": 80},
        "60 rounds, constant rate": {"rounds": 60, "optimiser.schedule": "constant"},
        "rate 0.001": {"optimiser.lr": 0.001},
        "batch 16": {"batch-size": 16},
    },
    "fedmae": {
        f"patches of 4, rate {rate}, {rounds} rounds": {
            "encoder": "vit_mini_patch4",
            "optimiser.lr": rate,
            "rounds": rounds,
        }
        for rate, rounds in ((0.001, 20), (0.002, 20), (0.002, 40))
    }
    | {
        "patches normalised, 0.75 masked": {"method.normalise": "true", "method.mask": 0.75},
        "patches normalised, 0.75 masked, rate 0.0003": {
            "method.normalise": "true",
            "method.mask": 0.75,
            "optimiser.lr": 0.0003,
        },
        "patches normalised, 0.75 masked, views flip_crop": {
            "method.normalise": "true",
            "method.mask": 0.75,
            "data.augment": "flip_crop",
        },
        "rate 0.003": {"optimiser.lr": 0.003},
        "rate 0.0003": {"optimiser.lr": 0.0003},
        "views flip_crop": {"data.augment": "flip_crop"},
        "server's momentum 0.8": {"server.rule": "momentum", "server.momentum": 0.8},
        "80 rounds": {"rounds": 80},
    },
}
CHOOSE: Options = {"data.validation": "true", "data.images": 7000, "data.test-images": 2000}


def usual(**options: Any) -> Options:
    """A row of each self-supervised method with nothing but its usual settings."""
    return {name: {"method": name, **options} for name in METHODS}


def parts() -> dict[str, Part]:
    """Every experiment by its name."""
    return {
        "choose-shapes": Part(
            "usual settings on figures that no reported run has",
            {**CHOOSE, **QUIET},
            usual(),
            seeds=(101,),
            gains=True,
        ),
        "choose-cifar10": Part(
            "the same on CIFAR-10", {**CIFAR, **CHOOSE, **QUIET}, usual(), seeds=(101,), gains=True
        ),
        **{
            f"choose-short{where}": Part(
                "methods whose usual settings gained too little on CIFAR-10, with others, on "
                + images,
                {**data, **CHOOSE, **QUIET},
                {
                    f"{method}, {name}": {"method": method, **options}
                    for method, tries in SHORT.items()
                    for name, options in tries.items()
                },
                seeds=(101,),
                gains=True,
            )
            for where, data, images in (("", CIFAR, "CIFAR-10"), ("-shapes", {}, "figures"))
        },
        "choose-demo": Part(
            "what the demo could show: who trained, with which method and how many rounds",
            {**CHOOSE, **QUIET},
            {
                f"{method}@{bound}, {clients} clients": {
                    "method": method,
                    "rounds": rounds,
                    "bound": bound,
                    "clients": clients,
                }
                for clients in (5, 20)
                for method, rounds in (("furlong", 12), ("fedsimclr", 24))
                for bound in ("none", "single", "pooled")
            }
            | {
                f"furlong, {name}": {"method": "furlong", "rounds": 12, **options}
                for name, options in {
                    "momentum 0.8": {"server.momentum": 0.8},
                    "momentum 0.9": {"server.momentum": 0.9},
                    "batches of 16": {"batch-size": 16},
                    "rate 0.004": {"optimiser.lr": 0.004},
                    "24 rounds of two views": {"method.views": 2, "rounds": 24},
                }.items()
            }
            | {
                f"fedsimclr, {name}": {"method": "fedsimclr", "rounds": 24, **options}
                for name, options in {
                    "merged as in L-DAWA": {"server.rule": "ldawa"},
                    "momentum 0.6": {"server.rule": "momentum", "server.momentum": 0.6},
                    "momentum 0.6, constant rate": {
                        "server.rule": "momentum",
                        "server.momentum": 0.6,
                        "optimiser.schedule": "constant",
                    },
                    "constant rate, alone": {"optimiser.schedule": "constant", "bound": "single"},
                    **{
                        f"momentum {m}, constant rate": {
                            "server.rule": "momentum",
                            "server.momentum": m,
                            "optimiser.schedule": "constant",
                        }
                        for m in (0.75, 0.85)
                    },
                    "momentum 0.75": {"server.rule": "momentum", "server.momentum": 0.75},
                    "momentum 0.85": {"server.rule": "momentum", "server.momentum": 0.85},
                    "batches of 16": {"batch-size": 16},
                    "batches of 16, alone": {"batch-size": 16, "bound": "single"},
                }.items()
            }
            | {
                f"{images} images, {rounds} rounds, {who}": {
                    "method": "fedsimclr",
                    "rounds": rounds,
                    "data.images": images + CHOOSE["data.test-images"],
                    **options,
                }
                for images, rounds in ((2500, 24), (2500, 48))
                for who, options in {
                    "alone": {"bound": "single"},
                    "momentum 0.6": {"server.rule": "momentum", "server.momentum": 0.6},
                }.items()
            },
            seeds=(100,),
        ),
        "usual-shapes": Part(
            "`furlong run --method M`, nothing else", {"run.save-every": 100}, usual(), gains=True
        ),
        "usual-cifar10": Part(
            "the same with `--data cifar10` and 5,000 images",
            {**CIFAR, **QUIET},
            usual(),
            gains=True,
        ),
        "table": Part(
            "10,000 images of CIFAR-10, five clients with two classes each, 40 rounds",
            {**TABLE, **QUIET, "rounds": 40, "evaluate.also": "semi-1"},
            {
                **usual(),
                **{name: {"method": name} for name in SUPERVISED},
                # of MFCL's 40 rounds most would go to the sensor, and none to the encoder
                "mfcl": {"method": "mfcl", "rounds": 15, "method.server-epochs": 40},
                "furlong, 20 rounds": {"method": "furlong", "rounds": 20},
                **{
                    f"{name}@{bound}": {"method": name, "bound": bound}
                    for name in ("fedsimclr", "fedbyol", "fedavg")
                    for bound in ("single", "pooled")
                },
                # with the falling rate that suits pooled training, as in recipe.py
                "furlong@pooled": {
                    "method": "furlong",
                    "bound": "pooled",
                    "optimiser.schedule": "cosine",
                },
            },
            against="fedsimclr",
            pairs=(
                ("fedu", "fedbyol"),
                ("fedu", "fedbyol@single"),
                ("fedbyol@pooled", "fedu"),
                ("fcl", "fedca"),
                ("furlong", "furlong@pooled"),
                ("furlong", "ssd"),
                ("furlong, 20 rounds", "ssd"),
            ),
        ),
        "resnet18": Part(
            "ResNet-18: 2,000 images of CIFAR-10, five clients with two classes each, 10 rounds",
            {**TABLE, **QUIET, "data.images": 2000, "encoder": "resnet18", "rounds": 10},
            {
                **{name: {"method": name} for name in ("fedsimclr", "fedbyol", "fedu")},
                **{
                    f"{name}@pooled": {"method": name, "bound": "pooled"}
                    for name in ("fedsimclr", "fedbyol")
                },
            },
            against="fedsimclr",
            pairs=(
                ("fedsimclr@pooled", "fedsimclr"),
                ("fedbyol@pooled", "fedbyol"),
                ("fedu", "fedbyol"),
            ),
        ),
        **claims(),
    }


def claims() -> dict[str, Part]:
    """The papers' claims, in conditions in which they can show; docs/results.md says which."""
    return {
        "fedca": fedca(),
        "fedca-refresh": refresh(),
        "fcl": fcl(),
        "fedu": fedu(),
        "mfcl": mfcl(),
        "mfcl-table7": table7(),
    }


# 155 steps of 64 images per round, where the papers have 390 of 128
LONG: Options = {**TABLE, **QUIET, "rounds": 6, "epochs": 5, "batch-size": 64, "run.save-every": 1}
ADAM: Options = {
    "optimiser.name": "adam",
    "optimiser.lr": 0.001,
    "optimiser.weight-decay": 1e-6,
    "method.temperature": 0.5,
    "method.projection-head": "mlp:256:128",
}
SIMCLR: Options = {"method": "fedsimclr"}
FEDCA: Options = {"method": "fedca"}
ONE_SIDED: Options = {**FEDCA, "method.dictionary": 0, "method.alignment": 0}
IID: Options = {"partition": "iid"}


def fedca() -> Part:
    """Figure 5 and Figure 4. Public images are as large a share of all as in the paper, 6.4 %."""
    teacher = {"method.align-images": 640, "method.align-epochs": 100}  # a thousand steps as there
    aligned = {**FEDCA, "public": HELD, **teacher}
    plain = {**FEDCA, "method.alignment": 0}
    rows = 512  # eight for an image of the batch, as in the paper
    return Part(
        "Figure 5, 155 steps per round, six rounds; τ 0.5, Adam 1e-3, decay 1e-6, 512 rows",
        {**LONG, **ADAM, "evaluate.angles": 1000},
        {
            "(i) FedSimCLR": SIMCLR,
            "(i) one-sided": ONE_SIDED,
            "(ii) alignment": {**aligned, "method.dictionary": 0},
            "(ii) alignment, public figures": {
                **FEDCA,
                **teacher,
                "public": "shapes",
                "method.dictionary": 0,
            },
            "(iii) dictionary": {**plain, "method.dictionary": rows, "method.ensembling": 0},
            "(iv) dictionary, ensembling": {**plain, "method.dictionary": rows},
            "(iv) 256 rows": {**plain, "method.dictionary": 256},
            "(v) all": {**aligned, "method.dictionary": rows},
            "(v) 256 rows": {**aligned, "method.dictionary": 256},
            "(v) without own rows": {
                **aligned,
                "method.dictionary": rows,
                "method.exclude-own": "true",
            },
        },
        against="(i) FedSimCLR",
        pairs=(
            ("(ii) alignment", "(i) one-sided"),
            ("(ii) alignment, public figures", "(i) one-sided"),
            ("(iii) dictionary", "(i) one-sided"),
            ("(iv) dictionary, ensembling", "(i) one-sided"),
            ("(iv) 256 rows", "(i) one-sided"),
            ("(iv) dictionary, ensembling", "(iii) dictionary"),
            ("(v) all", "(ii) alignment"),
            ("(v) 256 rows", "(ii) alignment"),
            ("(v) without own rows", "(ii) alignment"),
            ("(v) all", "(iv) dictionary, ensembling"),
        ),
    )


def refresh() -> Part:
    """The dictionary alone, made anew after 1, 5 or 10 epochs; the first round has none."""
    intervals = {f"{r} × {e}": {"rounds": r, "epochs": e} for r, e in ((20, 1), (4, 5), (2, 10))}
    dictionary = {**ONE_SIDED, "method.dictionary": 256}
    return Part(
        "how often the dictionary is made anew, at equal steps (rounds × epochs); 256 rows, no "
        "alignment",
        {**LONG, **ADAM},
        {
            **{f"dictionary {name}": {**dictionary, **how} for name, how in intervals.items()},
            **{f"none {name}": {**ONE_SIDED, **how} for name, how in intervals.items()},
        },
        pairs=tuple((f"dictionary {name}", f"none {name}") for name in intervals),
    )


def fcl() -> Part:
    """Figure 5. A bank of 400 rows where a client has 1,000 images: few are of the image itself."""
    fusing = {"method": "fcl", "method.bank": 400, "method.temperature": 0.1}
    plain = {**fusing, "method.fusion": "false", "method.matching": 0}
    ten = {"clients": 10, "data.images": 10000}
    return Part(
        "Figure 5, 155 steps per round, six rounds; τ 0.1, bank 400, matching from round 2",
        {**LONG, "data.images": 5000, "batch-size": 32, "evaluate.also": "semi-1"},
        {
            "CL": plain,
            "CL, iid": {**plain, **IID},
            "CL, ten clients, iid": {**plain, **IID, **ten},
            "CL, ten clients, one class each": {**plain, **ten, "partition": "classes:1"},
            **{
                f"CL+FF{'+NM' if matching else ''}, {encoding}": {
                    **fusing,
                    "method.encoding": encoding,
                    **({"method.matching-from": 1} if matching else {"method.matching": 0}),
                }
                for encoding in ("none", "inside")
                for matching in (False, True)
            },
            "CL+FF, none, iid": {
                **fusing,
                **IID,
                "method.encoding": "none",
                "method.matching": 0,
            },
        },
        against="CL",
        pairs=(
            ("CL+FF+NM, none", "CL+FF, none"),
            ("CL+FF+NM, inside", "CL+FF, inside"),
            ("CL+FF, none", "CL+FF, inside"),
            ("CL+FF, none, iid", "CL, iid"),
            ("CL, ten clients, iid", "CL, ten clients, one class each"),
        ),
    )


def fedu() -> Part:
    """Table 4, whole: what is averaged, what it overwrites, whose predictor; and DAPU."""
    table4 = {
        f"{source}, {update}, {predictor}": {
            "method.aggregate-from": source,
            "method.update": update,
            "method.predictor": predictor,
        }
        for source in ("online", "target")
        for update in ("online", "target", "both")
        for predictor in ("global", "local")
    }
    dapu = {
        "DAPU, μ 0.4": {"method.threshold-kind": "absolute", "method.threshold": 0.4},
        "DAPU, μ 0.75 of the first": {},
    }
    predictors = {"DAPU": {}, "global": {"method.predictor": "global"}}
    predictors["local"] = {"method.predictor": "local"}
    constant = {
        f"constant rate, {name}": {**how, "optimiser.schedule": "constant"}
        for name, how in predictors.items()
    }
    byol = "online, online, global"
    return Part(
        "Table 4 (averaged, overwritten, predictor) and DAPU; one local epoch, 60 rounds",
        {**CIFAR, **QUIET, "method": "fedu"},
        {**dapu, **table4, **constant},
        against=byol,
        pairs=(
            ("online, online, local", "target, online, local"),
            *((name, "online, online, local") for name in dapu),
            ("constant rate, DAPU", "constant rate, global"),
            ("constant rate, DAPU", "constant rate, local"),
        ),
    )


def mfcl() -> Part:
    """Table 2. The sensor has 15 rounds as in the paper, and 465 steps; rep16 as printed."""
    whole = {**CIFAR, **QUIET, "method": "mfcl", "rounds": 15, "batch-size": 32}
    untrained = {"method.train-sensor": "false"}  # in which PN is GN
    simclr = {**SIMCLR, "rounds": 20}  # epochs, as many as the discriminator has
    norms = ("pn", "gn", "gn32", "bn", "none")
    return Part(
        "Table 2's norms, with a trained and with an untrained sensor",
        whole,
        {
            **{norm: {"method.norm": norm} for norm in norms},
            "bn, statistics stay local": {"method.norm": "bn", "method.bn-stats": "local"},
            "gn, untrained": {**untrained, "method.norm": "gn"},
            "none, untrained": {**untrained, "method.norm": "none"},
            "pn, views encoded together": {"method.pair-codes": "true"},
            "pn, iid": IID,
            "bn, iid": {**IID, "method.norm": "bn"},
            "FedSimCLR": simclr,
            "FedSimCLR, iid": {**simclr, **IID},
        },
        against="gn",
        pairs=(
            ("pn", "gn32"),
            ("gn", "gn, untrained"),
            ("pn", "gn, untrained"),
            ("none", "none, untrained"),
            ("pn", "FedSimCLR"),
            ("pn, iid", "FedSimCLR, iid"),
            ("pn, iid", "pn"),
            ("FedSimCLR, iid", "FedSimCLR"),
            ("bn, iid", "pn, iid"),
        ),
    )


def table7() -> Part:
    """Norms in FedSimCLR's own encoder, on two classes per client and on all."""
    rows = {norm: {"model.early-norm": norm} for norm in ("bn", "gn", "pn")}
    return Part(
        "norms after the first two convolutions of FedSimCLR's encoder",
        {**CIFAR, **QUIET, **SIMCLR},
        {**rows, **{f"{norm}, iid": {**how, **IID} for norm, how in rows.items()}},
        against="gn",
        pairs=(("pn", "bn"), ("pn, iid", "bn, iid")),
    )


if __name__ == "__main__":
    series.main(__doc__, parts(), KEPT, Path("runs/learning"))
