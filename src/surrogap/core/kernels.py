"""The arithmetic of a two-pass step as five kernels, each over all tensors at once.

An operator of torch costs a few microseconds to launch, tens where the processor's caches are cold,
and a step of `Flat` needs about a hundred, views included: several percent of a small model's
step. Here a kernel finds its tensors in a table of addresses, and the scalars between kernels never
leave the device: each kernel adds up the partial sums of the one before by itself.

A pass over memory is cut into blocks, dealt out to a fixed number of programs, so sums come out
the same on every run.
"""

import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from surrogap.core.arithmetic import Arithmetic, Coefficients
from surrogap.core.ascent import Ascent, Kind
from surrogap.core.vectors import Gradients

_BLOCK = 8192
_PROGRAMS_PER_PROCESSOR = 4
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# The rows of a plan, and of the partial sums.
_NUM_ROWS = 5
_dtype = attrgetter("dtype")
_GG, _TT, _GP, _PP = range(4)


@triton.jit
def _in_tensors(table, plan, block, num_blocks, dtype: tl.constexpr, size: tl.constexpr):
    """Pointers to a block in its tensor, and a mask, which is empty if that has no address."""
    address = tl.load(table + tl.load(plan + block))
    offsets = tl.arange(0, size)
    start = tl.load(plan + num_blocks + block)
    left = tl.where(address == 0, 0, tl.load(plan + 2 * num_blocks + block))
    return address.to(tl.pointer_type(dtype)) + start + offsets, offsets < left


@triton.jit
def _in_copy(copy, plan, block, num_blocks, size: tl.constexpr):
    """Pointers to a block in a flat copy of all tensors, and a mask."""
    offsets = tl.arange(0, size)
    start = tl.load(plan + 3 * num_blocks + block)
    return copy + start + offsets, offsets < tl.load(plan + 2 * num_blocks + block)


@triton.jit
def _kind(plan, block, num_blocks):
    return tl.load(plan + 4 * num_blocks + block)


@triton.jit
def _scaling(kind, w, eta):
    """T."""
    return tl.where(kind == 2, tl.abs(w) + eta, tl.where(kind == 1, 1.0, 0.0))


@triton.jit
def _total(sums, row, num_sums, padded: tl.constexpr):
    offsets = tl.arange(0, padded)
    return tl.sum(tl.load(sums + row * num_sums + offsets, mask=offsets < num_sums, other=0.0))


@triton.jit
def _ratio(numerator, squared_norm):
    return tl.where(squared_norm == 0.0, 0.0, tl.div_rn(numerator, squared_norm))


