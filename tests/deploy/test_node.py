"""A node's own protection: its worker may hang or die, its disk may be full."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pinned, tiny
from federations import Direct, failures, flower, hello, in_process, parts, train, weights
from PIL import Image

from furlong.cli import main
from furlong.core.context import Exchange
from furlong.core.exchange import Kept
from furlong.core.noise import KEY, secret_in
from furlong.core.privacy import LEDGER, Ledger, PrivacySettings
from furlong.deploy.agreement import Refusal, settings_of
from furlong.deploy.disclosure import disclosure
from furlong.deploy.node import OwnImages, Site, without_paths
from furlong.deploy.states import StateFiles
from furlong.errors import FurlongError
from furlong.runs import loop
from furlong.runs.config import Config, from_tree
from furlong.runs.nodes import participate, told

BAD = """
import os, signal, time
from dataclasses import dataclass
from furlong.core.method import Local
from furlong.methods.fedsimclr import FedSimCLR

@dataclass(frozen=True)
class Bad(FedSimCLR):
    how: str = "sleep"
    def local_update(self, state, down, ctx):
        if ctx.client == 2 and ctx.exchange.round == 1:
            if self.how == "sleep":
                time.sleep(3600)
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the scanner is on fire")
        if self.how == "sleep":  # the others answer at once: a busy machine must not make them late
            return Local(state, down)
        return super().local_update(state, down, ctx)
