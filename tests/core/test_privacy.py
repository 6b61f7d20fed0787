"""What the accountant says, what the ledger keeps, and what noise is made of."""

from __future__ import annotations

import math
import stat
import sys
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import kstest, norm

from furlong.core import privacy
from furlong.core.noise import KEY, Noise, digest, secret_in
from furlong.core.privacy import Ledger, PrivacySettings, Release, epsilon_of, noise_for
from furlong.errors import FurlongError


def delta_of_one_step(q: float, noise: float, epsilon: float) -> float:
    """The larger hockey-stick divergence between N(0, σ²) and (1-q)N(0, σ²) + qN(1, σ²)."""

    def masses(ratio: float) -> tuple[float, float]:
        """Of the mixture and of N(0, σ²), where the former is at least ``ratio`` the latter."""
        at = noise**2 * math.log((q - 1 + ratio) / q) + 0.5
        alone = norm.sf(at / noise)
        return (1 - q) * alone + q * norm.sf((at - 1) / noise), alone

    mixture, alone = masses(math.exp(epsilon))
    forward, backward = mixture - math.exp(epsilon) * alone, 0.0
    if math.exp(-epsilon) > 1 - q:  # else the loss is never so large this way
        mixture, alone = masses(math.exp(-epsilon))
        backward = (1 - alone) - math.exp(epsilon) * (1 - mixture)
    return float(max(forward, backward))


@pytest.mark.parametrize(("q", "noise"), [(1.0, 1.0), (1.0, 4.0), (0.1, 0.8), (0.5, 1.5)])
def test_one_release_has_the_epsilon_of_the_formula(q: float, noise: float) -> None:
    delta = 1e-5
    exact = brentq(lambda e: delta_of_one_step(q, noise, e) - delta, 1e-6, 60)
    assert exact * (1 - 1e-6) <= epsilon_of((Release(q, noise, 1),), delta) <= exact + 2e-3


@pytest.mark.parametrize(
    ("q", "noise", "count"), [(0.01, 1.1, 1000), (0.2, 3.0, 50), (1.0, 5.0, 9)]
)
def test_many_releases_are_a_little_below_renyi(q: float, noise: float, count: int) -> None:
    """dp-accounting's other accountant, whose orders from 2 on are enough here."""
    renyi = dp_accounting.rdp.RdpAccountant(orders=[2 + i / 4 for i in range(200)])
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise))
    renyi.compose(event, count)
    bound = renyi.get_epsilon(1e-5)
    assert 0.8 * bound < epsilon_of((Release(q, noise, count),), 1e-5) < bound


def test_releases_add_up_whatever_their_noise() -> None:
    both = (Release(1.0, 2.0, 3), Release(1.0, 4.0, 5))
    one = Release(1.0, (3 / 4 + 5 / 16) ** -0.5, 1)
    assert epsilon_of(both, 1e-5) == pytest.approx(epsilon_of((one,), 1e-5))
    mixed = epsilon_of((Release(0.5, 2.0, 3), Release(1.0, 4.0, 5)), 1e-5)
    assert epsilon_of((Release(1.0, 4.0, 5),), 1e-5) < mixed < epsilon_of(both, 1e-5)
    assert epsilon_of((), 1e-5) == 0


@pytest.mark.parametrize(("q", "count"), [(1.0, 40), (0.1, 6)])
def test_the_noise_is_the_least_that_keeps_the_budget(q: float, count: int) -> None:
    noise = noise_for(3.0, q, count, 1e-5)
    assert epsilon_of((Release(q, noise, count),), 1e-5) <= 3.0
    assert epsilon_of((Release(q, 0.995 * noise, count),), 1e-5) > 3.0


def test_without_the_package_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(FurlongError, match=r"pip install 'furlong-fl\[privacy\]'"):
        privacy.epsilon_of.__wrapped__((Release(1.0, 1.0, 1),), 1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either a budget"),
        ({"epsilon": 8.0, "noise": 1.0}, "not both"),
        ({"noise": 1.0, "noise_at": "clients"}, "level client"),
        ({"level": "client", "noise": 1.0, "group": 4}, "level record"),
        ({"noise": 0.1}, "at least 0.3"),
    ],
)
def test_settings_that_contradict_themselves(given: dict[str, object], words: str) -> None:
    with pytest.raises(FurlongError, match=words):
        PrivacySettings(**{"level": "record", **given})  # type: ignore[arg-type]


