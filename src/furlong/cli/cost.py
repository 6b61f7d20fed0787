"""furlong cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import console
from furlong.cli.options import with_settings
from furlong.core.payload import Traffic
from furlong.errors import FurlongError
from furlong.runs import config
from furlong.runs.cost import Channel, Cost, predict, sent_once, without_data
from furlong.runs.prepare import prepare
from furlong.words import size


@with_settings()
def cost(
    config_file: Annotated[str | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    sizes: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    settings: dict[str, Any],
) -> None:
    """Predict what a run sends, per round and in total, without training.

    Takes the options of ``furlong run``. The data are read to know how many images each client has,
    unless ``--sizes`` says so.

    Parameters
    ----------
    config_file
        A TOML file, or paper:ADDRESS (see ``furlong papers``); options override it.
    sizes
        Images per client instead of reading the data: 1000,2000,500 or 10000x5.
    as_json
        Print JSON.
    """
    resolved = config.load(config_file, settings)
    if not config.sends(resolved.run.bound):
        raise FurlongError(f"bound = {resolved.run.bound}: nothing is sent to anybody.")
    if sizes is None:
        server = prepare(resolved).server
    else:
        server = without_data(resolved, read_sizes(sizes), 3, resolved.data.image_size or 32)
    costs, kinds = list(predict(server)), dict[str, list[Cost]]()
    for item in costs:
        kinds.setdefault(item.exchange.kind, []).append(item)
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "exchange": item.exchange.index,
                        "round": item.exchange.round,
                        "kind": item.exchange.kind,
                        "clients": len(item.cohort),
                        "up": asdict(item.up),
                        "down": asdict(item.down),
                    }
                    for items in kinds.values()
                    for item in items
                ]
            )
        )
        return
    table = Table("exchange", "times", "", "params", "buffers", "features", "in all", "per visit")
    table.title = "all clients together, and each time a client takes part (per visit)"
    table.title_justify = "left"
    whole = Traffic()
    for kind, items in kinds.items():
        visits = sum(len(item.cohort) for item in items)
        if not visits:
            table.add_row(kind, f"{len(items):,}", "–")  # the server's own work
            continue
        for way in ("down", "up"):
            total = sum((getattr(item, way) for item in items), Traffic())
            whole += total
            cells = (total.params, total.buffers, total.features)
            shown = [size(c) if c else "" for c in cells]
            times = f"{len(items):,}" if way == "down" else ""
            name = kind if way == "down" else ""
            table.add_row(name, times, way, *shown, size(total.total), size(total.total / visits))
    console.print(table)
    each = whole.total / max(1, len(server.setup.sizes))
    console.print(
        f"{resolved.method['name']}, {server.setup.encoder}, {len(server.setup.sizes)} clients: "
        f"{size(whole.total)} in all, {size(each)} per client. A report's own numbers (images, "
        "loss) come on top, some bytes each."
    )
    if once := sent_once(server.setup):
        console.print(
            f"What stays as it is ({size(once)}) is in no exchange; across machines every node "
            "gets it once, before the first."
        )
    if resolved.secure.sums:
        console.print(
            "Under masks a client's number takes 8 bytes on its way up instead of 4, and a round "
            "five exchanges instead of one. What the masks take to compute: benchmarks/secagg.py."
        )
        return
    sent = Channel.of(costs, len(server.setup.sizes))
    console.print(
        "Counted as in MFCL's Table 8 (32 bits per value, a channel code of rate 1/3, models both "
        f"ways), a client's model has {sent.parameters:,.0f} parameters and takes "
        f"{sent.bits_of_a_round:.3g} bits per round, {sent.bits_of_models:.3g} bits in all (phase "
        f"1); its representations have {sent.values:,.0f} values and take "
        f"{sent.bits_of_representations:.3g} bits (phase 2). All clients: {sent.bits:.3g} bits."
    )


def read_sizes(text: str) -> dict[int, int]:
    """``1000,2000`` or ``1000x5``."""
    found: list[int] = []
    for item in text.split(","):
        count, _, times = item.partition("x")
        if not count.isdecimal() or (times and not times.isdecimal()) or int(count) < 2:
            raise FurlongError(f"--sizes {text}: {item!r} is not like 1000 (at least 2) or 1000x5.")
        found += [int(count)] * int(times or 1)
    return dict(enumerate(found))
