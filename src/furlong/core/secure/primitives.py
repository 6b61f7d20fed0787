"""The building blocks, all from the package ``cryptography``, and Shamir's shares on top.

    key agreement   X25519, and HKDF-SHA256 with a label for each use
    masks           AES-256 in counter mode: the key stream, as whole numbers modulo 2^64
    sealed messages ChaCha20-Poly1305
    signatures      Ed25519
    shares          Shamir over the integers modulo the prime 2^256 + 297

All randomness is the operating system's (``secrets``), never a run's seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from furlong.errors import FurlongError

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise FurlongError(
        "secure.sums = true needs the package cryptography: pip install 'furlong-fl[secure]'"
    ) from None

KEY = 32  # bytes of every key, public or secret
SIGNATURE = 64
PRIME = 2**256 + 297  # the smallest above 2^256: any 32 bytes are a number below it
SHARE = 33  # bytes of a number below PRIME
SEAL = 12 + 16  # bytes that sealing adds: a nonce and a tag
_CHUNK = 1 << 17  # numbers of a mask that are made at a time: a megabyte, which stays in the cache


class ProtocolError(FurlongError):
    """Somebody does not keep to the protocol, or a message was changed on its way."""


# ---------------------------------------------------------------- keys


def new_secret() -> bytes:
    """A secret of 32 bytes: a key of X25519 or Ed25519, or the seed of a mask."""
    return secrets.token_bytes(KEY)


def agreement_key(secret: bytes) -> bytes:
    """The public key of X25519 that belongs to ``secret``."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed(secret: bytes, public: bytes, label: bytes) -> bytes:
    """What the owners of two keys have in common for the use ``label``: 32 bytes."""
    try:
        own = X25519PrivateKey.from_private_bytes(secret)
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a key of small order
        raise ProtocolError("a public key that is none") from None
    return HKDF(hashes.SHA256(), KEY, None, b"furlong.secure/" + label).derive(shared)


# ---------------------------------------------------------------- masks


def add_mask(values: np.ndarray, seed: bytes, *, subtract: bool = False) -> None:
    """``values`` ± the mask of ``seed``, in place; uint64 n, modulo 2^64.

    Every seed is used for one mask only, so the counter begins at zero.
    """
    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    zeros = bytes(8 * min(_CHUNK, len(values)))
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        mask = np.frombuffer(stream.update(zeros[: part.nbytes]), dtype="<u8")
        (np.subtract if subtract else np.add)(part, mask, out=part)


# ---------------------------------------------------------------- sealed messages


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """``text`` encrypted and authenticated, together with ``about``, which is not sent."""
    nonce = secrets.token_bytes(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """The text, if nobody has changed it."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], about)
    except InvalidTag:
        raise ProtocolError("a sealed message was changed on its way") from None


# ---------------------------------------------------------------- signatures


def signing_key(secret: bytes) -> bytes:
    """The public key of Ed25519 that belongs to ``secret``."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, text: bytes) -> bytes:
    """64 bytes that only the owner of ``secret`` can make."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


def verify(public: bytes, signature: bytes, text: bytes, who: int) -> None:
    """Raise unless ``signature`` was made by the owner of ``public``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        raise ProtocolError(f"a signature of client {who} is not valid") from None


# ---------------------------------------------------------------- shares


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Holder -> share; any ``threshold`` of them give ``secret`` back, fewer tell nothing of it.

    A share is the value at holder + 1 of a random polynomial whose value at 0 is the secret.
    """
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"a threshold of {threshold} among {len(holders)} holders")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))  # the highest power first
    shares: dict[int, bytes] = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE, "big")
    return shares


def joined(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    """The secret of 32 bytes from the shares of as many holders as the threshold says.

    ``weights``: of the same holders, see :func:`lagrange`.
    """
    value = sum(weights[holder] * int.from_bytes(share, "big") for holder, share in shares.items())
    value %= PRIME
    if value >= 2**256:
        raise ProtocolError("shares that do not belong together")
    return value.to_bytes(KEY, "big")


def lagrange(holders: Iterable[int]) -> dict[int, int]:
    """What each holder's share counts for in the polynomial's value at 0."""
    points = {holder: holder + 1 for holder in holders}
    weights: dict[int, int] = {}
    for holder, x in points.items():
        above, below = 1, 1
        for other in points.values():
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights[holder] = above * pow(below, -1, PRIME) % PRIME
    return weights
