"""The arithmetic of a two-pass step as kernels, each over all tensors of one dtype at once.

A kernel finds its tensors in a table of addresses (0 where there is none), and its work in a plan:
a column for each block of elements, whose rows are the block's tensor, its start there, the number
of elements from there on, its start in a flat copy of all tensors, and the kind of its tensor. The
scalars between kernels stay on the device: each kernel adds up the partial sums of the one before
by itself. Blocks are dealt out to a fixed number of programs, so sums come out the same every time.

The rows of `sums` are `<g, g>`, `<g, g_p>`, `<g_p, g_p>` and `||T g||^2`.
"""

import triton
import triton.language as tl


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
def _save(w_table, plan, block, num_blocks, w_copy, dtype: tl.constexpr, size: tl.constexpr):
    pointers, mask = _in_tensors(w_table, plan, block, num_blocks, dtype, size)
    copies, _ = _in_copy(w_copy, plan, block, num_blocks, size)
    w = tl.load(pointers, mask=mask, other=0)
    tl.store(copies, w, mask=mask)
    return w


@triton.jit
def _restore(w_table, plan, block, num_blocks, w_copy, dtype: tl.constexpr, size: tl.constexpr):
    copies, mask = _in_copy(w_copy, plan, block, num_blocks, size)
    pointers, _ = _in_tensors(w_table, plan, block, num_blocks, dtype, size)
    tl.store(pointers, tl.load(copies, mask=mask), mask=mask)


@triton.jit
def _kind(plan, block, num_blocks):
    return tl.load(plan + 4 * num_blocks + block)


@triton.jit
def _scaling(kind, w, eta):
    """T; the numbers are those of `ascent.Kind`."""
    return tl.where(kind == 2, tl.abs(w) + eta, tl.where(kind == 1, 1.0, 0.0))


@triton.jit
def _total(sums, row, num_sums, padded: tl.constexpr):
    offsets = tl.arange(0, padded)
    return tl.sum(tl.load(sums + row * num_sums + offsets, mask=offsets < num_sums, other=0.0))


@triton.jit
def _ratio(numerator, squared_norm):
    return tl.where(squared_norm == 0.0, 0.0, tl.div_rn(numerator, squared_norm))


@triton.jit
def copy_kernel(
    g_table, w_table, plan, num_blocks, g_copy, w_copy, sums, num_sums, first, eta,
    dtype: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """`g_copy <- g`, `w_copy <- w`, and partial sums of `||g||^2` and `||T g||^2`."""
    gg = tl.zeros((size,), tl.float32)
    tt = tl.zeros((size,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        w = _save(w_table, plan, block, num_blocks, w_copy, dtype, size)
        pointers, mask = _in_tensors(g_table, plan, block, num_blocks, dtype, size)
        g = tl.load(pointers, mask=mask, other=0.0)
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        tl.store(copies, g, mask=mask)
        kind, g = _kind(plan, block, num_blocks), g.to(tl.float32)
        gg += g * g
        g *= _scaling(kind, w.to(tl.float32), eta)
        # Zero times an infinite gradient, on a tensor that does not climb, would be NaN.
        tt += tl.where(kind == 0, 0.0, g * g)
    place = first + tl.program_id(0)
    tl.store(sums + place, tl.sum(gg))
    tl.store(sums + 3 * num_sums + place, tl.sum(tt))


@triton.jit
def climb_kernel(
    g_copy, w_table, plan, num_blocks, sums, num_sums, rho, eps, scale, eta,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """`w <- w + rho * T^2 g / (||T g|| + eps)`."""
    norm = tl.sqrt_rn(_total(sums, 3, num_sums, padded))
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
def save_kernel(w_table, plan, num_blocks, w_copy, dtype: tl.constexpr, size: tl.constexpr):
    """`w_copy <- w`."""
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        _save(w_table, plan, block, num_blocks, w_copy, dtype, size)


@triton.jit
def restore_kernel(w_table, plan, num_blocks, w_copy, dtype: tl.constexpr, size: tl.constexpr):
    """`w <- w_copy`."""
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        _restore(w_table, plan, block, num_blocks, w_copy, dtype, size)


@triton.jit
def return_kernel(
    w_table, p_table, plan, num_blocks, g_copy, w_copy, sums, num_sums, first,
    dtype: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """`w <- w_copy`, and partial sums of `<g, g_p>` and `||g_p||^2`."""
    gp = tl.zeros((size,), tl.float32)
    pp = tl.zeros((size,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        _restore(w_table, plan, block, num_blocks, w_copy, dtype, size)
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        g = tl.load(copies, mask=mask, other=0.0).to(tl.float32)
        pointers, mask = _in_tensors(p_table, plan, block, num_blocks, dtype, size)
        p = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        gp += g * p
        pp += p * p
    place = first + tl.program_id(0)
    tl.store(sums + num_sums + place, tl.sum(gp))
    tl.store(sums + 2 * num_sums + place, tl.sum(pp))


@triton.jit
def combine_kernel(
    g_copy, p_table, plan, num_blocks, sums, num_sums, a_0, b_0, a_1, b_1,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """`g_p <- a * g + b * g_p`, rounded once."""
    gp = _total(sums, 1, num_sums, padded)
    a = a_0 + a_1 * _ratio(gp, _total(sums, 0, num_sums, padded))
    b = b_0 + b_1 * _ratio(gp, _total(sums, 2, num_sums, padded))
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        copies, mask = _in_copy(g_copy, plan, block, num_blocks, size)
        g = tl.load(copies, mask=mask).to(tl.float32)
        pointers, mask = _in_tensors(p_table, plan, block, num_blocks, dtype, size)
        p = tl.load(pointers, mask=mask).to(tl.float32)
        tl.store(pointers, (a * g + b * p).to(dtype), mask=mask)
