"""Many runs, one after the other: trains what is not trained yet, and tells where it is.

It is the long part of `surrogap compare`, and of a figure that `surrogap reproduce` trains for.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from rich.progress import Progress as Bar

from surrogap.errors import InvalidValueError
from surrogap.experiments.measured import Measured, is_measured, measure
from surrogap.experiments.methods import Planned
from surrogap.experiments.probes import sharpness_probe
from surrogap.training.config import Config
from surrogap.training.folder import CONFIG, check_folder
from surrogap.training.processes import device_of, is_launched
from surrogap.training.progress import ProgressDisplay, essentials, rich_bar
from surrogap.training.run import train


def train_all(
    runs: Sequence[Planned],
    folder: Path,
    command: str,
    *,
    radius: Callable[[Config], float],
    measured: Measured,
) -> int:
    """Trains and measures what is not finished, and returns the exit status.

    Args:
        runs: All of them, each with a folder of its own.
        folder: Where their folders are.
        command: Who asks.
        radius: The radius at which a run is measured when it has ended.
        measured: What is measured then.

    Raises:
        ValueError: There are several processes, or a run's folder belongs to another
            configuration. Nothing has been trained then.
        RunFailedError: A run failed.
    """
    if is_launched():
        raise InvalidValueError(
            f"surrogap {command} must run in one process, got one of several. "
            "Train the runs of large networks one by one, by surrogap train."
        )
    if (folder / CONFIG).exists():
        raise InvalidValueError(
            f"out must be a folder for several runs, got {folder}, which is a run's. "
            "Pass another one."
        )
    for run in runs:
        check_folder(run.config, resume=True)
    left = [run for run in runs if not is_measured(run.config.folder, radius(run.config))]
    overall = Overall([run.cost for run in left], num_done=len(runs) - len(left))
    with overall:
        for run in left:
            overall.begin(f"{run.method}, seed {run.config.execution.seed}")
            config = run.config
            outcome = train(config, resume=True, progress=overall, probe=sharpness_probe)
            if outcome.signal is not None:
                print(
                    f"surrogap: {outcome.signal.name} stopped surrogap {command}, and what there "
                    "is of it is saved. The same command goes on from here.",
                    file=sys.stderr,
                )
                return 128 + outcome.signal
            device = device_of(config.execution.device)
            measure(config.folder, radius(config), device, measured)
            overall.end(outcome.record or {})
    return 0


@final
class Overall(ProgressDisplay):
    """Where a row of runs is: a bar over all of them, or a line for each.

    Args:
        costs: The length of each run, in any unit.
        num_done: The number of runs that were finished before.
    """

    def __init__(self, costs: Sequence[float], *, num_done: int) -> None:
        self._costs = list(costs)
        self._num_done = num_done
        self._number = -1
        self._now = ""
        self._bar: Bar | None = None
        self._moved = 0.0
        if sys.stdout.isatty():
            self._bar = rich_bar()

    def __enter__(self) -> "Overall":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=sum(self._costs), now="")
        if self._num_done:
            self._say(f"{self._num_done} runs are finished already.")
        return self

    def __exit__(self, *reason: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, title: str) -> None:
        """The next run begins."""
        self._number += 1
        done = self._num_done + self._number
        self._title = f"{title} ({done + 1} of {self._num_done + len(self._costs)})"
        self._move(0.0)

    def end(self, record: Mapping[str, Any]) -> None:
        """The run has ended, with the record of its last epoch."""
        self._move(1.0)
        self._say("  ".join([self._title, *essentials({"kind": "epoch", **record})]))

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

    def _move(self, part: float) -> None:
        self._moved = time.monotonic()
        if self._bar is not None:
            done = sum(self._costs[: self._number]) + part * self._costs[self._number]
            text = {"description": self._title, "now": self._now}
            self._bar.update(self._task, completed=done, **text)  # type: ignore[arg-type]

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)
