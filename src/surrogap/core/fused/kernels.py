"""The Triton kernels of a step's arithmetic. Each processes all tensors of one dtype at once.

A kernel reads the addresses of its tensors from a table (0 for None), and its work from a plan with
one column for each block of elements. The rows of the plan are the index of the block's tensor, the
block's start in that tensor, the number of elements from there to the end, the block's start in a
flat copy of all tensors, and the kind of its tensor. Scalars stay on the device: each kernel adds
up the partial sums of the previous one. Blocks are assigned to a fixed number of programs, so sums
are deterministic. A kernel that reads the same data as the previous one starts at the end, which
the cache may still hold.

The rows of `sums` are `<g, g>`, `<g, g_p>`, `<g_p, g_p>` and `||T v||^2`.

With `is_low`, `g` is not copied. For a tensor that climbs, `g` is recomputed from `w + delta` and
the copy of `w`, up to rounding. A tensor that does not climb needs no copy of `w`, so its `g` is
stored there.
"""

import triton
import triton.language as tl


@triton.jit
def _in_tensors(table, plan, block, num_blocks, dtype: tl.constexpr):
    """The address of a block in its tensor, and the number of elements from there to the end."""
    address = tl.load(table + tl.load(plan + block))
    left = tl.where(address == 0, 0, tl.load(plan + 2 * num_blocks + block))
    return address.to(tl.pointer_type(dtype)) + tl.load(plan + num_blocks + block), left


@triton.jit
def _in_copy(copy, plan, block, num_blocks):
    """The address of a block in a flat copy, and the number of elements to the tensor's end."""
    start = copy + tl.load(plan + 3 * num_blocks + block)
    return start, tl.load(plan + 2 * num_blocks + block)


@triton.jit
def _is_whole(start, left, size: tl.constexpr):
    """True if a block can be loaded and stored without a mask, 16 bytes at a time."""
    return (left >= size) & (start.to(tl.int64) % 16 == 0)


@triton.jit
def _load(start, left, size: tl.constexpr):
    """A block, padded with zeros."""
    offsets = tl.arange(0, size)
    if _is_whole(start, left, size):
        block = tl.load(tl.multiple_of(start + offsets, 16))
    else:
        block = tl.load(start + offsets, mask=offsets < left, other=0)
    return block


@triton.jit
def _store(start, block, left, size: tl.constexpr):
    offsets = tl.arange(0, size)
    if _is_whole(start, left, size):
        tl.store(tl.multiple_of(start + offsets, 16), block)
    else:
        tl.store(start + offsets, block, mask=offsets < left)


@triton.jit
def _kind(plan, block, num_blocks):
    return tl.load(plan + 4 * num_blocks + block)


@triton.jit
def _scaling(kind, w, eta):
    """`T` for the values of `geometry.Kind`."""
    return tl.where(kind == 2, tl.abs(w) + eta, tl.where(kind == 1, 1.0, 0.0))


@triton.jit
def _number(number, on_device: tl.constexpr):
    """The value of an argument that is a number, or the address of a number on the device."""
    if on_device:
        number = tl.load(number).to(tl.float32)
    return number


@triton.jit
def _total(sums, row, num_sums, padded: tl.constexpr):
    offsets = tl.arange(0, padded)
    return tl.sum(tl.load(sums + row * num_sums + offsets, mask=offsets < num_sums, other=0.0))


@triton.jit
def _share(factor, numerator, squared_norm):
    """`factor * numerator / squared_norm`, or 0 if the factor or the squared norm is 0."""
    is_zero = (squared_norm == 0.0) | (factor == 0.0)
    return factor * tl.where(is_zero, 0.0, tl.div_rn(numerator, squared_norm))


@triton.jit
def _step(sums, num_sums, rho, eps, scale, padded: tl.constexpr, on_device: tl.constexpr):
    """`rho / (||T v|| + eps)`, or 0 if there is no direction to climb in."""
    norm = tl.sqrt_rn(_total(sums, 3, num_sums, padded))
    climbs = (norm > 0.0) & (norm < float("inf"))
    step = tl.div_rn(_number(rho, on_device), norm + eps * tl.load(scale))
    return tl.where(climbs, step, 0.0)


