"""Messages of commands: the expected cost, the progress, and the signal that stopped them."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LINE_INTERVAL = 30.0  # seconds
_SAVED = "Its progress is saved: run the same command to continue."


class ShowProgress(Protocol):
    """Shows the progress of a command."""

    def __call__(self, done: float, total: float, now: str = "") -> None:
        """Show that `done` of `total` is finished; `now` is the name of the current item."""


def print_cost(cost: float, what: str) -> None:
    """Print the cost of a measurement, before it starts.

    >>> print_cost(99.3, "over 1,000 images")
    At most 100 gradient evaluations over 1,000 images.
    """
    number = math.ceil(cost)
    noun = "evaluation" if number == 1 else "evaluations"
    print(f"At most {number:,} gradient {noun} {what}.", flush=True)


@contextmanager
def progress_bar(title: str) -> Iterator[ShowProgress]:
    """Context manager that shows a progress bar on stderr, or occasional lines without a terminal.

    Yields:
        A function to call with the progress.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    printed = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(done: float, total: float, now: str = "") -> None:
            nonlocal printed
            bar.update(task, completed=done, total=total, description=now or title)
            if not console.is_terminal and time.monotonic() - printed >= LINE_INTERVAL:
                printed = time.monotonic()
                label = f"{title}, {now}" if now else title
                print(f"{label}: {done / total:.0%}", file=sys.stderr, flush=True)

        yield show


def print_stopped(command: str, stopped_by: signal.Signals, saved: str = _SAVED) -> int:
    """Print that a signal stopped a command and what is saved, and return the exit status."""
    print(f"surrogap: {stopped_by.name} stopped surrogap {command}. {saved}", file=sys.stderr)
    return 128 + stopped_by
