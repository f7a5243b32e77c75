"""The ledger of a study: a file with one line of JSON for each finished run.

Lines are only ever appended, each by one write that is forced to the disk. A process that dies
leaves at most half a line, which is skipped and counted. The ledgers of several machines are merged
by concatenation: of lines with the same key, the first counts.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from surrogap.errors import InvalidValueError
from surrogap.experiments.documents import plain

Line = dict[str, Any]


@final
class Ledger:
    """The lines of a ledger, in memory and on disk.

    Args:
        path: The file. It may be missing, and is made with the first line.

    Attributes:
        num_torn: The number of lines that are not whole, which are skipped.
        num_repeated: The number of lines whose key an earlier line has, which are skipped too.

    Raises:
        ValueError: The path is not a file that can be read.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "study.jsonl")
    >>> ledger.append({"kind": "run", "key": "a", "seed": 0})
    >>> Ledger(ledger.path)["a"]["seed"]
    0
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, Line] = {}
        self.num_torn = self.num_repeated = 0
        for text in _read(path):
            line = _parsed(text)
            if line is None:
                self.num_torn += 1
            elif line["key"] in self._lines:
                self.num_repeated += 1
            else:
                self._lines[line["key"]] = line

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line, in memory and on disk.

        Raises:
            ValueError: The file cannot be written.
        """
        text = json.dumps(plain(line), allow_nan=False, separators=(",", ":"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # Half a line of a process that died must not run into this one.
                start = "" if _ends_a_line(handle) else "\n"
                os.write(handle, f"{start}{text}\n".encode())
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise InvalidValueError(
                f"ledger must be a file that can be written, got {self.path} ({error.strerror}). "
                "Pass another --ledger."
            ) from error
        self._lines.setdefault(line["key"], json.loads(text))

    def __getitem__(self, key: str) -> Line:
        return self._lines[key]

    def __contains__(self, key: object) -> bool:
        return key in self._lines

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def __len__(self) -> int:
        return len(self._lines)

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of one kind: "run", "failure" or "timing"."""
        return [line for line in self if line["kind"] == kind]

    def newest_timing(self, scale: str, setup: str) -> Line | None:
        """The last line that measured the steps of a set-up; None without one."""
        lines = self.of_kind("timing")
        found = [line for line in lines if (line["scale"], line["setup"]) == (scale, setup)]
        return max(found, key=lambda line: str(line["date"]), default=None)

    @property
    def remarks(self) -> list[str]:
        """Sentences about lines that were skipped."""
        found = []
        if self.num_torn:
            found.append(f"{self.path}: {self.num_torn} lines are not whole and were skipped.")
        if self.num_repeated:
            found.append(f"{self.path}: {self.num_repeated} repeated lines were skipped.")
        return found


def _read(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    try:
        return [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise InvalidValueError(
            f"ledger must be a file that can be read, got {path} ({error.strerror}). "
            "Pass another --ledger."
        ) from error


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"kind", "key"} <= line.keys() else None


def _ends_a_line(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"
