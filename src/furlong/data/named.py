"""Public image sets by name: found on this machine, or else got from the Hugging Face Hub.

Locally they may be parquet files as on the Hub, or in the binary form that their authors publish.
Pickled files are never read.
"""

from __future__ import annotations

import gzip
import os
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from furlong.data.reading import ByteArray, printable
from furlong.data.sources import (
    PREFIXES,
    IntArray,
    NoSplit,
    Source,
    in_blocks,
    parquet_files,
    places,
)
from furlong.errors import FurlongError, nearest

_DEBIAN = Path("/usr/share/datasets")
_REMEDY = "--data.root DIR or the environment variable FURLONG_DATA"

# --------------------------------------------------------------------------- binary forms

Arrays = tuple[ByteArray, IntArray | None]  # pixels N×C×H×W, labels N


def _check_size(file: Path, record: int) -> None:
    size = file.stat().st_size
    if not size or size % record:
        raise FurlongError(
            f"{file} has {size} bytes, not a multiple of {record}: damaged, or not the binary form."
        )


def _read_cifar(files: list[Path], head: int) -> Arrays:
    """Records of ``head`` labels, of which the last counts, and 3×32×32 bytes."""
    for file in files:
        _check_size(file, head + 3072)
    records = np.concatenate([np.fromfile(file, np.uint8) for file in files])
    records = records.reshape(-1, head + 3072)
    return records[:, head:].reshape(-1, 3, 32, 32), records[:, head - 1].astype(np.int64)


def _read_mnist(files: list[Path]) -> Arrays:
    return _read_idx(files[0], 3)[:, None], _read_idx(files[1], 1).astype(np.int64)


def _read_idx(path: Path, dims: int) -> ByteArray:
    """An IDX file of unsigned bytes with ``dims`` dimensions."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            head = file.read(4 + 4 * dims)
            if head[:4] != bytes([0, 0, 8, dims]) or len(head) != 4 + 4 * dims:
                raise ValueError("not an IDX file of bytes")
            shape = np.frombuffer(head, dtype=">u4", offset=4).tolist()
            size = int(np.prod(shape, dtype=object))
            data = file.read(size + 1)  # one more, to notice a file longer than it says
            if len(data) != size:
                raise ValueError(f"its header promises {size} bytes of data, it has {len(data)}")
    except (OSError, EOFError, ValueError, zlib.error, OverflowError, MemoryError) as error:
        raise FurlongError(f"Cannot read {path}: {error}.") from None
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _read_stl(files: list[Path]) -> Arrays:
    images, *answers = files
    _check_size(images, 3 * 96 * 96)
    # Mapped, since the unlabelled part has 2.8 GB; stored by columns, hence the swap.
    pixels: ByteArray = np.memmap(images, np.uint8, "r").reshape(-1, 3, 96, 96).swapaxes(2, 3)
    labels = [np.fromfile(file, dtype=np.uint8).astype(np.int64) - 1 for file in answers]
    return pixels, labels[0] if labels else None


# --------------------------------------------------------------------------- the sets


@dataclass(frozen=True)
class Named:
    """A public set: where the Hub has it, what its images are, and its authors' binary form."""

    hub: str
    size: int
    classes: tuple[str, ...]
    folder: str  # in the authors' archive
    files: Mapping[str, tuple[str, ...]]  # by split
    read: Callable[[list[Path]], Arrays] | None = None
    pad: int = 0
    exact: bool = True  # all images are of that size
    test: tuple[str, ...] = PREFIXES["test"]  # how that split is called on the Hub

    def prefixes(self, split: str) -> tuple[str, ...]:
        return self.test if split == "test" else PREFIXES[split]

    def wanted(self, split: str) -> str:
        parquet = f"{self.prefixes(split)[0]}-*.parquet (as on the Hugging Face Hub)"
        return " or ".join(filter(None, [parquet, ", ".join(self.files[split])]))


