"""What a client and the server do in the five phases of a round, as in Bonawitz et al., Figure 4.

    phase     a client …                                   and sends
    keys      makes keys c (for messages), s (for masks)   the public keys, signed
    shares    checks the others' signatures, draws a       to each other, sealed, its share of s
              seed b, splits s and b into shares           and its share of b
    masked    adds to its vector x the mask of b and       y = x + mask(b) ± Σ mask(s with another)
              those it has in common with the others
    list      is told who has sent a vector                its signature under that list
    unmask    checks that enough others signed the same    its share of b of who has sent a vector,
                                                           and of s of who has not

The masks between clients fall out of the sum, but for those with clients that sent shares and then
no vector: for these the server learns s, and for the others b. It never learns both of one client,
which is what would open its vector. Who is silent in a phase takes no part in the later ones.

Clients are numbers. Messages hold bytes as uint8 tensors, one row for each client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from furlong.core.payload import Weights, payload
from furlong.core.secure import primitives as p
from furlong.core.secure.graph import Graph, least, sparse
from furlong.core.secure.identity import Identity
from furlong.core.secure.primitives import KEY, SEAL, SHARE, SIGNATURE, ProtocolError
from furlong.core.secure.settings import SecureSettings

ADVERT = 3 * KEY + SIGNATURE  # bytes: public keys c, s and of signatures, and a signature
SEALED = SEAL + 2 * SHARE


def row(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def rows(data: Sequence[bytes], width: int) -> Tensor:
    """Rows of ``width`` bytes, uint8 n×width."""
    return row(b"".join(data)).view(len(data), width) if data else torch.empty(0, width).byte()


def raw(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    return tensor.contiguous().numpy().tobytes()


# ---------------------------------------------------------------- messages


@payload("furlong.secure.Up")
class Up:
    """What a client sends in a phase: bytes, one row for each client that they are about."""

    sent: Weights


@payload("furlong.secure.Invitation")
class Invitation:
    """Phase ``keys``: a round begins."""

    exchange: int  # the number of the exchange whose answers are masked


@payload("furlong.secure.Offer")
class Offer:
    """Phase ``shares``: the public keys of those with whom the client masks."""

    asked: int  # clients that were invited
    members: int  # clients that sent keys
    threshold: int
    others: tuple[int, ...]
    keys: Weights  # "adverts": uint8 n×ADVERT of these; "session": uint8 32, a digest of all


@payload("furlong.secure.Inbox")
class Inbox:
    """Phase ``masked``: what others have sealed for the client."""

    senders: tuple[int, ...]
    sealed: Weights  # "sealed": uint8 n×SEALED


@payload("furlong.secure.Alive")
class Alive:
    """Phase ``list``: everybody who has sent a vector."""

    clients: tuple[int, ...]


@payload("furlong.secure.Signed")
class Signed:
    """Phase ``unmask``: who has signed the list, of those with whom the client masks."""

    signers: tuple[int, ...]
    signatures: Weights  # "signatures": uint8 n×64


# ---------------------------------------------------------------- a client


@payload("furlong.secure.Secrets")
class Secrets:
    """What a client knows during a round and forgets at its end. Nothing of it is ever sent."""

    exchange: int
    keys: Weights  # secret keys c, s and of signatures, the seed b (uint8 32 each), the own advert
    offer: Offer | None = None
    own: Weights | None = None  # its shares of its own secrets, where all mask with all
    inbox: Inbox | None = None
    alive: tuple[int, ...] | None = None


def advertise(me: int, exchange: int, identity: Identity | None = None) -> tuple[Secrets, Up]:
    """Phase ``keys``: new keys for one round, signed by the client's identity if it has one."""
    cipher, mask = p.new_secret(), p.new_secret()
    signing = p.new_secret() if identity is None else identity.secret
    public = p.agreement_key(cipher) + p.agreement_key(mask)
    signature = p.sign(signing, _keys_text(exchange, me, public))
    advert = row(public + p.signing_key(signing) + signature)
    keys = {"cipher": row(cipher), "mask": row(mask), "signing": row(signing), "advert": advert}
    return Secrets(exchange, keys), Up({"advert": advert})


