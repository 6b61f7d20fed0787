"""What the README shows works: its first Python example runs, its commands parse."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.cli import app, take_dotted
from furlong.runs import config

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
END = {"|", "||", "&&", "&", ";", ">", ">>", "2>", "<"}  # of a command, for a shell

pytestmark = pytest.mark.skipif(not README.exists(), reason="there is no README.md")


def blocks(*languages: str) -> list[str]:
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def commands() -> list[list[str]]:
    """The words after ``furlong`` in the shell blocks."""
    found = []
    for block in blocks("", "bash", "sh", "shell", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"(\$ )?(\w+=\S+ )*furlong ", line):
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):  # NAME=value furlong …
                words = words[1:]
            stop = next((i for i, word in enumerate(words) if word in END), len(words))
            found.append(words[1:stop])
    return found


def test_there_is_something_to_test() -> None:
    assert blocks("python")
    assert commands()


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given, dotted = take_dotted(words)
    assert given, "no command"
    assert given[0] in list(app), f"there is no command {given[0]}"
    _, bound, ignored = app.parse_args(given, exit_on_error=False, print_error=False)
    assert not ignored
    assert not dotted or given[0] in ("run", "resume", "evaluate", "partition")
    options = {k: v for k, v in bound.arguments.items() if k in config.SHORT}
    file = bound.arguments.get("config_file")
    if given[0] == "node":  # its options are not those of a run
        return
    config.load(file if file and file.exists() else None, options | dotted)


def test_the_first_python_example_runs(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(blocks("python")[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
