"""Atomic writes of files and folders. This module does not import torch."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path and renames it to `path` at the end.

    The body writes a file or a folder to the temporary path, in the folder of `path`. A file is
    flushed to the disk before it is renamed. If the body raises, the temporary file or folder is
    deleted and `path` is unchanged.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers.txt"
    >>> with atomic_write(path) as temporary:
    ...     _ = temporary.write_text("1 2 3")
    >>> path.read_text()
    '1 2 3'
    """
    # The process id: several processes may write the same file, such as the cache of intact images.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.unfinished{path.suffix}")
    try:
        yield temporary
        if temporary.is_file():
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names of the files in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