def share(
    secrets: Secrets,
    me: int,
    offer: Offer,
    settings: SecureSettings,
    identity: Identity | None = None,
) -> tuple[Secrets, Up]:
    """Phase ``shares``: two shares for everybody who masks with this client."""
    _require_in_turn(secrets.offer is None)
    complete = _check_offer(secrets, me, offer, settings)
    for other, advert in zip(offer.others, map(raw, offer.keys["adverts"]), strict=True):
        if identity is not None:
            identity.require_known(advert[2 * KEY : 3 * KEY], other)
    seed, mask = p.new_secret(), raw(secrets.keys["mask"])
    holders = sorted([*offer.others, me]) if complete else list(offer.others)
    of_mask, of_seed = (p.split(secret, holders, offer.threshold) for secret in (mask, seed))
    sealed = [
        p.seal(
            _common(secrets, "cipher", advert[:KEY]),
            of_mask[other] + of_seed[other],
            _sealed_about(secrets.exchange, me, other),
        )
        for other, advert in zip(offer.others, map(raw, offer.keys["adverts"]), strict=True)
    ]
    own = {"shares": row(of_mask[me] + of_seed[me])} if complete else None
    known = replace(secrets, offer=offer, own=own, keys={**secrets.keys, "seed": row(seed)})
    return known, Up({"sealed": rows(sealed, SEALED)})


def mask(secrets: Secrets, me: int, inbox: Inbox, vector: np.ndarray) -> tuple[Secrets, Up]:
    """Phase ``masked``: the client's ``vector`` (uint64 n, changed in place) under its masks."""
    offer = secrets.offer
    _require_in_turn(offer is not None and secrets.inbox is None)
    assert offer is not None
    _require(set(inbox.senders) <= set(offer.others), "shares of somebody who offered no keys")
    _require_enough(secrets, inbox.senders, "sent shares")
    p.add_mask(vector, raw(secrets.keys["seed"]))
    adverts = dict(zip(offer.others, map(raw, offer.keys["adverts"]), strict=True))
    for other in inbox.senders:
        seed = _common(secrets, "mask", adverts[other][KEY : 2 * KEY])
        p.add_mask(vector, seed, subtract=me < other)
    masked = torch.from_numpy(vector.view(np.uint8))
    return replace(secrets, inbox=inbox), Up({"masked": masked})


def acknowledge(
    secrets: Secrets, me: int, alive: Alive, settings: SecureSettings
) -> tuple[Secrets, Up]:
    """Phase ``list``: sign who is there. A client signs one list in a round."""
    _require_in_turn(secrets.inbox is not None and secrets.alive is None)
    offer = secrets.offer
    assert offer is not None
    assert secrets.inbox is not None
    there = set(alive.clients) & set(offer.others)
    degree = 0 if secrets.own is not None else len(offer.others)
    fewest = least(offer.members, offer.threshold, degree, settings)
    _require(len(set(alive.clients)) >= fewest, f"fewer than {fewest} clients")
    _require(me in alive.clients, "a list without this client")
    _require(there <= set(secrets.inbox.senders), "a vector of somebody who sent no shares")
    if secrets.own is not None:
        _require(len(there) + 1 == len(alive.clients), "a list with strangers")
    _require_enough(secrets, there, "sent a vector")
    signature = p.sign(raw(secrets.keys["signing"]), _list_text(secrets, alive.clients))
    return replace(secrets, alive=alive.clients), Up({"signature": row(signature)})


def reveal(secrets: Secrets, me: int, signed: Signed) -> Up:
    """Phase ``unmask``: a share of b of who is there, of s of who is not; never both."""
    offer, inbox, alive = secrets.offer, secrets.inbox, secrets.alive
    _require_in_turn(alive is not None)
    assert offer is not None
    assert inbox is not None
    assert alive is not None
    _require(set(signed.signers) <= set(alive) - {me}, "a signature of somebody not in the list")
    _require_enough(secrets, signed.signers, "signed the list")
    adverts = dict(zip(offer.others, map(raw, offer.keys["adverts"]), strict=True))
    text = _list_text(secrets, alive)
    for other, signature in zip(signed.signers, signed.signatures["signatures"], strict=True):
        p.verify(adverts[other][2 * KEY : 3 * KEY], raw(signature), text, other)
    sealed = dict(zip(inbox.senders, map(raw, inbox.sealed["sealed"]), strict=True))
    given: list[bytes] = []
    for other in held(secrets.own is not None, me, inbox.senders):
        if other == me:
            assert secrets.own is not None
            both = raw(secrets.own["shares"])
        else:
            key = _common(secrets, "cipher", adverts[other][:KEY])
            both = p.unseal(key, sealed[other], _sealed_about(secrets.exchange, other, me))
        given.append(both[SHARE:] if other in alive else both[:SHARE])
    return Up({"shares": rows(given, SHARE)})


def held(complete: bool, me: int, senders: Iterable[int]) -> list[int]:
    """Whose shares client ``me`` holds, in the order in which it sends them."""
    return sorted([*senders, me] if complete else senders)


def attempt(secrets: Secrets) -> str:
    """A name for this round of this client that no other round has."""
    return hashlib.sha256(raw(secrets.keys["advert"])).hexdigest()


