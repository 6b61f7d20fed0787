"""The files of a deployment: certificates, node keys, the reverse proxy's configuration.

In the server's folder, DIR/server::

    ca.crt ca.key          the authority of this federation; ca.key signs server.pem and nothing
                           else, so it may be kept on another machine
    server.pem server.key  for the names and addresses under which nodes reach the server
    superexec.secret       lets ``furlong run`` act as the server's program
    nodes/NAME.pub         who may take part
    revoked/               keys that may not take part any more
    nginx.conf site.conf   the reverse proxy, alone or as a part of the system's

One folder for each site, DIR/NAME: ca.crt, node.key, node.pub. A key is never replaced.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

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

PUBLIC_PORT = 8443  # of nginx
SUPERLINK_PORT = 8000
LOCAL = ("localhost", "127.0.0.1", "::1")  # nginx, furlong run and the health check use these
_AUTHORITY_DAYS = 3650
_NODE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


# ---------------------------------------------------------------- what the coordinator does


def make_certs(
    folder: Path,
    hosts: Sequence[str] = (),
    nodes: Sequence[str] = (),
    *,
    days: int = 825,
    listen: str = "0.0.0.0",
    public_port: int = PUBLIC_PORT,
    superlink_port: int = SUPERLINK_PORT,
    renew: bool = False,
) -> list[Path]:
    """Make what is missing in ``folder`` and return the new files.

    ``hosts`` are the server's public names and addresses, ``nodes`` the names of sites for which a
    key is made. ``days`` is how long the server's certificate is valid; ``renew`` replaces the
    certificate (not its key). Safe to call again: with more nodes, or after an interruption.
    """
    if days < 1:
        raise FurlongError(f"--days is {days}; it must be at least 1")
    for port in (public_port, superlink_port):
        if not 0 < port < 65536:
            raise FurlongError(f"{port} is not a port: choose 1 to 65535")
    if not _is_address(listen):
        raise FurlongError(f"--listen is {listen!r}; it must be an address like 0.0.0.0")
    names = [_checked_host(host) for host in hosts]
    for name in nodes:
        _check_node(name)
    server = folder / "server"
    if not names and not (server / "server.pem").exists():
        raise FurlongError(
            f"{server} has no certificate yet: name the server as the sites will reach it, "
            "e.g. --host fl.example.org"
        )
    _path(server.resolve())
    made: list[Path] = []
    for path in (folder, server, server / "nodes"):
        _folder(path)
    made += _make_authority(server, days)
    made += _make_server_certificate(server, names, days, renew)
    made += make_secret(server / "superexec.secret")
    made += _make_nginx(server, listen, public_port, superlink_port)
    for name in nodes:
        made += _make_node(folder, name)
    return made


def add_node(folder: Path, public: Path) -> str:
    """Let a site take part that made its own key; its name is the comment in ``public``.

    What the site needs in return, the authority's certificate, is put into a folder of its name.
    """
    server = _server_of(folder)
    key = read_public(public)
    _admit(server, key)
    site = _folder(folder / key.name)
    if not (site / "ca.crt").exists():
        _write(site / "ca.crt", (server / "ca.crt").read_bytes())
    return key.name


def revoke_node(folder: Path, name: str) -> Path:
    """Take a site's key out of those that may take part; for ever."""
    _check_node(name)
    server = _server_of(folder)
    public = server / "nodes" / f"{name}.pub"
    if not public.exists():
        known = ", ".join(sorted(p.stem for p in public.parent.glob("*.pub"))) or "none"
        raise FurlongError(f"there is no node {name!r} in {public.parent}. There: {known}")
    digest = hashlib.sha256(public.read_bytes()).hexdigest()[:8]
    kept = _folder(server / "revoked") / f"{name}-{digest}.pub"
    public.replace(kept)
    return kept


# ---------------------------------------------------------------- what a site does


def make_own_key(folder: Path, name: str) -> list[Path]:
    """A node's key pair, made where it will be used: only node.pub has to travel."""
    _check_node(name)
    if (folder / "node.key").exists():
        raise FurlongError(
            f"{folder / 'node.key'} is there already and is not replaced. "
            f"Send {folder / 'node.pub'}, or choose another folder."
        )
    return _make_pair(_folder(folder), name)


