"""What a command that measures leaves behind: a JSON file, and figures beside it."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, final

from surrogap.atomic import atomic_write
from surrogap.errors import InvalidValueError
from surrogap.experiments.documents import plain

Writer = Callable[[Path], object]

LINE_INTERVAL = 30.0  # seconds


class Tell(Protocol):
    """Told where a long command is."""

    def __call__(self, done: float, total: float, now: str = "") -> None:
        """So much is done of so much; `now` is what it is at, if that has a name."""


@final
class Results:
    """The files of one measurement: `STEM.json`, and a PNG for each figure.

    They replace those of the same command, and nothing else.

    Args:
        folder: Where to write.
        command: Whose results they are.
        stem: What the JSON file is called.
        figures: What the figures' files are called.
        make_folder: Whether to make the folder if it is not there; else who trains in it does.

    Raises:
        ValueError: A file is there that the command did not write, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        command: str,
        stem: str,
        figures: Sequence[str],
        *,
        make_folder: bool = True,
    ) -> None:
        self.path = folder / f"{stem}.json"
        self.figures = [folder / name for name in figures]
        self._command = f"surrogap {command}"
        own = self._own()
        for path in (self.path, *self.figures):
            if path.exists() and path.name not in own:
                raise InvalidValueError(
                    f"out must be a folder where {self._command} may write {path.name}, got "
                    f"{folder}, which has a file of that name that it did not write. Pass "
                    "another --out."
                )
        if make_folder:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()  # before hours of computation, not after
            except OSError as error:
                raise _not_writable(folder, error) from error

    def _own(self) -> set[str]:
        """The files that an earlier call of the same command wrote."""
        try:
            before = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return set()
        if not isinstance(before, dict) or before.get("command") != self._command:
            return set()
        return {self.path.name, *before.get("figures", [])}

    def write(self, found: Mapping[str, Any], writers: Mapping[str, Writer]) -> None:
        """Writes all files.

        Args:
            found: What was measured.
            writers: By the name of a figure's file, what writes it to a path.

        Raises:
            ValueError: The folder cannot be written.
        """
        from surrogap.training.versions import versions

        names = [path.name for path in self.figures]
        whole = {"command": self._command, "figures": names, "versions": versions(), **found}
        text = json.dumps(plain(whole), indent=2, allow_nan=False) + "\n"
        try:
            # First, for it says whose the figures are.
            with atomic_write(self.path) as temporary:
                temporary.write_text(text)
            for path in self.figures:
                with atomic_write(path) as temporary:
                    writers[path.name](temporary)
        except OSError as error:
            raise _not_writable(self.path.parent, error) from error

    @property
    def told(self) -> str:
        """Where they are, for people."""
        figures = f" Figures: {', '.join(map(str, self.figures))}." if self.figures else ""
        return f"Numbers: {self.path}.{figures}"


def _not_writable(folder: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(
        f"out must be a folder that can be written, got {folder} ({error.strerror}). "
        "Pass another --out."
    )


def tell_cost(cost: float, what: str) -> None:
    """Says what a measurement will cost, before it starts.

    >>> tell_cost(99.3, "over 1,000 images")
    At most 100 gradient evaluations over 1,000 images.
    """
    number = math.ceil(cost)
    noun = "evaluation" if number == 1 else "evaluations"
    print(f"At most {number:,} gradient {noun} {what}.", flush=True)


@contextmanager
def bar(title: str) -> Iterator[Tell]:
    """A bar with the time left on standard error, or a line now and then if that is no terminal.

    Yields:
        What to call with how much is done, and how much there is.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    spoke = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def tell(done: float, total: float, now: str = "") -> None:
            nonlocal spoke
            progress.update(task, completed=done, total=total, description=now or title)
            if not console.is_terminal and time.monotonic() - spoke >= LINE_INTERVAL:
                spoke = time.monotonic()
                where = f"{title}, {now}" if now else title
                print(f"{where}: {done / total:.0%}", file=sys.stderr, flush=True)

        yield tell