def _check_offer(secrets: Secrets, me: int, offer: Offer, settings: SecureSettings) -> bool:
    """Refuse keys and numbers that are not as the settings say; whether all mask with all."""
    n, others = offer.members, offer.others
    _require(len(set(others)) == len(others) and me not in others, "a list of clients twice")
    _require(n <= offer.asked, "more clients than were asked")
    found = sparse(n, settings.colluding, settings.dropouts)
    degree, threshold = found or (n - 1, settings.needed(offer.asked))
    _require(
        len(others) == degree and offer.threshold == threshold,
        f"{len(others)} others and a threshold of {offer.threshold}; by the settings it is "
        f"{degree} and {threshold}",
    )
    adverts = {k: raw(a) for k, a in zip(others, offer.keys["adverts"], strict=True)}
    for other, advert in adverts.items():
        signer, signature = advert[2 * KEY : 3 * KEY], advert[3 * KEY :]
        p.verify(signer, signature, _keys_text(secrets.exchange, other, advert[: 2 * KEY]), other)
    every = {**adverts, me: raw(secrets.keys["advert"])}
    keys = [advert[at : at + KEY] for advert in every.values() for at in (0, KEY, 2 * KEY)]
    _require(len(set(keys)) == len(keys), "a public key twice")
    if found is None:
        _require(raw(offer.keys["session"]) == session(every), "not the keys of the session")
    _require(n >= max(settings.fewest, 2), f"only {n} clients")
    return found is None


def _require_enough(secrets: Secrets, others: Iterable[int], what: str) -> None:
    """Refuse to go on when fewer than the threshold are left; where all mask with all, with me."""
    assert secrets.offer is not None
    count = len(set(others)) + (secrets.own is not None)
    _require(count >= secrets.offer.threshold, f"only {count} clients have {what}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(f"secure aggregation is given up: the server names {what}")


def _require_in_turn(holds: bool) -> None:
    if not holds:
        raise ProtocolError("secure aggregation: this phase is not the client's next one")


def _common(secrets: Secrets, kind: str, public: bytes) -> bytes:
    """What this client has in common with the owner of ``public``: for messages, or for masks."""
    label = f"{kind}/{secrets.exchange}".encode()
    return p.agreed(raw(secrets.keys[kind]), public, label)


def _keys_text(exchange: int, client: int, public: bytes) -> bytes:
    return f"furlong.secure/keys/{exchange}/{client}/".encode() + public


def _sealed_about(exchange: int, sender: int, receiver: int) -> bytes:
    return f"furlong.secure/shares/{exchange}/{sender}/{receiver}".encode()


def _list_text(secrets: Secrets, alive: Iterable[int]) -> bytes:
    assert secrets.offer is not None
    names = ",".join(map(str, sorted(alive)))
    about = f"furlong.secure/list/{secrets.exchange}/{names}/".encode()
    return about + raw(secrets.offer.keys["session"])


# ---------------------------------------------------------------- the server


def session(adverts: Mapping[int, bytes]) -> bytes:
    """A digest of all public keys of a round."""
    digest = hashlib.sha256()
    for client in sorted(adverts):
        digest.update(f"{client}/".encode() + adverts[client])
    return digest.digest()


def add_masked(total: np.ndarray, masked: Tensor) -> None:
    """Add a client's masked vector (uint8 8n) to ``total`` (uint64 n), modulo 2^64."""
    np.add(total, masked.contiguous().numpy().view(np.uint64), out=total)


def unmask(
    total: np.ndarray,
    graph: Graph,
    exchange: int,
    adverts: Mapping[int, bytes],
    alive: Sequence[int],
    shares: Mapping[int, Mapping[int, bytes]],
) -> None:
    """Take all masks out of the sum ``total`` of those ``alive``, in place.

    ``shares``: of whom -> holder -> share, for everybody who has sent shares. Raises
    :class:`ProtocolError` where fewer than the threshold are there.
    """
    label, counts = f"mask/{exchange}".encode(), dict[tuple[int, ...], dict[int, int]]()
    for client, given in shares.items():
        if len(given) < graph.threshold:
            raise ProtocolError(
                f"{len(given)} of at least {graph.threshold} shares of client {client} have come"
            )
        chosen = {holder: given[holder] for holder in sorted(given)[: graph.threshold]}
        among = tuple(chosen)
        if among not in counts:
            counts[among] = p.lagrange(among)
        secret = p.joined(chosen, counts[among])
        if client in alive:
            p.add_mask(total, secret, subtract=True)
            continue
        if p.agreement_key(secret) != adverts[client][KEY : 2 * KEY]:
            raise ProtocolError(f"the shares of client {client} do not give its key")
        for other in graph.others(client):
            if other in alive:  # it added this mask if it is the larger one, else subtracted it
                seed = p.agreed(secret, adverts[other][KEY : 2 * KEY], label)
                p.add_mask(total, seed, subtract=other > client)
