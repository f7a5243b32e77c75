"""The ledger of a study: a file with one line of JSON for each finished run or measurement.

Lines are only appended, each by one write that is forced to the disk. A process that dies leaves at
most half a line, which is skipped and counted. Ledgers of several machines are merged by
concatenation: of lines with the same key, the first counts.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, final

from surrogap.errors import InvalidValueError
from surrogap.experiments.result_files import json_value

LedgerLine = dict[str, Any]


@final
class Ledger:
    """The lines of a ledger, in memory and on disk.

    Args:
        path: The file. It may be missing, and is created when it is written to.

    Attributes:
        num_torn: The number of incomplete lines, which are skipped.
        num_repeated: The number of lines with the key of an earlier line, which are skipped too.

    Raises:
        ValueError: The file cannot be read.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "study.jsonl")
    >>> ledger.append({"kind": "run", "key": "a", "seed": 0})
    >>> Ledger(ledger.path)["a"]["seed"]
    0
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, LedgerLine] = {}
        self.num_torn = self.num_repeated = 0
        for text in _read(path):
            line = _parsed(text)
            if line is None:
                self.num_torn += 1
            elif line["key"] in self._lines:
                self.num_repeated += 1
            else:
                self._lines[line["key"]] = line

    def check_writable(self) -> None:
        """Check that lines can be appended, before hours of training.

        Raises:
            ValueError: The file cannot be written.
        """
        with self._opened():
            pass

    @contextmanager
    def _opened(self) -> Iterator[FileIO]:
        """Context manager that opens the file, and turns an OSError into a ValueError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b", buffering=0) as file:
                yield file
        except OSError as error:
            raise _not_accessible("writable", self.path, error) from error

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line, in memory and on disk.

        Raises:
            ValueError: The file cannot be written.
        """
        text = json.dumps(json_value(line), allow_nan=False, separators=(",", ":"))
        with self._opened() as file:
            handle, size = file.fileno(), file.seek(0, os.SEEK_END)
            # A process that died may have left half a line without a line break.
            is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = b"\n" * is_torn + f"{text}\n".encode()
            if os.write(handle, data) < len(data):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        self._lines.setdefault(line["key"], json.loads(text))

    def __getitem__(self, key: str) -> LedgerLine:
        return self._lines[key]

    def __contains__(self, key: object) -> bool:
        return key in self._lines

    def __iter__(self) -> Iterator[LedgerLine]:
        return iter(self._lines.values())

    def __len__(self) -> int:
        return len(self._lines)

    def of_kind(self, kind: str, **values: str) -> list[LedgerLine]:
        """The lines of one kind ("run", "failure", "timing" or "find-rho") with these values."""
        return [line for line in self if {"kind": kind, **values}.items() <= line.items()]

    def newest_timing(self, scale: str, setup: str, step: str) -> LedgerLine | None:
        """The last line with the time of a step in a set-up; None without one."""
        lines = self.of_kind("timing", scale=scale, setup=setup)
        timed = [line for line in lines if step in line["seconds_per_step"]]
        return max(timed, key=lambda line: str(line["date"]), default=None)

    @property
    def remarks(self) -> list[str]:
        """Sentences about skipped lines."""
        counts = {"incomplete": self.num_torn, "repeated": self.num_repeated}
        return [
            f"{self.path}: skipped {number} {kind} line{'s' * (number > 1)}."
            for kind, number in counts.items()
            if number
        ]


def _read(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    try:
        return [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise _not_accessible("readable", path, error) from error


def _not_accessible(kind: str, path: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(
        f"ledger must be a {kind} file, got {path} ({error.strerror}). Pass another --ledger."
    )


def _parsed(text: bytes) -> LedgerLine | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"kind", "key"} <= line.keys() else None
