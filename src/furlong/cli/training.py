"""Commands that train: run, resume, demo."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from furlong.cli.common import app, console, dotted, err, results_table
from furlong.engines.pool import keep_freed_memory
from furlong.errors import FurlongError
from furlong.runs import config, loop
from furlong.words import duration, size

LOG_EVERY = 20.0  # seconds between lines of progress in a log


@app.command
def run(
    config_file: Annotated[Path | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    method: str | None = None,
    data: str | None = None,
    partition: str | None = None,
    clients: int | None = None,
    fraction: float | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    encoder: str | None = None,
    public: str | None = None,
    seed: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    engine: str | None = None,
    superlink: str | None = None,
    certs: str | None = None,
    insecure: Annotated[bool | None, Parameter(negative=())] = None,
    bound: str | None = None,
    strict: Annotated[bool | None, Parameter(negative=())] = None,
    out: str | None = None,
) -> None:
    """Learn an encoder across clients.

    Any key of a configuration file is an option too: ``--method.threshold 0.2``,
    ``--optimiser.lr 0.1``, ``--data.root PATH``. ``furlong methods NAME`` lists a method's fields.

    Parameters
    ----------
    config_file
        A TOML file; options override it.
    method
        Name of a method (see ``furlong methods``), or ``file.py:Class``.
    data
        shapes, cifar10, cifar100, fashion_mnist, mnist, stl10, mini_imagenet, folder:PATH,
        parquet:PATH.
    partition
        iid, classes:K, mfcl:S, dirichlet:A, quantity:…, natural (see ``furlong partition``).
    clients
        Number of clients.
    fraction
        Share of the clients that takes part in a round.
    rounds
        Rounds of communication.
    epochs
        Local epochs per round.
    batch_size
        Local batch size.
    encoder
        small, cnn5, resnet18, resnet50, or ``module:factory``.
    public
        A data set that the server may see, for methods that need one.
    seed
        Determines everything: data split, initial weights, every batch.
    workers
        Worker processes; the result does not depend on it.
    device
        auto, cpu, cuda, mps.
    engine
        inprocess, or flower: a simulation on Ray, or with --superlink a real federation.
    superlink
        HOST:PORT of the SuperLink (``furlong superlink``), for --engine flower.
    certs
        DIR/server of ``furlong certs DIR``, for --superlink.
    insecure
        No encryption and no authentication; on 127.0.0.1 only, for trials.
    bound
        none, or single (every client alone), or pooled (all data in one place).
    strict
        Unreadable image files are errors.
    out
        Run folder (default: a new one below runs/).
    """
    given = {k: v for k, v in locals().items() if k not in ("config_file",) and v is not None}
    settings = config.load(config_file, given | dotted)
    with watching() as (show, say):
        finished = loop.run(settings, show, say)
    _print_run(finished)


@app.command
def resume(
    folder: Path,
    /,
    *,
    workers: int | None = None,
    device: str | None = None,
    superlink: str | None = None,
    certs: str | None = None,
) -> None:
    """Go on with an interrupted run; the final weights have the same bits as without interruption.

    Parameters
    ----------
    folder
        The run's folder.
    workers
        Worker processes, if not as before.
    device
        Device, if not as before.
    superlink
        HOST:PORT of the SuperLink, if not as before.
    certs
        Folder of certificates, if not as before.
    """
    given = {k: v for k, v in locals().items() if k != "folder" and v is not None}
    with watching() as (show, say):
        finished = loop.resume(folder, given | dotted, show, say)
    _print_run(finished)


@contextmanager
def watching() -> Iterator[tuple[Any, Any]]:
    """Live progress on a terminal; elsewhere, in a log, a line now and then."""
    keep_freed_memory()
    columns = (
        SpinnerColumn(),
        TextColumn("round {task.fields[round]}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None, round="–", text="preparing")

        def show(status: loop.Status) -> None:
            loss = "–" if status.loss is None else f"{status.loss:.3f}"
            if status.knn is not None:
                seen["knn"] = f"{100 * status.knn:.1f} %"
            text = (
                f"loss {loss} · kNN {seen['knn']} · {status.images_per_second:,.0f} images/s"
                f" · up {size(status.bytes_up)} down {size(status.bytes_down)}"
                f" · {duration(status.seconds_left)} left"
            )
            now = status.round + 1
            progress.update(task, completed=status.done, total=status.total, round=now, text=text)
            if not err.is_terminal and time.monotonic() - said[0] >= LOG_EVERY:
                said[0] = time.monotonic()
                err.print(f"exchange {status.done} of {status.total} · {text}", soft_wrap=True)
            for failure in status.failures:
                err.print(f"round {status.round + 1}: {failure}", markup=False)

        seen, said = {"knn": "–"}, [time.monotonic()]
        yield show, lambda text: err.print(text, markup=False)


def _print_run(finished: loop.Run) -> None:
    summary = finished.summary
    if summary["results"]:
        console.print(results_table(summary["results"]))
    console.print(
        f"{summary['rounds']} rounds, {summary['clients']} clients, {summary['images']:,} images "
        f"in {duration(summary['seconds'])} ({summary['images_per_second']:,.0f} images/s), "
        f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down"
        + (f", {summary['failures']} failed answers" if summary["failures"] else "")
    )
    paths = f"run folder: {finished.folder}    report: {finished.folder / 'report.html'}"
    console.print(paths, markup=False, soft_wrap=True)


@app.command
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
