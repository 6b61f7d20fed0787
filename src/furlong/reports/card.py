"""The model card of an exported encoder: Markdown from the files of its run, nothing invented."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from furlong.core.aggregation import ServerSettings
from furlong.core.payload import Traffic, by_field
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.reports.page import ENCODERS, percent
from furlong.reports.tables import PROTOCOLS
from furlong.runs import config
from furlong.runs.cost import sent_by, without_data
from furlong.runs.folder import RunFolder
from furlong.words import size

THIS = "client 0 alone"  # whose encoder is kept where every client has its own


def write(
    run: Path,
    name: str,
    data: bytes,
    to: str,
    about: Mapping[str, str],
    checked: str,
    load: str,
) -> str:
    """The card's text for the file ``name``, which holds ``data`` in the format ``to``."""
    folder = RunFolder.open(run)
    settings = _settings(run / "config.toml")
    summary, split = folder.read("summary.json"), folder.read("partition.json") or {}
    if summary is None:
        raise FurlongError(f"{run} has not finished: 'furlong resume {run}' goes on with it.")
    bound = settings.get("run", {}).get("bound", "none")
    return (
        _environment()
        .from_string(_template())
        .render(
            name=name,
            to=to,
            about=about,
            checked=checked,
            load=load,
            bytes=len(data),
            digest=hashlib.sha256(data).hexdigest(),
            method=_method(about["method"]),
            settings=settings,
            summary=summary,
            split=split,
            sizes=_sizes(split),
            bound=bound,
            rule=_rule(settings.get("server", {})),
            results=_results(summary.get("results", [])),
            since=_since(folder.evaluations()),
            traffic=_traffic(folder.lines()) if bound == "none" else None,
            fields=_fields(run, about, split) if bound == "none" else None,
        )
    )


def _template() -> str:
    return (
        resources.files("furlong.reports")
        .joinpath("templates", "modelcard.md.jinja")
        .read_text(encoding="utf-8")
    )


def _environment() -> Environment:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"size": size, "percent": percent, "cell": _cell}
    return environment


def _cell(text: object) -> str:
    """Text that cannot end a table's cell or begin markup."""
    flat = " ".join(str(text).split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _settings(path: Path) -> dict[str, Any]:
    """The TOML, plainly: an own method's code need not be at hand."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FurlongError(f"cannot read {path}: {error}") from None


def _method(name: str) -> dict[str, str]:
    """What one of the library's methods says about itself; empty for a user's own."""
    row = METHODS.get(name)
    if row is None:
        return {"paper": "", "keeps": "", "leaves": "", "caution": ""}
    return {
        "paper": row.paper,
        "keeps": row.cls.keeps,
        "leaves": row.cls.leaves,
        "caution": row.cls.caution,
    }


def _rule(server: Mapping[str, Any]) -> str:
    """The server's rule, with those of its settings that are not the usual ones."""
    usual = asdict(ServerSettings())
    changed = [f"{k} {v}" for k, v in server.items() if k != "rule" and v != usual.get(k)]
    return str(server.get("rule", "")) + (f" ({', '.join(changed)})" if changed else "")


def _sizes(split: Mapping[str, Any]) -> str:
    """Images per client, in words."""
    sizes = split.get("sizes") or []
    if not sizes:
        return "not recorded"
    same = min(sizes) == max(sizes)
    spread = f"{sizes[0]:,} each" if same else f"{min(sizes):,} to {max(sizes):,} each"
    return f"{sum(sizes):,} ({spread})"


def _results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row per encoder, a column per protocol; of clients by themselves the first and the mean."""
    measured = [row for row in rows if isinstance(row.get("accuracy"), float)]
    columns = list(dict.fromkeys(str(row["protocol"]) for row in measured))
    table: dict[str, dict[str, str]] = {}
    for row in measured:
        who = str(row["who"])
        if who == THIS or not who.endswith(" alone"):
            name = f"{who} (this file)" if who == THIS else ENCODERS.get(who, who)
            table.setdefault(name, {})[str(row["protocol"])] = _result(row)
    return {
        "columns": [PROTOCOLS.get(column, column) for column in columns],
        "rows": [(who, [cells.get(c, "–") for c in columns]) for who, cells in table.items()],
    }


def _since(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(encoder, protocol, result, settings) of what was measured after the run, without paths."""
    found = []
    for row in rows:
        who = str(row.get("who"))
        if who != THIS and who.endswith(" alone"):
            continue
        data, given = str(row.get("data", "")), dict(row.get("settings") or {})
        given.pop("seed" if "run.seed" in given else "", None)  # the same number
        if "data.name" in given:
            given["data.name"] = short(str(given["data.name"]))
        protocol = str(row.get("protocol", ""))
        if data:
            protocol = protocol.replace(data, short(data))
        settings = ", ".join(f"{name} {value}" for name, value in given.items())
        found.append((who, protocol, _result(row), settings))
    return found


def short(name: str) -> str:
    """A data set's name without the path to it, which may say more than it should."""
    kind, colon, place = name.partition(":")
    return f"{kind}:{Path(place).name}" if colon else kind


def _result(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("accuracy"), float):
        spread = f" ± {100 * row['std']:.1f}" if "std" in row else ""
        return percent(row["accuracy"]) + spread
    kept = ("alignment", "uniformity", "effective_rank", "spread")
    return ", ".join(f"{k.replace('_', ' ')} {row[k]:.3g}" for k in kept if k in row)


def _traffic(lines: list[dict[str, Any]]) -> dict[str, Traffic]:
    """Bytes of the whole run by what they are."""
    found = {"up": Traffic(), "down": Traffic()}
    for line in lines:
        for way in found:
            found[way] += Traffic(**line[way])
    return found


def _fields(
    run: Path, about: Mapping[str, str], split: Mapping[str, Any]
) -> list[tuple[str, str, str, int, int]] | None:
    """(exchange, field, kind, values, bytes) of the first client's uploads; ``None``: unknown."""
    try:
        settings = config.load(run / "config.toml")
        sizes = dict(enumerate(split["sizes"]))
        server = without_data(settings, sizes, int(about["channels"]), int(about["image_size"]))
        flows = sent_by(server)
    except (FurlongError, KeyError, ValueError):
        return None
    return [
        (kind, *key, *numbers)
        for kind, ways in flows.items()
        for key, numbers in by_field(ways["up"]).items()
    ]
