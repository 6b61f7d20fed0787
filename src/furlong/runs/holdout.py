"""Which images are held out for evaluation where a set has no test images of its own.

Images of one patient (or of what ``data.holdout_by`` names) are nearly the same: if some of them
are trained on and others tested on, the accuracy is that of knowing the patient.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from furlong.data.images import ImageSet
from furlong.errors import FurlongError
from furlong.runs.config import Config, short
from furlong.runs.initial import by_furlong
from furlong.seeding import shuffled

SHARE = 0.1  # of the images
FEW = 5  # patients: with fewer, a number says more of them than of the encoder
HELD_OUT = "held out for evaluation"


def hold_out(images: ImageSet, settings: Config) -> tuple[Tensor, Tensor, str]:
    """Rows (int64) that are held out and the rest, either in random order; and how, in words."""
    data, seed = settings.data, settings.run.seed
    order = shuffled(len(images), seed, "holdout")
    cut = max(1, int(SHARE * len(images)))
    if data.validation and data.test_images:
        cut = data.test_images
        left = len(images) - cut
        if left < cut // 4:
            raise FurlongError(
                f"data.test_images is {cut:,}, and with data.validation that many of the "
                f"{len(images):,} training images are held out: {max(left, 0):,} would be left to "
                "train on. Lower --data.test-images, or raise --data.images."
            )
    why = "data.validation" if data.validation else "no test split"
    patients = images.patients
    if patients is None or not (patients >= 0).any() or data.holdout_by == "image":
        return order[:cut], order[cut:], f"{why}: {cut} random images are {HELD_OUT}"
    chosen = _patients(images, settings, cut)
    held = torch.isin(patients[order], chosen)
    known, strangers = int((patients[order[held]] >= 0).sum()), int((patients < 0).sum())
    count, every = int((chosen >= 0).sum()), len(set(patients[patients >= 0].tolist()))
    trained = "trained on"
    if by_furlong(init := settings.model.init):
        trained += f" here (but {short(str(init))}, which this run starts from, may have seen them)"
    words = f"{why}: {known:,} images of {count:,} of {every:,} {_called(settings)} "
    if strangers:
        words += (
            f"and {len(chosen) - count:,} of {strangers:,} images of unknown patient are "
            f"{HELD_OUT}. None of these {_called(settings)} is {trained}; of the "
            "other images some may show the same person on both sides, and then accuracy is "
            "higher than on new ones. Tell whose they are, by a manifest with a column patient or "
            "by --data.holdout-by"
        )
    else:
        words += f"are {HELD_OUT}, and none of theirs is {trained}"
    if not strangers and count < min(FEW, every // 2):
        words += (
            f". Numbers of {count} say little of others: --data.validation true "
            f"--data.test-images {int(0.3 * len(images))} holds out more"
        )
    return order[held], order[~held], words


def _called(settings: Config) -> str:
    """What images are kept together by, in words."""
    by = settings.data.holdout_by
    return "patients" if by == "auto" else f"groups by {by}"


def _patients(images: ImageSet, settings: Config, most: int) -> Tensor:
    """Random patients with at most ``most`` images in all, or the one with the fewest.

    The last patient of a site is never taken: the site would have nothing to train on.
    """
    assert images.patients is not None
    names, mine, sizes = torch.unique(images.patients, return_inverse=True, return_counts=True)
    sites = torch.zeros_like(mine) if images.groups is None else images.groups
    homes = {patient: set[int]() for patient in range(len(names))}
    for patient, site in zip(mine.tolist(), sites.tolist(), strict=True):
        homes[patient].add(site)
    left = Counter(site for home in homes.values() for site in home)  # patients of every site
    order = shuffled(len(names), settings.run.seed, "holdout").tolist()
    chosen: list[int] = []
    room = most

    def may_go(patient: int) -> bool:
        return all(left[site] > 1 for site in homes[patient])

    for patient in order:
        if sizes[patient] <= room and may_go(patient):
            chosen.append(patient)
            room -= int(sizes[patient])
            for site in homes[patient]:
                left[site] -= 1
    if not chosen:
        chosen = sorted(filter(may_go, order), key=lambda patient: int(sizes[patient]))[:1]
    if not chosen:
        raise FurlongError(
            f"nothing can be held out by {settings.data.holdout_by}: "
            + ("every site has" if images.groups is not None else "all images are of")
            + " one patient or group only. Give test images, another --data.holdout-by, or "
            "--data.holdout-by image, whose accuracy says nothing of new patients."
        )
    found: Tensor = names[torch.tensor(chosen)]
    return found


def on_both_sides(train: ImageSet, test: ImageSet) -> str | None:
    """A warning if images of one patient are among both; None if all is well."""
    if train.patients is None or test.patients is None:
        return None
    tested = {each for each in test.patients.tolist() if each >= 0}
    shared = tested & set(train.patients.tolist())
    if not shared:
        return None
    images = sum(each in shared for each in test.patients.tolist())
    return (
        f"warning: {len(shared):,} of the {len(tested):,} patients (or groups) among the test "
        f"images are among the training images too, with {images:,} of {len(test):,} test images: "
        "accuracy will be higher than on new patients. Split by patient, or hold out by patient "
        "(--data.validation true --data.holdout-by COLUMN)"
    )
