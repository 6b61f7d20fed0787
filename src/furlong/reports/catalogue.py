"""The methods in words and numbers: what ``furlong methods`` prints and docs/methods.md says."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from furlong.core.payload import traffic
from furlong.methods import METHODS
from furlong.runs.config import from_tree, method_row
from furlong.runs.cost import flows
from furlong.words import size

_FIELD = re.compile(r"((?:^    # .+\n)*)^    (\w+): [^#\n]*(?:# (.+))?$", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """A field of a method: ``--method.NAME``."""

    name: str
    default: Any
    kind: str
    meaning: str


@dataclass(frozen=True)
class Entry:
    """A method as a user sees it."""

    name: str
    family: str
    paper: str
    summary: str
    needs: str
    keeps: str
    uploads: str  # the first sentence of ``leaves``
    leaves: str
    caution: str
    server: dict[str, Any]  # what the name stands for besides: --server.KEY
    options: tuple[Option, ...]


def entry(name: str, encoder: str = "resnet18") -> Entry:
    """The method called ``name``; defaults are those with ``encoder``."""
    row = method_row(name)
    cls = row.cls
    config = from_tree({}, {"method": name, "encoder": encoder}, "options")
    method, resolved = config.make_method(), config.method
    hints, meanings = get_type_hints(cls), _meanings(cls)
    options = tuple(
        Option(f.name, resolved[f.name], _kind(hints[f.name]), meanings.get(f.name, ""))
        for f in fields(cls)
    )
    wanted = {"labels": method.needs_labels, "public images": method.needs_public}
    return Entry(
        name,
        row.family,
        row.paper,
        row.summary,
        ", ".join(thing for thing, needed in wanted.items() if needed) or "nothing",
        cls.keeps or "nothing",
        re.split(r"(?<=\w)\. (?=[A-Z])", cls.leaves)[0].rstrip("."),
        cls.leaves,
        cls.caution,
        dict(row.server),
        options,
    )


def _kind(hint: Any) -> str:
    choices = get_args(hint)
    return " | ".join(map(str, choices)) if choices else str(hint.__name__)


def _meanings(cls: type) -> dict[str, str]:
    """Field -> the comment above or behind it in the source, the nearest class first."""
    found: dict[str, str] = {}
    for base in cls.__mro__[:-1]:
        for above, name, behind in _FIELD.findall(inspect.getsource(base)):
            lines = [line.strip(" #") for line in above.splitlines()]
            if comment := " ".join(filter(None, [*lines, behind])):
                found.setdefault(name, comment)
    return found


# ---------------------------------------------------------------- docs/methods.md

_HEAD = """# Methods

<!-- made by `furlong methods --markdown > docs/methods.md`; a test compares -->

Every method is one file under `src/furlong/methods/`. *Bytes* are the uploads of one of five
clients with 1,000 images of 32 pixels each, per exchange, with a ResNet-18; `furlong cost CONFIG`
predicts a whole run. Any averaging method combines with any rule of the server (`--server.rule`,
see [guide.md](guide.md)) and with both bounds (`--bound single`, `--bound pooled`). What uploads
can reveal is in [privacy.md](privacy.md).
"""


def page() -> str:
    """docs/methods.md."""
    entries = [entry(name) for name in METHODS]
    lines = [_HEAD, _row("method", "family", "needs", "stays on the client", "uploads", "bytes")]
    lines += [_row(*["---"] * 6)]
    for e in entries:
        amounts = ", ".join(
            (f"{kind}: " if len(flow) > 1 else "") + size(traffic(ways["up"]).total)
            for flow in (flows(e.name, "resnet18"),)
            for kind, ways in flow.items()
        )
        link = f"[`{e.name}`](#{e.name})"
        lines.append(_row(link, e.family, e.needs, e.keeps, e.uploads, amounts))
    return "\n".join([*lines, "", *map(_section, entries)])


def _section(e: Entry) -> str:
    table = [_row("option", "default", "values", ""), _row(*["---"] * 4)]
    table += [
        _row(f"`--method.{o.name.replace('_', '-')}`", str(o.default), o.kind, o.meaning)
        for o in e.options
    ]
    caution = [f"\n**Criticism.** {e.caution}"] if e.caution else []
    stands = [f"Stands for `--server.{key} {value}`.\n" for key, value in e.server.items()]
    return "\n".join(
        [
            f"## {e.name}\n\n{e.summary} *{e.paper}.*\n",
            *stands,
            f"**Leaves the client.** {e.leaves}",
            *caution,
            "",
            *table,
            "",
        ]
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
