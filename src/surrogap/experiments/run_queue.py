"""Planned runs, trained and measured one after another."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from rich.progress import Progress as RichProgress

from surrogap.errors import InvalidValueError, UserError
from surrogap.experiments.measurements import MeasureFn, has_measurements, write_measurements
from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.probes import sharpness_probe
from surrogap.training.components import components_of
from surrogap.training.config import Config, is_run
from surrogap.training.failure import DivergedError
from surrogap.training.folder import check_folder
from surrogap.training.processes import World, device_of, is_launched
from surrogap.training.progress import ProgressDisplay, essentials, rich_bar
from surrogap.training.run import train


def train_missing(
    runs: Sequence[PlannedRun],
    folder: Path,
    *,
    radius: Callable[[Config], float],
    measure: MeasureFn,
) -> signal.Signals | None:
    """Train and measure all runs that are not finished yet.

    `folder` is the parent of the runs' folders. A finished run is measured by `measure`, at the
    radius that `radius` returns for its configuration.

    Returns:
        The signal that stopped a run, or None if all runs are finished.

    Raises:
        RunFailedError: A run failed. If its loss was not finite, the others have been trained.
        ValueError: There are several processes, the folder of a run holds another configuration, or
            settings do not fit together. Nothing has been trained in this case.
    """
    if is_launched():
        raise InvalidValueError(
            "Several runs must be trained in one process, got several processes. "
            "Train the runs of large models one by one, with surrogap train."
        )
    if is_run(folder):
        raise InvalidValueError(
            f"out must be a folder for several runs, got {folder}, which is the folder of one run. "
            "Pass another --out."
        )
    for run in runs:
        check_folder(run.config, resume=True)
    _check_settings(runs)
    missing = [run for run in runs if not has_measurements(run.config.folder, radius(run.config))]
    failures: list[DivergedError] = []
    with QueueProgress(missing, num_finished=len(runs) - len(missing)) as progress:
        for run in missing:
            config = run.config
            progress.begin(run)
            try:
                outcome = train(config, resume=True, progress=progress, probe=sharpness_probe)
            except DivergedError as failure:
                failures.append(failure)
                continue
            if outcome.signal is not None:
                return outcome.signal
            device = device_of(config.execution.device)
            write_measurements(config.folder, radius(config), device, measure)
            progress.end(outcome.record or {})
    if failures:
        more = f" {len(failures)} runs failed in all." if len(failures) > 1 else ""
        raise DivergedError(f"{failures[0]}{more}") from failures[0]
    return None


def _check_settings(runs: Sequence[PlannedRun]) -> None:
    """Build one run of each method, so that wrong settings are found before any run trains.

    Runs that have started before are valid. The message names the methods with the error, unless
    several methods are built and all have the same one, such as missing images.

    Raises:
        ValueError: Settings of a method do not fit together, or the images are missing.
    """
    new = [run for run in runs if not is_run(run.config.folder)]
    built = {run.method: run.config for run in new}
    errors: dict[str, UserError] = {}
    for method, config in built.items():
        try:
            components_of(config, World(device_of(config.execution.device)))
        except UserError as error:
            errors[method] = error
    if errors:
        first = next(iter(errors.values()))
        methods = [method for method, error in errors.items() if str(error) == str(first)]
        is_common = len(methods) == len(built) > 1
        names = "" if is_common else f"{', '.join(methods)}: "
        raise InvalidValueError(f"{names}{first}") from first


@final
class QueueProgress(ProgressDisplay):
    """The progress of several runs: one bar for all of them on a terminal, else a line per run.

    Args:
        runs: The runs to train.
        num_finished: The number of runs that have finished before.
    """

    def __init__(self, runs: Sequence[PlannedRun], *, num_finished: int) -> None:
        self._costs = [run.cost for run in runs]
        self._num_finished = num_finished
        self._index = -1
        self._now = ""
        self._bar: RichProgress | None = rich_bar() if sys.stdout.isatty() else None
        self._moved = 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=sum(self._costs), now="")
        if self._num_finished:
            self._print(f"{self._num_finished} runs are finished already.")
        return self

    def __exit__(self, *reason: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, run: PlannedRun) -> None:
        """Start the next run."""
        self._index += 1
        number, total = self._num_finished + self._index + 1, self._num_finished + len(self._costs)
        seed = run.config.execution.seed
        self._title = f"{run.method}, seed {seed} ({number} of {total})"
        self._move(0.0)

    def end(self, record: Mapping[str, Any]) -> None:
        """End the current run, with the record of its last epoch."""
        self._move(1.0)
        self._print("  ".join([self._title, *essentials({"kind": "epoch", **record})]))

    def start(self, title: str, step: int, num_steps: int) -> None:
        """See `ProgressDisplay`."""
        self._num_steps = num_steps

    def step(self, step: int) -> None:
        """See `ProgressDisplay`."""
        if time.monotonic() - self._moved > 0.1:
            self._move(step / self._num_steps)

    def record(self, record: Mapping[str, Any]) -> None:
        """See `ProgressDisplay`."""
        self._now = "  ".join(essentials(record))

    def _move(self, fraction: float) -> None:
        self._moved = time.monotonic()
        if self._bar is not None:
            done = sum(self._costs[: self._index]) + fraction * self._costs[self._index]
            text = {"description": self._title, "now": self._now}
            self._bar.update(self._task, completed=done, **text)  # type: ignore[arg-type]

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)
