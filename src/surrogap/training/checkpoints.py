"""Checkpoints: atomic, with a checksum, and readable by any number of processes.

A checkpoint is written to a temporary file, flushed to the disk and renamed, so a process may die
at any time. Its name contains the hash of its contents. If it is damaged, the previous one is
used: the last two are kept. Reading never executes pickled code (`weights_only=True`). The format
of torch.distributed.checkpoint would unpickle its metadata, so the processes gather their states,
and the first writes one file; see `state.py`.
"""

import contextlib
import hashlib
import os
import pickle
import re
import warnings
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any, final

import torch

from surrogap.atomic import sync
from surrogap.errors import InvalidValueError
from surrogap.training.failure import RunFailedError, disk_remedy

_NAME = re.compile(r"step-\d{9}-([0-9a-f]{32})\.pt")
_TEMPORARY = "unfinished"
KEPT = 2

State = dict[str, Any]


@final
class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: Their folder.

    >>> import tempfile
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
    >>> path = checkpoints.save({"weights": torch.ones(2)}, step=7)
    >>> checkpoints.newest()
    {'weights': tensor([1., 1.])}
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        """Return the files, ordered by step."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def save(self, state: State, step: int) -> Path:
        """Write a checkpoint, and delete all but the last two.

        Raises:
            RunFailedError: The disk is full, or the folder cannot be written.
        """
        temporary = self.folder / _TEMPORARY
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step-{step:09d}-{_write(state, temporary)}.pt"
            os.replace(temporary, path)
            sync(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):  # the file, or the folder, may not exist
                temporary.unlink()
            raise RunFailedError(self._full(error)) from error
        # Checkpoints of later steps are damaged: otherwise the run would have resumed from one.
        behind = [old for old in self.paths() if old.name < f"step-{step:09d}"]
        for old in set(self.paths()) - {path, *behind[1 - KEPT :]}:
            old.unlink()
        return path

    def newest(self) -> State | None:
        """Return the newest intact checkpoint, or None if there are no checkpoints.

        Warns about each damaged checkpoint.

        Raises:
            ValueError: All checkpoints are damaged.
        """
        paths = self.paths()
        for index, path in reversed(list(enumerate(paths))):
            try:
                return read(path)
            except ValueError as error:
                ending = " The previous one is used." if index else ""
                warnings.warn(f"{error}{ending}", stacklevel=2)
        if paths:
            raise InvalidValueError(
                f"checkpoints must include an intact one, got {len(paths)} damaged in "
                f"{self.folder}. Delete the run's folder to start again."
            )
        return None

    def _full(self, error: OSError) -> str:
        paths = self.paths()
        last = f"{paths[-1].name} is intact" if paths else "there is no previous one"
        return (
            f"Cannot write a checkpoint to {self.folder}: {error.strerror}; {last}. "
            f"{disk_remedy(error)}, then pass --resume."
        )


def read(path: Path) -> State:
    """Read a checkpoint, with all tensors on the CPU.

    Raises:
        ValueError: The file is damaged, or contains objects other than tensors and numbers.
    """
    match = _NAME.fullmatch(path.name)
    try:
        with path.open("rb") as file:
            digest = _digest(file)
            if match is None or digest != match[1]:
                raise InvalidValueError(
                    f"checkpoint must match the hash in its name, got {path}, which is damaged. "
                    "Delete it."
                )
            file.seek(0)
            state: State = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # torch's own message would advise weights_only=False.
        is_other = isinstance(error, pickle.UnpicklingError)
        reason = "other objects" if is_other else str(error).partition("\n")[0]
        raise InvalidValueError(
            f"checkpoint must contain only tensors and numbers, got {path} ({reason}). Delete it."
        ) from error
    return state


def _write(state: State, path: Path) -> str:
    """Write a state to the disk, and return the hash of the file."""
    with path.open("w+b") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch raises it while it handles the file's OSError
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return _digest(file)


def _digest(file: BufferedIOBase) -> str:
    return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