@triton.jit
def copy_kernel(
    v_table, g_table, w_table, plan, num_blocks, g_copy, w_copy, sums, num_sums, first, eta,
    dtype: tl.constexpr, size: tl.constexpr, is_low: tl.constexpr, is_along_g: tl.constexpr,
):  # fmt: skip
    """`g_copy <- g`, `w_copy <- w`, and partial sums of `||g||^2` and `||T v||^2`."""
    gg = tl.zeros((size,), tl.float32)
    tt = tl.zeros((size,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        kind = _kind(plan, block, num_blocks)
        start, left = _in_tensors(g_table, plan, block, num_blocks, dtype)
        g = _load(start, left, size)
        start, left = _in_tensors(w_table, plan, block, num_blocks, dtype)
        w = _load(start, left, size)
        start, left = _in_copy(w_copy, plan, block, num_blocks)
        if is_low:
            _store(start, tl.where(kind == 0, g, w), left, size)
        else:
            _store(start, w, left, size)
            start, left = _in_copy(g_copy, plan, block, num_blocks)
            _store(start, g, left, size)
        g = g.to(tl.float32)
        gg += g * g
        v = g
        if not is_along_g:
            start, left = _in_tensors(v_table, plan, block, num_blocks, dtype)
            v = _load(start, left, size).to(tl.float32)
        v *= _scaling(kind, w.to(tl.float32), eta)
        # Zero times an infinite gradient, on a tensor that does not climb, would be NaN.
        tt += tl.where(kind == 0, 0.0, v * v)
    index = first + tl.program_id(0)
    tl.store(sums + index, tl.sum(gg))
    tl.store(sums + 3 * num_sums + index, tl.sum(tt))


@triton.jit
def climb_kernel(
    v_table, w_table, plan, num_blocks, sums, num_sums, rho, eps, scale, eta,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, on_device: tl.constexpr,
):  # fmt: skip
    """`w <- w + rho * T^2 v / (||T v|| + eps)`."""
    step = _step(sums, num_sums, rho, eps, scale, padded, on_device)
    for index in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        block = num_blocks - 1 - index
        start, left = _in_tensors(v_table, plan, block, num_blocks, dtype)
        v = _load(start, left, size).to(tl.float32)
        start, left = _in_tensors(w_table, plan, block, num_blocks, dtype)
        w = _load(start, left, size).to(tl.float32)
        kind = _kind(plan, block, num_blocks)
        scaling = _scaling(kind, w, eta)
        # A step of 0 along an infinite vector would be NaN.
        moved = tl.where((step == 0.0) | (kind == 0), w, w + step * (scaling * scaling * v))
        _store(start, moved.to(dtype), left, size)


@triton.jit
def _restore(
    w_table, plan, block, num_blocks, w_copy,
    dtype: tl.constexpr, size: tl.constexpr, is_low: tl.constexpr,
):  # fmt: skip
    start, left = _in_copy(w_copy, plan, block, num_blocks)
    w = _load(start, left, size)
    start, left = _in_tensors(w_table, plan, block, num_blocks, dtype)
    if is_low:
        # A tensor that does not climb has not moved, and its copy holds `g`.
        left = tl.where(_kind(plan, block, num_blocks) == 0, 0, left)
    _store(start, w, left, size)


@triton.jit
def restore_kernel(
    w_table, plan, num_blocks, w_copy,
    dtype: tl.constexpr, size: tl.constexpr, is_low: tl.constexpr,
):  # fmt: skip
    """`w <- w_copy`."""
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        _restore(w_table, plan, block, num_blocks, w_copy, dtype, size, is_low)


@triton.jit
def _gradients(
    w_table, p_table, plan, block, num_blocks, g_copy, w_copy, step, eta,
    dtype: tl.constexpr, size: tl.constexpr, is_low: tl.constexpr,
):  # fmt: skip
    """`g`, from its copy or from the climb; `g_p`; and the address for the direction."""
    address, p_left = _in_tensors(p_table, plan, block, num_blocks, dtype)
    p = _load(address, p_left, size).to(tl.float32)
    if is_low:
        kind = _kind(plan, block, num_blocks)
        start, left = _in_copy(w_copy, plan, block, num_blocks)
        w = _load(start, left, size).to(tl.float32)
        start, left = _in_tensors(w_table, plan, block, num_blocks, dtype)
        delta = _load(start, left, size).to(tl.float32) - w
        scaling = _scaling(kind, w, eta)
        slope = step * scaling * scaling
        # Without a climb, the second pass ran at the same weights as the first, so g_p is g.
        climbed = tl.where(slope == 0.0, p, tl.div_rn(delta, tl.where(slope == 0.0, 1.0, slope)))
        g = tl.where(kind == 0, w, climbed)
    else:
        start, left = _in_copy(g_copy, plan, block, num_blocks)
        g = _load(start, left, size).to(tl.float32)
    return g, p, address, p_left


@triton.jit
def products_kernel(
    w_table, p_table, plan, num_blocks, g_copy, w_copy, sums, num_sums, first,
    rho, eps, scale, eta,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, on_device: tl.constexpr,
    is_low: tl.constexpr,
):  # fmt: skip
    """Partial sums of `<g, g_p>` and `||g_p||^2`."""
    step = _step(sums, num_sums, rho, eps, scale, padded, on_device)
    gp = tl.zeros((size,), tl.float32)
    pp = tl.zeros((size,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        g, p, _, _ = _gradients(
            w_table, p_table, plan, block, num_blocks, g_copy, w_copy, step, eta,
            dtype, size, is_low,
        )  # fmt: skip
        gp += g * p
        pp += p * p
    index = first + tl.program_id(0)
    tl.store(sums + num_sums + index, tl.sum(gp))
    tl.store(sums + 2 * num_sums + index, tl.sum(pp))


@triton.jit
def combine_kernel(
    w_table, p_table, plan, num_blocks, g_copy, w_copy, sums, num_sums,
    rho, eps, scale, eta, a_0, b_0, a_1, b_1,
    dtype: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, on_device: tl.constexpr,
    is_low: tl.constexpr,
):  # fmt: skip
    """`g_p <- a * g + b * g_p`, rounded once, and `w <- w_copy`."""
    step = _step(sums, num_sums, rho, eps, scale, padded, on_device)
    gp = _total(sums, 1, num_sums, padded)
    gg, pp = _total(sums, 0, num_sums, padded), _total(sums, 2, num_sums, padded)
    a = _number(a_0, on_device) + _share(_number(a_1, on_device), gp, gg)
    b = _number(b_0, on_device) + _share(_number(b_1, on_device), gp, pp)
    for index in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        block = num_blocks - 1 - index
        g, p, start, left = _gradients(
            w_table, p_table, plan, block, num_blocks, g_copy, w_copy, step, eta,
            dtype, size, is_low,
        )  # fmt: skip
        _store(start, (a * g + b * p).to(dtype), left, size)
        _restore(w_table, plan, block, num_blocks, w_copy, dtype, size, is_low)
