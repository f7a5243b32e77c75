"""The errors of a run that cannot continue."""

import errno


class RunFailedError(RuntimeError):
    """Raised if the loss is not finite, or the run's folder cannot be written.

    The files in the folder, in particular the last checkpoint, are intact.
    """


class DivergedError(RunFailedError):
    """Raised if the loss is not finite."""


def disk_remedy(error: OSError) -> str:
    """Return the remedy for an error of the disk.

    >>> disk_remedy(OSError(errno.EROFS, "Read-only file system"))
    'Make the folder writable'
    """
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "Free some disk space" if is_full else "Make the folder writable"
