"""Tables of runs in words: cells for a terminal, Markdown, CSV, and the notes below them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from furlong.evaluation.metrics import MEASURES
from furlong.reports import measures
from furlong.reports.columns import column_title
from furlong.reports.significance import FEWEST, LEVEL, Difference
from furlong.reports.tables import Group, Spread
from furlong.words import duration, plural, points, size

# ---------------------------------------------------------------- words


RANK = (
    "Effective rank: in how many directions the encoder's features of different images differ, "
    "measured without labels. Far below that before training the features are collapsing; a higher "
    "one alone is no merit."
)


def voters(k: int) -> str:
    """How many neighbours vote."""
    return f"kNN: the k = {k} nearest training images vote."


def notes(group: Group) -> list[str]:
    """What ± and the tests mean in this table, what they say, and what else to know."""
    rank = [RANK] if group.ranked else []
    if not group.columns:
        none = "No accuracy was measured in these runs."
        return [none, *rank, *group.notes, *paper_notes(group)]
    low, *_, high = sorted([len(row.seeds) for row in group.own] * 2)
    seeds = plural(high, "seed") if low == high else f"{low} to {high} seeds"
    deviation = " ± standard deviation" if high > 1 else ""
    lines = [f"Test accuracy in percent, mean{deviation} over {seeds} (n)."]
    if ("knn", 1.0) in group.columns:
        lines.append(voters(group.setting["evaluate.k"]))
    if len(group.own) > 1:
        lines.append(_significance(group))
    return [*lines, *rank, *group.notes, *paper_notes(group)]


def _significance(group: Group) -> str:
    tests = group.tests()
    if not tests:
        return (
            f"With fewer than {FEWEST} seeds in common with {group.baseline} nothing can be said "
            "about significance."
        )
    corrected = [(row, c, gap) for row, c, gap in tests if gap.corrected is not None]
    sure = [
        f"{row.label} ({column_title(column)}, {100 * gap.mean:+.1f} points)"
        for row, column, gap in corrected
        if verdict(gap) == SURE
    ]
    return (
        f"Compared with {group.baseline} by a paired t-test over seeds, two-sided, p corrected by "
        f"Holm for the {len(corrected)} comparisons of this table. More than chance (corrected "
        f"p below {LEVEL:g}): {', '.join(sure) or 'none'}."
    )


SURE = "more than chance"


def verdict(difference: Difference) -> str:
    """One comparison in words."""
    if difference.n < FEWEST:
        return "too few seeds"
    if difference.corrected is None:
        return "every seed has the same difference: no test"
    return SURE if difference.corrected < LEVEL else "may be chance"


def verdicts(group: Group) -> list[str]:
    """A line per comparison."""
    lines = []
    for row, column, gap in group.tests():
        p = "" if gap.p is None else f", p = {gap.p:.2g}, corrected {gap.corrected:.2g}"
        words = f"{100 * gap.mean:+.1f} points, n = {gap.n}{p}: {verdict(gap)}."
        lines.append(f"{row.label}, {column_title(column)}: {words}")
    return lines


def paper_notes(group: Group) -> list[str]:
    """What to know when a paper's number is compared with ours."""
    said: dict[str, list[str]] = {}
    for row in group.rows:
        for beside in row.printed:
            said.setdefault(beside.note, []).append(f"{beside.source} for {row.label}")
    return [f"{'; '.join(where)}: {note}." for note, where in said.items() if note]


# ---------------------------------------------------------------- formats


def cells(group: Group) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heading and rows of a printed table; a row's kind is ``run``, ``random`` or ``paper``."""
    heading = ["method", "n", *(f"{column_title(c)} %" for c in group.columns)]
    ranked = ["effective rank"] if group.ranked else []
    heading += [*ranked, "sent per client", "training time"]
    rows: list[tuple[str, list[str]]] = []
    for row in group.rows:
        n = len(row.seeds)
        found = [_cell(row.cells.get(column), n) for column in group.columns]
        sent = "–" if row.sent is None else size(sum(row.sent))
        seconds = "–" if row.seconds is None else duration(row.seconds)
        kind = "random" if row.reference else "run"
        rank = [_number(row.rank)] if group.ranked else []
        rows.append((kind, [row.label, str(n), *found, *rank, sent, seconds]))
        for paper in row.printed:
            given = [paper.cells.get(column) for column in group.columns]
            said = ["" if p is None else points(p.accuracy, p.std) for p in given]
            blank = ["" for _ in (*ranked, "sent", "time")]
            rows.append(("paper", [f"  printed in {paper.source}", "", *said, *blank]))
    return heading, rows


def _number(spread: Spread | None) -> str:
    """A mean that is no percentage, with its standard deviation."""
    if spread is None:
        return "–"
    return f"{spread.mean:.1f}" + ("" if spread.std is None else f" ± {spread.std:.1f}")


def _cell(spread: Spread | None, seeds: int) -> str:
    """A number; with its own n if it was not measured for all seeds of the row."""
    if spread is None:
        return "–"
    n = len(spread.values)
    return points(spread.mean, spread.std) + (f" (n = {n})" if n < seeds else "")


def markdown(groups: Sequence[Group]) -> str:
    """Tables and what is said about them."""
    lines: list[str] = []
    for group in groups:
        heading, rows = cells(group)
        lines += [f"**{_escaped(group.title)}**", "", _line(heading)]
        lines.append("|---|" + "---:|" * (len(heading) - 1))
        lines += [_line(row, "*" if kind == "paper" else "") for kind, row in rows]
        below = [*notes(group), *verdicts(group)]
        lines += ["", *(f"- {_escaped(text)}" for text in below), ""]
        for sheet in measures.of_group(group):
            lines += [f"**{_escaped(sheet.title)}**", "", _line(sheet.heading)]
            lines.append("|---|" + "---:|" * (len(sheet.heading) - 1))
            lines += [*map(_line, sheet.rows), ""]
            lines += [*(f"- {_escaped(text)}" for text in sheet.notes), ""]
    return "\n".join(lines)


def _line(words: Sequence[str], mark: str = "") -> str:
    first, *others = (_escaped(word.strip()) for word in words)
    return "| " + " | ".join([f"{mark}{first}{mark}", *others]) + " |"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: a name is neither a cell's end nor a tag."""
    return re.sub(r"[\\`*|\[\]<>]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def comma_separated(groups: Sequence[Group]) -> str:
    """A line per number: for a spreadsheet or a program."""
    heading = ["setting", "kind", "method", "protocol", "labels", "n", "accuracy", "std"]
    heading += ["effective_rank", "bytes_up_per_client", "bytes_down_per_client", "seconds"]
    heading += ["baseline", "difference", "p", "p_holm", "note", *MEASURES[1:]]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    for group in groups:
        for row in group.rows:
            kind = "random" if row.reference else "run"
            rank = None if row.rank is None else row.rank.mean
            cost = [rank, *(row.sent or (None, None)), row.seconds]
            for column, spread in row.cells.items():
                gap = row.differences.get(column)
                tested = [group.baseline, gap.mean, gap.p, gap.corrected] if gap else [None] * 4
                about = [group.title, kind, row.label, *column, len(spread.values)]
                more = [measures.mean_of(row, column, name) for name in MEASURES[1:]]
                writer.writerow([*about, spread.mean, spread.std, *cost, *tested, None, *more])
            for beside in row.printed:
                for column, p in beside.cells.items():
                    about = [group.title, f"printed in {p.source}", row.label, *column, None]
                    writer.writerow([*about, p.accuracy, p.std, *[None] * 8, beside.note])
    return text.getvalue()
