"""The SuperLink's objects in files: Flower's own store, but for where large contents are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    UnexpectedObjectContentError,
    get_object_id,
)
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore, ObjectStoreFactory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from furlong.deploy import flower_store
from furlong.deploy.flower_store import LARGE, FileObjectStore

RUN = 7
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower


def thing(size: int, seed: int, children: str = "") -> bytes:
    """An object as Flower sends it: its head, and a body of ``size`` bytes."""
    head = f"ConfigRecord {children} {size}".encode()
    return head + b"\x00" + random.Random(seed).randbytes(size)


def store(folder: Path) -> FileObjectStore:
    made = FileObjectStore(str(folder / "superlink.db"))
    made.initialize()
    return made


def files(folder: Path) -> list[Path]:
    return sorted((folder / "superlink.db.objects").iterdir())


def expect(into: ObjectStore, root: bytes, *children: bytes) -> list[str]:
    trees = [ObjectTree(object_id=get_object_id(child)) for child in children]
    return into.preregister(RUN, ObjectTree(object_id=get_object_id(root), children=trees))


def test_large_objects_are_files_and_small_ones_are_not(tmp_path: Path) -> None:
    own, small, large = store(tmp_path), thing(10, 1), thing(LARGE, 2)
    ids = [get_object_id(small), get_object_id(large)]
    root = thing(5, 3, ",".join(ids))
    assert len(expect(own, root, small, large)) == 3
    assert own.get(ids[1]) == b""  # announced
    for each in (small, large, root):
        own.put(get_object_id(each), each)
        own.put(get_object_id(each), each)  # again: nothing is left of the second
    assert [path.read_bytes() for path in files(tmp_path)] == [large]
    assert [own.get(name) for name in ids] == [small, large]
    assert own.get("0" * 64) is None
    assert (tmp_path / "superlink.db.objects").stat().st_mode & 0o77 == 0

    own.delete(ids[1])  # the root refers to it
    assert own.get(ids[1]) == large
    own.delete(get_object_id(root))
    assert len(own) == 0
    assert not files(tmp_path)


def test_what_two_messages_share_stays_for_the_second(tmp_path: Path) -> None:
    own, large = store(tmp_path), thing(LARGE, 2)
    roots = [thing(5, seed, get_object_id(large)) for seed in (3, 4)]
    assert [len(expect(own, root, large)) for root in roots] == [2, 2]
    own.put(get_object_id(large), large)
    own.delete(get_object_id(roots[0]))
    assert own.get(get_object_id(large)) == large
    own.delete_objects_in_run(RUN)
    assert not files(tmp_path)


def test_what_is_not_expected_or_not_what_it_claims_is_refused(tmp_path: Path) -> None:
    own, large = store(tmp_path), thing(LARGE, 2)
    with pytest.raises(NoObjectInStoreError):
        own.put(get_object_id(large), large)
    expect(own, large)
    with pytest.raises(ValueError, match="does not match"):
        own.put(get_object_id(large), large + b"!")
    forged = thing(LARGE, 2)[:-1]  # shorter than it says
    expect(own, forged)
    with pytest.raises(UnexpectedObjectContentError):
        own.put(get_object_id(forged), forged)
    # a row that names a file of somebody else's choosing
    named = flower_store._NAMES + b"/etc/passwd"
    expect(own, named)
    with pytest.raises(UnexpectedObjectContentError):
        own.put(get_object_id(named), named)
    assert own.get(get_object_id(named)) == b""
    assert not files(tmp_path)


def test_a_transaction_that_fails_leaves_the_object(tmp_path: Path) -> None:
    own, large = store(tmp_path), thing(LARGE, 2)
    name = get_object_id(large)
    expect(own, large)
    own.put(name, large)

    def fail() -> None:
        with own.session():
            own.delete(name)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert own.get(name) == large


@pytest.mark.parametrize("harm", ["cut", "gone", "none"])
def test_after_a_crash_only_what_is_whole_is_there(tmp_path: Path, harm: str) -> None:
    own, large = store(tmp_path), thing(LARGE, 2)
    expect(own, large)
    own.put(get_object_id(large), large)
    (path,) = files(tmp_path)
    (path.parent / "half").write_bytes(b"an object that was just being sent")
    if harm == "cut":
        path.write_bytes(large[:100])
    elif harm == "gone":
        path.unlink()
    again = store(tmp_path)
    if harm == "none":
        assert again.get(get_object_id(large)) == large
        assert files(tmp_path) == [path]
    else:
        assert not files(tmp_path)
        assert expect(again, large) == [get_object_id(large)]  # it may be sent again
        again.put(get_object_id(large), large)
        assert again.get(get_object_id(large)) == large


def test_the_program_uses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flower_store.object_store_factory, "SqlObjectStore", SqlObjectStore)
    made: list[ObjectStore] = []

    def program() -> None:
        made.append(ObjectStoreFactory(str(tmp_path / "superlink.db")).store())

    monkeypatch.setattr(flower_store, "flower_superlink", program)
    flower_store.main()
    assert isinstance(made[0], FileObjectStore)