"""


def test_a_node_reads_a_manifest_as_the_run_says(tmp_path: Path) -> None:
    """Window and channels are the run's, so that all sites see alike; weights are the site's."""
    for k in range(4):
        deep = np.full((16, 16), 1000 * k, np.uint16)
        Image.fromarray(deep).save(tmp_path / f"{k}.png")
    rows = [f"{k}.png,{1 + (k == 3)},p{k}" for k in range(4)]
    (tmp_path / "m.csv").write_text("\n".join(["path,weight,patient", *rows]))
    site = Site(tmp_path / "s", OwnImages(f"manifest:{tmp_path / 'm.csv'}"), name="amber")
    told_run = tiny(**{"data": "sites", "data.image_size": 16, "data.window": "0:4000",
                       "data.channels": 1, "data.augment": "flip"})  # fmt: skip
    settings = from_tree(told(told_run), {}, "the run")
    found = site.images(16, settings.data.reading)
    assert tuple(found.pixels.shape) == (5, 1, 16, 16)
    assert found.pixels[:, 0, 0, 0].tolist() == [0, 64, 128, 191, 191]
    assert found.labels is None
    private = replace(settings, privacy=PrivacySettings("record", noise=1.0))
    with pytest.raises(FurlongError, match="there several times"):  # two records are one image
        participate(private, found, {0: 5, 1: 5}, 0)


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("sleep", "lost", "no answer within"),
        ("die", "lost", "its worker process ended (SIGKILL)"),
        ("raise", "raised", "the scanner is on fire"),
    ],
)
def test_one_bad_node(tmp_path: Path, how: str, kind: str, reason: str) -> None:
    """It answers for itself, the round goes on, and it takes part in the next one."""
    (tmp_path / "bad.py").write_text(BAD)
    options = {"rounds": 3, "method.how": how, "run.deadline": 5}
    settings = flower(tmp_path, f"{tmp_path / 'bad.py'}:Bad", **options)
    sites = parts(tmp_path, isolate=True, code=True)
    train(settings, wire=Direct(sites))
    found = failures(tmp_path)
    assert [[f["client"] for f in line] for line in found] == [[], [2], []]
    assert found[1][0]["kind"] == kind
    assert reason in found[1][0]["reason"]


def test_isolated_clients_give_the_same_bits(tmp_path: Path) -> None:
    run = train(flower(tmp_path, "fedema"), wire=Direct(parts(tmp_path, isolate=True)))
    assert weights(run) == in_process(tmp_path, "fedema")


def test_a_full_disk_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: StateFiles, client: int, packed: Any, what: str = "state") -> None:
        if client == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, client, packed, what)

    put = StateFiles.put
    monkeypatch.setattr(StateFiles, "put", full)
    train(flower(tmp_path, "fedema"), wire=Direct(parts(tmp_path)))
    for line in failures(tmp_path):
        assert [(f["client"], "No space left" in f["reason"]) for f in line] == [(2, True)]


def test_states_of_exchanges_that_can_be_gone_back_to(tmp_path: Path) -> None:
    store = StateFiles(tmp_path / "run")
    for exchange in range(6):
        store.at(3, exchange, exchange - 1 if exchange else None, oldest=max(0, exchange - 1))
        before = store.get(3)
        assert (before and bytes(before)) == (
            f"after {exchange - 1}".encode() if exchange else None
        )
        store.put(3, f"after {exchange}".encode())
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert kept == [f"00003-{n:06d}.state.safetensors" for n in (3, 4, 5)]
    store.at(3, 5, 4, oldest=4)  # the server was killed during exchange 5: it asks again
    assert bytes(store.get(3) or b"") == b"after 4"
    store.at(3, 4, 3, oldest=4)  # its newest checkpoint was damaged
    assert bytes(store.get(3) or b"") == b"after 3"
    assert StateFiles(tmp_path / "run").get(4) is None


def test_run_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    site = Site(tmp_path / "state", part=0)
    said, _ = site.answer({**hello(), "kind": "end", "run": "../" * 8})
    assert "not the name of a run" in said["refused"]


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_lossy_transport(tmp_path: Path, encoding: str) -> None:
    """Fewer bytes, nearly the same weights, and what rounding lost is kept on the node."""
    kept: list[Path] = []
    up: list[int] = []

    def listen(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        up.append(len(body))
        kept.extend(tmp_path.rglob("*.residual.safetensors"))
        return header, body

    wire = Direct(parts(tmp_path), up=listen)
    options = {"flower.encoding": encoding, "rounds": 3, "optimiser.lr": 0.01}
    lossy = train(flower(tmp_path, **options), wire=wire)
    exact_sizes: list[int] = []

    def measure(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        exact_sizes.append(len(body))
        return header, body

    exact = Direct(parts(tmp_path / "again"), up=measure)
    same = {k: v for k, v in options.items() if k != "flower.encoding"}
    run = train(flower(tmp_path / "exact", **same), wire=exact)
    assert max(up) < max(exact_sizes) * {"float16": 0.56, "int8": 0.32}[encoding]
    assert kept
    ours, theirs = (
        torch.cat([p.detach().flatten() for p in made.encoder.parameters()])
        for made in (lossy, run)
    )
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert weights(lossy) != weights(run)


# ---------------------------------------------------------------- what would leave


def site_of(folder: Path, **options: Any) -> Site:
    """A site with fifty images that agrees to a run."""
    given = {"data": "sites", "data.image_size": 16, **pinned(options["method"]), **options}
    own = OwnImages("shapes", limit=50)
    return Site(folder, own, name="amber", agree=from_tree({}, given, "test"))


def test_what_would_leave(tmp_path: Path) -> None:
    found = disclosure(site_of(tmp_path, method="fedsimclr", clients=4, rounds=7))
    assert (found.images, found.answers) == (50, 7)
    assert {field.kind for field in found.fields} <= {"params", "buffers"}
    once = sum(field.bytes for field in found.fields)
    assert found.total == 7 * once
    run = loop.run(tiny("fedsimclr", out=str(tmp_path / "run"), **{"evaluate.probe": "none"}))
    line = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(line["bytes_up"] / 3 - once) < 200  # the report's own numbers


def test_features_are_called_features(tmp_path: Path) -> None:
    given = {"method": "fcl", "clients": 2, "rounds": 2, "method.bank": 16, "method.neighbours": 3}
    assert any(field.kind == "features" for field in disclosure(site_of(tmp_path, **given)).fields)


def test_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command shows it, sends nothing, and names no path but those that were given."""
    monkeypatch.setenv("COLUMNS", "200")
    agree = tmp_path / "agree.toml"
    settings = site_of(tmp_path, method="fedsimclr", clients=4, rounds=7).agree
    assert settings is not None
    agree.write_text(settings.toml())
    words = ["node", "--data", "shapes", "--images", "50", "--name", "amber", "--dry-run"]
    with suppress(SystemExit):
        main([*words, "--agree", str(agree), "--state", str(tmp_path / "state")])
    said = capsys.readouterr().out
    assert "amber" in said
    assert "50" in said
    assert "7 answers" in said
    assert str(tmp_path) not in said
    assert not (tmp_path / "state").exists()


# ---------------------------------------------------------------- what must not leave


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("No such file: '/data/my scans/x.png'", "No such file: …"),
        (
            "OSError: cannot open /data/scans/x.png (folder.py:12)",
            "OSError: cannot open … (folder.py:12)",
        ),
        ("folder:/data/scans is empty", "… is empty"),
        ("scans/amber/1.png is damaged", "… is damaged"),
        ("training diverged: upload", "training diverged: upload"),
    ],
)
def test_paths_are_cut_out(text: str, safe: str) -> None:
    assert without_paths(text) == safe


