"""The pages in a real browser: nothing is fetched, nothing fails, tables sort, themes change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import make

from furlong.reports import comparison, page
from furlong.runs.folder import RunFolder

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    shutil.which(CHROMIUM) is None, reason=f"there is no browser {CHROMIUM}"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for seed in range(3):
        make(folder / f"grid/fedsimclr/{seed}", "fedsimclr", seed, 0.65 + seed / 100)
        make(folder / f"grid/fedu/{seed}", "fedu", seed, 0.6 + seed / 70)
        wide = make(folder / f"grid/a name that is rather long {seed}", "fcl", seed, 0.4)
        row = {"who": "federated", "protocol": "transfer:fashion_mnist", "accuracy": 0.5}
        RunFolder(wide).write("evaluations.json", [row])
    return {
        "run": page.build(make(folder / "run")),
        "alone": page.build(make(folder / "alone", bound="single", clients=30)),
        "comparison": comparison.build([folder / "grid"]),
    }


class Visit:
    """An open page, and everything that it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def ground(self) -> str:
        return str(self.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    def close(self) -> None:
        assert self.complaints == []
        assert all(url.startswith(("file:", "data:")) for url in self.requests)
        assert len([url for url in self.requests if url.startswith("file:")]) == 1  # the page
        self.context.close()


@pytest.mark.parametrize("name", ["run", "alone", "comparison"])
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "light"),
        (1280, "dark"),
        pytest.param(390, "dark", marks=pytest.mark.slow),
        pytest.param(1280, "light", marks=pytest.mark.slow),
    ],
)
def test_page_fits_and_is_quiet(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    visit = Visit(browser, pages[name], width, scheme)
    for details in visit.page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.locator("figure svg").first.bounding_box()["width"] > 250
    visit.close()


def test_a_table_that_goes_on_shows_a_shade(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["comparison"], 390)
    place = visit.page.locator(".scroll").first
    assert place.evaluate("element => element.scrollWidth > element.clientWidth")
    place.scroll_into_view_if_needed()

    def corner(x: float) -> bytes:
        box = place.bounding_box()
        clip = {"x": box["x"] + x, "y": box["y"] + 2, "width": 2, "height": 2}
        return bytes(visit.page.screenshot(clip=clip))

    width = place.bounding_box()["width"]
    ground = corner(-6)
    assert (corner(1), corner(width - 3) != ground) == (ground, True)
    place.evaluate("element => { element.scrollLeft = element.scrollWidth; }")
    assert (corner(1) != ground, corner(width - 3)) == (True, ground)
    visit.close()


def first_column(page: Any) -> list[str]:
    return [text.strip() for text in page.locator("table.results >> nth=0").locator(
        "tbody th").all_inner_texts()]  # fmt: skip


def test_sorting(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["comparison"])
    page = visit.page
    before = first_column(page)
    assert before[0] == "random encoder"
    button = page.locator("table.results >> nth=0").get_by_role("button", name="linear probe")
    button.click()  # numbers: the highest first
    assert first_column(page) == ["fedsimclr", "fedu", "fcl", "random encoder"]
    button.focus()
    page.keyboard.press("Enter")  # by keyboard, the other way round
    assert first_column(page) == ["random encoder", "fcl", "fedu", "fedsimclr"]
    head = page.locator("table.results >> nth=0").locator("th[aria-sort]")
    assert head.count() == 1
    assert head.get_attribute("aria-sort") == "ascending"
    page.locator("table.results >> nth=0").get_by_role("button", name="method").click()
    assert first_column(page) == ["fcl", "fedsimclr", "fedu", "random encoder"]
    visit.close()


@pytest.mark.parametrize(("scheme", "other"), [("light", "Dark theme"), ("dark", "Light theme")])
def test_theme(browser: Any, pages: dict[str, Path], scheme: str, other: str) -> None:
    visit = Visit(browser, pages["run"], scheme=scheme)
    page, before = visit.page, visit.ground()
    button = page.locator("button.theme")
    assert button.inner_text() == other
    button.click()
    assert visit.ground() != before
    assert button.inner_text() != other
    line = page.locator("figure svg path[style*='var(--blue']").first
    drawn = line.evaluate("element => getComputedStyle(element).stroke")
    button.click()
    assert visit.ground() == before
    assert line.evaluate("element => getComputedStyle(element).stroke") != drawn
    visit.close()


def test_printing_is_light(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["comparison"], scheme="dark")
    visit.page.emulate_media(media="print", color_scheme="dark")
    color = visit.page.evaluate("getComputedStyle(document.body).color")
    assert color == "rgb(21, 24, 28)"
    assert not visit.page.locator("button.theme").is_visible()
    visit.close()
