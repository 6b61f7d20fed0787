"""The methods and the settings in words: ``furlong methods``, docs/methods.md, docs/options.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from furlong.core.payload import traffic
from furlong.methods import METHODS
from furlong.runs.config import from_tree, method_row, sections
from furlong.runs.cost import flows
from furlong.settings import facts
from furlong.words import size


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
    usual: dict[str, Any]  # training settings by section.key that a run has by itself
    options: tuple[Option, ...]


def usual_encoder(name: str) -> str:
    """With which bytes are counted: a ResNet-18, unless the method has another one."""
    return str(method_row(name).cls.usual.get("model.encoder", "resnet18"))


def entry(name: str, encoder: str | None = None) -> Entry:
    """The method called ``name``; defaults are those with ``encoder``, else with its usual one."""
    row = method_row(name)
    cls, encoder = row.cls, encoder or usual_encoder(name)
    config = from_tree({}, {"method": name, "encoder": encoder}, "options")
    method, resolved = config.make_method(), config.method
    options = tuple(Option(f.name, resolved[f.name], f.values, f.help) for f in facts(cls))
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
        {"data.augment": cls.usual_augment}
        | {key: value for key, value in cls.usual.items() if not key.startswith("method.")},
        options,
    )


# ---------------------------------------------------------------- docs/methods.md

_HEAD = """# Methods

<!-- made by `furlong methods --markdown > docs/methods.md`; a test compares -->

Every method is one file under `src/furlong/methods/`. *Bytes* are the uploads of one of five
clients with 1,000 images of 32 pixels each, per exchange, with a ResNet-18, or with the encoder
that the method is usually run with if it needs another; `furlong cost CONFIG` predicts a whole run.
*Usually run with* is what a run has that names only the method; files and options come first.
Defaults of options are those beside that encoder; `furlong methods NAME --encoder small` has those
beside the small one. Any averaging method combines with any rule of the server (`--server.rule`,
see [guide.md](guide.md)) and with the bounds (`--bound single`, `--bound pooled`,
`--bound without:SITE`). What uploads can reveal is in [privacy.md](privacy.md), and which methods
can be run so that the server learns sums only (`--secure`).
"""


def page() -> str:
    """docs/methods.md."""
    entries = [entry(name) for name in METHODS]
    lines = [_HEAD, _row("method", "family", "needs", "stays on the client", "uploads", "bytes")]
    lines += [_row(*["---"] * 6)]
    for e in entries:
        amounts = ", ".join(
            (f"{kind}: " if len(flow) > 1 else "") + size(traffic(ways["up"]).total)
            for flow in (flows(e.name, usual_encoder(e.name)),)
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
    usual = ", ".join(f"`--{name.replace('_', '-')} {value}`" for name, value in e.usual.items())
    stands = [f"Stands for `--server.{key} {value}`.\n" for key, value in e.server.items()]
    return "\n".join(
        [
            f"## {e.name}\n\n{e.summary} *{e.paper}.*\n",
            *stands,
            f"**Leaves the client.** {e.leaves}",
            *caution,
            f"\n**Usually run with** {usual}",
            "",
            *table,
            "",
        ]
    )


# ---------------------------------------------------------------- docs/options.md

_OPTIONS = """# Options

<!-- made by `furlong methods --options > docs/options.md`; a test compares -->

Every key of a configuration file is an option of `furlong run` too: `[train] rounds = 50` is
`--train.rounds 50`, and some have a short name. A method's own fields are in
[methods.md](methods.md). *Role* says what a setting can change: a **result** (the weights or what
is measured of them, in the last bit), the **place** where and by which machinery it is computed, or
how closely one **watches**. Runs that differ in *result* settings are different rows of a table.
Settings with *resume* may be given anew to `furlong resume`. Where a method's class names a usual
value ([methods.md](methods.md)), that comes before the default of this page.
"""


def options_page() -> str:
    """docs/options.md."""
    lines = [_OPTIONS]
    for section, cls in sections().items():
        lines += [f"## [{section}]\n\n{cls.__doc__}\n"]
        lines += [_row("key", "short", "default", "values", "role", ""), _row(*["---"] * 6)]
        for fact in facts(cls):
            short = f"`--{fact.short.replace('_', '-')}`" if fact.short else ""
            role = f"{fact.role}, resume" if fact.resume else fact.role
            lines.append(_row(f"`{fact.name}`", short, fact.usual, fact.values, role, fact.help))
        lines.append("")
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
