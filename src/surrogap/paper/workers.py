"""Runs of a study, one after the other or several at once, until all are done or time is up.

Each worker process trains one run after the other, so that start-up is paid once. The lines of the
ledger are written by the process that started them.
"""

import multiprocessing
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch

from surrogap.paper.ledger import Ledger, Line
from surrogap.paper.plan import Stage, Todo, todo
from surrogap.paper.running import Environment, Stopped, finished
from surrogap.paper.study import StudyRun

# Seconds until a new worker takes its first step: imports, the GPU, the images.
START_UP = 20.0

# Called with a line that was just written, and with the runs that are left.
AfterRun = Callable[[Line, Sequence[Todo]], object]


class WorkerError(Exception):
    """A run raised an error that a second attempt would raise too."""


@final
@dataclass
class Clock:
    """The time that is left.

    Args:
        limit: In seconds from now; None for no limit.
    """

    limit: float | None
    _start: float = field(default_factory=lambda: time.monotonic())

    def fits(self, seconds: float) -> bool:
        """True if something that takes so long ends in time."""
        return self.limit is None or time.monotonic() - self._start + seconds <= self.limit


def train_all(
    stages: Sequence[Stage],
    ledger: Ledger,
    environment: Environment,
    *,
    clock: Clock,
    after_run: AfterRun = lambda line, left: None,
) -> list[Todo]:
    """Trains what some stages need and the ledger lacks, and returns the runs that are left.

    A run that is not expected to end in time is not started; a shorter one behind it may be.

    Raises:
        WorkerError: A run raised an error. Runs that were finished before are in the ledger.
    """

    def left() -> list[Todo]:
        return todo(environment.scale, stages, ledger, jobs=environment.jobs)

    pool: Pool = Here(environment) if environment.jobs == 1 else Spawned(environment)
    try:
        while True:
            pool.check()
            running = pool.running
            ready = [t for t in left() if t.is_ready and t.run.key not in running]
            for item in ready:
                if pool.is_free and clock.fits(item.seconds + pool.start_up):
                    pool.start(item.run)
            if not pool.running:
                return left()
            for line in pool.lines():
                ledger.append(line)
                after_run(line, left())
    finally:
        pool.close()


class Pool(ABC):
    """Processes that train runs."""

    running: set[str]
    """The keys of the runs that were started and are not finished."""

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """True if another run can be started."""

    @property
    @abstractmethod
    def start_up(self) -> float:
        """Seconds that the next run takes on top."""

    @abstractmethod
    def start(self, run: StudyRun) -> None:
        """Starts a run."""

    @abstractmethod
    def lines(self) -> list[Line]:
        """Waits until a run is finished, and returns the lines of all that are."""

    def check(self) -> None:
        """Raises the error of a run, if there was one.

        Raises:
            WorkerError: A run raised an error.
        """

    def close(self) -> None:
        """Ends all processes."""


@final
class Here(Pool):
    """This process, for one run at a time."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._run: StudyRun | None = None
        self.running = set()

    @property
    def is_free(self) -> bool:
        """See `Pool`."""
        return self._run is None

    @property
    def start_up(self) -> float:
        """See `Pool`."""
        return 0.0

    def start(self, run: StudyRun) -> None:
        """See `Pool`."""
        self._run = run
        self.running = {run.key}

    def lines(self) -> list[Line]:
        """See `Pool`."""
        assert self._run is not None
        line = finished(self._run, self._environment)
        self._run, self.running = None, set()
        return [line]


@final
class Spawned(Pool):
    """Several processes, started when they are first needed."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, StudyRun] = {}
        self._error: WorkerError | None = None
        self.running = set()

    @property
    def is_free(self) -> bool:
        """See `Pool`."""
        return len(self._busy) < self._environment.jobs

    @property
    def start_up(self) -> float:
        """See `Pool`."""
        return 0.0 if len(self._busy) < len(self._workers) else START_UP

    def start(self, run: StudyRun) -> None:
        """See `Pool`."""
        idle = [connection for _, connection in self._workers if connection not in self._busy]
        connection = idle[0] if idle else self._new_worker()
        connection.send(run)
        self._busy[connection] = run
        self.running.add(run.key)

    def _new_worker(self) -> Connection:
        # Not fork: CUDA does not survive it.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, self._environment), daemon=True)
        process.start()
        there.close()
        self._workers.append((process, here))
        return here

    def lines(self) -> list[Line]:
        """See `Pool`."""
        found = []
        for connection in wait(list(self._busy)):
            assert isinstance(connection, Connection)
            run = self._busy.pop(connection)
            self.running.discard(run.key)
            try:
                answer: Any = connection.recv()
            except EOFError:
                answer = "The process ended early."
            if isinstance(answer, str):  # raised once the lines of others are written
                self._error = WorkerError(f"{run.title} failed:\n{answer}")
            else:
                found.append(answer)
        return found

    def check(self) -> None:
        """See `Pool`."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """See `Pool`."""
        for process, connection in self._workers:
            connection.close()
            if connection in self._busy:
                process.terminate()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _work(connection: Connection, environment: Environment) -> None:
    """A worker: runs come in, lines or the text of an error go out."""
    torch.set_num_threads(max((os.cpu_count() or 1) // environment.jobs, 1))
    while True:
        try:
            run = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send(finished(run, environment))
        except (Stopped, KeyboardInterrupt):
            return
        except Exception:
            connection.send(traceback.format_exc())
