"""The work of a study: measurements, then runs, one or several at a time, until time is up.

With several jobs, each worker process trains one run after another, so that the start-up is paid
once. Only the parent process writes to the ledger.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType

import torch

from surrogap.errors import UserError
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.measuring import measure
from surrogap.paper.plan import Measurement, Stage, Todo, todo
from surrogap.paper.running import Environment, Stopped, train_and_score
from surrogap.paper.study import StudyRun
from surrogap.training.failure import RunFailedError

# Seconds until a new worker takes its first step: imports, the GPU, the images.
START_UP = 20.0

AfterRun = Callable[[LedgerLine, Sequence[Todo]], object]
Submit = Callable[..., "Future[LedgerLine]"]


def train_study(
    stages: Sequence[Stage],
    ledger: Ledger,
    environment: Environment,
    *,
    measurements: Sequence[Measurement] = (),
    time_limit: float | None = None,
    after_measurement: Callable[[LedgerLine], object],
    after_run: AfterRun,
) -> tuple[list[Measurement], list[Todo]]:
    """Make the measurements that are ready, then call `train_all`, and return all that is left.

    Measurements that become ready during training are made after it. Their lines are added to the
    ledger, and each is passed to `after_measurement`. Work that is not expected to end within
    `time_limit` seconds is not started. The other arguments are those of `train_all`.

    Raises:
        RunFailedError: See `train_all`.
        Stopped: SIGTERM arrived, or a run was stopped by a signal. Finished runs are in the ledger.
    """
    deadline = time.monotonic() + (math.inf if time_limit is None else time_limit)
    scale, waiting = environment.scale, list(measurements)

    def measure_waiting() -> None:
        for one in tuple(waiting):
            has_time = time.monotonic() + one.seconds <= deadline
            if has_time and one.is_ready(scale, ledger):
                line = measure(one, environment, ledger)
                ledger.append(line)
                waiting.remove(one)
                after_measurement(line)

    before = signal.signal(signal.SIGTERM, _stop)
    try:
        # Before any worker starts and after all have ended, since they would share the device.
        measure_waiting()
        left = train_all(stages, ledger, environment, deadline=deadline, after_run=after_run)
        measure_waiting()
        return waiting, left
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number))


def train_all(
    stages: Sequence[Stage],
    ledger: Ledger,
    environment: Environment,
    *,
    deadline: float = math.inf,
    after_run: AfterRun = lambda line, left: None,
) -> list[Todo]:
    """Train the runs that some stages need and the ledger lacks, and return those that are left.

    Args:
        stages: The runs that are wanted.
        ledger: The finished runs, to which the new ones are added.
        environment: The study, and the number of jobs.
        deadline: A time of `time.monotonic`. A run that is not expected to end before then is not
            started; a shorter one after it may be.
        after_run: Called with each new line, and the runs that are left.

    Raises:
        RunFailedError: The disk is full, a run in a worker process raised an unexpected error, or
            the process died. Finished runs are in the ledger.
        ValueError: Images are missing.
    """
    jobs = environment.jobs
    running: dict[Future[LedgerLine], StudyRun] = {}
    num_workers = 0

    def left() -> list[Todo]:
        return todo(environment.scale, stages, ledger, jobs=jobs)

    def start_some(submit: Submit) -> None:
        nonlocal num_workers
        for item in items:
            start_up = START_UP if jobs > 1 and len(running) == num_workers else 0.0
            is_free = all(item.run.keys.isdisjoint(run.keys) for run in running.values())
            can_start = item.is_ready and is_free and len(running) < jobs
            if can_start and time.monotonic() + start_up + item.seconds <= deadline:
                running[submit(train_and_score, item.run, environment)] = item.run
                num_workers = max(num_workers, len(running))

    items = left()
    try:
        with _processes(jobs) as submit:
            while True:
                start_some(submit)
                if not running:
                    return items
                done = wait(running, return_when=FIRST_COMPLETED).done
                # Errors last: the lines of the runs that ended well are written first.
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    line = _result(future, running[future])
                    del running[future]
                    ledger.append(line)
                    items = left()
                    after_run(line, items)
    except BrokenProcessPool as error:  # does not name the process that died
        titles = " or ".join(run.title for run in running.values()) or "A worker process"
        raise RunFailedError(f"{titles} failed:\n{error}") from error


def _result(future: "Future[LedgerLine]", run: StudyRun) -> LedgerLine:
    try:
        return future.result()
    except (BrokenProcessPool, RunFailedError, UserError):
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        raise RunFailedError(f"{run.title} failed:\n{text}") from error


@contextmanager
def _processes(jobs: int) -> Iterator[Submit]:
    """Context manager that yields `submit` of worker processes; for one job, of this process."""
    if jobs == 1:
        yield _call
        return
    others = multiprocessing.active_children()
    threads = max(torch.get_num_threads() // jobs, 1)
    context = multiprocessing.get_context("spawn")  # not fork: CUDA does not survive it
    executor = ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(threads,))
    try:
        yield executor.submit
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _call(function: Callable[..., LedgerLine], *arguments: object) -> "Future[LedgerLine]":
    future: Future[LedgerLine] = Future()
    future.set_result(function(*arguments))
    return future


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this process when its parent has died, for example by SIGKILL or SIGHUP.

    Otherwise it would wait for its next run forever, and keep its memory on the GPU.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
