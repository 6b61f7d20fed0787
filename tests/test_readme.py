"""What the README shows works: its first Python example runs, its commands parse."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.cli import COMMANDS, application
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
    assert words[:1], "no command"
    assert words[0] in COMMANDS, f"there is no command {words[0]}"
    _, bound, ignored = application().parse_args(words, exit_on_error=False, print_error=False)
    assert not ignored
    if words[0] == "node":  # its options are not those of a run
        return
    given = {name.replace("__", "."): value for name, value in bound.arguments.items()}
    known = {*config.SHORT, *config.all_facts()}
    file = given.get("config_file")
    options = {name: value for name, value in given.items() if name in known}
    config.load(file if file and Path(file).exists() else None, options)


@pytest.mark.slow
def test_the_first_python_example_learns(tmp_path: Path) -> None:
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
    untrained, trained = map(float, re.findall(r"^linear probe, \w+: (.*)$", done.stdout, re.M))
    assert trained > untrained + 0.08
