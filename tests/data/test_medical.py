"""DICOM, NIfTI, arrays and deep images: files are made by the libraries themselves."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from furlong import load
from furlong.data.decode import decode, facts
from furlong.data.reading import EMPTY, Frame, Reading, Unusable
from furlong.data.survey import Asked, survey
from furlong.errors import FurlongError

pydicom = pytest.importorskip("pydicom")
nib = pytest.importorskip("nibabel")

NAME = "DOE^JANE"
FULL = Reading(window="full")


def dicom(path: Path, pixels: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **tags: Any) -> Path:
    """A file with the pixels (frames×)H×W(×3); ``tags`` replace what is usual."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import UID, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.7")
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = UID(syntax)
    made = Dataset()
    made.file_meta = meta
    colour = pixels.ndim > 2 and pixels.shape[-1] == 3
    bits = 8 * pixels.dtype.itemsize
    frames = pixels.ndim - colour == 3
    height, width = pixels.shape[frames], pixels.shape[frames + 1]
    usual = {
        "PatientName": NAME,
        "PatientID": "42-JANE",
        "StudyInstanceUID": "1.2.3",
        "Rows": height,
        "Columns": width,
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        **({"PlanarConfiguration": 0} if colour else {}),
        **({"NumberOfFrames": len(pixels)} if frames else {}),
    }
    data = pixels.tobytes()
    usual["PixelData"] = data + b"\0" * (len(data) % 2)
    for tag, value in {**usual, **tags}.items():
        if value is not None:
            setattr(made, tag, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)
    return path


def ramp(dtype: Any = np.uint16, scale: int = 100) -> np.ndarray:
    return (np.arange(100).reshape(10, 10) * scale).astype(dtype)


# ---------------------------------------------------------------- DICOM


def test_rescale_and_the_files_own_window(tmp_path: Path) -> None:
    """Stored 0…9900, rescaled to -1024…8876; the window 40/400 shows -160 to 239."""
    tags = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": 40, "WindowWidth": 400}
    file = dicom(tmp_path / "ct.dcm", ramp(), **tags)
    units = ramp().astype(float) - 1024
    low, high = 40 - 0.5 - 399 / 2, 40 - 0.5 + 399 / 2
    wanted = np.rint(np.clip((units - low) / (high - low), 0, 1) * 255)
    assert np.abs(decode(file, None)[0] - wanted).max() <= 1
    assert (decode(file, None) == decode(file, None)[0]).all()  # grey three times
    fixed = decode(file, None, how=Reading(window="-1024:976"))[0]
    assert np.abs(fixed - np.rint(np.clip((units + 1024) / 2000, 0, 1) * 255)).max() <= 1
    percent = decode(file, None, how=Reading(window="percentile:0:100"))[0]
    assert (percent.min(), percent.max()) == (0, 255)
    assert abs(int(percent[5, 0]) - round(255 * 50 / 99)) <= 1


@pytest.mark.parametrize("function", ["LINEAR_EXACT", "SIGMOID"])
def test_other_window_functions(tmp_path: Path, function: str) -> None:
    tags = {"WindowCenter": 5000, "WindowWidth": 4000, "VOILUTFunction": function}
    seen = decode(dicom(tmp_path / "a.dcm", ramp(), **tags), None)[0].astype(int)
    assert abs(int(seen[5, 0]) - 128) <= 1
    assert (np.diff(seen.ravel()) >= 0).all()
    assert (seen[0, 0] == 0) == (function == "LINEAR_EXACT")


def test_window_of_pydicom_is_ours(tmp_path: Path) -> None:
    """The library's own function is the reference."""
    tags = {"RescaleSlope": 2, "RescaleIntercept": -500, "WindowCenter": 900, "WindowWidth": 2000}
    file = dicom(tmp_path / "a.dcm", ramp(np.int16, 30), **tags)
    header = pydicom.dcmread(file)
    hounsfield = pydicom.pixels.apply_modality_lut(header.pixel_array, header)
    theirs = pydicom.pixels.apply_windowing(hounsfield, header)
    theirs = (theirs - theirs.min()) / (theirs.max() - theirs.min()) * 255
    assert np.abs(decode(file, None)[0] - theirs).max() <= 1


