"""furlong check."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from furlong.cli.common import MOST, console, counting
from furlong.words import plural, size


def check(
    data: str,
    /,
    *,
    group_by: str | None = None,
    holdout_by: str = "auto",
    root: str | None = None,
    window: str = "auto",
    channels: int = 3,
    slices: str = "axial",
    strict: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Look at images before training: what would be read, what not, doubles, what to set.

    Exits with 1 if no image can be used, or with --strict if any file would be skipped.

    Parameters
    ----------
    data
        folder:PATH, parquet:PATH, manifest:PATH, or a path.
    group_by
        Of a table: the column that names the site, if it is not called site.
    holdout_by
        What belongs together, as --data.holdout-by of a run.
    root
        Where the files of a manifest are, if not beside it.
    window
        What becomes of more than 8 bits, as --data.window of a run.
    channels
        As --data.channels of a run.
    slices
        Of volumes, as --data.slices of a run.
    strict
        Exit with 1 if ``furlong run --strict`` would refuse the data.
    as_json
        Print JSON, with all files and groups.
    """
    from furlong.data.reading import Reading
    from furlong.data.survey import Asked, survey
    from furlong.runs.advice import summarise

    asked = Asked(data, group_by, holdout_by, root, Reading(channels, window, slices))
    with counting("reading") as show:
        found = summarise(asked, survey(asked, show))
    if as_json:
        print(json.dumps(found))
    else:
        _print_check(found)
    if not found["images"] or (strict and found["skipped"]):
        sys.exit(1)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def _spread(values: dict[str, float], digits: int = 0) -> str:
    if values["min"] == values["max"]:
        return f"{values['min']:.{digits}f}"
    low, middle, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{low} to {high}, median {middle}"


def _print_check(found: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("images", f"{found['images']:,}" + _of_splits(found["splits"]))
    if found["images"]:
        for name, text in _facts(found):
            table.add_row(name, text)
    console.print(table)
    _print_lists(found)
    if not found["images"]:
        return
    console.print("\nsuggested", style="bold")
    table = Table.grid(padding=(0, 2))
    for name in ("method", "image_size", "encoder", "augment", "batch_size", "rounds"):
        advice = found["suggested"][name]
        words = name.replace("_", " ")
        table.add_row(f"  {words}", Text(str(advice["value"]), "bold"), advice["reason"])
    console.print(table)
    memory = found["suggested"]["decoded"]
    console.print(f"  decoded, that is {size(memory['bytes'])} {memory['where']}")
    console.print("\nnext", style="bold")
    for line in found["next"]:
        console.print(f"  {line}", soft_wrap=True)


def _of_splits(splits: dict[str, int]) -> str:
    return f" ({_counts(splits)})" if len(splits) > 1 else ""


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of every line of the overview."""
    sites, classes = found["sites"], found["classes"]
    if sites:
        shown = dict(list(sites.items())[:MOST])
        more = f", … {len(sites) - MOST:,} more" if len(sites) > MOST else ""
        yield "sites", f"{len(sites):,}: {_counts(shown)}{more}"
    else:
        yield "sites", "none: the images are in one heap, to be dealt out"
    if classes:
        shown = dict(list(classes.items())[:MOST])
        more = f", … {len(classes) - MOST:,} more" if len(classes) > MOST else ""
        # below the sites, folders may be classes or patients: nobody but the user knows
        inside = sites and found["data"].startswith("folder:") and found["holdout_by"] == "auto"
        hint = " (the folders below the sites; if these are patients: --holdout-by folder:2)"
        yield "labels", f"{len(classes):,} classes: {_counts(shown)}{more}{hint if inside else ''}"
    elif sites:
        yield (
            "labels",
            "none below the sites. If the folders are classes and not sites, use another "
            "--partition than natural",
        )
    else:
        yield "labels", "none: training does not need them, accuracy will not be measured"
    if found["patients"] is not None:
        by = found["holdout_by"]
        yield "patients" if by in ("auto", "image") else by, _of_patients(found)
    yield "width", f"{_spread(found['width'])} pixels"
    yield "height", f"{_spread(found['height'])} pixels"
    cropped = max(found["aspect"]["median"], 1 / found["aspect"]["median"])
    lost = f"; squares keep {100 / cropped:.0f} % of a typical image" if cropped > 1.05 else ""
    yield "width : height", _spread(found["aspect"], 2) + lost
    grey = found["colourless"]
    stored = f" ({grey:,} show no colour)" if grey else ""
    yield "channels", _counts(found["channels"]) + stored
    deep = f"; {found['window']}" if found["window"] else ""
    yield "bits per channel", ", ".join(f"{b}: {n:,}" for b, n in found["bits"].items()) + deep
    animated = f"; {found['animated']:,} have several frames, of which the first is used"
    empty = f"; {found['empty']:,} empty slices are left out" if found["empty"] else ""
    yield "formats", _counts(found["formats"]) + (animated if found["animated"] else "") + empty
    yield "on disk", size(found["bytes"])


def _of_patients(found: dict[str, Any]) -> str:
    """How many, and what that means for the hold-out."""
    number, both = found["patients"]["number"], found["patients"]["in_several_splits"]
    unknown = found["patients"]["unknown"]
    volume = " (a volume counts as one)" if "NIfTI" in found["formats"] else ""
    text = f"{number:,}{volume}"
    if unknown:
        text += f", and {plural(unknown, 'image')} of unknown patient"
    if both:
        return f"{text}; WARNING: {both:,} of them have images in training and in test"
    if unknown:
        return f"{text}; WARNING: some of these may show one person in training and in test"
    if len(found["splits"]) > 1:
        return f"{text}, none in both training and test"
    return f"{text}; what a run holds out for evaluation is never a part of one"


def _print_lists(found: dict[str, Any]) -> None:
    """What was noted, skipped files, and groups of doubles."""
    for note in found["notes"]:
        console.print(f"\n{note}", soft_wrap=True)
    skipped = found["skipped"]
    if skipped:
        console.print(Text("\nwould be skipped", "bold"), f": {len(skipped):,}", sep="")
    for each in skipped[:MOST]:
        console.print(f"  {each['name']}: {each['reason']}", soft_wrap=True)
    if len(skipped) > MOST:
        console.print(f"  … and {len(skipped) - MOST:,} more (--json has all)")
    for key, title, site, split in (
        ("same", "the same bytes", "at several sites", "in several splits"),
        ("alike", "alike at a glance", "at several sites", "in several splits"),
    ):
        groups, across = found[key]["groups"], found[key]["at_several_sites"]
        if not groups:
            continue
        leaks = found[key]["in_several_splits"]
        notes = [f"{len(g):,} {what}" for g, what in ((across, site), (leaks, split)) if g]
        said = f", of these {', '.join(notes)}" if notes else ""
        console.print(Text(f"\n{title}", "bold"), f": {len(groups):,} group(s){said}", sep="")
        first = leaks or across or groups
        for group in first[: MOST // 2]:
            console.print(
                f"  {' = '.join(group[:4])}{' = …' if len(group) > 4 else ''}",
                soft_wrap=True,
            )
        if len(first) > MOST // 2:
            console.print("  … (--json has all)")
