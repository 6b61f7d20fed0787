"""Run folders as ``furlong run`` writes them, without a run: for tables, pages and browsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from furlong.runs.config import Config, from_tree
from furlong.runs.folder import RunFolder

HOSTILE = "<script>alert(1)</script>"
CLASSES = [HOSTILE, "$x^", "ship & sail", "日本\n"]
WHO = {"none": "federated", "single": "alone", "pooled": "pooled"}


def make(
    path: Path,
    method: str = "fedu",
    seed: int = 0,
    linear: float | None = 0.634,
    *,
    classes: list[str] | None = CLASSES,
    clients: int = 5,
    rounds: int = 3,
    done: int | None = None,
    finished: bool = True,
    failing: bool = False,
    rank: float = 30.0,
    **options: Any,
) -> Path:
    """A run whose linear probe is ``linear``; ``classes=None``: its images have no labels.

    ``done``: how many of the rounds; ``failing``: client 1 is refused twice; ``rank``: the
    effective rank from the second round on; ``options``: settings.
    """
    given = {"method": method, "seed": seed, "clients": clients, "rounds": rounds,
             "evaluate.k": 200, **options}  # fmt: skip
    settings = from_tree({}, given, "test")
    folder = RunFolder.create(path)
    folder.write("config.toml", settings.toml())
    folder.write("partition.json", split(clients, classes))
    for number in range(rounds if done is None else done):
        refused = failing and number in (1, 2)
        labelled = classes is not None
        folder.append(line(number, clients, labelled=labelled, refused=refused, rank=rank))
    if finished:
        results = [] if classes is None else list(scores(settings.run.bound, clients, linear))
        folder.write("summary.json", summary(settings, clients, results, rank))
        folder.write("encoder.json", {"encoder": settings.model.encoder})
    return path


def split(clients: int, classes: list[str] | None) -> dict[str, Any]:
    """Who holds what."""
    counts = [[(7 * c + k) % 1000 for k in range(len(classes or "x"))] for c in range(clients)]
    about: dict[str, Any] = {"partition": "classes:2", "clients": clients}
    about["sizes"] = [sum(row) for row in counts]
    if classes is not None:
        about |= {"classes": classes, "class_counts": counts}
        about |= {"beta_cib": 1.25, "beta_hetero_m2": 3.5, "beta_hetero_mm1": 4.75}
        about["false_negatives"] = {"local": 1.0, "union": 0.5, "remote": 0.0}
    return about


def line(
    number: int, clients: int, *, labelled: bool = True, refused: bool = False, rank: float = 30.0
) -> Any:
    """One exchange."""
    up = {"params": 1_500_000, "buffers": 2_000, "features": 0, "scalars": 48}
    failure = {"client": 1, "kind": "refused", "reason": f"not finite: {HOSTILE}"}
    metrics = {"loss": 5.0 - number / 8, "divergence": 0.5, "images": 100.0}
    knn = 0.25 + number / 1000 if labelled and number else None
    quality = {"effective_rank": rank, "spread": 0.5} if number else {}
    untrained = {"effective_rank": 40.0, **({"knn": 0.29} if labelled else {})}
    return {
        "exchange": number, "round": number, "kind": "train", "loss": 5.0 - number / 8,
        "divergence": 0.5, "knn": knn, **quality, **({"untrained": untrained} if number else {}),
        "seconds": 1.5, "images_per_second": 200.0, "bytes_up": sum(up.values()),
        "bytes_down": sum(up.values()), "up": up, "down": up,
        "clients": {str(c): metrics for c in range(clients)},
        "failures": [failure] if refused else [],
    }  # fmt: skip


def scores(bound: str, clients: int, linear: float | None) -> Any:
    """The accuracies of the random encoder and of what was trained."""
    found = {"random": (0.203, 0.25), WHO[bound]: (0.4, linear)}
    if bound == "single":
        found |= {f"client {c} alone": (0.4 + c / 1000, 0.5) for c in range(clients)}
    for who, pair in found.items():
        for protocol, accuracy in zip(("knn", "linear"), pair, strict=True):
            if accuracy is not None:
                row = {"who": who, "protocol": protocol, "labels": 1.0, "accuracy": accuracy}
                yield row | ({"std": 0.0123} if who == "alone" else {})


def summary(settings: Config, clients: int, results: list[Any], rank: float) -> dict[str, Any]:
    """What a finished run wrote last."""
    ranks = {"random": 40.0, WHO[settings.run.bound]: rank}
    return {
        "quality": [{"who": who, "effective_rank": one} for who, one in ranks.items()],
        "who": WHO[settings.run.bound], "method": settings.method["name"],
        "data": settings.data.name, "images": 100, "clients": clients,
        "rounds": settings.train.rounds, "seed": settings.run.seed, "results": results,
        "seconds": 90.0, "images_per_second": 1234.5, "bytes_up": 200_000 * clients,
        "bytes_down": 800_000 * clients, "failures": 0, "weights_sha256": "ab" * 32,
        "furlong": "0.1.0",
    }  # fmt: skip