_IDX = {
    split: (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    for split, prefix in (("train", "train"), ("test", "t10k"))
}
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_STL10 = "airplane bird car cat deer dog horse monkey ship truck"
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
SETS: dict[str, Named] = {
    "cifar10": Named(
        "uoft-cs/cifar10", 32, tuple(_CIFAR10.split()), "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test": ("test_batch.bin",)},
        partial(_read_cifar, head=1),
    ),
    "cifar100": Named(
        "uoft-cs/cifar100", 32, tuple(map(str, range(100))), "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        partial(_read_cifar, head=2),  # the coarse label, then the fine one
    ),
    "fashion_mnist": Named(
        "zalando-datasets/fashion_mnist", 28, tuple(_FASHION.split(",")), "FashionMNIST/raw", _IDX,
        _read_mnist, pad=2,
    ),
    "mnist": Named("ylecun/mnist", 28, tuple("0123456789"), "MNIST/raw", _IDX, _read_mnist, pad=2),
    "stl10": Named(
        "jxie/stl10", 96, tuple(_STL10.split()), "stl10_binary",
        {"train": ("train_X.bin", "train_y.bin"), "test": ("test_X.bin", "test_y.bin"),
         "unlabelled": ("unlabeled_X.bin",)},
        _read_stl,
    ),
    # Its 600 images a class are "train" (500) and "validation" on the Hub; "test" is another 50.
    "mini_imagenet": Named(
        "timm/mini-imagenet", 84, tuple(map(str, range(100))), "", {"train": (), "test": ()},
        exact=False, test=("validation", "test", "val"),
    ),
}  # fmt: skip


def find(name: str, split: str, root: str | Path | None, group_by: str | None) -> Source:
    """The set's local files, or else, unless ``root`` is given, the Hub's."""
    known = SETS[name]
    if split not in known.files:
        raise NoSplit(f"{name} has no split {split!r}. {nearest(split, known.files)}")
    source = _local(name, split, root, group_by) or _hub(name, split, group_by)
    if source.classes and len(source.classes) != len(known.classes):
        raise FurlongError(
            f"{source.where} has {len(source.classes)} classes, but {name} has "
            f"{len(known.classes)}: it seems to hold another set."
        )
    source.size, source.pad, source.exact = known.size, known.pad, known.exact
    return source


def _local(name: str, split: str, root: str | Path | None, group_by: str | None) -> Source | None:
    """What the first place with files of the set has; None if the Hub may be asked."""
    known, dirs = SETS[name], _places(name, root)
    other: Path | None = None  # a place that has the set, but not the split
    for where in dirs:
        parts = {each: files for each in known.files if (files := _files(known, where, each))}
        if name == "mini_imagenet" and list(parts) == ["train"]:
            parts["test"] = parts["train"]
        if split in parts:
            parquet = parts[split][0].suffix == ".parquet"
            return (_parquet if parquet else _binary)(name, split, where, parts, group_by)
        other = where if parts else other
    if other is not None:
        raise NoSplit(f"{name}: {other} has files, but none of the split {split!r}.")
    patterns = ("*-batches-py", "cifar-*-python*", "data_batch_1", "meta")
    pickled = [path for where in dirs for pattern in patterns for path in where.glob(pattern)]
    if pickled and name.startswith("cifar"):
        raise FurlongError(
            f"{name}: {pickled[0]} is the pickled Python version. Pickle can run code and is not "
            f"read; get {known.wanted(split)} instead."
        )
    if root is None:
        return None
    raise FurlongError(
        f"{name}: found nothing to read in {root} or its usual subfolders. Wanted: "
        f"{known.wanted(split)}. Give another {_REMEDY}."
    )


def _places(name: str, root: str | Path | None) -> list[Path]:
    """The directories that may hold the set, the most specific first."""
    if root is not None and not Path(root).expanduser().is_dir():
        raise FurlongError(f"{name}: the directory {root} does not exist. Give {_REMEDY}.")
    given = root if root is not None else os.environ.get("FURLONG_DATA")
    bases = [Path(given).expanduser()] if given else []
    bases += [_DEBIAN] if root is None else []
    dirs = [
        base / stem / inside
        for base in bases
        for stem in (name, name.replace("_", "-"), "")
        for inside in ("", "raw", name, SETS[name].folder)
    ]
    return [each for each in dict.fromkeys(dirs) if each.is_dir()]


