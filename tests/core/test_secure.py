"""Secure aggregation without any method: its primitives, its numbers, its protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from randomness import looks_random
from torch import Tensor

from furlong.core.secure import primitives as p
from furlong.core.secure import protocol
from furlong.core.secure.graph import COMPLETE, Graph, drawn, least, sparse
from furlong.core.secure.numbers import HEAD, Layout, fraction_bits
from furlong.core.secure.primitives import KEY, SHARE, ProtocolError
from furlong.core.secure.protocol import Alive, Inbox, Offer, Secrets, Signed, Up
from furlong.core.secure.settings import SecureSettings
from furlong.errors import FurlongError

PLAIN = SecureSettings(sums=True)


# ---------------------------------------------------------------- primitives


def test_the_prime_is_one() -> None:
    """Fermat's test for several bases (a composite passes all with a negligible probability)."""
    assert all(pow(base, p.PRIME - 1, p.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13, 17, 19))
    assert p.PRIME > 2**256
    assert p.PRIME.bit_length() <= 8 * SHARE


@given(
    secret=st.binary(min_size=KEY, max_size=KEY),
    holders=st.sets(st.integers(0, 10**6), min_size=4, max_size=9),
)
@settings(max_examples=20, deadline=None)
def test_shamir(secret: bytes, holders: set[int]) -> None:
    """Any threshold of shares gives the secret, and one fewer gives something else."""
    shares = p.split(secret, sorted(holders), 3)
    for some in list(combinations(sorted(holders), 3))[:6]:
        chosen = {k: shares[k] for k in some}
        assert p.joined(chosen, p.lagrange(chosen)) == secret
    two = dict(list(shares.items())[:2])
    value = sum(w * int.from_bytes(two[k], "big") for k, w in p.lagrange(two).items()) % p.PRIME
    assert value != int.from_bytes(secret, "big")


def test_too_few_shares_say_nothing() -> None:
    """For any other secret there is a polynomial through the same two shares."""
    shares = p.split(bytes(KEY), [0, 1, 2], 3)
    other = {**dict(list(shares.items())[:2])}
    weights = p.lagrange([0, 1, 2])
    wanted = int.from_bytes(b"\x07" * KEY, "big")
    partial = sum(weights[k] * int.from_bytes(share, "big") for k, share in other.items())
    third = (wanted - partial) * pow(weights[2], -1, p.PRIME) % p.PRIME
    assert p.joined({**other, 2: third.to_bytes(SHARE, "big")}, weights) == b"\x07" * KEY


def test_shares_are_drawn_anew() -> None:
    assert p.split(bytes(KEY), [0, 1, 2], 2) != p.split(bytes(KEY), [0, 1, 2], 2)
    with pytest.raises(ValueError, match="threshold"):
        p.split(bytes(KEY), [0, 1], 3)


def test_agreement_is_mutual_and_by_label() -> None:
    one, two = p.new_secret(), p.new_secret()
    here = p.agreed(one, p.agreement_key(two), b"mask/3")
    assert here == p.agreed(two, p.agreement_key(one), b"mask/3")
    assert here != p.agreed(one, p.agreement_key(two), b"mask/4")
    assert here != p.agreed(one, p.agreement_key(two), b"cipher/3")
    with pytest.raises(ProtocolError):
        p.agreed(one, bytes(KEY), b"mask/3")


@pytest.mark.parametrize("n", [1, 5, (1 << 17) + 3])
def test_a_mask_goes_on_and_off(n: int) -> None:
    values = np.arange(n, dtype=np.uint64)
    seed = p.new_secret()
    p.add_mask(values, seed)
    assert n < 5 or not (values == np.arange(n)).any()
    p.add_mask(values, seed, subtract=True)
    assert (values == np.arange(n)).all()