def test_monochrome1_is_turned_round_and_padding_is_black(tmp_path: Path) -> None:
    dark = dicom(tmp_path / "1.dcm", ramp(), PhotometricInterpretation="MONOCHROME1")
    bright = dicom(tmp_path / "2.dcm", ramp())
    assert (decode(dark, None) == 255 - decode(bright, None)).all()
    pixels = ramp(np.int16) + 100
    pixels[0] = -2000  # outside of the scanned circle
    padded = decode(dicom(tmp_path / "3.dcm", pixels, PixelPaddingValue=-2000), None)[0]
    assert (padded[0] == 0).all()
    assert padded[1, 0] < 10  # the padding did not stretch the window
    tags = {"PixelPaddingValue": -2000, "PhotometricInterpretation": "MONOCHROME1"}
    assert (decode(dicom(tmp_path / "4.dcm", pixels, **tags), None)[0, 0] == 0).all()


def test_eight_bits_stay_as_they_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(50, 90, (8, 8), dtype=np.uint8)
    file = dicom(tmp_path / "us.dcm", pixels)
    for how in (Reading(), Reading(window="percentile"), Reading(window="0:10")):
        assert (decode(file, None, how=how)[0] == pixels).all()


def test_colours(tmp_path: Path) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = dicom(tmp_path / "rgb.dcm", rgb)
    assert (decode(file, None) == rgb.transpose(2, 0, 1)).all()
    planar = dicom(
        tmp_path / "planar.dcm", rgb, PlanarConfiguration=1,
        PixelData=rgb.transpose(2, 0, 1).tobytes(),
    )  # fmt: skip
    assert (decode(planar, None) == rgb.transpose(2, 0, 1)).all()
    ybr = np.asarray(Image.fromarray(rgb).convert("YCbCr"))
    turned = decode(
        dicom(tmp_path / "ybr.dcm", ybr, PhotometricInterpretation="YBR_FULL"), None
    ).astype(int)
    assert np.abs(turned - rgb.transpose(2, 0, 1)).max() <= 4
    assert facts(file).channels == "RGB"