def _files(known: Named, where: Path, split: str) -> list[Path]:
    """The files of the split in ``where``, in either layout."""
    found = parquet_files(where, known.prefixes(split))
    for file in () if found else known.files[split]:
        # IDX files: with a hyphen on the authors' pages, a dot in old archives; packed or not.
        spellings = [file, file.replace("-idx", ".idx")]
        options = [where / (each + end) for each in spellings for end in ("", ".gz")]
        found += [option for option in options if option.is_file()][:1]
    return found


def _parquet(
    name: str, split: str, where: Path, parts: dict[str, list[Path]], group_by: str | None
) -> Source:
    from furlong.data.tables import table

    others = [f for each in parts if each != split for f in parts[each] if f.suffix == ".parquet"]
    source = table(
        name, split, str(where), parts[split], group_by, others=others, classes=SETS[name].classes
    )
    if parts[split] == others and source.labels is not None:
        # Not the caller's seed: the two splits must never overlap.
        order = np.random.default_rng(0).permutation(len(source.labels))
        place, size = places(source.labels[order])
        source.rows = np.sort(order[(6 * place < 5 * size) == (split == "train")])
        source.notes.append(
            f"{name} came in one piece: five sixths of each class are train, the rest test."
        )
    return source


def _binary(
    name: str, split: str, where: Path, parts: dict[str, list[Path]], group_by: str | None
) -> Source:
    known, files = SETS[name], parts[split]
    if len(files) < len(known.files[split]):
        present = {file.name.removesuffix(".gz").replace(".idx", "-idx") for file in files}
        missing = [file for file in known.files[split] if file not in present]
        raise FurlongError(f"{name}: {where} lacks {', '.join(missing)}.")
    if group_by is not None:
        raise FurlongError(f"{name} in {where} has no column {group_by!r}: leave group_by out.")
    assert known.read is not None  # since it has files
    pixels, labels = known.read(files)
    if labels is not None and len(labels) != len(pixels):
        raise FurlongError(f"{name}: {len(pixels)} images but {len(labels)} labels in {where}.")

    listed = where / "fine_label_names.txt"  # comes with CIFAR-100
    classes = tuple(listed.read_text().split()) if listed.is_file() else known.classes
    rows, blocks = np.arange(len(pixels)), in_blocks(pixels.__getitem__)
    source = Source(name, split, str(where), files, rows, blocks, labels)
    source.classes = classes if labels is not None else ()
    return source


# --------------------------------------------------------------------------- the Hub


def _hub(name: str, split: str, group_by: str | None) -> Source:
    """The set from the Hugging Face Hub, or from the Hub's cache on this machine."""
    import datasets
    from huggingface_hub import constants

    from furlong.data.tables import table

    known = SETS[name]
    online = _reachable(constants.ENDPOINT)
    # Without a network the libraries would retry for half a minute before they look in the cache.
    modules = (constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module, offline in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = offline or not online
        data = datasets.load_dataset(known.hub, split=known.prefixes(split)[0])
    except Exception as error:  # several libraries deep: anything may surface here
        reason = printable(str(error).partition("\n")[0])[:200].rstrip(".")
        if not online:  # not the libraries' "offline mode", which nobody switched on
            reason = f"{constants.ENDPOINT} does not answer, and it is not in the Hub's local cache"
        raise FurlongError(
            f"Cannot get {name} ({split}) from the Hugging Face Hub ({known.hub}): {reason}.\n"
            f"Either connect this machine to the network, or give {_REMEDY}: a directory with "
            f"{known.wanted(split)}.\nLooked in: {_DEBIAN} and FURLONG_DATA "
            f"({os.environ.get('FURLONG_DATA') or 'not set'})."
        ) from None
    finally:
        for module, offline in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = offline
    files = [Path(each["filename"]) for each in data.cache_files]
    arrow = data.with_format("arrow")[:]
    where = f"the Hub's {known.hub}"
    return table(name, split, where, files, group_by, arrow=arrow, classes=known.classes)


def _reachable(url: str) -> bool:
    """Whether ``url`` answers within five seconds, name resolution included."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=4).close()
        except urllib.error.HTTPError as error:  # an answer all the same
            error.close()
        except (OSError, ValueError):
            return
        answers.append(True)

    # In a thread because the resolver obeys no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)
    return bool(answers)
