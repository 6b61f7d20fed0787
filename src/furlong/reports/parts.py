"""What the page of one run and the page of a comparison have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from furlong.core.method import Method
from furlong.core.payload import Traffic
from furlong.evaluation.quality import diagnosis, in_words
from furlong.methods import METHODS
from furlong.reports import figures
from furlong.reports.figures import Drawing
from furlong.runs.config import RANDOM, short
from furlong.runs.record import Line, Result, Split
from furlong.words import plural

MOST_FAILURES = 50  # rows of the table
MOST_NAMES = 20  # sites that a caption lists


def traffic(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    """Bytes of a whole run: up or down -> kind of tensor -> how many."""
    return {
        way: asdict(sum((getattr(line, way) for line in lines), Traffic()))
        for way in ("up", "down")
    }


def failures(lines: Sequence[Line]) -> dict[str, Any]:
    """Which clients gave no valid answer, how often and why; the most frequent first."""
    times: Counter[tuple[Any, ...]] = Counter()
    first: dict[tuple[Any, ...], int] = {}
    for line in lines:
        for failure in line.failures:
            key = (failure["client"], failure["kind"], failure["reason"])
            times[key] += 1
            first.setdefault(key, line.round + 1)
    return {
        "rows": [(*key, count, first[key]) for key, count in times.most_common(MOST_FAILURES)],
        "kinds": len(times),
        "total": times.total(),
        "refused": sum(count for key, count in times.items() if key[1] == "refused"),
        "clients": len({key[0] for key in times}),
    }


def untrained(lines: Sequence[Line]) -> dict[str, float]:
    """The encoder's numbers before training, as the monitor measured them; empty: it did not."""
    return next((found for line in lines if (found := line.metrics.get("untrained"))), {})


def trouble(method: str, lines: Sequence[Line]) -> str:
    """In words, with the remedy: whether a run is heading for collapse; empty if it is not."""
    course, before = [line.metrics for line in lines], untrained(lines)
    state = diagnosis(course, before)
    if not state:
        return ""
    now = next(one for one in reversed(course) if one.get("effective_rank") is not None)
    remedy = METHODS[method].cls.remedy if method in METHODS else Method.remedy
    words = f"{in_words(state, now, before)} {remedy}"
    return words[:1].upper() + words[1:]


def explained(methods: Iterable[str], name: str) -> str:
    """How to read a number that methods log: as the first of them says that explains it."""
    known = [METHODS[method].cls.explains for method in methods if method in METHODS]
    return next((words[name] for words in known if name in words), "As the method logs it.")


def initial(settings: Mapping[str, Any]) -> str:
    """Where the weights came from that training started from, without the path; else empty."""
    source = str(settings.get("model", {}).get("init") or "")
    return "" if source == RANDOM else short(source)


def leaves(spent: Mapping[str, Any]) -> str:
    """What a client sends under a privacy budget: the summary's ``privacy``."""
    if spent["level"] == "record":
        return (
            "Weights that were trained with noise, under the privacy budget, and the client's "
            "number of images; no training metrics."
        )
    noise = {
        "server": "without noise, which the server added to their sum",
        "clients": "with a share of the noise, which is enough in the sum only",
    }[spent["noise_at"]]
    return (
        f"Weights whose change was cut to the length {spent['clip']:g}, {noise}; no training "
        "metrics and no number of images."
    )


def budget(spent: Mapping[str, Any], secured: bool, began: str = "") -> list[str]:
    """What a run under a privacy budget guarantees, and what not: the summary's ``privacy``.

    ``secured``: whether the server saw sums only. ``began``: the weights that it started from.
    """
    low, high = (f"{noise:.3g}" for noise in spent["noise"])
    records = spent["level"] == "record"
    groups = f" (groups of {spent['group']})" if spent["group"] > 1 else ""
    how = f"Gradients of single images{groups}" if records else "Updates of whole clients"
    kept = (
        f", not what {began} had learnt, from which it started" if began else ", this encoder too"
    )
    says = [
        f"(ε, δ)-differential privacy with ε = {spent['epsilon']:.3g} and δ = {spent['delta']:.2g} "
        f"protects {spent['unit']}. Compared are runs of which one lacks one "
        f"{'image' if records else 'client'}; if it is replaced by another, ε is up to twice as "
        "large, and δ more than that.",
        f"{how} were cut to the length {spent['clip']:g} and got Gaussian noise of "
        f"{low if low == high else f'{low} to {high}'} times that length, added at the "
        f"{spent['noise_at']}; of no client was anything released in more than "
        f"{plural(spent['releases'], 'round')}. The noise on a mean update was about "
        f"{spent['ratio']:.3g} times its longest possible length.",
        "The budget covers the weights that clients sent in this run and what is made of "
        f"them{kept}. It covers nothing of other runs on the same images: settings that were "
        "chosen by their results, weights to start from. Nor does it cover who took part, "
        f"{'how many images each client has, ' if records else ''}failures and times, accuracies "
        "and figures that were measured on the clients' images, or attacks on the rounding of "
        "floating-point numbers.",
    ]
    if records:
        says.append("Several images of one person are several records, and their ε adds up.")
        says.append(
            "It holds against the server, too, if clients were sites that agreed to this budget "
            "(furlong node --agree); others take the server's word for it."
        )
    else:
        says.append(_against_the_server(spent["noise_at"], secured))
    if spent["noise_from"] == "seed":
        says.append(
            "The noise was made from the run's seed, for an experiment: whoever knows the seed can "
            "take it away, so nobody is protected."
        )
    return says


