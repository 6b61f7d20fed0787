"""The page of a run, and its figures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_runs import CLASSES, line
from fake_runs import make as fake

from furlong.errors import FurlongError
from furlong.methods.fedca import FedCA
from furlong.methods.fedsimclr import FedSimCLR
from furlong.reports import figures, page
from furlong.runs.folder import RunFolder


def make(path: Path, **options: Any) -> Path:
    """A run of three clients and four rounds."""
    return fake(path, **{"clients": 3, "rounds": 4, **options})


def page_of(path: Path) -> str:
    """The page, with ordinary spaces."""
    assert page.build(path) == path / "report.html"
    return (path / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")


def test_a_page_that_can_be_shown_has_no_path_of_the_machine(tmp_path: Path) -> None:
    options = {
        "data": "manifest:/home/ann/trial/slices.csv",
        "data.root": "/home/ann/a:/home/ann/b",
        "init": "/home/ann/w.safetensors",
    }
    text = page_of(make(tmp_path / "run", **options))
    for word in ("/home", "ann/", str(tmp_path)):
        assert word not in text
    assert "fedu on manifest:slices.csv" in text
    assert "name = &#34;manifest:slices.csv&#34;" in text
    assert "<td>a:b</td>" in text


class Tags(HTMLParser):
    """All tags with their attributes; every one that is opened must be closed."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_self_contained(page: str) -> None:
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"|<img src="data:image/', "", page)
    for word in ("http://", "https://", "src=", "@import", "<link", "<iframe", "fetch("):
        assert word not in without_names, word
    assert "default-src 'none'" in page
    assert all(ref.startswith("#") for ref in re.findall(r"url\(['\"]?(.)", page))
    assert [tag for tag, _ in Tags(page).found].count("script") == 1  # sorting and the theme
    for _, attributes in Tags(page).found:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))


# ---------------------------------------------------------------- the page


def test_finished_run(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", failing=True))
    assert_self_contained(page)
    for text in (
        "fedu <span>on</span> shapes", "3 clients · 4 rounds", "63.4 %", "40.0 %", "20.3 %",
        "1.5 MB", "6 MB", "8 kB", "192 B", "β-CIB 1.2500", "3.5000 bits (divided by M²)",
        "4.7500 bits (by M(M−1))", "1 min 30 s", "2 answers of 1 client", "2 of them refused",
        "furlong.load_encoder", "furlong evaluate", "prefers-color-scheme: dark", "Last: 25.3 %",
        "First: 5, last: 4.625",
    ):  # fmt: skip
        assert text in page, text
    # loss, divergence, kNN, effective rank, bytes, partition, false negatives
    assert page.count("<svg") == 7
    assert "has not finished" not in page
    assert "Warning" not in page


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "<img src=x onerror=alert(2)> 'run'", failing=True))
    tags = Tags(page).found
    assert [tag for tag, _ in tags if tag in ("script", "img")] == ["script"]  # the page's own
    assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)")
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert "not finite: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;script&gt;alert(" in page  # the class, shortened, in the heat map


def test_unfinished_run(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "a run", finished=False, done=2))
    assert_self_contained(page)
    assert "has not finished" in page
    assert "2 of 4 rounds" in page
    assert "furlong resume &#39;a run&#39;" in page
    assert page.count("<svg") == 7
    assert "load_encoder" not in page


def test_run_before_its_first_round(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", finished=False, done=0))
    assert "0 of 4 rounds" in page
    assert "No round is done yet" in page
    assert "None: every client" in page


def test_unlabelled_run(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", classes=None))
    assert_self_contained(page)
    assert "the images have no labels" in page
    assert "β-CIB" not in page
    assert page.count("<svg") == 5  # no kNN
    assert '<th class="num">effective rank</th>' in page  # which needs no labels
    assert '<td class="num" data-value="40.0">40.0</td>' in page


def test_every_client_alone(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "run", bound="single"))
    assert_self_contained(page)
    assert '63.4 % <span class="std">± 1.2</span>' in page
    assert "3 clients, one by one" in page
    assert page.index("<details><summary>3 clients") < page.index("client 2 alone")
    assert "nobody sent anything" in page
    assert page.count("<svg") == 6  # no bytes


def test_whatever_a_method_logs_is_drawn_and_explained(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False, done=0, method="fedca")
    for number in range(3):
        found = {
            "dictionary_cosine": 0.9 - number / 10,
            "new_number": 7.0,
            "words": "none",
            "on": True,
        }
        clients = {"0": {"dictionary_cosine": 0.8}, "1": {"dictionary_cosine": 1.0}}
        RunFolder(path).append(line(number, 3) | {"divergence": None, **found, "clients": clients})
    page = page_of(path)
    section = page.split("What the method logs of itself")[1].split("</section>")[0]
    assert section.count("<svg") == 2  # neither what every run logs nor what is no number
    assert "dictionary cosine" in section
    assert FedCA.explains["dictionary_cosine"].replace("'", "&#39;") in section
    assert "First: 0.9, last: 0.7." in section
    assert "As the method logs it. First: 7, last: 7." in section
    assert section.count("The bold line is the clients&#39; mean") == 1


def test_names_of_metrics_are_only_text(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False, done=0)
    hostile = {"../../out": 1.0, "<script>": 2.0, "$x^": 3.0, "a" * 64: 4.0}
    RunFolder(path).append(line(0, 3) | hostile)
    page.build(path, tmp_path / "drawn")
    text = (path / "report.html").read_text(encoding="utf-8")
    assert [tag for tag, _ in Tags(text).found].count("script") == 1
    assert text.split("What the method logs")[1].split("</section>")[0].count("<svg") == 5
    assert (tmp_path / "drawn" / "..-..-out.svg").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drawn", "run"]


def test_a_run_that_is_heading_for_collapse_says_so(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "low", rank=9.0))
    assert "<strong>Warning:</strong> The representation is heading for collapse: " in page
    assert "effective rank 9.0 (untrained encoder: 40.0), kNN 25.3 %" in page
    assert "mlp:256:128:bn" in page  # what fits the method
    page = page_of(make(tmp_path / "own", rank=9.0, method="fedsimclr"))
    assert FedSimCLR.remedy in page
    assert "Dashed: the encoder before any training." in page


