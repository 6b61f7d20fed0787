"""What a survey of images means: a summary, settings that suit the images, the next commands."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from typing import Any

from furlong.data.cache import AUTO_CACHE_BYTES
from furlong.data.duplicates import Group, duplicates, near_duplicates
from furlong.data.survey import Part, Seen, locate

SIZES = (32, 48, 64, 96, 128)


def summarise(data: str, group_by: str | None, parts: list[Part]) -> dict[str, Any]:
    """All that `survey` found, as plain values for printing or JSON."""
    seen = [each for part in parts for each in part.seen]
    kind, path = locate(data)
    sites = Counter(site for part in parts for site in part.sites if site)
    classes = Counter(name for part in parts for name in part.classes if name)
    if set(sites) <= {"."}:  # no subfolders
        sites.clear()
    found: dict[str, Any] = {
        "data": f"{kind}:{path}",
        "images": len(seen),
        "splits": {part.split: len(part.seen) for part in parts},
        "sites": dict(sorted(sites.items())),
        "classes": dict(sorted(classes.items())),
        "skipped": [
            {"name": each.name, "reason": each.reason} for part in parts for each in part.skipped
        ],
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
        found["suggested"] = _suggested(found)
        found["next"] = _commands(found, group_by)
    return found


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
        "animated": sum(each.frames > 1 for each in seen),
        "colourless": sum(each.colourless for each in seen),
    }


def _suggested(found: dict[str, Any]) -> dict[str, Any]:
    """Image size, encoder, augmentation and batch size, each with its reason."""
    size, size_why = _size(found)
    encoder, encoder_why = _encoder(found["images"])
    augment, augment_why = _augment(found)
    clients = _clients(found["images"])
    least = min(found["sites"].values(), default=found["images"] // clients)
    heap = "one client" if clients == 1 else f"each of {clients} clients"
    whose = "the smallest site" if found["sites"] else heap
    batch = max(8, min(128, 1 << max(0, (least // 4).bit_length() - 1)))
    pixels = found["images"] * 3 * size * size
    return {
        "image_size": {"value": size, "reason": size_why},
        "encoder": {"value": encoder, "reason": encoder_why},
        "augment": {"value": augment, "reason": augment_why},
        "batch_size": {
            "value": batch,
            "reason": f"{whose} ({least:,} images) then takes at least four steps a round"
            if least >= 4 * batch
            else f"{whose} has {least:,} image{'' if least == 1 else 's'} only",
        },
        "decoded": {
            "bytes": pixels,
            "where": "in memory" if pixels <= AUTO_CACHE_BYTES else "in a cache file on disk",
        },
    }


def _size(found: dict[str, Any]) -> tuple[int, str]:
    short, width, height = found["shorter_side"], found["width"], found["height"]
    if found["one_size"] and width["max"] == height["max"] <= 96:
        return int(width["max"]), "all images have this size; nothing is resized"
    fit = [size for size in SIZES if size <= short["tenth"]]
    if not fit:
        return SIZES[0], "the smallest that is sensible; smaller images are enlarged"
    if fit[-1] == SIZES[-1]:
        return fit[-1], "a compromise: 224 would show finer details and take three times as long"
    return fit[-1], f"nine images in ten have at least {short['tenth']} pixels on the shorter side"


def _encoder(images: int) -> tuple[str, str]:
    if images < 2_000:
        return "small", f"too few images ({images:,}) for a larger network; this one is quick"
    if images < 200_000:
        return "resnet18", "the papers' choice for tens of thousands of images"
    return "resnet50", "enough images for a larger network; resnet18 is faster"


def _augment(found: dict[str, Any]) -> tuple[str, str]:
    if found["colourless"] > 0.9 * found["images"]:
        return "mfcl", (
            "the images are grey, so changes of hue do nothing and strong ones of brightness take "
            "much away. All recipes flip: mind that where left and right matter"
        )
    return "fedu", (
        "colour images: crops, flips, strong changes of colour. Where colour is what counts "
        "(stains, plants), try mfcl (weaker) or flip_crop (no change of colour)"
    )


def _clients(images: int) -> int:
    """How many clients a heap is dealt out to: five, if each gets the two that training needs."""
    return max(1, min(5, images // 2))


def _commands(found: dict[str, Any], group_by: str | None) -> list[str]:
    """The commands that come next."""
    if found["images"] < 2:
        return ["(add images first: a client needs at least two to train)"]
    heap = f"--partition iid --clients {_clients(found['images'])}"
    split = "--partition natural" if found["sites"] else heap
    if found["sites"] and group_by:
        split += f" --data.group-by {shlex.quote(group_by)}"
    data = f"--data {shlex.quote(found['data'])} {split}"
    options = " ".join(
        f"--{flag} {found['suggested'][key]['value']}"
        for key, flag in (
            ("image_size", "data.image-size"),
            ("encoder", "encoder"),
            ("augment", "data.augment"),
            ("batch_size", "batch-size"),
        )
    )
    size = f"--data.image-size {found['suggested']['image_size']['value']}"
    return [
        f"furlong partition {data} {size}",
        f"furlong run --method fedu {data} {options} --out runs/mine",
    ]