# ---------------------------------------------------------------- reading


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
    try:
        with path.open("rb") as file:
            words = file.read(4096).decode("ascii").split()
        key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise FurlongError(f"{path} is not a public key of OpenSSH. {remedy}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FurlongError(f"{path} is a key of type {words[0]}, not ECDSA. {remedy}")
    if len(words) != 3 or not _NODE.fullmatch(words[2]) or words[2] == "server":
        said = " ".join(words[2:])
        raise FurlongError(
            f"the comment of {path} is {said!r}; it must be the site's name: a word of at most 32 "
            "small letters, digits, - and _. It is the last word of the line."
        )
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PublicKey(words[2], " ".join(words), pem)


def node_keys(server: Path) -> dict[bytes, str]:
    """The sites that may take part: name by key, the key as Flower reports it."""
    return {key.pem: key.name for key in map(read_public, sorted(server.glob("nodes/*.pub")))}


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
    certificate = _load_certificate(server / "server.pem")
    authority = _load_certificate(server / "ca.crt")
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
    names = [name for name in _names_of(certificate) if name not in LOCAL]
    return ServerCertificate(tuple(names), until)


# ---------------------------------------------------------------- making


def make_secret(path: Path) -> list[Path]:
    """A file with a random secret, unless it is there."""
    if path.exists():
        return []
    return [_write(path, secrets.token_hex(32).encode(), private=True)]


def _make_authority(server: Path, days: int) -> list[Path]:
    if (server / "ca.crt").exists():
        return []
    made, key = _private(server / "ca.key", ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Furlong authority")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _dated(max(days, _AUTHORITY_DAYS))
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
    )
    return [*made, _write_certificate(server / "ca.crt", builder, key)]


def _make_server_certificate(server: Path, names: list[str], days: int, renew: bool) -> list[Path]:
    path = server / "server.pem"
    if path.exists():
        old = _names_of(_load_certificate(path))
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
    names = list(dict.fromkeys([*names, *LOCAL]))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    left = (authority.not_valid_after_utc - datetime.now(UTC)).days
    issuer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _dated(min(days, left))
        .subject_name(subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False
        )
    )
    return [*made, _write_certificate(path, builder, signer)]


def _make_node(folder: Path, name: str) -> list[Path]:
    """A key pair in the site's folder, admitted at the server."""
    server, site = folder / "server", folder / name
    public = server / "nodes" / f"{name}.pub"
    if public.exists() and not (site / "node.key").exists():
        return []  # the site made its own key, or its folder was handed over and removed here
    made = _make_pair(_folder(site), name)
    key = read_public(site / "node.pub")
    if key.name != name:
        raise FurlongError(f"{site / 'node.pub'} names {key.name!r}, not {name!r}: move it away.")
    if not public.exists():
        made.append(_admit(server, key))
    if not (site / "ca.crt").exists():
        made.append(_write(site / "ca.crt", (server / "ca.crt").read_bytes()))
    return made


def _make_pair(folder: Path, name: str) -> list[Path]:
    made, key = _private(folder / "node.key", ec.SECP384R1(), openssh=True)
    if not (folder / "node.pub").exists():
        line = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        made.append(_write(folder / "node.pub", line + f" {name}\n".encode()))
    return made


def _admit(server: Path, key: PublicKey) -> Path:
    """Put a key among those that may take part, unless that would be a mistake."""
    for other in map(read_public, sorted(server.glob("revoked/*.pub"))):
        if other.pem == key.pem:
            raise FurlongError(
                f"the key of {key.name!r} was revoked and stays so: "
                f"move the folder {key.name} away, then make a new key."
            )
    for pem, name in node_keys(server).items():
        if pem == key.pem and name != key.name:
            raise FurlongError(f"the key of {key.name!r} is the one of {name!r} already.")
    path = server / "nodes" / f"{key.name}.pub"
    if path.exists():
        if read_public(path).pem == key.pem:
            return path
        raise FurlongError(
            f"{path} holds another key. If that one is to go: "
            f"'furlong certs DIR --revoke {key.name}' first."
        )
    return _write(path, f"{key.line}\n".encode())


# ---------------------------------------------------------------- nginx


def nginx_conf(server: Path) -> str:
    """A whole configuration for an nginx that runs alone, as any user, in the foreground."""
    own = server / "nginx"
    return f"""\
# The reverse proxy of a Furlong server, alone; no root needed for ports from 1024 on:
#   nginx -e stderr -c {_path(server / "nginx.conf")}
# As a part of the system's nginx: see site.conf.
daemon off;
error_log stderr;
pid {_path(own / "nginx.pid")};
events {{
}}
http {{
    # what was refused or failed; nodes ask every few seconds, which is not worth a line
    map $status $furlong_refused {{
        "~^[23]" 0;
        default 1;
    }}
    access_log {_path(own / "refused.log")} combined if=$furlong_refused;
    client_body_temp_path {_path(own / "body")};
    proxy_temp_path {_path(own / "proxy")};
    fastcgi_temp_path {_path(own / "fastcgi")};
    uwsgi_temp_path {_path(own / "uwsgi")};
    scgi_temp_path {_path(own / "scgi")};
    include {_path(server / "site.conf")};
}}
"""


