"""The papers' claims, one line each, and what became of them here (docs/results.md).

    python benchmarks/claims.py                          # print the table of what has been run
    python benchmarks/claims.py --into docs/results.md

A claim is that one row of ``learning.py`` is above another one. Nothing is run here: the numbers
are those that ``learning.py`` keeps. The verdict follows from them by a rule that knows no paper:

reproduced      the difference has the claim's sign, and its interval leaves zero out; where a
                paper reports ten points or more and less than half is there, "in sign, not in size"
refuted         it has the other sign, and its interval leaves zero out
not reproduced  the interval holds zero, and not what the paper reports
undecided       the interval holds both

The interval is a 95 % t-interval of the paired differences over seeds. With one seed there is none:
two points to either side take its place, and the verdict says "one seed".
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

import learning
import series

LEAST = 2.0  # points: half of the interval in the place of one seed's
LARGE = 10.0  # of a claim of so many points half must be there
DEGREES = "angle"


@dataclass(frozen=True)
class Claim:
    """A row is above another by ``published`` points; ``None``: the paper gives a figure alone."""

    says: str
    published: float | None
    part: str
    left: str
    right: str
    measure: str = "linear"  # or another protocol, or "angle", in degrees


FEDU_BEST = ("fedu", "online, online, global")
FEDU_LOCAL = ("fedu", "online, online, local")
PAPERS: dict[str, tuple[Claim, ...]] = {
    "FedCA": (
        Claim("FedCA is above FedSimCLR", 3.95, "fedca", "(v) all", "(i) FedSimCLR"),
        Claim("Alignment helps", 1.4, "fedca", "(ii) alignment", "(i) FedSimCLR"),
        Claim("The dictionary helps", 2.7, "fedca", "(iii) dictionary", "(i) FedSimCLR"),
        Claim(
            "Temporal ensembling helps",
            None,
            "fedca",
            "(iv) dictionary, ensembling",
            "(iii) dictionary",
        ),
        Claim("The dictionary adds to alignment", None, "fedca", "(v) all", "(ii) alignment"),
        Claim(
            "Alignment adds to the dictionary",
            None,
            "fedca",
            "(v) all",
            "(iv) dictionary, ensembling",
        ),
        Claim(
            "Clients' features turn away from each other, with alignment less (degrees)",
            10.0,
            "fedca",
            "(i) FedSimCLR",
            "(ii) alignment",
            DEGREES,
        ),
    ),
    "FCL": (
        Claim("Feature fusion helps", 3.68, "fcl", "CL+FF, inside", "CL"),
        Claim("… with rows that are not encoded", 3.68, "fcl", "CL+FF, none", "CL"),
        Claim("… with 1 % of the labels", 2.12, "fcl", "CL+FF, inside", "CL", "semi-1"),
        Claim(
            "Neighbourhood matching adds to it", 0.43, "fcl", "CL+FF+NM, inside", "CL+FF, inside"
        ),
        Claim("… with rows that are not encoded", 0.43, "fcl", "CL+FF+NM, none", "CL+FF, none"),
        Claim(
            "… with 1 % of the labels",
            1.75,
            "fcl",
            "CL+FF+NM, inside",
            "CL+FF, inside",
            "semi-1",
        ),
    ),
    "FedU": (
        Claim(
            "Average the online encoder, not the target",
            1.97,
            *FEDU_BEST,
            "target, online, global",
        ),
        Claim("… with local predictors", 4.12, *FEDU_LOCAL, "target, online, local"),
        Claim("Overwrite the online encoder, not both", 2.83, *FEDU_BEST, "online, both, global"),
        Claim("… not the target alone", 74.08, *FEDU_BEST, "online, target, global"),
        Claim(
            "With local predictors, overwriting both collapses",
            63.95,
            *FEDU_LOCAL,
            "online, both, local",
        ),
        Claim("… the target alone as well", 62.96, *FEDU_LOCAL, "online, target, local"),
        Claim(
            "DAPU is above always local",
            5.0,
            "fedu",
            "DAPU, μ 0.75 of the first",
            "online, online, local",
        ),
        Claim(
            "DAPU is above always global",
            5.0,
            "fedu",
            "DAPU, μ 0.75 of the first",
            "online, online, global",
        ),
        Claim("FedU is above a client alone", 6.73, "table", "fedu", "fedbyol@single"),
        Claim("BYOL on pooled images is above FedU", 5.82, "table", "fedbyol@pooled", "fedu"),
    ),
    "MFCL": (
        Claim("PN is above GN", 5.0, "mfcl", "pn", "gn"),
        Claim("BN collapses where clients differ", 67.0, "mfcl", "pn", "bn"),
        Claim("… if its statistics stay local", 67.0, "mfcl", "pn", "bn, statistics stay local"),
        Claim("BN is above PN on iid clients", 3.0, "mfcl", "bn, iid", "pn, iid"),
        Claim("MFCL is above FedSimCLR", 11.0, "mfcl", "pn", "FedSimCLR"),
        Claim("… on iid clients", 2.0, "mfcl", "pn, iid", "FedSimCLR, iid"),
        Claim("PN in FedSimCLR's encoder is above BN", 2.0, "mfcl-table7", "pn", "bn"),
        Claim("… on iid clients", 2.0, "mfcl-table7", "pn, iid", "bn, iid"),
    ),
}


def gaps(claim: Claim) -> list[float]:
    """Left minus right for every seed that both have."""
    there = series.kept(learning.KEPT / f"{claim.part}.json")
    left, right = there.get(claim.left, {}), there.get(claim.right, {})

    def measured(found: dict[str, object]) -> float:
        if claim.measure == DEGREES:
            return float(found["log"].get(DEGREES, series.NONE))  # type: ignore[attr-defined]
        return series.value(found, claim.measure)

    both = [measured(left[s]) - measured(right[s]) for s in sorted(set(left) & set(right))]
    return [gap for gap in both if gap == gap]


def verdict(found: list[float], published: float | None) -> str:
    """By the rule above; ``found``: a paper's claim is that these are positive."""
    if not found:
        return "not run"
    mean = statistics.mean(found)
    half, few = (LEAST, series.ONE) if len(found) == 1 else (series.half_width(found), "")
    if abs(mean) > half:
        part = mean < (published or 0) / 2 and (published or 0) >= LARGE
        size = " in sign, not in size" if part else ""
        return f"{f'reproduced{size}' if mean > 0 else 'refuted'}{few}"
    missed = published is not None and mean + half < published
    return f"{'not reproduced' if missed else 'undecided'}{few}"


def table() -> str:
    """Markdown, a line for every claim."""
    lines = [
        series.cells("paper", "claim", "published", "here", "rows", "seeds", "verdict"),
        series.cells(*["---"] * 7),
    ]
    for paper, claims in PAPERS.items():
        for claim in claims:
            found = gaps(claim)
            lines.append(
                series.cells(
                    paper,
                    claim.says,
                    "a figure" if claim.published is None else f"{claim.published:+.1f}",
                    series.interval(found).removesuffix(series.ONE) or "–",
                    f"`{claim.part}`: {claim.left} − {claim.right}",
                    str(len(found)),
                    verdict(found, claim.published),
                )
            )
    return "\n".join(lines)


def main() -> None:
    """Print the table, or put it into a page."""
    words = ArgumentParser(description=__doc__)
    words.add_argument("--into", type=Path, help="a page that has a place for the table")
    words.add_argument("--smoke", action="store_true", help="the same: nothing is run here")
    given = words.parse_args()
    if given.into:
        series.fill(given.into, "claims", table())
    print(table())


if __name__ == "__main__":
    main()
