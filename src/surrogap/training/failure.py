"""Raised when a valid run cannot continue."""

import errno


class RunFailedError(RuntimeError):
    """A run cannot continue: its loss is not finite, or its folder cannot be written.

    What its folder held before is as it was, the last checkpoint above all.
    """


def disk_remedy(error: OSError) -> str:
    """Return what to do about an error of the disk before the run can be resumed.

    >>> disk_remedy(OSError(errno.EROFS, "Read-only file system"))
    'Make the folder writable'
    """
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "Free some disk space" if is_full else "Make the folder writable"
