"""Whatever goes wrong, a command ends with a sentence and an exit code."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Call
from fake_runs import make

from furlong import cli
from furlong.cli.common import console, results_table
from furlong.reports.rendering import _cell


def raising(error: BaseException) -> Any:
    def command(*_: Any, **__: Any) -> None:
        raise error

    return lambda _: command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("results"), 1, "error: KeyError: 'results'"),
        (RuntimeError("could not create a primitive"), 1, "error: there is not enough memory."),
        (MemoryError(), 1, "error: there is not enough memory."),
        (OSError(28, "No space left", "/tmp/[/b]"), 2, "No space left: '/tmp/[/b]'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "methods"])
def test_no_traceback(
    furlong_: Call, monkeypatch: pytest.MonkeyPatch, command: str, error: Exception, code: int,
    said: str,
) -> None:  # fmt: skip
    """How to go on is said by commands that save something, and by no others."""
    monkeypatch.setattr(cli, "application", raising(error))
    found = furlong_(command)
    assert found.code == code
    assert said in found.err
    assert "Traceback" not in found.err
    assert ("furlong resume RUN" in found.err) == (command == "run")


def test_sigterm_says_how_to_go_on(furlong_: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "application", lambda _: killed)
    found = furlong_("run")
    assert found.code == 143
    assert found.err.startswith("ended by SIGTERM. 'furlong resume RUN' goes on")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("text", ['{"results": null}', "\x00", '"x"'])
@pytest.mark.parametrize("name", ["summary.json", "partition.json", "encoder.json", "digests.json"])
def test_damaged_json_is_an_error_in_words(
    furlong_: Call, tmp_path: Path, name: str, text: str
) -> None:
    make(tmp_path / "run", rounds=2)
    (tmp_path / "run" / name).write_text(text)
    for words in (("table", "run"), ("resume", "run")):
        found = furlong_(*words)
        assert found.code in (0, 2), (words, found.err)
        assert "Traceback" not in found.err + found.out


def test_a_folder_may_be_called_like_markup(furlong_: Call, tmp_path: Path) -> None:
    made = make(tmp_path / "run", rounds=1)
    shutil.move(made, tmp_path / "[/b]")
    found = furlong_("table", "./[/b]")
    assert found.code == 0, found.err
    rows = [{"who": "without [/b]", "protocol": "knn on [/i]", "accuracy": 0.5}]
    console.print(results_table(rows))


def test_text_of_a_card_is_no_markup() -> None:
    hostile = "![x](http://a/b) [l](c) *b* `c` <i> a|b \\"
    assert _cell(hostile) == "!\\[x\\](http://a/b) \\[l\\](c) \\*b\\* 'c' &lt;i> a\\|b \\\\"
