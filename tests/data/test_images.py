"""Every layout is written by the test itself: no network and no data on the machine is needed."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import time
import zlib
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from furlong.data import cache as caches
from furlong.data import decode as decoding
from furlong.data import images, named
from furlong.data.images import ImageSet, NoSplit, Skipped, load
from furlong.data.reading import MAX_FILE_BYTES, Reading
from furlong.errors import FurlongError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data of this machine, no network, no cache outside the test."""
    monkeypatch.delenv("FURLONG_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(named, "_DEBIAN", tmp_path / "no-debian")
    monkeypatch.setattr(named, "_reachable", lambda _url: False)


def noise(n: int, height: int = 32, width: int = 32, seed: int = 0) -> np.ndarray:
    """uint8 N×H×W×3."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def encode(array: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind, **options)
    return out.getvalue()


def write_parquet(path: Path, encoded: list[bytes | None], group: int = 3, image: str = "img",
                  names: list[str] | None = None, **columns: list[object]) -> None:  # fmt: skip
    table = pa.table({image: [{"bytes": b, "path": None} for b in encoded], **columns})
    if names:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)


def same(pixels: torch.Tensor, wanted: np.ndarray) -> bool:
    """Whether N×C×H×W equals N×H×W×C."""
    return np.array_equal(pixels.numpy(), wanted.transpose(0, 3, 1, 2))


# --------------------------------------------------------------------------- ImageSet


def test_image_set_subset_and_unlabelled() -> None:
    whole = ImageSet(
        torch.arange(4 * 12).reshape(4, 3, 2, 2).to(torch.uint8),
        torch.tensor([0, 1, 0, 1]), ("a", "b"), torch.tensor([0, 0, 0, 1]), ("x", "y"),
    )  # fmt: skip
    assert (len(whole), whole.channels, whole.size, whole.n_classes) == (4, 3, (2, 2), 2)
    part = whole.subset([3, 0])
    assert part.labels is not None
    assert part.groups is not None
    assert part.labels.tolist() == [1, 0]
    assert part.groups.tolist() == [1, 0]
    assert torch.equal(part.pixels, whole.pixels[[3, 0]])
    assert whole.unlabelled().labels is None
    assert whole.unlabelled().n_classes == 0
    assert len(whole.subset([])) == 0
    for wrong in ([4], [-1], [0.5], [True, False, True, True], [[0]]):
        with pytest.raises(FurlongError):
            whole.subset(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"pixels": torch.zeros(2, 3, 4, 4)},
        {"pixels": torch.zeros(3, 4, 4, dtype=torch.uint8)},
        {"labels": torch.tensor([0])},
        {"labels": torch.tensor([0.0, 1.0])},
        {"labels": torch.tensor([0, -1])},
        {"labels": torch.tensor([0, 2]), "classes": ("a", "b")},
        {"groups": torch.tensor([0, 1, 2])},
    ],
)
def test_image_set_refuses_nonsense(fields: dict[str, object]) -> None:
    with pytest.raises(FurlongError):
        ImageSet(**{"pixels": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), **fields})  # type: ignore[arg-type]


# --------------------------------------------------------------------------- public sets


@pytest.mark.parametrize("where", ["", "cifar10", "data", "cifar10/plain_text"])
def test_parquet_layout_of_a_named_set(tmp_path: Path, where: str) -> None:
    array = noise(10)
    names = [f"class {n}" for n in range(10)]
    for split, part in (("train", array[:7]), ("test", array[7:])):
        labels = list(range(len(part)))
        file = tmp_path / where / f"{split}-00000-of-00001.parquet"
        write_parquet(file, [encode(each) for each in part], names=names, label=labels)
    train = load("cifar10", root=tmp_path)
    assert same(train.pixels, array[:7])
    assert train.labels is not None
    assert train.labels.tolist() == list(range(7))
    assert train.classes == tuple(names)
    assert same(load("cifar10", "test", root=tmp_path).pixels, array[7:])


def test_furlong_data_variable_and_image_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = np.full((4, 32, 32, 3), 77, dtype=np.uint8)
    write_parquet(tmp_path / "cifar100/train.parquet", [encode(x) for x in flat],
                  image="image", fine_label=[0, 99, 5, 5])  # fmt: skip
    monkeypatch.setenv("FURLONG_DATA", str(tmp_path))
    loaded = load("cifar100", image_size=48)
    assert loaded.pixels.shape == (4, 3, 48, 48)
    assert (loaded.pixels == 77).all()
    assert loaded.n_classes == 100


def test_cifar10_binary(tmp_path: Path) -> None:
    array = noise(12)
    where = tmp_path / "cifar-10-batches-bin"
    where.mkdir()
    files = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for n, file in enumerate(files):
        records = [
            bytes([k % 10]) + array[k].transpose(2, 0, 1).tobytes() for k in (2 * n, 2 * n + 1)
        ]
        (where / file).write_bytes(b"".join(records))
    train, test = load("cifar10", root=tmp_path), load("cifar10", "test", root=where)
    assert same(train.pixels, array[:10])
    assert same(test.pixels, array[10:])
    assert train.labels is not None
    assert train.labels.tolist() == list(range(10))
    assert train.classes[9] == "truck"
    (where / "data_batch_3.bin").write_bytes(b"x" * 100)
    with pytest.raises(FurlongError, match="multiple of 3073"):
        load("cifar10", root=tmp_path)
    (where / "data_batch_3.bin").unlink()
    with pytest.raises(FurlongError, match=r"lacks data_batch_3\.bin"):
        load("cifar10", root=tmp_path)


def test_cifar100_binary_takes_the_fine_label(tmp_path: Path) -> None:
    array = noise(3)
    records = [bytes([7, 90 + n]) + x.transpose(2, 0, 1).tobytes() for n, x in enumerate(array)]
    (tmp_path / "train.bin").write_bytes(b"".join(records))
    loaded = load("cifar100", root=tmp_path)
    assert same(loaded.pixels, array)
    assert loaded.labels is not None
    assert loaded.labels.tolist() == [90, 91, 92]
    with pytest.raises(NoSplit):
        load("cifar100", "test", root=tmp_path)


def test_pickled_cifar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(FurlongError, match=r"[Pp]ickle.*data_batch_1\.bin"):
        load("cifar10", root=tmp_path)
    monkeypatch.setenv("FURLONG_DATA", str(tmp_path))
    with pytest.raises(FurlongError, match="not read"):
        load("cifar10")


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_are_padded_and_rgb(tmp_path: Path, packed: bool, name: str) -> None:
    gray = noise(5, 28, 28)[..., 0]
    for prefix, part in (("train", gray[:3]), ("t10k", gray[3:])):
        labels = np.arange(len(part), dtype=np.uint8)
        for kind, data in (("images-idx3", part), ("labels-idx1", labels)):
            raw = idx(data)
            file = tmp_path / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(raw) if packed else raw)
    loaded = load(name, root=tmp_path)
    assert loaded.pixels.shape == (3, 3, 32, 32)
    assert np.array_equal(loaded.pixels[:, 1, 2:-2, 2:-2].numpy(), gray[:3])
    assert not loaded.pixels[:, :, :2].any()
    assert len(load(name, "test", root=tmp_path)) == 2
    assert load(name, root=tmp_path, image_size=16).size == (16, 16)


def test_damaged_idx(tmp_path: Path) -> None:
    good = idx(np.zeros(2, np.uint8))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(good)
    images_file = tmp_path / "train-images-idx3-ubyte"
    whole = idx(np.zeros((2, 28, 28), np.uint8))
    for broken in (whole[:-1], whole + b"x", b"", b"\0\0\x0d\x03" + whole[4:], whole[:6]):
        images_file.write_bytes(broken)
        with pytest.raises(FurlongError, match="Cannot read"):
            load("mnist", root=tmp_path)


def test_mnist_parquet_matches_idx(tmp_path: Path) -> None:
    gray = noise(3, 28, 28)[..., 0]
    write_parquet(
        tmp_path / "train-0.parquet", [encode(x) for x in gray], image="image", label=[0, 1, 2]
    )
    loaded = load("mnist", root=tmp_path)
    assert np.array_equal(loaded.pixels[:, 2, 2:-2, 2:-2].numpy(), gray)


def test_stl_binary_is_column_major(tmp_path: Path) -> None:
    array = noise(3, 96, 96)
    columns = array.transpose(0, 3, 2, 1).tobytes()
    (tmp_path / "train_X.bin").write_bytes(columns)
    (tmp_path / "train_y.bin").write_bytes(bytes([1, 10, 2]))
    (tmp_path / "unlabeled_X.bin").write_bytes(columns)
    train = load("stl10", root=tmp_path)
    assert same(train.pixels, array)
    assert train.labels is not None
    assert train.labels.tolist() == [0, 9, 1]
    for spelling in ("unlabelled", "unlabeled"):
        assert load("stl10", spelling, root=tmp_path).labels is None
    assert load("stl10", root=tmp_path, image_size=32).size == (32, 32)
    (tmp_path / "train_y.bin").write_bytes(bytes([1, 10]))
    with pytest.raises(FurlongError, match="3 images but 2 labels"):
        load("stl10", root=tmp_path)


def test_mini_imagenet_in_one_piece_is_split_without_overlap(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8)[:, None, None, None] * np.ones((1, 20, 30, 3), np.uint8)
    labels = [n % 2 for n in range(24)]
    write_parquet(
        tmp_path / "train-0.parquet", [encode(x) for x in array], image="image", label=labels
    )
    train, test = (
        load("mini_imagenet", s, root=tmp_path, seed=s == "test") for s in ("train", "test")
    )
    assert train.size == (84, 84)
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.bincount().tolist() == [10, 10]
    assert test.labels.bincount().tolist() == [2, 2]
    values = [*train.pixels[:, 0, 0, 0].tolist(), *test.pixels[:, 0, 0, 0].tolist()]
    assert sorted(values) == list(range(24))
    assert "one piece" in train.notes[0]


def test_wrong_set_in_the_directory(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [encode(x) for x in noise(2)], label=[0, 1])
    with pytest.raises(FurlongError, match="another set"):
        load("stl10", root=tmp_path)
    write_parquet(tmp_path / "train-0.parquet", [encode(x) for x in noise(2)], label=[0, 1],
                  names=["cat", "dog"])  # fmt: skip
    with pytest.raises(FurlongError, match="2 classes, but cifar10 has 10"):
        load("cifar10", root=tmp_path)


def test_nothing_recognisable(tmp_path: Path) -> None:
    with pytest.raises(FurlongError, match=r"found nothing.*train-\*\.parquet"):
        load("cifar10", root=tmp_path)
    with pytest.raises(FurlongError, match="does not exist"):
        load("cifar10", root=tmp_path / "absent")


def test_unknown_names_splits_and_sizes() -> None:
    with pytest.raises(FurlongError, match="Did you mean 'cifar10'"):
        load("cifar-10")
    with pytest.raises(NoSplit):
        load("cifar10", "unlabelled")
    with pytest.raises(FurlongError, match="Valid: cifar10"):
        load("folder:")
    for wrong in ({"limit": 0}, {"image_size": 0}, {"image_size": 5000}):
        with pytest.raises(FurlongError, match="must be"):
            load("shapes", **wrong)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- Hub


def test_no_network_is_explained_without_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        assert datasets.config.HF_HUB_OFFLINE  # so that nothing is retried for half a minute
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(
        FurlongError, match=r"(?s)cifar10.*network.*--data\.root DIR.*FURLONG_DATA"
    ) as caught:
        load("cifar10")
    assert caught.value.__suppress_context__
    assert before == datasets.config.HF_HUB_OFFLINE


def test_hub_sets_are_read_like_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    array = noise(6)
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=list("abcdefghij"))}
    )
    data = datasets.Dataset.from_dict(
        {"img": [{"bytes": encode(x), "path": None} for x in array], "label": [0, 1, 2, 0, 1, 2]},
        features=features,
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda _hub, split: {"train": data}[split])
    loaded = load("cifar10")
    assert same(loaded.pixels, array)
    assert loaded.classes == tuple("abcdefghij")
    assert len(load("cifar10", limit=3)) == 3


# --------------------------------------------------------------------------- parquet:


def test_parquet_groups_and_bad_rows(tmp_path: Path) -> None:
    array = noise(6, 8, 10)
    encoded: list[bytes | None] = [encode(x) for x in array]
    encoded[1], encoded[4] = b"rubbish", None
    write_parquet(tmp_path / "some.parquet", encoded, label=["b", "a", "b", "a", "b", "a"],
                  hospital=["x", "y", "y", "x", "x", "z"])  # fmt: skip
    name = f"parquet:{tmp_path}"
    loaded = load(name, group_by="hospital")
    assert same(loaded.pixels, array[[0, 2, 3, 5]])
    assert loaded.labels is not None
    assert loaded.groups is not None
    assert loaded.classes == ("a", "b")
    assert loaded.labels.tolist() == [1, 1, 0, 0]
    assert loaded.groups.tolist() == [0, 1, 0, 2]
    assert loaded.group_names == ("x", "y", "z")
    assert [each.name for each in loaded.skipped] == ["row 00000001", "row 00000004"]
    for limit in (1, 2, 3, 4):  # exactly so many, whichever rows are bad
        assert len(load(name, limit=limit)) == limit
    with pytest.raises(FurlongError, match="Did you mean 'hospital'"):
        load(name, group_by="hospitals")
    with pytest.raises(NoSplit):
        load(name, "test")
    with pytest.raises(FurlongError, match="2 file"):
        load(f"parquet:{tmp_path / 'some.parquet'}", strict=True)


def test_text_classes_are_numbered_alike_in_both_splits(tmp_path: Path) -> None:
    one = encode(noise(1, 8, 8)[0])
    write_parquet(tmp_path / "train-0.parquet", [one] * 3, label=["a", "b", "c"])
    write_parquet(tmp_path / "test-0.parquet", [one] * 2, label=["c", "a"])
    test = load(f"parquet:{tmp_path}", "test")
    assert test.classes == ("a", "b", "c")
    assert test.labels is not None
    assert test.labels.tolist() == [2, 0]


def test_unusable_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(FurlongError, match="cannot read the parquet"):
        load(f"parquet:{file}")
    pq.write_table(pa.table({"text": ["a"]}), file)
    with pytest.raises(FurlongError, match="no column of images"):
        load(f"parquet:{file}")
    write_parquet(file, [encode(noise(1)[0])], label=[None])
    with pytest.raises(FurlongError, match="empty value"):
        load(f"parquet:{file}")
    write_parquet(file, [encode(x) for x in noise(3)], patient=["p", " ", "q"])
    with pytest.raises(FurlongError, match="column 'patient' is empty in some rows"):
        load(f"parquet:{file}")
    write_parquet(file, [encode(x) for x in noise(40)])
    damaged = bytearray(file.read_bytes())
    damaged[100:20_000] = bytes(19_900)
    file.write_bytes(bytes(damaged))
    with pytest.raises(FurlongError):
        load(f"parquet:{file}")


# --------------------------------------------------------------------------- folder:


def write_folder(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def test_labelled_folder_keeps_a_small_common_size(tmp_path: Path) -> None:
    array = noise(4, 20, 24)
    names = ["b/2.png", "a/deep/1.png", "a/0.png", "b/3.jpg"]  # a wrong extension does not matter
    write_folder(tmp_path, {n: encode(x) for n, x in zip(names, array, strict=True)})
    loaded = load(f"folder:{tmp_path}")
    assert same(loaded.pixels, array[[2, 1, 0, 3]])
    assert loaded.classes == ("a", "b")
    assert loaded.labels is not None
    assert loaded.labels.tolist() == [0, 0, 1, 1]
    assert loaded.notes == ()
    with pytest.raises(NoSplit):
        load(f"folder:{tmp_path}", "test")


def test_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    names = ["a#2.png", "a#10.png", "a!.png", "a.png"]
    write_folder(tmp_path, {n: encode(noise(1, 8, 8, k)[0]) for k, n in enumerate(names)})
    loaded = load(f"folder:{tmp_path}")
    order = sorted(range(4), key=names.__getitem__)
    assert same(loaded.pixels, np.concatenate([noise(1, 8, 8, k) for k in order]))


def test_mixed_sizes_become_64_and_say_so(tmp_path: Path) -> None:
    sizes = {"0.png": (20, 20), "1.png": (30, 50), "2.png": (200, 100)}
    write_folder(tmp_path, {n: encode(noise(1, *s)[0]) for n, s in sizes.items()})
    loaded = load(f"folder:{tmp_path}")
    assert loaded.size == (64, 64)
    assert loaded.labels is None
    assert "64×64" in loaded.notes[0]
    assert load(f"folder:{tmp_path}", image_size=24).notes == ()


def test_crop_is_central(tmp_path: Path) -> None:
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80] = 255
    write_folder(tmp_path, {"x.png": encode(wide)})
    assert (load(f"folder:{tmp_path}", image_size=40).pixels == 255).all()


def test_groups_with_labels_below(tmp_path: Path) -> None:
    one = encode(noise(1, 8, 8)[0])
    files = ["site 1/cat/a.png", "site 1/dog/b.png", "site 2/dog/c.png"]
    write_folder(tmp_path, dict.fromkeys(files, one))
    loaded = load(f"folder:{tmp_path}", group_by="folder")
    assert loaded.groups is not None
    assert loaded.labels is not None
    assert loaded.group_names == ("site 1", "site 2")
    assert loaded.groups.tolist() == [0, 0, 1]
    assert loaded.classes == ("cat", "dog")
    assert loaded.labels.tolist() == [0, 1, 1]
    with pytest.raises(FurlongError, match="only be grouped by 'folder'"):
        load(f"folder:{tmp_path}", group_by="site")


def test_split_folders_share_class_numbers(tmp_path: Path) -> None:
    one = encode(noise(1, 8, 8)[0])
    write_folder(
        tmp_path, dict.fromkeys(["train/a/1", "train/b/1", "train/c/1", "val/a/1", "val/c/1"], one)
    )
    test = load(f"folder:{tmp_path}", "test")
    assert test.classes == ("a", "b", "c")
    assert test.labels is not None
    assert test.labels.tolist() == [0, 2]
    assert len(load(f"folder:{tmp_path}")) == 3


def test_every_mode_becomes_rgb() -> None:
    size = (8, 8)
    gray16 = Image.fromarray(np.full(size, 40_000, np.uint16))
    palette = Image.new("RGB", size, (255, 0, 0)).convert("P")
    cases: list[tuple[Image.Image, str, tuple[int, int, int], dict[str, object]]] = [
        (Image.new("RGBA", size, (255, 0, 0, 0)), "PNG", (255, 255, 255), {}),
        (Image.new("LA", size, (0, 0)), "PNG", (255, 255, 255), {}),
        (gray16, "PNG", (156, 156, 156), {}),
        (gray16, "TIFF", (156, 156, 156), {}),
        (palette, "PNG", (255, 0, 0), {}),
        (palette, "GIF", (255, 0, 0), {}),
        (Image.new("1", size, 1), "PNG", (255, 255, 255), {}),
        (Image.new("CMYK", size, (0, 255, 255, 0)), "JPEG", (255, 0, 0), {"quality": 100}),
        (Image.new("L", size, 9), "BMP", (9, 9, 9), {}),
        (Image.new("RGB", size, (1, 2, 3)), "PPM", (1, 2, 3), {}),
        (Image.new("RGB", size, (1, 2, 3)), "WEBP", (1, 2, 3), {"lossless": True}),
    ]
    for image, kind, colour, options in cases:
        out = io.BytesIO()
        image.save(out, kind, **options)
        decoded = decoding.decode(out.getvalue(), None, how=Reading(window="full"))
        assert decoded.shape == (3, 8, 8), (image.mode, kind)
        assert np.abs(decoded[:, 4, 4].astype(int) - colour).max() <= 2, (image.mode, kind)


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (20, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    image.save(out, "JPEG", exif=exif)
    assert decoding.decode(out.getvalue(), None).shape == (3, 20, 10)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with two good images, and what is expected to be said of everything else."""
    root = tmp_path / "images"
    good, photo = encode(noise(1, 16, 16)[0]), encode(noise(1, 64, 64)[0], "JPEG")
    write_folder(
        root,
        {
            "good.png": good,
            "really-a-png.txt": good,
            "truncated.jpg": photo[: len(photo) // 2],
            "corrupt.png": good[:60] + b"\0" * 200,
            "zero.png": b"",
            "text.png": b"this is no picture",
            "notes.csv": b"a,b\n1,2\n",
            "Thumbs.db": b"\xd0\xcf\x11\xe0 thumbnails",
            ".DS_Store": b"hidden",
            ".hidden/in.png": good,
            "large.png": png_header(10_000, 6_000),
            "bomb.png": png_header(60_000, 60_000),
            "vector.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "icon.ico": b"\0\0\1\0\1\0\x10\x10",
            "script.eps": b"%!PS-Adobe-3.0 EPSF-3.0",
            "bm.bmp": b"BM is not always a bitmap",
        },
    )
    secret = tmp_path / "outside.png"
    secret.write_bytes(good)
    (root / "escape.png").symlink_to(secret)
    (root / "linked").symlink_to(tmp_path)
    (root / "dangling.png").symlink_to(tmp_path / "nothing")
    (root / "loop.png").symlink_to(root / "loop.png")
    os.mkfifo(root / "pipe.png")
    with open(root / "sparse.png", "wb") as file:
        file.write(good)
        file.truncate(MAX_FILE_BYTES + 1)
    (root / "new\nline.txt").write_bytes(b"x")
    return root, {
        "truncated.jpg": "truncated", "corrupt.png": "corrupt", "zero.png": "empty",
        "text.png": "not an image", "notes.csv": "not an image", "Thumbs.db": "not an image",
        ".DS_Store": "not an image", ".hidden": "hidden", "large.png": "50 megapixels",
        "bomb.png": "50 megapixels", "vector.svg": "not an image", "icon.ico": "not an image",
        "script.eps": "not an image", "bm.bmp": "", "escape.png": "out of the folder",
        "linked": "symbolic link", "dangling.png": "unreadable", "loop.png": "unreadable",
        "pipe.png": "not a regular", "sparse.png": "200 MB", "new\\nline.txt": "not an image",
    }  # fmt: skip


def test_hostile_folder(hostile: tuple[Path, dict[str, str]]) -> None:
    root, expected = hostile
    loaded = load(f"folder:{root}")
    assert len(loaded) == 2
    assert loaded.size == (16, 16)
    reasons = {each.name: each.reason for each in loaded.skipped}
    assert list(reasons) == sorted(expected)
    for name, words in expected.items():
        assert words in reasons[name], (name, reasons[name])


def test_strict_lists_ten_and_counts(hostile: tuple[Path, dict[str, str]]) -> None:
    root, expected = hostile
    with pytest.raises(FurlongError, match=f"{len(expected)} file") as caught:
        load(f"folder:{root}", strict=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert f"{len(expected) - 10} more" in lines[-1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    write_folder(tmp_path, dict.fromkeys(["a.png", "b.png"], encode(noise(1, 8, 8)[0])))
    (tmp_path / "b.png").chmod(0)
    assert load(f"folder:{tmp_path}").skipped == (
        Skipped("b.png", "unreadable: permission denied"),
    )


def test_permission_denied_while_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_args: object, **_options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Image, "open", denied)
    with pytest.raises(decoding.Unusable, match="permission denied"):
        decoding.decode(b"x", None)


def test_folder_without_images(tmp_path: Path) -> None:
    write_folder(tmp_path / "x", {"a.png": encode(noise(1, 8, 8)[0])[:50], "b.txt": b"b"})
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(FurlongError, match="no readable image"):
            load(f"folder:{tmp_path / 'x'}", cache=cache)
    with pytest.raises(FurlongError, match="no folder"):
        load(f"folder:{tmp_path / 'absent'}")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP", "PPM"]), st.data())
def test_mutated_images_decode_or_are_refused(kind: str, data: st.DataObject) -> None:
    raw = bytearray(encode(noise(1, 9, 9)[0], kind))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with decoding.many(partial(decoding.decode, size=(8, 8))) as decode_all:
        (result,) = decode_all([("x", bytes(raw))])
    assert isinstance(result, Skipped) or result.shape == (3, 8, 8)


# --------------------------------------------------------------------------- limit


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 80), st.integers(0, 5))
def test_pick_is_exact_and_proportional(sizes: list[int], limit: int, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.arange(len(labels))
    chosen = images._pick(labels, rows, limit, seed)
    taken = min(limit, len(rows))
    assert len(set(chosen.tolist())) == taken
    assert chosen.tolist() == sorted(chosen.tolist())
    counts = np.bincount(labels[chosen], minlength=len(sizes))
    assert np.abs(counts - taken * np.array(sizes) / len(rows)).max() <= 1
    assert np.array_equal(chosen, images._pick(labels, rows, limit, seed))


def test_limit_depends_on_the_seed_only(tmp_path: Path) -> None:
    array = noise(60, 8, 8)
    write_parquet(
        tmp_path / "x.parquet", [encode(x) for x in array], label=[n % 3 for n in range(60)]
    )
    name = f"parquet:{tmp_path}"
    first, again, other = (load(name, limit=12, seed=s) for s in (1, 1, 2))
    assert first.labels is not None
    assert first.labels.bincount().tolist() == [4, 4, 4]
    assert torch.equal(first.pixels, again.pixels)
    assert not torch.equal(first.pixels, other.pixels)
    cached = load(name, limit=12, seed=1, cache=tmp_path / "cache")
    assert torch.equal(first.pixels, cached.pixels)
    assert len(load(name, limit=1000)) == 60


# --------------------------------------------------------------------------- cache


def test_cache_hit_corrupt_and_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = noise(9, 8, 8)
    file, cache = tmp_path / "x.parquet", tmp_path / "cache"
    encoded: list[bytes | None] = [encode(x) for x in array]
    write_parquet(file, [*encoded, b"bad"], label=[0] * 10)
    decodes = []
    real = decoding.decode

    def counted(*args: object, **options: object) -> object:
        decodes.append(1)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(caches, "decode", counted)

    def run() -> tuple[ImageSet, bool]:
        decodes.clear()
        loaded = load(f"parquet:{file}", cache=cache, image_size=8)
        return loaded, bool(decodes)

    def files(ending: str) -> Path:
        (only,) = cache.glob(f"*{ending}")
        return only

    plain = load(f"parquet:{file}", image_size=8)
    loaded, decoded = run()
    assert decoded
    assert torch.equal(loaded.pixels, plain.pixels)
    loaded, decoded = run()
    assert not decoded
    assert torch.equal(loaded.pixels, plain.pixels)
    assert loaded.skipped == plain.skipped
    loaded.pixels[0] = 0  # copy on write: neither a warning nor a change on disk
    assert torch.equal(run()[0].pixels, plain.pixels)

    flipped = bytearray(files(".u8").read_bytes())
    flipped[-5] ^= 1
    meta = files(".json").read_text()
    for path, content in (
        (files(".u8"), bytes(flipped)),
        (files(".u8"), bytes(flipped[:-50])),
        (files(".u8"), b""),
        (files(".json"), b"{"),
        (files(".json"), b"[]"),
        (files(".json"), meta.replace('"version": 2', '"version": 0').encode()),
    ):
        path.write_bytes(content)
        loaded, decoded = run()
        assert decoded, content[:40]
        assert torch.equal(loaded.pixels, plain.pixels)
        assert not run()[1]

    write_parquet(file, encoded[::-1], label=[0] * 9)
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    loaded, decoded = run()
    assert decoded
    assert same(loaded.pixels, array[::-1])
    assert len(list(cache.iterdir())) == 2  # the stale one is replaced, nothing temporary stays


def test_large_sets_are_mapped_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "x", {f"{n}.png": encode(x) for n, x in enumerate(noise(4, 8, 8))})
    plain = load(f"folder:{tmp_path / 'x'}")
    monkeypatch.setattr(caches, "AUTO_CACHE_BYTES", 100)
    assert torch.equal(load(f"folder:{tmp_path / 'x'}").pixels, plain.pixels)
    assert list((tmp_path / "xdg/furlong").glob("*.u8"))


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    write_folder(tmp_path, {"x/1.png": encode(noise(1, 8, 8)[0]), "file": b""})
    with pytest.raises(FurlongError, match=r"data\.cache"):
        load(f"folder:{tmp_path / 'x'}", cache=tmp_path / "file")


def test_shapes_by_name() -> None:
    loaded = load("shapes", limit=12, image_size=32, seed=3)
    assert len(loaded) == 12
    assert loaded.size == (32, 32)
    with pytest.raises(NoSplit):
        load("shapes", "validation")
    with pytest.raises(FurlongError, match="group_by"):
        load("shapes", group_by="folder")