def test_a_mask_is_aes_256_in_counter_mode() -> None:
    """Its first block is AES-256 of zeros under a key of zeros (a vector of NIST's AESAVS)."""
    values = np.zeros(2, dtype=np.uint64)
    p.add_mask(values, bytes(KEY))
    assert values.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_a_mask_looks_random_and_its_checks_can_fail() -> None:
    values = np.zeros(20_000, dtype=np.uint64)
    assert looks_random(values.tobytes())
    p.add_mask(values, p.new_secret())
    assert looks_random(values.tobytes()) is None
    assert looks_random((values & np.uint64(0xFFFFFFFF)).tobytes())
    assert looks_random(np.repeat(values[:10_000], 2).tobytes())


def test_sealed_messages() -> None:
    key = p.new_secret()
    sealed = p.seal(key, b"text", b"from 1 to 2")
    assert p.unseal(key, sealed, b"from 1 to 2") == b"text"
    assert len(sealed) == 4 + p.SEAL
    assert p.seal(key, b"text", b"from 1 to 2") != sealed
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), bytes(len(sealed))):
        with pytest.raises(ProtocolError):
            p.unseal(key, wrong, b"from 1 to 2")
    with pytest.raises(ProtocolError):
        p.unseal(key, sealed, b"from 2 to 1")


def test_signatures() -> None:
    secret = p.new_secret()
    signature = p.sign(secret, b"text")
    p.verify(p.signing_key(secret), signature, b"text", 0)
    for public, text in ((p.signing_key(p.new_secret()), b"text"), (p.signing_key(secret), b"t")):
        with pytest.raises(ProtocolError, match="client 7"):
            p.verify(public, signature, text, 7)


# ---------------------------------------------------------------- numbers


