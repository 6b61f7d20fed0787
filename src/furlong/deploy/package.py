"""Which program a node runs: one digest over all files of the installed package.

The same files give the same digest on every machine, from a wheel as from a checkout. It covers
furlong alone: torch and the rest are pinned by requirements.txt, whose hashes pip checks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import furlong
from furlong.errors import FurlongError

KIND = "sha256:"


def package_digest(root: Path | None = None) -> str:
    """``sha256:`` and 64 digits: of the names and contents of all files but compiled ones."""
    folder = Path(furlong.__file__).parent if root is None else root
    whole = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if "__pycache__" not in path.parts)
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in kept):
        whole.update(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n".encode())
    return f"{KIND}{whole.hexdigest()}"


def require_package(expected: str) -> None:
    """Refuse to go on with another program than the one that was agreed on."""
    found = package_digest()
    if not expected.startswith(KIND) or len(expected) != len(found):
        raise FurlongError(
            f"--expect-package {expected} is no digest: give {KIND} and 64 digits, as 'furlong "
            "--version' prints them where the package was checked."
        )
    if expected.lower() != found:
        raise FurlongError(
            f"the installed furlong {furlong.__version__} is {found}, and not {expected}, which "
            "--expect-package asks for. Install the version that was agreed on, or find out who "
            "changed its files."
        )