def test_a_folder_that_vanished_is_not_named_to_the_server(tmp_path: Path) -> None:
    said: list[str] = []
    site = Site(tmp_path, OwnImages(f"folder:{tmp_path / 'gone'}"), name="amber", say=said.append)
    given = {"method": "fedsimclr", "data": "sites", "data.image_size": 16, "clients": 2}
    told_ = told(from_tree({}, given, "test"))
    answer, _ = site.answer({**hello(), "config": told_})
    assert answer == {
        "failed": "raised",
        "reason": "the site's images cannot be read; its own log says why",
    }
    assert any("gone" in text for text in said)


PRIVATE = {"privacy.level": "record", "model.early_norm": "all_gn", "privacy.max_ratio": "inf"}


def test_a_site_answers_once_under_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server says: the same question gets the same answer, another one none."""
    settings = tiny("fedrot", **PRIVATE, **{"privacy.epsilon": 4.0})
    party, site = participate(settings, None, {}), Site(tmp_path, part=0)
    header = {"run": "ab" * 16}
    (tmp_path / "runs" / header["run"]).mkdir(parents=True)
    secret_in(tmp_path / "spent" / header["run"])
    first, second, third = (Exchange(k, index=k) for k in range(3))  # there are to be two rounds
    patient = replace(settings, train=replace(settings.train, min_clients=1))
    down, other = {"weight": torch.zeros(2)}, {"weight": torch.ones(2)}
    mine = Kept(down, down, (down,))
    for known in (settings, settings, patient):  # the run went back to a checkpoint
        site._spend(header, known, party, 0, first, mine, down)
    faster = replace(settings, optimiser=replace(settings.optimiser, lr=0.5))
    for about, known, exchange, kept, sent in (
        (header, settings, first, mine, other),
        (header, settings, first, None, down),
        (header, settings, first, replace(mine, state=other), down),
        (header, settings, first, replace(mine, stats=other), down),
        (header, settings, first, replace(mine, moments=(other,)), down),
        ({**header, "sizes": {"0": 24, "1": 10_000}}, settings, first, mine, down),
        (header, faster, first, mine, down),
    ):
        with pytest.raises(Refusal, match="spend the privacy budget twice"):
            site._spend(about, known, party, 0, exchange, kept, sent)
    for asked in (third, replace(first, round=1), replace(second, clients=(0, 1))):
        with pytest.raises(Refusal, match="not one of this run's"):
            site._spend(header, settings, party, 0, asked, mine, down)
    other_noise = replace(party, method=replace(party.method, secret=32 * b"a"))
    with pytest.raises(Refusal, match=r"another noise\.key"):  # the file was lost and made anew
        site._spend(header, settings, other_noise, 0, first, mine, down)
    images = replace(party.federation.images, pixels=party.federation.images.pixels.flip(0))
    other_images = replace(party, federation=replace(party.federation, images=images))
    with pytest.raises(Refusal, match="from other images"):
        site._spend(header, settings, other_images, 0, first, mine, down)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        with pytest.raises(Refusal, match="on another machine"):
            site._spend(header, settings, party, 0, first, mine, down)
    with pytest.raises(Refusal, match=r"as client 0 of this run\. As client 1"):
        site._spend(header, settings, party, 1, second, mine, down)
    plain = tiny("fedrot")
    with pytest.raises(Refusal, match="began with a privacy budget"):
        site._spend(header, plain, participate(plain, None, {}), 0, second, mine, down)
    less = tiny("fedrot", **PRIVATE, **{"privacy.epsilon": 2.0})
    with pytest.raises(FurlongError, match="used up"):
        site._spend(header, less, participate(less, None, {}), 0, second, mine, down)
    site._spend(header, settings, party, 0, second, mine, down)


def test_an_accelerator_is_charged_for_every_answer(tmp_path: Path) -> None:
    """Its answers to the same question differ, and so does their noise."""
    settings = tiny("fedrot", **PRIVATE, **{"privacy.epsilon": 4.0})
    party, header = participate(settings, None, {}), {"run": "ab" * 16}
    first, down = Exchange(0, index=0), {"w": torch.zeros(2)}
    place = tmp_path / "spent" / header["run"]
    secret_in(place)
    party = replace(party, setup=replace(party.setup, device=torch.device("cuda")))
    for asked in (1, 2):
        Site(tmp_path, part=0)._spend(header, settings, party, 0, first, None, down)
        assert Ledger(place).rounds(0) == asked
    with pytest.raises(FurlongError, match="budget is used up"):
        Site(tmp_path, part=0)._spend(header, settings, party, 0, first, None, down)


def test_the_secret_of_a_run_is_gone_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets the site's disk later cannot take the noise away; the account stays."""
    settings, site = tiny("fedrot", **PRIVATE, **{"privacy.epsilon": 4.0}), Site(tmp_path, part=0)
    header = {"run": "ab" * 16, "config": told(settings), "client": 0}
    other = {**header, "run": "cd" * 16}
    place, first, down = (
        tmp_path / "spent" / header["run"],
        Exchange(0, index=0),
        {"w": torch.zeros(2)},
    )
    (tmp_path / "runs" / header["run"]).mkdir(parents=True)
    party, _ = site._join(header, settings)
    assert party.method.secret == (place / KEY).read_bytes()
    assert site._join(other, settings)[0].method.secret != party.method.secret
    assert not (tmp_path / KEY).exists()
    again = Site(tmp_path, part=0)._join(header, settings)[0]  # a node that began anew
    assert again.method.secret == party.method.secret
    site._spend(header, settings, party, 0, first, None, down)
    said: list[str] = []
    site.say = said.append
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: os.stat("/nowhere"))
        site._end(header, b"")
    assert any("noise.key cannot be deleted" in text for text in said)
    (tmp_path / "runs" / header["run"]).mkdir(parents=True)
    assert site._end(header, b"")[0] == {"ended": True}
    assert not (place / KEY).exists()
    assert (place / LEDGER).exists()
    with pytest.raises(Refusal, match="has ended here"):  # of a process that knows the secret
        site._spend(header, settings, party, 0, first, None, down)
    with pytest.raises(Refusal, match="has ended here"):
        site._join(header, settings)


