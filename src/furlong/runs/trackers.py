"""Where else a run is logged: TensorBoard always, MLflow and Weights & Biases where asked for.

``run.track`` names them; where they keep what they get is said by their own settings and
variables (``MLFLOW_TRACKING_URI``, ``WANDB_MODE``, …). A run that goes on logs to the same entry.
What is logged is numbers and settings: no path of this machine and no image.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError, nearest
from furlong.evaluation.metrics import MEASURES
from furlong.runs.config import Config, all_facts
from furlong.runs.folder import RunFolder
from furlong.runs.observers import Event, TensorBoard, scalars

PROJECT = "furlong"  # the experiment or project, unless their own variables name one
FILE = "track.json"  # in a run folder: the entries that it logs to


class MLflow:
    """An MLflow run: settings as parameters, numbers as metrics over exchanges."""

    def __init__(self, name: str, settings: Mapping[str, Any], entry: str | None) -> None:
        self._mlflow = load("mlflow")
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & {*os.environ}:
            self._mlflow.set_experiment(PROJECT)
        named = {"run_id": entry} if entry else {"run_name": name}
        self.entry = str(self._mlflow.start_run(**named).info.run_id)
        if not entry:
            words = {key: str(value)[:500] for key, value in settings.items()}
            self._mlflow.log_params(words)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """One exchange."""
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self, results: Mapping[str, float], failed: bool) -> None:
        """The results at the end, if there are any."""
        if results:
            self._mlflow.log_metrics(dict(results))
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class WandB:
    """A run of Weights & Biases: settings as its configuration, results in its summary."""

    def __init__(self, name: str, settings: Mapping[str, Any], entry: str | None) -> None:
        project = None if "WANDB_PROJECT" in os.environ else PROJECT
        self._run = load("wandb").init(
            project=project, name=name, id=entry, resume="allow", config=dict(settings)
        )
        self.entry = str(self._run.id)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """One exchange."""
        self._run.log(dict(numbers), step=step)

    def close(self, results: Mapping[str, float], failed: bool) -> None:
        """The results at the end, if there are any."""
        self._run.summary.update(dict(results))
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, type[MLflow] | type[WandB]] = {"mlflow": MLflow, "wandb": WandB}


def load(package: str) -> Any:
    """A tracker's package, or what to install."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise FurlongError(
            f"run.track is {package}, which is not installed: pip install 'furlong-fl[{package}]'"
        ) from None


def named(track: str) -> list[str]:
    """The trackers of ``run.track``; refuses unknown ones and those that are not installed."""
    names = list(dict.fromkeys(word.strip() for word in track.split(",") if word.strip()))
    for name in names:
        if name not in TRACKERS:
            raise FurlongError(f"run.track is {track!r}. {nearest(name, TRACKERS)}")
        load(name)
    return names


class Boards:
    """All places where a run is logged, as one observer."""

    def __init__(self, folder: RunFolder, settings: Config, say: Callable[[str], None]) -> None:
        self._board, self._say = TensorBoard(folder.path), say
        kept = folder.record.read(FILE)
        entries = kept if isinstance(kept, dict) else {}
        self._others: dict[str, MLflow | WandB] = {
            name: TRACKERS[name](folder.path.name, described(settings), entries.get(name))
            for name in named(settings.run.track)
        }
        if self._others:
            folder.write(FILE, {name: one.entry for name, one in self._others.items()})

    def __enter__(self) -> Boards:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """TensorBoard is complete; the others wait for the results, unless there will be none."""
        self._board.__exit__(kind, *rest)
        if kind is not None:
            self._close({}, failed=True)

    def __call__(self, event: Event) -> None:
        """One exchange has ended."""
        self._board(event)
        if self._others:
            numbers, step = scalars(event.line), event.line["exchange"]
            self._each(lambda one: one.log(numbers, step))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has its results."""
        self._close(results(summary.get("results", ())), failed=False)

    def _close(self, numbers: Mapping[str, float], *, failed: bool) -> None:
        self._each(lambda one: one.close(numbers, failed))
        self._others = {}

    def _each(self, tell: Callable[[MLflow | WandB], None]) -> None:
        """Tell all; one that fails, of the network say, hears no more and does not end the run."""
        for name, one in list(self._others.items()):
            try:
                tell(one)
            except Exception as error:
                self._say(f"{name} failed, and the run goes on without it: {error}")
                del self._others[name]


def described(settings: Config) -> dict[str, Any]:
    """The settings by ``section.key``: those that results depend on, without paths."""
    found = {}
    for section, table in asdict(settings).items():
        for key, value in table.items():
            fact = all_facts().get(f"{section}.{key}")
            if value is not None and (fact is None or fact.role != "place"):
                found[f"{section}.{key}"] = _without_path(value)
    return found


def _without_path(value: Any) -> Any:
    """``folder:PATH`` and ``PATH:Class`` with the last part of the path only."""
    if isinstance(value, str) and "/" in value:
        return ":".join(Path(part).name if "/" in part else part for part in value.split(":"))
    return value


def results(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """``results/federated/linear/auroc`` -> number; not of clients that each trained alone."""
    return {
        f"results/{row['who']}/{row['protocol'].replace(':', ' ')}/{name}": float(row[name])
        for row in rows
        if not row["who"].endswith(" alone")
        for name in MEASURES
        if row.get(name) is not None
    }
