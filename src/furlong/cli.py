"""The command ``furlong``: thin, everything it does is in the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Table

import furlong
from furlong import assemble, config, experiment
from furlong.cost import Cost, predict
from furlong.engines.inprocess import keep_freed_memory
from furlong.errors import FurlongError
from furlong.methods import METHODS
from furlong.payload import Traffic, parts
from furlong.words import duration, size

app = App(
    name="furlong",
    version=furlong.__version__,
    suppress_keyboard_interrupt=False,  # main says how to go on
    help="Learn one image encoder from many parties that cannot share their images.",
)
console = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_dotted: dict[str, Any] = {}  # --section.key options of this call, taken out before cyclopts


# ---------------------------------------------------------------- run, resume


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
        inprocess.
    bound
        none, or single (every client alone), or pooled (all data in one place).
    strict
        Unreadable image files are errors.
    out
        Run folder (default: a new one below runs/).
    """
    given = {k: v for k, v in locals().items() if k not in ("config_file",) and v is not None}
    settings = config.load(config_file, given | _dotted)
    with _watching() as (show, say):
        finished = experiment.run(settings, show, say)
    _print_run(finished)


@app.command
def resume(folder: Path, /, *, workers: int | None = None, device: str | None = None) -> None:
    """Go on with an interrupted run; the final weights have the same bits as without interruption.

    Parameters
    ----------
    folder
        The run's folder.
    workers
        Worker processes, if not as before.
    device
        Device, if not as before.
    """
    given = {k: v for k, v in (("workers", workers), ("device", device)) if v is not None}
    with _watching() as (show, say):
        finished = experiment.resume(folder, given | _dotted, show, say)
    _print_run(finished)


@contextmanager
def _watching() -> Iterator[tuple[Any, Any]]:
    """Live progress on a terminal; otherwise only what went wrong."""
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

        def show(status: experiment.Status) -> None:
            loss = "–" if status.loss is None else f"{status.loss:.3f}"
            if status.knn is not None:
                seen["knn"] = f"{100 * status.knn:.1f} %"
            progress.update(
                task,
                completed=status.done,
                total=status.total,
                round=status.round + 1,
                text=f"loss {loss} · kNN {seen['knn']} · {status.images_per_second:,.0f} images/s"
                f" · up {size(status.bytes_up)} down {size(status.bytes_down)}"
                f" · {duration(status.seconds_left)} left",
            )
            for failure in status.failures:
                err.print(f"round {status.round + 1}: {failure}", markup=False)

        seen = {"knn": "–"}
        yield show, lambda text: err.print(text, markup=False)


def _print_run(finished: experiment.Run) -> None:
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