@triton.jit
def _copy_kernel(
    g_table, w_table, plan, num_blocks, g_copy, w_copy, sums, num_sums, first, eta,
    dtype: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """`g_copy <- g`, `w_copy <- w`, and partial sums of `||g||^2` and `||T g||^2`."""
    gg = tl.zeros((size,), tl.float32)
    tt = tl.zeros((size,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        pointers, mask = _in_tensors(w_table, plan, block, num_blocks, dtype, size)
        copies, _ = _in_copy(w_copy, plan, block, num_blocks, size)
        w = tl.load(pointers, mask=mask)
        tl.store(copies, w, mask=mask)
        pointers, mask = _in_tensors(g_table, plan, block, num_blocks, dtype, size)
        g = tl.load(pointers, mask=mask, other=0.0)
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        tl.store(copies, g, mask=mask)
        kind, g = _kind(plan, block, num_blocks), g.to(tl.float32)
        gg += g * g
        g *= _scaling(kind, w.to(tl.float32), eta)
        # Zero times an infinite gradient, on a tensor that does not climb, would be NaN; and
        # beyond the mask w is anything.
        tt += tl.where(mask & (kind != 0), g * g, 0.0)
    place = first + tl.program_id(0)
    tl.store(sums + place, tl.sum(gg))
    tl.store(sums + num_sums + place, tl.sum(tt))


@triton.jit
def _climb_kernel(
    g_copy, w_table, plan, num_blocks, sums, num_sums, rho, eps, scale, eta,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, is_loss_scaled: tl.constexpr,
):  # fmt: skip
    """`w <- w + rho * T^2 g / (||T g|| + eps)`."""
    norm = tl.sqrt_rn(_total(sums, 1, num_sums, padded))
    if is_loss_scaled:
        eps *= tl.load(scale)
    climbs = (norm > 0.0) & (norm < float("inf"))
    step = tl.where(climbs, tl.div_rn(rho, norm + eps), 0.0)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        g = tl.load(copies, mask=mask).to(tl.float32)
        pointers, mask = _in_tensors(w_table, plan, block, num_blocks, dtype, size)
        w = tl.load(pointers, mask=mask).to(tl.float32)
        kind = _kind(plan, block, num_blocks)
        scaling = _scaling(kind, w, eta)
        # Where it must not climb, a step of 0 along an infinite gradient would be NaN.
        moved = tl.where(climbs & (kind != 0), w + step * (scaling * scaling * g), w)
        tl.store(pointers, moved.to(dtype), mask=mask)


@triton.jit
def _restore_kernel(
    w_table, plan, num_blocks, w_copy, dtype: tl.constexpr, size: tl.constexpr
):  # fmt: skip
    """`w <- w_copy`."""
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        copies, mask = _in_copy(w_copy, plan, block, num_blocks, size)
        pointers, _ = _in_tensors(w_table, plan, block, num_blocks, dtype, size)
        tl.store(pointers, tl.load(copies, mask=mask), mask=mask)


@triton.jit
def _products_kernel(
    g_copy, p_table, plan, num_blocks, sums, num_sums, first,
    dtype: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Partial sums of `<g, g_p>` and `||g_p||^2`."""
    gp = tl.zeros((size,), tl.float32)
    pp = tl.zeros((size,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        g = tl.load(copies, mask=mask, other=0.0).to(tl.float32)
        pointers, mask = _in_tensors(p_table, plan, block, num_blocks, dtype, size)
        p = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        gp += g * p
        pp += p * p
    place = first + tl.program_id(0)
    tl.store(sums + 2 * num_sums + place, tl.sum(gp))
    tl.store(sums + 3 * num_sums + place, tl.sum(pp))


@triton.jit
def _combine_kernel(
    g_copy, p_table, plan, num_blocks, sums, num_sums, a_0, b_0, a_1, b_1,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """`g_p <- a * g + b * g_p`, rounded once."""
    gp = _total(sums, 2, num_sums, padded)
    a = a_0 + a_1 * _ratio(gp, _total(sums, 0, num_sums, padded))
    b = b_0 + b_1 * _ratio(gp, _total(sums, 3, num_sums, padded))
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        g = tl.load(copies, mask=mask).to(tl.float32)
        pointers, mask = _in_tensors(p_table, plan, block, num_blocks, dtype, size)
        p = tl.load(pointers, mask=mask).to(tl.float32)
        tl.store(pointers, (a * g + b * p).to(dtype), mask=mask)


class _Group:
    """The tensors of one dtype: which they are, where their blocks lie, and their copies."""

    g_copy: Tensor
    w_copy: Tensor

    def __init__(
        self, parameters: Sequence[Tensor], kinds: Sequence[Kind], members: list[int]
    ) -> None:
        mine = [parameters[index] for index in members]
        self.dtype = _DTYPES[mine[0].dtype]
        self._members = members
        self._size = sum(map(Tensor.numel, mine))
        self._first = mine[0]
        my_kinds = tuple([kinds[index] for index in members])
        self.plan = _plan(tuple(map(Tensor.numel, mine)), my_kinds, mine[0].device)
        self.num_blocks = self.plan.shape[1]
        self.w_table = self.table(parameters)

    def table(self, tensors: Gradients | Sequence[Tensor]) -> Tensor:
        """The addresses of this group's tensors among all `tensors`; 0 for None."""
        mine = (tensors[index] for index in self._members)
        return _table(tuple([0 if t is None else t.data_ptr() for t in mine]), self.plan.device)

    def make_room(self) -> None:
        """For the copies."""
        self.g_copy = self._first.new_empty(self._size)
        self.w_copy = self._first.new_empty(self._size)


@lru_cache(maxsize=4)
def _plan(sizes: tuple[int, ...], kinds: tuple[Kind, ...], device: torch.device) -> Tensor:
    """For each block: its tensor, its start there, what is left, its start among all, its kind."""
    firsts = accumulate(sizes, initial=0)
    blocks = [
        (index, start, size - start, first + start, int(kind))
        for index, (size, kind, first) in enumerate(zip(sizes, kinds, firsts, strict=False))
        for start in range(0, size, _BLOCK)
    ]
    if not blocks:
        return torch.empty(_NUM_ROWS, 0, dtype=torch.int64, device=device)
    return _on_device(chain(*zip(*blocks, strict=True)), device).view(_NUM_ROWS, len(blocks))


# The allocator mostly hands out the same addresses step after step.
@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return _on_device(addresses, device)


def _on_device(numbers: Iterable[int], device: torch.device) -> Tensor:
    # From ordinary memory: for so few bytes the driver takes its copy at once, so nothing waits.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device, non_blocking=True)


@lru_cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


class Fused(Arithmetic):
    """With the kernels of this module, for dense tensors on one CUDA device."""

    def __init__(self, parameters: Sequence[Tensor], kinds: Sequence[Kind], ascent: Ascent) -> None:
        super().__init__(parameters, kinds, ascent)
        self._signature = _signature(parameters)
        self._device = parameters[0].device
        members: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(parameters):
            members.setdefault(parameter.dtype, []).append(index)
        self._groups = [_Group(parameters, kinds, indices) for indices in members.values()]
        self._programs = _num_programs(self._device)
        self._num_sums = self._programs * len(self._groups)
        self._are_contiguous = all(map(Tensor.is_contiguous, parameters))
        self._padded = triton.next_power_of_2(self._num_sums)

    @staticmethod
    def takes(parameters: Sequence[Tensor]) -> bool:
        """Whether the kernels can work on these tensors."""
        device = parameters[0].device
        return (
            device.type == "cuda"
            and all(
                p.device == device and p.dtype in _DTYPES and (p.is_contiguous() or _is_dense(p))
                for p in parameters
            )
            and _can_launch(device)
        )

    def fits(self, parameters: Sequence[Tensor], kinds: Sequence[Kind]) -> bool:
        """See `Arithmetic`."""
        return kinds == self._kinds and _signature(parameters) == self._signature

    @contextmanager
    def climbed(self, g: Gradients, rho: float, scale: Tensor | None) -> Iterator[None]:
        """See `Arithmetic`."""
        self._is_reached = [piece is not None for piece in g]
        self._sums = torch.empty(4, self._num_sums, device=self._device)
        self._copy(self._in_order(g))
        del g  # the copy takes its place, in one piece
        try:
            self._climb(rho, scale)
            yield
        except BaseException:
            self._forget()
            raise
        finally:
            self._restore()

    def _copy(self, g: Gradients) -> None:
        eta = self._ascent.eta or 0.0
        with self._on_device():
            for index, group in enumerate(self._groups):
                group.make_room()
                _copy_kernel[(self._programs,)](
                    group.table(g), group.w_table, group.plan, group.num_blocks,
                    group.g_copy, group.w_copy, self._sums, self._num_sums,
                    index * self._programs, eta, group.dtype, _BLOCK,
                )  # fmt: skip

    def _climb(self, rho: float, scale: Tensor | None) -> None:
        with self._on_device():
            for group in self._groups:
                _climb_kernel[(self._programs,)](
                    group.g_copy, group.w_table, group.plan, group.num_blocks,
                    self._sums, self._num_sums, rho, self._ascent.eps,
                    self._sums if scale is None else scale, self._ascent.eta or 0.0,
                    group.dtype, _BLOCK, self._padded, scale is not None,
                )  # fmt: skip

    def _restore(self) -> None:
        with self._on_device():
            for group in self._groups:
                _restore_kernel[(self._programs,)](
                    group.w_table, group.plan, group.num_blocks, group.w_copy, group.dtype, _BLOCK
                )
                del group.w_copy

    def combination(
        self, g_p: Gradients, coefficients: Coefficients
    ) -> tuple[Gradients, Callable[[], Tensor]]:
        """See `Arithmetic`."""
        result = self._in_order(g_p)
        for index, piece in enumerate(result):
            if piece is None and self._is_reached[index]:
                result[index] = torch.zeros_like(self._parameters[index])
        tables = [(group, group.table(result)) for group in self._groups]
        with self._on_device():
            for index, (group, p_table) in enumerate(tables):
                _products_kernel[(self._programs,)](
                    group.g_copy, p_table, group.plan, group.num_blocks,
                    self._sums, self._num_sums, index * self._programs, group.dtype, _BLOCK,
                )  # fmt: skip
            for group, p_table in tables:
                _combine_kernel[(self._programs,)](
                    group.g_copy, p_table, group.plan, group.num_blocks,
                    self._sums, self._num_sums, *coefficients, group.dtype, _BLOCK, self._padded,
                )  # fmt: skip
        sums = self._sums
        self._forget()
        return result, lambda: sums[[_GG, _GP, _PP]].sum(1)

    def _forget(self) -> None:
        del self._sums
        for group in self._groups:
            del group.g_copy

    def _in_order(self, gradients: Gradients) -> Gradients:
        """`gradients` in the memory formats of their parameters."""
        if self._are_contiguous and all(g is None or g.is_contiguous() for g in gradients):
            return gradients
        return [
            g if g is None or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for g, p in zip(gradients, self._parameters, strict=True)
        ]

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, which need not be the model's."""
        if self._device.type != "cuda" or self._device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(self._device)


def _signature(parameters: Sequence[Tensor]) -> tuple[object, ...]:
    """What the kernels rely on from step to step. A moved or cast model has another."""
    return (
        *map(Tensor.data_ptr, parameters),
        *map(Tensor.numel, parameters),
        *map(Tensor.is_contiguous, parameters),
        *map(_dtype, parameters),
    )


@lru_cache
def _can_launch(device: torch.device) -> bool:
    """Whether Triton can build kernels here: it needs a C compiler, and a GPU that it supports."""
    try:
        one = torch.ones(1, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _restore_kernel[(1,)](
                _table((one.data_ptr(),), device), _plan((1,), (Kind.PLAIN,), device), 1,
                one.clone(), tl.float32, _BLOCK,
            )  # fmt: skip
    except Exception as error:
        warnings.warn(
            f"Triton must be able to build kernels for {device}, got {type(error).__name__}: "
            f"{error}. Training goes on without them, and small models are slower for it; "
            "install a C compiler such as gcc if it is missing.",
            stacklevel=2,
        )
        return False
    return True


def _is_dense(tensor: Tensor) -> bool:
    """Whether it fills its memory without gaps, in whatever order."""
    return torch.empty_like(tensor).stride() == tensor.stride()