def test_palette(tmp_path: Path) -> None:
    table = np.arange(256, dtype=np.uint16) << 8
    names = {"Red": table, "Green": table[::-1].copy(), "Blue": np.zeros(256, np.uint16)}
    tags: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for colour, values in names.items():
        tags[f"{colour}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        tags[f"{colour}PaletteColorLookupTableData"] = values.tobytes()
    index = np.arange(64, dtype=np.uint8).reshape(8, 8)
    seen = decode(dicom(tmp_path / "p.dcm", index, **tags), None).astype(int)
    assert np.abs(seen[0] - index).max() <= 1
    assert np.abs(seen[1] - (255 - index.astype(int))).max() <= 1
    assert (seen[2] == 0).all()


def test_a_table_instead_of_a_window(tmp_path: Path) -> None:
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    table = Dataset()
    table.LUTDescriptor = [100, 0, 16]
    table.LUTData = (np.arange(100, 200, dtype=np.uint16) * 257).tobytes()
    file = dicom(tmp_path / "v.dcm", ramp(np.uint16, 1), VOILUTSequence=Sequence([table]))
    assert decode(file, None)[0].ravel().tolist() == list(range(100, 200))


def test_every_frame_is_an_image_and_a_file_is_one_patient(tmp_path: Path) -> None:
    frames = np.stack([np.full((8, 8), 10 * k, np.uint8) for k in range(5)])
    dicom(tmp_path / "cine.dcm", frames, PatientID=None, StudyInstanceUID=None)
    dicom(tmp_path / "other.dcm", frames[0] + 100, PatientID=None, StudyInstanceUID=None)
    images = load(f"folder:{tmp_path}")
    assert images.pixels[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 100]
    assert images.patients is not None
    assert images.patients.tolist() == [1] * 5 + [-1]  # nothing tells whose the other one is


def test_rescale_of_every_frame(tmp_path: Path) -> None:
    """Enhanced files keep rescale and window in groups of every frame."""
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    groups = []
    for slope in (1, 2):
        inner, group = Dataset(), Dataset()
        inner.RescaleSlope, inner.RescaleIntercept = slope, 0
        group.PixelValueTransformationSequence = Sequence([inner])
        groups.append(group)
    pixels = np.full((2, 8, 8), 100, np.uint16)
    tags = {"PerFrameFunctionalGroupsSequence": Sequence(groups)}
    file = dicom(tmp_path / "e.dcm", pixels, **tags)
    how = Reading(window="0:255")
    seen = [int(decode(Frame(file, k), None, how=how)[0, 0, 0]) for k in range(2)]
    assert seen == [100, 200]


def test_patients_of_dicom_files_are_told_apart_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k, patient in enumerate(["JANE", "JOHN", "JANE", ""]):
        study = f"1.{k}"
        dicom(tmp_path / f"{k}.dcm", ramp(), PatientID=patient, StudyInstanceUID=study)
    (tmp_path / "bad.dcm").write_bytes((tmp_path / "0.dcm").read_bytes()[:400])
    dicom(tmp_path / "odd.dcm", ramp(), RescaleSlope=None, Rows=0, PatientName="X^" + NAME)
    images = load(f"folder:{tmp_path}", image_size=10, cache=tmp_path / "cache")
    assert images.patients is not None
    assert images.patients.tolist() == [0, 1, 0, 2]
    assert {each.name for each in images.skipped} == {"bad.dcm", "odd.dcm"}
    written = b"".join(f.read_bytes() for f in (tmp_path / "cache").rglob("*.json"))
    said = repr(images) + capsys.readouterr().err + written.decode()
    for word in ("JANE", "JOHN", NAME):
        assert word not in said


@pytest.mark.parametrize("tag", ["WindowCenter", "RescaleSlope"])
def test_a_name_where_a_number_should_be_is_never_quoted(
    tmp_path: Path, tag: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries put the value that they cannot read into their message."""
    file = dicom(tmp_path / "odd.dcm", ramp(), **{"WindowWidth": 9, tag: "87654321"})
    file.write_bytes(file.read_bytes().replace(b"87654321", NAME.encode()))
    Image.new("RGB", (10, 10)).save(tmp_path / "good.png")
    images = load(f"folder:{tmp_path}", image_size=10)
    (skipped,) = images.skipped
    assert skipped.reason == "corrupt or truncated DICOM file (ValueError)"
    assert "JANE" not in caplog.text + "".join(capsys.readouterr())


def test_the_librarys_own_log_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It quotes what does not fit: here a name in the place of a study's number."""
    file = dicom(tmp_path / "odd.dcm", ramp(), StudyInstanceUID="1.2.34567")
    file.write_bytes(file.read_bytes().replace(b"1.2.34567", f"{NAME}.".encode()))
    caplog.set_level(logging.INFO, logger="pydicom")
    assert len(load(f"folder:{tmp_path}", image_size=10)) == 1
    assert caplog.text == ""
    caplog.set_level(logging.INFO, logger="pydicom")
    with pytest.warns(UserWarning, match="Invalid value"):
        pydicom.dcmread(file).get("StudyInstanceUID")
    assert "JANE" in caplog.text  # it would have spoken


def test_the_digest_of_a_patient_cannot_be_guessed(tmp_path: Path) -> None:
    """Numbers of patients are few: without a secret salt all of them could be tried."""
    from furlong.data import dicom as reader

    known = reader.about(dicom(tmp_path / "a.dcm", ramp()))
    for size in (16, 32, 64):
        for value in ("42-JANE", "1.2.3"):
            guess = hashlib.blake2b(value.encode(), digest_size=size).hexdigest()
            assert guess not in (known.patient, known.study)
    assert known.patient
    command = (
        "import sys; from pathlib import Path; from furlong.data import dicom; "
        "print(dicom.about(Path(sys.argv[1])).patient)"
    )
    other = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path / "a.dcm")],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout.strip()  # fmt: skip
    assert len(other) == len(known.patient)
    assert other != known.patient


