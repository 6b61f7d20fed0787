"""What a survey of images means: a summary, settings that suit the images, the next commands."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from typing import Any

from furlong.data.cache import AUTO_CACHE_BYTES
from furlong.data.decode import IN_PARTS
from furlong.data.duplicates import Group, duplicates, near_duplicates
from furlong.data.reading import Reading
from furlong.data.survey import Asked, Part, Seen
from furlong.runs import config
from furlong.runs.drawn import READY
from furlong.runs.parties import augmentation

SIZES = (32, 48, 64, 96, 128)
SEEN = 32  # pixels that the encoder small takes in at once (31): of more it sees only pieces
METHOD = config.MethodSettings.name  # our recipe: the best of small sets (docs/recipe.md)
STEPS = 600  # of a client in a run; its usual settings were chosen with about as many
MOST_ROUNDS = 200


def summarise(asked: Asked, parts: list[Part]) -> dict[str, Any]:
    """All that `survey` found, as plain values for printing or JSON."""
    seen = [each for part in parts for each in part.seen]
    sites = Counter(site for part in parts for site in part.sites if site)
    classes = Counter(name for part in parts for name in part.classes if name)
    if set(sites) <= {"."}:  # no subfolders
        sites.clear()
    found: dict[str, Any] = {
        "data": asked.name,
        "images": len(seen),
        "splits": {part.split: len(part.seen) for part in parts},
        "sites": dict(sorted(sites.items())),
        "classes": dict(sorted(classes.items())),
        "patients": _patients(parts),
        "holdout_by": asked.holdout_by,
        "skipped": [
            {"name": each.name, "reason": each.reason} for part in parts for each in part.skipped
        ],
        "empty": sum(part.empty for part in parts),
        "notes": list(dict.fromkeys(note for part in parts for note in part.notes)),
    }
    for how, groups in (("same", duplicates(parts)), ("alike", near_duplicates(parts))):
        sets = [g for g in groups if len({p for p, _ in g}) > 1]
        owners = [g for g in groups if len({parts[p].sites[i] for p, i in g}) > 1]
        found[how] = {
            "groups": _named(parts, groups),
            "at_several_sites": _named(parts, owners if sites else []),
            "in_several_splits": _named(parts, sets),
        }
    if seen:
        found |= _measured(seen)
        found["window"] = _window(seen, asked.how)
        found["suggested"] = _suggested(found, parts)
        found["next"] = _commands(found, asked)
    return found


def _patients(parts: list[Part]) -> dict[str, int] | None:
    """How many there are, how many images are of unknown ones, and how many have images in several
    splits; None if nobody knows.
    """
    each = [{patient for patient in part.patients if patient >= 0} for part in parts]
    if not any(each):
        return None
    every = Counter(patient for some in each for patient in some)
    return {
        "number": len(every),
        "unknown": sum(patient < 0 for part in parts for patient in part.patients),
        "in_several_splits": sum(n > 1 for n in every.values()),
    }


def _window(seen: list[Seen], how: Reading) -> str:
    """What is done to images with more than 8 bits, in words; "" if there are none."""
    deep = [each for each in seen if each.bits > 8]
    if not deep:
        return ""
    kind, low, high = how.limits
    if kind == "fixed":
        words = f"values from {low:g} to {high:g}"
    elif kind == "full":
        words = "all values that the file's type can hold"
    else:
        words = f"the values between percentiles {low:g} and {high:g} of each image or volume"
    own = kind == "auto" and any(each.format == "DICOM" for each in deep)
    words += ", or a DICOM file's own window" if own else ""
    colour = sum(each.format == "PNG" and each.channels.startswith("RGB") for each in deep)
    note = f"; {colour:,} PNG in colour always by all values" if colour else ""
    return f"more than 8 are reduced to 8 by {words} (--data.window){note}"


def _named(parts: list[Part], groups: list[Group]) -> list[list[str]]:
    several = len(parts) > 1
    return [
        [f"{parts[p].split}/{parts[p].names[i]}" if several else parts[p].names[i] for p, i in g]
        for g in groups
    ]


def _measured(seen: list[Seen]) -> dict[str, Any]:
    """Numbers over all images."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    short = sorted(min(each.width, each.height) for each in seen)
    return {
        "bytes": sum(each.stored for each in seen),
        "width": spread([each.width for each in seen]),
        "height": spread([each.height for each in seen]),
        "aspect": spread([each.width / each.height for each in seen]),
        "shorter_side": {"min": short[0], "tenth": short[len(short) // 10], "max": short[-1]},
        "one_size": len({(each.width, each.height) for each in seen}) == 1,
        "formats": dict(Counter(each.format for each in seen).most_common()),
        "channels": dict(Counter(each.channels for each in seen).most_common()),
        "bits": {str(k): v for k, v in Counter(each.bits for each in seen).most_common()},
        "animated": sum(each.frames > 1 for each in seen if each.format not in IN_PARTS),
        "colourless": sum(each.colourless for each in seen),
    }


def _suggested(found: dict[str, Any], parts: list[Part]) -> dict[str, Any]:
    """Settings with their reasons: a method's usual ones, with a length that suits the images."""
    encoder, encoder_why = _encoder(found["images"])
    size, size_why = _size(found, encoder)
    usual = config.load(None, {"method": METHOD, "encoder": encoder, "data": found["data"]})
    held = _held(found, parts)
    clients = _clients(held)
    sizes = sorted(_sizes(parts).values()) if found["sites"] else [held // clients]
    batch, batch_why = _batch(sizes, usual.train.batch_size, clients, bool(found["sites"]))
    steps = [max(1, n // batch) for n in sizes]
    middle = statistics.median_low(steps)
    rounds = min(MOST_ROUNDS, max(20, math.ceil(STEPS / middle)))
    pixels = found["images"] * usual.data.channels * size * size
    return {
        "method": {"value": METHOD, "reason": _method_why(encoder)},
        "image_size": {"value": size, "reason": size_why},
        "encoder": {"value": encoder, "reason": encoder_why},
        "augment": {
            "value": augmentation(usual, usual.make_method()),
            "reason": _augment_why(found),
        },
        "batch_size": {"value": batch, "reason": batch_why},
        "rounds": {"value": rounds, "reason": _steps_why(steps, rounds, bool(found["sites"]))},
        "decoded": {
            "bytes": pixels,
            "where": "in memory" if pixels <= AUTO_CACHE_BYTES else "in a cache file on disk",
        },
    }


def _sizes(parts: list[Part]) -> Counter[str]:
    """Training images of every site."""
    return Counter(site for part in parts if part.split == "train" for site in part.sites)


def _held(found: dict[str, Any], parts: list[Part]) -> int:
    """How many images there are to train on."""
    return next((len(part.seen) for part in parts if part.split == "train"), found["images"])


def _batch(sizes: list[int], usual: int, clients: int, sites: bool) -> tuple[int, str]:
    """The method's usual batch, or half of it where most clients would take one step a round."""
    least, enough = sizes[0], statistics.median_low(sizes) >= 2 * usual
    batch = usual if enough else usual // 2
    heap = "one client" if clients == 1 else f"each of {clients} clients"
    who = "the smallest site" if sites else heap
    if least < batch:
        few = f"{who} has {least:,} image{'' if least == 1 else 's'} only"
        return batch, f"{few}: one batch of its own size"
    which = "the method's usual one" if enough else "half of the usual one, for more steps"
    return batch, f"{which}; {who} has {least:,} images"


def _steps_why(steps: list[int], rounds: int, sites: bool) -> str:
    """How many steps result."""
    least, middle, most = (
        f"{n * rounds:,}" for n in (steps[0], statistics.median_low(steps), steps[-1])
    )
    if not sites or least == most:
        said = f"{least} steps at every client"
    else:
        said = (
            f"{least} steps at the smallest site, {middle} at a middling one, {most} at the largest"
        )
    if statistics.median_low(steps) * rounds >= STEPS:
        return f"{said}: as many as the settings were tried with"
    return f"{said}; about {STEPS:,} are good, so more images or --epochs 2 or more would help"


def _size(found: dict[str, Any], encoder: str) -> tuple[int, str]:
    short, width, height = found["shorter_side"], found["width"], found["height"]
    if encoder == "small" and short["tenth"] > SEEN:
        return SEEN, (
            "the encoder small sees no more at once, and learnt more from 32 pixels of MRI slices "
            "than from 48; for finer details take a larger encoder with them"
        )
    if found["one_size"] and width["max"] == height["max"] <= 96:
        return int(width["max"]), "all images have this size; nothing is resized"
    fit = [size for size in SIZES if size <= short["tenth"]]
    if not fit:
        return SIZES[0], "the smallest that is sensible; smaller images are enlarged"
    if fit[-1] == SIZES[-1]:
        return fit[-1], "a compromise: 224 would show finer details and take three times as long"
    return fit[-1], f"nine images in ten have at least {short['tenth']} pixels on the shorter side"


def _encoder(images: int) -> tuple[str, str]:
    if images < 10_000:
        return "small", f"quick, and {images:,} images are few for a larger network"
    if images < 200_000:
        return "resnet18", "the papers' choice for tens of thousands of images"
    return "resnet50", "enough images for a larger network; resnet18 is faster"


def _method_why(encoder: str) -> str:
    best = "our own recipe, the best of the methods tried on small sets"
    if encoder in READY:
        return best
    return (
        f"{best}. It begins with learning from drawn scenes, which takes long with {encoder} on a "
        "processor: --init random leaves that out"
    )


def _augment_why(found: dict[str, Any]) -> str:
    usual = "the method's usual views: crops, flips, changes of brightness and colour. "
    if found["colourless"] > 0.9 * found["images"]:
        return usual + "All recipes flip: mind that where left and right matter"
    return usual + (
        "Where colour is what counts (stains, plants), try flip_crop, which leaves it alone"
    )


def _clients(images: int) -> int:
    """How many clients a heap is dealt out to: five, if each gets the two that training needs."""
    return max(1, min(5, images // 2))


def _commands(found: dict[str, Any], asked: Asked) -> list[str]:
    """The commands that come next."""
    if found["images"] < 2:
        return ["(add images first: a client needs at least two to train)"]
    suggested = {key: each.get("value") for key, each in found["suggested"].items()}
    clients = _clients(found["splits"].get("train", found["images"]))
    split = "--partition natural" if found["sites"] else f"--partition iid --clients {clients}"
    given = {
        "data.group-by": asked.group_by if found["sites"] else None,
        "data.root": asked.root,
        "data.holdout-by": asked.holdout_by,
        "data.window": asked.how.window,
        "data.channels": asked.how.channels,
        "data.slices": asked.how.slices,
    }
    plain = config.DataSettings()
    own = " ".join(
        f"--{name} {shlex.quote(str(value))}"
        for name, value in given.items()
        if value != getattr(plain, name.removeprefix("data.").replace("-", "_"))
    )
    data = f"--data {shlex.quote(found['data'])} {split} {own}".rstrip()
    size = f"--data.image-size {suggested['image_size']}"
    method = f"--method {suggested['method']} --encoder {suggested['encoder']}"
    length = f"--batch-size {suggested['batch_size']} --rounds {suggested['rounds']}"
    return [
        f"furlong partition {data} {size}",
        f"furlong run {method} {data} {size} {length} --out runs/mine",
    ]
