"""Certificates and keys: made once, checked when they are read, never replaced unasked."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from furlong.deploy.addresses import is_address
from furlong.errors import FurlongError
from furlong.files import replacing

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:  # it comes with Flower
    raise FurlongError(
        "the package cryptography is missing: pip install 'furlong-fl[flower]'"
    ) from None

T = TypeVar("T")
LOCAL = ("localhost", "127.0.0.1", "::1")  # nginx, furlong run and the health check use these
_AUTHORITY_DAYS = 3650
_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_NODE = re.compile(r"(?!server$)[a-z0-9][a-z0-9_-]{0,31}")  # the folder "server" is not a node's
_NAME_RULE = "a word of at most 32 small letters, digits, - and _, not 'server'."


# ---------------------------------------------------------------- public keys of nodes


def check_node_name(name: str) -> None:
    """Refuse what cannot be the name of a node, of its folder and of its key."""
    if not _NODE.fullmatch(name):
        raise FurlongError(f"{name!r} cannot be a node's name: it must be {_NAME_RULE}")


@dataclass(frozen=True)
class PublicKey:
    """A node's public key: as a line of OpenSSH, and as Flower stores it."""

    name: str
    line: str
    pem: bytes

    @property
    def fingerprint(self) -> str:
        """As ``ssh-keygen -l`` prints it, for comparing by telephone."""
        digest = hashlib.sha256(base64.b64decode(self.line.split()[1])).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def read_public(path: Path) -> PublicKey:
    """A node's public key from a file of OpenSSH, with the site's name as the comment."""
    remedy = "It must be one that 'furlong certs DIR --own-key NAME' made (node.pub)."
    words, key = _read(path, _parse_public, f"a public key of OpenSSH. {remedy}")
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FurlongError(f"{path} is a key of type {words[0]}, not ECDSA. {remedy}")
    name = " ".join(words[2:])
    if not _NODE.fullmatch(name):
        raise FurlongError(
            f"the comment of {path}, the end of its line, is {name!r}; it must be the site's name: "
            f"{_NAME_RULE}"
        )
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PublicKey(name, " ".join(words), pem)


# ---------------------------------------------------------------- the server's certificate


@dataclass(frozen=True)
class ServerCertificate:
    """What the server's certificate says."""

    hosts: tuple[str, ...]  # all but the loopback's
    until: datetime


def read_server(server: Path) -> ServerCertificate:
    """Check the server's files before anything is started with them."""
    for name in ("ca.crt", "server.pem", "server.key"):
        if (server / name).is_file():
            continue
        inner = server / "server"
        hint = f" Did you mean {inner}?" if (inner / name).is_file() else ""
        raise FurlongError(
            f"there is no {server / name}.{hint} 'furlong certs DIR --host NAME' makes DIR/server."
        )
    certificate, authority = (_load_certificate(server / n) for n in ("server.pem", "ca.crt"))
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # several types, all of which mean this
        raise FurlongError(
            f"{server / 'server.pem'} was not signed by {server / 'ca.crt'}: "
            "put back the file that belongs here, or use --renew."
        ) from None
    if certificate.public_key() != _load_private(server / "server.key").public_key():
        raise FurlongError(f"{server / 'server.pem'} and server.key do not belong together.")
    until = certificate.not_valid_after_utc
    if until <= datetime.now(UTC):
        raise FurlongError(
            f"{server / 'server.pem'} ended on {until:%Y-%m-%d}: 'furlong certs DIR --renew'"
        )
    names = [name for name in certified_names(server / "server.pem") if name not in LOCAL]
    return ServerCertificate(tuple(names), until)


def certified_names(path: Path) -> list[str]:
    """The names and addresses for which a certificate is valid."""
    extensions = _load_certificate(path).extensions
    found = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


# ---------------------------------------------------------------- making what is missing


def make_secret(path: Path) -> list[Path]:
    """A file with a random secret, unless it is there."""
    if path.exists():
        return []
    return [write(path, secrets.token_hex(32).encode(), private=True)]


def make_authority(server: Path, days: int) -> list[Path]:
    """The authority of a federation, unless it is there."""
    if (server / "ca.crt").exists():
        return []
    made, key = _private(server / "ca.key", ec.SECP384R1())
    days = max(days, _AUTHORITY_DAYS)
    return [*made, _certify(server / "ca.crt", "Furlong authority", key, days, key)]


