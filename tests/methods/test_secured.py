"""Secure aggregation around methods, carried by the engine of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from randomness import looks_random
from torch import nn

from furlong.core.aggregation import COLLECTED, ServerSettings
from furlong.core.context import ClientContext, Exchange, ServerContext
from furlong.core.exchange import ExchangeResult, Failure, Server
from furlong.core.federation import Federation
from furlong.core.guard import Guard
from furlong.core.method import AnyMethod, Local, Report
from furlong.core.payload import Weights, flatten, pack, unpack
from furlong.core.privacy import Ledger, PrivacySettings
from furlong.core.secure import primitives, protocol
from furlong.core.secure.primitives import ProtocolError
from furlong.core.secure.settings import SecureSettings
from furlong.data.images import ImageSet
from furlong.engines.inprocess import InProcess
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.methods.base import Averaging, Model
from furlong.methods.wrappers.private_clients import PrivateClients
from furlong.methods.wrappers.ruled import Ruled
from furlong.methods.wrappers.secured import PHASES, Secured
from furlong.runs.cost import predict, without_data
from furlong.runs.parties import wrapped
from furlong.runs.prepare import _outlier

SIZE = 3000


@dataclass(frozen=True)
class Drifting(Averaging[Model, Model]):
    """Every client moves its weights at random, and remembers where it was."""

    def init_server(self, ctx: ServerContext) -> Model:  # noqa: ARG002
        return Model(
            {
                "w": torch.randn(SIZE),
                "bn.running_mean": torch.zeros(4),
                "bn.running_var": torch.ones(4),
                "bn.num_batches_tracked": torch.tensor(0),
            }
        )

    def init_client(self, ctx: ClientContext) -> Model:  # noqa: ARG002
        return Model({"own": torch.rand(())})

    def local_update(self, state: Model, down: Model, ctx: ClientContext) -> Local[Model, Model]:
        assert ctx.exchange.kind == "train"
        moved = down.weights["w"] + torch.randn(SIZE) * (1 + state.weights["own"])
        up = {
            "w": moved,
            "bn.running_mean": down.weights["bn.running_mean"] + torch.randn(4),
            "bn.running_var": down.weights["bn.running_var"] + torch.rand(4),
            "bn.num_batches_tracked": down.weights["bn.num_batches_tracked"] + 5,
        }
        return Local(Model({"own": moved.mean()}), Model(up), {"loss": float(moved.std())})

    def encoder(self, server: Model, ctx: ServerContext) -> nn.Module:  # noqa: ARG002
        return nn.Flatten()


@dataclass
class Dropping(InProcess):
    """Clients that fall silent: (client, phase, round)."""

    lost: frozenset[tuple[int, str, int]] = frozenset()

    def exchange(self, exchange: Exchange, downloads: Any) -> Iterator[Any]:
        kind = exchange.kind.partition(": ")[2] or "masked"
        for client, answer in super().exchange(exchange, downloads):
            if (client, kind, exchange.round) in self.lost:
                yield client, Failure(client, "lost", "no answer")
            else:
                yield client, answer


@dataclass
class Seen:
    """What a run shows to its server."""

    results: list[ExchangeResult[Any]] = field(default_factory=list)
    reports: list[tuple[Exchange, Report[Any]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    clients: dict[int, Any] = field(default_factory=dict)  # their states at the end

    def weights(self, at: int = -1) -> Weights:
        """Of the server, after an exchange."""
        state = self.results[at].server
        while not isinstance(state, Model):
            state = state.inner
        return state.weights


def federation(sizes: tuple[int, ...]) -> Federation:
    images = ImageSet(torch.zeros(max(sizes), 3, 16, 16, dtype=torch.uint8), name="none")
    return Federation(images, {k: torch.arange(n) for k, n in enumerate(sizes)})


@pytest.fixture
def carry(prepared: Any) -> Any:
    """Run a method with clients of these sizes."""
    p = prepared("fedsimclr")

    def run(
        method: AnyMethod,
        sizes: tuple[int, ...] = (5, 9, 2, 7),
        lost: Any = (),
        workers: int = 1,
        **options: Any,
    ) -> Seen:
        own, seen = federation(sizes), Seen()
        setup = replace(p.setup, sizes=own.sizes)
        watch = lambda exchange, report: seen.reports.append(  # noqa: E731
            (exchange, unpack(pack(report)))
        )
        guard = Guard(sizes=setup.sizes)
        server: Any = Server(
            method, setup, guard=guard, watch=watch, tell=seen.told.append, **options
        )
        with Dropping(method, own, setup, workers, lost=frozenset(lost)) as engine:
            seen.results = list(server.run(engine, server.init()))
            seen.clients = {k: unpack(path.read_bytes()) for k, path in engine.states()}
        return seen

    return run


def secured(inner: AnyMethod, fraction: float = 1.0, **settings: Any) -> Secured:
    return Secured(inner, SecureSettings(sums=True, **settings), fraction)


def alike(one: Weights, two: Weights, tolerance: float = 1e-9) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        torch.testing.assert_close(tensor, two[name], rtol=2e-7, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("policy", "rule"), [("average", "mean"), ("local", "mean"), ("pooled", "adam")]
)
def test_a_run_gives_what_the_plain_run_gives(carry: Any, policy: Any, rule: Any) -> None:
    method: AnyMethod = Drifting(bn_stats=policy)
    if rule != "mean":
        method = Ruled(method, ServerSettings(rule=rule))
    plain, masked = carry(method), carry(secured(method))
    assert len(masked.results) == len(PHASES) * len(plain.results)
    alike(plain.weights(), masked.weights())
    assert not masked.told
    for one, result in zip(plain.results, masked.results[4::5], strict=True):
        examples = sum(one.examples.values())
        mean = sum(m["loss"] * one.examples[k] for k, m in one.metrics.items()) / examples
        assert result.own["loss"] == pytest.approx(mean, rel=1e-9)
        assert result.own["summed"] == 4
    for client, kept in plain.clients.items():
        own = masked.clients[client].state
        alike(kept.state.weights, own.inner.weights)
        alike(kept.stats, own.stats)
        assert own.secrets is None  # what belonged to the round is gone


@dataclass(frozen=True)
class Moving(Drifting):
    """The same without statistics, which no budget covers."""

    def init_server(self, ctx: ServerContext) -> Model:
        return Model({"w": super().init_server(ctx).weights["w"]})

    def local_update(self, state: Model, down: Model, ctx: ClientContext) -> Local[Model, Model]:  # noqa: ARG002
        return Local(state, Model({"w": down.weights["w"] + torch.randn(SIZE)}), {"loss": 1.0})


def test_noise_that_clients_add_is_under_the_masks_and_all_count_the_same(
    carry: Any, tmp_path: Path
) -> None:
    settings = PrivacySettings(level="client", noise=1.0, noise_at="clients", noise_from="seed")
    noisy = PrivateClients(Moving(), settings, 1.0, 3, b"x" * 32)
    runs = [
        carry(method, folder=tmp_path / name)
        for name, method in (("plain", noisy), ("masked", secured(noisy)))
    ]
    plain, masked = (seen.weights() for seen in runs)
    torch.testing.assert_close(plain["w"], masked["w"], rtol=0, atol=1e-6)
    spent = [Ledger(tmp_path / name).epsilon(1e-5) for name in ("plain", "masked")]
    assert spent[0] == spent[1] > 0
    # with a loss and the number of its images nobody is told anything of a client but the sum
    assert all(not report.metrics.get("loss") for _, report in runs[1].reports)
    assert {report.examples for _, report in runs[1].reports} == {1}


@pytest.mark.parametrize(
    ("where", "spent"),
    [("methods.wrappers.secured._check_sum", 2), ("core.secure.protocol.unmask", 0)],
)
def test_a_sum_that_is_opened_and_not_used_is_spent(
    carry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, spent: int
) -> None:
    """Its masks are off when it turns out to make no sense; a sum that stays masked is free."""
    settings = PrivacySettings(level="client", noise=1.0, noise_at="clients")
    method = secured(PrivateClients(Moving(), settings, 1.0, 3, b"x" * 32))

    def refuse(*_: object) -> None:
        raise ProtocolError("it makes no sense")

    monkeypatch.setattr(f"furlong.{where}", refuse)
    assert len(carry(method, folder=tmp_path).told) == 2
    assert Ledger(tmp_path).rounds(0) == spent


def test_nobody_is_asked_for_masked_numbers_that_the_budget_does_not_hold(
    carry: Any, tmp_path: Path
) -> None:
    """When the sum is open it is too late."""
    settings = PrivacySettings(level="client", epsilon=5.0, noise_at="clients")
    method = secured(PrivateClients(Moving(), settings, 1.0, 3, b"x" * 32))
    carry(method, folder=tmp_path)
    with pytest.raises(FurlongError, match="budget is used up"):
        carry(method, folder=tmp_path)
    assert Ledger(tmp_path).rounds(0) == 2


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_drops_out(carry: Any, phase: str) -> None:
    """Before it has sent its vector it is not in the sum, afterwards it is; either sum is right."""
    counted = PHASES.index(phase) > 2
    plain = carry(Drifting(), lost=() if counted else [(1, "masked", 0)])
    masked = carry(secured(Drifting()), lost=[(1, phase, 0)])
    alike(plain.weights(0), masked.weights(4))
    assert [f.client for r in masked.results for f in r.failures] == [1]
    after = [r.cohort for r in masked.results[PHASES.index(phase) + 1 : 5]]
    assert after == [[0, 2, 3]] * len(after)  # nobody asks it again in this round
    assert masked.results[5].cohort == [0, 1, 2, 3]
    assert masked.results[4].own["summed"] == (4 if counted else 3)


@pytest.mark.parametrize("phase", PHASES)
def test_a_round_with_too_few_is_given_up(carry: Any, phase: str) -> None:
    masked = carry(secured(Drifting()), lost=[(0, phase, 0), (1, phase, 0)])
    start, end = masked.weights(0), masked.weights(4)
    assert all(torch.equal(start[name], end[name]) for name in start)
    [told] = masked.told
    assert f"given up in phase {phase}" in told
    assert "weights stay as they were" in told
    later = [r.cohort for r in masked.results[PHASES.index(phase) + 1 : 5]]
    assert later == [[]] * len(later)
    assert masked.results[9].own["summed"] == 4  # the next round is whole
    assert not torch.equal(end["w"], masked.weights(9)["w"])


def test_any_number_of_workers_gives_the_same_bits(carry: Any) -> None:
    one, two, three = (carry(secured(Drifting()), workers=n) for n in (1, 2, 1))
    assert pack(one.results[-1].server) == pack(two.results[-1].server)
    assert pack(one.results[-1].server) == pack(three.results[-1].server)
    first, again = (seen.reports[0][1].upload.sent["advert"] for seen in (one, three))
    assert not torch.equal(first, again)  # keys are not the seed's


def test_a_fraction_of_the_clients(carry: Any) -> None:
    sizes = (5, 9, 2, 7, 4, 6)
    plain = carry(Drifting(), sizes, fraction=0.7)
    masked = carry(secured(Drifting(), 0.7), sizes, fraction=0.7)
    assert [r.cohort for r in plain.results] == [r.cohort for r in masked.results[2::5]]
    alike(plain.weights(), masked.weights())


# ---------------------------------------------------------------- what the server sees


def received(seen: Seen, kind: str) -> list[bytes]:
    sent = [report.upload.sent for _, report in seen.reports]
    return [each[kind].numpy().tobytes() for each in sent if kind in each]


def leaks(seen: Seen) -> list[str]:
    """What in all that the server received, and kept before the sum was open, is not random."""
    masked = received(seen, "masked")
    assert masked
    reasons = [looks_random(each) for each in [*masked, b"".join(masked)]]
    for at, result in enumerate(seen.results):
        if result.server.round is not None and result.server.round.total:
            total = result.server.round.total["sum"].numpy().tobytes()
            reasons.append(looks_random(total))
            assert at % 5 in (2, 3)
    for exchange, report in seen.reports:
        assert set(report.metrics) == {"images"}  # no loss of a single client
        tensors, _ = flatten(report.upload)
        assert all(t.dtype == torch.uint8 for t in tensors.values()), exchange.kind
    return [reason for reason in reasons if reason]


def test_the_server_receives_random_bytes_and_one_sum(carry: Any) -> None:
    seen = carry(secured(Drifting()), lost=[(2, "masked", 0)])
    assert not leaks(seen)
    shares = b"".join(received(seen, "shares") + received(seen, "sealed"))
    plain = carry(Drifting())
    for _, report in plain.reports:  # not a single number of any client is anywhere in it
        numbers = set(report.upload.weights["w"].numpy().view(np.uint32).tolist())
        for data in (*received(seen, "masked"), shares[: len(shares) // 4 * 4]):
            found = np.frombuffer(data, dtype=np.uint32).tolist()
            assert len(numbers.intersection(found)) <= 2  # by chance


def nothing(values: np.ndarray, seed: bytes, *, subtract: bool = False) -> None:
    """A mask that is none."""


def narrow(values: np.ndarray, seed: bytes, *, subtract: bool = False) -> None:
    """A mask of 32 bits: the upper half of every number stays readable."""
    mask = np.zeros_like(values)
    _add_mask(mask, seed)
    mask &= np.uint64(0xFFFFFFFF)
    (np.subtract if subtract else np.add)(values, mask, out=values)


def constant(values: np.ndarray, seed: bytes, *, subtract: bool = False) -> None:
    """The same number for the whole vector: differences stay readable."""
    mask = np.zeros(1, dtype=np.uint64)
    _add_mask(mask, seed)
    (np.subtract if subtract else np.add)(values, mask, out=values)


_add_mask = primitives.add_mask


@pytest.mark.parametrize("broken", [nothing, narrow, constant])
def test_broken_masks_are_noticed(carry: Any, monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    """Sums are right with any of these, so only what the server receives can tell."""
    monkeypatch.setattr(primitives, "add_mask", broken)
    seen = carry(secured(Drifting()))
    assert not seen.told
    assert leaks(seen)


@pytest.mark.parametrize(
    ("by", "reason"), [(1, "images and its clients hold"), (2**64 - 10**6, "a sum over -")]
)
def test_a_sum_that_was_changed_is_not_used(
    carry: Any, monkeypatch: pytest.MonkeyPatch, by: int, reason: str
) -> None:
    """Nor does it end the run."""

    def add(total: np.ndarray, masked: torch.Tensor) -> None:
        _add(total, masked)
        total[:1] += np.uint64(by)

    _add = protocol.add_masked
    monkeypatch.setattr(protocol, "add_masked", add)
    seen = carry(secured(Drifting()))
    assert all(reason in told for told in seen.told)
    assert len(seen.told) == 2


def test_a_client_checks_what_the_server_cannot(carry: Any) -> None:
    """A value beyond the bound: the client that has it leaves itself out."""
    with pytest.raises(FurlongError, match=r"client 0: .* larger --secure\.bound"):
        carry(secured(Drifting(), bound=1.0))


# ---------------------------------------------------------------- what cannot be had


AVERAGING = [name for name, row in METHODS.items() if issubclass(row.cls, Averaging)]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedca", {}, "projections of single images"),
    ("fcl", {}, "feature vectors"),
    ("mfcl", {}, "representations of single images"),
    ("orchestra", {}, "centroids"),
    ("fedsc", {}, "moments of all others"),
    ("ldawa", {}, "server.rule = ldawa"),
    ("fedu2", {}, "server.rule = eua"),
    *[
        ("fedsimclr", {"server.rule": rule, "clients": 7}, f"server.rule = {rule}")
        for rule in COLLECTED
    ],
    ("fedsimclr", {"evaluate.angles": 8}, "evaluate.angles"),
    ("fedsimclr", {"server.outlier": 5.0}, "server.outlier"),
    ("fedsimclr", {"flower.encoding": "int8"}, "cannot be rounded"),
    ("fedsimclr", {"flower.encoding": "float16"}, "cannot be rounded"),
    ("fedsimclr", {"model.adapter": "lora4", "model.adapter_average": "products"}, "factors"),
    ("fedsimclr", {"clients": 2}, "secure.fewest"),
    ("fedsimclr", {"clients": 5, "fraction": 0.4}, "secure.fewest"),
]


@pytest.mark.parametrize(("method", "options", "reason"), REFUSED)
def test_what_needs_single_clients_is_refused(
    method: str, options: dict[str, Any], reason: str
) -> None:
    settings = tiny(method, secure=True, **options)
    with pytest.raises(FurlongError, match=reason.replace(".", r"\.")) as error:
        wrapped(settings.make_method(), settings, settings.data.clients or 3)
    assert "leave --secure out" in str(error.value) or "--secure.fewest" in str(error.value)


@pytest.mark.parametrize("method", AVERAGING)
def test_every_method_that_averages_can_be_secured(method: str) -> None:
    settings = tiny(method, secure=True)
    if settings.server.rule != "mean":
        return  # a name that stands for a rule, see above
    assert isinstance(wrapped(settings.make_method(), settings, 3), Secured)


@pytest.mark.parametrize("engine", ["inprocess", "flower"])
def test_nobody_looks_at_the_size_of_single_updates(engine: Any) -> None:
    settings = replace_in(tiny("fedsimclr"), "run", engine=engine)
    assert _outlier(settings) is not None
    assert _outlier(replace_in(settings, "secure", sums=True)) is None


def replace_in(settings: Any, section: str, **values: Any) -> Any:
    return replace(settings, **{section: replace(getattr(settings, section), **values)})


def test_without_it_nothing_changes() -> None:
    settings = tiny("fedsimclr")
    assert not isinstance(wrapped(settings.make_method(), settings, 3), Secured)


def test_the_cost_is_predicted(carry: Any) -> None:
    """What ``furlong cost`` says is what travels, but for a report's own four numbers."""
    seen = carry(secured(Drifting()))
    server = without_data(tiny("fedsimclr"), {0: 5, 1: 9, 2: 2, 3: 7})
    server.method = secured(Drifting())
    for cost, result in zip(predict(server), seen.results, strict=True):
        assert cost.cohort == result.cohort
        assert cost.down == result.down
        extra = 4 * len(result.cohort) * 8
        assert cost.up.total + extra == result.up.total
