"""Commands that tell before anything is trained: partition, methods, cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from furlong.cli.common import app, console, dotted, err
from furlong.core.payload import Traffic, by_field
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.reports import catalogue
from furlong.runs import config, prepare
from furlong.runs.cost import Cost, flows, predict
from furlong.words import size


@app.command
def partition(
    *,
    data: str | None = None,
    partition: str | None = None,
    clients: int | None = None,
    seed: int | None = None,
    figure: Path | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Show who would get which images: class counts, β-CIB, β-hetero, heat map.

    Parameters
    ----------
    data
        As for ``run``.
    partition
        iid[:stratified], classes:K, shards:K, mfcl:S[:sequential], dirichlet:A[:MIN],
        dirichlet_balanced:A, quantity:W,W,…, quantity:lognormal:S, quantity:powerlaw:P, natural.
    clients
        Number of clients.
    seed
        Of the split.
    figure
        Also draw the heat map to this .svg or .png file.
    as_json
        Print JSON.
    """
    names = ("data", "partition", "clients", "seed")
    given = {k: v for k, v in locals().items() if k in names and v is not None}
    settings = config.load(None, given | dotted)
    train, _, notes = prepare.load_data(settings)
    about = prepare.describe_partition(train, prepare.split_data(settings, train))
    for note in notes:
        err.print(note, markup=False)
    if figure is not None:
        from furlong.reports import figures
        from furlong.reports.parts import betas

        title = f"{train.name}, {about['partition']}"
        drawn = (
            figures.heat_map(
                about["class_counts"],
                about["classes"],
                title,
                betas(about["beta_cib"], about["beta_hetero_m2"]),
            )
            if "class_counts" in about
            else figures.sizes(about["sizes"], title)
        )
        figures.save(drawn, figure)
    if as_json:
        print(json.dumps(about))
        return
    console.print(_partition_table(about))
    if "beta_cib" in about:
        console.print(
            f"β-CIB {about['beta_cib']:.4f} bits · β-hetero {about['beta_hetero_m2']:.4f} (M²) or "
            f"{about['beta_hetero_mm1']:.4f} (M(M-1))"
        )
        shares = about["false_negatives"]
        console.print(
            f"false negatives (same class) among contrasted images: {100 * shares['local']:.1f} % "
            f"of a client's own, {100 * shares['union']:.1f} % of all clients', "
            f"{100 * shares['remote']:.1f} % of the others'"
        )
    if figure is not None:
        console.print(f"heat map: {figure}")


def _partition_table(about: dict[str, Any]) -> Table:
    """Counts with a shade of blue behind them: the heat map of a terminal."""
    counts = about.get("class_counts") or [[] for _ in about["sizes"]]
    narrow = len(counts[0]) <= 20
    columns = about.get("classes", []) if narrow else []
    table = Table(
        "client",
        "images",
        *columns,
        *([] if narrow else ["classes held"]),
        box=None,
        padding=(0, 1, 0, 0),
    )
    peak = max((n for row in counts for n in row), default=1) or 1
    for client, row in enumerate(counts):
        cells = [f"[on rgb(0,0,{40 + 160 * n // peak})]{n}[/]" if n else "·" for n in row]
        if not narrow:
            cells = [str(sum(n > 0 for n in row))]
        table.add_row(str(client), f"{about['sizes'][client]:,}", *cells)
    for column in table.columns:
        column.justify = "right"
    return table


