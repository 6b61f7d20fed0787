"""furlong demo."""

from __future__ import annotations

import json
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from furlong.cli.common import console, err, results_table
from furlong.errors import FurlongError


def demo(*, seeds: int = 1, out: Path = Path("runs/demo")) -> None:
    """What does federation buy? One client alone, federated and pooled, at equal training.

    Parameters
    ----------
    seeds
        Number of seeds to average over; each takes under three minutes on two cores.
    out
        Folder of the runs; a number is added if it exists.
    """
    if seeds < 1:
        raise FurlongError(f"--seeds is {seeds}; it must be at least 1")
    from furlong.reports import figures
    from furlong.runs import demo as story

    folder, number = out, 1
    while folder.exists():
        number += 1
        folder = out.with_name(f"{out.name}-{number}")
    console.print(
        "Five clients hold 1,000 images of two kinds of figures each; nobody has labels.\n"
        f"Training an encoder in three ways ({story.SETTINGS['rounds']} rounds); "
        f"the runs are kept in {folder}."
    )
    total = int(story.SETTINGS["rounds"])
    runs = []
    for seed in range(seeds):
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
            tasks = {
                name: progress.add_task(f"seed {seed}: {name:9}", total=total)
                for name in ("federated", "pooled", "alone")
            }

            def show(name: str, done: int) -> None:
                progress.update(tasks[name], completed=done)  # noqa: B023
                if done == total and not err.is_terminal and name not in said:  # noqa: B023
                    said.add(name)  # noqa: B023
                    err.print(f"seed {seed}: {name} has finished")  # noqa: B023

            said: set[str] = set()
            runs.append(story.run_seed(folder / str(seed), seed, show))
    rows = story.average(runs)
    console.print(results_table(rows))
    console.print(story.verdict(rows))
    bars = [(r["who"], r["accuracy"], r.get("std")) for r in rows if r["protocol"] == "linear"]
    figures.save(
        figures.bars(bars, "Linear probe on shapes, 5 clients × 2 classes"), folder / "demo.svg"
    )
    (folder / "demo.json").write_text(json.dumps({"seeds": seeds, "results": rows}, indent=1))
    console.print(
        f"figure: {folder / 'demo.svg'}    report: {folder / '0' / 'federated' / 'report.html'}"
    )
