"""A group of tensors that one kernel launch processes: their blocks, addresses and copies."""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain

import torch
import triton.language as tl
from torch import Tensor

from surrogap.core.arithmetic import Task
from surrogap.core.fused.kernels import (
    climb_kernel,
    combine_kernel,
    copy_kernel,
    products_kernel,
    restore_kernel,
)
from surrogap.core.fused.launching import Kernel
from surrogap.core.geometry import Kind
from surrogap.core.vectors import Gradients

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# 16 elements for each thread of a program; with 64, registers spill.
BLOCK = 4096
_NUM_ROWS = 5
# In elements: for any dtype at least the 16 bytes that a thread loads at once.
_ALIGNMENT = 16


class Tables:
    """The tables of a CUDA graph.

    Addresses become known during the capture, when nothing can be copied, so the tables are filled
    afterwards. They are allocated before the capture, because memory that the graph allocates may
    hold other tensors earlier in a replay.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.int64, device=device)
        self._content: list[int] = []

    def add(self, addresses: tuple[int, ...]) -> Tensor:
        """Return the table that will hold these addresses."""
        start = len(self._content)
        # Pad to an even number: kernels rely on tables aligned to 16 bytes.
        self._content += (*addresses, *[0] * (len(addresses) % 2))
        return self._memory[start : start + len(addresses)]

    def fill(self) -> None:
        """Write all tables, after the capture."""
        self._memory[: len(self._content)].copy_(torch.tensor(self._content))


class TensorGroup:
    """The tensors of one dtype and sharding: their blocks, addresses and copies."""

    g_copy: Tensor
    w_copy: Tensor

    def __init__(self, task: Task, members: list[int]) -> None:
        mine = [task.parameters[index] for index in members]
        self.dtype = TRITON_DTYPES[mine[0].dtype]
        self.sharding = task.shardings[members[0]]
        self._members = members
        self._first = mine[0]
        self._device = mine[0].device
        kinds = tuple([task.kinds[index] for index in members])
        self.plan, self._size = plan(tuple(map(Tensor.numel, mine)), kinds, self._device)
        self.num_blocks = self.plan.shape[1]
        self.find(task.parameters)
        self.copy = Kernel(copy_kernel, self._device)
        self.climb = Kernel(climb_kernel, self._device)
        self.restore = Kernel(restore_kernel, self._device)
        self.products = Kernel(products_kernel, self._device)
        self.combine = Kernel(combine_kernel, self._device)

    def find(self, parameters: Sequence[Tensor | None]) -> None:
        """Update the addresses of the weights; None for weights that must not be written to."""
        self.w_table = address_table(self._addresses(parameters), self._device)

    def table(self, tensors: Gradients, tables: Tables | None) -> Tensor:
        """Return a table of this group's addresses, 0 for None. In a graph it is in `tables`."""
        addresses = self._addresses(tensors)
        return address_table(addresses, self._device) if tables is None else tables.add(addresses)

    def _addresses(self, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
        mine = [tensors[index] for index in self._members]
        return tuple([0 if t is None else t.data_ptr() for t in mine])

    def allocate(self, *, is_low: bool) -> None:
        """Allocate the copies."""
        self.w_copy = self._first.new_empty(self._size)
        self.g_copy = self.w_copy if is_low else self._first.new_empty(self._size)

    def free(self) -> None:
        """Free the copies."""
        del self.w_copy, self.g_copy


@lru_cache(maxsize=16)
def plan(
    sizes: tuple[int, ...], kinds: tuple[Kind, ...], device: torch.device
) -> tuple[Tensor, int]:
    """Return the plan that `kernels` describes, for tensors of these sizes and kinds.

    Also return the number of elements of a flat copy of the tensors, which aligns each of them.
    """
    *firsts, total = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    blocks = [
        (index, start, size - start, first + start, int(kind))
        for index, (size, kind, first) in enumerate(zip(sizes, kinds, firsts, strict=True))
        for start in range(0, size, BLOCK)
    ]
    if not blocks:
        return torch.empty(_NUM_ROWS, 0, dtype=torch.int64, device=device), total
    rows = _on_device(chain(*zip(*blocks, strict=True)), device)
    return rows.view(_NUM_ROWS, len(blocks)), total


# The allocator mostly returns the same addresses in every step.
@lru_cache(maxsize=64)
def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table of these addresses."""
    return _on_device(addresses, device)


def _on_device(numbers: Iterable[int], device: torch.device) -> Tensor:
    # From pageable memory: the driver copies so few bytes immediately, so nothing waits.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device, non_blocking=True)