def test_two_questions_at_once_do_not_spend_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On plain Flower several processes may answer for one site."""
    settings = tiny("fedrot", **PRIVATE, **{"privacy.epsilon": 4.0})
    party, header = participate(settings, None, {}), {"run": "ab" * 16}
    first = Exchange(0, index=0)
    secret_in(tmp_path / "spent" / header["run"])
    marks = Ledger.marks

    def slow(self: Ledger, exchange: int, client: int) -> set[str]:
        found = marks(self, exchange, client)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(Ledger, "marks", slow)

    def ask(value: float) -> bool:
        down = {"w": torch.full((2,), value)}
        try:
            Site(tmp_path, part=0)._spend(header, settings, party, 0, first, None, down)
        except Refusal:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(ask, (0.0, 1.0))) == [False, True]
    assert Ledger(tmp_path / "spent" / header["run"]).rounds(0) == 1


def test_clients_of_a_simulation_have_an_account_each(tmp_path: Path) -> None:
    """They have one folder, as on Ray, and one secret."""
    sites = [Site(tmp_path / "all", part=k, device="cpu", shared=True) for k in range(3)]
    run = train(flower(tmp_path, "fedrot", **PRIVATE, **{"privacy.epsilon": 4.0}), Direct(sites))
    assert run.summary["privacy"]["releases"] == 2
    assert failures(tmp_path) == [[], []]
    accounts = sorted((tmp_path / "all" / "spent").glob(f"*/*/{LEDGER}"))
    assert [path.parent.name for path in accounts] == ["0", "1", "2"]


def test_a_server_cannot_make_shares_of_noise_smaller() -> None:
    """The more clients must answer, the less noise each adds: a site agrees to their number."""
    shares = {**PRIVATE, "privacy.level": "client", "privacy.noise": 1.0}
    shares |= {"privacy.noise_at": "clients", "train.min_clients": 2}
    mine, theirs = (tiny("fedsimclr", **{**shares, "train.min_clients": m}) for m in (2, 3))

    def agreed(settings: Config, agree: Config) -> Config:
        header = {"config": told(settings)}
        return settings_of(header, agree=agree, code=True, own=False, device="cpu")

    assert agreed(mine, mine).train.min_clients == 2
    with pytest.raises(Refusal, match="min_clients is 3, not 2"):
        agreed(theirs, mine)
    plain = [replace(each, privacy=PrivacySettings()) for each in (theirs, mine)]
    assert agreed(*plain).train.min_clients == 3  # there it is the server's own affair


@pytest.mark.slow
def test_a_budget_across_machines_gives_the_same_bits(tmp_path: Path) -> None:
    given = {**PRIVATE, "privacy.noise": 1.0, "privacy.noise_from": "seed"}
    run = train(flower(tmp_path, "fedrot", **given), wire=Direct(parts(tmp_path)))
    assert weights(run) == in_process(tmp_path, "fedrot", **given)
    assert next(tmp_path.glob(f"node0/spent/*/{LEDGER}"))
    assert not list(tmp_path.glob(f"node0/**/{KEY}"))