def _against_the_server(noise_at: str, secured: bool) -> str:
    """Whether a budget of clients holds against the server of the run, too."""
    if noise_at == "server":
        return "Not against the server, which saw the cut updates without noise."
    shares = (
        " Every client knows its own share of the noise: ε holds against the others if no two of "
        "them tell each other theirs."
    )
    if not secured:
        return (
            "Not against the server: without secure aggregation it saw single updates, each with "
            f"a share of the noise only.{shares}"
        )
    return (
        "Against the server, too, if it kept to the protocol of secure aggregation, which was on, "
        "and colluded with at most one client: then it saw the sum of the updates and all shares "
        f"of the noise, and no single one.{shares}"
    )


def over_labels(results: Iterable[Result], who: str) -> dict[float, float]:
    """Share of the labels -> accuracy of the linear probe on ``who``'s features."""
    found = {}
    for row in results:
        plain = "linear" if row.labels == 1 else f"linear-{100 * row.labels:g}"
        if row.who == who and row.protocol == plain:
            found[row.labels] = row.accuracy
    return found


def few_labels(
    lines: Mapping[str, Sequence[figures.Points]], slots: Mapping[str, int] | None = None
) -> Drawing:
    """A line per name, of one or several runs: accuracy over the share of the labels."""
    several = any(len(runs) > 1 for runs in lines.values())
    band = " Bands: one standard deviation over the seeds." if several else ""
    return Drawing(
        figures.shares(lines, slots),
        "Test accuracy of the linear probe when only a share of the training images has labels, "
        f"at least one of every class. What few labels reach is what an encoder is for.{band}",
        "few-labels",
    )


def split_drawings(split: Split | None) -> Iterator[Drawing]:
    """Who holds what, and how many false negatives that makes."""
    if split is None:
        return
    low, high = min(split.sizes), max(split.sizes)
    spread = f"{low:,} to {high:,} images" if low < high else plural(low, "image")
    held = f"Partition {split.partition}: {plural(len(split.sizes), 'client')} with {spread} each."
    named = ""
    if split.names:
        listed = ", ".join(f"{k}: {name}" for k, name in enumerate(split.names[:MOST_NAMES]))
        named = f" ({listed}{', …' if len(split.names) > MOST_NAMES else ''})"
    if split.class_counts is None:
        more = f"The images are on the sites{named}." if named else "The images have no labels."
        yield Drawing(figures.sizes(split.sizes), f"{held} {more}", "partition")
        return
    below = betas(split.beta_cib, split.beta_hetero_m2)
    yield Drawing(
        figures.heat_map(split.class_counts, split.classes, below=below, owners=split.names),
        f"{held}{f' Clients{named}.' if named else ''} A cell is a client's number of images of a "
        f"class. β-CIB {split.beta_cib:.4f} "
        f"bits; β-hetero {split.beta_hetero_m2:.4f} bits (divided by M²), "
        f"{split.beta_hetero_mm1:.4f} bits (by M(M−1)). 0 is an even split.",
        "partition",
    )
    if shares := split.false_negatives:
        names = {"local": "its own images", "union": "all clients'", "remote": "the others'"}
        rows = [(names[key], shares[key], None) for key in names]
        yield Drawing(
            figures.bars(rows, highlight=""),
            "False negatives: of the images that a client's image is contrasted with, the share "
            "that has its class, if they are drawn from its own images, from all clients' or from "
            "the others'. Contrast pushes these apart though they belong together.",
            "false-negatives",
        )


def betas(cib: float, hetero_m2: float) -> str:
    """The two measures of skew, for below a heat map."""
    return f"β-CIB {cib:.2f} · β-hetero {hetero_m2:.2f} bits (M²)"
