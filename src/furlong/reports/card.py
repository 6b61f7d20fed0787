"""The model card of an exported encoder: Markdown from the files of its run, nothing invented."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from furlong.core.aggregation import ServerSettings
from furlong.core.payload import by_field
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.reports import measures
from furlong.reports.page import ENCODERS
from furlong.reports.parts import budget, initial, leaves, traffic
from furlong.reports.rendering import render
from furlong.reports.tables import by_encoder
from furlong.runs.config import short
from furlong.runs.cost import sent_by, without_data
from furlong.runs.record import Result, RunRecord, Split, Summary, parse
from furlong.words import percent

THIS = "client 0 alone"  # whose encoder is kept where every client has its own
QUALITY = ("alignment", "uniformity", "effective_rank", "spread")


def write(
    run: RunRecord, name: str, data: bytes, to: str, about: Mapping[str, str], checked: str,
    load: str,
) -> str:  # fmt: skip
    """The card's text for the file ``name``, which holds ``data`` in the format ``to``."""
    federated, spent, began = run.sends, run.finished.privacy, initial(run.settings)
    contents = {
        "name": name,
        "to": to,
        "about": about,
        "checked": checked,
        "load": load,
        "bytes": len(data),
        "digest": hashlib.sha256(data).hexdigest(),
        "method": METHODS.get(about["method"]),
        "settings": run.settings,
        "secured": run.secured,
        "initial": began,
        "summary": run.finished,
        "split": run.split,
        "labelled": run.split is not None and run.split.class_counts is not None,
        "sizes": _sizes(run.split),
        "bound": run.bound,
        "rule": _rule(run.settings.get("server", {})),
        "columns": by_encoder(run.finished.results)[0],
        "results": list(_results(run.finished)),
        "beside": measures.of_run(run.finished.results)[:1],  # not by site: no names of clients
        "budget": budget(spent, run.secured, began) if spent else None,
        "under_budget": leaves(spent) if spent else None,
        "since": list(_since(run.evaluations)),
        "traffic": traffic(run.lines()) if federated else None,
        "fields": _fields(run, about) if federated else None,
    }
    return render("modelcard.md.jinja", contents)


def _rule(server: Mapping[str, Any]) -> str:
    """The server's rule, with those of its settings that are not the usual ones."""
    usual = asdict(ServerSettings())
    changed = [f"{k} {v}" for k, v in server.items() if k != "rule" and v != usual.get(k)]
    return str(server.get("rule", "")) + (f" ({', '.join(changed)})" if changed else "")


def _sizes(split: Split | None) -> str:
    """Images per client, in words."""
    if split is None:
        return "not recorded"
    low, high = min(split.sizes), max(split.sizes)
    spread = f"{low:,} each" if low == high else f"{low:,} to {high:,} each"
    return f"{sum(split.sizes):,} ({spread})"


def _results(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """A row per encoder; of clients by themselves the first and the mean."""
    columns, table = by_encoder(summary.results)
    for who, cells in table.items():
        if who == THIS or not who.endswith(" alone"):
            found = [cells.get(column) for column in columns]
            words = ["–" if cell is None else percent(cell.accuracy, cell.std) for cell in found]
            yield f"{who} (this file)" if who == THIS else ENCODERS.get(who, who), words


def _since(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """(encoder, protocol, result, settings) of what was measured after the run, without paths."""
    for row in rows:
        who = str(row.get("who"))
        if who != THIS and who.endswith(" alone"):
            continue
        data, given = str(row.get("data", "")), dict(row.get("settings") or {})
        given.pop("seed" if "run.seed" in given else "", None)  # the same number
        given = {k: short(v) if isinstance(v, str) else v for k, v in given.items()}
        protocol = str(row.get("protocol", ""))
        if data:
            protocol = protocol.replace(data, short(data))
        result = ", ".join(f"{k.replace('_', ' ')} {row[k]:.3g}" for k in QUALITY if k in row)
        if isinstance(row.get("accuracy"), float):
            found = parse(Result, row, "evaluations.json")
            result = percent(found.accuracy, found.std)
            if found.auroc is not None:
                result += f", AUROC {measures.cell(found, 'auroc')}"
        yield who, protocol, result, ", ".join(f"{name} {value}" for name, value in given.items())


def _fields(
    run: RunRecord, about: Mapping[str, str]
) -> list[tuple[str, str, str, int, int]] | None:
    """(exchange, field, kind, values, bytes) of the first client's uploads; ``None``: unknown."""
    try:
        sizes = dict(enumerate(run.split.sizes if run.split else []))
        shape = int(about["channels"]), int(about["image_size"])
        flows = sent_by(without_data(run.config(), sizes, *shape))
    except (FurlongError, KeyError, ValueError):
        return None
    return [
        (kind, *key, *numbers)
        for kind, ways in flows.items()
        for key, numbers in by_field(ways["up"]).items()
    ]
