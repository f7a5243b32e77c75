"""The files of a measurement: a JSON file, and figures. This module does not import torch."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, final

from surrogap.atomic import atomic_write
from surrogap.errors import InvalidValueError

Writer = Callable[[Path], object]


@final
class ResultFiles:
    """The result files of a command: `STEM.json`, and figures.

    They replace the files of an earlier call of the same command, and no other files.

    Args:
        folder: The folder to write to.
        command: The name of the command.
        stem: The name of the JSON file, without its suffix.
        figures: The file names of the figures.
        make_folder: Whether to create the folder and check that it is writable; not needed before
            training in the folder, which does both.

    Raises:
        ValueError: The folder has a file of the same name that the command did not write, or is not
            writable.
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
        replaceable = self._written_before()
        for path in (self.path, *self.figures):
            if path.exists() and path.name not in replaceable:
                raise InvalidValueError(
                    f"out must be a folder without {path.name}, got {folder}, whose {path.name} "
                    f"{self._command} did not write. Pass another --out."
                )
        if make_folder:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()  # before hours of computation, not after
            except OSError as error:
                raise _not_writable(folder, error) from error

    def _written_before(self) -> set[str]:
        """Return the names of the files that an earlier call of the command wrote."""
        try:
            before = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return set()
        if not isinstance(before, dict) or before.get("command") != self._command:
            return set()
        return {self.path.name, *before.get("figures", [])}

    def write(self, values: Mapping[str, Any], writers: Mapping[str, Writer]) -> None:
        """Write all files.

        Args:
            values: The content of the JSON file, besides the command and the versions.
            writers: For each figure's file name, a function that writes the figure to a path.

        Raises:
            ValueError: The folder is not writable.
        """
        from surrogap.training.versions import versions

        names = [path.name for path in self.figures]
        content = {"command": self._command, "figures": names, "versions": versions(), **values}
        text = json.dumps(json_value(content), indent=2, allow_nan=False) + "\n"
        try:
            # The JSON file first, since it marks the figures as files of this command.
            with atomic_write(self.path) as temporary:
                temporary.write_text(text)
            for path in self.figures:
                with atomic_write(path) as temporary:
                    writers[path.name](temporary)
        except OSError as error:
            raise _not_writable(self.path.parent, error) from error

    @property
    def summary(self) -> str:
        """The paths of the files, as a sentence."""
        figures = f" Figures: {', '.join(map(str, self.figures))}." if self.figures else ""
        return f"Numbers: {self.path}.{figures}"


def _not_writable(folder: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(
        f"out must be a writable folder, got {folder} ({error.strerror}). Pass another --out."
    )


def json_value(value: Any) -> Any:
    """Return a value for JSON: paths become strings, and numbers that are not finite become None.

    >>> json_value({"gap": math.nan, "rhos": (0.1, 0.2)})
    {'gap': None, 'rhos': [0.1, 0.2]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
