"""The processes that train together: one, or those that a launcher such as torchrun started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """This process among those that train together.

    Args:
        device: Where it computes.
        rank: Which process this is, from 0. The first one alone writes.
        size: How many there are.
        host_group: Connects the processes' CPUs, if there are several.

    >>> World(torch.device("cpu")).is_first
    True
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    host_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def is_shared(self) -> bool:
        """Whether torch.distributed connects processes, be it only this one."""
        return self.host_group is not None

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` gives in the first process, in all of them.

        Raises:
            Exception: The first process raised one; all raise the same.
        """
        if not self.is_shared:
            return function()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer = [function(), None]
            except Exception as error:  # or the others would wait for ever
                answer = [None, error]
        dist.broadcast_object_list(answer, src=0, group=self.host_group)
        result, failure = answer
        if failure is not None:
            raise failure
        return cast(T, result)

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers; all must ask."""
        if not self.is_shared:
            return number
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.host_group)
        return int(numbers)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if not self.is_shared:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.size

    def gathered(self, values: Tensor) -> list[Tensor]:
        """A tensor of the CPU from each of the processes, of one shape everywhere."""
        if not self.is_shared:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values, group=self.host_group)
        return gathered


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """Context manager that joins the processes a launcher started, if there are any.

    Where torch.distributed is initialised already, it stays so.

    Raises:
        ValueError: The device does not exist, or the environment describes the processes in part.
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
            group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
            yield World(where, dist.get_rank(), dist.get_world_size(), group)
            dist.destroy_process_group(group)
        else:
            yield World(where)
    finally:
        if starts:
            dist.destroy_process_group()


def is_launched() -> bool:
    """Return True if the environment says which processes train together, as torch's env:// does.

    Raises:
        ValueError: The environment says that there are several processes, and not how to join them.
    """
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InvalidValueError(
            f"WORLD_SIZE must come with {', '.join(_ENVIRONMENT)}, got {os.environ['WORLD_SIZE']} "
            f"without {', '.join(missing)}. Set them for each process, or start it with torchrun."
        )
    return dist.is_available() and not missing


def _local_rank() -> int:
    """Return the number of this process on its machine; only some launchers set it."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ["RANK"]) % max(torch.cuda.device_count(), 1)


def device_of(name: str, local_rank: int | None = None) -> torch.device:
    """The device of a name.

    Args:
        name: One of torch's, or "auto" for a GPU where there is one.
        local_rank: Which of the machine's processes this is; it takes the GPU of that number.

    Raises:
        ValueError: There is no such device.

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
            f"device must be one that torch finds here, got {name!r} ({reason}). Pass cpu or auto."
        ) from error
    if device.type == "meta":
        raise InvalidValueError("device must be one that computes, got 'meta'. Pass cpu or auto.")
    return device