def test_delta_is_far_below_one_in_all() -> None:
    settings = PrivacySettings(level="record", noise=1.0)
    assert settings.delta_of(100) == 1e-5
    assert settings.delta_of(1_000_000) == pytest.approx(1e-7)


@pytest.mark.parametrize("delta", [0.9, 0.01])
def test_a_delta_that_lets_a_unit_be_published_is_refused(delta: float) -> None:
    """Who publishes one of 100 images, drawn at random, is (0, 1/100)-differentially private."""
    settings = PrivacySettings(level="record", epsilon=1.0, delta=delta)
    with pytest.raises(FurlongError, match=r"protects nobody.*--privacy.delta 1e-05"):
        settings.delta_of(100)
    assert replace(settings, delta=0.009).delta_of(100) == 0.009


# ---------------------------------------------------------------- the ledger


def test_the_ledger_counts_results_and_not_tries(tmp_path: Path) -> None:
    release = Release(1.0, 2.0, 1)
    ledger = Ledger(tmp_path)
    ledger.add(0, [(0, "a", release), (1, "b", release)])
    once = ledger.epsilon(1e-5)
    ledger.add(0, [(0, "a", release), (1, "b", release)])  # computed again, with the same result
    assert ledger.epsilon(1e-5) == once == epsilon_of((release,), 1e-5)
    again = Ledger(tmp_path)  # another process
    assert again.epsilon(1e-5) == once
    again.add(0, [(1, "c", release)])  # computed again, with another one
    assert again.rounds(1) == 2
    assert again.epsilon(1e-5) == epsilon_of((Release(1.0, 2.0, 2),), 1e-5)
    assert Ledger(tmp_path).epsilon(1e-5) == again.epsilon(1e-5)


def test_what_is_pending_counts_unless_it_was_there_before(tmp_path: Path) -> None:
    release, ledger = Release(1.0, 2.0, 1), Ledger(tmp_path)
    ledger.add(0, [(0, "a", release)])
    once, twice = (epsilon_of((Release(1.0, 2.0, n),), 1e-5) for n in (1, 2))
    assert ledger.epsilon(1e-5, {0: release}, now=0) == once
    assert ledger.epsilon(1e-5, {0: release}, now=1) == twice


def test_a_damaged_ledger_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "spent.json").write_text("[[1,")
    with pytest.raises(FurlongError, match="damaged"):
        Ledger(tmp_path)


# ---------------------------------------------------------------- noise


def test_noise_is_normal_and_repeats_only_for_the_same_secret() -> None:
    stream = Noise(b"s" * 32, "here", 1)
    first = stream.normal((100, 101))
    assert kstest(first.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([first[:, 0], first[:, 51]]))[0, 1])) < 0.4
    assert torch.equal(first, Noise(b"s" * 32, "here", 1).normal((100, 101)))
    others = [
        stream.normal((100, 101)),  # what comes next
        Noise(b"t" * 32, "here", 1).normal((100, 101)),
        Noise(b"s" * 32, "here", 2).normal((100, 101)),
    ]
    for other in others:
        assert abs(float((first * other).mean())) < 0.05
    assert kstest(stream.uniform(10_000).numpy(), "uniform").pvalue > 1e-3
    assert sorted(stream.order(50).tolist()) == list(range(50))
    assert len(stream.normal((0,))) == 0


def test_a_secret_is_kept_for_its_owner_and_never_made_anew(tmp_path: Path) -> None:
    secret = secret_in(tmp_path)
    assert len(secret) == 32
    assert secret_in(tmp_path, begun=True) == secret
    assert stat.S_IMODE((tmp_path / KEY).stat().st_mode) == 0o600
    assert secret_in(tmp_path / "other") != secret
    (tmp_path / KEY).unlink()
    with pytest.raises(FurlongError, match="second time"):
        secret_in(tmp_path, begun=True)


def test_a_digest_sees_every_bit() -> None:
    value = {"w": torch.zeros(3)}
    assert digest(value) == digest({"w": torch.zeros(3)})
    assert digest(value) != digest({"w": torch.tensor([0.0, 0.0, 1e-40])})
    assert digest(value) != digest({"v": torch.zeros(3)})


@pytest.mark.parametrize("given", [{"epsilon": 8.0}, {"noise": 1.0}])
def test_a_budget_without_a_level_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(FurlongError, match="nobody would be protected"):
        PrivacySettings(**given)