def nginx_site(
    server: Path,
    hosts: Sequence[str],
    listen: str = "0.0.0.0",
    public_port: int = PUBLIC_PORT,
    superlink_port: int = SUPERLINK_PORT,
) -> str:
    """The part for the ``http`` block: TLS outside, only what nodes need passed on."""
    address, *names = (f"[{name}]" if ":" in name else name for name in (listen, *hosts))
    return f"""\
# What the outside reaches of a Furlong server. The SuperLink's port also takes orders (/v1/control,
# /v1/runtime), so it listens on this machine only, and nothing but /v1/fleet/ is passed on to it.
# In the system's nginx:
#   ln -s {_path(server / "site.conf")} /etc/nginx/sites-enabled/furlong
#   nginx -t && systemctl reload nginx
limit_conn_zone $binary_remote_addr zone=furlong:1m;
server {{
    listen {address}:{public_port} ssl;
    server_name {" ".join(names)};
    ssl_certificate {_path(server / "server.pem")};
    ssl_certificate_key {_path(server / "server.key")};
    ssl_protocols TLSv1.3;
    server_tokens off;
    limit_conn furlong 100;
    # Flower sends pieces of 5 MB. The buffer has the size of the limit: no body is put on disk.
    client_max_body_size 16m;
    client_body_buffer_size 16m;
    location / {{
        return 404;
    }}
    location /v1/fleet/ {{
        limit_except POST {{
            deny all;
        }}
        # with a path, so that what is passed on is the path that was checked, not what was sent
        proxy_pass https://127.0.0.1:{superlink_port}/v1/fleet/;
        proxy_http_version 1.1;
        proxy_set_header Host $host;
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header X-Forwarded-Proto https;
        proxy_buffering off;
        proxy_connect_timeout 5s;
        proxy_read_timeout 60s;
        proxy_ssl_trusted_certificate {_path(server / "ca.crt")};
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_ssl_server_name on;
        proxy_ssl_protocols TLSv1.3;
    }}
}}
"""


def public_port(server: Path) -> int | None:
    """The port in site.conf that sites reach, which its owner may have changed."""
    return _port(server, r"^\s*listen\s+(?:\S*:)?(\d+)\b")


def superlink_port(server: Path) -> int | None:
    """The port in site.conf that requests are passed on to."""
    return _port(server, r"^\s*proxy_pass\s+https://127\.0\.0\.1:(\d+)/")


def _port(server: Path, line: str) -> int | None:
    try:
        text = (server / "site.conf").read_text()
    except OSError:
        return None
    found = re.search(line, text, re.MULTILINE)
    return int(found[1]) if found else None


def _make_nginx(server: Path, listen: str, public_port: int, superlink_port: int) -> Iterator[Path]:
    server = server.resolve()
    _folder(server / "nginx")
    if not (server / "nginx.conf").exists():
        yield _write(server / "nginx.conf", nginx_conf(server).encode())
    if not (server / "site.conf").exists():
        hosts = _names_of(_load_certificate(server / "server.pem"))
        text = nginx_site(server, hosts, listen, public_port, superlink_port)
        yield _write(server / "site.conf", text.encode())


def _path(path: Path) -> str:
    """A path in nginx's language."""
    if not path.is_absolute() or re.search(r"[^ -~]|[\"'\\${};#]", str(path)):
        raise FurlongError(
            f"nginx cannot be given the path {path}: choose a folder whose name has "
            "no quotes, dollars, braces, semicolons, hashes, backslashes or other signs."
        )
    return f'"{path}"' if " " in str(path) else str(path)


# ---------------------------------------------------------------- pieces


def _server_of(folder: Path) -> Path:
    server = folder / "server"
    if not (server / "ca.crt").exists():
        raise FurlongError(f"{folder} has no server folder: 'furlong certs {folder} --host NAME'")
    return server


def _check_node(name: str) -> None:
    if not _NODE.fullmatch(name) or name == "server":
        raise FurlongError(
            f"{name!r} cannot be a node's name: it must be a word of at most 32 small letters, "
            "digits, - and _, not 'server'."
        )


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _checked_host(host: str) -> str:
    if _is_address(host):
        return str(ip_address(host))
    if not _HOST.fullmatch(host.lower()) or re.fullmatch(r"[\d.]+", host):
        raise FurlongError(
            f"--host {host!r} is neither a host name nor an address. "
            "Give it without https:// and port, several with commas."
        )
    return host.lower()


def _alternative(name: str) -> x509.GeneralName:
    return x509.IPAddress(ip_address(name)) if _is_address(name) else x509.DNSName(name)


def _names_of(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def _dated(days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(signs_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_certificate(
    path: Path, builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey
) -> Path:
    data = builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    return _write(path, data, replace=True)


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise FurlongError(f"{path} is not a certificate.") from None


def _private(
    path: Path, curve: ec.EllipticCurve, openssh: bool = False
) -> tuple[list[Path], ec.EllipticCurvePrivateKey]:
    """The key in a file, made if there is none."""
    if path.exists():
        return [], _load_private(path)
    key = ec.generate_private_key(curve)
    kind = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    data = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    return [_write(path, data, private=True)], key


def _load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        data = path.read_bytes()
        key = (
            serialization.load_ssh_private_key(data, None)
            if b"OPENSSH PRIVATE KEY" in data
            else serialization.load_pem_private_key(data, None)
        )
    except OSError as error:
        raise FurlongError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise FurlongError(f"{path} is damaged or not a key without password.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FurlongError(f"{path} is not an ECDSA key.")
    return key


def _folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FurlongError(f"cannot make the folder {path}: {error.strerror}") from None
    return path


def _write(path: Path, data: bytes, *, private: bool = False, replace: bool = False) -> Path:
    with replacing(path, replace) as draft:
        draft.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(draft, flags, 0o600 if private else 0o644), "wb") as file:
            file.write(data)
    return path