def test_a_file_of_many_bad_frames_is_one_line(tmp_path: Path) -> None:
    """Else it hides all others."""
    dicom(tmp_path / "film.dcm", ramp(), NumberOfFrames=300)
    (tmp_path / "note.png").write_text("no image")
    Image.new("RGB", (10, 10)).save(tmp_path / "good.png")
    skipped = load(f"folder:{tmp_path}", image_size=10).skipped
    assert [each.name for each in skipped] == ["film.dcm", "note.png"]
    assert skipped[0].reason == "corrupt or truncated DICOM file (ValueError), 299 images of it"
    (part,) = survey(Asked(str(tmp_path)))
    assert [each.name for each in part.skipped] == ["film.dcm", "note.png"]


def test_numbers_of_patients_do_not_depend_on_the_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from furlong.data import dicom as reader

    for k in range(12):
        dicom(tmp_path / f"{k:02}.dcm", ramp(), PatientID=f"P{k % 5}")
    found = []
    for salt in (b"a", b"b"):
        monkeypatch.setattr(reader, "_SALT", salt)
        found.append(load(f"folder:{tmp_path}").patients)
    assert torch.equal(found[0], found[1])


def test_compressed_files(tmp_path: Path) -> None:
    from pydicom.encaps import encapsulate

    file = dicom(tmp_path / "rle.dcm", ramp())
    packed = pydicom.dcmread(file)
    packed.compress(pydicom.uid.RLELossless)
    packed.save_as(file)
    assert (decode(file, None) == decode(dicom(tmp_path / "raw.dcm", ramp()), None)).all()
    # JPEG-LS: no decoder in this environment's list, or one that finds the stream corrupt
    unknown = dicom(
        tmp_path / "ls.dcm", ramp(), "1.2.840.10008.1.2.4.80", PixelData=encapsulate([b"\0" * 64])
    )
    with pytest.raises(Unusable, match=r"JPEG-LS.*pip install|corrupt"):
        decode(unknown, None)
    deflated = dicom(tmp_path / "d.dcm", ramp(), "1.2.840.10008.1.2.1.99")
    with pytest.raises(Unusable, match="deflated"):
        decode(deflated, None)


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"Rows": 65_000, "Columns": 65_000}, "50 megapixels"),
        ({"NumberOfFrames": 2_000_000_000}, "the limit is 20,000"),
        ({"NumberOfFrames": 50}, "corrupt or truncated"),
        ({"SamplesPerPixel": 4}, "4 samples"),
        ({"Rows": None}, "without an image"),
        ({"PixelData": b"\0\0"}, "corrupt or truncated"),
        ({"BitsAllocated": 24}, "24 bits"),
    ],
)
def test_hostile_dicom(tmp_path: Path, tags: dict[str, Any], reason: str) -> None:
    dicom(tmp_path / "bad.dcm", ramp(), **tags)
    Image.new("RGB", (10, 10)).save(tmp_path / "good.png")
    images = load(f"folder:{tmp_path}", image_size=10)
    assert len(images) >= 1
    assert images.skipped
    assert all(reason in each.reason and NAME not in each.reason for each in images.skipped)


def test_without_pydicom_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dicom(tmp_path / "a.dcm", ramp())
    nib.save(nib.Nifti1Image(np.ones((4, 4, 4)), np.eye(4)), tmp_path / "b.nii")
    Image.new("RGB", (10, 10)).save(tmp_path / "good.png")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    reasons = {each.name: each.reason for each in load(f"folder:{tmp_path}").skipped}
    assert reasons.keys() == {"a.dcm", "b.nii"}
    assert reasons["a.dcm"].endswith("pip install pydicom")
    assert reasons["b.nii"].endswith("pip install nibabel")


# ---------------------------------------------------------------- NIfTI


