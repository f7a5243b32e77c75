"""Processes that run functions for the tests, connected by gloo or NCCL."""

import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Processes:
    """Processes that are started once, and run one function after another.

    Args:
        number: How many.
        group_timeout: After how many seconds a collective call that others do not join fails.
        backend: What connects them; see `torch.distributed.init_process_group`.
    """

    def __init__(self, number: int, group_timeout: float = 60.0, *, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(number):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, number, str(store), group_timeout, backend),
                daemon=True,
            )
            process.start()
            self._connections.append(mine)
            self._processes.append(process)

    def try_run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120.0
    ) -> list[Any]:
        """Return the result of `function(*args)` in each process, or its traceback."""
        message = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(message)
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(timeout):
                self.stop()
                raise TimeoutError(f"process {rank} did not answer within {timeout} s")
            results.append(pickle.loads(connection.recv_bytes()))
        return results

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Return the result of `function(*args)` in each process. It must not raise."""
        results = self.try_run(function, *args, timeout=timeout)
        failures = [f"process {rank}:\n{r}" for rank, r in enumerate(results) if is_failure(r)]
        assert not failures, "\n".join(failures)
        return results

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


class Failure(str):
    """The traceback of an exception in a process."""


def is_failure(result: object) -> bool:
    return isinstance(result, Failure)


def _serve(
    connection: Connection,
    rank: int,
    number: int,
    store: str,
    group_timeout: float,
    backend: str,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=number,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    while True:
        function, args = pickle.loads(connection.recv_bytes())
        torch.manual_seed(0)
        try:
            result = function(*args)
        except BaseException:
            result = Failure(traceback.format_exc())
        connection.send_bytes(pickle.dumps(result))