def test_nothing_is_drawn_that_was_not_measured(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False, done=1)  # the first line has no measurement
    page = page_of(path)
    assert "Dashed" not in page
    assert "How many directions" not in page


def test_losses_that_are_not_numbers(tmp_path: Path) -> None:
    path = make(tmp_path / "run", finished=False, done=2)
    broken = line(2, 3) | {"loss": float("nan"), "knn": float("nan")}
    RunFolder(path).append(broken)
    assert "last: nan" in page_of(path)


def test_same_files_same_bytes(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    first = page.build(path).read_bytes()
    assert page.build(path).read_bytes() == first


@pytest.mark.parametrize(("clients", "rounds", "n"), [(10, 100, 10), (1000, 3, 100)])
def test_weight(tmp_path: Path, clients: int, rounds: int, n: int) -> None:
    classes = [f"class {k}" for k in range(n)]
    page = page_of(make(tmp_path / "run", clients=clients, rounds=rounds, classes=classes))
    assert len(page) < 1_000_000


def test_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(FurlongError, match="not a run folder"):
        page.build(tmp_path)
    (tmp_path / "config.toml").write_text("[data]\nname = 'shapes'\n")
    with pytest.raises(FurlongError, match="not the configuration of a run"):
        page.build(tmp_path)
    (tmp_path / "config.toml").write_text("=")
    with pytest.raises(FurlongError, match=r"cannot read .*config\.toml"):
        page.build(tmp_path)


# ---------------------------------------------------------------- figures


ROWS = [("random", 0.3, None), ("alone", 0.5, 0.02), ("federated", 0.6, None), ("pooled", 0.7, 0.0)]


def test_svg_follows_the_page() -> None:
    drawn = figures.svg(figures.bars(ROWS, "Linear probe"))
    assert drawn.startswith("<svg ")
    assert drawn.endswith("</svg>")
    assert "currentColor" in drawn
    assert "#000000" not in drawn
    assert "var(--blue, #0072b2)" in drawn
    assert "50.0\N{NO-BREAK SPACE}% ± 2.0" in drawn
    assert "width=" not in drawn[: drawn.index(">")]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_saved_figures_are_reproducible(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        drawn = figures.heat_map([[5, 0], [1, 2000]], CLASSES[:2], "a title with $ and <b>")
        figures.save(drawn, tmp_path / f"{name}{suffix}")
    first, second = (tmp_path / f"{name}{suffix}" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert b"dc:date" not in first.read_bytes()


def test_save_names_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(FurlongError, match=r"must end in \.svg or \.png"):
        figures.save(figures.sizes([1, 2]), tmp_path / "a.gif")
    with pytest.raises(FurlongError, match="cannot write"):
        figures.save(figures.sizes([1, 2]), tmp_path / "none" / "a.svg")


def test_numbers_only_where_they_can_be_read() -> None:
    small = figures.svg(figures.heat_map([[12, 0], [0, 34]], ["a", "b"]))
    assert ">12<" in small
    assert ">34<" in small
    large = figures.svg(figures.heat_map([[12] * 10] * 1000, [str(k) for k in range(10)]))
    assert ">12</text>" not in large.replace(">12</text>", "", 1)  # at most the scale's label
    assert len(large) < 100_000


def test_many_clients_are_a_band() -> None:
    each = [[(1.0, float(c)), (2.0, float(c))] for c in range(500)]
    drawn = figures.svg(figures.curves({"mean": [(1, 2.0), (2, 1.0)]}, "loss", each=each))
    assert "middle 80 % of the clients" in drawn
    assert len(drawn) < 30_000


# ---------------------------------------------------------------- what is measured, what is damaged


def test_every_column_says_what_was_done(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    semi = {"protocol": "semi-10", "labels": 0.1, "accuracy": 0.5}
    rows = [
        {"who": "federated", **semi},
        {"who": "federated, exchange 2 of 4", **semi},
        {"who": "federated", "protocol": "knn", "accuracy": 0.9, "settings": {"k": 1, "seed": 0}},
        {"who": "federated", "protocol": "quality", "labels": 0.0, "uniformity": -2.0},
    ]
    page = page_of(path)
    frozen = "the encoder is frozen, a classifier works on what it gives"
    assert f"kNN; linear probe: {frozen}" in page
    assert "trained further" not in page
    RunFolder(path).write("evaluations.json", rows)
    page = page_of(path)
    assert f"kNN; linear probe; kNN, k=1: {frozen}" in page
    assert "Tuned in one place, 10 % of the labels: the encoder itself is trained further" in page
    assert "A row that names an exchange is of a checkpoint" in page
    assert "after the last round" not in page
    assert "40.0 %" in page  # kNN with the run's k is still there


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("summary.json", '{"results": []}', "who is missing"),
        ("tsne.json", "{}", "points is missing"),
        ("tsne.json", '{"points": [1, 2, 3], "clients": [0], "classes": []}', "--tsne"),
        ("partition.json", "{}", "partition is missing"),
    ],
)
def test_damaged_files(tmp_path: Path, file: str, text: str, said: str) -> None:
    path = make(tmp_path / "run")
    (path / file).write_text(text)
    with pytest.raises(FurlongError, match=said):
        page.build(path)
