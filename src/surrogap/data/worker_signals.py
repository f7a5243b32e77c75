"""Signals that a launcher, a scheduler or a terminal sends to all processes of a run."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # not on macOS


def obey_parent_only(worker: int) -> None:
    """Ignore signals in a worker process unless its parent sends them.

    Launchers, schedulers and terminals signal whole process groups. If a worker ended, the parent
    would fail before it could save the run.
    """
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited only from a fork
        threading.Thread(target=_exit_on_signal_of_parent, daemon=True).start()


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Context in which signals of launchers wait, also in processes that are forked in it."""
    if not _CAN_WAIT:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_on_signal_of_parent() -> None:
    # Not `os.getppid()`: workers may be the children of a fork server.
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo(SIGNALS).si_pid != parent.pid:
        pass
    os._exit(0)