def layout(images: int, bound: float = 1e6, **like: Tensor) -> Layout:
    return Layout(like, fraction_bits(images, bound), bound)


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    images=st.lists(st.integers(1, 10**6), min_size=3, max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_means_are_as_exact_as_stated(values: list[float], images: list[int]) -> None:
    like = layout(sum(images), w=torch.zeros(1))
    total = np.zeros(len(like), dtype=np.uint64)
    for value, n in zip(values, images, strict=True):
        total += like.encode({"w": torch.tensor([value])}, n, loss=value)
    found = like.decode(total)
    exact = math.fsum(v * n for v, n in zip(values, images, strict=True)) / sum(images)
    slack = 1e-15 * abs(exact) * 4  # of float64 itself
    assert abs(float(found.means["w"]) - exact) <= like.error(3, sum(images)) + slack
    assert found.images == sum(images)
    assert found.loss is not None
    assert abs(found.loss - exact) <= like.error(3, sum(images)) + slack


def test_numbers_are_rounded_to_the_nearest() -> None:
    like = layout(3, 2.0**40, w=torch.zeros(2))
    step = 2.0**-like.bits
    vector = like.encode({"w": torch.tensor([0.9 * step, -0.9 * step])}, 1, None)
    assert vector[HEAD:].view(np.int64).tolist() == [1, -1]


def test_the_stated_example() -> None:
    assert fraction_bits(50_000, 1e6) == 26
    assert layout(50_000).error(10, 50_000) == pytest.approx(1.5e-12, rel=0.02)


def test_counters_are_rounded_up() -> None:
    like = layout(5, n=torch.zeros((), dtype=torch.int64))
    total = like.encode({"n": torch.tensor(10)}, 2, None) + like.encode(
        {"n": torch.tensor(13)}, 3, None
    )
    found = like.decode(total)
    assert int(found.means["n"]) == 12  # (20 + 39)/5 = 11.8
    assert found.loss is None


@pytest.mark.parametrize("bad", [1e6 + 1, -math.inf, math.nan])
def test_what_does_not_fit_is_refused_by_the_client(bad: float) -> None:
    like = layout(10, w=torch.zeros(2))
    with pytest.raises(FurlongError, match=r"secure\.bound"):
        like.encode({"w": torch.tensor([0.0, bad])}, 4, None)
    vector = like.encode({"w": torch.zeros(2)}, 4, loss=bad)  # a loss is only left out
    assert vector[:HEAD].tolist() == [4, 0, 0]


def test_the_largest_values_do_not_overflow() -> None:
    like = layout(3 * 10**6, w=torch.zeros(1))
    vector = like.encode({"w": torch.tensor([1e6])}, 10**6, None)
    assert float(like.decode(vector + vector + vector).means["w"]) == 1e6
    with pytest.raises(FurlongError, match="bits are left"):
        fraction_bits(10**9, 1e14)


# ---------------------------------------------------------------- the graph


@pytest.mark.parametrize(("clients", "threshold"), [(3, 3), (4, 3), (10, 7), (50, 34)])
def test_two_thirds_must_help(clients: int, threshold: int) -> None:
    graph = drawn(range(clients), clients, PLAIN)
    assert (graph.degree, graph.threshold) == (0, threshold)
    assert graph.others(1) == [0, *range(2, clients)]


def test_a_sparse_graph() -> None:
    n = COMPLETE + 14
    graph = drawn(range(n), n, PLAIN)
    assert 0 < graph.threshold < graph.degree < n - 1
    for client in range(n):
        others = graph.others(client)
        assert len(others) == graph.degree
        assert all(client in graph.others(other) for other in others)
    assert drawn(range(n), n, PLAIN).ring != graph.ring
    assert least(n, graph.threshold, graph.degree, PLAIN) == n - n // 5
    assert sparse(COMPLETE, 0.2, 0.2) is None
    assert sparse(60, 0.6, 0.39) is None  # nothing is left to hope for: all mask with all


def test_the_degree_is_the_smallest_safe_one() -> None:
    """By simulation, with bounds that can be seen: 3 bits instead of 41."""
    from furlong.core.secure import graph as g

    n, degree = 200, sparse(200, 0.2, 0.2)
    assert degree == (62, 34)
    assert g._threshold(n, 60, 0.2, 0.2) is None
    # the hypergeometric tail of colluding neighbours, summed by hand
    tail = sum(
        math.comb(40, k) * math.comb(159, 62 - k) / math.comb(199, 62) for k in range(34, 41)
    )
    assert n * tail < 2.0**-41
    assert g._log2_cut(n, 62, 80) < -41
    assert g._log2_cut(n, 2, 199) > 0


@pytest.mark.parametrize(
    ("given_", "clients", "needed"), [({}, 5, 4), ({"threshold": 0.5}, 5, 3), ({"fewest": 6}, 5, 6)]
)
def test_thresholds(given_: dict[str, Any], clients: int, needed: int) -> None:
    made = SecureSettings(**given_)
    assert made.needed(clients) == needed
    if needed > clients:
        with pytest.raises(FurlongError, match=r"secure\.fewest"):
            made.check_cohort(clients)


# ---------------------------------------------------------------- the protocol

PHASES = ("keys", "shares", "masked", "list", "unmask")
Tamper = Callable[[str, int, Any], Any]


@dataclass
class Played:
    """A round without any engine: what the server received, and what came out."""

    total: np.ndarray
    alive: list[int]
    graph: Graph
    why: str = ""  # nothing was opened
    received: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    errors: dict[tuple[str, int], str] = field(default_factory=dict)


def play(
    vectors: dict[int, np.ndarray],
    silent: dict[str, set[int]] | None = None,
    tamper: Tamper = lambda _phase, _client, message: message,
    chosen: SecureSettings = PLAIN,
) -> Played:
    """All phases; ``silent``: who is when; ``tamper`` changes what the server sends."""
    silent, played = silent or {}, Played(np.zeros(0), [], Graph((), 0, 0))
    secrets: dict[int, Secrets] = {}

    def ask(phase: str, clients: Any, part: Callable[[int], Any]) -> dict[int, Tensor]:
        got: dict[int, Tensor] = {}
        for k in clients:
            if k in silent.get(phase, ()):
                continue
            try:
                answer = part(k)
            except ProtocolError as error:
                played.errors[phase, k] = str(error)
                continue
            if not isinstance(answer, Up):
                secrets[k], answer = answer
            (got[k],) = answer.sent.values()
        played.received[phase] = got
        return got

    adverts = ask("keys", vectors, lambda k: protocol.advertise(k, 0))
    graph = played.graph = drawn(adverts, len(vectors), chosen)
    raws = {k: protocol.raw(a) for k, a in adverts.items()}

    def offer(k: int) -> Offer:
        others = tuple(graph.others(k))
        stacked = torch.stack([adverts[o] for o in others])
        session = protocol.row(protocol.session(raws))
        keys = {"adverts": stacked, "session": session}
        return tamper("shares", k, Offer(len(vectors), len(raws), graph.threshold, others, keys))

    sealed = ask("shares", adverts, lambda k: protocol.share(secrets[k], k, offer(k), chosen))

    def inbox(k: int) -> Inbox:
        heard = tuple(o for o in graph.others(k) if o in sealed)
        mine = [protocol.raw(sealed[o][graph.others(o).index(k)]) for o in heard]
        return tamper("masked", k, Inbox(heard, {"sealed": protocol.rows(mine, protocol.SEALED)}))

    masked = ask(
        "masked", sealed, lambda k: protocol.mask(secrets[k], k, inbox(k), vectors[k].copy())
    )
    played.alive = sorted(masked)
    played.total = np.zeros_like(next(iter(vectors.values())))
    for each in masked.values():
        protocol.add_masked(played.total, each)
    signed = ask(
        "list",
        masked,
        lambda k: protocol.acknowledge(
            secrets[k], k, tamper("list", k, Alive(tuple(played.alive))), chosen
        ),
    )

    def signatures(k: int) -> Signed:
        signers = tuple(o for o in graph.others(k) if o in signed)
        rows = protocol.rows([protocol.raw(signed[o]) for o in signers], p.SIGNATURE)
        return tamper("unmask", k, Signed(signers, {"signatures": rows}))

    shares = ask("unmask", signed, lambda k: protocol.reveal(secrets[k], k, signatures(k)))
    of: dict[int, dict[int, bytes]] = {k: {} for k in sealed}
    for holder, given_ in shares.items():
        heard = [o for o in graph.others(holder) if o in sealed]
        for owner, share in zip(
            protocol.held(not graph.degree, holder, heard), given_, strict=True
        ):
            of[owner][holder] = protocol.raw(share)
    try:
        protocol.unmask(played.total, graph, 0, raws, played.alive, of)
    except ProtocolError as error:
        played.why = str(error)
    return played


def vectors(clients: int, size: int = 40) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(clients)
    return {
        k: rng.integers(0, 2**64, size, dtype=np.uint64, endpoint=False) for k in range(clients)
    }


def plain_sum(values: dict[int, np.ndarray], who: list[int]) -> np.ndarray:
    return np.sum([values[k] for k in who], axis=0, dtype=np.uint64)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lost", [set(), {0}, {1, 4}])
def test_sums_are_exact_whoever_drops_out(phase: str, lost: set[int]) -> None:
    values = vectors(7)
    played = play(values, {phase: lost})
    gone = lost if PHASES.index(phase) <= 2 else set()
    assert played.alive == [k for k in values if k not in gone]
    assert (played.total == plain_sum(values, played.alive)).all()
    assert not played.errors


def test_somebody_drops_out_in_every_phase() -> None:
    values = vectors(16)
    played = play(values, {phase: {k} for k, phase in enumerate(PHASES)})
    assert played.alive == list(range(3, 16))
    assert (played.total == plain_sum(values, played.alive)).all()


@pytest.mark.parametrize("phase", ["shares", "masked", "list", "unmask"])
def test_below_the_threshold_nothing_is_opened(phase: str) -> None:
    played = play(vectors(4), {phase: {0, 1}})
    assert "of at least 3 shares" in played.why or not played.received["shares"]
    after = PHASES[PHASES.index(phase) + 1 :]
    assert all(error for error in played.errors.values())
    assert not after or {name for name, _ in played.errors} == {after[0]}  # all who are left refuse


def test_a_sparse_round() -> None:
    values = vectors(COMPLETE + 4, 8)
    few = SecureSettings(colluding=0.02, dropouts=0.06)
    played = play(values, {"shares": {3}, "masked": {20}, "unmask": {33}}, chosen=few)
    assert 0 < played.graph.degree < 12
    assert played.received["shares"][0].shape[0] == played.graph.degree
    assert played.alive == [k for k in values if k not in (3, 20)]
    assert (played.total == plain_sum(values, played.alive)).all()
    assert not played.errors


def test_a_sparse_round_that_loses_more_than_it_was_made_for() -> None:
    """The graph might be cut in two, and each half be opened by itself: nobody signs the list."""
    few = SecureSettings(colluding=0.02, dropouts=0.06)
    played = play(vectors(COMPLETE + 4, 8), {"masked": {3, 20, 33, 47}}, chosen=few)
    assert {what for what in played.errors.values() if "fewer than 51 clients" in what}
    assert not played.received["list"]


# ---------------------------------------------------------------- what the server receives


def test_what_the_server_receives_looks_random() -> None:
    values = {k: np.zeros(20_000, dtype=np.uint64) for k in range(4)}  # nothing random inside
    played = play(values, {"masked": {2}})
    got = {k: protocol.raw(each) for k, each in played.received["masked"].items()}
    assert all(looks_random(each) is None for each in got.values())
    pair = np.frombuffer(got[0], np.uint64) - np.frombuffer(got[1], np.uint64)
    assert looks_random(pair.tobytes()) is None  # no mask is shared by two
    pair = np.frombuffer(got[0], np.uint64) + np.frombuffer(got[1], np.uint64)
    assert looks_random(pair.tobytes()) is None  # nor does it fall out of less than the sum
    assert not played.total.any()


def opened_late(monkeypatch: pytest.MonkeyPatch, seed: bool) -> np.ndarray:
    """What the server has of a vector that comes too late, less the vector itself.

    Its client is taken for lost, so the server opens its key s and can take off all masks that it
    has with others. ``seed``: whether there is a mask of b too.
    """
    values, kept, keys = vectors(4, 2000), np.zeros(0), list[bytes]()
    made, public = protocol.mask, p.agreement_key

    def late(secrets: Secrets, me: int, inbox: Inbox, vector: np.ndarray) -> Any:
        nonlocal kept
        known, up = made(secrets, me, inbox, vector)
        if not seed:
            p.add_mask(vector, protocol.raw(secrets.keys["seed"]), subtract=True)
        if me == 3:
            kept = vector
            raise ProtocolError("too late")
        return known, up

    monkeypatch.setattr(protocol, "mask", late)
    monkeypatch.setattr(p, "agreement_key", lambda secret: keys.append(secret) or public(secret))
    played = play(values)
    adverts = {k: protocol.raw(a) for k, a in played.received["keys"].items()}
    assert public(keys[-1]) == adverts[3][KEY : 2 * KEY]  # the server has just opened it
    for other in (0, 1, 2):
        mask = p.agreed(keys[-1], adverts[other][KEY : 2 * KEY], b"mask/0")
        p.add_mask(kept, mask, subtract=True)
    return kept - values[3]


@pytest.mark.parametrize("seed", [True, False])
def test_a_vector_that_comes_late_stays_closed(monkeypatch: pytest.MonkeyPatch, seed: bool) -> None:
    """The reason for b: without it, whoever is slow is open to the server."""
    left = opened_late(monkeypatch, seed)
    assert looks_random(left.tobytes()) is None if seed else not left.any()


# ---------------------------------------------------------------- a server that lies


def swapped(phase: str, client: int, message: Any) -> Any:
    """The server puts keys of its own in place of client 2's."""
    if phase != "shares" or client == 2:
        return message
    adverts = message.keys["adverts"].clone()
    _, up = protocol.advertise(2, 0)
    mine = up.sent["advert"].clone()
    at = message.others.index(2)
    mine[2 * KEY : 3 * KEY] = adverts[at][2 * KEY : 3 * KEY]  # under client 2's signing key
    adverts[at] = mine
    return replace(message, keys={**message.keys, "adverts": adverts})


def other_session(phase: str, client: int, message: Any) -> Any:  # noqa: ARG001
    if phase != "shares":
        return message
    return replace(message, keys={**message.keys, "session": torch.zeros(32, dtype=torch.uint8)})


def lower_threshold(phase: str, client: int, message: Any) -> Any:  # noqa: ARG001
    return replace(message, threshold=2) if phase == "shares" else message


def two_lists(phase: str, client: int, message: Any) -> Any:
    """Some hear that client 4 is there, some that it is not: both its secrets would be opened."""
    if phase == "list" and client < 2:
        return replace(message, clients=tuple(k for k in message.clients if k != 4))
    return message


def few_signatures(phase: str, client: int, message: Any) -> Any:  # noqa: ARG001
    if phase != "unmask":
        return message
    return Signed(message.signers[:1], {"signatures": message.signatures["signatures"][:1]})


def small_list(phase: str, client: int, message: Any) -> Any:
    return Alive((client, (client + 1) % 5)) if phase == "list" else message


def other_shares(phase: str, client: int, message: Any) -> Any:  # noqa: ARG001
    """Shares that were sealed for another client."""
    if phase != "masked":
        return message
    return replace(message, sealed={"sealed": message.sealed["sealed"].flip(0)})


@pytest.mark.parametrize(
    ("tamper", "phase", "who"),
    [
        (swapped, "shares", {0, 1, 3, 4}),
        (other_session, "shares", {0, 1, 2, 3, 4}),
        (lower_threshold, "shares", {0, 1, 2, 3, 4}),
        (small_list, "list", {0, 1, 2, 3, 4}),
        (two_lists, "unmask", {0, 1, 2, 3, 4}),
        (few_signatures, "unmask", {0, 1, 2, 3, 4}),
        (other_shares, "unmask", {0, 1, 2, 3, 4}),
    ],
)
def test_clients_refuse(tamper: Tamper, phase: str, who: set[int]) -> None:
    """Those who are lied to stop there, and nobody reveals a share."""
    played = play(vectors(5), tamper=tamper)
    assert {k for name, k in played.errors if name == phase} == who
    assert not played.received["unmask"]


def test_keys_of_a_server_under_a_clients_name() -> None:
    """The same lie to everybody, so that all see the same keys: only the signature tells."""
    known, adverts = {}, {}
    for k in range(3):
        known[k], up = protocol.advertise(k, 0)
        adverts[k] = up.sent["advert"].clone()
    _, forged = protocol.advertise(2, 0)
    honest = adverts[2].clone()
    for lie in (False, True):
        adverts[2][: 2 * KEY] = (forged.sent["advert"] if lie else honest)[: 2 * KEY]
        session = protocol.session({k: protocol.raw(a) for k, a in adverts.items()})
        keys = {
            "adverts": torch.stack([adverts[1], adverts[2]]),
            "session": protocol.row(session),
        }
        offer = Offer(3, 3, 3, (1, 2), keys)
        if lie:
            with pytest.raises(ProtocolError, match="signature of client 2"):
                protocol.share(known[0], 0, offer, PLAIN)
        else:
            protocol.share(known[0], 0, offer, PLAIN)


def test_a_client_answers_every_phase_once() -> None:
    values = vectors(4)
    known: dict[int, Secrets] = {}
    original = protocol.acknowledge

    def keep(secrets: Secrets, me: int, alive: Alive, chosen: SecureSettings) -> Any:
        known[me], up = original(secrets, me, alive, chosen)
        return known[me], up

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "acknowledge", keep)
        play(values)
    with pytest.raises(ProtocolError, match="next"):
        protocol.acknowledge(known[0], 0, Alive((0, 1, 2)), PLAIN)
    assert known[0].offer is not None
    with pytest.raises(ProtocolError, match="next"):
        protocol.share(known[0], 0, known[0].offer, PLAIN)
    assert known[0].inbox is not None
    with pytest.raises(ProtocolError, match="next"):
        protocol.mask(known[0], 0, known[0].inbox, values[0])
    fresh, _ = protocol.advertise(0, 0)
    with pytest.raises(ProtocolError, match="next"):
        protocol.reveal(fresh, 0, Signed((), {"signatures": torch.empty(0, 64).byte()}))
