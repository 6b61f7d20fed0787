"""From a folder to neighbours: check and embed images made here, many of them broken."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny
from PIL import Image

from furlong import load, load_encoder
from furlong.cli import application, main
from furlong.data.duplicates import near_duplicates
from furlong.data.survey import Asked, Part, Seen, survey
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.reports import embed as embedding
from furlong.reports import neighbours
from furlong.reports.export import export
from furlong.runs import advice, loop


def picture(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    """Smooth colours, so that a copy of another size or format still looks the same."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def huge_png() -> bytes:
    """A few bytes that say they are 60,000×60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites with every kind of image that is met in the wild."""
    root = tmp_path_factory.mktemp("data") / "sites"
    a, b = root / "aachen", root / "bergen"
    a.mkdir(parents=True)
    b.mkdir()
    for i in range(6):
        picture(i).save(a / f"{i}.png")
        picture(100 + i, 60, 48).save(b / f"{i}.jpg", quality=95)
    picture(20).convert("L").save(a / "grey.png")
    picture(21).convert("RGBA").save(a / "alpha.png")
    picture(22).convert("CMYK").save(a / "cmyk.jpg")
    deep = np.linspace(0, 65535, 1600).reshape(40, 40).astype(np.uint16)
    Image.fromarray(deep).save(a / "deep.png")
    frames = [picture(30 + i) for i in range(3)]
    frames[0].save(a / "moving.gif", save_all=True, append_images=frames[1:])
    picture(40).save(a / "really-a-png.jpg", "PNG")
    (b / "copy.png").write_bytes((a / "0.png").read_bytes())
    picture(1).resize((80, 80)).save(b / "again.jpg", quality=90)
    whole = (a / "2.png").read_bytes()
    (b / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (b / "corrupt.jpg").write_bytes(b"\xff\xd8\xff\xe0" + b"nothing more" * 20)
    (b / "empty.png").write_bytes(b"")
    (b / "huge.png").write_bytes(huge_png())
    (b / "notes.txt").write_text("ask Ann")
    return root


GOOD = 20
BAD = {"corrupt.jpg", "empty.png", "huge.png", "notes.txt", "truncated.png"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    loop.run(tiny(out=str(out), rounds=1, **{"evaluate.probe": "none"}))
    return out


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> Any:
    """Call ``furlong WORDS`` in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def go(*words: object) -> Result:
        capsys.readouterr()
        code: Any = 0
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Result(code, captured.out, " ".join(captured.err.split()))

    return go


Call = Callable[..., Result]


# ---------------------------------------------------------------- check


def test_check_finds_everything(call: Call, sites: Path) -> None:
    found = json.loads(call("check", sites, "--json").out)
    assert found["data"] == f"folder:{sites}"
    assert found["images"] == GOOD
    assert found["sites"] == {"aachen": 12, "bergen": 8}
    assert found["classes"] == {}
    skipped = {each["name"].split("/")[-1]: each["reason"] for each in found["skipped"]}
    assert skipped.keys() == BAD
    assert "truncated" in skipped["truncated.png"]
    assert "50 megapixels" in skipped["huge.png"]
    assert skipped["empty.png"] == "empty file"
    assert found["same"]["groups"] == [["aachen/0.png", "bergen/copy.png"]]
    assert found["same"]["at_several_sites"] == found["same"]["groups"]
    assert found["alike"]["groups"] == [["aachen/1.png", "bergen/again.jpg"]]
    assert found["width"] == {"min": 40, "median": 40, "max": 80}
    assert found["formats"] == {"PNG": 11, "JPEG": 8, "GIF": 1}
    assert found["channels"]["CMYK"] == 1
    assert found["channels"]["RGB with alpha"] == 1
    assert found["channels"]["grey"] == 2
    assert found["bits"] == {"8": 19, "16": 1}
    assert found["animated"] == 1
    assert found["colourless"] == 2
    assert found["suggested"]["image_size"]["value"] == 32
    assert found["suggested"]["encoder"]["value"] == "small"


def test_check_agrees_with_what_is_loaded(call: Call, sites: Path) -> None:
    found = json.loads(call("check", sites, "--json").out)
    images = load(f"folder:{sites}", group_by="folder", image_size=32)
    assert len(images) == found["images"]
    assert {each.name: each.reason for each in images.skipped} == {
        each["name"]: each["reason"] for each in found["skipped"]
    }


def test_check_in_words(call: Call, sites: Path) -> None:
    told = call("check", f"folder:{sites}")
    assert told.code == 0
    for text in ("bergen/huge.png", "aachen/0.png = bergen/copy.png", "1 at several sites",
                 "--partition natural", "several frames", "reduced to 8"):  # fmt: skip
        assert text in told.out
    assert call("check", sites, "--strict").code == 1


def test_the_suggested_commands_are_accepted(call: Call, sites: Path) -> None:
    first, second = json.loads(call("check", sites, "--json").out)["next"]
    assert call(*first.split()[1:]).code == 0
    assert call(*second.split()[1:], "--rounds", "1", "--workers", "1").code == 0


def test_check_of_labels_splits_and_leaks(call: Call, tmp_path: Path) -> None:
    for split, start in (("train", 0), ("test", 3)):
        for site in ("x", "y"):
            for label in ("cat", "dog"):
                folder = tmp_path / "d" / split / site / label
                folder.mkdir(parents=True)
                for i in range(2):
                    seed = zlib.crc32(f"{split} {site} {label}".encode()) if i else start
                    picture(seed).save(folder / f"{i}.png")
    (tmp_path / "d/test/x/cat/leak.png").write_bytes(
        (tmp_path / "d/train/y/dog/1.png").read_bytes()
    )
    found = json.loads(call("check", tmp_path / "d", "--json", "--strict").out)
    assert "if these are patients: --holdout-by" in " ".join(call("check", "d").out.split())
    assert found["splits"] == {"train": 8, "test": 9}
    assert found["classes"] == {"cat": 9, "dog": 8}
    assert found["same"]["in_several_splits"] == [["train/y/dog/1.png", "test/x/cat/leak.png"]]


def test_check_of_a_heap_and_of_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "heap").mkdir()
    for i in range(5):
        picture(i, 300, 200).convert("L").save(tmp_path / "heap" / f"{i}.png")
    found = json.loads(call("check", "heap", "--json").out)
    assert found["sites"] == {}
    assert found["suggested"]["image_size"]["value"] == 32  # all that small sees at once
    assert "left and right" in found["suggested"]["augment"]["reason"]  # all grey
    assert "--partition iid --clients 2 " in found["next"][1]
    (tmp_path / "none").mkdir()
    assert "no file in it" in call("check", "none").err
    (tmp_path / "none" / "a.txt").write_text("x")
    assert call("check", "none").code == 1
    assert "no such folder" in call("check", "absent").err


@pytest.mark.parametrize(("count", "clients", "each"), [(4, 2, 2), (9, 4, 2), (16, 5, 3)])
def test_few_images_are_dealt_out_so_that_they_reach(
    call: Call, tmp_path: Path, count: int, clients: int, each: int
) -> None:
    (tmp_path / "heap").mkdir()
    for i in range(count):
        picture(i).save(tmp_path / "heap" / f"{i}.png")
    found = json.loads(call("check", "heap", "--json").out)
    assert f"--clients {clients} " in found["next"][1]
    reason = found["suggested"]["batch_size"]["reason"]
    assert reason == f"each of {clients} clients has {each} images only: one batch of its own size"


def test_one_image_is_too_few(call: Call, tmp_path: Path) -> None:
    (tmp_path / "heap").mkdir()
    picture(1).save(tmp_path / "heap" / "1.png")
    said = call("check", "heap").out
    assert "add images first" in said
    assert "--clients" not in said
    assert "one client has 1 image only" in " ".join(said.split())


def test_check_of_a_table(call: Call, tmp_path: Path, sites: Path) -> None:
    files = sorted((sites / "aachen").glob("?.png"))
    encoded = [{"bytes": f.read_bytes(), "path": None} for f in files] + [
        {"bytes": b"", "path": ""}
    ]
    columns = {"image": encoded, "label": [0, 1, 0, 1, 0, 1, 0], "clinic": list("aabbbba")}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = json.loads(call("check", "t.parquet", "--group-by", "clinic", "--json").out)
    assert found["images"] == 6
    assert found["sites"] == {"a": 2, "b": 4}
    assert found["classes"] == {"0": 3, "1": 3}
    assert found["skipped"] == [{"name": "row 00000006", "reason": "empty file"}]
    assert "--data.group-by clinic" in found["next"][0]


def test_flat_images_are_not_near_duplicates(tmp_path: Path) -> None:
    """They share a hash; their thumbnails tell them apart."""
    for value in (20, 90, 200):
        Image.new("RGB", (30, 30), (value,) * 3).save(tmp_path / f"{value}.png")
    assert near_duplicates(survey(Asked(str(tmp_path)))) == []


def test_many_near_duplicates_become_one_group(tmp_path: Path) -> None:
    for i in range(40):
        picture(1, 40 + i, 40 + i).save(tmp_path / f"{i:02d}.jpg", quality=90)
        picture(1000 + i).save(tmp_path / f"other-{i:02d}.png")
    (group,) = near_duplicates(survey(Asked(str(tmp_path))))
    assert len(group) == 40


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    """A manifest of two sites, six patients with four deep images each, labels and a split."""
    rows = ["path,site,patient,label,split"]
    rng = np.random.default_rng(0)
    for k in range(24):
        (tmp_path / "scans").mkdir(exist_ok=True)
        deep = rng.integers(0, 3000, (40, 40), dtype=np.uint16)
        Image.fromarray(deep).save(tmp_path / "scans" / f"{k}.png")
        split = "test" if k % 8 == 7 else "train"
        rows.append(f"scans/{k}.png,{'xy'[k // 12]},p{k // 4},{k % 2},{split}")
    (tmp_path / "cohort.csv").write_text("\n".join([*rows, "scans/gone.png,x,p0,1,train"]))
    return tmp_path / "cohort.csv"


def test_check_of_a_manifest(call: Call, cohort: Path) -> None:
    found = json.loads(call("check", cohort, "--json").out)
    assert found["data"] == f"manifest:{cohort}"
    assert found["sites"] == {"x": 12, "y": 12}
    assert found["classes"] == {"0": 12, "1": 12}
    assert found["splits"] == {"train": 21, "test": 3}
    assert found["patients"] == {"number": 6, "unknown": 0, "in_several_splits": 3}
    assert found["skipped"] == [{"name": "scans/gone.png", "reason": "there is no such file"}]
    told = " ".join(call("check", cohort).out.split())
    assert "3 of them have images in training and in test" in told
    assert "between percentiles 1 and 99 of each image" in told
    window = " ".join(call("check", cohort, "--window", "0:3000").out.split())
    assert "by values from 0 to 3000" in window
    assert "--data.window 0:3000" in window
    assert "data.window is 'wide'" in call("check", cohort, "--window", "wide").err


def test_from_a_manifest_to_neighbours(call: Call, cohort: Path) -> None:
    """partition, run, evaluate, embed and neighbours take what check has named."""
    partition, run = json.loads(call("check", cohort, "--json").out)["next"]
    assert call(*partition.split()[1:]).code == 0
    told = call(*run.split()[1:], "--rounds", "1", "--workers", "1", "--encoder", "small")
    assert told.code == 0, told.err
    assert "warning: 3 of the 3 patients" in told.err
    assert call("evaluate", "runs/mine", "--protocols", "knn").code == 0
    told = call("embed", "runs/mine", cohort, "--out", "f.parquet")
    assert "24 images" in told.out
    query = cohort.parent / "scans" / "3.png"
    for inside in ("f.parquet", cohort):
        words = ("neighbours", "runs/mine", query, "--in", inside, "--k", 3, "--json")
        found = json.loads(call(*words, "--out", "p.html", "--force").out)
        assert len(found) == 3
        assert "scans/3.png" not in {each["path"] for each in found}  # the query itself
        assert Path("p.html").read_text().count("data:image/") == 4


def test_check_of_volumes(call: Call, tmp_path: Path) -> None:
    nib = pytest.importorskip("nibabel")
    voxels = np.zeros((20, 20, 6), np.int16)
    voxels[4:16, 4:16, 1:5] = np.random.default_rng(0).integers(200, 900, (12, 12, 4))
    for site in ("x", "y"):
        (tmp_path / "v" / site).mkdir(parents=True)
        for k in range(2):
            moved = voxels + k * 10 + (site == "x")
            nib.save(nib.Nifti1Image(moved, np.eye(4)), tmp_path / "v" / site / f"{k}.nii.gz")
    found = json.loads(call("check", "v", "--slices", "axial:2", "--json").out)
    assert found["images"] == 8  # slices 2 and 4 of four volumes; slice 0 is empty
    assert found["empty"] == 4
    assert found["patients"] == {"number": 4, "unknown": 0, "in_several_splits": 0}
    assert found["animated"] == 0
    assert "--data.slices axial:2" in found["next"][1]
    assert "4 (a volume counts as one)" in call("check", "v").out
    picture(5).save(tmp_path / "v" / "x" / "9.png")
    told = " ".join(call("check", "v").out.split())
    assert "4 (a volume counts as one), and 1 image of unknown patient; WARNING" in told
    assert "never a part of one" not in told


def test_advice_follows_the_methods_usual_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch and rounds are such that a middling site takes the steps that are known to do."""

    def seen(**sites: int) -> dict[str, Any]:
        image = Seen("PNG", "RGB", 8, 48, 48, 1, False, 1, b"", bytes(72))
        part = Part("train", seen=[image] * sum(sites.values()))
        part.names = part.classes = [""] * len(part.seen)
        part.sites = [name for name, count in sites.items() for _ in range(count)]
        monkeypatch.setattr(advice, "duplicates", lambda _: [])
        monkeypatch.setattr(advice, "near_duplicates", lambda _: [])
        monkeypatch.setattr(Asked, "name", "folder:x")
        return dict(advice.summarise(Asked("x"), [part])["suggested"])

    usual = METHODS[advice.METHOD].cls.usual["train.batch_size"]
    big = seen(a=1462, b=861, c=469, d=288, e=24)
    assert big["batch_size"]["value"] == usual
    assert big["rounds"]["value"] == -(-advice.STEPS // (469 // usual))
    assert "43 steps at the smallest site, 602 at a middling one" in big["rounds"]["reason"]
    assert big["image_size"]["value"] == advice.SEEN  # for the encoder small
    assert seen(a=10_000)["image_size"]["value"] == 48  # for resnet18, all that there is
    little = seen(a=40, b=30, c=50)
    assert little["batch_size"]["value"] == usual // 2
    assert little["rounds"]["value"] == advice.MOST_ROUNDS
    assert "--epochs 2" in little["rounds"]["reason"]


# ---------------------------------------------------------------- embed


def test_rows_are_the_features_of_the_encoder(call: Call, run: Path, sites: Path) -> None:
    told = call("embed", run, sites, "--out", "f.parquet")
    assert told.code == 0, told.err
    assert f"{GOOD} images × 192 numbers" in told.out
    for name in BAD:
        assert name in told.err
    table = pq.read_table("f.parquet")
    assert table.schema.field("feature").type == pa.list_(pa.float32(), 192)
    assert table["path"].to_pylist() == sorted(table["path"].to_pylist())
    assert set(table["folder"].to_pylist()) == {"aachen", "bergen"}
    assert (
        dict(zip(table["path"].to_pylist(), table["width"].to_pylist(), strict=True))[
            "bergen/0.jpg"
        ]
        == 60
    )
    about = json.loads(table.schema.metadata[b"furlong"])
    assert about["encoder"] == "small"
    encoder = load_encoder(run)
    images = load(f"folder:{sites}", image_size=16)
    with torch.no_grad():
        wanted = encoder(encoder.transform(images.pixels))
    found = torch.tensor(np.stack(table["feature"].to_numpy()))
    torch.testing.assert_close(found, wanted)


def test_embed_works_from_an_exported_file_and_in_blocks(
    run: Path, sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export(run, "safetensors", tmp_path / "e.safetensors").path
    embedding.embed(embedding.Embedder(run), sites, tmp_path / "a.parquet")
    monkeypatch.setattr(embedding, "BLOCK", 7)
    embedding.embed(embedding.Embedder(file), sites, tmp_path / "b.parquet")
    one, other = (pq.ParquetFile(tmp_path / f"{n}.parquet") for n in "ab")
    assert (one.num_row_groups, other.num_row_groups) == (1, 3)  # the fourth block is unreadable
    assert one.read()["path"] == other.read()["path"]
    pair = [np.stack(f.read()["feature"].to_numpy()) for f in (one, other)]
    np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-6)


def test_embed_says_what_is_wrong(call: Call, run: Path, sites: Path, tmp_path: Path) -> None:
    (tmp_path / "f.parquet").write_text("mine")
    assert "--force" in call("embed", run, sites, "--out", "f.parquet").err
    assert (tmp_path / "f.parquet").read_text() == "mine"
    assert "no folder" in call("embed", run, "absent", "--out", "g.parquet").err
    (tmp_path / "empty").mkdir()
    assert "no readable image" in call("embed", run, "empty", "--out", "g.parquet").err
    assert "no encoder yet" in call("embed", "empty", sites, "--out", "g.parquet").err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "f.parquet"]


# ---------------------------------------------------------------- neighbours


def test_an_image_is_no_neighbour_of_itself(call: Call, run: Path, sites: Path) -> None:
    """But a copy of it is."""
    query = sites / "aachen" / "0.png"
    told = call("neighbours", run, query, "--in", sites, "--k", 4, "--json", "--out", "p.html")
    found = json.loads(told.out)
    assert len(found) == 4
    assert found[0]["path"] == "bergen/copy.png"
    assert found[0]["similarity"] == pytest.approx(1, abs=1e-6)
    scores = [each["similarity"] for each in found]
    assert scores == sorted(scores, reverse=True)
    page = Path("p.html").read_text()
    assert page.count("data:image/") == 5
    assert "aachen/0.png" not in {each["path"] for each in found}
    text = re.sub(r'"data:image/\w+;base64,[^"]*"', "", page)
    assert not re.search(r"https?:|//|<script|<link|@import|url\(|src=\S*/", text)
    call("embed", run, sites, "--out", "f.parquet")
    again = json.loads(call("neighbours", run, query, "--in", "f.parquet", "--k", 4, "--json").out)
    assert [each["path"] for each in again] == [each["path"] for each in found]
    lone = sites.parent / "lone"
    lone.mkdir()
    picture(7).save(lone / "7.png")
    assert "only image in" in call("neighbours", run, lone / "7.png", "--in", lone).err


def test_neighbours_elsewhere(call: Call, run: Path, sites: Path) -> None:
    """Other slices of a patient tell nothing: their folder can be left out."""
    query = sites / "aachen" / "4.png"
    words = ("neighbours", run, query, "--k", 5, "--json", "--in", sites)
    near, others = (json.loads(call(*words, *more).out) for more in ((), ("--elsewhere",)))
    assert near != others
    assert len(near) == len(others) == 5
    assert not [each for each in others if each["path"].startswith("aachen/")]
    lone = call("neighbours", run, query, "--in", sites / "aachen", "--elsewhere")
    assert lone.code == 2
    assert "is not below" in lone.err


def test_neighbours_by_brute_force(run: Path, sites: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(embedding, "BLOCK", 3)
    embedder = embedding.Embedder(run)
    query = embedder.one(sites / "aachen" / "4.png")
    found = embedding.nearest_images(query, embedding.folder_rows(embedder, sites, []), 5)
    rows = list(embedding.folder_rows(embedder, sites, []))
    every = torch.cat([block.features for block in rows])
    cosine = torch.nn.functional.cosine_similarity(every, query[None], dim=1)
    paths = [path for block in rows for path in block.paths]
    order = cosine.argsort(descending=True)[:5].tolist()
    assert [each.path for each in found.nearest] == [paths[i] for i in order]
    assert found.count == GOOD
    assert found.median == pytest.approx(float(cosine.median()), abs=1e-5)


def test_names_are_not_markup(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    evil = folder / "<img src=x onerror=alert(1)>[red].png"
    picture(1).save(evil)
    embedder = embedding.Embedder(run)
    rows = embedding.folder_rows(embedder, folder, [])
    found = embedding.nearest_images(embedder.one(evil), rows, 3)
    page = neighbours.page(evil, folder, found, embedder.about)
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


def test_features_of_another_encoder_are_refused(
    call: Call, run: Path, sites: Path, tmp_path: Path
) -> None:
    loop.run(tiny(out=str(tmp_path / "o"), rounds=1, seed=5, **{"evaluate.probe": "none"}))
    call("embed", tmp_path / "o", sites, "--out", "f.parquet")
    query = sites / "aachen" / "1.png"
    assert "another encoder" in call("neighbours", run, query, "--in", "f.parquet").err
    (tmp_path / "x.parquet").write_text("no table")
    assert "not a file of" in call("neighbours", run, query, "--in", "x.parquet").err
    broken = sites / "bergen" / "truncated.png"
    assert "cannot be read: corrupt" in call("neighbours", run, broken, "--in", sites).err


def test_a_table_that_was_changed_is_refused(call: Call, run: Path, sites: Path) -> None:
    query = sites / "aachen" / "1.png"
    call("embed", run, sites, "--out", "f.parquet")
    table = pq.read_table("f.parquet")
    assert call("neighbours", run, query, "--in", "f.parquet").code == 0
    wide = pa.array([[0.0] * 3] * len(table), pa.list_(pa.float32(), 3))
    place = table.schema.get_field_index("feature")
    for changed, what in (
        (table.drop_columns(["feature"]), "feature is absent"),
        (table.set_column(place, "feature", wide), "[3], not"),
        (table.set_column(place, "feature", table["width"]), "feature is int32, not"),
        (table.drop_columns(["path"]), "path is absent"),
    ):
        pq.write_table(changed, "g.parquet")
        told = call("neighbours", run, query, "--in", "g.parquet")
        assert told.code == 2
        assert "is not as 'furlong embed' wrote it" in told.err
        assert what in told.err


def test_names_that_are_not_unicode_are_found_again(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    for i in range(3):
        picture(i).save(folder / f"{i}.png")
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.png"))
    (folder / "0.png").rename(odd)
    embedder = embedding.Embedder(run)
    embedding.embed(embedder, folder, tmp_path / "f.parquet")
    root, stored = embedding.stored_rows(embedder, tmp_path / "f.parquet")
    for rows in (stored, embedding.folder_rows(embedder, folder, [])):
        found = embedding.nearest_images(embedder.one(odd), rows, 3)
        page = neighbours.page(odd, root, found, embedder.about)
        assert "not readable now" not in page
        others = neighbours.without_query(found, 3, odd, root, embedder.how).nearest
        assert sorted(each.path for each in others) == ["1.png", "2.png"]


def test_a_picture_that_is_gone_is_said_to_be(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    for i in range(3):
        picture(i).save(folder / f"{i}.png")
    embedder = embedding.Embedder(run)
    embedding.embed(embedder, folder, tmp_path / "f.parquet")
    query = embedder.one(folder / "0.png")
    (folder / "2.png").unlink()
    root, rows = embedding.stored_rows(embedder, tmp_path / "f.parquet")
    assert root == folder
    found = embedding.nearest_images(query, rows, 3)
    assert "not readable now" in neighbours.page(folder / "0.png", root, found, embedder.about)


def test_an_image_on_its_side_is_measured_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(1, 60, 30).save(tmp_path / "a.jpg", exif=exif)
    (part,) = survey(Asked(str(tmp_path)))
    assert (part.seen[0].width, part.seen[0].height) == (30, 60)


def test_a_folder_that_is_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FurlongError, match="there is no folder"):
        list(embedding.folder_rows(embedding.Embedder(run), tmp_path / "no", []))


def test_the_commands_of_the_page_parse() -> None:
    text = (Path(__file__).parents[2] / "docs" / "own_data.md").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("furlong ")]
    assert len(lines) >= 9
    for line in lines:
        given = line.split()[1:]
        _, _, ignored = application().parse_args(given, exit_on_error=False, print_error=False)
        assert not ignored
