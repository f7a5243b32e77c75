"""SIGTERM, SIGINT and SIGHUP as requests to save and end, heard between two steps."""

import errno
import os
import signal
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@final
class StopRequest:
    """Whether the process has been asked to end.

    Attributes:
        signal: By which signal; 0 if it has not.
    """

    def __init__(self) -> None:
        self.signal = 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        # Whoever asks twice shall not have to wait. But SIGTERM comes twice where a job's processes
        # are all sent it, torchrun among them, which sends it on.
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        elif number == signal.SIGHUP:
            _leave_terminal()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Hears the signals, and handles them as before when it ends.

    Python lets the main thread alone do so; in another, nothing is heard.
    """
    requests = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    # nohup has SIGHUP ignored, which is to stay so.
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
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
