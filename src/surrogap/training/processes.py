"""The processes of a run: one, or those that a launcher such as torchrun started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from surrogap.errors import InvalidValueError

T = TypeVar("T")

# The variables that torch's env:// reads. torchrun sets them; for srun and mpirun, the user does.
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Args:
        device: The device of this process.
        rank: The rank of this process. Only rank 0 writes files.
        size: The number of processes.
        host_group: The process group for CPU tensors; None without torch.distributed.

    >>> World(torch.device("cpu")).is_first
    True
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    host_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """True for rank 0, the process that writes files."""
        return self.rank == 0

    @property
    def is_shared(self) -> bool:
        """True with torch.distributed, even if this is the only process."""
        return self.host_group is not None

    def from_first(self, function: Callable[[], T]) -> T:
        """Call `function` in the first process, and return its result in all processes.

        Raises:
            Exception: `function` raised it; all processes raise the same.
        """
        if not self.is_shared:
            return function()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer = [function(), None]
            except Exception as error:  # otherwise the other processes would wait forever
                answer = [None, error]
        dist.broadcast_object_list(answer, src=0, group=self.host_group)
        result, failure = answer
        if failure is not None:
            raise failure
        return cast(T, result)

    def largest(self, number: int) -> int:
        """Return the maximum of a number over the processes, all of which must call it."""
        if not self.is_shared:
            return number
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.host_group)
        return int(numbers)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if not self.is_shared:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.size

    def gathered(self, values: Tensor) -> list[Tensor]:
        """Return the CPU tensors of all processes, which must have the same shape."""
        if not self.is_shared:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values, group=self.host_group)
        return gathered


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """Context manager that joins the processes of a launcher, if there are any.

    If torch.distributed is already initialised, it is used and stays initialised.

    Raises:
        ValueError: The device does not exist, or some of the launcher's variables are missing.
    """
    has_launcher = is_launched()
    where = device_of(device, _local_rank() if has_launcher else None)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    starts = has_launcher and not dist.is_initialized()
    if starts:
        dist.init_process_group()  # NCCL for CUDA, gloo for the CPU
    try:
        if dist.is_available() and dist.is_initialized():
            # The others wait while the first one checks image files, which may take hours.
            group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
            group = cast(dist.ProcessGroup, group)
            yield World(where, dist.get_rank(), dist.get_world_size(), group)
            dist.destroy_process_group(group)
        else:
            yield World(where)
    finally:
        if starts:
            dist.destroy_process_group()


def is_launched() -> bool:
    """Return True if the environment has the variables of torch's env:// initialisation.

    Raises:
        ValueError: WORLD_SIZE is above 1 and another variable is missing.
    """
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InvalidValueError(
            f"WORLD_SIZE must come with {', '.join(_ENVIRONMENT)}, got {os.environ['WORLD_SIZE']} "
            f"without {', '.join(missing)}. Set them for each process, or start it with torchrun."
        )
    return dist.is_available() and not missing


def _local_rank() -> int:
    """Return the rank of this process on its machine; not all launchers set LOCAL_RANK."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ["RANK"]) % max(torch.cuda.device_count(), 1)


def device_of(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device with a given name.

    Args:
        name: A torch device, or "auto" for a GPU if there is one.
        local_rank: The rank of this process on its machine, which is the index of its GPU.

    Raises:
        ValueError: The device is not available.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank or 0)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidValueError(
            f"device must be available, got {name!r} ({reason}). Pass cpu or auto."
        ) from error
    return device