@app.command
def methods(
    name: str | None = None,
    /,
    *,
    encoder: str = "resnet18",
    as_json: Annotated[bool, Parameter("--json")] = False,
    markdown: bool = False,
) -> None:
    """List the methods, or one method's fields, state, and what leaves a client.

    Parameters
    ----------
    name
        A method.
    encoder
        The encoder for which bytes are counted (32-pixel images).
    as_json
        Print JSON.
    markdown
        Print the page docs/methods.md.
    """
    if markdown:
        print(catalogue.page(), end="")
    elif name is None:
        _list_methods(as_json)
    else:
        _one_method(name, encoder, as_json)


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
                table.add_row(e.name, "paper", escape(e.paper))
                table.add_row("", "keeps", escape(e.keeps))
                table.add_row("", "uploads", escape(e.uploads))
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
    console.print(f"[bold]{name}[/] ({e.family}): {e.summary}")
    console.print(f"paper: {e.paper}", markup=False)
    for setting, value in e.server.items():
        console.print(f"stands for: --server.{setting} {value}", markup=False)
    if e.needs != "nothing":
        console.print(f"needs: {e.needs}", markup=False)
    table = Table("field", "default", "type", "", title="fields (--method.FIELD)")
    table.title_justify = "left"
    for o in e.options:
        table.add_row(*map(escape, (o.name, str(o.default), o.kind, o.meaning)))
    console.print(table)
    console.print(f"stays on the client: {e.keeps}", markup=False)
    console.print(
        f"leaves the client: {e.leaves} With them go the number of images and the means "
        "of the training loss and other logged numbers.",
        markup=False,
    )
    if e.caution:
        console.print(f"criticism: {e.caution}", markup=False)
    title = f"per client and exchange: {encoder}, 5 clients with 1,000 images of 32 pixels"
    table = Table("exchange", "", "field", "what", "numbers", "bytes", title=title)
    table.title_justify = "left"
    for exchange, ways in sent.items():
        for way, groups in ways.items():
            for (field_name, kind), (elements, count) in groups.items():
                table.add_row(exchange, way, field_name, kind, f"{elements:,}", size(count))
    console.print(table)


@app.command
def cost(
    config_file: Annotated[Path | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    method: str | None = None,
    encoder: str | None = None,
    clients: int | None = None,
    rounds: int | None = None,
    fraction: float | None = None,
    sizes: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Predict what a run sends, per round and in total, without training.

    Takes the options of ``furlong run`` as ``--section.key``. The data are read to know how many
    images each client has, unless ``--sizes`` says so.

    Parameters
    ----------
    config_file
        A TOML file; options override it.
    method
        Name of a method.
    encoder
        Name of an encoder.
    clients
        Number of clients.
    rounds
        Rounds of communication.
    fraction
        Share of the clients that takes part in a round.
    sizes
        Images per client instead of reading the data: 1000,2000,500 or 10000x5.
    as_json
        Print JSON.
    """
    names = ("method", "encoder", "clients", "rounds", "fraction")
    given = {k: v for k, v in locals().items() if k in names and v is not None}
    settings = config.load(config_file, given | dotted)
    if settings.run.bound != "none":
        raise FurlongError(f"bound = {settings.run.bound}: nothing is sent to anybody.")
    if sizes is None:
        server = prepare.prepare(settings).server
    else:
        server = prepare.without_data(settings, _sizes(sizes), 3, settings.data.image_size or 32)
    kinds: dict[str, list[Cost]] = {}
    for item in predict(server):
        kinds.setdefault(item.exchange.kind, []).append(item)
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "exchange": item.exchange.index,
                        "round": item.exchange.round,
                        "kind": item.exchange.kind,
                        "clients": len(item.cohort),
                        "up": asdict(item.up),
                        "down": asdict(item.down),
                    }
                    for items in kinds.values()
                    for item in items
                ]
            )
        )
        return
    table = Table("exchange", "times", "", "params", "buffers", "features", "in all", "per visit")
    table.title = "all clients together, and each time a client takes part (per visit)"
    table.title_justify = "left"
    whole = Traffic()
    for kind, items in kinds.items():
        visits = sum(len(item.cohort) for item in items)
        if not visits:
            table.add_row(kind, f"{len(items):,}", "–")  # the server's own work
            continue
        for way in ("down", "up"):
            total = sum((getattr(item, way) for item in items), Traffic())
            whole += total
            cells = (total.params, total.buffers, total.features)
            shown = [size(c) if c else "" for c in cells]
            times = f"{len(items):,}" if way == "down" else ""
            name = kind if way == "down" else ""
            table.add_row(name, times, way, *shown, size(total.total), size(total.total / visits))
    console.print(table)
    each = whole.total / max(1, len(server.setup.sizes))
    console.print(
        f"{settings.method['name']}, {server.setup.encoder}, {len(server.setup.sizes)} clients: "
        f"{size(whole.total)} in all, {size(each)} per client. A report's own numbers (images, "
        "loss) come on top, some bytes each."
    )


def _sizes(text: str) -> dict[int, int]:
    """``1000,2000`` or ``1000x5``."""
    found: list[int] = []
    for item in text.split(","):
        count, _, times = item.partition("x")
        if not count.isdecimal() or (times and not times.isdecimal()) or int(count) < 2:
            raise FurlongError(f"--sizes {text}: {item!r} is not like 1000 (at least 2) or 1000x5.")
        found += [int(count)] * int(times or 1)
    return dict(enumerate(found))
