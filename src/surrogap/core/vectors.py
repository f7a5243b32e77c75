"""One long vector made of many tensors.

The mathematics speaks of `w` and `g` as vectors; a network holds them in hundreds of pieces, on
several devices and in several dtypes perhaps. A `Layout` gives each piece its place in a few flat
buffers, one for each (device, dtype, kind); a `Vector` is such a set of buffers. Copies in and out
are fused over all pieces, and the arithmetic between runs on the flat buffers, so its cost in
kernel launches does not grow with the number of parameters.

Numbers in half precision are widened to float32 for all arithmetic, a chunk at a time, and rounded
once when they are stored.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple, Self

import torch
from torch import Tensor

# Elements handled at a time: on a CPU what fits its caches, elsewhere what bounds the memory for
# widened copies at 64 MiB each.
_CHUNK_CPU = 2**18
_CHUNK_DEVICE = 2**24
# Pieces start at multiples of this many elements, so that every kernel may use wide loads.
_ALIGNMENT = 8


class Group(NamedTuple):
    """What the pieces in one flat buffer have in common."""

    device: torch.device
    dtype: torch.dtype
    kind: Hashable


class _Place(NamedTuple):
    buffer: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Layout:
    """Where each of `tensors` lies in flat buffers.

    Args:
        tensors: The pieces. Only their device, dtype, shape and strides matter.
        kinds: A label for each piece, or none; pieces with different labels lie in different
            buffers.
    """

    def __init__(self, tensors: Sequence[Tensor], kinds: Sequence[Hashable] = ()) -> None:
        self.groups: list[Group] = []
        self.lengths: list[int] = []
        self.members: list[list[int]] = []
        self._places: list[_Place] = []
        buffers: dict[Group, int] = {}
        for index, tensor in enumerate(tensors):
            group = Group(tensor.device, tensor.dtype, kinds[index] if kinds else None)
            buffer = buffers.setdefault(group, len(buffers))
            if buffer == len(self.groups):
                self.groups.append(group)
                self.lengths.append(0)
                self.members.append([])
            place = _Place(buffer, tensor.shape, _dense_stride(tensor), self.lengths[buffer])
            self._places.append(place)
            self.members[buffer].append(index)
            self.lengths[buffer] += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Each piece as a view of `flats`, with its own shape and strides."""
        return [
            flats[buffer].as_strided(shape, stride, offset)
            for buffer, shape, stride, offset in self._places
        ]


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy that keeps the memory format and has no holes."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor).stride()


class Vector:
    """A vector of zeros with the pieces of `layout`.

    Args:
        layout: Where the pieces lie.
        wide: Whether to hold half precision as float32.

    Attributes:
        flats: One flat buffer for each of `layout.groups`.
        views: Each piece as a view of its buffer.
    """

    def __init__(self, layout: Layout, *, wide: bool = False) -> None:
        self.layout = layout
        self.flats = [
            torch.zeros(
                length,
                dtype=_wide(group.dtype) if wide else group.dtype,
                device=group.device,
            )
            for group, length in zip(layout.groups, layout.lengths, strict=True)
        ]
        self.views = layout.views(self.flats)

    def read_(self, tensors: Sequence[Tensor | None]) -> Self:
        """Copies `tensors` into the pieces; None stands for zeros."""
        for members in self.layout.members:
            here: list[Tensor] = []
            there: list[Tensor] = []
            for index in members:
                tensor = tensors[index]
                if tensor is None:
                    self.views[index].zero_()
                else:
                    here.append(self.views[index])
                    there.append(tensor)
            _copy_(here, there)
        return self

    def write_to_(self, tensors: Sequence[Tensor]) -> None:
        """Copies the pieces into `tensors`, in place."""
        for members in self.layout.members:
            _copy_([tensors[index] for index in members], [self.views[index] for index in members])


def _copy_(into: list[Tensor], source: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, source)


def dot(x: Vector, y: Vector) -> list[Tensor]:
    """The inner product `<x, y>`, in parts: one scalar for each buffer, at least float32."""
    return [
        flat_dot((widened(a), widened(b)) for a, b in chunks(x_flat, y_flat))
        for x_flat, y_flat in zip(x.flats, y.flats, strict=True)
    ]


def flat_dot(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of the inner products of pairs of flat tensors."""
    return torch.stack([_dot(a, b) for a, b in pairs]).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    # On a CPU torch.dot adds in order, to 4e-7 over 2**18 elements in float32; sum adds pairwise,
    # to 1e-7.
    return (a * b).sum() if a.device.type == "cpu" else torch.dot(a, b)


def total(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of scalars that may lie on several devices, on `device`."""
    return reduce(add, (part.to(device) for part in parts))


def combine_(a: Tensor, x: Vector, b: Tensor, y: Vector) -> Vector:
    """`y <- a * x + b * y`, rounded once; `a` and `b` are scalars, on any device."""
    for x_flat, y_flat in zip(x.flats, y.flats, strict=True):
        a_here, b_here = scalar_for(y_flat, a), scalar_for(y_flat, b)
        for x_chunk, y_chunk in chunks(x_flat, y_flat):
            result = widened(y_chunk).mul_(b_here).addcmul_(widened(x_chunk), a_here)
            if result is not y_chunk:  # it was widened, so the result lies in a copy
                y_chunk.copy_(result)
    return y


def chunks(*flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of one length, cut at the same places."""
    size = _CHUNK_CPU if flats[0].device.type == "cpu" else _CHUNK_DEVICE
    return zip(*(torch.split(flat, size) for flat in flats), strict=True)


def widened(tensor: Tensor) -> Tensor:
    """`tensor` itself, or its copy in float32 if it has half precision."""
    return tensor.to(_wide(tensor.dtype))


def scalar_for(flat: Tensor, scalar: Tensor) -> Tensor:
    """`scalar` where `flat` lies, ready for arithmetic with `widened(flat)`.

    The dtype matters: beside a tensor in half precision, torch would first round the scalar to it.
    """
    return scalar.to(device=flat.device, dtype=_wide(flat.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
