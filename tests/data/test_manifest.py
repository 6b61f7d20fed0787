"""Tables of paths: what is read, what is refused, and that nothing outside of the roots is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from furlong import load
from furlong.data.images import NoSplit
from furlong.data.reading import Reading
from furlong.errors import FurlongError


def image(path: Path, level: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), level).save(path)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for k in range(6):
        image(tmp_path / "site" / f"{k}.png", 10 * k)
    return tmp_path / "site"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return f"manifest:{path}"


def levels(name: str, split: str = "train", **options: object) -> list[int]:
    return load(name, split, **options).pixels[:, 0, 0, 0].tolist()  # type: ignore[arg-type]


ROWS = """path,label,site,patient,split,weight,scanner
0.png,b,x,p1,train,1,m1
1.png,a,x,p1,,2,m2
2.png,b,y,p2,Train,,m1
3.png,b,y,p3,val,1,m1
4.png,c,z,p4,test,1,m1
5.png,a,z,p1,test,1,m1
"""


def test_all_columns(place: Path) -> None:
    name = write(place / "m.csv", ROWS)
    train, test = load(name), load(name, "test")
    assert levels(name) == [0, 10, 20]
    assert levels(name, "test") == [40, 50]  # not the validation row, as there are test rows
    assert train.classes == test.classes == ("a", "b", "c")
    assert train.labels is not None
    assert train.labels.tolist() == [1, 0, 1]
    assert train.group_names == test.group_names == ("x", "y", "z")
    assert train.groups is not None
    assert train.groups.tolist() == [0, 0, 1]
    assert train.patients is not None
    assert test.patients is not None
    assert train.patients.tolist() == [0, 0, 1]
    assert test.patients.tolist() == [3, 0]  # the same numbers in every split
    assert train.weights is not None
    assert train.weights.tolist() == [1, 2, 1]
    assert test.weights is None
    assert train.weighted(torch.tensor([1, 2])).tolist() == [1, 1, 2]
    by_scanner = load(name, group_by="scanner", holdout_by="scanner")
    assert by_scanner.group_names == ("m1", "m2")
    assert by_scanner.patients is not None
    assert by_scanner.patients.tolist() == [0, 1, 0]


def test_validation_rows_are_the_test_split_where_there_is_no_other(place: Path) -> None:
    name = write(place / "m.csv", "path,split\n0.png,train\n1.png,val\n")
    assert levels(name, "test") == [10]
    with pytest.raises(NoSplit, match="has no split 'test'"):
        load(write(place / "n.csv", "path\n0.png\n"), "test")


def test_semicolons_a_byte_order_mark_and_tabs(place: Path) -> None:
    (place / "m.csv").write_bytes("﻿path; label\r\n0.png; 10\r\n1.png; 2\r\n".encode())
    found = load(f"manifest:{place / 'm.csv'}")
    assert found.classes == ("2", "10")  # numbers in their own order
    assert levels(write(place / "m.tsv", "path\tlabel\n1.png\tq\n")) == [10]


def test_a_parquet_manifest(place: Path) -> None:
    columns = {"path": ["0.png", "1.png", "2.png"], "label": [1.0, 2.0, None], "patient": [7, 7, 8],
               "image": [b"", b"", b""]}  # fmt: skip
    pq.write_table(pa.table(columns), place / "m.parquet")
    found = load(f"manifest:{place / 'm.parquet'}")
    assert found.labels is None
    assert "1 of 3 images have no label" in found.notes[0]
    assert found.patients is not None
    assert found.patients.tolist() == [0, 0, 1]


def test_several_roots(place: Path, tmp_path: Path) -> None:
    image(tmp_path / "other" / "deep" / "9.png", 90)
    name = write(tmp_path / "m.csv", "path\n0.png\ndeep/9.png\n")
    assert levels(name, root=f"{place}:{tmp_path / 'other'}") == [0, 90]
    with pytest.raises(FurlongError, match="is no folder"):
        load(name, root=f"{place}:{tmp_path / 'nowhere'}")


def test_nothing_outside_of_the_roots_is_opened(place: Path, tmp_path: Path) -> None:
    secret = image(tmp_path / "secret.png", 200)
    (place / "link.png").symlink_to(secret)
    (place / "hidden").symlink_to(tmp_path)
    rows = ["../secret.png", str(secret), "link.png", "hidden/secret.png", "gone.png", "",
            "../site/1.png", str(place / "2.png"), "x/../../secret.png",
            "\x1b[31m.png"]  # fmt: skip
    name = write(place / "m.csv", "path\n" + "\n".join(f'"{row}"' for row in rows) + "\n")
    found = load(name)
    assert found.pixels[:, 0, 0, 0].tolist() == [10, 20]
    reasons = {each.name: each.reason for each in found.skipped}
    for row in ("../secret.png", str(secret), "hidden/secret.png", "x/../../secret.png"):
        assert "outside of the manifest's folder" in reasons[row], row
    assert "out" in reasons["link.png"]
    assert reasons["gone.png"] == "there is no such file"
    assert "line 7" in reasons
    assert "\\x1b[31m.png" in reasons
    assert levels(name, root=str(tmp_path)).count(200) >= 1  # the user named the folder above


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\n0.png,a\n", "no column 'path'"),
        ("path,split\n0.png,tset\n", "split 'tset' in line 2"),
        ("path,weight\n0.png,0.5\n", "weight '0.5' in line 2"),
        ("path,weight\n0.png,-1\n", "weight '-1' in line 2"),
        ("path,weight\n0.png,1e9\n", "weight '1e9' in line 2"),
        ("path,path\n0.png,1\n", "the same name"),
        ("path,label\n0.png\n", "line 2 has 1 values"),
        ("path,site\n0.png,\n1.png,a\n", "'site' is empty in 1 row"),
        ("", "no column 'path'"),
        ('path\n"0.png\n', "is not a CSV file"),
    ],
)
def test_tables_that_cannot_be_read(place: Path, text: str, message: str) -> None:
    with pytest.raises(FurlongError, match=message):
        load(write(place / "m.csv", text))


def test_columns_that_are_not_there(place: Path) -> None:
    name = write(place / "m.csv", ROWS)
    with pytest.raises(FurlongError, match="no column 'pateint'"):
        load(name, holdout_by="pateint")
    with pytest.raises(FurlongError, match="no column 'clinic'"):
        load(name, group_by="clinic")
    (place / "latin.csv").write_bytes(b"path\ncaf\xe9.png\n")
    with pytest.raises(FurlongError, match="UTF-8"):
        load(f"manifest:{place / 'latin.csv'}")


def test_a_file_that_is_named_twice_is_one_patient(place: Path) -> None:
    found = load(write(place / "m.csv", "path\n0.png\n1.png\n0.png\n"))
    assert found.patients is not None
    assert found.patients.tolist() == [0, -2, 0]  # nobody knows whose the other one is
    assert load(write(place / "n.csv", "path\n0.png\n1.png\n")).patients is None


def test_a_column_of_patients_with_gaps(place: Path) -> None:
    """Whose image is unknown is nobody's: not a patient of its own."""
    name = write(place / "m.csv", "path,patient\n0.png,\n1.png,p\n2.png,\n3.png,p\n4.png,q\n")
    found = load(name)
    assert found.patients is not None
    assert found.patients.tolist() == [-1, 1, -3, 1, 3]
    assert (
        "warning: column 'patient' is empty in 2 of 5 rows, the first in line 2" in found.notes[0]
    )
    with pytest.raises(FurlongError, match=r"column 'patient' is empty in 2 row\(s\)"):
        load(name, holdout_by="patient")
    none = load(write(place / "n.csv", "path,patient\n0.png,\n1.png,\n"))
    assert (none.patients, none.notes) == (None, ())


def test_a_column_that_may_tell_patients_is_named(place: Path) -> None:
    name = write(place / "m.csv", "path,Patient\n0.png,p\n1.png,p\n")
    assert "column 'Patient' is passed over" in load(name).notes[0]
    assert load(name, holdout_by="Patient").notes == ()


def test_slices_with_labels_of_their_own(place: Path) -> None:
    nib = pytest.importorskip("nibabel")
    voxels = np.zeros((8, 8, 4), np.uint8)
    voxels[:] = [50, 100, 150, 200]
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), place / "v.nii.gz")
    name = write(place / "m.csv", "path,frame,label\nv.nii.gz,1,a\nv.nii.gz,3,b\nv.nii.gz,9,a\n")
    found = load(name)
    assert found.pixels[:, 0, 0, 0].tolist() == [100, 200]
    assert found.patients is not None
    assert found.patients.tolist() == [0, 0]
    assert [each.reason for each in found.skipped] == ["frame 9 is not among its 4"]
    whole = load(write(place / "n.csv", "path,site\nv.nii.gz,x\n0.png,y\n"), how=Reading())
    assert whole.groups is not None
    assert whole.groups.tolist() == [0, 0, 0, 0, 1]
