"""The display of a run's progress: a bar on a terminal, lines elsewhere."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from surrogap.training.records import training_loss

# The seconds between two updates of the bar, and between two lines within an epoch.
_BAR_INTERVAL = 0.1
_LINE_INTERVAL = 30.0


class ProgressDisplay(ABC):
    """Abstract display of a run's progress, in its first process."""

    def check(self, num_checked: int, num_files: int) -> None:
        """Show the number of image files that were checked, before the run starts."""

    def start(self, title: str, step: int, num_steps: int) -> None:
        """Show the start of a run, or its continuation from a step."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Show that a step has been taken."""

    @abstractmethod
    def record(self, record: Mapping[str, Any]) -> None:
        """Show a record. Failures are not shown, since `train` raises their reason."""

    def stop(self) -> None:
        """End the display, also after an error."""


@final
class NoDisplay(ProgressDisplay):
    """A display that shows nothing."""

    def step(self, step: int) -> None:
        """See `ProgressDisplay`."""

    def record(self, record: Mapping[str, Any]) -> None:
        """See `ProgressDisplay`."""


@final
class LineDisplay(ProgressDisplay):
    """A line for each epoch, and one every 30 seconds within long epochs."""

    _last_line = 0.0

    def check(self, num_checked: int, num_files: int) -> None:
        """See `ProgressDisplay`."""
        now = time.monotonic()
        if now - self._last_line >= _LINE_INTERVAL or num_checked == num_files:
            self._last_line = now
            print(f"checked {num_checked:,} of {num_files:,} image files", flush=True)

    def start(self, title: str, step: int, num_steps: int) -> None:
        """See `ProgressDisplay`."""
        self._num_steps = num_steps
        self._first = step
        self._start = self._last_line = time.monotonic()
        resumed = f", from step {step}" if step else ""
        print(f"{title}: {num_steps} steps{resumed}", flush=True)

    def step(self, step: int) -> None:
        """See `ProgressDisplay`."""

    def record(self, record: Mapping[str, Any]) -> None:
        """See `ProgressDisplay`."""
        now = time.monotonic()
        is_early = record["kind"] == "step" and now - self._last_line < _LINE_INTERVAL
        if is_early or record["kind"] == "failure":
            return
        self._last_line = now
        step = record["step"]
        left = (now - self._start) / max(step - self._first, 1) * (self._num_steps - step)
        counts = f"{step}/{self._num_steps}"
        print("  ".join([counts, *essentials(record), f"{_clock(left)} left"]), flush=True)


def rich_bar(*columns: ProgressColumn) -> RichProgress:
    """Build a bar with the remaining time. On a narrow terminal the field "now" is cut off first.

    Args:
        columns: Additional columns, between the bar and the time.
    """
    now = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        *columns,
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}", table_column=now),
        console=Console(),
        expand=True,
    )


@final
class BarDisplay(ProgressDisplay):
    """A bar with the remaining time, and a line above it for each epoch."""

    def __init__(self) -> None:
        self._bar = rich_bar(TextColumn("{task.completed}/{task.total}"))
        self._moved = 0.0
        self._check: TaskID | None = None

    def check(self, num_checked: int, num_files: int) -> None:
        """See `ProgressDisplay`."""
        if self._check is None:
            self._bar.start()
            self._check = self._bar.add_task("checking image files", total=num_files, now="")
        self._bar.update(self._check, completed=num_checked)

    def start(self, title: str, step: int, num_steps: int) -> None:
        """See `ProgressDisplay`."""
        self._bar.start()
        if self._check is not None:
            self._bar.remove_task(self._check)
        self._task = self._bar.add_task(title, total=num_steps, completed=step, now="")

    def step(self, step: int) -> None:
        """See `ProgressDisplay`."""
        now = time.monotonic()
        if now - self._moved > _BAR_INTERVAL:
            self._moved = now
            self._bar.update(self._task, completed=step)

    def record(self, record: Mapping[str, Any]) -> None:
        """See `ProgressDisplay`."""
        if record["kind"] == "failure":
            return
        text = "  ".join(essentials(record))
        self._bar.update(self._task, completed=record["step"])
        if record["kind"] == "step":
            self._bar.update(self._task, now=text)
        else:
            self._bar.console.print(text, highlight=False)

    def stop(self) -> None:
        """See `ProgressDisplay`."""
        self._bar.stop()


def display_for_stdout() -> ProgressDisplay:
    """Return a bar if the output is a terminal, and lines otherwise."""
    return BarDisplay() if sys.stdout.isatty() else LineDisplay()


def essentials(record: Mapping[str, Any]) -> list[str]:
    """Return the most important numbers of a record, to fit 80 columns.

    >>> essentials({"kind": "step", "step": 50, "loss": 0.51234, "gap": 0.0123, "rho": None})
    ['loss 0.5123', 'gap 0.0123']
    """
    if record["kind"] == "skip":
        return [f"skipped a step: its loss is not finite ({record['in_a_row']} in a row)"]
    names = {
        "epoch": "epoch {:.0f}",
        "loss": "loss {:.4f}",
        "gap": "gap {:.4f}",
        "eigenvalue": "eigenvalue {:.4g}",
        "val_accuracy": "val {:.2%}",
        "test_accuracy": "test {:.2%}",
    }
    present = {name: record.get(name) for name in names} | {"loss": training_loss(record)}
    return [
        names[name].format(value)
        for name, value in present.items()
        if value is not None and value == value  # not NaN
    ]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
