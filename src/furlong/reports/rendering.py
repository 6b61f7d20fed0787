"""Templates of the package become pages and cards: one environment for all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from furlong.reports import columns, formats, measures
from furlong.words import duration, percent, size


def render(template: str, contents: Mapping[str, Any]) -> str:
    """The text of a template; a path or a name that is not Unicode must not stop it."""
    text = _environment().get_template(template).render(contents)
    return text.encode("utf-8", "replace").decode()


@cache
def _environment() -> Environment:
    """In HTML everything is escaped; a name that a template uses must be given."""
    made = Environment(
        loader=PackageLoader("furlong.reports"),
        autoescape=lambda name: name is not None and ".html" in name,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"size": size, "percent": percent, "duration": duration, "cell": _cell}
    made.filters |= {"column_title": columns.column_title, "word": columns.word, "words": _words}
    made.globals |= {"notes": formats.notes, "verdict": formats.verdict}
    made.globals |= {"sheets": measures.of_group}
    return made


def _words(about: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in about.items())


def _cell(text: object) -> str:
    """Text that cannot end the cell of a Markdown table or begin markup, a link or an image."""
    flat = " ".join(str(text).split()).replace("`", "'")
    return re.sub(r"([\\|*\[\]])", r"\\\1", flat).replace("<", "&lt;")
