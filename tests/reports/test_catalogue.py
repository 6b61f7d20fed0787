"""What users read about methods comes from the code and is complete."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from pathlib import Path

import pytest

from furlong.methods import METHODS
from furlong.reports.catalogue import entry, page

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_current() -> None:
    """If this fails: furlong methods --markdown > docs/methods.md."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_it_is(name: str) -> None:
    about = entry(name)
    assert about.paper
    assert about.summary.endswith(".")
    assert about.leaves.endswith(".")
    assert 10 < len(about.uploads) < 250
    assert "privacy" in about.leaves or "invert" in about.leaves
    assert {o.name for o in about.options} >= {"bn_stats"}


def test_needs() -> None:
    needs = {name: entry(name).needs for name in METHODS}
    assert {n for n, what in needs.items() if "labels" in what} == {"fedavg", "fedprox", "moon"}
    assert {n for n, what in needs.items() if "public" in what} == {"fedca"}


def test_the_comment_behind_a_field_is_its_meaning() -> None:
    options = {o.name: o for o in entry("fedmoco").options}
    assert options["key_update"].meaning == "reset: a copy of the query network"
    assert options["key_update"].kind == "aggregate | reset"
    assert options["bank"].default == 4096


@pytest.mark.parametrize("name", METHODS)
def test_no_comment_at_a_field_is_lost(name: str) -> None:
    """Behind it, above it, or inside a value of several lines."""
    source = inspect.getsource(METHODS[name].cls)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    meanings, last = {o.name: o.meaning for o in entry(name).options}, 0
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            for line in range(last + 1, (node.end_lineno or 0) + 1):
                if line in comments and node.target.id in meanings:
                    assert comments[line].lstrip("# ") in meanings[node.target.id]
        last = node.end_lineno or 0


def test_names_of_one_class_say_what_differs() -> None:
    summaries = [entry(name).summary for name in METHODS]
    assert len(set(summaries)) == len(METHODS)
