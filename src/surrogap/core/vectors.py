"""Vectors: many tensors as a few flat ones.

In formulas `w` and `g` are vectors; a model holds them in hundreds of tensors, perhaps on several
devices and in several dtypes. A `Layout` sorts the tensors into groups, and a `Vector` holds each
group as one flat tensor. Copies to and from a vector are fused over all tensors, and the number of
kernel launches of its arithmetic does not depend on the number of tensors.

Half precision is converted to float32 for all arithmetic, a chunk at a time, and rounded once when
the result is stored.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch._C._nn import flatten_dense_tensors, unflatten_dense_tensors
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# One tensor for each parameter; None if it has no gradient, which counts as zero.
Gradients = list[Tensor | None]

# The number of elements in a chunk: on a CPU it fits into the caches, elsewhere it limits each
# intermediate result to 16 MiB.
_CHUNK_CPU = 2**18
_CHUNK_DEVICE = 2**22


def apart(gradients: Gradients) -> Gradients:
    """Return `gradients`, or copies if two share memory, before they are modified in place.

    Autograd gives `p` and `q` the same memory for a loss that depends on `p.view(-1) + q.view(-1)`.
    """
    addresses = [g.data_ptr() for g in gradients if g is not None and g.numel()]
    if len(set(addresses)) == len(addresses):
        return gradients
    return [None if gradient is None else gradient.clone() for gradient in gradients]


def groups_of(tensors: Sequence[Tensor], labels: Sequence[Hashable] = ()) -> list[list[int]]:
    """Return the indices of the tensors in groups of one device, dtype and label."""
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        label = labels[index] if labels else None
        groups.setdefault((tensor.device, tensor.dtype, label), []).append(index)
    return list(groups.values())


class Layout:
    """A layout of `tensors` in flat tensors, one for each device, dtype and label.

    Attributes:
        pieces: The tensors, whose shapes and memory formats the views of a vector have.
        members: The indices of the pieces of each group.
        strides: The strides of the pieces that are not contiguous, in a dense copy.
    """

    def __init__(self, tensors: Sequence[Tensor], labels: Sequence[Hashable] = ()) -> None:
        self.members = groups_of(tensors, labels)
        self.pieces = tensors
        # For memory formats such as channels_last.
        self.strides = {
            index: torch.empty_like(tensor).stride()
            for index, tensor in enumerate(tensors)
            if not tensor.is_contiguous()
        }

    def read(self, tensors: Sequence[Tensor | None]) -> "Vector":
        """Return an exact copy of `tensors` as a vector; None stands for zeros."""
        flats = []
        for members in self.members:
            group = [self._in_order(index, tensors[index]) for index in members]
            flat = flatten_dense_tensors(group)
            # For a single tensor torch returns a view.
            flats.append(flat.clone() if len(group) == 1 else flat)
        return Vector(self, flats)

    def _in_order(self, index: int, tensor: Tensor | None) -> Tensor:
        """Return `tensor` so that row-major order is the order of the piece in memory."""
        if tensor is None:
            return torch.zeros_like(self.pieces[index]).reshape(-1)
        if (stride := self.strides.get(index)) is None:
            return tensor
        if tensor.stride() != stride:
            tensor = torch.empty_strided(
                tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class Vector:
    """A vector, as one flat tensor for each group of its layout."""

    def __init__(self, layout: Layout, flats: list[Tensor]) -> None:
        self.layout = layout
        self.flats = flats

    def views(self) -> list[Tensor]:
        """Return the pieces as views, each with its shape and memory format."""
        layout = self.layout
        views: list[Tensor] = [torch.Tensor()] * len(layout.pieces)
        for members, flat in zip(layout.members, self.flats, strict=True):
            pieces = unflatten_dense_tensors(flat, [layout.pieces[index] for index in members])
            for index, view in zip(members, pieces, strict=True):
                views[index] = view
        for index, stride in layout.strides.items():
            views[index] = views[index].as_strided(views[index].shape, stride)
        return views

    def widened(self) -> "Vector":
        """Return a copy, in float32 if the vector has half precision."""
        return Vector(self.layout, [flat.to(wide(flat.dtype), copy=True) for flat in self.flats])

    @torch.no_grad()
    def write_to_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the pieces into `tensors`, in place.

        The version counters of the tensors do not change, so autograd graphs that were built with
        the weights before they moved stay valid once the weights are restored.
        """
        views = self.views()
        for members in self.layout.members:
            into = tuple([tensors[index] for index in members])
            with _unsafe_preserve_version_counter(into):
                torch._foreach_copy_(into, [views[index] for index in members])


