"""The SuperLink's list of nodes follows the keys in the server's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from furlong.errors import FurlongError

pytest.importorskip("flwr")

from furlong.deploy import certs
from furlong.deploy.registry import Registry


class Listed:
    """A SuperLink's list."""

    def __init__(self, names: dict[bytes, str]) -> None:
        self.names, self.known = names, dict[str, tuple[int, str]]()
        self.called: list[tuple[str, object]] = []
        self.broken = ""

    def nodes(self) -> dict[bytes, tuple[int, str]]:
        self.fail()
        keys = {name: key for key, name in self.names.items()}
        return {keys[name]: node for name, node in self.known.items()}

    def register(self, key: bytes, name: str) -> None:
        assert self.names[key] == name
        self.called.append(("register", name))

    def unregister(self, number: int) -> None:
        if self.broken == "unregister":
            raise FurlongError("no")
        self.called.append(("unregister", number))

    def fail(self) -> None:
        if self.broken == "all":
            raise FurlongError("no SuperLink can be reached")


def test_the_registry_follows_the_files(tmp_path: Path) -> None:
    certs.make_certs(tmp_path, ["fl.example.org"], ["hospital-a", "hospital-b"])
    server = tmp_path / "server"
    listed = Listed(certs.node_keys(server))
    registry = Registry(server, listed)  # type: ignore[arg-type]
    listed.broken = "all"
    (said,) = registry.update()
    assert "no SuperLink can be reached" in said
    assert list(registry.update()) == []  # said once
    listed.broken = ""

    listed.known["hospital-a"] = (5, "online")
    (server / "nodes/odd.pub").write_text("no key")
    *news, odd = registry.update()
    assert news == ["hospital-a: online", "hospital-b: registered"]
    assert odd.startswith("odd: not registered")
    assert listed.called == [("register", "hospital-b")]

    listed.known["hospital-b"] = (7, "registered")
    listed.known["hospital-a"] = (5, "offline")
    assert list(registry.update()) == ["hospital-a: offline"]
    certs.revoke_node(tmp_path, "hospital-a")
    listed.broken = "unregister"
    assert list(registry.update()) == ["hospital-a: NOT YET REVOKED: no"]
    listed.broken = ""
    assert list(registry.update()) == ["hospital-a: revoked"]  # tried again
    assert listed.called[1:] == [("unregister", 5)]
    listed.known["hospital-a"] = (5, "unregistered")
    listed.known["hospital-b"] = (7, "unregistered")  # by somebody else
    (said,) = registry.update()
    assert "its key cannot be used again" in said
    (server / "nodes/hospital-b.pub").unlink()  # a slip: means nothing
    assert list(registry.update()) == []
    assert len(listed.called) == 2