def volume(path: Path, voxels: np.ndarray, affine: Any = None, **header: Any) -> Path:
    made = nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine)
    if header:
        made.header.set_slope_inter(**header)
    nib.save(made, path)
    return path


def corner(shape: tuple[int, int, int] = (6, 8, 10)) -> np.ndarray:
    """Bytes of a volume that is brightest at the right, the front and the head."""
    x, y, z = np.indices(shape)
    return (x * 20 + y * 10 + z * 5).astype(np.uint8)


@pytest.mark.parametrize("packed", [".nii", ".nii.gz"])
def test_slices_lie_as_they_are_seen(tmp_path: Path, packed: str) -> None:
    """Axial: the front is at the top, the patient's right at the right, however it is stored."""
    voxels = corner()
    plain = volume(tmp_path / f"plain{packed}", voxels)
    axial = decode(Frame(plain, 7), None)[0]
    assert (axial == voxels[:, :, 7].T[::-1]).all()
    assert axial.shape == (8, 6)
    assert axial[0, -1] == axial.max()
    for slices, cut in (("coronal", voxels[:, 3, :]), ("sagittal", voxels[3, :, :])):
        assert (decode(Frame(plain, 3), None, how=Reading(slices=slices))[0] == cut.T[::-1]).all()
    # the same body, stored with its axes in another order and direction
    turned = volume(
        tmp_path / f"turned{packed}",
        np.ascontiguousarray(voxels[::-1].transpose(2, 0, 1)),
        np.array([[0, -1, 0, 5], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]),
    )
    assert (decode(Frame(turned, 7), None)[0] == axial).all()


def test_every_third_slice_and_none_that_is_empty(tmp_path: Path) -> None:
    voxels = np.zeros((12, 12, 10), np.int16)
    voxels[2:10, 2:10, 2:9] = np.arange(8)[:, None, None] * 100 + 300
    volume(tmp_path / "a.nii.gz", voxels)
    volume(tmp_path / "b.nii.gz", voxels)
    images = load(f"folder:{tmp_path}")
    assert len(images) == 14
    assert images.patients is not None
    assert images.patients.tolist() == [0] * 7 + [1] * 7
    assert images.skipped == ()  # nothing is wrong with an empty slice
    assert images.notes == ("6 empty slices of volumes were left out.",)
    assert len(load(f"folder:{tmp_path}", how=Reading(slices="axial:3"))) == 4  # 3 and 6
    assert len(load(f"folder:{tmp_path}", strict=True)) == 14
    with pytest.raises(Unusable, match=EMPTY):
        decode(Frame(tmp_path / "a.nii.gz", 0), None)


def test_one_window_for_a_volume_and_its_scaling(tmp_path: Path) -> None:
    voxels = np.zeros((10, 10, 4), np.int16)
    voxels[:, :, 0], voxels[:, :, 1], voxels[:, :, 2], voxels[:, :, 3] = 50, 100, 150, 200
    file = volume(tmp_path / "a.nii", voxels, slope=2, inter=-100)
    levels = [int(decode(Frame(file, k), None, how=Reading(window="-100:412"))[0, 0, 0])
              for k in range(4)]  # fmt: skip
    raw = nib.load(file).get_fdata()[0, 0]
    assert levels == np.rint((raw + 100) / 512 * 255).tolist()
    by_itself = [int(decode(Frame(file, k), None)[0, 0, 0]) for k in range(1, 4)]
    assert by_itself == [85, 170, 255]  # not each stretched for itself


