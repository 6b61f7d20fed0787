"""What users read about methods comes from the code and is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from furlong.methods import METHODS
from furlong.reports.catalogue import entry, options_page, page
from furlong.runs.config import all_facts

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_current() -> None:
    """If this fails: furlong methods --markdown > docs/methods.md."""
    assert PAGE.read_text() == page()


def test_the_page_of_options_is_current() -> None:
    """If this fails: furlong methods --options > docs/options.md."""
    assert PAGE.with_name("options.md").read_text() == options_page()


def test_every_setting_is_explained() -> None:
    for name, fact in all_facts().items():
        assert fact.help.endswith("."), name
        assert 10 < len(fact.help) < 250, name


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


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_a_method_is_explained(name: str) -> None:
    for option in entry(name).options:
        assert len(option.meaning) > 5, option.name


def test_a_field_is_shown_with_its_default_and_its_choices() -> None:
    options = {o.name: o for o in entry("fedmoco").options}
    assert options["key_update"].kind == "aggregate | reset"
    assert options["bank"].default == 512  # its usual one


def test_names_of_one_class_say_what_differs() -> None:
    summaries = [entry(name).summary for name in METHODS]
    assert len(set(summaries)) == len(METHODS)
