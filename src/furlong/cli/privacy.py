"""furlong privacy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import console, say
from furlong.cli.cost import read_sizes
from furlong.cli.options import with_settings
from furlong.errors import FurlongError
from furlong.methods.wrappers.private import Private
from furlong.runs import config
from furlong.runs.cost import without_data
from furlong.runs.prepare import prepare
from furlong.words import plural


@with_settings()
def privacy(
    config_file: Annotated[str | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    epsilon: float | None = None,
    sizes: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    settings: dict[str, Any],
) -> None:
    """Plan a privacy budget: noise, rounds and what is left of the signal, without training.

    Takes the options of ``furlong run``. The data are read to know how many images each client has,
    unless ``--sizes`` says so. Without ``--privacy.level`` the level is record.

    Parameters
    ----------
    config_file
        A TOML file, or paper:ADDRESS (see ``furlong papers``); options override it.
    epsilon
        The budget of the whole run: --privacy.epsilon for short.
    sizes
        Images per client instead of reading the data: 1000,2000,500 or 10000x5.
    as_json
        Print JSON.
    """
    tree = {} if config_file is None else config.read(config_file)
    given = {config.full_name(name): value for name, value in settings.items()}
    known = {**tree.get("privacy", {})}
    if epsilon is not None:
        given["privacy.epsilon"] = epsilon
        if "noise" in known:
            given["privacy.noise"] = None
    if known.get("level", "none") == "none":
        given.setdefault("privacy.level", "record")
    resolved = config.from_tree(tree, given, config_file or "options")
    if resolved.privacy.level == "none":
        raise FurlongError("privacy.level is none: there is nothing to plan. Use client or record.")
    if sizes is None:
        server = prepare(resolved, training=False).server
    else:
        server = without_data(resolved, read_sizes(sizes), 3, resolved.data.image_size or 32)
    method = server.method
    assert isinstance(method, Private)
    rows, whole = [], server.setup.rounds
    for rounds in sorted({whole, max(1, whole // 2), max(1, whole // 4), max(1, whole // 10)}):
        setup = replace(server.setup, rounds=rounds)
        found = method.forecast(setup)
        rows.append((rounds, found, method.warning(setup, found)))
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "rounds": rounds,
                        "epsilon": found.epsilon,
                        "delta": found.delta,
                        "noise": found.noise,
                        "ratio": found.ratio,
                        "parameters": found.parameters,
                        "clients": {
                            k: {"noise": r.noise, "sampling": r.sampling, "steps": n * r.count}
                            for k, (r, n) in found.releases.items()
                        },
                    }
                    for rounds, found, _ in rows
                ]
            )
        )
        return
    table = Table("rounds", "ε", "δ", "noise σ", "noise to signal", "after all rounds")
    for rounds, found, _ in rows:
        low, high = (f"{noise:.3g}" for noise in found.noise)
        steps = max(n * r.count for r, n in found.releases.values())
        table.add_row(
            f"{rounds:,}",
            f"{found.epsilon:.3g}",
            f"{found.delta:.2g}",
            low if low == high else f"{low} to {high}",
            f"{found.ratio:,.3g}",
            f"{found.ratio / steps**0.5:,.3g}",
        )
    console.print(table)
    budget = resolved.privacy
    refused = [rounds for rounds, found, _ in rows if found.ratio > budget.max_ratio]
    say(f"Level {budget.level}: protects {method.unit}. {rows[-1][2]}")
    say(
        "Noise to signal: the length of the noise on one mean update over the longest that the "
        "update can be. After all rounds: the same for the sum of all updates, if all of them "
        "pointed the same way, which is the best case."
    )
    if refused:
        few = [*map(str, refused[:-1]), plural(refused[-1], "round")]
        say(
            f"'furlong run' refuses this with {', '.join(few)}: the noise is "
            f"more than privacy.max_ratio = {budget.max_ratio:g} times the signal."
        )