def results_table(rows: list[dict[str, Any]]) -> Table:
    """Who against protocol, in percent."""
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    table = Table(
        "encoder", *[{"knn": "kNN %", "linear": "linear probe %"}.get(p, p) for p in protocols]
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(row["who"] for row in rows):
        cells = {row["protocol"]: row for row in rows if row["who"] == name}
        table.add_row(
            name,
            *[
                f"{100 * cells[p]['accuracy']:.1f}"
                + (f" ± {100 * cells[p]['std']:.1f}" if "std" in cells[p] else "")
                if p in cells
                else "–"
                for p in protocols
            ],
        )
    return table


# ---------------------------------------------------------------- evaluate, partition


@app.command
def evaluate(
    folder: Path,
    /,
    *,
    data: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Measure a finished run's encoder: kNN and linear probe on the test split.

    Parameters
    ----------
    folder
        The run's folder.
    data
        Another data set to measure on (default: the run's own).
    as_json
        Print JSON.
    """
    settings = config.load(folder / "config.toml", ({"data": data} if data else {}) | _dotted)
    with err.status("measuring") if err.is_terminal else _nothing():
        rows = experiment.evaluate(folder, settings)
    if as_json:
        print(json.dumps(rows))
    else:
        console.print(results_table(rows))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@app.command
def partition(
    *,
    data: str | None = None,
    partition: str | None = None,
    clients: int | None = None,
    seed: int | None = None,
    figure: Path | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Show who would get which images: class counts, β-CIB, β-hetero, heat map.

    Parameters
    ----------
    data
        As for ``run``.
    partition
        iid[:stratified], classes:K, shards:K, mfcl:S[:sequential], dirichlet:A[:MIN],
        dirichlet_balanced:A, quantity:W,W,…, quantity:lognormal:S, quantity:powerlaw:P, natural.
    clients
        Number of clients.
    seed
        Of the split.
    figure
        Also draw the heat map to this .svg or .png file.
    as_json
        Print JSON.
    """
    names = ("data", "partition", "clients", "seed")
    given = {k: v for k, v in locals().items() if k in names and v is not None}
    settings = config.load(None, given | _dotted)
    train, _, notes = assemble.load_data(settings)
    about = assemble.describe_partition(train, assemble.split_data(settings, train))
    for note in notes:
        err.print(note, markup=False)
    if figure is not None:
        from furlong import figures

        title = f"{train.name}, {about['partition']}"
        drawn = (
            figures.heat_map(about["class_counts"], about["classes"], title)
            if "class_counts" in about
            else figures.sizes(about["sizes"], title)
        )
        figures.save(drawn, figure)
    if as_json:
        print(json.dumps(about))
        return
    console.print(_partition_table(about))
    if "beta_cib" in about:
        console.print(
            f"β-CIB {about['beta_cib']:.4f} bits · β-hetero {about['beta_hetero_m2']:.4f} (M²) or "
            f"{about['beta_hetero_mm1']:.4f} (M(M-1))"
        )
        shares = about["false_negatives"]
        console.print(
            f"false negatives (same class) among contrasted images: {100 * shares['local']:.1f} % "
            f"of a client's own, {100 * shares['union']:.1f} % of all clients', "
            f"{100 * shares['remote']:.1f} % of the others'"
        )
    if figure is not None:
        console.print(f"heat map: {figure}")


def _partition_table(about: dict[str, Any]) -> Table:
    """Counts with a shade of blue behind them: the heat map of a terminal."""
    counts = about.get("class_counts") or [[] for _ in about["sizes"]]
    narrow = len(counts[0]) <= 20
    columns = about.get("classes", []) if narrow else []
    table = Table(
        "client",
        "images",
        *columns,
        *([] if narrow else ["classes held"]),
        box=None,
        padding=(0, 1, 0, 0),
    )
    peak = max((n for row in counts for n in row), default=1) or 1
    for client, row in enumerate(counts):
        cells = [f"[on rgb(0,0,{40 + 160 * n // peak})]{n}[/]" if n else "·" for n in row]
        if not narrow:
            cells = [str(sum(n > 0 for n in row))]
        table.add_row(str(client), f"{about['sizes'][client]:,}", *cells)
    for column in table.columns:
        column.justify = "right"
    return table


# ---------------------------------------------------------------- methods, report


@app.command
def methods(
    name: str | None = None,
    /,
    *,
    encoder: str = "resnet18",
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """List the methods, or one method's fields, state, and what leaves a client.

    Parameters
    ----------
    name
        A method.
    encoder
        The encoder for which bytes are counted (32-pixel images).
    as_json
        Print JSON.
    """
    if name is None:
        rows = {n: {"family": r.family, "paper": r.paper} for n, r in METHODS.items()}
        if as_json:
            print(json.dumps(rows))
            return
        table = Table("method", "family", "paper")
        for listed, about in rows.items():
            table.add_row(listed, about["family"], about["paper"])
        console.print(table)
        return
    row = config.method_row(name)
    resolved = config.from_tree({}, {"method": name, "encoder": encoder}, "options").method
    sent = {
        kind: {way: _grouped(value) for way, value in flow.items()}
        for kind, flow in assemble.flows(name, encoder).items()
    }
    if as_json:
        print(
            json.dumps(
                {
                    "name": name,
                    "paper": row.paper,
                    "fields": resolved,
                    "keeps": row.cls.keeps,
                    "leaves": row.cls.leaves,
                    "caution": row.cls.caution,
                    "bytes": {
                        kind: {w: {"/".join(k): v for k, v in g.items()} for w, g in ways.items()}
                        for kind, ways in sent.items()
                    },
                }
            )
        )
        return
    console.print(f"[bold]{name}[/] ({row.family}): {(row.cls.__doc__ or '').strip()}")
    console.print(f"paper: {row.paper}", markup=False)
    table = Table("field", "default", "type", title="fields (--method.FIELD)", title_justify="left")
    hints = get_type_hints(row.cls)
    for f in fields(row.cls):  # type: ignore[arg-type]
        choices = get_args(hints[f.name])
        kind = " | ".join(map(str, choices)) if choices else hints[f.name].__name__
        table.add_row(f.name, str(resolved[f.name]), kind)
    console.print(table)
    console.print(f"stays on the client: {row.cls.keeps or 'nothing'}", markup=False)
    console.print(
        f"leaves the client: {row.cls.leaves} With them go the number of images and the means "
        "of the training loss and other logged numbers.",
        markup=False,
    )
    if row.cls.caution:
        console.print(f"criticism: {row.cls.caution}", markup=False)
    title = f"per client and exchange: {encoder}, 5 clients with 1,000 images of 32 pixels"
    table = Table("exchange", "", "field", "what", "numbers", "bytes", title=title)
    table.title_justify = "left"
    for exchange, ways in sent.items():
        for way, groups in ways.items():
            for (field_name, kind), (elements, count) in groups.items():
                table.add_row(exchange, way, field_name, kind, f"{elements:,}", size(count))
    console.print(table)


@app.command
def cost(
    config_file: Annotated[Path | None, Parameter(name="CONFIG")] = None,
    /,
    *,
    method: str | None = None,
    encoder: str | None = None,
    clients: int | None = None,
    rounds: int | None = None,
    fraction: float | None = None,
    sizes: str | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Predict what a run sends, per round and in total, without training.

    Takes the options of ``furlong run`` as ``--section.key``. The data are read to know how many
    images each client has, unless ``--sizes`` says so.

    Parameters
    ----------
    config_file
        A TOML file; options override it.
    method
        Name of a method.
    encoder
        Name of an encoder.
    clients
        Number of clients.
    rounds
        Rounds of communication.
    fraction
        Share of the clients that takes part in a round.
    sizes
        Images per client instead of reading the data: 1000,2000,500 or 10000x5.
    as_json
        Print JSON.
    """
    names = ("method", "encoder", "clients", "rounds", "fraction")
    given = {k: v for k, v in locals().items() if k in names and v is not None}
    settings = config.load(config_file, given | _dotted)
    if settings.run.bound != "none":
        raise FurlongError(f"bound = {settings.run.bound}: nothing is sent to anybody.")
    if sizes is None:
        server = assemble.prepare(settings).server
    else:
        server = assemble.without_data(settings, _sizes(sizes), 3, settings.data.image_size or 32)
    kinds: dict[str, list[Cost]] = {}
    for item in predict(server):
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
        f"{settings.method['name']}, {server.setup.encoder}, {len(server.setup.sizes)} clients: "
        f"{size(whole.total)} in all, {size(each)} per client. A report's own numbers (images, "
        "loss) come on top, some bytes each."
    )


def _sizes(text: str) -> dict[int, int]:
    """``1000,2000`` or ``1000x5``."""
    found: list[int] = []
    for item in text.split(","):
        count, _, times = item.partition("x")
        if not count.isdecimal() or (times and not times.isdecimal()) or int(count) < 2:
            raise FurlongError(f"--sizes {text}: {item!r} is not like 1000 (at least 2) or 1000x5.")
        found += [int(count)] * int(times or 1)
    return dict(enumerate(found))


def _grouped(value: Any) -> Any:
    """(field, kind) -> (elements, bytes)."""
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for path, kind, elements, count in parts(value):
        key = (path.split("/")[0], kind)
        before = groups.get(key, (0, 0))
        groups[key] = (before[0] + elements, before[1] + count)
    return groups


@app.command
def report(folder: Path, /) -> None:
    """Make a run's report.html again.

    Parameters
    ----------
    folder
        The run's folder.
    """
    from furlong import report as pages

    console.print(f"report: {pages.build(folder)}")


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
    from furlong import demo as story
    from furlong import figures

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


# ---------------------------------------------------------------- start


def take_dotted(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate ``--section.key value`` (or ``=value``, or a bare flag) from the other arguments."""
    rest: list[str] = []
    taken: dict[str, Any] = {}
    waiting = iter(range(len(arguments)))
    for i in waiting:
        word = arguments[i]
        if not word.startswith("--") or "." not in word.split("=", 1)[0]:
            rest.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        following = arguments[i + 1] if i + 1 < len(arguments) else "--"
        if not equals and not following.startswith("--"):
            value = following
            next(waiting)
        elif not equals:
            value = "true"
        taken[name] = value
    return rest, taken


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors that a person can act on, no traceback, exit codes."""
    given, dotted = take_dotted(list(sys.argv[1:] if arguments is None else arguments))
    _dotted.clear()
    _dotted.update(dotted)
    if dotted and given[:1] and given[0] not in ("run", "resume", "evaluate", "partition", "cost"):
        err.print(f"error: 'furlong {given[0]}' takes no --{next(iter(dotted))}", markup=False)
        sys.exit(2)
    try:
        app(given)
    except FurlongError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        err.print(f"error: {error}. What was saved stays; 'furlong resume RUN' goes on.")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted. 'furlong resume RUN' goes on after the last checkpoint.")
        sys.exit(130)


if __name__ == "__main__":
    main()