def dot(x: Vector, y: Vector) -> list[Tensor]:
    """Return the terms of `<x, y>`: one scalar for each group, at least float32."""
    return [
        flat_dot((widened(a), widened(b)) for a, b in chunks(x_flat, y_flat))
        for x_flat, y_flat in zip(x.flats, y.flats, strict=True)
    ]


def flat_dot(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of the inner products of pairs of flat tensors."""
    parts = [_dot(a, b) for a, b in pairs]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    # On a CPU torch.dot adds sequentially, with a relative error of 4e-7 for 2**18 elements in
    # float32; sum adds pairwise, with an error of 1e-7.
    return (a * b).sum() if a.device.type == "cpu" else torch.dot(a, b)


def squared_norm(gradients: Gradients, like: Tensor) -> Tensor:
    """Return the sum of all squares, as a scalar of at least float32.

    Args:
        gradients: The gradients of some parameters.
        like: One of these parameters, whose device and dtype they all have.
    """
    # In float32 a CPU would add sequentially, with an error of 2% for 10^8 elements.
    dtype = torch.float64 if like.device.type == "cpu" else wide(like.dtype)
    present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not present:
        return torch.zeros((), dtype=dtype, device=like.device)
    return torch.stack(torch._foreach_norm(present, 2, dtype=dtype)).square().sum()


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars on several devices, on the device of the first."""
    return reduce(add, (part.to(parts[0].device) for part in parts))


def combine_(a: Tensor, x: Vector, b: Tensor, y: Vector) -> Vector:
    """Compute `y <- a * x + b * y`, rounded once; `a` and `b` are scalars on any device."""
    for x_flat, y_flat in zip(x.flats, y.flats, strict=True):
        a_here, b_here = scalar_for(y_flat, a), scalar_for(y_flat, b)
        for x_chunk, y_chunk in chunks(x_flat, y_flat):
            result = widened(y_chunk).mul_(b_here).addcmul_(widened(x_chunk), a_here)
            if result is not y_chunk:  # it was widened, so the result is a copy
                y_chunk.copy_(result)
    return y


def scale_(gradients: Gradients, factor: Tensor) -> None:
    """Multiply gradients in place by a scalar on any device, rounded once."""
    present = [gradient for gradient in gradients if gradient is not None]
    for members in groups_of(present):
        group = [present[index] for index in members]
        factor_here = scalar_for(group[0], factor)
        if group[0].dtype == factor_here.dtype:
            torch._foreach_mul_(group, factor_here)
            continue
        for gradient in group:
            gradient.copy_(widened(gradient).mul_(factor_here))


def chunks(*flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split flat tensors of equal length into chunks."""
    size = _CHUNK_CPU if flats[0].device.type == "cpu" else _CHUNK_DEVICE
    if flats[0].numel() <= size:
        return iter([flats])
    return zip(*(torch.split(flat, size) for flat in flats), strict=True)


def widened(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy in float32 if it has half precision."""
    return tensor.to(wide(tensor.dtype))


def scalar_for(flat: Tensor, scalar: Tensor) -> Tensor:
    """Return `scalar` on the device of `flat`, for arithmetic with `widened(flat)`.

    In arithmetic with half precision, torch would first round the scalar to half precision.
    """
    return scalar.to(device=flat.device, dtype=wide(flat.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for arithmetic with numbers of `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)
