"""furlong methods."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from furlong.cli.common import console
from furlong.core.payload import by_field
from furlong.methods import METHODS
from furlong.reports import catalogue
from furlong.runs.cost import flows
from furlong.words import size


def methods(
    name: str | None = None,
    /,
    *,
    encoder: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    markdown: bool = False,
    options: bool = False,
) -> None:
    """List the methods, or one method's fields, state, and what leaves a client.

    Parameters
    ----------
    name
        A method.
    encoder
        The encoder for which bytes are counted (32-pixel images); none: resnet18, or the one that
        the method is usually run with if it needs another.
    as_json
        Print JSON.
    markdown
        Print the page docs/methods.md.
    options
        Print the page docs/options.md: every setting.
    """
    if markdown:
        print(catalogue.page(), end="")
    elif options:
        print(catalogue.options_page(), end="")
    elif name is None:
        _list_methods(as_json)
    else:
        _one_method(name, encoder or catalogue.usual_encoder(name), as_json)


def _list_methods(as_json: bool) -> None:
    entries = [catalogue.entry(listed) for listed in METHODS]
    if as_json:
        print(json.dumps({e.name: _facts(e) for e in entries}))
        return
    for family in dict.fromkeys(e.family for e in entries):
        table = Table(title=family, title_justify="left", box=None, show_header=False)
        table.add_column(style="bold", min_width=10)
        table.add_column(style="dim")
        for e in entries:
            if e.family == family:
                table.add_row(e.name, "paper", e.paper)
                table.add_row("", "keeps", e.keeps)
                table.add_row("", "uploads", e.uploads)
                if e.needs != "nothing":
                    table.add_row("", "needs", e.needs)
        console.print(table)
    console.print("furlong methods NAME: options, bytes, what leaves a client, known criticism")


def _facts(e: catalogue.Entry) -> dict[str, Any]:
    return {k: v for k, v in asdict(e).items() if k not in ("name", "options")}


def _one_method(name: str, encoder: str, as_json: bool) -> None:
    e = catalogue.entry(name, encoder)
    sent = {
        kind: {way: by_field(value) for way, value in flow.items()}
        for kind, flow in flows(name, encoder).items()
    }
    if as_json:
        amounts = {
            kind: {w: {"/".join(k): v for k, v in g.items()} for w, g in ways.items()}
            for kind, ways in sent.items()
        }
        resolved = {"name": name, **{o.name: o.default for o in e.options}}
        print(json.dumps({"name": name, **_facts(e), "fields": resolved, "bytes": amounts}))
        return
    console.print(Text(name, "bold"), f"({e.family}): {e.summary}")
    console.print(f"paper: {e.paper}")
    for setting, value in e.server.items():
        console.print(f"stands for: --server.{setting} {value}")
    if e.needs != "nothing":
        console.print(f"needs: {e.needs}")
    usual = ", ".join(f"{setting} {value}" for setting, value in e.usual.items())
    console.print(f"usually run with: {usual}")
    table = Table("field", "default", "type", "", title="fields (--method.FIELD)")
    table.title_justify = "left"
    for o in e.options:
        table.add_row(o.name, str(o.default), o.kind, o.meaning)
    console.print(table)
    console.print(f"stays on the client: {e.keeps}")
    console.print(
        f"leaves the client: {e.leaves} With them go the number of images and the means "
        "of the training loss and other logged numbers.",
    )
    if e.caution:
        console.print(f"criticism: {e.caution}")
    title = f"per client and exchange: {encoder}, 5 clients with 1,000 images of 32 pixels"
    table = Table("exchange", "", "field", "what", "numbers", "bytes", title=title)
    table.title_justify = "left"
    for exchange, ways in sent.items():
        for way, groups in ways.items():
            for (field_name, kind), (elements, count) in groups.items():
                table.add_row(exchange, way, field_name, kind, f"{elements:,}", size(count))
    console.print(table)
