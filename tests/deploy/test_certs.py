"""The folder of a federation: certificates, keys, and who may take part."""

from __future__ import annotations

import re
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from furlong.errors import FurlongError

pytest.importorskip("cryptography", reason="Flower is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from furlong.deploy import certs, keys


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    certs.make_certs(folder, ["fl.example.org", "192.0.2.7"], ["hospital-a", "hospital-b"])
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_layout_and_modes(made: Path) -> None:
    assert set(contents(made)) == {
        *(f"server/{n}" for n in ("ca.crt", "ca.key", "server.pem", "server.key")),
        *(f"server/{n}" for n in ("superexec.secret", "nginx.conf", "site.conf", "ports.json")),
        *(f"server/nodes/hospital-{x}.pub" for x in "ab"),
        *(f"hospital-{x}/{n}" for x in "ab" for n in ("ca.crt", "node.key", "node.pub")),
    }
    for path in made.rglob("*"):
        if path.is_dir():
            assert mode(path) == 0o700
        elif path.suffix in (".key", ".secret"):
            assert mode(path) == 0o600
    assert len((made / "server/superexec.secret").read_bytes()) == 64
    for name in ("hospital-a", "hospital-b"):
        assert (made / name / "ca.crt").read_bytes() == (made / "server/ca.crt").read_bytes()


def test_the_chain_and_the_names(made: Path) -> None:
    load = x509.load_pem_x509_certificate
    own = load((made / "server/server.pem").read_bytes())
    authority = load((made / "server/ca.crt").read_bytes())
    own.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    for name in ("fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"):
        assert handshake(made / "server", made / "hospital-a/ca.crt", name)
    assert not handshake(made / "server", made / "hospital-a/ca.crt", "other.example.org")
    about = keys.read_server(made / "server")
    assert about.hosts == ("fl.example.org", "192.0.2.7")


def handshake(server: Path, authority: Path, name: str) -> bool:
    """Whether a client that trusts ``authority`` accepts the server as ``name``; in memory."""
    offer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    offer.load_cert_chain(server / "server.pem", server / "server.key")
    trust = ssl.create_default_context(cafile=str(authority))
    trust.verify_flags |= ssl.VERIFY_X509_STRICT  # as newer Pythons do
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = offer.wrap_bio(a, b, server_side=True)
    ours = trust.wrap_bio(b, a, server_hostname=name)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return ours.version() == "TLSv1.3"


def test_node_keys_load_and_belong_together(made: Path) -> None:
    key = serialization.load_ssh_private_key((made / "hospital-a/node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert certs.node_keys(made / "server")[pem] == "hospital-a"
    assert set(certs.node_keys(made / "server").values()) == {"hospital-a", "hospital-b"}


def test_fingerprint_is_the_one_of_openssh(made: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen")
    path = made / "hospital-a/node.pub"
    printed = subprocess.check_output(["ssh-keygen", "-lf", path], text=True)
    assert keys.read_public(path).fingerprint in printed.split()


def test_again_changes_nothing_and_nodes_can_be_added(made: Path) -> None:
    before = contents(made)
    assert certs.make_certs(made, ["fl.example.org"], ["hospital-b", "hospital-a"]) == []
    assert contents(made) == before
    (made / "server/ca.key").unlink()  # kept elsewhere: not needed for a node
    del before["server/ca.key"]
    new = certs.make_certs(made, nodes=["hospital-c"])
    after = contents(made)
    assert {key: after[key] for key in before} == before
    assert {str(p.relative_to(made)) for p in new} == set(after) - set(before)
    assert "server/nodes/hospital-c.pub" in after


@pytest.mark.parametrize("lost", ["server/server.pem", "server/ca.crt", "hospital-a/node.pub"])
def test_an_interrupted_command_can_be_repeated(made: Path, lost: str) -> None:
    before = {k: v for k, v in contents(made).items() if k.endswith((".key", ".secret"))}
    (made / lost).unlink()
    if lost == "server/ca.crt":  # it came first: nothing else was there
        (made / "server/server.pem").unlink()
    certs.make_certs(made, ["fl.example.org"], ["hospital-a"])
    keys.read_server(made / "server")
    after = contents(made)
    assert {key: after[key] for key in before} == before


def test_renewing(made: Path) -> None:
    before = contents(made)
    with pytest.raises(FurlongError, match=r"not for new\.example\.org: --renew"):
        certs.make_certs(made, ["new.example.org"])
    assert contents(made) == before
    certs.make_certs(made, ["new.example.org"], renew=True, days=10)
    after = contents(made)
    assert {key for key in before if before[key] != after[key]} == {"server/server.pem"}
    about = keys.read_server(made / "server")
    assert about.hosts == ("new.example.org",)
    (made / "server/ca.key").unlink()
    with pytest.raises(FurlongError, match=r"ca\.key is needed"):
        certs.make_certs(made, renew=True)


def test_a_mixed_up_server_folder_is_noticed(made: Path, tmp_path: Path) -> None:
    server = made / "server"
    other = tmp_path / "other"
    certs.make_certs(other, ["fl.example.org"])
    for name, said in (("ca.crt", "was not signed by"), ("server.key", "do not belong together")):
        kept = (server / name).read_bytes()
        shutil.copy(other / "server" / name, server / name)
        with pytest.raises(FurlongError, match=said):
            keys.read_server(server)
        (server / name).write_bytes(kept)
    with pytest.raises(FurlongError, match=f"Did you mean {re.escape(str(server))}"):
        keys.read_server(made)
    (server / "server.pem").write_text("no certificate")
    with pytest.raises(FurlongError, match="is not a certificate"):
        keys.read_server(server)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", "a b", "-a", "A", "a.b", "server", "x" * 33, "a\n", "ä"],
)
def test_bad_node_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "fed"
    with pytest.raises(FurlongError, match="cannot be a node's name"):
        certs.make_certs(folder, ["localhost"], ["good", name])
    with pytest.raises(FurlongError, match="cannot be a node's name"):
        certs.make_own_key(folder, name)
    assert not folder.exists()


@pytest.mark.parametrize(
    "host",
    ["", "https://a", "a:8443", "*.a", "a b", "-a", "300.1.2.3", "1.2.3", "a..b", "a;b", "x" * 64],
)
def test_bad_hosts(tmp_path: Path, host: str) -> None:
    with pytest.raises(FurlongError, match="neither a host name nor an address"):
        certs.make_certs(tmp_path / "fed", [host])
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"days": 0}, "--days is 0"),
        ({"listen": "everywhere"}, "--listen is 'everywhere'"),
    ],
)
def test_bad_settings(tmp_path: Path, options: dict[str, int], said: str) -> None:
    with pytest.raises(FurlongError, match=said):
        certs.make_certs(tmp_path / "fed", ["localhost"], **options)  # type: ignore[arg-type]
    with pytest.raises(FurlongError, match="nginx cannot be given the path"):
        certs.make_certs(tmp_path / "a$b", ["localhost"])
    assert list(tmp_path.iterdir()) == []


