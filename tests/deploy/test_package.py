"""A node knows which program it runs, and can insist on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Call

from furlong.deploy.package import package_digest, require_package
from furlong.errors import FurlongError


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "part").mkdir()
    (tmp_path / "part/b.py").write_text("y = 2\n")
    first = package_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_bytes(b"compiled")
    assert package_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    changed = package_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "part/b.py").rename(tmp_path / "part/c.py")
    assert len({first, changed, package_digest(tmp_path)}) == 3


def test_a_node_insists_on_its_package(furlong_: Call) -> None:
    own = package_digest()
    require_package(own)
    printed = furlong_("--version")
    assert own in printed.out
    other = own[:-1] + ("0" if own[-1] != "0" else "1")
    refused = furlong_("node", "--data", "folder:nowhere", "--expect-package", other)
    assert refused.code == 2
    assert other in refused.err
    assert own in refused.err
    with pytest.raises(FurlongError, match="no digest"):
        require_package("1234")
