"""Exact copies of many small tensors, with one kernel each way."""

import triton.language as tl
from torch import Tensor, int32

from surrogap.core.ascent import Kind
from surrogap.core.copies import Copies
from surrogap.core.kernels import restore_kernel, save_kernel
from surrogap.core.launching import Kernel, can_launch, on
from surrogap.core.tables import BLOCK, plan, table


class FusedCopies(Copies):
    """Copies of 32-bit integers on one CUDA device."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors  # whose addresses the table holds
        self._device = device = tensors[0].device
        sizes = tuple(map(Tensor.numel, tensors))
        blocks, room = plan(sizes, (Kind.STILL,) * len(tensors), device)
        self._addresses = tuple(map(Tensor.data_ptr, tensors))
        self._table = table(self._addresses, device)
        copy = tensors[0].new_empty(room)
        self._arguments = (blocks, blocks.shape[1], copy, tl.int32, BLOCK)
        self._save = Kernel(save_kernel, device)
        self._restore = Kernel(restore_kernel, device)

    @staticmethod
    def takes(tensors: list[Tensor]) -> bool:
        """Whether the kernels can work on these."""
        return tensors[0].dtype == int32 and can_launch(tensors[0].device)

    def save(self) -> None:
        """See `Copies`."""
        with on(self._device):
            self._save(self._table, *self._arguments)

    def restore(self) -> None:
        """See `Copies`."""
        addresses = tuple(map(Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:  # memory that has grown has moved
            self._addresses, self._table = addresses, table(addresses, self._device)
        with on(self._device):
            self._restore(self._table, *self._arguments, False)  # not `is_low`