def test_volumes_of_several_channels_and_of_colours(tmp_path: Path) -> None:
    four = np.random.default_rng(0).integers(50, 255, (8, 8, 3, 4)).astype(np.uint8)
    volume(tmp_path / "four.nii.gz", four)
    with pytest.raises(FurlongError, match=r"4 volumes in one file; --data\.channels 4"):
        load(f"folder:{tmp_path}")
    images = load(f"folder:{tmp_path}", how=Reading(channels=4))
    assert tuple(images.pixels.shape) == (3, 4, 8, 8)
    assert (images.pixels[1].numpy() == four[:, ::-1, 1].transpose(2, 1, 0)).all()
    rgb = np.zeros((8, 8, 3), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    rgb["R"], rgb["G"] = 200, 100
    nib.save(nib.Nifti1Image(rgb, np.eye(4)), tmp_path / "rgb.nii")
    assert decode(Frame(tmp_path / "rgb.nii", 1), None)[:, 0, 0].tolist() == [200, 100, 0]


def header_of(**fields: Any) -> bytearray:
    header = nib.Nifti1Header()
    header.set_data_shape((8, 8, 8))
    header.set_data_dtype(np.int16)
    for name, value in fields.items():
        header[name] = value
    header["vox_offset"] = fields.get("vox_offset", 352)
    header["magic"] = b"n+1"
    return bytearray(header.binaryblock) + b"\0" * 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dim": [3, 30_000, 30_000, 30_000, 1, 1, 1, 1]}, "the limit is 1 GB"),
        ({"dim": [3, 8_000, 8_000, 2, 1, 1, 1, 1]}, "50 megapixels"),
        ({"dim": [3, 8, 8, 25_000, 1, 1, 1, 1]}, "the limit is 20,000"),
        ({"vox_offset": 2e9}, "begin at byte"),
        ({"datatype": 32, "bitpix": 64}, "type complex64"),
        ({}, "truncated"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_hostile_volumes(tmp_path: Path, fields: dict[str, Any], reason: str, packed: bool) -> None:
    data = bytes(header_of(**fields))
    (tmp_path / f"a.nii{'.gz' if packed else ''}").write_bytes(
        gzip.compress(data) if packed else data
    )
    with pytest.raises(FurlongError, match="no readable image") as error:
        load(f"folder:{tmp_path}")
    assert reason in str(error.value)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """Behind a small volume there are 300 MB of zeros, of which nothing is read."""
    import tracemalloc

    voxels = np.full((8, 8, 8), 99, np.int16)
    voxels[:4] = 7
    body = bytes(header_of()) + voxels.tobytes(order="F")
    with gzip.open(tmp_path / "a.nii.gz", "wb", compresslevel=1) as file:
        file.write(body)
        for _ in range(30):
            file.write(b"\0" * 10_000_000)
    tracemalloc.start()
    assert len(load(f"folder:{tmp_path}")) == 8
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_mutated_medical_files_are_read_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = [dicom(tmp_path / "a.dcm", ramp()), volume(tmp_path / "b.nii", corner())]
    for file in files:
        good = file.read_bytes()
        for k in range(60):
            bad = bytearray(good)
            for place in rng.integers(0, min(len(good), 900), 3):
                bad[place] = rng.integers(256)
            odd = tmp_path / f"odd{k}{file.suffix}"
            odd.write_bytes(bytes(bad))
            said = ""
            try:
                assert decode(odd, (8, 8)).shape == (3, 8, 8)
                facts(odd)
            except Unusable as why:
                said = str(why)
            assert "JANE" not in said


# ---------------------------------------------------------------- arrays, TIFF, windows


def test_arrays_of_any_number_of_channels(tmp_path: Path) -> None:
    last = np.random.default_rng(0).integers(0, 256, (8, 9, 5), dtype=np.uint8)
    np.save(tmp_path / "last.npy", last)
    np.save(tmp_path / "first.npy", last.transpose(2, 0, 1))
    np.save(tmp_path / "grey.npy", last[..., 0])
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    images = load(f"folder:{tmp_path}", how=Reading(channels=5))
    assert (images.pixels[0] == images.pixels[1]).all()
    assert (images.pixels[0].numpy() == last.transpose(2, 0, 1)).all()
    reasons = {each.name: each.reason for each in images.skipped}
    assert "data.channels is 5" in reasons["grey.npy"]
    assert "corrupt" in reasons["objects.npy"]
    assert decode(tmp_path / "grey.npy", None).shape == (3, 8, 9)


def test_a_file_that_is_gone_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="there is no such file"):
        decode(Frame(tmp_path / "gone.nii", 3), None)
    three = [Image.new("RGB", (8, 8), (9, 8, 7)) for _ in range(3)]
    three[0].save(tmp_path / "a.tif", save_all=True, append_images=three[1:])
    assert decode(tmp_path / "a.tif", None)[:, 0, 0].tolist() == [9, 8, 7]  # three pages, one used


def test_pages_of_a_tiff_are_channels(tmp_path: Path) -> None:
    pages = [Image.fromarray((ramp() + 50 * k).astype(np.uint16)) for k in range(4)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    how = Reading(channels=4, window="0:65535")
    pixels = decode(tmp_path / "a.tif", None, how=how)
    assert pixels.shape == (4, 10, 10)
    assert [int(each[9, 9]) for each in pixels] == [39, 39, 39, 39]
    assert decode(tmp_path / "a.tif", None).shape == (3, 10, 10)  # the first page alone
    with pytest.raises(Unusable, match="1 channel"):
        decode(tmp_path / "a.tif", None, how=Reading(channels=7))


def test_windows_of_deep_images(tmp_path: Path) -> None:
    deep = np.full((100, 100), 1000, np.uint16)
    deep[:50] = 3000
    deep[0, 0], deep[99, 99] = 65_535, 0  # two broken pixels
    Image.fromarray(deep).save(tmp_path / "a.png")
    seen = decode(tmp_path / "a.png", None)[0]
    assert (seen[20, 20], seen[80, 80]) == (255, 0)  # percentiles pass the two over
    full = decode(tmp_path / "a.png", None, how=FULL)[0]
    assert (full[20, 20], full[80, 80]) == (round(3000 / 257), round(1000 / 257))
    fixed = decode(tmp_path / "a.png", None, how=Reading(window="1000:5000"))[0]
    assert (fixed[20, 20], fixed[80, 80]) == (128, 0)
    floats = np.linspace(-1, 1, 10_000, dtype=np.float32).reshape(100, 100)
    floats[5, 5] = np.nan
    Image.fromarray(floats).save(tmp_path / "f.tif")
    seen = decode(tmp_path / "f.tif", None)[0]
    assert abs(int(seen[50, 0]) - 128) <= 1
    assert seen[5, 5] == 0
    spots = np.zeros((100, 100), np.uint16)
    spots[3, 3] = 500  # so few that both percentiles are 0
    Image.fromarray(spots).save(tmp_path / "s.png")
    assert decode(tmp_path / "s.png", None)[0, 3, 3] == 255


def test_bytes_do_not_go_through_a_window(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(90, 120, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for window in ("auto", "percentile", "full", "0:10"):
        seen = decode(tmp_path / "a.png", None, how=Reading(window=window))
        assert (seen == pixels.transpose(2, 0, 1)).all()
    grey = decode(tmp_path / "a.png", None, how=Reading(channels=1))
    assert (grey[0] == np.asarray(Image.fromarray(pixels).convert("L"))).all()


@pytest.mark.parametrize("window", ["wide", "5", "9:1", "percentile:5", "percentile:5:101", "a:b",
                                    "nan:1", "0:inf", ""])  # fmt: skip
def test_windows_that_mean_nothing(window: str) -> None:
    with pytest.raises(FurlongError, match=r"data\.window"):
        Reading(window=window)


@pytest.mark.parametrize("slices", ["across", "axial:0", "axial:x", "axial:-1", "axial:"])
def test_slices_that_mean_nothing(slices: str) -> None:
    with pytest.raises(FurlongError, match=r"data\.slices"):
        Reading(slices=slices)


def test_an_array_that_says_it_is_huge(tmp_path: Path) -> None:
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (900000, 900000), }"
    text += b" " * (117 - len(text)) + b"\n"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    (tmp_path / "a.npy").write_bytes(head + b"\0" * 100)
    with pytest.raises(Unusable, match="corrupt"):
        decode(tmp_path / "a.npy", None)
