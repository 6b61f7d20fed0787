"""Every reader of bytes from elsewhere, and damage for it: by chance, or guided by coverage.

``python tests/chaos/chaos.py --fuzz READER --seconds N`` lets atheris look for inputs that reach
new code of furlong (``pip install '.[chaos]'``). Without atheris inputs are mutated by chance.
A reader may answer or raise what it is allowed to; anything else is a finding.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import tiny
from fake_runs import make
from federations import parts, work
from PIL import Image

from furlong.core.context import Exchange
from furlong.core.layout import PayloadError
from furlong.core.method import Report
from furlong.core.payload import pack, pack_tensors, unpack
from furlong.data import images
from furlong.data.shapes import shapes
from furlong.deploy import keys, proxy
from furlong.engines.codec import decode, encode
from furlong.engines.pool import can_fork
from furlong.errors import FurlongError
from furlong.methods.base import Model
from furlong.runs import checkpoint, config, saved_encoder
from furlong.runs.prepare import prepare
from furlong.runs.record import RunRecord

ALLOWED = (FurlongError, PayloadError)


@dataclass(frozen=True)
class Reader:
    """``read`` takes bytes; ``samples`` are whole ones, from which mutations start."""

    samples: list[bytes]
    read: Callable[[bytes], Any]


def readers(folder: Path) -> dict[str, Reader]:
    """All of them, with their files in ``folder``."""
    weights = {"a.weight": torch.randn(8, 4), "bn.running_var": torch.ones(3), "n": torch.tensor(1)}
    report = Report(1, 5, 10, Model(weights), {"loss": 1.0, "images": 10.0})
    base = {"upload": Model(weights)}
    packed = [bytes(pack(report)), bytes(encode(report, "int8", base)[0])]
    run = make(folder / "run", rounds=2)
    saved = folder / "saved"
    checkpoint.save(saved, 1, Model(weights), [(0, pack(Model(weights)))], {"seconds": 1.0})
    found = {
        "payload": Reader(packed[:1], lambda data: unpack(bytearray(data))),
        "encoded answer": Reader(packed, lambda data: decode(bytearray(data), base)),
        "node: question": _node(folder),
        "node: download": _download(folder),
    }
    for name in ("manifest.json", "server.safetensors", "client-00000.safetensors"):
        path = saved / "checkpoints" / "000001" / name
        found[f"checkpoint: {name}"] = _file(path, lambda: checkpoint.load(saved))
    record: dict[str, Callable[[], Any]] = {
        "summary.json": lambda: RunRecord(run).summary,
        "partition.json": lambda: RunRecord(run).split,
        "encoder.json": lambda: RunRecord(run).encoder,
        "digests.json": lambda: RunRecord(run).verify("config.toml"),
        "metrics.jsonl": lambda: (RunRecord(run).lines(), RunRecord(run).damaged_lines),
        "config.toml": lambda: config.load(run / "config.toml"),
        "evaluations.json": lambda: RunRecord(run).results,
        "federation.json": lambda: RunRecord(run).federation,
    }
    row = {"who": "federated", "protocol": "semi-10", "labels": 0.1, "accuracy": 0.5}
    (run / "evaluations.json").write_text(json.dumps([row]))
    about = {"run": "ab" * 16, "begun": True, "sites": [{"name": "a", "images": 3}], "channels": 3}
    (run / "federation.json").write_text(json.dumps(about))
    found |= {f"run folder: {name}": _file(run / name, read) for name, read in record.items()}
    return found | _encoders(folder) | _pictures(folder) | _keys(folder)


def _file(path: Path, read: Callable[[], Any]) -> Reader:
    """A reader of one file among whole others."""

    def damaged(data: bytes) -> Any:
        whole = path.read_bytes()
        path.write_bytes(data)
        try:
            return read()
        finally:
            path.write_bytes(whole)

    return Reader([path.read_bytes()], damaged)


def _encoders(folder: Path) -> dict[str, Reader]:
    from furlong.core.weights import snapshot
    from furlong.nn.encoders import build_encoder
    from furlong.runs.folder import RunFolder

    own = folder / "encoder"
    own.mkdir()
    about = {"encoder": "small", "channels": 3, "image_size": 16, "augment": "shapes", "width": 192}
    RunFolder(own).save_encoder(snapshot(build_encoder("small", 3, 16)), about)
    (own / "digests.json").unlink()  # or nothing but the digest would be tested
    alone = folder / "alone.safetensors"
    weights, words = {"w": torch.zeros(3)}, {key: str(value) for key, value in about.items()}
    alone.write_bytes(bytes(pack_tensors(weights, words)))
    return {
        "encoder.json": _file(own / "encoder.json", lambda: saved_encoder.load_encoder(own)),
        "encoder: a file": _file(alone, lambda: saved_encoder.load_encoder(alone)),
    }


def _pictures(folder: Path) -> dict[str, Reader]:
    pixels = shapes(4, size=16, seed=1).pixels.permute(0, 2, 3, 1).numpy()
    found = {}
    for kind in ("png", "jpeg", "bmp", "tiff"):
        place = folder / kind / "site"
        place.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(pixels[number]).save(place / f"{number}.{kind}")

        def read(place: Path = place.parent) -> Any:
            return images.load(f"folder:{place}", "train", image_size=16)

        found[f"image: {kind}"] = _file(place / f"0.{kind}", read)
    table = folder / "table" / "images.parquet"
    table.parent.mkdir()
    _parquet(table, pixels)
    read_table = _file(
        table, lambda: images.load(f"parquet:{table.parent}", "train", image_size=16)
    )
    listed = folder / "listed.csv"
    lines = [f"png/site/{n}.png,a" for n in range(3)]
    listed.write_text("\n".join(["path,site", *lines]) + "\n")
    read_list = _file(
        listed,
        lambda: images.load(f"manifest:{listed}", "train", image_size=16, root=str(folder)),
    )
    return found | {"parquet": read_table, "manifest": read_list}


def _parquet(path: Path, pixels: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number in range(3):
        buffer = io.BytesIO()
        Image.fromarray(pixels[number]).save(buffer, "png")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": number % 2})
    pq.write_table(pa.Table.from_pylist(rows), path)


def _keys(folder: Path) -> dict[str, Reader]:
    from furlong.deploy import certs

    certs.make_certs(folder / "fed", ["localhost"], ["a"])
    server = folder / "fed" / "server"
    public = next(server.glob("nodes/*"))
    return {
        "ports.json": _file(
            server / "ports.json", lambda: proxy.read_ports(server, lambda _: None)
        ),
        "node.pub": _file(public, lambda: keys.read_public(public)),
    }


def _node(folder: Path) -> Reader:
    """What a server says to a node: JSON of any shape, which is answered or refused."""
    (site,) = parts(folder / "asked", 1)
    kinds = [work(kind=kind) for kind in ("hello", "fetch", "given", "end", "work")]

    def read(data: bytes) -> Any:
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return site.answer(header, b"x") if isinstance(header, dict) else None

    return Reader([json.dumps(header).encode() for header in kinds], read)


def _download(folder: Path) -> Reader:
    """A download of a node whose question is right; it must not train on nonsense for long."""
    p = prepare(tiny("fedsimclr", rounds=1, **{"data.images": 12, "data.test_images": 4}))
    down = bytes(pack(p.method.download(p.server.init(), 0, p.server.context(Exchange(0)))))
    assert can_fork(p.setup.device)
    (site,) = parts(folder / "sent", 1)
    return Reader([down[:4096], down], lambda data: site.answer(work(), data[:-1]))


# ---------------------------------------------------------------- damage by chance


def mutated(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to four changes: flips, cuts, copies, other numbers, pieces of other samples."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randrange(len(found) + 1), chance.choice((1, 2, 4, 8, 64))
        match chance.randrange(7):
            case 0 if found:
                found[at % len(found)] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + size]
            case 2:
                del found[at:]
            case 3:
                found[at:at] = found[at : at + size]
            case 4:
                found[at : at + size] = chance.randbytes(size)
            case 5:
                number = chance.choice((0, 1, 2**31, 2**39, 2**62, 2**63 - 1))
                found[at : at + 8] = number.to_bytes(8, "little")
            case _:
                other = chance.choice(others)
                start = chance.randrange(len(other) + 1)
                word = chance.choice((b"-1", b"1e999", b"null", b"[]", b"{}", b'""', b"NaN"))
                found[at : at + size] = word if chance.random() < 0.5 else other[start : start + 64]
    return bytes(found)


def by_chance(reader: Reader, tries: int, seed: int) -> list[str]:
    """What was found: an exception that is not allowed, for each bad input."""
    chance, findings = random.Random(seed), []
    for _ in range(tries):
        data = mutated(chance, chance.choice(reader.samples), reader.samples)
        try:
            reader.read(data)
        except ALLOWED:
            pass
        except Exception as error:
            findings.append(f"{type(error).__name__}: {str(error)[:200]} on {data[:60]!r}")
    return findings


# ---------------------------------------------------------------- guided by coverage


def guided(name: str, seconds: int, seed: int) -> None:
    """Never returns: atheris ends the process, with code 0 if nothing was found."""
    import atheris

    folder = Path(tempfile.mkdtemp(prefix="furlong-fuzz-"))
    try:
        reader = readers(folder)[name]
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, sample in enumerate(reader.samples):
            (corpus / str(number)).write_bytes(sample)
        for module in [m for n, m in sys.modules.items() if n.startswith("furlong.")]:
            for key, value in list(vars(module).items()):
                own = getattr(value, "__module__", "") == module.__name__
                if own and type(value).__name__ == "function":
                    setattr(module, key, atheris.instrument_func(value))

        def once(data: bytes) -> None:
            with suppress(*ALLOWED):
                reader.read(data)

        longest = 4 * max(map(len, reader.samples)) + 4096
        options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={longest}"]
        options += ["-rss_limit_mb=4096", "-timeout=120", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], once)
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
