"""A group of tensors that one kernel launch processes: their blocks, addresses and copies."""

from collections.abc import Sequence

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
from surrogap.core.fused.tables import Tables, address_table, plan
from surrogap.core.vectors import Gradients, present_of

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TensorGroup:
    """The tensors of one dtype and sharding: their blocks, addresses and copies."""

    g_copy: Tensor
    w_copy: Tensor

    def __init__(self, task: Task, members: list[int]) -> None:
        mine = [task.parameters[index] for index in members]
        self.dtype = TRITON_DTYPES[mine[0].dtype]
        self.sharding = task.shardings[members[0]]
        self._members = members
        self._has_all = len(members) == len(task.parameters)
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

    def find(self, parameters: Gradients | Sequence[Tensor]) -> None:
        """Update the addresses of the weights; None for weights that must not be written to."""
        self.w_table = address_table(self._addresses(parameters), self._device)

    def table(self, tensors: Gradients, tables: Tables | None) -> Tensor:
        """Return the addresses of this group's tensors, 0 for None; in `tables` of a graph."""
        addresses = self._addresses(tensors)
        return address_table(addresses, self._device) if tables is None else tables.add(addresses)

    def _addresses(self, tensors: Gradients | Sequence[Tensor]) -> tuple[int, ...]:
        mine = tensors if self._has_all else [tensors[index] for index in self._members]
        present = present_of(mine)
        if len(present) == len(mine):
            return tuple(map(Tensor.data_ptr, present))
        return tuple([0 if t is None else t.data_ptr() for t in mine])

    def allocate(self, *, is_low: bool) -> None:
        """Allocate the copies."""
        self.w_copy = self._first.new_empty(self._size)
        self.g_copy = self.w_copy if is_low else self._first.new_empty(self._size)

    def free(self) -> None:
        """Free the copies."""
        del self.w_copy, self.g_copy