def test_a_site_makes_its_own_key(made: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert {p.name for p in certs.make_own_key(site, "hospital-c")} == {
        "node.key",
        "node.pub",
    }
    assert mode(site / "node.key") == 0o600
    with pytest.raises(FurlongError, match="not replaced"):
        certs.make_own_key(site, "hospital-c")
    assert certs.add_node(made, site / "node.pub").name == "hospital-c"
    assert certs.add_node(made, site / "node.pub").name == "hospital-c"  # harmless
    assert set(contents(made / "hospital-c")) == {"ca.crt"}
    assert certs.make_certs(made, nodes=["hospital-c"]) == []  # no second key
    assert set(contents(made / "hospital-c")) == {"ca.crt"}

    other = tmp_path / "other"
    certs.make_own_key(other, "hospital-c")
    with pytest.raises(FurlongError, match="holds another key"):
        certs.add_node(made, other / "node.pub")
    line = (site / "node.pub").read_text().replace("hospital-c", "hospital-d")
    (other / "node.pub").write_text(line)
    with pytest.raises(FurlongError, match="is the one of 'hospital-c' already"):
        certs.add_node(made, other / "node.pub")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a public key"),
        ("ecdsa-sha2-nistp384 AAAA x", "is not a public key"),
        ("\xff", "is not a public key"),
        ("{key}", "the comment of"),
        ("{key} ../../x", "the comment of"),
        ("{key} server", "the comment of"),
        ("{key} me@here", "the comment of"),
        ("{key} two words", "the comment of"),
        ("{private}", "is not a public key"),
        ("{ed25519} name", "type ssh-ed25519, not ECDSA"),
    ],
)
def test_bad_public_keys(made: Path, tmp_path: Path, text: str, said: str) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    other = Ed25519PrivateKey.generate().public_key()
    format_ = serialization.PublicFormat.OpenSSH
    path = tmp_path / "node.pub"
    text = text.format(
        key=" ".join((made / "hospital-a/node.pub").read_text().split()[:2]),
        private=(made / "hospital-a/node.key").read_text(),
        ed25519=other.public_bytes(serialization.Encoding.OpenSSH, format_).decode(),
    )
    path.write_text(text, encoding="latin-1")
    before = contents(made)
    with pytest.raises(FurlongError, match=said):
        certs.add_node(made, path)
    assert contents(made) == before


def test_a_revoked_key_stays_revoked(made: Path) -> None:
    kept = certs.revoke_node(made, "hospital-b")
    assert kept.parent.name == "revoked"
    assert list(certs.node_keys(made / "server").values()) == ["hospital-a"]
    with pytest.raises(FurlongError, match="was revoked and stays so"):
        certs.make_certs(made, nodes=["hospital-b"])
    with pytest.raises(FurlongError, match="was revoked and stays so"):
        certs.add_node(made, made / "hospital-b/node.pub")
    with pytest.raises(FurlongError, match="There: hospital-a"):
        certs.revoke_node(made, "hospital-b")
    shutil.rmtree(made / "hospital-b")
    certs.make_certs(made, nodes=["hospital-b"])  # a new key
    certs.revoke_node(made, "hospital-b")
    assert len(list((made / "server/revoked").iterdir())) == 2


@pytest.mark.parametrize(
    ("hosts", "listen"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["localhost", "::1"], "127.0.0.1"),
        (["a.org", "::1"], "0.0.0.0"),
    ],
)
def test_a_server_of_this_machine_is_not_open_to_others(
    tmp_path: Path, hosts: list[str], listen: str
) -> None:
    certs.make_certs(tmp_path / "fed", hosts)
    assert f"listen {listen}:8443 ssl" in (tmp_path / "fed" / "server" / "site.conf").read_text()
