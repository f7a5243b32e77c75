"""SIGTERM, SIGINT and SIGHUP: the run saves a checkpoint after its step, and stops."""

import errno
import os
import signal
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

from surrogap.data.worker_signals import SIGNALS


@final
class StopRequest:
    """A request to stop.

    Attributes:
        signal: The signal that was received; 0 if none was.
    """

    def __init__(self) -> None:
        self.signal = 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        # A second Ctrl-C ends the process at once. A second SIGTERM does not: a scheduler may send
        # one to all processes, and torchrun then forwards its own.
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        elif number == signal.SIGHUP:
            _leave_terminal()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Context manager that records the signals, and restores their handlers at the end.

    Python allows handlers only in the main thread; in another, nothing is recorded.
    """
    requests = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    # Signals that are already ignored stay ignored, such as SIGHUP under nohup.
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, requests._hear) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Discard further output if the terminal is gone: writing to it would end the run unsaved."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
