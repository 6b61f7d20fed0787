"""An audit becomes a page for a data protection officer, and the rows of a table."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.audit.auditing import Audit
from furlong.audit.measures import Finding, Number
from furlong.methods import METHODS
from furlong.reports import parts
from furlong.reports.pictures import data_uri
from furlong.reports.rendering import render
from furlong.runs.folder import write_file
from furlong.runs.record import RunRecord

TITLES = {
    "views": "Membership by alike views",
    "norms": "Membership by the features' length",
    "loss": "Membership by the loss",
    "together": "Membership by all of these",
    "corner": "Memorisation: known by a corner",
    "linking": "Linking: whose features are these",
    "inversion": "Inversion of features",
    "decoding": "Decoding by the server",
    "gradient": "Inversion of a small update",
}
FAMILIES = {  # the question, and who can ask it
    "membership": (
        "Was this image trained on?",
        "Whoever holds the encoder and a candidate image can ask this; of an upload the server.",
    ),
    "memorisation": (
        "Does the encoder know a training image by a part of it?",
        "Whoever holds the encoder, a part of an image and candidates for the whole.",
    ),
    "features": (
        "What do features of single images reveal?",
        "The server that gets them, and every other client to whom it passes them on.",
    ),
    "update": (
        "Can images be drawn from a small update?",
        "The server that gets the update of a client with two images and one step: the worst case.",
    ),
}
MEASURES = {
    "auc": "AUC",
    "tpr": "at 1 % false alarms",
    "identified": "recognised",
    "psnr": "likeness (PSNR)",
}
SHORT = {"auc": "AUC", "tpr": "TPR at 1 %", "identified": "recognised", "psnr": "PSNR"}
UNKNOWN = (
    "Stronger attacks. Only those above were tried, with one seed, and an attacker may know more: "
    "other encoders trained for comparison (shadow models, LiRA), several rounds of one client, "
    "or what he has planted himself.",
    "A server that does not keep to the protocol: it can send weights made for spying. All attacks "
    "here only look on.",
    "Other clients and rounds: one upload was attacked.",
    "Images that are unlike the rest: numbers are means over images, and rare ones are remembered "
    "best. A mean that shows nothing can hide a few that are revealed.",
    "What lies within the intervals. Where nothing was found, less than the upper end may still be "
    "revealed.",
    "Combination with what an attacker knows from elsewhere.",
)


# ---------------------------------------------------------------- rows


def number(measure: str, value: float) -> str:
    """As a person reads it."""
    if measure == "psnr":
        return f"{value:.1f} dB"
    return f"{value:.2f}" if measure == "auc" else f"{100 * value:.1f} %"


def interval(measure: str, one: Number | None) -> str:
    """With the 95 % interval behind."""
    if one is None:
        return "–"
    if measure == "auc":
        return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"
    if measure == "psnr":
        return f"{one.value:.1f} dB [{one.low:.1f}, {one.high:.1f}]"
    return f"{100 * one.value:.1f} % [{100 * one.low:.1f}, {100 * one.high:.1f}]"


@dataclass(frozen=True)
class Row:
    """One measure of one attack, of a run and of the one beside it."""

    finding: Finding
    measure: str
    first: bool  # of its attack
    beside: Finding | None

    def texts(self) -> dict[str, str]:
        """The cells by their names."""
        name, other = self.measure, self.beside
        return {
            "measure": MEASURES[name],
            "run": interval(name, self.finding.run.get(name)),
            "untrained": interval(name, self.finding.untrained.get(name)),
            "nothing": number(name, self.finding.nothing[name]),
            "beside": interval(name, None if other is None else other.run.get(name)),
        }

    def cells(self, beside: Sequence[str] = ()) -> list[str]:
        """Of the table on the terminal: no more than fits."""
        texts, short = self.texts(), SHORT[self.measure]
        verdict = ("yes" if self.finding.found else "not found") if self.first else ""
        columns = ("run", *beside, "untrained", "nothing")
        name = self.finding.attack.name if self.first else ""
        return [name, short, *(texts[column] for column in columns), verdict]


def rows(found: Audit, other: Audit | None) -> list[Row]:
    """A row for every measure of every attack."""
    return list(_rows(found.findings, [] if other is None else other.findings))


def _rows(findings: Sequence[Finding], others: Sequence[Finding]) -> Iterator[Row]:
    for finding in findings:
        same = (o for o in others if _key(o) == _key(finding))
        beside = next(same, None)
        for place, measure in enumerate(finding.run):
            yield Row(finding, measure, place == 0, beside)


def _key(finding: Finding) -> tuple[str, str]:
    """What is compared with what: the number of the client does not matter."""
    return finding.attack.name, finding.attack.target.rpartition(" client ")[0]


def headline(found: Audit) -> str:
    """The result in a sentence."""
    revealed = [each for each in found.findings if each.found]
    total = len(found.findings)
    if not revealed:
        return (
            f"None of {total} attacks found anything beyond guessing. That is no proof that "
            "nothing is revealed."
        )
    names = dict.fromkeys(f"{TITLES[f.attack.name]} ({f.attack.target})" for f in revealed)
    return f"{len(revealed)} of {total} attacks reveal something: {'; '.join(names)}."


# ---------------------------------------------------------------- the page


def build(found: Audit, other: Audit | None, place: Path, out: Path | None, pictures: bool) -> Path:
    """Write the page; images are in it only if ``pictures`` were asked for."""
    usual = place.with_suffix(".audit.html") if place.is_file() else place / "audit.html"
    path = usual if out is None else out
    record = None if place.is_file() else RunRecord(place)
    lines = [] if record is None else record.lines()
    method = METHODS.get(str(found.about["method"]))
    contents: dict[str, Any] = {
        "about": found.about,
        "other": None if other is None else other.about,
        "run": record,
        "settings": None if record is None else record.settings,
        "sends": record is not None and record.sends,
        "traffic": parts.traffic(lines) if record is not None and record.sends else None,
        "method": method,
        "headline": headline(found),
        "revealed": sum(each.found for each in found.findings),
        "families": [
            {
                "title": title,
                "who": who,
                "findings": _family(found, other, family),
                "how": {
                    TITLES[each.attack.name]: each.attack.how
                    for each in found.findings
                    if each.attack.family == family
                },
            }
            for family, (title, who) in FAMILIES.items()
            if any(each.attack.family == family for each in found.findings)
        ],
        "not_tried": found.not_tried,
        "unknown": UNKNOWN,
        "pictures": pictures,
        "quoted": shlex.quote(str(place)),
    }
    write_file(path, render("audit.html.jinja", contents).encode())
    return path


def _family(found: Audit, other: Audit | None, family: str) -> list[dict[str, Any]]:
    """Every attack of a family with its rows and pictures."""
    every = rows(found, other)
    return [
        {
            "title": TITLES[one.attack.name],
            "attack": one.attack,
            "found": one.found,
            "why": one.why,
            "rows": [row.texts() for row in every if row.finding is one],
            "pictures": [tuple(map(data_uri, pair)) for pair in one.pictures],
        }
        for one in found.findings
        if one.attack.family == family
    ]
