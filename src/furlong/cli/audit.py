"""furlong audit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from furlong.audit import auditing
from furlong.cli.common import console, err, say
from furlong.cli.options import in_sections, with_settings
from furlong.reports import audit as pages


@with_settings(in_sections("data", "run.device", "run.workers"))
def audit(
    place: Path,
    /,
    *,
    beside: Path | None = None,
    only: str | None = None,
    client: int | None = None,
    images: int = 500,
    seed: int = 0,
    pictures: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    settings: dict[str, Any],
) -> None:
    """Attack what a run published and what its clients sent, and say what came out.

    Membership (views, norms, loss), memorisation, linking and inversion of features, inversion of a
    small update, each with intervals and beside an untrained network. What a client sent is made
    again by replaying the end of the run. Writes audit.json and audit.html into the run folder;
    docs/audit.md says how to read them.

    Parameters
    ----------
    place
        The folder of a finished run, or an encoder that 'furlong export --to safetensors' wrote.
    beside
        Another run, attacked alike and shown beside this one, e.g. with differential privacy.
    only
        What to attack, separated by commas: published, upload, features, gradient (default: all).
    client
        Whose upload is attacked (default: the first client that was asked last).
    images
        Members that attacks are tried on, at most, and as many others.
    seed
        Of the audit; the same seed gives the same results.
    pictures
        Show recovered images, before and after, in the page. It then holds images of the clients:
        pass it on only to whom these may be shown.
    out
        The page (default: audit.html in the run folder; beside an exported encoder).
    as_json
        Print JSON.
    """
    words = auditing.TARGETS if only is None else tuple(only.split(","))
    ask = auditing.Ask(images, seed, client, words)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("reading the images", total=None)

        def tell(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)

        def attacked(run: Path) -> auditing.Audit:
            return auditing.audit(
                run, ask, settings, tell, lambda text: err.print(text, markup=False)
            )

        found = attacked(place)
        other = None if beside is None else attacked(beside)
    page = pages.build(found, other, place, out, pictures)
    if as_json:
        print(json.dumps([each.report() for each in (found, other) if each is not None]))
        return
    for table in _tables(found, other):
        console.print(table)
    for each in found.not_tried:
        say(f"not tried, {each['target']}: {each['reason']}")
    say(pages.headline(found))
    say(f"page: {page}")


def _tables(found: auditing.Audit, other: auditing.Audit | None) -> Iterator[Table]:
    """One for each target; a line for every attack and measure."""
    every = pages.rows(found, other)
    beside = [] if other is None else ["beside"]
    for target in dict.fromkeys(row.finding.attack.target for row in every):
        heads = ("attack", "measure", "this run", *beside, "untrained", "nothing", "revealed")
        table = Table(*heads, title=target, title_justify="left")
        for column in table.columns[2:-1]:
            column.justify = "right"
        for row in every:
            if row.finding.attack.target == target:
                table.add_row(*map(Text, row.cells(beside)))
        yield table
