"""Files and folders that are written whole or not at all. It needs no torch."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path, renamed to `path` when the body has written it.

    If the body raises, what it wrote is deleted, and `path` is as it was.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers.txt"
    >>> with replacing(path) as temporary:
    ...     _ = temporary.write_text("1 2 3")
    >>> path.read_text()
    '1 2 3'
    """
    temporary = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink()
        raise