def make_server_certificate(
    server: Path, names: Sequence[str], days: int, renew: bool
) -> list[Path]:
    """The certificate of ``names``, unless it is there; ``renew`` replaces it, not its key."""
    path = server / "server.pem"
    if path.exists():
        old = certified_names(path)
        if not renew:
            if missing := [name for name in names if name not in old]:
                raise FurlongError(
                    f"{path} is for {', '.join(old)}, not for {', '.join(missing)}: "
                    "--renew makes a new one for the --host that you give."
                )
            return []
        names = names or [name for name in old if name not in LOCAL]
    if not (server / "ca.key").exists():
        raise FurlongError(
            f"{server / 'ca.key'} is needed to sign {path}: put it back for this command."
        )
    authority, signer = _load_certificate(server / "ca.crt"), _load_private(server / "ca.key")
    made, key = _private(server / "server.key", ec.SECP256R1())
    left = (authority.not_valid_after_utc - datetime.now(UTC)).days
    names = list(dict.fromkeys([*names, *LOCAL]))
    return [*made, _certify(path, names[0][:64], key, min(days, left), signer, authority, names)]


def make_pair(folder: Path, name: str) -> list[Path]:
    """A node's key pair, as far as it is missing."""
    made, key = _private(folder / "node.key", ec.SECP384R1(), openssh=True)
    if not (folder / "node.pub").exists():
        line = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        made.append(write(folder / "node.pub", line + f" {name}\n".encode()))
    return made


def _certify(
    path: Path,
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None = None,
    names: Sequence[str] = (),
) -> Path:
    """Write a certificate: of a server with ``names``; without ``issuer``, of the authority."""
    about = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    mine = theirs = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    allowed = ("key_cert_sign", "crl_sign") if issuer is None else ("digital_signature",)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True),
        (x509.KeyUsage(**{use: use in allowed for use in _USES}), True),
        (mine, False),
    ]
    if issuer is not None:
        theirs = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        extensions += [
            (x509.SubjectAlternativeName(map(_alternative, names)), False),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        ]
    by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(theirs)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .subject_name(about)
        .issuer_name(about if issuer is None else issuer.subject)
        .public_key(key.public_key())
    )
    for extension, critical in [*extensions, (by, False)]:
        builder = builder.add_extension(extension, critical)
    data = builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    return write(path, data, replace=True)


def _alternative(name: str) -> x509.GeneralName:
    return x509.IPAddress(ip_address(name)) if is_address(name) else x509.DNSName(name)


# ---------------------------------------------------------------- files


def _read(path: Path, parse: Callable[[bytes], T], what: str) -> T:
    """What ``parse`` makes of a file, or an error that says what the file should be."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise FurlongError(f"{path} is not {what}") from None


def _load_certificate(path: Path) -> x509.Certificate:
    return _read(path, x509.load_pem_x509_certificate, "a certificate.")


def _parse_public(data: bytes) -> tuple[list[str], object]:
    words = data.decode("ascii").split()
    return words, serialization.load_ssh_public_key(" ".join(words[:2]).encode())


def _parse_private(data: bytes) -> object:
    if b"OPENSSH PRIVATE KEY" in data:
        return serialization.load_ssh_private_key(data, None)
    return serialization.load_pem_private_key(data, None)


def _private(
    path: Path, curve: ec.EllipticCurve, openssh: bool = False
) -> tuple[list[Path], ec.EllipticCurvePrivateKey]:
    """The key in a file, made if there is none."""
    if path.exists():
        return [], _load_private(path)
    key = ec.generate_private_key(curve)
    kind = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    data = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    return [write(path, data, private=True)], key


def _load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    key = _read(path, _parse_private, "a whole key without password.")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FurlongError(f"{path} is not an ECDSA key.")
    return key


def write(path: Path, data: bytes, *, private: bool = False, replace: bool = False) -> Path:
    """Write a file whole, readable by others only if it is not ``private``."""
    with replacing(path, replace) as draft:
        draft.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(draft, flags, 0o600 if private else 0o644), "wb") as file:
            file.write(data)
    return path
