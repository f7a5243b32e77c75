"""The arithmetic of a step in Triton kernels.

Launching one torch operator takes a few microseconds, or tens of them with cold CPU caches. A step
of `Flat` needs about a hundred operators, views included: several percent of a small model's step.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from surrogap.core.arithmetic import Arithmetic, Task
from surrogap.core.combine import Coefficients, Number
from surrogap.core.fused.group import BLOCK, TRITON_DTYPES, Tables, TensorGroup, address_table, plan
from surrogap.core.fused.kernels import restore_kernel
from surrogap.core.fused.launching import num_programs, on
from surrogap.core.geometry import Kind
from surrogap.core.shards import WHOLE, totals
from surrogap.core.vectors import Gradients, apart, groups_of
from surrogap.errors import UnsupportedError

_dtype = attrgetter("dtype")


class Fused(Arithmetic):
    """Arithmetic with Triton kernels, for dense tensors on one CUDA device."""

    _has_copy = False
    _tables: Tables | None = None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        parameters = task.parameters
        self._signature = _signature(parameters)
        self._device = parameters[0].device
        self._groups = [
            TensorGroup(task, members) for members in groups_of(parameters, task.shardings)
        ]
        self._programs = num_programs(self._device)
        self._num_sums = self._programs * len(self._groups)
        self._padded = triton.next_power_of_2(self._num_sums)
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        self._is_low = task.memory == "low"

    @staticmethod
    def takes(parameters: Sequence[Tensor]) -> bool:
        """Return whether the kernels can work on these tensors, the first of which is on CUDA."""
        device = parameters[0].device
        are_known = all(
            p.device == device and p.dtype in TRITON_DTYPES and (p.is_contiguous() or _is_dense(p))
            for p in parameters
        )
        return are_known and can_launch(device)

    def adopts(self, task: Task) -> bool:
        """See `Arithmetic`."""
        if task != self._task or _signature(task.parameters) != self._signature:
            return False
        self._task = task
        return True

    @contextmanager
    def capturing(self, num_steps: int) -> Iterator[None]:
        """See `Arithmetic`."""
        num_tables = 3 * len(self._groups) * num_steps  # of v, g and g_p
        size = 3 * len(self._task.parameters) * num_steps + num_tables
        self._tables = tables = Tables(size, self._device)
        try:
            yield
        finally:
            self._tables = None
        tables.fill()
        self._captured_tables = tables  # every replay of the graph reads them

    def climb(
        self, v: Gradients, rho: Number, scale: Tensor | None, g: Gradients | None = None
    ) -> None:
        """See `Arithmetic`."""
        self._is_reached = [piece is not None for piece in (v if g is None else g)]
        self._sums = torch.empty(4, self._num_sums, dtype=torch.float32, device=self._device)
        scale = self._one if scale is None else scale
        self._ball = (_scalar(rho), float(self._task.eps), scale, float(self._task.eta))
        self._constants = (BLOCK, self._padded, isinstance(rho, Tensor))
        v = self._in_order(v)
        g = g if g is None else self._in_order(g)
        v_tables = [group.table(v, self._tables) for group in self._groups]
        g_tables = v_tables if g is None else [gr.table(g, self._tables) for gr in self._groups]
        self._copy(v_tables, g_tables, is_along_g=g is None)
        self._has_copy = True
        self._move(v_tables)

    def _copy(self, v_tables: list[Tensor], g_tables: list[Tensor], *, is_along_g: bool) -> None:
        with on(self._device):
            for index, (group, v_table, g_table) in enumerate(
                zip(self._groups, v_tables, g_tables, strict=True)
            ):
                group.allocate(is_low=self._is_low)
                group.copy(
                    v_table, g_table, group.w_table, group.plan, group.num_blocks,
                    group.g_copy, group.w_copy, self._sums, self._num_sums,
                    index * self._programs, float(self._task.eta), group.dtype, BLOCK,
                    self._is_low, is_along_g,
                )  # fmt: skip
        self._add_up(slice(0, None, 3))

    def _move(self, v_tables: list[Tensor]) -> None:
        with on(self._device):
            for group, v_table in zip(self._groups, v_tables, strict=True):
                group.climb(
                    v_table, group.w_table, group.plan, group.num_blocks,
                    self._sums, self._num_sums, *self._ball, group.dtype, *self._constants,
                )  # fmt: skip

    def squared_norm(self) -> Tensor:
        """See `Arithmetic`."""
        return self._sums[3].sum()

    def restore(self) -> None:
        """See `Arithmetic`."""
        if not self._has_copy:
            return
        self._find_weights()
        with on(self._device):
            for group in self._groups:
                group.restore(
                    group.w_table, group.plan, group.num_blocks, group.w_copy,
                    group.dtype, BLOCK, self._is_low,
                )  # fmt: skip
        self._drop_copies()

    def _find_weights(self) -> None:
        """Update the addresses of the weights if a forward pass has assigned to `p.data`.

        Not in a graph: `capture` rejects such models when it warms up.
        """
        parameters = self._task.parameters
        num = len(parameters)
        if tuple(map(Tensor.data_ptr, parameters)) == self._signature[:num]:
            return
        now, before = _signature(parameters), self._signature
        found: Gradients = [
            p if p.device == self._device and now[i::num] == (now[i], *before[i::num][1:]) else None
            for i, p in enumerate(parameters)
        ]
        for group in self._groups:
            group.find(found)
        self._signature = now  # last, so that after an interrupt the search is repeated
        if any(place is None for place in found):  # the other parameters can be restored
            raise UnsupportedError(
                "closure must not replace the data of parameters, got one that assigned data of "
                "another shape, dtype, device or memory format. Write to them in place."
            )

    def _drop_copies(self) -> None:
        self._has_copy = False
        for group in self._groups:
            group.free()

    def combination(
        self, g_p: Gradients, coefficients: Coefficients
    ) -> tuple[Gradients, Callable[[], Tensor]]:
        """See `Arithmetic`."""
        self._find_weights()
        rows = zip(apart(self._in_order(g_p)), self._is_reached, self._task.parameters, strict=True)
        result = [torch.zeros_like(p) if d is None and reached else d for d, reached, p in rows]
        tables = [group.table(result, self._tables) for group in self._groups]
        with on(self._device):
            for index, (group, p_table) in enumerate(zip(self._groups, tables, strict=True)):
                group.products(
                    group.w_table, p_table, group.plan, group.num_blocks,
                    group.g_copy, group.w_copy, self._sums, self._num_sums,
                    index * self._programs, *self._ball,
                    group.dtype, *self._constants, self._is_low,
                )  # fmt: skip
            self._add_up(slice(1, 3))
            for group, p_table in zip(self._groups, tables, strict=True):
                group.combine(
                    group.w_table, p_table, group.plan, group.num_blocks,
                    group.g_copy, group.w_copy, self._sums, self._num_sums,
                    *self._ball, *map(_scalar, coefficients),
                    group.dtype, *self._constants, self._is_low,
                )  # fmt: skip
        self._drop_copies()
        sums = self._sums
        del self._sums
        return result, lambda: sums[:3].sum(1)

    def _add_up(self, which: slice) -> None:
        """Reduce rows of partial sums over the processes that hold shards."""
        shardings = [group.sharding for group in self._groups]
        if all(sharding is WHOLE for sharding in shardings):
            return
        rows = self._sums[which]
        parts = rows.reshape(2, len(shardings), self._programs).sum(2)
        sums = totals([list(row) for row in parts], shardings)
        rows.zero_()
        rows[:, 0] = torch.stack(sums)

    def _in_order(self, gradients: Gradients) -> Gradients:
        """Return `gradients` in the memory formats of their parameters."""
        return [
            g if g is None or _is_ordered_like(g, p) else torch.empty_like(p).copy_(g)
            for g, p in zip(gradients, self._task.parameters, strict=True)
        ]


@lru_cache
def can_launch(device: torch.device) -> bool:
    """Return whether Triton can compile kernels: it needs a C compiler and a supported GPU."""
    try:
        one = torch.ones(1, device=device)
        with on(device):
            restore_kernel[(1,)](
                address_table((one.data_ptr(),), device),
                plan((1,), (Kind.PLAIN,), device)[0], 1,
                one.clone(), tl.float32, BLOCK, False, enable_fp_fusion=True,
            )  # fmt: skip
    except Exception as error:
        warnings.warn(
            f"Triton must be able to compile kernels for {device}, got {type(error).__name__}: "
            f"{error}. Training continues without them, and small models train slower. Install a "
            "C compiler such as gcc if it is missing.",
            stacklevel=2,
        )
        return False
    return True


def _scalar(number: Number) -> Number:
    """Return a number as an argument of kernels: Triton specialises kernels on integers."""
    return number if isinstance(number, Tensor) else float(number)


def _signature(parameters: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the properties that the kernels rely on. They change if the model is moved or cast."""
    return (
        *map(Tensor.data_ptr, parameters),
        *map(Tensor.numel, parameters),
        *map(Tensor.stride, parameters),
        *map(_dtype, parameters),
    )


def _is_ordered_like(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether both have the same memory format; strides of size-1 dimensions are ignored."""
    mine, its = gradient.stride(), parameter.stride()
    return mine == its or all(
        size == 1 or a == b for size, a, b in zip(parameter.shape, mine, its, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor occupies its memory without gaps, in any order."""
    return torch.empty_like(tensor).stride() == tensor.stride()
